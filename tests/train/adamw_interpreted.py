"""The one-pass AdamW through Triton's interpreter, which must be on before Triton is imported: see test_optim.py."""

import os

import pytest
import torch
from t1lib.train.fused_adamw import BLOCK, adamw_
from t1lib.train.optim import Updater

from t1lib.train import OptimizerSpec
from t1lib.train.narrow import join

assert os.environ.get("TRITON_INTERPRET") == "1"
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "master_weights": True}
SPLIT, SHORT = {"split_master": True}, {"moments": "bfloat16"}
ITS_OWN = (BLOCK + 37,)  # the last block is not full


def state_of(weight: torch.Tensor, **own) -> dict[str, torch.Tensor]:
    return Updater({"w": weight}, OptimizerSpec(**ADAMW, **own)).state["w"]


@pytest.mark.parametrize("scale", [1.0, 0.25, torch.tensor(0.25)], ids=["plain", "number", "tensor"])
@pytest.mark.parametrize(
    "own, dtype", [({}, torch.float16), (SPLIT, torch.bfloat16), ({"betas": (0.0, 0.95)}, torch.float16)], ids=str
)
def test_updates_as_pytorchs_own(own, dtype, scale):
    """Up to rounding: the error against float64 is at most about twice that of PyTorch's."""
    torch.manual_seed(0)
    spec, start = OptimizerSpec(**ADAMW, **own), torch.randn(ITS_OWN).to(dtype)
    weight, wide, exact = start.clone(), start.float(), start.double().requires_grad_()
    state = state_of(weight, **own)
    plain = Updater({"w": wide}, OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1, betas=spec.betas))
    reference = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.1, betas=spec.betas)
    for step in range(5):
        grad = (torch.randn(ITS_OWN) * 10.0 ** (step - 2)).to(dtype)
        state["step"] += 1
        adamw_(weight, grad, state, spec, spec.lr, scale)
        exact.grad = grad.double() * float(scale)
        plain.step({"w": exact.grad.float()})
        reference.step()
        master = join(weight, state["low"]) if "low" in state else state["master"]
        error, own_error = ((x - exact.detach()).norm() for x in (master, wide))
        assert error <= 2 * own_error + 1e-7
        assert torch.allclose(weight.float(), master, rtol=2**-8 if dtype == torch.bfloat16 else 2**-11)
    for key in ("exp_avg", "exp_avg_sq"):
        assert (state[key] - plain.state["w"][key]).norm() <= 1e-6 * state[key].norm()


@pytest.mark.parametrize("own", [SHORT, SPLIT | SHORT], ids=str)
def test_narrow_moments_are_right_on_average(own):
    torch.manual_seed(0)
    size = (4 * BLOCK,)
    start = torch.randn(size).bfloat16()
    plain, lean, spec = start.clone(), start.clone(), OptimizerSpec(**ADAMW, **own)
    updater, state = Updater({"w": plain}, OptimizerSpec(**ADAMW)), state_of(lean, **own)
    for step in range(100):
        grad = (torch.randn(size) * (10 if step < 20 else 0.1)).bfloat16()
        updater.step({"w": grad.clone()})
        state["step"] += 1
        adamw_(lean, grad, state, spec, spec.lr)
    wanted = updater.state["w"]
    for key in ("exp_avg", "exp_avg_sq"):
        error = state[key].float() - wanted[key]
        assert error.norm() <= 0.1 * wanted[key].norm()
        assert error.mean().abs() <= 0.002 * wanted[key].abs().mean()
    master = join(lean, state["low"]) if "low" in state else state["master"]
    assert (master - wanted["master"]).norm() <= 0.02 * (wanted["master"] - start.float()).norm()


def test_the_noise_is_that_of_the_step():
    spec, moments = OptimizerSpec(**ADAMW, **SHORT), []
    for step in (3, 3, 4):
        weight = torch.ones(BLOCK).bfloat16()
        state = state_of(weight, **SHORT)
        state["step"].fill_(step)
        adamw_(weight, torch.full_like(weight, 0.3), state, spec, spec.lr)
        assert len(state["exp_avg"].unique()) == 2
        assert not torch.equal(state["exp_avg"] == state["exp_avg"][0], state["exp_avg_sq"] == state["exp_avg_sq"][0])
        moments.append(state["exp_avg"])
    assert torch.equal(moments[0], moments[1]) and not torch.equal(moments[0], moments[2])


@pytest.mark.parametrize("own", [{}, SPLIT, SHORT, SPLIT | SHORT], ids=str)
def test_a_lost_update_changes_nothing(own):
    spec, weight = OptimizerSpec(**ADAMW, **own), torch.randn(ITS_OWN).bfloat16()
    state = state_of(weight, **own)
    state["step"] += 1
    grad = torch.randn(ITS_OWN).bfloat16()
    if own:  # the interpreter rounds to bfloat16 in its own way
        adamw_(weight, grad, state, spec, spec.lr, lost=torch.zeros(()))
    before = [x.clone() for x in (weight, *state.values())]
    state["step"] += 1
    before[1] += 1
    adamw_(weight, grad * torch.inf, state, spec, spec.lr, lost=torch.ones(()))
    assert all(map(torch.equal, before, (weight, *state.values())))
