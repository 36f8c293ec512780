"""A sharded output layer, in a group of one process; the smoke run checks that two processes agree with one."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from t1lib.measure import parallel
from t1lib.measure.parallel import Share, measure_head, ran
from t1lib.measure.records import Records, statuses

CPU = torch.device("cpu")
SHAPE = dict(tokens=24, vocabulary=50, hidden=8, dtype="float32", seed=0, reference="float64")
RULES = dict(phase="head/1", heads=["full", "chunked"], workspace="1MiB", iters=3, warmup=1, error_bound=1e-5)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measured(**changes):
    records = Records()
    measure_head(records, CPU, **RULES | SHAPE | changes)
    found = {}
    for row in records.rows:
        found.setdefault((row["variant"], row["metric"]), []).append(row["value"])
    return found, statuses(records.frame())


def test_heads_are_checked_then_their_memory_taken_then_timed_in_turn_with_the_products():
    found, states = measured()
    assert states == {"full": "ok", "chunked": "ok"}
    for head in RULES["heads"]:
        assert 0 < found[head, "error_dW"][0] < 1e-6 and len(found[head, "both_ms"]) == 3
        parts = [found[head, f"{part}_mib"][0] for part in ("weight", "dW", "hidden", "dE", "workspace")]
        assert parts[:4] == [x / 2**20 for x in (50 * 8 * 4, 50 * 8 * 4, 24 * 8 * 4, 24 * 8 * 4)]
        assert found[head, "held_mib"] == [sum(parts)]
    assert len(found["floor", "dW_ms"]) == 3
    assert ("chunked", "collectives_ms") not in found  # one rank runs the ordinary head


def test_what_is_wrong_or_shares_a_gpu_gets_no_time_and_what_cannot_run_is_a_status(monkeypatch):
    found, states = measured(error_bound=1e-12)
    assert states == {"full": "wrong", "chunked": "wrong"} and ("full", "error_dE") in found
    assert not any("both" in metric for _, metric in found)
    for gpus, status in ((1, "ok"), (0, "shared")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert ran(torch.device("cuda")) == status
    monkeypatch.setattr(parallel, "ran", lambda device: "shared")
    found, states = measured()
    assert states == {"full": "shared", "chunked": "shared"} and ("full", "held_mib") in found
    assert not any("ms" in metric for _, metric in found)

    monkeypatch.undo()
    results = [torch.OutOfMemoryError("too large"), {"error_dW": 0.0}]
    monkeypatch.setattr(Share, "errors", Mock(side_effect=results))
    found, states = measured(heads=["full", "fused", "chunked"])
    assert states == {"full": "oom", "fused": "unavailable", "chunked": "ok"} and ("chunked", "both_ms") in found
