"""State of 16-bit parameters: split masters are exact, 16-bit moments are right on average; both are in checkpoints."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_parity import assert_same, batches, model, run

from t1lib.errors import T1Error
from t1lib.train import OptimizerSpec, make_trainer
from t1lib.train.narrow import Scratch, join, split
from t1lib.train.optim import Updater
from t1lib.train.spec import state_bytes

ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "master_weights": True}
SPLIT, SHORT = {"split_master": True}, {"moments": "bfloat16"}


def every_half() -> torch.Tensor:
    """float32 values of all exponents, with every kind of bits beyond those of bfloat16, ties included."""
    high = torch.arange(-(2**15), 2**15, 37, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    wide = (high[:, None] | low).flatten().view(torch.float32)
    return wide[wide.isfinite()]


def test_a_split_master_is_the_master():
    wide = every_half()
    high, low = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=torch.int16)
    split(wide.clone(), high, low)
    assert torch.equal(join(high, low).view(torch.int32), wide.view(torch.int32))
    ties = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[~ties], wide.bfloat16()[~ties])


def test_a_factor_of_narrow_gradients_is_not_rounded():
    grad = torch.randn(1000).bfloat16()
    Updater({"w": torch.zeros(1000, dtype=torch.bfloat16)}, OptimizerSpec()).step(
        {"w": (found := grad.clone())}, 1.0, 0.0123
    )
    assert torch.equal(found, (grad.double() * 0.0123).bfloat16())


def test_split_masters_are_for_bfloat16():
    spec = OptimizerSpec(**ADAMW, **SPLIT)
    with pytest.raises(T1Error, match=r"split_master with 'w' of torch.float16; allowed: torch.bfloat16"):
        Updater({"w": torch.zeros(4, dtype=torch.float16)}, spec)
    Updater({"w": torch.zeros(4, dtype=torch.bfloat16), "wide": torch.zeros(4)}, spec)


def test_rounding_by_chance_is_right_on_average():
    wide = torch.linspace(1.0, 2.0, 4099)
    scratch, total, count = Scratch(), torch.zeros(4099), 400
    for step in range(count):
        out = torch.empty(4099, dtype=torch.bfloat16)
        scratch.round_by_chance(wide.clone(), out, step)
        assert ((out.float() - wide).abs() < 2**-7).all()
        total += out
    assert (total / count - wide).abs().mean() < 2**-7 / count**0.5


@pytest.mark.parametrize("own", [SPLIT, SHORT], ids=str)
def test_updates_follow_those_in_float32(own):
    """A second moment that changes by a thousandth per step would never move if it were rounded to nearest."""
    torch.manual_seed(0)
    start = torch.randn(50, 70).bfloat16()
    plain, lean = start.clone(), start.clone()
    updaters = Updater({"w": plain}, OptimizerSpec(**ADAMW)), Updater({"w": lean}, OptimizerSpec(**ADAMW, **own))
    for step in range(300):
        grad = (torch.randn(50, 70) * (10 if step < 20 else 0.1)).bfloat16()
        for updater in updaters:
            updater.step({"w": grad.clone()})
    a, b = (u.state_of("w") for u in updaters)
    moved = (a["master"] - start.float()).norm()
    assert (a["master"] - b["master"]).norm() <= (0 if "split_master" in own else 0.02) * moved
    for key in ("exp_avg", "exp_avg_sq"):
        assert (a[key] - b[key].float()).norm() <= (0 if "split_master" in own else 0.1) * a[key].norm()


@pytest.mark.parametrize("own", [SPLIT, SHORT, SPLIT | SHORT], ids=str)
@pytest.mark.parametrize("first, second", [("slide", "slide"), ("gpu", "slide"), ("slide", "gpu")])
def test_resume(first, second, own, tmp_path):
    spec, data = OptimizerSpec(**ADAMW, **own), batches(4)
    losses, state = run(make_trainer(model("qwen3", torch.bfloat16), "slide", optimizer=spec), data)
    begun, saved = run(make_trainer(model("qwen3", torch.bfloat16), first, optimizer=spec), data[:2])
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed = make_trainer(model("qwen3", torch.bfloat16), second, optimizer=spec)
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    rest, final = run(resumed, data[2:])
    assert begun + rest == losses
    assert_same(state, final)


def test_bytes_a_parameter():
    """State of a 2-byte parameter: 12 bytes in float32, 8 with 16-bit moments, 6 with a split master as well."""
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    for own, expected in (({}, 12), ({"moments": "bfloat16"}, 8), ({"moments": "bfloat16", "split_master": True}, 6)):
        held = sum(t.nbytes for t in Updater({"w": weight}, OptimizerSpec(**ADAMW, **own)).state_tensors())
        assert held == expected * 1000 + 4
        assert state_bytes(weight, OptimizerSpec(**ADAMW, **own)) == expected * 1000


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_by_the_interpreter():
    """In a separate process: Triton decides on import whether kernels are interpreted."""
    cases = Path(__file__).parent / "adamw_interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cases.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
