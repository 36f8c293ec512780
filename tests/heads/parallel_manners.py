"""Cases of the vocabulary-parallel heads beyond their values: DTensors, rounding, communication, mutations."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import parallel_cases
import torch
import torch.distributed as dist
from head_cases import Problem, options, problem
from parallel_cases import ALL, FEW, ROWS, TORCH_HEADS, Cases, agrees, expected, on_shards, own_rows, results
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from t1lib.errors import T1Error
from t1lib.heads import agreement, fused_memory, fused_op, fused_plan, fused_run, fused_search, fused_shards, shards
from t1lib.heads import linear_cross_entropy as in_one
from t1lib.heads.parallel import linear_cross_entropy
from t1lib.heads.shards import Shards


def manners(size: int) -> Cases:
    found = {"the loss and dE have the same bits everywhere": partial(same_bits, size)}
    for head, own in TORCH_HEADS.items():
        found[f"{head}, 16 bits"] = partial(sixteen_bits, size, torch.bfloat16, **own)
        found[f"{head}, autocast"] = partial(autocast, size, **own)
        found[f"{head}, what is exchanged"] = partial(exchanged, size, False, **own)
        found[f"{head}, tokens dealt, what is exchanged"] = partial(exchanged, size, True, **own)
        found[f"{head}, DTensor"] = partial(sharded, **own)
    found["leading dimensions"] = partial(leading_dimensions, size)
    found["a device mesh"] = partial(by_mesh, size)
    combine = (Shards, "combine", lambda self, rows, hit: (rows, torch.ones_like(rows.top)))
    found["by sequence, combination left out"] = partial(noticed, combine, problem(36, 257, 16), ROWS[size], 1e-2)
    found["fused, combination left out"] = partial(
        noticed, (fused_shards, "combine", lambda *_: None),
        problem(20, 100, 16, dtype=torch.float32), FEW[size], 1e-2, head="fused",
    )  # fmt: skip
    for by in ("sequence", "vocabulary"):
        found[f"by {by}, the least workspace"] = partial(counted, size, by)
    found["fused, shards that are not equal lend nothing"] = partial(lends_nothing, size)
    found["fused, targets elsewhere write nothing"] = partial(within_bounds, size)
    if size == 2:
        found["fused, 16 bits"] = partial(sixteen_bits, size, torch.float16, tokens=20, head="fused")
        found["fused, what is exchanged"] = partial(exchanged, size, False, head="fused", chunks=2)
        found["fused, tokens dealt, what is exchanged"] = partial(exchanged, size, True, head="fused", chunks=2)
        found["fused, first chunk in the memory of dW"] = lent
        found["fused, compiled"] = partial(compiled, False)
        found["fused, compiled, tokens dealt"] = partial(compiled, True)
    return found


def same_bits(size: int) -> None:
    got = on_shards(problem(36, 257, 16, dtype=torch.float32), ROWS[size], head="full")
    for name in ("loss", "input"):
        every = [torch.empty_like(got[name]) for _ in range(size)]
        dist.all_gather(every, got[name].contiguous())
        assert all(torch.equal(t, got[name]) for t in every), name


def sixteen_bits(size: int, dtype: torch.dtype, tokens: int = 150, **own: Any) -> None:
    """The error is about that of the same head in one process: dE is not rounded per shard."""
    rows = FEW[size] if own["head"] == "fused" else ROWS[size]
    p = problem(tokens, sum(rows), 64, dtype=dtype, bias=False)
    usual = results(partial(in_one, **own), p, p.target, bias=False)
    usual["linear_weight"] = usual["linear_weight"][own_rows(rows)]
    exact = expected(p, rows, bias=False, grad=ALL, sequence_parallel=False)
    got = on_shards(p, rows, bias=False, **own)
    for name in ("input", "linear_weight"):
        error, least = ((t[name].double() - exact[name]).norm() for t in (got, usual))
        assert got[name].dtype == dtype and error <= 1.05 * least, f"{name}: {error / least:.3f} times its error"


def autocast(size: int, **own: Any) -> None:
    p = problem(36, 257, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = on_shards(p, ROWS[size], **own)
    want = expected(p, ROWS[size], bias=True, grad=ALL, sequence_parallel=False)
    for name in ("loss", "input", "linear_weight"):
        error = (got[name] - want[name]).abs().max() / want[name].abs().max()
        assert 1e-5 < error < 0.05 and got[name].dtype == torch.float32, f"{name}: {error}"


def exchanged(size: int, sequence_parallel: bool, **own: Any) -> None:
    """Check each collective and the size of its larger tensor: never more than per-token statistics, or dE."""
    n, d = 64 * size, 5  # the hidden size is smaller than the number of classes
    p = problem(n, 100 * size, d, dtype=torch.float32)
    sent: list[tuple[str, int]] = []

    def noting(owner: Any, name: str) -> Any:
        collective = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append((name, max(t.numel() for t in args if isinstance(t, Tensor))))
            return collective(*args, **kwargs)

        return patch.object(owner, name, call)

    with (
        noting(agreement, "all_gather"), noting(shards, "all_gather"), noting(shards, "reduce_scatter"),
        noting(dist, "all_reduce"),
    ):  # fmt: skip
        on_shards(p, (100,) * size, sequence_parallel=sequence_parallel, **own)
    assert sent == [("all_gather", 3 * size), *exchanges(size, n, d, sequence_parallel, **own)], sent


def exchanges(
    size: int, n: int, d: int, dealt: bool, head: str, chunks: int = 1, by: str = "sequence"
) -> list[tuple[str, int]]:
    """The collectives in a loss over n tokens and its backward, after the ranks have agreed."""
    tokens = [("all_gather", n * d)] if dealt else []
    found = [("all_gather", n), *tokens] if dealt else []
    whole = [("reduce_scatter" if dealt else "all_reduce", n * d)]
    if head == "full":
        return [*found, ("all_reduce", n), ("all_reduce", 3 * n), *whole, *tokens]
    if by == "vocabulary":
        return [*found, ("all_gather", 4 * n * size), *tokens, *whole]
    if head == "fused":
        found.append(("all_reduce", n))
        d = fused_plan.up(d, 4)
    for start in range(0, n, -(-n // chunks)):
        rows = min(-(-n // chunks), n - start)
        of_rows = [] if dealt and head == "chunked" else [("all_reduce", rows * d)]
        found += [("all_gather", 4 * rows * size), *of_rows]
    return [*found, *whole] if dealt and head == "chunked" else found


def counted(size: int, by: str) -> None:
    """The least workspace of `chunked` is that of one process, plus the buffer for summing dE if not dE itself."""
    apart = 36 * 16 * 4
    for dtype, dealt, more in (
        (torch.float32, False, 0),
        (torch.float32, True, apart),
        (torch.bfloat16, False, 0 if by == "vocabulary" else apart),
    ):
        p, most = problem(36, 257, 16, dtype=dtype, bias=False), max(ROWS[size])
        one = Problem(p.e, p.w[:most], None, p.target % most)
        kwargs = {"bias": False, "head": "chunked", "by": by, "workspace": 1}
        alone = least_of(partial(results, in_one, one, one.target, **kwargs))
        assert least_of(partial(on_shards, p, ROWS[size], sequence_parallel=dealt, **kwargs)) == alone + more


def least_of(call: Callable[[], Any]) -> int:
    try:
        call()
    except T1Error as e:
        return int(str(e).split("the least that works is ")[1].split()[0])
    raise AssertionError("no error")


def sharded(**own: Any) -> None:
    """257 rows sharded as DTensor does it: the gradient is a DTensor, too."""
    p = problem(36, 257, 16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    e = p.e.clone().requires_grad_()
    w, b = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (p.w, p.b))
    loss = linear_cross_entropy(e, w, p.target, linear_bias=b, vocabulary=257, **own)
    got = torch.autograd.grad(loss, (e, w, b))
    leaves = [t.clone().requires_grad_() for t in (p.e, p.w, p.b)]
    one = in_one(leaves[0], leaves[1], p.target, linear_bias=leaves[2], head="full")
    want = torch.autograd.grad(one, leaves)
    torch.testing.assert_close(loss, one)
    assert isinstance(got[1], DTensor) and isinstance(got[2], DTensor) and got[1].placements == w.placements
    for g, x in zip(got, want, strict=True):
        torch.testing.assert_close(g.full_tensor() if isinstance(g, DTensor) else g, x)


def leading_dimensions(size: int) -> None:
    p, rows = problem(36, 257, 16), ROWS[size]
    e, target = p.e.view(6, 6, 16).transpose(0, 1), p.target.view(6, 6).transpose(0, 1)
    for own in TORCH_HEADS.values():
        kwargs = {"reduction": "none", "return_stats": True}
        loss, stats = linear_cross_entropy(e, p.w[own_rows(rows)], target, group=dist.group.WORLD, **kwargs, **own)
        want, facts = in_one(e, p.w, target, head="full", **kwargs)
        for got, x in zip((loss, *stats), (want, *facts), strict=True):
            torch.testing.assert_close(got, x)


def by_mesh(size: int) -> None:
    agrees(problem(36, 257, 16), ROWS[size], 1e-11, head="full", group=init_device_mesh("cpu", (size,)))


def noticed(mutation: tuple, *args: Any, **kwargs: Any) -> None:
    """`agrees` passes without the mutation and fails with it."""
    kwargs.setdefault("head", "chunked")
    agrees(*args, **kwargs)
    try:
        with patch.object(*mutation):
            agrees(*args, **kwargs)
    except AssertionError:
        return
    raise AssertionError("the mutation went unnoticed")


def within_bounds(size: int) -> None:
    """The rows just before and after this shard's dW are left unchanged."""
    add = fused_run.add_targets

    def between_guards(o: Any, tokens: Any, tau: Tensor, frequent: Any, dw: Tensor, db: Tensor | None) -> None:
        guarded = torch.nn.functional.pad(dw, (0, 0, 1, 1), value=7.0)
        add(o, tokens, tau, frequent, guarded[1:-1], db)
        assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()
        dw.copy_(guarded[1:-1])

    with patch.object(fused_run, "add_targets", between_guards):
        agrees(problem(20, 100, 16, dtype=torch.float32), FEW[size], 3e-6, head="fused", bias=False)


