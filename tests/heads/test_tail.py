"""tail="fp8": what is refused, the plan, the plain twin's errors on a CPU; on Hopper the kernels'."""

import pytest
import test_heads_gpu as on_a_gpu
import torch
from head_cases import Problem, least_of, options, problem, run
from refusals import refused
from torch import Tensor

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy, parse_bytes
from t1lib.heads.fused_plan import DEFAULT_WORKSPACE, Shape

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
E4M3 = torch.float8_e4m3fn
STATES = ("flat", "trained", "peaked")
REFUSED = [
    {"dtype": torch.float32}, {"dtype": torch.float16}, {"label_smoothing": 0.1}, {"filter_eps": 1e-3}, {"chunks": 2},
    {"softcap": 0.5}, {"linear_bias": torch.ones(40)},
]  # fmt: skip


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


def state(kind: str, tokens: int, vocab: int, hidden: int, device: str = "cpu", seed: int = 0) -> Problem:
    """Operands whose softmax is flat, or has a few large entries that the target may be among."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(vocab, hidden, generator=g) * {"flat": 0.3, "trained": 2.0, "peaked": 3.0}[kind] / hidden**0.5
    e = torch.randn(tokens, hidden, generator=g)
    chance = 1 / torch.arange(1.0, vocab + 1)
    target = torch.multinomial(chance, tokens, replacement=True, generator=g)
    if kind != "flat":
        for classes in (target, *torch.multinomial(chance, 3 * tokens, True, generator=g).view(3, tokens)):
            most = 12 if kind == "trained" else 20
            height = most * torch.rand(tokens, 1, generator=g)
            e += height * w[classes] / w[classes].norm(dim=1, keepdim=True) ** 2
    target[1::5] = -100
    return Problem(e.bfloat16().to(device), w.bfloat16().to(device), None, target.to(device))


def twin(p: Problem) -> tuple[Tensor, Tensor]:
    """dE and dW of the mean loss as docs/fp8.md says, in plain PyTorch."""
    valid = p.target >= 0
    x, w, y = p.e[valid].float(), p.w.float(), p.target[valid, None]
    z = x @ w.T
    own = (z.gather(1, y) - z.logsumexp(1, keepdim=True)).exp()
    p_others = z.softmax(1).scatter(1, y, 0.0)
    rest = (p_others.sum(1) - p_others.amax(1)).clamp(min=1e-5)[:, None]
    unit = rest / (40 * 448)
    codes = (p_others / unit).clamp(max=448.0).to(E4M3).float()
    excess = torch.where(codes == 448.0, p_others / unit - 448.0, 0.0)
    factor = 1 / len(x)
    scaled = unit * factor * x
    by_w, by_x = 448 / w.abs().max(), 448 / scaled.abs().max()
    w8, x8 = (w * by_w).to(E4M3).float() / by_w, (scaled * by_x).to(E4M3).float() / by_x
    tau = (own - 1) * factor
    de = torch.zeros_like(p.e)
    de[valid] = (factor * unit * (codes @ w8 + excess @ w) + tau * w[y[:, 0]]).bfloat16()
    dw = codes.T @ x8 + excess.T @ scaled
    return de, dw.index_add_(0, y[:, 0], tau * x).bfloat16()


def errors(got, exact) -> list[float]:
    return [float((g.double() - x.double()).norm() / x.double().norm()) for g, x in zip(got, exact, strict=True)]


def exact_of(p: Problem, **kwargs) -> tuple:
    return run("full", p.to(torch.float64), torch.ones((), device=p.e.device).double(), **kwargs)


def in_three_ways(p: Problem) -> tuple:
    """Losses and gradients in float64, and in bfloat16 by `full` and in FP8."""
    one = torch.ones((), device=p.e.device)
    return exact_of(p), run("full", p, one), run("fused", p, one, tail="fp8")


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_what_it_goes_without_is_refused(given):
    p = problem(9, 40, 16, dtype=given.pop("dtype", torch.bfloat16), bias=False)
    refused(lambda: linear_cross_entropy(p.e, p.w, p.target, **{"tail": "fp8"} | given), "tail")


def test_elsewhere_it_computes_as_without():
    p = problem(9, 40, 16, dtype=torch.bfloat16, bias=False)
    for reduction in ("mean", "none"):
        found = (run("fused", p, reduction=reduction, **own) for own in ({"tail": "fp8"}, {}))
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("workspace", [None, "1GiB", "512MiB", "256MiB"])
@pytest.mark.parametrize("sizes", [(8192, 256000, 2304), (12289, 50257, 1600), (300, 1000, 64)])
def test_the_plan_keeps_to_the_workspace(sizes, workspace):
    fused_tail = pytest.importorskip("t1lib.heads.fused_tail")
    shape, budget = Shape(*sizes, torch.bfloat16, True, True), workspace and parse_bytes(workspace)
    found = fused_tail.plan(shape, budget, 132)
    assert fused_tail.bytes_needed(shape, found) <= (budget or DEFAULT_WORKSPACE + 192 * sizes[0])
    assert found.capacity * found.chunks >= sizes[0]
    fused_tail.plan(shape, least_of(lambda workspace: fused_tail.plan(shape, workspace, 132)), 132)


@pytest.mark.parametrize("kind", STATES)
def test_the_twin_is_as_exact_as_full(kind):
    p = state(kind, 300, 4000, 96)
    exact = exact_of(p)[1:3]
    plain, own = errors(run("full", p, torch.ones(()))[1:3], exact), errors(twin(p), exact)
    assert all(o <= 1.05 * f for o, f in zip(own, plain, strict=True)), (own, plain)


@on_gpu
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("sizes", [(1000, 5003, 264), (700, 20011, 512)])
def test_errors_are_the_twins_and_below_fulls(kind, sizes):
    p = state(kind, *sizes, device="cuda")
    exact, full, got = in_three_ways(p)
    assert all(map(torch.equal, got, run("fused", p, torch.ones((), device="cuda"), tail="fp8")))
    assert abs(got[0] - exact[0]) <= 2e-6 * exact[0]
    found, bound, other = (errors(x, exact[1:]) for x in (got[1:], full[1:], twin(p)))
    kept = (g <= 1.05 * f and g <= 1.3 * t for g, f, t in zip(found, bound, other, strict=True))
    assert all(kept), (found, bound, other)


@on_gpu
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["plain", "weight", "softcap", "z_loss", "token_weight", "all but smoothing"])
def test_options(name, chunked):
    p = problem(1100, 5000, 264, dtype=torch.bfloat16, bias=False, device="cuda")
    one, given = torch.ones((), device="cuda"), options(name, p)
    given |= {"workspace": "16MiB"} if chunked else {"reduction": "sum"}
    exact, full = exact_of(p, **given | {"workspace": None}), run("full", p, one, **given | {"workspace": None})
    got = run("fused", p, one, tail="fp8", **given)
    for g, f in zip(errors(got[1:], exact[1:]), errors(full[1:], exact[1:]), strict=True):
        assert g <= max(1.05 * f, 4e-3)
    assert errors(got[:1], exact[:1])[0] <= 3e-6


@on_gpu
@pytest.mark.parametrize("grad", [(True, False), (False, True)])
def test_only_what_is_wanted_is_computed(grad):
    p = problem(400, 3000, 64, dtype=torch.bfloat16, bias=False, device="cuda")
    every, some = (run("fused", p, torch.ones((), device="cuda"), tail="fp8", grad=g) for g in ((True, True), grad))
    expected = [g for g, wanted in zip(every[1:], grad, strict=True) if wanted]
    assert all(map(torch.equal, expected, some[1:]))


@on_gpu
@pytest.mark.parametrize("n, v, d", [(1, 2048, 64), (257, 2049, 72), (130, 2050, 200), (3, 40, 16)])
def test_odd_sizes_and_a_weight_of_odd_rows(n, v, d):
    p, one = state("trained", n, v, d, "cuda"), torch.ones((), device="cuda")
    exact, got = exact_of(p), run("fused", p, one, tail="fp8")
    assert all(e <= 6e-3 for e in errors(got[1:], exact[1:]))
    memory = torch.empty(v * d + v, dtype=p.w.dtype, device="cuda")
    for off in (memory.view(v, d + 1)[:, 1:], memory[1 : v * d + 1].view(v, d)):  # rows, or the first, off 16 bytes
        p.w = off.copy_(p.w.clone())
        assert all(map(torch.equal, *(run("fused", p, one, **own) for own in ({}, {"tail": "fp8"}))))


@on_gpu
@pytest.mark.parametrize("many", [1, 90, 300, 1200])
def test_large_entries_that_no_sample_sees(many):
    """With 5000 classes every fourth one is looked at: `many` others hold nearly all of the softmax."""
    p = state("flat", 600, 5000, 64, "cuda")
    p.w.zero_()
    p.w[1 : 4 * many : 4, 0] = 1.0
    p.w[:, 1:] = 0.02 * torch.randn(5000, 63, device="cuda")
    p.e[:, 0] = torch.linspace(5.0, 60.0, 600, device="cuda")
    exact, full, got = in_three_ways(p)
    for g, f in zip(errors(got, exact), errors(full, exact), strict=True):
        assert g <= max(1.05 * f, 4e-3)


ODD = {
    "outliers": lambda p: (p.w[17, 3].fill_(1e4 * p.w.abs().median()), p.e[11, 5].fill_(1e4 * p.e.abs().median())),
    "zeros": lambda p: (p.e[3:9].zero_(), p.w[100:300].zero_()),
    "all zero": lambda p: (p.e.zero_(), p.w.zero_()),
    "all ignored": lambda p: p.target.fill_(-100),
    "ignored nan": lambda p: p.e[1].fill_(torch.nan),
    **{f"{t} {x}": lambda p, t=t, x=x: getattr(p, t)[7, 5].fill_(float(x)) for t in "ew" for x in ("nan", "inf")},
    "w -inf": lambda p: p.w[7, 5].fill_(-torch.inf),
}


@on_gpu
@pytest.mark.parametrize("change", ODD)
def test_odd_numbers_are_right_or_those_of_full(change):
    p = state("trained", 500, 3000, 128, "cuda")
    ODD[change](p)
    exact, full, got = in_three_ways(p)
    for g, f, x in zip(got, full, exact, strict=True):
        finite = x.isfinite() & f.isfinite()
        assert not (g.isfinite() & ~f.isfinite()).any() or change.startswith("w")  # never a number where there is none
        if finite.all():
            assert (g.double() - x).norm() <= 1.05 * max((f.double() - x).norm(), 3e-3 * x.norm())


@on_gpu
@pytest.mark.parametrize("budget", ["24MiB", "64MiB", "256MiB"])
def test_workspace_is_kept(budget):
    on_a_gpu.test_workspace_is_kept("fused", {"tail": "fp8"}, 2048, budget, "plain")


@on_gpu
def test_compiled_under_autocast_and_in_a_second_backward():
    p = state("trained", 512, 3000, 128, "cuda")
    e, w = p.e.float().requires_grad_(), p.w.float().requires_grad_()

    def call(e, w, target):
        with torch.autocast("cuda", torch.bfloat16):
            return linear_cross_entropy(e, w, target, tail="fp8")

    plain = torch.autograd.grad(call(e, w, p.target), (e, w))
    loss = torch.compile(call, fullgraph=True)(e, w, p.target)
    assert all(map(torch.equal, plain, torch.autograd.grad(loss, (e, w), retain_graph=True)))
    assert plain[0].dtype == plain[1].dtype == torch.float32
    loss = linear_cross_entropy(e.bfloat16(), w.bfloat16(), p.target, tail="fp8")
    loss.backward(retain_graph=True)
    with pytest.raises(T1Error, match="backward"):
        loss.backward()
