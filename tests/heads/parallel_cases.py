"""Cases of the vocabulary-parallel heads, by name: what each process of the group does (test_heads_parallel.py)."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import head_cases
import torch
import torch.distributed as dist
from head_cases import OPTION_SETS, REDUCTIONS, Problem, options, problem, upstream_for
from processes import Cases
from torch import Tensor

from t1lib.heads import linear_cross_entropy as in_one
from t1lib.heads.parallel import linear_cross_entropy

CHUNKED = {"head": "chunked", "chunks": 3}
SIZE = 3
ROWS = (90, 7, 160)  # of the weight on each rank: 257 classes in total
FEW = (24, 4, 20)  # for the interpreter; rows of these numbers of logits need no padding
STATS = ("lse", "logprob", "correct")
GRADS = {"input": (True, False, False), "weight": (False, True, False), "bias": (False, False, True)}


def values() -> Cases:
    """Both heads: options, reductions, special operands and targets; tokens replicated or sharded."""
    p, found = problem(36, 257, 16), {}
    for reduction in REDUCTIONS:
        for name in OPTION_SETS:
            found[f"{name}, {reduction}"] = {**options(name, p), "reduction": reduction}
        found[f"tokens dealt, {reduction}"] = {**found[f"all, {reduction}"], "sequence_parallel": True}
    found |= special(p, ROWS)
    found["float32"] = {"p": p.to(torch.float32), "tolerance": 3e-6, **options("all", p)}
    found["workspace"] = {"workspace": "1MiB", "chunks": None}
    common = {"p": p, "rows": ROWS, "tolerance": 1e-11, **CHUNKED}
    cases = {f"chunked, {name}": partial(agrees, **{**common, **kwargs}) for name, kwargs in found.items()}

    p, few = (problem(n, sum(FEW), 16, dtype=torch.float32) for n in (24, 9))  # 24 tokens make two chunks
    odd = special(few, FEW)
    odd["a logit far above the others"]["tolerance"] = 1e-4
    found = {name: odd[name] for name in ("a logit far above the others", "a rank all masked", "no gradients")} | {
        "tokens dealt": dict(p=p, chunks=2, sequence_parallel=True, **options("weighted smoothing", p)),
        "odd sizes": dict(p=problem(24, sum(FEW), 3, dtype=torch.float32), chunks=2),  # rows of no whole 16 bytes
        "softcap": dict(p=p, chunks=2, **options("softcap", p)),  # gradients made in the forward
        "tokens dealt, none": dict(reduction="none", sequence_parallel=True, **options("all", few)),
        "sum, no bias": dict(reduction="sum", bias=False),
        "filter, weight alone": dict(filter_eps=1e-3, grad=(False, True, False)),
    }
    common = {"p": few, "rows": FEW, "tolerance": 3e-6, "head": "fused"}
    return cases | {f"fused, {name}": partial(agrees, **{**common, **kwargs}) for name, kwargs in found.items()}


def special(p: Problem, rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Operands and targets that few have, by name; the last rank's classes are masked in one."""
    found: dict[str, dict[str, Any]] = {f"gradient of {name} alone": {"grad": grad} for name, grad in GRADS.items()}
    found |= {"no gradients": {"grad": (False,) * 3}, "no bias": {"bias": False}}
    found["no tokens"] = {"p": Problem(p.e[:0], p.w, p.b, p.target[:0]), "reduction": "sum"}
    for name, target in {
        "all targets on the first rank": p.target % rows[0],
        "all targets on the last rank": sum(rows) - 1 - p.target % rows[-1],
        "one token counts": p.target.index_fill(0, torch.arange(1, len(p.e)), -100),
        "all tokens ignored": torch.full_like(p.target, -100),
    }.items():
        changed = Problem(p.e, p.w, p.b, target.masked_fill(p.target < 0, -100))
        found[name] = {"p": changed, "reduction": "sum"}
    far, masked = (Problem(p.e, p.w, p.b.clone(), p.target) for _ in range(2))
    far.b[3] += 1000.0  # a class that only the first rank holds
    head_cases.mask(masked, slice(-rows[-1], None))
    return found | {"a logit far above the others": {"p": far}, "a rank all masked": {"p": masked}}


