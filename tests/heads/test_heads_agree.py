"""Head `full` against PyTorch's cross_entropy and plain formulas; every head against `full` in float64."""

import math
from functools import partial

import head_cases
import pytest
import torch
import torch.nn.functional as F
from head_cases import CHUNKED, HEADS, OPTION_SETS, REDUCTIONS, assert_close, options, problem, run, upstream_for

from t1lib.heads import linear_cross_entropy

needs_torch = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this PyTorch")
TORCH = pytest.param("torch", {}, marks=needs_torch)
VARIANTS = [*(("chunked", own) for own in ({}, {"chunks": 1000}, {"by": "vocabulary", "chunks": 6})), TORCH]
NARROW = [*((torch.bfloat16, name) for name in ("plain", "softcap", "all")), (torch.float16, "all")]
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_head = pytest.mark.parametrize("head, own", HEADS, ids=str)


def leaves(p):
    return [t.detach().requires_grad_() for t in (p.e, p.w, p.b) if t is not None]


def gradients(loss, operands):
    return [loss.detach(), *torch.autograd.grad(loss, operands, upstream_for(loss))]


@pytest.mark.parametrize("own", [{}, {"by": "vocabulary"}], ids=str)
def test_the_forwards_autocast_counts_in_the_backward_too(own, head="chunked"):
    p = problem(9, 40, 16, dtype=torch.float32)
    expected = run(head, p, reduction="none", **own)
    operands = leaves(p)
    loss = linear_cross_entropy(*operands[:2], p.target, head=head, linear_bias=p.b, reduction="none", **own)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(loss, operands[:2])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", OPTION_SETS)
@by_reduction
def test_full_follows_the_equation(name, reduction):
    p = problem(37, 257, 16)
    o = options(name, p)
    smooth, every = o.get("label_smoothing", 0.0), o.get("token_weight", torch.ones(37))
    c = o.get("weight", torch.ones(257))
    e, w, b = operands = leaves(p)
    t, y = every * (p.target != -100), p.target.clamp(min=0)
    z = e @ w.T + b
    z = o["softcap"] * torch.tanh(z / o["softcap"]) if "softcap" in o else z
    lse = z.exp().sum(1, keepdim=True).log()
    hard, even = c[y] * (lse - z)[torch.arange(37), y], (c * (lse - z)).mean(1)
    losses = t * ((1 - smooth) * hard + smooth * even + o.get("z_loss", 0.0) * lse[:, 0] ** 2)
    want = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (t * c[y]).sum()}[reduction]
    assert_close(run("full", p, reduction=reduction, **o), gradients(want, operands), 1e-12)


def test_the_filter_drops_exactly_the_small_entries():
    p = problem(37, 257, 16, ignored=False)
    eps = 2e-3
    delta = torch.softmax(F.linear(p.e, p.w, p.b), -1) - F.one_hot(p.target, 257)
    dz = torch.where(delta.abs() < eps, 0.0, delta)
    assert 0.05 < (dz == 0).double().mean() < 0.95
    loss, de, dw, db = run("full", p, torch.tensor(1.0), filter_eps=eps, reduction="sum")
    assert_close([de, dw, db], [dz @ p.w, dz.T @ p.e, dz.sum(0)], 1e-12)
    assert loss == run("full", p, reduction="sum")[0]


def test_full_has_second_derivatives(device="cpu"):
    """257 classes: on CUDA the rows of logits are padded."""
    p = problem(9, 257, 16, device=device)

    def loss_of(e, w, b):
        return linear_cross_entropy(e, w, p.target, head="full", linear_bias=b)

    assert torch.autograd.gradgradcheck(loss_of, leaves(p), fast_mode=True)


