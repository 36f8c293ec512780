"""The one-pass AdamW and its state through Triton's interpreter, on before the import: see test_interpreted.py."""

import os

import pytest
import torch

from t1lib.optimizers import Precision
from t1lib.train.update import BLOCK, adamw_, join, new_state, split

assert os.environ.get("TRITON_INTERPRET") == "1"
SPLIT, SHORT = {"masters": "split"}, {"moments": "bfloat16"}
UPWARD = {"betas": (0.0, 0.95), "maximize": True}
ITS_OWN = (BLOCK + 37,)  # the last block is not full


def rule(params, **own):
    """A group of `torch.optim.AdamW`, and the optimizer."""
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, **own)
    return optimizer.param_groups[0], optimizer


@pytest.mark.parametrize("scale", [None, torch.tensor(0.25)], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    "layout, own, dtype", [({}, {}, torch.float16), (SPLIT, {}, torch.bfloat16), ({}, UPWARD, torch.float16)], ids=str
)
def test_updates_as_pytorchs_own(layout, own, dtype, scale):
    """Up to rounding: the error against float64 is at most about twice that of PyTorch's in float32."""
    torch.manual_seed(0)
    start = torch.randn(ITS_OWN).to(dtype)
    weight, wide, exact = start.clone(), start.float().requires_grad_(), start.double().requires_grad_()
    (given, plain), (_, reference) = rule([wide], **own), rule([exact], **own)
    state = new_state(weight, given, Precision(**layout))
    for step in range(5):
        grad = (torch.randn(ITS_OWN) * 10.0 ** (step - 2)).to(dtype)
        adamw_(weight, grad, state, given, step + 1, scale)
        exact.grad = grad.double() * (1.0 if scale is None else float(scale))
        wide.grad = exact.grad.float()
        plain.step()
        reference.step()
        master = join(weight, state["low"]) if "low" in state else state["master"]
        error, own_error = ((x.detach() - exact.detach()).norm() for x in (master, wide))
        assert error <= 2 * own_error + 1e-7
        assert torch.allclose(weight.float(), master, rtol=2**-8 if dtype == torch.bfloat16 else 2**-11)
    for key in ("exp_avg", "exp_avg_sq"):
        assert (state[key] - plain.state[wide][key]).norm() <= 1e-6 * state[key].norm()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SHORT, SPLIT | SHORT], ids=str)
def test_narrow_moments_are_right_on_average(layout):
    torch.manual_seed(0)
    start = torch.randn(4 * BLOCK).bfloat16()
    lean, wide = start.clone(), start.float().requires_grad_()
    given, plain = rule([wide])
    state = new_state(lean, given, Precision(**layout))
    for step in range(100):
        grad = (torch.randn(4 * BLOCK) * (10 if step < 20 else 0.1)).bfloat16()
        wide.grad = grad.float()
        plain.step()
        adamw_(lean, grad, state, given, step + 1)
    for key in ("exp_avg", "exp_avg_sq"):
        wanted, error = plain.state[wide][key], state[key].float() - plain.state[wide][key]
        assert error.norm() <= 0.1 * wanted.norm()
        assert error.mean().abs() <= 0.002 * wanted.abs().mean()
    master = join(lean, state["low"]) if "low" in state else state["master"]
    assert (master - wide.detach()).norm() <= 0.02 * (wide.detach() - start.float()).norm()


def test_the_noise_is_that_of_the_step():
    moments = []
    for step in (3, 3, 4):
        weight = torch.ones(BLOCK).bfloat16()
        given, _ = rule([weight.float().requires_grad_()])
        state = new_state(weight, given, Precision(**SHORT))
        adamw_(weight, torch.full_like(weight, 0.3), state, given, step)
        assert len(state["exp_avg"].unique()) == 2
        assert not torch.equal(state["exp_avg"] == state["exp_avg"][0], state["exp_avg_sq"] == state["exp_avg_sq"][0])
        moments.append(state["exp_avg"])
    assert torch.equal(moments[0], moments[1]) and not torch.equal(moments[0], moments[2])


def test_a_zero_beside_a_negative_remainder_trains_and_nan_stays_nan():
    weight = torch.tensor([0.0, -0.0, 0.0, 1.0] * (BLOCK // 4)).bfloat16()
    given, _ = rule([weight.float().requires_grad_()])
    state = new_state(weight, given, Precision(masters="split"))
    state["low"].fill_(-1)
    grad = torch.ones_like(weight)
    grad[2::4] = torch.tensor(0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    adamw_(weight, grad, state, given, 1)
    assert (weight[0::4] < 0).all() and (weight[1::4] < 0).all() and weight[2::4].isnan().all()
    assert not join(weight, state["low"])[3::4].isnan().any()


def test_a_master_survives_being_split():
    torch.manual_seed(0)
    master = torch.cat([torch.randn(999), torch.tensor([0.0, -0.0, torch.inf, 1.0 + 2**-8, 1.0 - 2**-9])])
    weight, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split(master.clone(), weight, low)
    assert torch.equal(join(weight, low), master)
