"""Cases of the vocabulary-parallel heads beyond their values: DTensors, rounding, communication, mutations."""

import gc
import weakref
from functools import partial
from typing import Any
from unittest.mock import patch

import parallel_cases
import torch
import torch.distributed as dist
from head_cases import Problem, assert_close, assert_no_worse, least_of, problem, run
from parallel_cases import CHUNKED, FEW, ROWS, Cases, agrees, expected, on_shards, own_rows, results
from processes import next_port
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from t1lib.heads import fused_launch, parallel
from t1lib.heads import linear_cross_entropy as in_one
from t1lib.heads.fused_plan import early_from
from t1lib.heads.parallel import linear_cross_entropy


def manners(size: int) -> Cases:
    found = {
        "the loss and dE have the same bits everywhere": partial(same_bits, size),
        "chunked, 16 bits": partial(sixteen_bits, ROWS[size], torch.bfloat16, **CHUNKED),
        "calls are compared once": partial(compared_once, size),
        "chunked, DTensor": sharded,
        "chunked, the least workspace": partial(counted, size),
    }
    if size == 2:
        found["fused, targets elsewhere write nothing"] = within_bounds
        found["fused, 16 bits"] = partial(sixteen_bits, FEW[2], torch.float16, tokens=20, head="fused")
        found["fused, compiled"] = compiled
        found["fused, a workspace that decides for one rank alone"] = of_the_largest
    return found


def of_the_largest() -> None:
    """Between what ranks with 200 and with 8 rows would take for gradients in the forward: all must decide alike."""
    p = problem(20, 208, 8, dtype=torch.float32)
    limits = [early_from(20, rows, 8, 4, cuda=False) for rows in (8, 200)]
    agrees(p, (200, 8), 3e-6, head="fused", workspace=sum(limits) // 2)


def same_bits(size: int) -> None:
    got = on_shards(problem(36, 257, 16, dtype=torch.float32), ROWS[size], **CHUNKED)
    for name in ("loss", "input"):
        every = [torch.empty_like(got[name]) for _ in range(size)]
        dist.all_gather(every, got[name].contiguous())
        assert all(torch.equal(t, got[name]) for t in every), name


def sixteen_bits(rows: tuple[int, ...], dtype: torch.dtype, tokens: int = 150, **own: Any) -> None:
    """The error is about that of the same head in one process: dE is not rounded per shard."""
    p = problem(tokens, sum(rows), 64, dtype=dtype, bias=False)
    usual = results(partial(in_one, **own), p, p.target, bias=False)
    usual["linear_weight"] = usual["linear_weight"][own_rows(rows)]
    exact = expected(p, rows, bias=False)
    got = on_shards(p, rows, bias=False, **own)
    bounds = {"input": 1.05, "linear_weight": 1.05}
    assert_no_worse(*([found[name] for name in bounds] for found in (got, usual, exact)), bounds)


def compared_once(size: int) -> None:
    """The ranks compare a call when they make it first, and not again."""
    p, seen, share = problem(36, 257, 16), [], dist.all_gather_object
    parallel.AGREED.clear()
    with patch.object(dist, "all_gather_object", lambda *args, **kwargs: (seen.append(1), share(*args, **kwargs))):
        for _ in range(2):
            on_shards(p, ROWS[size], **CHUNKED)
        on_shards(p, ROWS[size], softcap=4.0, **CHUNKED)
    assert len(seen) == 2


def counted(size: int) -> None:
    """The least workspace of `chunked` is that of one process, plus the buffer for summing dE."""
    for dtype in (torch.float32, torch.bfloat16):
        p, most = problem(36, 257, 16, dtype=dtype, bias=False), max(ROWS[size])
        one = Problem(p.e, p.w[:most], None, p.target % most)
        kwargs = {"bias": False, "head": "chunked", "workspace": 1}
        alone = least_of(partial(results, in_one, one, one.target, **kwargs))
        for dealt in (False, True):
            least = least_of(partial(on_shards, p, ROWS[size], sequence_parallel=dealt, **kwargs))
            assert 0 <= least - alone <= 2 * 36 * 16 * 4


def sharded() -> None:
    """257 rows sharded as DTensor does it, on its mesh, the group: the gradient is a DTensor, too."""
    p = problem(36, 257, 16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    e = p.e.clone().requires_grad_()
    w, b = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (p.w, p.b))
    loss = linear_cross_entropy(e, w, p.target, linear_bias=b, vocabulary=257, **CHUNKED)
    de, dw, db = torch.autograd.grad(loss, (e, w, b))
    assert isinstance(dw, DTensor) and isinstance(db, DTensor) and dw.placements == w.placements
    want = run("full", p, torch.ones(()))
    assert_close([loss.detach(), de, dw.full_tensor(), db.full_tensor()], want, 1e-11)


def within_bounds() -> None:
    """The rows just before and after this shard's dW are left unchanged."""
    add = fused_launch.Chunk.add_targets

    def between_guards(self: Any, *args: Any) -> None:
        guarded = torch.nn.functional.pad(self.dw, (0, 0, 1, 1), value=7.0)
        self.known["dw"] = guarded[1:-1]
        add(self, *args)
        assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()
        self.dw.copy_(guarded[1:-1])

    with patch.object(fused_launch.Chunk, "add_targets", between_guards):
        agrees(problem(20, sum(FEW[2]), 16, dtype=torch.float32), FEW[2], 3e-6, head="fused", bias=False)


def compiled() -> None:
    """The compiler is told the shapes that the operator returns, of all ranks' tokens and for the largest shard."""
    p = problem(16, sum(FEW[2]), 16, dtype=torch.float32)
    call = torch.compile(linear_cross_entropy, backend="aot_eager")
    with patch.object(parallel_cases, "linear_cross_entropy", call):
        agrees(p, FEW[2], 3e-6, head="fused", sequence_parallel=True)


def groups_made_anew(size: int) -> None:
    """A group that was destroyed is not kept alive, and what it agreed to does not hold for one of the same name."""
    p, old = problem(5, sum(FEW[size]), 16, dtype=torch.float32), None
    for rows in (FEW[size], FEW[size][::-1]):
        dist.init_process_group("gloo")
        assert old is None or old() is None
        for own in ({"head": "fused"}, CHUNKED) if size == 2 else (CHUNKED,):
            agrees(p, rows, 3e-6, **own)
        old = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        next_port()
    assert old() is None
