"""On a GPU: no host waits, 16-bit accuracy, and the memory and workspace that `chunked` promises."""

import pytest
import test_heads_agree
import test_heads_full
import torch
from head_cases import OPTION_SETS, REDUCTIONS, assert_no_worse, error_bounds, options, problem, run

from t1lib.heads import linear_cross_entropy, parse_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOTH = [{}, {"by": "vocabulary"}]


@pytest.mark.parametrize("own", BOTH, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_host_never_waits(own, name, reduction):
    """Not even in the target's range check."""
    p = problem(300, 9000, 64, dtype=torch.bfloat16, device="cuda")
    kwargs = options(name, p) | {"reduction": reduction}
    upstream = torch.ones((300,) if reduction == "none" else (), device="cuda")
    run("chunked", p, upstream, **kwargs, **own)  # the first call may wait while libraries load
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run("chunked", p, upstream, **kwargs, **own)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("own", BOTH, ids=str)
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("dtype, rows", [(torch.bfloat16, 20011), (torch.float16, 20000)])
def test_error_is_that_of_full(own, name, dtype, rows):
    """With 20011 classes, rows of logits need padding."""
    p = problem(512, rows, 256, dtype=dtype, device="cuda")
    kwargs = options(name, p)
    one = torch.ones((), device="cuda")
    exact = run("full", p.to(torch.float64), one.double(), **kwargs)
    plain, got = (run(head, p, one, **kwargs, **extra) for head, extra in (("full", {}), ("chunked", own)))
    assert_no_worse(got, plain, exact, error_bounds(name, own))


@pytest.mark.parametrize("head, own", [("full", {}), *(("chunked", own) for own in BOTH)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_holds_on_a_cpu_holds_here(head, own, dtype):
    """On CUDA a scalar takes the other operand's dtype, and rows of logits are padded."""
    test_heads_agree.test_rows_of_logits_start_on_multiples_of_eight(own, dtype, head, "cuda")
    test_heads_agree.test_the_upstream_scalar_is_not_rounded_to_16_bits("cuda")
    test_heads_full.test_has_second_derivatives(torch.float32, "cuda")


@pytest.mark.parametrize("own", BOTH, ids=str)
def test_float32_on_the_gpu(own):
    """With float32 operands there is a single buffer: softmax and product overwrite what they read."""
    p = problem(300, 9000, 64, dtype=torch.float32, device="cuda")
    exact = run("full", p.to(torch.float64))
    for g, x in zip(run("chunked", p, **own), exact, strict=True):
        assert (g.double() - x).norm() <= 1e-5 * x.norm()


def workspace_of(p, call, upstream=1.0):
    """Peak bytes beyond operands and gradients of losses `call(e, w)` and their backward, without a bias (whose GEMM
    needs its own)."""
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


def test_workspace_is_a_seventh_of_full():
    p = problem(1024, 32000, 256, dtype=torch.bfloat16, device="cuda")
    chunked, full = (
        workspace_of(p, lambda e, w, head=head: linear_cross_entropy(e, w, p.target, head=head))
        for head in ("chunked", "full")
    )
    assert chunked <= full / 7


@pytest.mark.parametrize("own", BOTH, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("budget", ["16MiB", "64MiB"])
def test_workspace_is_kept(own, name, budget):
    p = problem(1024, 32000, 256, dtype=torch.bfloat16, device="cuda")
    kwargs = {"head": "chunked", "workspace": budget, **options(name, p), **own}
    assert workspace_of(p, lambda e, w: linear_cross_entropy(e, w, p.target, **kwargs)) <= parse_bytes(budget)
