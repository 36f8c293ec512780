"""Head `full`, the specification, against PyTorch's cross_entropy and, for what PyTorch lacks, plain formulas."""

import pytest
import torch
import torch.nn.functional as F
from head_cases import REDUCTIONS, SHAPES, assert_close, options, problem, run, upstream_for

from t1lib.heads import linear_cross_entropy


def leaves(p):
    return [t.detach().requires_grad_() for t in (p.e, p.w, p.b) if t is not None]


def gradients(loss, operands):
    return [loss.detach(), *torch.autograd.grad(loss, operands, upstream_for(loss))]


@pytest.mark.parametrize("name", ["plain", "weight", "smoothing", "weighted smoothing"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_is_cross_entropy_of_linear(name, reduction):
    for shape, bias in zip(SHAPES, (True, False, True), strict=True):
        p = problem(*shape, bias=bias)
        kwargs = options(name, p) | {"reduction": reduction}
        operands = leaves(p)
        want = gradients(F.cross_entropy(F.linear(*operands), p.target, **kwargs), operands)
        assert_close(run("full", p, **kwargs), want, 1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_extensions_follow_the_equation(reduction):
    """Every option at once, written out token by token."""
    p = problem(37, 257, 16)
    o = options("all", p)
    e, w, b = operands = leaves(p)
    losses, below = [], []
    for n, y in enumerate(p.target.tolist()):
        z = o["softcap"] * torch.tanh((w @ e[n] + b) / o["softcap"])
        lse, c, t = z.exp().sum().log(), o["weight"], o["token_weight"][n]
        hard, even = c[y] * (lse - z[y]), (c * (lse - z)).mean()
        loss = t * (0.7 * hard + 0.3 * even + o["z_loss"] * lse**2)
        losses.append(loss if y != -100 else 0.0 * loss)
        below.append(t * c[y] if y != -100 else 0.0 * t)
    losses = torch.stack(losses)
    want = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / sum(below)}[reduction]
    assert_close(run("full", p, reduction=reduction, **o), gradients(want, operands), 1e-12)


def test_filter_drops_exactly_the_small_entries():
    p = problem(37, 257, 16, ignored=False)
    eps = 2e-3
    delta = torch.softmax(F.linear(p.e, p.w, p.b), -1) - F.one_hot(p.target, 257)
    dz = torch.where(delta.abs() < eps, 0.0, delta)
    assert 0.05 < (dz == 0).double().mean() < 0.95
    loss, de, dw, db = run("full", p, torch.tensor(1.0), filter_eps=eps, reduction="sum")
    assert_close([de, dw, db], [dz @ p.w, dz.T @ p.e, dz.sum(0)], 1e-12)
    assert loss == run("full", p, reduction="sum")[0]


def test_sixteen_bit_operands_give_a_float32_loss():
    p = problem(5, 257, 16, dtype=torch.bfloat16)
    loss = linear_cross_entropy(p.e, p.w, p.target, head="full", linear_bias=p.b)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(p.e, p.w, p.b).float(), p.target), rtol=3e-7, atol=0)


def test_has_second_derivatives(dtype=torch.float64, device="cpu"):
    """257 classes: on CUDA the rows of logits are padded."""
    p = problem(9, 257, 16, dtype=dtype, device=device)

    def second(loss, operands):
        first = torch.autograd.grad(loss, operands, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), operands)]

    mine, theirs = leaves(p), leaves(p)
    got = second(linear_cross_entropy(*mine[:2], p.target, head="full", linear_bias=mine[2]), mine)
    want = second(F.cross_entropy(F.linear(*theirs), p.target), theirs)
    assert_close(got, want, 3e-6 if dtype == torch.float32 else 1e-12)
