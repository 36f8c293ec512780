"""Cases of the vocabulary-parallel heads, by name: what each process of the group does (parallel_worker.py)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from head_cases import OPTION_SETS, REDUCTIONS, Problem, assert_close, options, problem, upstream_for
from torch import Tensor

from t1lib.heads import linear_cross_entropy as whole
from t1lib.heads.parallel import linear_cross_entropy

Cases = dict[str, Callable[[], None]]
TORCH_HEADS = {
    "full": {"head": "full"},
    "by sequence": {"head": "chunked", "chunks": 3},
    "by vocabulary": {"head": "chunked", "by": "vocabulary", "chunks": 3},
}
DEALT = {2: (100, 157), 3: (90, 7, 160)}  # rows of the weight: 257 classes
STATS = ("lse", "logprob", "correct")


def cases(size: int) -> Cases:
    return {**kernels(size)}


def exact(size: int) -> Cases:
    """Every head of PyTorch's operators, option and reduction, in float64 and on unequal shards."""
    found = {}
    for head, own in TORCH_HEADS.items():
        for name in OPTION_SETS:
            for reduction in REDUCTIONS:
                p = problem(36, 257, 16)
                kwargs = {**options(name, p), **own, "reduction": reduction}
                found[f"{head}, {name}, {reduction}"] = partial(agrees, p, DEALT[size], 1e-11, **kwargs)
    return found


def sequence(size: int) -> Cases:
    """Each process is given tokens of its own."""
    found = {}
    for head, own in TORCH_HEADS.items():
        for reduction in REDUCTIONS:
            p = problem(36, 257, 16)
            kwargs = {**options("all", p), **own, "reduction": reduction}
            found[f"tokens dealt, {head}, {reduction}"] = partial(
                agrees, p, DEALT[size], 1e-11, sequence_parallel=True, **kwargs
            )
    return found


def kernels(size: int) -> Cases:
    """Head `fused` by Triton's interpreter."""
    def case(tolerance: float = 3e-6, rows: tuple[int, ...] = (70, 60, 20)[:size], **kwargs: Any) -> Callable[[], None]:
        return partial(agrees, kwargs.pop("problem", p), rows, tolerance, head="fused", **kwargs)

    p = problem(36, sum((70, 60, 20)[:size]), 24, dtype=torch.float32)
    found = {f"fused, {n}": case(**options(n, p)) for n in OPTION_SETS}
    found |= {f"fused, none, {n}": case(reduction="none", **options(n, p)) for n in ("plain", "all")}
    found["fused, sum, two chunks"] = case(reduction="sum", chunks=2)
    found["fused, tokens dealt"] = case(sequence_parallel=True, chunks=2, **options("token_weight", p))
    found["fused, tokens dealt, none"] = case(sequence_parallel=True, reduction="none", **options("all", p))
    return found


def agrees(
    p: Problem, rows: tuple[int, ...], tolerance: float, *, bias: bool = True, grad: tuple[bool, ...] = (True,) * 3,
    sequence_parallel: bool = False, **kwargs: Any,
) -> None:  # fmt: skip
    """Loss, gradients and statistics are those of one process in float64."""
    want = in_one_process(p, bias, grad, **kwargs)
    got = on_shards(p, rows, bias, grad, sequence_parallel, **kwargs)
    part = own_rows(rows)
    for name in ("linear_weight", "linear_bias"):
        if name in want:
            want[name] = want[name][part]
    if sequence_parallel:
        for name in ("input", *STATS, *(["loss"] if kwargs.get("reduction") == "none" else [])):
            if name in want:
                want[name] = want[name].chunk(len(rows))[dist.get_rank()]
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name in want:
        try:
            assert_close([got[name]], [want[name]], tolerance)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None


def own_rows(rows: tuple[int, ...]) -> slice:
    rank = dist.get_rank()
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def in_one_process(p: Problem, bias: bool, grad: tuple[bool, ...], **kwargs: Any) -> dict[str, Tensor]:
    own = ("head", "chunks", "by", "accumulate", "workspace")
    p, rest = p.to(torch.float64), {k: v for k, v in kwargs.items() if k not in own}
    return results(partial(whole, head="full"), p, p.target, bias, grad, **rest)


def on_shards(
    p: Problem, rows: tuple[int, ...], bias: bool, grad: tuple[bool, ...], sequence_parallel: bool, **kwargs: Any
) -> dict[str, Tensor]:
    part, share = own_rows(rows), Problem(p.e, p.w, p.b, p.target)
    share.w, share.b = p.w[part], None if p.b is None else p.b[part]
    call = partial(linear_cross_entropy, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        return results(call, share, p.target, bias, grad, **kwargs)
    rank, size = dist.get_rank(), len(rows)
    share.e, share.target = p.e.chunk(size)[rank], p.target.chunk(size)[rank]
    if kwargs.get("token_weight") is not None:
        kwargs["token_weight"] = kwargs["token_weight"].chunk(size)[rank]
    return results(call, share, p.target, bias, grad, **kwargs)


def results(
    call: Callable[..., Any], p: Problem, every_target: Tensor, bias: bool, grad: tuple[bool, ...], **kwargs: Any
) -> dict[str, Tensor]:
    """What `call` returns and its gradients, by name; the upstream gradient is the same however tokens are dealt."""
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
