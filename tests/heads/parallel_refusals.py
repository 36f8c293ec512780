"""Cases of the vocabulary-parallel heads: bad input raises the same kind of error on every process and never hangs."""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from head_cases import problem, refusal
from parallel_cases import CHUNKED, ROWS, Cases, on_shards, own_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from t1lib.heads.parallel import AGREED, linear_cross_entropy

P = problem(36, 257, 16, dtype=torch.float32)
TWO = torch.full((257,), 2.0)
SECONDS = 5


def refusals(size: int) -> Cases:
    found = {**by_one(size), **by_all(size), **of_placements(size)}
    found["refused: a backend for CUDA alone"] = backend
    found["refused: a second backward"] = second_backward
    for head in ("chunked", "fused"):
        found[f"refused: a gradient of the gradient, {head}"] = partial(gradient_of_gradient, head)
    found["options left out are the defaults"] = partial(
        the_same, size, {"label_smoothing": 0.0, "softcap": None, "ignore_index": None, "workspace": 2**20},
        {"workspace": "1MiB"},
    )  # fmt: skip
    return found


def by_one(size: int) -> Cases:
    """Each case: (arguments of the last rank only, arguments of all ranks, the message)."""
    cases = {
        "dtype": ({"input": P.e.double()}, {}, "disagree about input: .*float32.* on rank 0|linear_weight is"),
        "tokens": ({"input": P.e[:9], "target": P.target[:9]}, {}, r"disagree about input: .*\(36, 16\).*\(9, 16\)"),
        "reduction": ({"reduction": "sum"}, {"reduction": "mean"}, "disagree about reduction: 'mean' on.*'sum'"),
        "option": ({"softcap": 3.0}, {"softcap": None}, "disagree about softcap: None on rank 0.*3.0 on rank"),
        "option of the head": ({"chunks": 2}, {"head": "chunked", "chunks": 3}, "disagree about chunks: 3 on"),
        "workspace": ({"workspace": "2KiB"}, {"workspace": 1024}, "disagree about workspace: 1024 on rank 0.*2048 on"),
        "bad workspace": ({"workspace": "2 miles"}, {}, f"^rank {size - 1}: bad size '2 miles'"),
        "head": ({"head": "chunked"}, {}, "disagree about head: 'fused' on rank 0.*'chunked' on rank"),
        "unknown head": ({"head": "full"}, {}, f"^rank {size - 1}: unknown head 'full'"),
        "frozen weight": ({"linear_weight": "frozen"}, {}, "disagree about linear_weight: .*requires grad.*constant"),
        "input, a list,": ({"input": [1.0]}, {}, f"rank {size - 1}.*list"),
        "bias": ({"linear_bias": P.b[:1]}, {}, "linear_bias"),
        "class weights": ({"weight": TWO}, {}, "disagree about weight"),
        "unknown option": ({"typo": None}, {}, f"rank {size - 1}.*typo"),
        "backend": ({"linear_weight": P.w.to("meta")}, {}, "meta"),
        "deal of tokens": ({"sequence_parallel": True}, {}, "disagree about sequence_parallel: False on rank 0"),
        "target, out of range,": ({"target": P.target + 257}, {"sequence_parallel": True}, r"lie in \[0, 257\)"),
    }
    return {f"another {what} on one rank": partial(refused, size, *case) for what, case in cases.items()}