@pytest.mark.parametrize("head, own", VARIANTS)
@pytest.mark.parametrize("name", OPTION_SETS)
def test_agrees(name, head, own):
    if head == "torch" and name not in ("plain", "weight", "token_weight"):
        pytest.skip("not in PyTorch's op")
    for reduction in REDUCTIONS:
        for shape, bias in zip(head_cases.SHAPES, (False, True, False), strict=True):
            p = problem(*shape, bias=bias)
            kwargs = options(name, p) | {"reduction": reduction}
            assert_close(run(head, p, **kwargs, **own), run("full", p, **kwargs), 1e-11)
        q = problem(37, 257, 20, dtype=torch.float32)  # chunked has one buffer then, which the softmax overwrites
        kwargs |= options(name, q)
        assert_close(run(head, q, **kwargs, **own), run("full", q.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize("own", [{}, {"by": "vocabulary", "chunks": 6}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype, name", NARROW)
def test_sixteen_bit_error_is_that_of_full(
    own, dtype, name, reduction, head="chunked", shape=(150, 1000, 64), each=None, device="cpu"
):
    """each: the upstream gradient of losses per token; by default it differs from token to token"""
    p = problem(*shape, dtype=dtype, device=device)
    kwargs = options(name, p) | {"reduction": reduction}
    one = torch.ones((), device=device) if reduction == "mean" else each
    exact = run("full", p.to(torch.float64), one, **kwargs)
    plain, got = (run(kind, p, one, **kwargs, **extra) for kind, extra in (("full", {}), (head, own)))
    assert plain[0].dtype == torch.float32
    head_cases.assert_no_worse(got, plain, exact, head_cases.error_bounds("plain" if head == "fused" else name, own))


def test_the_upstream_scalar_is_not_rounded_to_16_bits(device="cpu"):
    """1/3 rounded to bfloat16 is 0.2 % too large, and so every gradient would be."""
    p = problem(64, 257, 16, dtype=torch.bfloat16, device=device)
    one, third = (run("chunked", p, torch.tensor(x, device=device))[2].double() for x in (1.0, 1 / 3))
    assert abs(3 * (third * one).sum() / (one * one).sum() - 1) < 3e-4


@pytest.mark.parametrize("name", head_cases.ODD)
@by_head
def test_odd_operands_and_options(head, own, name):
    if name == "a filter" and head == "chunked":
        pytest.skip("not in head chunked")
    p, kwargs, tolerance = head_cases.ODD[name]()
    for reduction in REDUCTIONS:
        kwargs["reduction"] = reduction
        got, want = run(head, p, **kwargs, **own), run("full", p.to(torch.float64), **kwargs)
        assert all(t.isfinite().all() for t in (*got, *want))
        assert_close(got, want, tolerance)


@pytest.mark.parametrize("own", CHUNKED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_logits_start_on_multiples_of_eight(own, dtype, head="chunked", device="cpu"):
    """Else cuBLAS takes five times as long. And what is beyond the last class reaches no result."""
    p = problem(16, 257, 16, dtype=dtype, bias=False, device=device)
    with head_cases.Recorder() as seen:
        got = run(head, p, **own)
    matrices = [m if m.stride(1) == 1 else m.T for product in seen.products for m in product if m.dtype == dtype]
    assert len(matrices) >= 6 and all(m.stride(0) % 8 == 0 for m in matrices)
    assert_close(got, run("full", p.to(torch.float64)), 0.05 if dtype == torch.bfloat16 else 3e-6)


@pytest.mark.parametrize("head, own", [*HEADS, TORCH])
@by_reduction
def test_leading_dimensions(head, own, reduction):
    """(3, 5, D), and a single token."""
    p, call = problem(15, 257, 16), partial(linear_cross_entropy, head=head, reduction=reduction, **own)
    want, got = call(p.e, p.w, p.target), call(p.e.view(3, 5, 16), p.w, p.target.view(3, 5))
    torch.testing.assert_close(got, want.view(3, 5) if reduction == "none" else want)
    one = call(p.e[0], p.w, p.target[0])
    torch.testing.assert_close(one, F.cross_entropy(p.w @ p.e[0], p.target[0], reduction=reduction))


@pytest.mark.parametrize("head, own", [*HEADS, TORCH])
@by_reduction
def test_all_tokens_ignored_or_none_at_all(head, own, reduction, dtype=torch.float64, vocabulary=257):
    p = problem(5, vocabulary, 16, dtype=dtype)
    p.target[:] = -100
    loss, *grads = run(head, p, reduction=reduction, **own)
    want = F.cross_entropy(p.e @ p.w.T, p.target, reduction=reduction)
    torch.testing.assert_close(loss, want, equal_nan=True)
    assert math.isnan(loss) if reduction == "mean" else (loss == 0).all()
    assert all((g == 0).all() for g in grads)
    _, *grads = run(head, p, torch.full_like(loss, math.inf), reduction=reduction, **own)  # as of a sum / 0 tokens
    assert all((g == 0).all() for g in grads)
    if reduction == "sum" and head != "torch":
        p.e, p.target = p.e[:0], p.target[:0]
        loss, de, dw, db = run(head, p, reduction=reduction, **own)
        assert loss == 0 and de.shape == (0, 16) and (dw == 0).all() and (db == 0).all()


@by_head
def test_certain_targets(head, own, atol=2e-7):
    """p(target) → 1: the loss goes to 0 and stays there, and the gradient keeps the size of 1 − p."""
    e, target = torch.eye(4, dtype=torch.float32), torch.arange(4)
    w = torch.zeros(50, 4)
    w[target, target] = torch.tensor([8.0, 14.0, 30.0, 1e3])
    z = (e @ w.T).requires_grad_()
    want = F.cross_entropy(z, target, reduction="none")
    (dz,) = torch.autograd.grad(want.sum(), z)
    losses = linear_cross_entropy(e, w.requires_grad_(), target, head=head, reduction="none", **own)
    (dw,) = torch.autograd.grad(losses.sum(), w)
    torch.testing.assert_close(losses, want.detach(), rtol=1e-5, atol=atol)
    torch.testing.assert_close(dw, dz.T @ e, rtol=1e-5, atol=atol)
    assert (losses >= 0).all() and losses[3] == 0


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_calls_drawn_by_chance(first, head="chunked", most=(200, 3000, 150), device="cpu"):
    for seed in range(first, first + 10):
        head_cases.check(seed, head, most, device)
