"""Extreme values, compared with cross_entropy; what chunking promises on memory, GEMMs, host waits and backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from head_cases import CHUNKED, HEADS, OPTION_SETS, REDUCTIONS, Recorder, assert_close, options, problem, refusal, run

from t1lib.heads import linear_cross_entropy
from t1lib.heads import options as checks

needs_torch = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this PyTorch")
PAIR = 2  # chunks that share a product for dW
TORCH = [pytest.param("torch", {"chunked": chunked}, marks=needs_torch) for chunked in (True, False)]


@pytest.mark.parametrize("head, own", [*HEADS, *TORCH])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_tokens_ignored(head, own, reduction):
    p = problem(5, 257, 16)
    p.target[:] = -100
    loss, *grads = run(head, p, reduction=reduction, **own)
    want = F.cross_entropy(p.e @ p.w.T, p.target, reduction=reduction)
    torch.testing.assert_close(loss, want, equal_nan=True)
    assert math.isnan(loss) if reduction == "mean" else (loss == 0).all()
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("head, own", [*HEADS, *TORCH])
def test_what_an_ignored_token_holds_reaches_no_result(head, own, name):
    if head == "torch" and name not in ("plain", "weight", "token_weight"):
        pytest.skip("not in PyTorch's op")
    p = problem(37, 257, 16, dtype=torch.float32)
    for reduction, bad in zip(REDUCTIONS, (math.nan, math.inf, math.nan), strict=True):
        kwargs = {"reduction": reduction, **options(name, p), **own}
        want = run(head, p, **kwargs)
        ignored = p.to(torch.float32)
        ignored.e = torch.where((p.target == -100)[:, None], bad, p.e)
        got = run(head, ignored, **kwargs)
        assert all(t.isfinite().all() for t in got) and (got[1][p.target == -100] == 0).all()
        assert got[1][p.target != -100].abs().amax(1).min() > 0
        assert_close(got, want, 3e-6)


@pytest.mark.parametrize("head, own", HEADS)
@pytest.mark.parametrize("offset, smoothing", [(1e3, 0.0), (-1e3, 0.2)])
def test_large_offsets(head, own, offset, smoothing):
    """A constant added to every logit changes only the rounding: 6e-5 for float32 logits near 1000."""
    p = problem(37, 1000, 16, dtype=torch.float32)
    p.b += offset
    kwargs = {"reduction": "none", "label_smoothing": smoothing}
    assert_close(run(head, p, **kwargs, **own), run("full", p.to(torch.float64), **kwargs), 3e-4)


@pytest.mark.parametrize("head, own", HEADS)
def test_certain_targets(head, own):
    """p(target) → 1: the loss goes to 0 and stays there, and the gradient keeps the size of 1 − p."""
    e = torch.eye(4, dtype=torch.float32)
    w = torch.zeros(50, 4)
    w[torch.arange(4), torch.arange(4)] = torch.tensor([8.0, 14.0, 30.0, 1e3])
    target = torch.arange(4)
    z = (e @ w.T).requires_grad_()
    want = F.cross_entropy(z, target, reduction="none")
    (dz,) = torch.autograd.grad(want.sum(), z)
    losses = linear_cross_entropy(e, w.requires_grad_(), target, head=head, reduction="none", **own)
    (dw,) = torch.autograd.grad(losses.sum(), w)
    torch.testing.assert_close(losses, want.detach(), rtol=1e-5, atol=2e-7)
    torch.testing.assert_close(dw, dz.T @ e, rtol=1e-5, atol=2e-7)
    assert (losses >= 0).all() and losses[3] == 0


@pytest.mark.parametrize("head, own", HEADS)
@pytest.mark.parametrize("masked", [slice(0, 86), slice(86, 200), slice(1, None)], ids=str)
def test_logits_of_minus_infinity(head, own, masked):
    """A bias of −inf masks whole chunks of the vocabulary: the first; the second and more; all but one column."""
    p = problem(5, 257, 16)
    p.b[masked] = -math.inf
    allowed = (~p.b.isinf()).nonzero()[:, 0]
    p.target = torch.where(p.target < 0, p.target, allowed[p.target % len(allowed)])
    got, want = run(head, p, **own), run("full", p)
    assert all(t.isfinite().all() for t in got)
    assert_close(got, want, 1e-11)


def record(p, reduction="mean", grad=(True, True, True), backward=True, **kwargs):
    """A Recorder over one call of `chunked` (on a CPU the target's range check may wait, unless it is patched out)."""
    operands = [t.detach().requires_grad_(g) for t, g in zip((p.e, p.w, p.b), grad, strict=True)]
    with Recorder() as seen:
        loss = linear_cross_entropy(
            *operands[:2], p.target, head="chunked", linear_bias=operands[2], reduction=reduction, **kwargs
        )
        if backward:
            loss.backward(torch.ones_like(loss))
    return seen


@pytest.mark.parametrize("own", CHUNKED, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_never_waits_and_never_holds_more_than_a_chunk(own, name, reduction, monkeypatch):
    monkeypatch.setattr(checks, "_check_range", lambda *_: None)
    p = problem(64, 1000, 8, dtype=torch.bfloat16)
    seen = record(p, reduction, **options(name, p), **own)
    assert seen.waits == []
    largest = 64 * 336 if "by" in own else PAIR * 8 * 1000
    assert max(numel for numel, _ in seen.made) == largest
    if "by" not in own:
        p = problem(64, 1000, 64, dtype=torch.bfloat16)  # now a V × D buffer is larger than a chunk
        seen = record(p, reduction, **options(name, p), **own)
        assert {dtype for numel, dtype in seen.made if numel > 8 * 1000} == {torch.bfloat16}


@pytest.mark.parametrize(
    "own, reduction, grad, backward, products",
    [
        ({"chunks": 4}, "mean", (True, True, True), True, 2 * 4 + 4 // PAIR),
        ({"chunks": 4}, "mean", (True, False, False), True, 2 * 4),
        ({"chunks": 4}, "mean", (False, True, False), True, 4 + 4 // PAIR),
        ({"chunks": 4}, "mean", (False, False, False), False, 1 * 4),
        ({"chunks": 4}, "none", (True, True, True), False, 1 * 4),
        ({"chunks": 4}, "none", (True, True, True), True, 3 * 4 + 4 // PAIR),
        ({"chunks": 4, "by": "vocabulary"}, "mean", (True, True, True), True, 4 * 4),
        ({"chunks": 4, "by": "vocabulary"}, "mean", (True, False, True), True, 3 * 4),
    ],
)
def test_number_of_products(own, reduction, grad, backward, products):
    """64 classes, because the columns beyond a multiple of 8 take a product of their own."""
    assert len(record(problem(8, 64, 3), reduction, grad, backward, **own).products) == products


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("head, own", [*HEADS, *TORCH])
def test_compiled(head, own, reduction):
    """257 classes: the rows of logits are padded."""
    p = problem(20, 257, 8, dtype=torch.float32)

    def call(e, w):
        return linear_cross_entropy(e, w, p.target, head=head, linear_bias=p.b, reduction=reduction, **own).sum()

    found = []
    for f in (call, torch.compile(call, backend="aot_eager")):
        operands = [t.detach().clone().requires_grad_() for t in (p.e, p.w)]
        loss = f(*operands)
        found.append([loss.detach(), *torch.autograd.grad(loss, operands)])
    assert_close(*found, 1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("head, own", [*HEADS[1:], *TORCH])
def test_a_second_backward_is_right_or_refused_and_a_second_derivative_refused(head, own, reduction):
    p = problem(8, 40, 3)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target, head=head, reduction=reduction, **own)
    ones = torch.ones_like(loss)
    (first,) = torch.autograd.grad(loss, e, ones, retain_graph=True)
    kept = first.clone()
    if "by" in own or (head == "chunked" and reduction == "none") or own.get("chunked") is False:
        assert torch.equal(torch.autograd.grad(loss, e, ones)[0], kept)
    else:
        assert "second backward" in refusal(lambda: torch.autograd.grad(loss, e, ones))
    assert torch.equal(first, kept)
    if own.get("chunked") is not False:
        loss = linear_cross_entropy(e, p.w, p.target, head=head, reduction=reduction, **own).sum()
        assert "no second derivative" in refusal(lambda: torch.autograd.grad(loss, e, create_graph=True))


def test_an_operand_changed_before_the_backward_is_noticed():
    p = problem(8, 40, 3)
    loss = linear_cross_entropy(p.e.requires_grad_(), p.w, p.target, head="chunked", by="vocabulary")
    p.w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
