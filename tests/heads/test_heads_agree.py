"""Every head against `full` in float64: all options, reductions, chunkings, dtypes, strides and frozen operands."""

import pytest
import torch
from head_cases import OPTION_SETS, REDUCTIONS, SHAPES, assert_close, options, problem, run, weight_bound

from t1lib.heads import linear_cross_entropy

VARIANTS = [
    ("chunked", {}),
    ("chunked", {"chunks": 1}),
    ("chunked", {"chunks": 3}),
    ("chunked", {"chunks": 1000}),
    ("chunked", {"by": "vocabulary"}),
    ("chunked", {"by": "vocabulary", "chunks": 1}),
    ("chunked", {"by": "vocabulary", "chunks": 6}),
    ("torch", {}),
    ("torch", {"chunked": False}),
]
CHUNKED = [own for head, own in VARIANTS if head == "chunked"]
BOTH = [{}, {"by": "vocabulary", "chunks": 3}]
TORCH_LACKS = ("softcap", "z_loss", "all")


def lacks(head, own, name):
    """Whether PyTorch's op lacks this option (its chunked path also lacks label smoothing)."""
    chunked = own.get("chunked", True)
    return head == "torch" and (name in TORCH_LACKS or ("smoothing" in name and chunked))


@pytest.fixture(autouse=True)
def _needs_torch(request):
    variant = request.node.callspec.params.get("variant") if hasattr(request.node, "callspec") else None
    if variant and variant[0] == "torch" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_in_float64(shape, name, reduction, variant):
    head, own = variant
    if lacks(head, own, name):
        pytest.skip("not in PyTorch's op")
    for bias in (True, False):
        p = problem(*shape, bias=bias)
        kwargs = options(name, p) | {"reduction": reduction}
        assert_close(run(head, p, **kwargs, **own), run("full", p, **kwargs), 1e-11)


@pytest.mark.parametrize("own", CHUNKED, ids=str)
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float32_is_tight(own, name, reduction):
    p = problem(37, 1000, 123, dtype=torch.float32)
    kwargs = options(name, p) | {"reduction": reduction}
    exact = run("full", p.to(torch.float64), **kwargs)
    assert_close(run("chunked", p, **kwargs, **own), exact, 3e-6)


@pytest.mark.parametrize("own", [{}, {"chunks": 1}, {"by": "vocabulary", "chunks": 6}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sixteen_bit_error_is_that_of_full(own, dtype, name, reduction):
    p = problem(150, 1000, 64, dtype=dtype)
    kwargs = options(name, p) | {"reduction": reduction}
    exact = run("full", p.to(torch.float64), torch.tensor(1.0) if reduction == "mean" else None, **kwargs)
    one = torch.ones((), dtype=torch.float32) if reduction == "mean" else None
    plain, got = (run(head, p, one, **kwargs, **extra) for head, extra in (("full", {}), ("chunked", own)))
    bounds = {"loss": 1.05, "de": 1.05, "dw": weight_bound(name, own), "db": 1.5}
    for (what, k), g, f, x in zip(bounds.items(), got, plain, exact, strict=True):
        assert g.dtype == f.dtype
        error, usual = ((t.double() - x).norm() for t in (g, f))
        assert error <= k * usual + 1e-6 * x.norm(), f"{what}: {error / usual:.3f} times full's error"


@pytest.mark.parametrize("own", CHUNKED, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_filter_agrees_and_none_is_exact(own, reduction):
    p = problem(37, 1000, 16)
    for name in ("plain", "all"):
        kwargs = options(name, p) | {"reduction": reduction}
        want = run("full", p, filter_eps=1e-3, **kwargs)
        assert_close(run("chunked", p, filter_eps=1e-3, **kwargs, **own), want, 1e-11)
        assert not torch.allclose(want[1], run("full", p, **kwargs)[1])


@pytest.mark.parametrize("own", BOTH, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("grad", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1) if a + b + c], ids=str)
def test_frozen_operands(own, reduction, grad):
    p = problem(37, 257, 16)
    kwargs = {"reduction": reduction, "grad": tuple(map(bool, grad))}
    assert_close(run("chunked", p, **kwargs, **own), run("full", p, **kwargs), 1e-12)


@pytest.mark.parametrize("variant", [("full", {}), *VARIANTS[:1], VARIANTS[6], ("torch", {})], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_leading_dimensions_and_strides(variant, reduction):
    """(B, S, D) input whose memory is transposed, a target that is a column, w with a stride."""
    head, own = variant
    flat = problem(15, 257, 16)
    token_weight = torch.rand(15, dtype=torch.float64)
    want = run("full", flat, torch.tensor(1.0) if reduction != "none" else torch.ones(15), reduction=reduction)
    want_tw = run("full", flat, want[0].new_ones(want[0].shape), reduction=reduction, token_weight=token_weight)
    e = flat.e.view(3, 5, 16).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    w = torch.stack([flat.w, flat.w], -1)[..., 1].requires_grad_()
    b = torch.stack([flat.b, flat.b], -1)[..., 1].requires_grad_()
    target = torch.stack([flat.target.view(3, 5)] * 2, -1)[..., 1]
    assert not (e.is_contiguous() or w.is_contiguous() or b.is_contiguous() or target.is_contiguous())
    for tw, expected in ((None, want), (token_weight.view(3, 5), want_tw)):
        loss = linear_cross_entropy(e, w, target, head=head, linear_bias=b, reduction=reduction, token_weight=tw, **own)
        assert loss.shape == ((3, 5) if reduction == "none" else ())
        got = torch.autograd.grad(loss, (e, w, b), torch.ones_like(loss))
        flattened = [loss.detach().reshape(expected[0].shape), got[0].reshape(15, 16), *got[1:]]
        assert_close(flattened, expected, 1e-12)


@pytest.mark.parametrize("variant", [("full", {}), *VARIANTS[:1], VARIANTS[6], ("torch", {})], ids=str)
def test_one_token_without_a_batch(variant):
    head, own = variant
    p = problem(1, 257, 16, ignored=False)
    for reduction in REDUCTIONS:
        loss = linear_cross_entropy(p.e[0], p.w, p.target[0], head=head, reduction=reduction, **own)
        want = torch.nn.functional.cross_entropy(p.w @ p.e[0], p.target[0], reduction=reduction)
        torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("own", BOTH, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignore_index_inside_the_vocabulary(own, reduction):
    p = problem(37, 257, 16, ignored=False)
    p.target[::3] = 5
    kwargs = {"ignore_index": 5, "reduction": reduction}
    got = run("chunked", p, **kwargs, **own)
    assert_close(got, run("full", p, **kwargs), 1e-12)
    assert (got[1][::3] == 0).all()


@pytest.mark.parametrize("own", BOTH, ids=str)
def test_no_tokens_at_all(own):
    p = problem(5, 7, 3)
    p.e, p.target = p.e[:0], p.target[:0]
    loss, de, dw, db = run("chunked", p, reduction="sum", **own)
    assert loss == 0 and de.shape == (0, 3) and (dw == 0).all() and (db == 0).all()
