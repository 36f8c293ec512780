"""Layers as CUDA graphs, with a capture that works on a CPU: a replay runs on the memory that the capture saw."""

import pytest
import torch
from test_parity import assert_same, batches, model, run

from t1lib.errors import T1Error
from t1lib.train import OptimizerSpec, graphs, make_trainer

ADAMW = OptimizerSpec("adamw", lr=1e-2)


class Recorder:
    """Stands in for CUDA graphs. A replay uses parameters where they were at capture and fills the same output."""

    def __init__(self) -> None:
        self.captured, self.replayed, self.params = 0, 0, []

    def capture(self, function, other):
        places = [(p, p.data, p.grad) for p in self.params]
        before = [(grad, grad.clone()) for _, _, grad in places if grad is not None]
        self.captured += 1
        with _at(places):
            made = function()
        fixed = None if made is None else torch.full_like(made, torch.nan)

        def replay() -> None:
            self.replayed += 1
            with _at(places):
                made = function()
            if fixed is not None:
                fixed.copy_(made)

        for grad, value in before:  # a capture computes nothing
            grad.copy_(value)
        return type("Graph", (), {"replay": staticmethod(replay)})(), fixed


class _at:
    def __init__(self, places) -> None:
        self.places = places

    def __enter__(self) -> None:
        self.before = [(p, p.data, p.grad) for p, _, _ in self.places]
        _put(self.places)

    def __exit__(self, *_) -> None:
        _put(self.before)


def _put(places) -> None:
    for param, data, grad in places:
        param.data, param.grad = data, grad


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr("t1lib.train.slide.can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "capture", found.capture)
    return found


def slide(recorder, kind="qwen3", **options):
    trainer = make_trainer(model(kind), "slide", optimizer=ADAMW, **options)
    recorder.params = list(trainer.parts.layers.parameters())
    return trainer


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize(
    "options",
    [{}, {"slots": 3, "grad_slots": 1}, {"resident": 2, "keep": 1}, {"max_grad_norm": 0.1, "micro_batch": 1}],
    ids=str,
)  # fmt: skip
def test_same_bits_as_without_graphs(kind, options, recorder):
    losses, state = run(slide(recorder, kind, graph_tokens=0, **options))
    assert recorder.captured == 0
    graphed, other = run(slide(recorder, kind, **options))
    assert recorder.replayed > recorder.captured > 0
    assert graphed == losses
    assert_same(state, other)


def test_a_graph_serves_every_layer_of_its_place(recorder):
    trainer = slide(recorder)
    for batch in batches(6):
        trainer.step(batch)
    trainer.close()
    # five layers in two slots, each with a forward and a backward; the lowest layer's input needs a gradient, too
    assert recorder.captured == 4
    assert recorder.replayed > 6 * 5


def test_graphs_share_the_places_of_their_inputs_and_outputs(recorder):
    runner = graphs.LayerGraphs([torch.nn.Linear(2, 2)])
    x, y = torch.ones(2), torch.full((2,), 3.0)
    for _ in range(3):
        assert runner.run(0, "sum", torch.add, x, y).tolist() == [4.0, 4.0]
        assert runner.run(0, "difference", torch.sub, x, y).tolist() == [-2.0, -2.0]
        assert runner.run(0, "negative", torch.neg, y).tolist() == [-3.0, -3.0]
    assert recorder.captured == 3
    assert len(runner._inputs) == 2
    assert len(runner._outputs) == 1


@pytest.mark.parametrize(("width", "tokens"), [(8, 4096), (4096, 4096), (6000, 1908), (9000, 1024)])
def test_small_layers_are_launch_bound_for_more_tokens(width, tokens):
    with torch.device("meta"):
        assert graphs.launch_bound(torch.nn.Linear(width, width, bias=False)) == tokens


def test_layers_that_differ_in_more_than_weights_share_no_graph(recorder):
    plain, gemma = model("qwen3").base_model.layers, model("gemma2").base_model.layers
    assert len(set(graphs.LayerGraphs(plain)._kinds)) == 1
    assert len(set(graphs.LayerGraphs(gemma)._kinds)) == 2  # full and sliding attention
    plain[1].register_buffer("own", torch.zeros(1))
    assert len(set(graphs.LayerGraphs(plain)._kinds)) == 2


def test_changed_arguments_are_seen(recorder):
    """Another batch of the same shape, and an argument that was changed in place."""
    runner, seen = graphs.LayerGraphs([torch.nn.Linear(2, 2)]), []

    def function(x, extra):
        seen.append(1)
        return x + extra["by"][0]

    x, by = torch.zeros(2), torch.ones(2)
    for change in (0.0, 1.0, 2.0):
        by += change
        assert runner.run(0, "a", function, x, {"by": (by, None)}).tolist() == (x + by).tolist()
    other = torch.full((2,), 9.0)
    assert runner.run(0, "a", function, other, {"by": (by, None)}).tolist() == (other + by).tolist()
    assert runner.run(0, "a", function, other, {"by": (by, "else")}).tolist() == (other + by).tolist()


def test_ever_new_shapes_run_eagerly(recorder):
    runner = graphs.LayerGraphs([torch.nn.Linear(2, 2)])
    for n in range(1, graphs.LIMIT + 10):
        for _ in range(3):
            assert runner.run(0, "a", lambda x: x + 1, torch.zeros(n)).tolist() == [1.0] * n
    assert recorder.captured == graphs.LIMIT


def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(recorder, monkeypatch):
    def fail(function, other):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "capture", fail)
    runner = graphs.LayerGraphs([torch.nn.Linear(2, 2)])
    with pytest.warns(UserWarning, match="layers run without CUDA graphs: operation not permitted") as warned:
        for n in (1, 1, 1, 2, 2):
            assert runner.run(0, "a", lambda x: x + 1, torch.zeros(n)).tolist() == [1.0] * n
    assert len(warned) == 1


def test_more_tokens_than_asked_for_run_eagerly(recorder):
    run(slide(recorder, graph_tokens=10))
    assert recorder.captured == 0
    with pytest.raises(T1Error, match="graph_tokens=-1; allowed: 0 or more"):
        slide(recorder, graph_tokens=-1)
