"""Cases of the vocabulary-parallel heads: bad input is the same kind of error on every process, and never a hang."""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from head_cases import Problem, problem
from parallel_cases import ROWS, Cases, own_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from t1lib.errors import T1Error
from t1lib.heads import agreement
from t1lib.heads.agreement import agree
from t1lib.heads.parallel import linear_cross_entropy

P = problem(36, 257, 16, dtype=torch.float32)
SECONDS = 5


def refusals(size: int) -> Cases:
    """(what only the last rank does, what all do, the message)."""
    last = {
        "dtype": ({"input": P.e.double()}, {}, r"disagree about input: .*float32.* on rank 0, .*float64.* on rank"),
        "tokens": ({"input": P.e[:9], "target": P.target[:9]}, {}, r"disagree about input: .*\(36, 16\).*\(9, 16\)"),
        "reduction": ({"reduction": "sum"}, {"reduction": "mean"}, "disagree about reduction: 'mean' on.*'sum'"),
        "an option": ({"softcap": 3.0}, {"softcap": None}, "disagree about softcap: None on rank 0.*3.0 on rank"),
        "an option of the head": ({"chunks": 2}, {"head": "chunked", "chunks": 3}, "disagree about chunks: 3 on"),
        "heads": ({"head": "full"}, {}, "disagree about head: 'fused' on rank 0.*'full' on rank"),
        "frozen": ({"linear_weight": "frozen"}, {}, "disagree about linear_weight: .*requires grad.*constant"),
        "a list": ({"input": [1.0]}, {}, "disagree about input: .*'list' on rank"),
        "bias": ({"linear_bias": P.b[:1]}, {}, "disagree about linear_bias has as many rows as linear_weight: True"),
        "targets": ({"target": P.target % 7}, {}, "disagree about the least and the largest target"),
        "deal of tokens": ({"sequence_parallel": True}, {}, "disagree about sequence_parallel: False on rank 0"),
    }
    found = {f"another {what} on one rank": partial(refused, size, *case) for what, case in last.items()}
    rows = r"the ranks hold " + r" \+ ".join(map(str, ROWS[size])) + " = 257 rows of linear_weight, but "
    alike = {
        "vocabulary": ({"vocabulary": 256}, rows + "vocabulary is 256 classes"),
        "class weights": ({"weight": torch.ones(258)}, rows + "class weights are given for 258 classes"),
        "a head": ({"head": "torch"}, "unknown head 'torch'; allowed: full, chunked, fused"),
        "an unknown option": ({"head": "full", "chunks": 2}, "unknown option 'chunks' for head 'full'"),
        "a target out of range": ({"target": P.target.clamp(min=257)}, r"lie in \[0, 257\).*got 257"),
        "workspace": ({"head": "full", "workspace": 1000}, "the least that works is {least} bytes"),
        "class weights dealt": ({"weight": "shard"}, "disagree about weight|class weights are given for"),
        "no rows": ({"linear_weight": "none"}, r"every rank must hold at least one row .*they hold \(0, 0"),
        "no group": ({"group": None}, "group must be a ProcessGroup or a one-dimensional DeviceMesh, got NoneType"),
        "a mesh of two dimensions": ({"group": "2-D"}, "one-dimensional DeviceMesh, got 2 dimensions"),
    }
    least = 36 * max(ROWS[size]) * 4 * 4  # four float32 a logit
    for what, (change, message) in alike.items():
        found[f"refused: {what}"] = partial(refused, size, {}, change, message.format(least=least))
    found["refused: a DTensor on dimension 1"] = partial(placed, Shard(1), "must be sharded on dimension 0.*dim=1")
    found["refused: a DTensor that is not sharded"] = partial(placed, Replicate(), "dimension 0.*Replicate")
    found["refused: a backend for CUDA alone"] = partial(backend, "cuda:nccl", "nccl for cuda; use gloo for cpu")
    found["refused: a second backward"] = second_backward
    found["calls that agreed before are compared by the device"] = partial(agreed_before, size)
    return found


def refused(size: int, last: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """`change` on every rank, `last` on the last one: T1Error on each, within seconds."""
    part = own_rows(ROWS[size])
    kwargs = {"input": P.e, "linear_weight": P.w[part].requires_grad_(), "target": P.target, "linear_bias": P.b[part]}
    kwargs |= {"group": dist.group.WORLD, "head": "fused", "sequence_parallel": False, **change}
    if dist.get_rank() == size - 1:
        kwargs |= last
    special = {
        "frozen": lambda: P.w[part],
        "none": lambda: P.w[:0],
        "shard": lambda: torch.ones(257)[part],
        "2-D": lambda: init_device_mesh("cpu", (1, size)),
    }
    kwargs = {k: special[v]() if isinstance(v, str) and v in special else v for k, v in kwargs.items()}
    raises(lambda: linear_cross_entropy(**kwargs), message)


def raises(call: Callable[[], Any], message: str) -> None:
    start = time.monotonic()
    try:
        call()
    except T1Error as e:
        assert re.search(message, str(e)), str(e)
        assert time.monotonic() - start < SECONDS
        return
    raise AssertionError("no error")


def placed(placement: Any, message: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = distribute_tensor(P.w, mesh, [placement])
    raises(lambda: linear_cross_entropy(P.e, w, P.target), message)


def backend(config: str, message: str) -> None:
    with patch.object(dist, "get_backend_config", lambda _: config):
        raises(lambda: linear_cross_entropy(P.e, P.w, P.target, group=dist.group.WORLD), message)


def agreed_before(size: int) -> None:
    """What happens on CUDA, where the integers of such a call are not read."""
    rank = dist.get_rank()
    call = partial(agree, dist.group.WORLD, rows=rank + 1, device=torch.device("cpu"))
    with patch.object(agreement, "READ", ()):
        assert call({"a": 1}) == call({"a": 1}) == tuple(range(1, size + 1))
        assert agreement.KNOWN
        if rank == size - 1:
            raises(lambda: call({"a": 2}), "another rank makes a different call; every rank of the group must pass")
            return
        try:
            call({"a": 1})
        except RuntimeError as e:
            assert "ranks of the group disagree about the call" in str(e)
            return
        raise AssertionError("no assertion on the device")


def second_backward() -> None:
    p: Problem = problem(9, 50, 4)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target.clamp(max=49), group=dist.group.WORLD, head="chunked")
    torch.autograd.grad(loss, e, retain_graph=True)
    raises(lambda: torch.autograd.grad(loss, e), "second backward")
