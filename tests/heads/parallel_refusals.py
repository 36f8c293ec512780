"""Cases of the vocabulary-parallel heads: bad input raises the same kind of error on every process and never hangs."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from head_cases import Problem, problem
from parallel_cases import ROWS, TORCH_HEADS, Cases, on_shards, own_rows
from processes import next_port
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from t1lib.errors import T1Error
from t1lib.heads import agreement
from t1lib.heads.agreement import agree, tell
from t1lib.heads.parallel import linear_cross_entropy

P = problem(36, 257, 16, dtype=torch.float32)
TWO = torch.full((257,), 2.0)
SECONDS = 5


def refusals(size: int) -> Cases:
    found = {**by_one(size), **by_all(size), **of_placements(size)}
    found["refused: a backend for CUDA alone"] = partial(backend, "cuda:nccl", "nccl for cuda; use gloo for cpu")
    found["refused: a second backward"] = second_backward
    for head in ("full", "by sequence", "by vocabulary", "fused"):
        found[f"refused: a gradient of the gradient, {head}"] = partial(gradient_of_gradient, head)
    found["calls that agreed before are compared by the device"] = partial(agreed_before, size)
    found["options left out are the defaults"] = partial(left_out, size)
    found["a workspace in other units"] = partial(other_units, size)
    found["what differs is told on the device of the call"] = told_there
    return found


def by_one(size: int) -> Cases:
    """Each case: (arguments of the last rank only, arguments of all ranks, the message)."""
    cases = {
        "dtype": ({"input": P.e.double()}, {}, r"disagree about input: .*float32.* on rank 0, .*float64.* on rank"),
        "tokens": ({"input": P.e[:9], "target": P.target[:9]}, {}, r"disagree about input: .*\(36, 16\).*\(9, 16\)"),
        "reduction": ({"reduction": "sum"}, {"reduction": "mean"}, "disagree about reduction: 'mean' on.*'sum'"),
        "an option": ({"softcap": 3.0}, {"softcap": None}, "disagree about softcap: None on rank 0.*3.0 on rank"),
        "an option of the head": ({"chunks": 2}, {"head": "chunked", "chunks": 3}, "disagree about chunks: 3 on"),
        "workspace": ({"workspace": "2KiB"}, {"workspace": 1024}, "disagree about workspace: 1024 on rank 0.*2048 on"),
        "bad workspace": ({"workspace": "2 miles"}, {}, f"^rank {size - 1}: bad size '2 miles'|^bad size '2 miles'"),
        "heads": ({"head": "full"}, {}, "disagree about head: 'fused' on rank 0.*'full' on rank"),
        "frozen": ({"linear_weight": "frozen"}, {}, "disagree about linear_weight: .*requires grad.*constant"),
        "a list": ({"input": [1.0]}, {}, "disagree about input: .*'list' on rank"),
        "bias": ({"linear_bias": P.b[:1]}, {}, "disagree about linear_bias has as many rows as linear_weight: True"),
        "targets": ({"target": P.target.roll(1)}, {}, "disagree about values of target: '"),
        "class weights": ({"weight": TWO}, {"weight": TWO / 2}, "disagree about values of weight: '"),
        "token weights": ({"token_weight": TWO[:36]}, {"token_weight": TWO[:36] / 2}, "values of token_weight: '"),
        "unknown option": ({"typo": None}, {}, "disagree about typo: nothing on rank 0.*None on rank"),
        "backend": ({"linear_weight": P.w.to("meta")}, {}, f"^rank {size - 1}: tensors are on meta, but the group's"),
        "deal of tokens": ({"sequence_parallel": True}, {}, "disagree about sequence_parallel: False on rank 0"),
    }
    return {f"another {what} on one rank": partial(refused, size, *case) for what, case in cases.items()}


def by_all(size: int) -> Cases:
    """Each case: (arguments of all ranks, the message)."""
    rows = r"the ranks hold " + r" \+ ".join(map(str, ROWS[size])) + " = 257 rows of linear_weight, but "
    cases = {
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
    least = 36 * max(ROWS[size]) * 4 * 4  # four float32 per logit
    return {f"refused: {what}": partial(refused, size, {}, c, m.format(least=least)) for what, (c, m) in cases.items()}


def of_placements(size: int) -> Cases:
    """Each case: (the last rank's placement, that of the other ranks, the message)."""
    wrong = "linear_weight must be sharded on dimension 0.*"
    cases = {
        "refused: a DTensor on dimension 1": (Shard(1), Shard(1), f"^{wrong}dim=1"),
        "refused: a DTensor that is not sharded": (Replicate(), Replicate(), f"^{wrong}Replicate"),
        "another placement on one rank": (Replicate(), Shard(0), f"^rank {size - 1}: {wrong}Replicate"),
        "a DTensor on one rank": (Shard(0), None, "disagree about rows of the DTensor: None on rank 0.* 257 on rank"),
    }
    return {name: partial(placed, *case) for name, case in cases.items()}


def refused(size: int, last: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """With `change` on every rank, and `last` on the last one as well, each rank raises T1Error within seconds."""
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


def placed(last: Placement, others: Placement | None, message: str) -> None:
    """Each rank raises when the last one and the others place their weights so (None: as a plain tensor)."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    ways = [distribute_tensor(P.w, mesh, [placement or Shard(0)]) for placement in (last, others)]
    w = ways[0] if dist.get_rank() == size - 1 else ways[1] if others else ways[1].to_local()
    raises(lambda: linear_cross_entropy(P.e, w, P.target, group=mesh), message)


def left_out(size: int) -> None:
    told = {"label_smoothing": 0.0, "softcap": None, "ignore_index": None, "chunks": None}
    mine = told if dist.get_rank() == size - 1 else {}
    on_shards(P, ROWS[size], head="chunked", **mine)


def other_units(size: int) -> None:
    on_shards(P, ROWS[size], head="chunked", workspace="1MiB" if dist.get_rank() == size - 1 else 2**20)


def told_there() -> None:
    """On CUDA, objects are sent through the current device, which need not be the device of the call."""
    inside: list[torch.device] = []
    seen: list[torch.device] = []
    gather = dist.all_gather_object

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        inside.append(tensor.device)
        yield
        inside.pop()

    def noting(*args: Any, **kwargs: Any) -> None:
        seen.extend(inside)
        gather(*args, **kwargs)

    cpu = torch.device("cpu")
    with patch.object(torch.cuda, "device_of", device_of), patch.object(dist, "all_gather_object", noting):
        raises(lambda: agree(dist.group.WORLD, {"a": dist.get_rank()}, 1, cpu), "disagree about a: 0 on rank 0")
    assert seen == [cpu]


def backend(config: str, message: str) -> None:
    with patch.object(dist, "get_backend_config", lambda _: config):
        raises(lambda: linear_cross_entropy(P.e, P.w, P.target, group=dist.group.WORLD), message)


def agreed_before(size: int) -> None:
    """The behaviour on CUDA, where the integers of a call that agreed before are not read."""
    rank, group, cpu = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    call = partial(agree, group, rows=rank + 1, device=cpu)
    with patch.object(agreement, "READ", ()):
        assert call({"a": 1}) == call({"a": 1}) == tuple(range(1, size + 1))
        assert agreement.KNOWN[group]
        if rank == size - 1:
            raises(lambda: call({"a": 2}), "another rank makes a different call; every rank of the group must pass")
            raises(lambda: tell(group, T1Error("no weight"), cpu), "^no weight$")
            return
        for _ in range(2):
            try:
                call({"a": 1})
            except RuntimeError as e:
                assert "ranks of the group disagree about the call" in str(e)
            else:
                raise AssertionError("no assertion on the device")


def agreed_in_a_group_of_that_name(size: int) -> None:
    """As above, but the group is created anew, and another rank then holds a different number of rows."""
    with patch.object(agreement, "READ", ()):
        for more in (0, 1):
            dist.init_process_group("gloo")
            held = (*range(1, size), size + more)
            assert agree(dist.group.WORLD, {"a": 1}, held[dist.get_rank()], torch.device("cpu")) == held
            dist.destroy_process_group()
            next_port()


def second_backward() -> None:
    p: Problem = problem(9, 50, 4)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target.clamp(max=49), group=dist.group.WORLD, head="chunked")
    torch.autograd.grad(loss, e, retain_graph=True)
    raises(lambda: torch.autograd.grad(loss, e), "second backward")


def gradient_of_gradient(head: str) -> None:
    p = problem(9, 50, 4, dtype=torch.float32)
    e = p.e.requires_grad_()
    own = TORCH_HEADS.get(head, {"head": head})
    loss = linear_cross_entropy(e, p.w, p.target.clamp(max=49), group=dist.group.WORLD, **own)
    message = f'^head "{own["head"]}" has no second derivative .*; nor has any other under a group$'
    raises(lambda: torch.autograd.grad(loss, e, create_graph=True), message)
