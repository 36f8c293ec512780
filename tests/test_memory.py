"""Counting the bytes that are alive."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from t1lib.memory import LiveBytes


def test_what_is_alive_is_counted():
    kept = torch.zeros(100)
    with LiveBytes() as live:
        first = kept + 1
        view = first.view(10, 10)
        del first
        assert live.now == live.peak == 400
        view = (view + kept.view(10, 10)).sum()
        assert live.now == view.nbytes and live.peak == 804 and live.largest == 400


def test_what_runs_while_bytes_are_counted_is_compiled_later():
    """Dynamo leaves functions alone for good that first ran within a mode of another kind."""
    graphs = []

    @torch.compile(backend=lambda graph, given: graphs.append(graph) or graph.forward, fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with LiveBytes():
        double(torch.ones(3))
    assert torch.equal(double(torch.ones(4)), torch.full((4,), 2.0)) and graphs


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_while_bytes_are_counted():
    with LiveBytes() as live, torch.no_grad():
        flex_attention(*torch.randn(3, 1, 2, 16, 8))
    assert live.peak > 0
