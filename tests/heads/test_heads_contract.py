"""The contract of heads: `full` against PyTorch's cross_entropy and plain formulas, others against `full` in float64;
messages for bad arguments, workspace, autocast, statistics, products, compilation, helpers."""

import math
from functools import partial

import head_cases
import pytest
import torch
import torch.nn.functional as F
from head_cases import CHUNKED, HEADS, OPTION_SETS, REDUCTIONS, Recorder, assert_close, least_of, options, problem, run
from refusals import refused

from t1lib.errors import UnavailableError
from t1lib.heads import linear_cross_entropy, next_token_targets, parse_bytes
from t1lib.measure.probes import AllocatorTimeline

TORCH = pytest.param("torch", {}, marks=pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="missing"))
VARIANTS = [*(("chunked", own) for own in ({}, {"chunks": 1000}, {"by": "vocabulary", "chunks": 6})), TORCH]
NARROW = [*((torch.bfloat16, name) for name in ("plain", "softcap", "all")), (torch.float16, "all")]
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_head = pytest.mark.parametrize("head, own", HEADS, ids=str)
N, V, D = 5, 257, 16
GOOD = problem(N, V, D, dtype=torch.float32)
CALL = {"input": GOOD.e, "linear_weight": GOOD.w, "target": GOOD.target}
PAIR = 2  # chunks that share a product for dW
BAD = {
    "input scalar": ({"input": torch.tensor(1.0)}, r"input must have shape \(…, D\)"),
    "input of 8 bits": ({"input": GOOD.e.to(torch.float8_e4m3fn)}, "input must be .*bfloat16.*torch.float8"),
    "input sparse": ({"input": GOOD.e.to_sparse()}, "input must be a dense tensor.*sparse"),
    "weight nested": ({"linear_weight": torch.nested.nested_tensor([GOOD.e])}, "linear_weight must be a dense tensor"),
    "weight 3-D": ({"linear_weight": torch.ones(V, 1, D)}, r"linear_weight must have shape \(V, D\).*\(257, 1, 16"),
    "no classes": ({"linear_weight": torch.ones(0, D)}, r"linear_weight must .*\(0, 16\)"),
    "dtype differs": ({"linear_weight": GOOD.w.half()}, "linear_weight is torch.float16, input torch.float32"),
    "bias shape": ({"linear_bias": torch.ones(V - 1)}, r"linear_bias must have shape \(257,\), got \(256,\)"),
    "target device": ({"target": GOOD.target.to("meta")}, "target is on meta, input on cpu"),
    "all on meta": ({name: t.to("meta") for name, t in CALL.items()}, "input must be a dense tensor.*on meta"),
    "target uint64": ({"target": torch.full((N,), 2**64 - 100, dtype=torch.uint64)}, "class indices.*torch.uint64"),
    "target probabilities": ({"target": torch.ones(N, V) / V}, "class probabilities"),
    "target negative": ({"target": torch.full((N,), -1)}, r"target must lie in \[0, 257\).*-100; got -1"),
    "ignore_index too large": ({"ignore_index": 10**400}, "ignore_index must be an int of 64 bits"),
    "class weight grad": ({"weight": torch.ones(V, requires_grad=True)}, "weight requires a gradient"),
    "reduction an array": ({"reduction": torch.ones(2).numpy()}, "unknown reduction .*allowed: mean, sum, none"),
    "return_stats": ({"return_stats": "x"}, "return_stats must be True or False"),
    "smoothing": ({"label_smoothing": 1.5}, r"label_smoothing must be a number in \[0, 1\], got 1.5"),
    "softcap": ({"softcap": 0.0}, r"softcap must be None or a number in \[1e-30, 1e30\], got 0.0"),
    "z_loss beyond what Python prints": ({"z_loss": 10**5000}, "z_loss must be a finite number >= 0"),
    "filter_eps": ({"filter_eps": 1.0}, r"filter_eps must be None or a number in \(0, 1\), got 1.0"),
    "head": ({"head": "fulll"}, "unknown head 'fulll'.*Did you mean 'full'"),
    "option": ({"head": "full", "chunks": 2}, "unknown option of head 'full': 'chunks'; allowed: head, reduction"),
    "option with a slip": ({"worspace": "1GiB"}, "'worspace'; allowed: chunks, .* Did you mean 'workspace'"),
    "by": ({"head": "chunked", "by": "token"}, "unknown by 'token'; allowed: sequence, vocabulary"),
    "tail": ({"tail": "fp4"}, "unknown tail 'fp4'; allowed: fp8"),
    "chunks": ({"head": "chunked", "chunks": 0}, "chunks must be an int >= 1, got 0"),
    "chunks and workspace": ({"head": "chunked", "chunks": 2, "workspace": "1GiB"}, "chunks or workspace, not both"),
    "chunked filter": ({"head": "chunked", "filter_eps": 0.1}, "has no filter_eps; heads that take it: full, fused"),
    "torch smoothing": ({"head": "torch", "label_smoothing": 0.1}, "has no label_smoothing; heads that take it"),
    "torch filter": ({"head": "torch", "filter_eps": 0.1}, "has no filter_eps; heads that take it: full, fused"),
}