def by_all(size: int) -> Cases:
    """Each case: (arguments of all ranks, the message)."""
    wide = {"input": P.e.double(), "linear_weight": "wide", "linear_bias": None}
    rows = r"the ranks hold " + r" \+ ".join(map(str, ROWS[size])) + " = 257 rows of linear_weight, but "
    cases = {
        "vocabulary": ({"vocabulary": 256}, rows + "vocabulary is 256 classes"),
        "class weights": ({"weight": torch.ones(258)}, rows + "class weights are given for 258 classes"),
        "a head": ({"head": "torch"}, "unknown head 'torch'; allowed: chunked, fused"),
        "an unknown option": ({"head": "chunked", "accumulate": 2}, "unknown option 'accumulate' for head 'chunked'"),
        "by vocabulary": ({"head": "chunked", "by": "vocabulary"}, 'by="sequence"'),
        "a filter": ({"head": "chunked", "filter_eps": 0.1}, "has no filter_eps"),
        "a filter where chunked stands in": ({**wide, "filter_eps": 0.1}, "has no filter_eps"),
        "float32 sums where chunked stands in": ({**wide, "accumulate": "float32"}, "allowed here: None"),
        "a target out of range": ({"target": P.target.clamp(min=257)}, r"lie in \[0, 257\).*got 257"),
        "workspace": ({"workspace": 1000}, "the least that works is"),
        "class weights dealt": ({"weight": "shard"}, "disagree about weight|class weights are given for"),
        "no rows": ({"linear_weight": "none"}, r"\(0, 16\)"),
        "no group": ({"group": None}, "group must be a ProcessGroup or a one-dimensional DeviceMesh, got NoneType"),
        "a mesh of two dimensions": ({"group": "2-D"}, "one-dimensional DeviceMesh, got 2 dimensions"),
    }
    return {f"refused: {what}": partial(refused, size, {}, *case) for what, case in cases.items()}


def of_placements(size: int) -> Cases:
    """Each case: (the last rank's placement, that of the other ranks, the message)."""
    wrong = "linear_weight must be sharded on dimension 0.*"
    cases = {
        "refused: a DTensor on dimension 1": (Shard(1), Shard(1), f"^{wrong}dim=1"),
        "refused: a DTensor that is not sharded": (Replicate(), Replicate(), f"^{wrong}Replicate"),
        "another placement on one rank": (Replicate(), Shard(0), f"^rank {size - 1}: {wrong}Replicate"),
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
        "wide": lambda: P.w[part].double(),
        "shard": lambda: torch.ones(257)[part],
        "2-D": lambda: init_device_mesh("cpu", (1, size)),
    }
    kwargs = {k: special[v]() if isinstance(v, str) and v in special else v for k, v in kwargs.items()}
    raises(lambda: linear_cross_entropy(**kwargs), message)


def raises(call: Callable[[], Any], message: str) -> None:
    AGREED.clear()  # a call that the ranks agreed to before is not compared again
    start = time.monotonic()
    found = refusal(call)
    assert re.search(message, found), found
    assert time.monotonic() - start < SECONDS


def placed(last: Placement, others: Placement, message: str) -> None:
    """Each rank raises when the last one and the others place their weights so."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    mine = last if dist.get_rank() == size - 1 else others
    ways = {placement: distribute_tensor(P.w, mesh, [placement]) for placement in (last, others)}
    raises(lambda: linear_cross_entropy(P.e, ways[mine], P.target, group=mesh), message)


def the_same(size: int, last: dict[str, Any], others: dict[str, Any]) -> None:
    AGREED.clear()
    on_shards(P, ROWS[size], head="chunked", **(last if dist.get_rank() == size - 1 else others))


def backend() -> None:
    with patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        call = partial(linear_cross_entropy, P.e, P.w, P.target, group=dist.group.WORLD)
        raises(call, "nccl for cuda; use gloo for cpu")


def second_backward() -> None:
    p = problem(9, 50, 4)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target.clamp(max=49), group=dist.group.WORLD, **CHUNKED)
    torch.autograd.grad(loss, e, retain_graph=True)
    raises(lambda: torch.autograd.grad(loss, e), "second backward")


def gradient_of_gradient(head: str) -> None:
    p = problem(9, 50, 4, dtype=torch.float32)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target.clamp(max=49), group=dist.group.WORLD, head=head)
    message = f'^head "{head}" has no second derivative .*; nor has any other under a group$'
    raises(lambda: torch.autograd.grad(loss, e, create_graph=True), message)
