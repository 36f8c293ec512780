"""On a GPU: 16-bit accuracy, the memory and workspace that heads promise, no host waits, graphs, torch.compile."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import test_heads_contract as contract
import torch
from head_cases import OPTION_SETS, REDUCTIONS, Problem, assert_compiles, options, problem, run

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy, parse_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CHUNKED = [("chunked", {}), ("chunked", {"by": "vocabulary"})]
EXACT = [(*head, "mean") for head in CHUNKED]
EXACT += [("fused", own, reduction) for own in ({}, {"chunks": 4}) for reduction in ("mean", "none")]
BUDGETS = [(*head, 1024, budget) for head in CHUNKED for budget in ("16MiB", "64MiB")]
BUDGETS += [("fused", {"reduction": r}, 2048, b) for r in ("mean", "none") for b in ("14MiB", "32MiB", "128MiB")]
plain_or_all = pytest.mark.parametrize("name", ["plain", "all"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("head, own, reduction", EXACT, ids=str)
def test_error_is_at_most_that_of_full(head, own, reduction, name, dtype):
    """With 20011 classes, rows of logits need padding."""
    shape = (1000, 20011, 264) if head == "fused" else (512, 20011 if dtype == torch.bfloat16 else 20000, 256)
    ones = torch.ones(shape[0], device="cuda")
    contract.test_sixteen_bit_error_is_that_of_full(own, dtype, name, reduction, head, shape, ones, "cuda")


@pytest.mark.parametrize("head, first", [(head, first) for head in ("chunked", "fused") for first in range(0, 120, 10)])
def test_calls_drawn_by_chance(head, first):
    contract.test_calls_drawn_by_chance(first, head, (3000, 60000, 1500), "cuda")


@plain_or_all
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernels_for_any_gpu(name, reduction, monkeypatch):
    from t1lib.heads import fused_launch  # needs Triton

    monkeypatch.setattr(fused_launch, "hopper", None)
    test_error_is_at_most_that_of_full("fused", {"chunks": 4}, reduction, name, torch.bfloat16)


@pytest.mark.parametrize("head, own", [("full", {}), *CHUNKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_holds_on_a_cpu_holds_here(head, own, dtype):
    """On CUDA a scalar takes the other operand's dtype, and rows of logits are padded."""
    contract.test_rows_of_logits_start_on_multiples_of_eight(own, dtype, head, "cuda")
    contract.test_the_upstream_scalar_is_not_rounded_to_16_bits("cuda")
    contract.test_full_has_second_derivatives("cuda")


@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_weight_gradient_is_as_exact_as_fulls_at_any_number_of_chunks(chunks):
    """Targets are as frequent as in a text: the rows of dW of frequent ones grow with every chunk."""
    p = problem(2048, 20011, 264, dtype=torch.bfloat16, bias=False, ignored=False, device="cuda")
    p.target.copy_(torch.multinomial(1 / torch.arange(1.0, 20012), 2048, replacement=True))
    one = torch.ones((), device="cuda")
    exact = run("full", p.to(torch.float64), one.double())[2]
    full, got = (run(head, p, one, **own)[2].double() for head, own in (("full", {}), ("fused", {"chunks": chunks})))
    assert (got - exact).norm() <= 1.05 * (full - exact).norm()


def test_offsets_beyond_32_bits():
    """Rows of a weight that lie 2²⁶ elements apart: those from the 32nd on are beyond 2³¹."""
    p = problem(40, 70, 16, dtype=torch.bfloat16, bias=False, device="cuda")
    wide = torch.empty(69 * 2**26 + 16, dtype=torch.bfloat16, device="cuda").as_strided((70, 16), (2**26, 1))
    wide.copy_(p.w)
    assert all(map(torch.equal, run("fused", Problem(p.e, wide, None, p.target)), run("fused", p)))


def workspace_of(p, call, upstream=1.0):
    """Peak bytes beyond operands and gradients of losses `call(e, w)` and their backward, without a bias."""
    operands = [t.detach().requires_grad_() for t in (p.e, p.w)]
    for _ in range(3):  # in the first pass, libraries allocate their own buffers
        for t in operands:
            t.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = call(*operands)
        losses.backward(torch.full_like(losses, upstream))
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in operands)


