"""Head `fused` on a GPU: 16-bit accuracy, memory, no host waits, CUDA graphs, reproducibility, torch.compile."""

import pytest
import torch
from head_cases import OPTION_SETS, REDUCTIONS, options, problem, run
from test_heads_gpu import workspace_of

from t1lib.heads import linear_cross_entropy, parse_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("own", [{}, {"chunks": 4}], ids=str)
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_that_of_full(own, name, reduction, dtype):
    p = problem(1000, 20011, 264, dtype=dtype, device="cuda")
    kwargs = options(name, p) | {"reduction": reduction}
    one = torch.ones(() if reduction == "mean" else (1000,), device="cuda")
    exact = run("full", p.to(torch.float64), one.double(), **kwargs)
    plain, got = (run(head, p, one, **kwargs, **extra) for head, extra in (("full", {}), ("fused", own)))
    for what, g, f, x in zip(["loss", "de", "dw", "db"], got, plain, exact, strict=True):
        error, usual = ((t.double() - x).norm() for t in (g, f))
        bound = 1.5 if what in ("dw", "db") else 1.05
        assert error <= bound * usual + 1e-6 * x.norm(), f"{what}: {error / usual:.3f} times full's error"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_a_device_that_is_not_the_current_one(reduction):
    p = problem(200, 3001, 64, dtype=torch.bfloat16, device="cuda:1")
    up = torch.full(() if reduction == "mean" else (200,), 0.5, device="cuda:1")
    with torch.cuda.device(1):
        there = run("fused", p, up, reduction=reduction)
    with torch.cuda.device(0):
        here = run("fused", p, up, reduction=reduction)
    assert all(map(torch.equal, here, there))


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernels_for_any_gpu(name, reduction, monkeypatch):
    """The kernels that run where the Hopper ones cannot."""
    from t1lib.heads import fused_launch  # needs Triton

    monkeypatch.setattr(fused_launch, "hopper", None)
    test_error_is_at_most_that_of_full({"chunks": 4}, name, reduction, torch.bfloat16)


@pytest.mark.parametrize("name", ["plain", "weighted smoothing", "softcap"])
def test_first_chunk_in_the_memory_of_the_weight_gradient(name, monkeypatch):
    from t1lib.heads import fused_plan, fused_search  # needs Triton

    lent = fused_plan.Lent(512, 5120, fused_plan.Work(32, 2))  # eight panels, the last of them not full
    rest = fused_plan.Early(384, 4, 0, *2 * (fused_plan.Work(40, 5),))
    monkeypatch.setattr(fused_search, "plan_early", lambda *_: rest._replace(lent=lent))
    p = problem(2048, 40001, 1024, dtype=torch.bfloat16, device="cuda")
    kwargs = options(name, p) | {"reduction": "mean"}
    one = torch.ones((), device="cuda")
    exact = run("full", p.to(torch.float64), one.double(), **kwargs)
    plain, got = (run(head, p, one, **kwargs, **own) for head, own in (("full", {}), ("fused", {})))
    for g, f, x in zip(got, plain, exact, strict=True):
        assert (g.double() - x).norm() <= 1.5 * (f.double() - x).norm() + 1e-6 * x.norm()


@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_weight_gradient_is_as_exact_as_fulls_at_any_number_of_chunks(chunks):
    """Targets are as frequent as in a text: the rows of dW of frequent ones grow with every chunk."""
    p = problem(2048, 20011, 264, dtype=torch.bfloat16, bias=False, ignored=False, device="cuda")
    p.target.copy_(torch.multinomial(1 / torch.arange(1.0, 20012), 2048, replacement=True))
    one = torch.ones((), device="cuda")
    exact = run("full", p.to(torch.float64), one.double())[2]
    full, got = (run(head, p, one, **own)[2].double() for head, own in (("full", {}), ("fused", {"chunks": chunks})))
    assert (got - exact).norm() <= 1.05 * (full - exact).norm()


@pytest.mark.parametrize("shape", [(1, 50257, 123), (300, 50257, 123), (130, 9000, 64)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float32_and_ragged_shapes(shape, reduction):
    p = problem(*shape, dtype=torch.float32, device="cuda")
    exact = run("full", p.to(torch.float64), reduction=reduction)
    for g, x in zip(run("fused", p, reduction=reduction), exact, strict=True):
        assert (g.double() - x).norm() <= 1e-5 * x.norm()


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_never_waits_and_gives_the_same_bits(name, reduction):
    p = problem(700, 9000, 64, dtype=torch.bfloat16, device="cuda")
    kwargs = options(name, p) | {"reduction": reduction, "chunks": 2}
    upstream = torch.ones((700,) if reduction == "none" else (), device="cuda")
    first = run("fused", p, upstream, **kwargs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run("fused", p, upstream, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("budget", ["12MiB", "32MiB", "128MiB"])
def test_workspace_is_kept(name, reduction, budget):
    p = problem(2048, 32000, 256, dtype=torch.bfloat16, device="cuda")
    own = {"reduction": reduction} | options(name, p)
    if reduction == "none":
        operands = [t.detach().requires_grad_() for t in (p.e, p.w)]
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for t in operands:
                t.grad = None
            losses = linear_cross_entropy(*operands, p.target, head="fused", workspace=budget, **own)
            losses.backward(torch.ones_like(losses))
        used = torch.cuda.max_memory_allocated() - before
        assert used <= parse_bytes(budget) + sum(t.nbytes for t in operands)
    else:
        assert workspace_of("fused", p, workspace=budget, **own) <= parse_bytes(budget)


def test_is_captured_in_a_graph():
    p = problem(300, 9000, 64, dtype=torch.bfloat16, bias=False, device="cuda")
    e, w = p.e.requires_grad_(), p.w.requires_grad_()

    def step():
        e.grad = w.grad = None
        loss = linear_cross_entropy(e, w, p.target, head="fused")
        loss.backward()
        return loss.detach(), e.grad, w.grad

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = [t.clone() for t in step()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_as_one_graph_under_autocast(reduction):
    p = problem(300, 9000, 64, dtype=torch.float32, bias=False, device="cuda")

    def loss_of(e, w):
        with torch.autocast("cuda", torch.bfloat16):
            return linear_cross_entropy(e * 1.0, w, p.target, head="fused", reduction=reduction).sum()

    results = []
    for f in (loss_of, torch.compile(loss_of, fullgraph=True)):
        e, w = p.e.clone().requires_grad_(), p.w.clone().requires_grad_()
        loss = f(e, w)
        results.append((loss.detach(), *torch.autograd.grad(loss, (e, w))))
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() <= 1e-6 * a.norm()