def leaves(p):
    return [t.detach().requires_grad_() for t in (p.e, p.w, p.b) if t is not None]


def gradients(loss, operands):
    return [loss.detach(), *torch.autograd.grad(loss, operands, head_cases.upstream_for(loss))]


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
    with Recorder() as seen:
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


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    if change.get("head") == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")
    refused(lambda: linear_cross_entropy(**CALL | change), match=message)


def test_torch_head_says_when_it_is_unavailable(monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(UnavailableError, match=r"PyTorch 2\.13"):
        linear_cross_entropy(GOOD.e, GOOD.w, GOOD.target, head="torch")


@pytest.mark.parametrize("own", [{}, {"chunks": 3}, {"filter_eps": 1e-3}], ids=str)
def test_fused_is_the_default_and_another_head_computes_where_its_kernels_cannot(own):
    p = problem(37, V, D)
    want = run("full", p, **{k: v for k, v in own.items() if k == "filter_eps"})
    assert_close(run("fused", p, **own), want, 1e-11)
    loss = linear_cross_entropy(p.e, p.w, p.target, linear_bias=p.b, ignore_index=None, **own)  # PyTorch's default
    assert loss == run("fused", p, **own)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("own", [{}, {"by": "vocabulary"}], ids=str)
def test_workspace_picks_a_chunk_or_says_the_least(own, name, dtype):
    p = problem(12, 17, D, dtype=dtype)
    kwargs = options(name, p) | own
    least = least_of(partial(run, "chunked", p, **kwargs))
    for workspace, chunks in ((least, 17 if own else 12), ("1GiB", 1)):
        found = []
        for sized in ({"workspace": workspace}, {"chunks": chunks}):
            with Recorder() as seen:
                found.append((run("chunked", p, **sized, **kwargs), len(seen.products)))
        (got, products), (want, wanted) = found
        assert products == wanted
        assert_close(got, want, 1e-9)


@pytest.mark.parametrize("own", [{}, {"softcap": 5.0}, {"z_loss": 1e-3}, {"softcap": 5.0, "z_loss": 1e-3}], ids=str)
def test_full_checks_its_workspace(own):
    """It has room for the N × V arrays that are held at once."""
    p, call = problem(256, 4096, 8, dtype=torch.float32), partial(run, "full", **own)
    need, logits = least_of(partial(call, p)), 256 * 4096 * 4
    with AllocatorTimeline(torch.device("cpu"), 0) as timeline:
        want = call(p)
    assert need - logits < timeline.peak < need + logits // 4
    assert_close(call(p, workspace=need), want, 0.0)


@pytest.mark.parametrize("head, own", [("full", {}), ("chunked", {}), TORCH])
def test_autocast_casts_as_linear_does(head, own):
    want = run(head, GOOD.to(torch.bfloat16), **own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, exact = (run(head, p, **own) for p in (GOOD, GOOD.to(torch.float64)))
    assert all(g.dtype == torch.float32 for g in got) and exact[0].dtype == torch.float64
    assert_close(got, want, 0.0)


@pytest.mark.parametrize("head, own", HEADS)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_statistics(head, own, name, dtype=torch.float64):
    p = problem(36, V, D, dtype=dtype)
    p.target[:3] = F.linear(p.e, p.w, p.b).argmax(-1)[:3]
    kwargs = options(name, p) | {"linear_bias": p.b, "return_stats": True, "reduction": "none"}
    if "token_weight" in kwargs:
        kwargs["token_weight"] = kwargs["token_weight"].view(4, 9)
    e, target = p.e.view(4, 9, D).requires_grad_(), p.target.view(4, 9)
    z = F.linear(e.detach(), p.w, p.b)
    z = z if "softcap" not in kwargs else kwargs["softcap"] * torch.tanh(z / kwargs["softcap"])
    valid, safe = target != -100, target.clamp(min=0)
    loss, stats = linear_cross_entropy(e, p.w, target, head=head, **kwargs, **own)
    torch.testing.assert_close(stats.lse, z.logsumexp(-1) * valid)
    torch.testing.assert_close(stats.logprob, z.log_softmax(-1).gather(-1, safe[..., None])[..., 0] * valid)
    assert torch.equal(stats.correct, (z.argmax(-1) == target) & valid) and stats.correct.sum() >= 3
    assert loss.requires_grad and not any(value.requires_grad for value in stats)
    ties = torch.ones(4, 1), torch.tensor([[2.0], [1.0], [2.0]]), torch.tensor([0, 1, 2, -100])
    _, stats = linear_cross_entropy(*ties, head=head, return_stats=True, **own)
    assert stats.correct.tolist() == [True, False, True, False]


@pytest.mark.parametrize("own", CHUNKED, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_products_waits_and_memory(own, name, reduction):
    """8 chunks by sequence, 3 by vocabulary, of columns that are a multiple of 8: others take products of their own."""
    p, upstream = problem(64, 1008, 8, dtype=torch.bfloat16), torch.ones(64 if reduction == "none" else ())
    loss, weight = (3 if "by" in own else 8), (3 if "by" in own else 8 // PAIR)
    again = loss * ("by" in own or reduction == "none")  # logits for the backward
    for grad in ((True, True, True), (True, False, True), (False, True, False)):
        with Recorder() as seen:
            run("chunked", p, upstream, grad=grad, reduction=reduction, **options(name, p), **own)
        assert len(seen.products) == loss + again + loss * grad[0] + weight * grad[1]
        assert seen.waits == ["_local_scalar_dense"]  # the check of the targets' range, on a CPU alone
        assert max(numel for numel, _ in seen.made) == (64 * 336 if "by" in own else PAIR * 8 * 1008)
    if "by" not in own:
        p = problem(64, 1008, 64, dtype=torch.bfloat16)  # now a V × D buffer is larger than a chunk
        with Recorder() as seen:
            run("chunked", p, upstream, reduction=reduction, **options(name, p))
        assert {dtype for numel, dtype in seen.made if numel > 8 * 1008} == {torch.bfloat16}


@pytest.mark.parametrize("head, own", [*HEADS[1:], pytest.param(*HEADS[0], marks=pytest.mark.slow)])
def test_compiled(head, own):
    p = problem(20, V, 8, dtype=torch.float32)

    def call(e, w):
        losses = linear_cross_entropy(e, w, p.target, head=head, linear_bias=p.b, reduction="none", **own)
        return losses.sum() + linear_cross_entropy(e, w, p.target, head=head, **own)

    head_cases.assert_compiles(call, (p.e, p.w), backend="aot_eager")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("head, own", [*HEADS[1:], TORCH])
def test_second_backwards_are_right_or_refused_as_are_derivatives(head, own, reduction, dtype=torch.float64):
    p = problem(8, 40, 3, dtype=dtype)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target, head=head, reduction=reduction, **own)
    ones = torch.ones_like(loss)
    (first,) = torch.autograd.grad(loss, e, ones, retain_graph=True)
    kept = first.clone()
    if "by" in own or (head != "torch" and reduction == "none"):
        assert torch.equal(torch.autograd.grad(loss, e, ones)[0], kept)
    else:
        refused(lambda: torch.autograd.grad(loss, e, ones), "second backward")
    assert torch.equal(first, kept)
    loss = linear_cross_entropy(e, p.w, p.target, head=head, reduction=reduction, **own).sum()
    refused(lambda: torch.autograd.grad(loss, e, create_graph=True), "no second derivative")
    loss = linear_cross_entropy(e, p.w, p.target, head=head, reduction=reduction, **own).sum()
    refused(lambda: torch.autograd.grad(loss, e, torch.ones(2), is_grads_batched=True), "no batched backward")


def test_transforms_are_refused():
    p = problem(6, 40, 3)
    call = partial(linear_cross_entropy, linear_weight=p.w, target=p.target)
    refused(lambda: torch.func.jvp(call, (p.e,), (p.e,)), "input is within forward-mode differentiation")
    refused(lambda: torch.func.grad(call)(p.e), "or torch.func; allowed: plain autograd")
    refused(lambda: torch.func.vmap(partial(linear_cross_entropy, p.e, p.w))(p.target[None]), "target is within")


@pytest.mark.parametrize("head, own", HEADS)
def test_what_saved_tensors_keep_of_changed_arguments_counts(head, own):
    """Within this block PyTorch keeps a copy of what is changed, in place of refusing the backward."""
    p = problem(8, 40, 3)
    kwargs = {"reduction": "none", "weight": options("weight", p)["weight"], "label_smoothing": 0.1, **own}
    want = run(head, p, torch.ones(8).double(), **kwargs)[1]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        e = p.e.clone().requires_grad_()
        loss = linear_cross_entropy(e, p.w, p.target, head=head, linear_bias=p.b, **kwargs)
        for argument in (p.w, p.b, p.target, kwargs["weight"]):
            argument.zero_()
        assert torch.equal(torch.autograd.grad(loss.sum(), e)[0], want)


def test_parse_bytes():
    sizes = {0: 0, 7: 7, "7": 7, "7B": 7, "256MiB": 2**28, "1.5GiB": 3 * 2**29, "2 KiB": 2048, "2GB": 2 * 10**9}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for wrong in ("MiB", "1.5.1GiB", "3 miles", "256mib", "9" * 400 + "GiB", 1.5, None, True, -2):
        refused(lambda wrong=wrong: parse_bytes(wrong), match="bad size .*allowed: .*MiB")


def test_next_token_targets():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    got = next_token_targets(ids)
    assert got.tolist() == [[2, 3, -100], [5, 6, -100]] and got.dtype == torch.int64
    assert next_token_targets(ids[0], ignore_index=0).tolist() == [2, 3, 0]
    assert next_token_targets(ids[0, :1]).tolist() == [-100]
    for bad in (ids.float(), ids[None], ids[0, 0], None, [1, 2], ids.to_sparse()):
        refused(lambda bad=bad: next_token_targets(bad), "ids must")