@pytest.mark.parametrize("head, own, tokens, budget", BUDGETS, ids=str)
@plain_or_all
def test_workspace_is_kept(head, own, tokens, budget, name):
    p = problem(tokens, 32000, 256, dtype=torch.bfloat16, device="cuda")
    kwargs = {"head": head, "workspace": budget, **options(name, p), **own}
    assert workspace_of(p, lambda e, w: linear_cross_entropy(e, w, p.target, **kwargs)) <= parse_bytes(budget)


@pytest.mark.parametrize("head", ["chunked", "fused"])
def test_the_gradients_of_a_tied_weight_are_summed_in_place(head):
    """Beside the output layer's gradient, which the forward made, there is the embedding's, and no third."""
    w = torch.randn(20000, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ids = torch.randint(20000, (64,), device="cuda")
    loss = linear_cross_entropy(torch.nn.functional.embedding(ids, w), w, ids, head=head, workspace="16MiB")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * w.nbytes


@pytest.mark.parametrize("head, own", [*CHUNKED, ("fused", {"chunks": 2})], ids=str)
@plain_or_all
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_host_never_waits_and_fused_gives_the_same_bits(head, own, name, reduction):
    """Not even in the target's range check; the first call may wait while libraries load."""
    p = problem(700, 9000, 64, dtype=torch.bfloat16, device="cuda")
    kwargs = options(name, p) | {"reduction": reduction} | own
    upstream = torch.ones((700,) if reduction == "none" else (), device="cuda")
    first = run(head, p, upstream, **kwargs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(head, p, upstream, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert head != "fused" or all(map(torch.equal, first, second))


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


def test_four_threads_at_once():
    shapes = [(512, 8192, 256), (700, 8001, 200), (1536, 24576, 512), (2048, 32000, 1000)]
    problems = [problem(*shape, dtype=torch.bfloat16, bias=False, device="cuda") for shape in shapes]
    torch.cuda.synchronize()

    def work(p):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [run("fused", p) for _ in range(5)]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(work, problems))
    for p, found in zip(problems, every, strict=True):
        alone = run("fused", p)
        assert all(all(map(torch.equal, one, alone)) for one in found)


def test_is_captured_in_a_graph():
    p = problem(300, 9000, 64, dtype=torch.bfloat16, bias=False, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = run("fused", p)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run("fused", p)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_copies_under_autocast_are_within_the_budget(reduction, compiled):
    """Of a float32 weight: 15.6 MiB. And the compiler makes no copies of the gradients, which have 31 MiB."""
    p = problem(2048, 32000, 256, dtype=torch.float32, bias=False, device="cuda")

    def losses_of(e, w, workspace="96MiB"):
        with torch.autocast("cuda", torch.bfloat16):
            return linear_cross_entropy(e, w, p.target, head="fused", reduction=reduction, workspace=workspace)

    assert_compiles(lambda e, w: losses_of(e * 1.0, w).sum(), (p.e, p.w), fullgraph=True)
    f = torch.compile(losses_of, fullgraph=True) if compiled else losses_of
    assert workspace_of(p, f, upstream=0.7) <= parse_bytes("96MiB")
    with pytest.raises(T1Error, match="the least that works"):
        losses_of(p.e.requires_grad_(), p.w.requires_grad_(), "16MiB")


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_unknown_numbers_of_tokens_compile():
    p = problem(300, 9000, 64, dtype=torch.bfloat16, bias=False, device="cuda")

    def loss_of(e, w, workspace):
        mask = p.target != -100
        return linear_cross_entropy((e * 1.0)[mask], w, p.target[mask], head="fused", workspace=workspace)

    for workspace in (2**28, 2**28 + 4096, 2**28 + 8192):
        assert_compiles(loss_of, (p.e, p.w), workspace, fullgraph=True)


@pytest.mark.parametrize("own", [{}, {"tail": "fp8"}, {"reduction": "none"}], ids=str)
def test_a_compiled_call_without_tokens(own):
    e, w = (torch.ones(n, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (0, 3000))
    call = torch.compile(lambda *call: linear_cross_entropy(*call, **own), fullgraph=True)
    loss = call(e, w, torch.zeros(0, dtype=torch.int64, device="cuda"))
    assert loss.isnan() if loss.dim() == 0 else loss.shape == (0,)
    de, dw = torch.autograd.grad(loss.sum(), (e, w))
    assert de.shape == (0, 128) and not dw.any()
