"""Calls of heads drawn by chance: shapes, dtypes, strides, options and budgets, against `full` in float64."""

import random
from typing import Any

import pytest
import torch
from head_cases import REDUCTIONS, Problem, options, problem, run
from refusals import refused
from torch import Tensor

from t1lib.heads import linear_cross_entropy

SINGLE = ("weight", "smoothing", "softcap", "z_loss", "token_weight")
OWN = {
    "full": [{}],
    "chunked": [{}, {"by": "vocabulary"}, {"chunks": 3}, {"by": "vocabulary", "chunks": 5}],
    "fused": [{}, {}, {"chunks": 2}, {"accumulate": "float32"}],
}
OF_HEADS = ("chunks", "by", "accumulate", "workspace")


def spread(draw: random.Random, tensor: Tensor) -> Tensor:
    """The tensor, at times with other strides or in the middle of a storage."""
    kind = draw.choice(["as it is", "as it is", "columns first", "every other column", "an odd offset"])
    if kind == "columns first":
        return tensor.t().contiguous().t()
    if kind == "every other column":
        wide = tensor.new_empty(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
        return wide.copy_(tensor)
    if kind == "an odd offset":
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    return tensor


def drawn(draw: random.Random, head: str, most: tuple[int, int, int], device: str) -> tuple[Problem, dict[str, Any]]:
    """Operands of at most these sizes (tokens, vocabulary, hidden size), and arguments of `run`."""
    n, v, d = (1 + int(size * draw.random() ** 3) for size in most)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16] if head != "full" else [torch.float32])
    p = problem(n, v + 1, max(d, 8), dtype=dtype, bias=draw.random() < 0.5, seed=draw.randrange(10**6), device=device)
    if draw.random() < 0.3:  # a few frequent targets
        p.target.copy_(torch.where(p.target < 0, p.target, p.target % min(v, 3)))
    p.e, p.w = spread(draw, p.e), spread(draw, p.w)
    given: dict[str, Any] = {"reduction": draw.choice(REDUCTIONS)}
    if head == "chunked" and dtype == torch.float16 and given["reduction"] == "mean":
        given["reduction"] = "sum"  # small gradients of a mean are lost, as its docstring says
    for name in draw.sample(SINGLE, draw.choice([0, 0, 1, 2, 3])):
        given |= options(name, p)
    if "softcap" in given:
        given["softcap"] = draw.choice([4.0, 30.0, 1e5])  # a tighter one saturates
    grads = [draw.random() < 0.8 for _ in range(3)]
    given["grad"] = tuple(grads) if any(grads[:2]) else (True, True, True)
    own = draw.choice(OWN[head])
    return p, given | own | ({} if own else {"workspace": draw.choice([None, None, "1MiB", "40MiB"])})


def check(seed: int, head: str, most: tuple[int, int, int], device: str) -> None:
    """Losses, gradients and statistics are as exact as 16 bits let `full` be, or float32 lets anything be."""
    p, given = drawn(random.Random(seed), head, most, device)
    told = {k: v for k, v in given.items() if not isinstance(v, Tensor)} | {"dtype": p.e.dtype, "seed": seed}
    plain = {k: v for k, v in given.items() if k not in OF_HEADS}
    exact, usual = run("full", p.to(torch.float64), **plain), run("full", p, **plain)
    try:
        got = run(head, p, **given)
    except Exception as error:
        assert "the least that works" in refused(lambda: run(head, p, **given)), (told, error)
        return
    with torch.no_grad():  # the loss alone is computed otherwise
        stats = {"linear_bias": p.b, "return_stats": True, **given}
        del stats["grad"]
        alone, found = linear_cross_entropy(p.e, p.w, p.target, head=head, **stats)
        stats = {k: v for k, v in stats.items() if k not in OF_HEADS}
        _, wanted = linear_cross_entropy(p.e, p.w, p.target, head="full", **stats)
    for what, g, u, x in zip(range(5), (alone, *got), (usual[0], *usual), (exact[0], *exact), strict=False):
        assert g.dtype == u.dtype and g.isfinite().all(), (what, told)
        error, least = ((t.double() - x).norm() for t in (g, u))
        # Few values may all be rounded unluckily; a float32 sum of 50,000 terms, one after another, is off by 1.5e-5.
        once = max(torch.finfo(g.dtype).eps, 4e-5) * x.norm()
        assert error <= 2.5 * least + once + 1e-6, (what, float(error / x.norm()), float(least / x.norm()), told)
    for a, b in zip(found[:2], wanted[:2], strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=1e-3 if p.e.dtype == torch.float32 else 0.1), told


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_on_a_cpu(first):
    for seed in range(first, first + 10):
        check(seed, "chunked", (200, 3000, 150), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head, first", [(head, first) for head in ("chunked", "fused") for first in range(0, 120, 10)])
def test_on_a_gpu(head, first):
    for seed in range(first, first + 10):
        check(seed, head, (3000, 60000, 1500), "cuda")