def agrees(p: Problem, rows: tuple[int, ...], tolerance: float, **kwargs: Any) -> None:
    """Assert that loss, gradients and statistics agree with those of head `full` in float64 in one process."""
    want, got = expected(p, rows, **kwargs), on_shards(p, rows, **kwargs)
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    names = [name for name in want if want[name].numel()]
    head_cases.assert_close([got[name] for name in names], [want[name] for name in names], tolerance)


def sixteen_bits(p: Problem, rows: tuple[int, ...], own: dict[str, Any], **kwargs: Any) -> None:
    """Errors, but of a sum, are about those of head `full` in one process: dE is not rounded per shard."""
    with patch.object(sys.modules[__name__], "upstream_for", torch.ones_like):  # other values round again
        exact, usual = (expected(p, rows, dtype=d, **kwargs) for d in (torch.float64, p.e.dtype))
        got = on_shards(p, rows, **kwargs, **own)
    bounds = head_cases.error_bounds("softcap" if "softcap" in kwargs and own["head"] == "chunked" else "plain", own)
    bounds["loss"] = bounds["loss"] if got["loss"].dim() else 1e6
    names = ("loss", "input", "linear_weight", "linear_bias")
    head_cases.assert_no_worse(*([found[name] for name in names] for found in (got, usual, exact)), bounds)


def own_rows(rows: tuple[int, ...]) -> slice:
    rank = dist.get_rank()
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def expected(
    p: Problem, rows: tuple[int, ...], dtype=torch.float64, sequence_parallel: bool = False, **kwargs: Any
) -> dict[str, Tensor]:
    """What this process should compute: the result of head `full` in `dtype` with the whole weight."""
    rest = {k: v for k, v in kwargs.items() if k not in ("head", "chunks", "workspace")}
    want, part = results(partial(in_one, head="full"), p.to(dtype), p.target, **rest), own_rows(rows)
    for name in {"linear_weight", "linear_bias"} & want.keys():
        want[name] = want[name][part]
    if sequence_parallel:
        by_token = {"input", *STATS} | ({"loss"} if kwargs.get("reduction") == "none" else set())
        for name in by_token & want.keys():
            want[name] = want[name].chunk(len(rows))[dist.get_rank()]
    return want


def on_shards(p: Problem, rows: tuple[int, ...], sequence_parallel: bool = False, **kwargs: Any) -> dict[str, Tensor]:
    """What this process computes from its rows of the weight."""
    part, rank, size = own_rows(rows), dist.get_rank(), len(rows)
    share = Problem(p.e, p.w[part], None if p.b is None else p.b[part], p.target)
    if sequence_parallel:
        share.e, share.target = p.e.chunk(size)[rank], p.target.chunk(size)[rank]
        if "token_weight" in kwargs:
            kwargs["token_weight"] = kwargs["token_weight"].chunk(size)[rank]
    call = partial(linear_cross_entropy, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
    return results(call, share, p.target, **kwargs)


def results(
    call: Callable[..., Any], p: Problem, every_target: Tensor, *, bias: bool = True,
    grad: tuple[bool, ...] = (True, True, True), **kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """What `call` returns and its gradients, by name; the upstream gradient is the same however tokens are sharded."""
    e, w = (t.detach().clone().requires_grad_(g) for t, g in zip((p.e, p.w), grad, strict=False))
    b = p.b.detach().clone().requires_grad_(grad[2]) if bias else None
    loss, stats = call(e, w, p.target, linear_bias=b, return_stats=True, **kwargs)
    found = {"loss": loss.detach(), **{n: s.double() for n, s in zip(STATS, stats, strict=True)}}
    operands = {"input": e, "linear_weight": w, "linear_bias": b}
    wanted = {n: t for n, t in operands.items() if t is not None and t.requires_grad}
    if wanted:
        every = upstream_for(loss.detach().new_empty(every_target.shape if loss.dim() else ()))
        upstream = every if every.shape == loss.shape else every.chunk(dist.get_world_size())[dist.get_rank()]
        found |= zip(wanted, torch.autograd.grad(loss, list(wanted.values()), upstream), strict=True)
    return found