def lent() -> None:
    """The first chunk uses the memory of dW, on equal shards of three panels; see fused_interpreted.py."""
    plan = fused_plan.Early(32, 1, 0, *2 * (fused_plan.Work(2, 1),), fused_plan.Lent(32, 64, fused_plan.Work(2, 2)))
    p = problem(50, 360, 40, dtype=torch.float32)
    with patch.object(fused_search, "plan_early", lambda *_: plan):
        agrees(p, (180, 180), 3e-6, head="fused", **options("weighted smoothing", p))


def compiled(sequence_parallel: bool) -> None:
    """The compiler is told the shapes that the operator returns, of all ranks' tokens and for the largest shard."""
    p = problem(36, 100, 16, dtype=torch.float32)
    call = torch.compile(linear_cross_entropy, backend="aot_eager")
    with patch.object(parallel_cases, "linear_cross_entropy", call):
        agrees(p, FEW[2], 3e-6, head="fused", sequence_parallel=sequence_parallel)


def lends_nothing(size: int) -> None:
    """Plans are made for the largest shard; if other shards are smaller, dW lends no memory."""
    w = torch.empty(128000, 2304, dtype=torch.bfloat16, device="meta")
    device, tiles, budget = fused_plan.Device("hopper", 132), fused_plan.TILES["hopper", 2], 128 * 2**20
    for rows, lends in (((128000,) * size, True), ((128001,) * (size - 1) + (128000,), False)):
        dealt = Shards(dist.group.WORLD, size - 1, rows, False)
        here, planned = fused_op._shapes(8192, torch.bfloat16, [True, True, False], w, dealt)
        assert here.vocab == 128000 and planned.vocab == max(rows)
        plan = fused_search.plan_early(planned, budget, device, tiles, None)
        assert (plan.lent is not None) == lends
        layouts = fused_memory.early_layout(here, plan), fused_memory.lent_layout(here, plan.lent)
        assert fused_memory.bytes_needed(here, *layouts) <= budget
