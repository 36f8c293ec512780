"""Two processes with a CUDA device each, or with one that they share, train as one does, through NCCL. One pair of
processes runs all cases."""

import pytest
import several_tasks
import torch

from t1lib.measure.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ADAMW = {"name": "adamw", "lr": 1e-3}
SGD = {"mode": "slide", "dtype": "float32", "steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}}
MODES = {
    "fsdp": {"mode": "fsdp", "offload": False},
    "fsdp, offload": {"mode": "fsdp", "offload": True},
    "slide, host": {"update": "host"},
    "slide, device": {"update": "device"},
    "slide, both": {"update": "both", "resident": 1, "keep": 2, "grad_slots": 1},
}
SHARED = {"plain": {}, "clipped": {"max_grad_norm": 1.0, "micro_batch": 1}}
EXACT = {f"{m}, {s}": SGD | own | {"shared": shared} for m, own in MODES.items() for s, shared in SHARED.items()}
NARROW = {"dtype": "bfloat16", "steps": 20, "optimizer": ADAMW | {"master_weights": True}, "shared": {}}
MASTERS = {"fsdp": NARROW | MODES["fsdp"], "slide": NARROW | {"mode": "slide", "update": "both"}}
AGAIN = {"mode": "slide", "update": "both", "dtype": "float32", "steps": 30, "optimizer": ADAMW, "shared": {}}
CASES = EXACT | {f"masters, {m}": s for m, s in MASTERS.items()} | {f"again {i}": AGAIN for i in range(2)}


@pytest.fixture(scope="module")
def trained():
    """(case, who trained, what) → values."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in run_ranks(several_tasks.train_all, {"cases": CASES}, 2, "cuda", 240.0, threads=4):
        found.setdefault((row["phase"], row["variant"], row["metric"]), []).append(row["value"])
    return found


@pytest.mark.parametrize("case", EXACT)
def test_two_processes_train_as_one(trained, case):
    alone, together = (trained[case, who, "loss"] for who in ("alone", "together"))
    assert alone[-1] < alone[0] - 0.02
    assert together == pytest.approx(alone, rel=1e-4)
    assert trained[case, "together", "apart"][0] < 1e-2


@pytest.mark.parametrize("mode", MASTERS)
def test_in_sixteen_bits_with_masters_they_come_as_far(trained, mode):
    alone, together = (trained[f"masters, {mode}", who, "loss"] for who in ("alone", "together"))
    assert alone[-1] < alone[0] - 0.5
    assert together == pytest.approx(alone, rel=1e-2)


def test_what_waits_for_the_other_gets_no_stale_weights(trained):
    """Two identical runs have bitwise equal losses."""
    assert trained["again 0", "together", "loss"] == trained["again 1", "together", "loss"]
