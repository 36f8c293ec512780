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
from parallel_cases import ROWS, Cases, on_shards, own_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from t1lib.heads.parallel import AGREED, linear_cross_entropy

P = problem(36, 257, 16, dtype=torch.float32)
SECONDS = 5
LAST: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({"input": P.e.double()}, {}, "disagree about input: .*float32.* on rank 0|linear_weight is"),
    "tokens": ({"input": P.e[:9], "target": P.target[:9]}, {}, r"disagree about input: .*\(36, 16\).*\(9, 16\)"),
    "option": ({"softcap": 3.0}, {"softcap": None}, "disagree about softcap: None on rank 0.*3.0 on rank"),
    "workspace": ({"workspace": "2KiB"}, {"workspace": 1024}, "disagree about workspace: 1024 on rank 0.*2048 on"),
    "bad workspace": ({"workspace": "2 miles"}, {}, r"^rank \d: bad size '2 miles'"),
    "frozen weight": ({"linear_weight": "frozen"}, {}, "disagree about linear_weight: .*requires grad.*constant"),
    "order of a weight in memory": ({"linear_weight": "strided"}, {}, "disagree about linear_weight"),
    "class weights": ({"weight": torch.full((257,), 2.0)}, {}, "disagree about weight"),
    "deal of tokens": ({"sequence_parallel": True}, {}, "disagree about sequence_parallel: False on rank 0"),
    "target, out of range,": ({"target": P.target + 257}, {"sequence_parallel": True}, r"lie in \[0, 257\)"),
}
"""What differs on the last rank: (its arguments, those of all ranks, the message)."""

WIDE = {"input": P.e.double(), "linear_weight": "wide", "linear_bias": None}
EVERY: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocabulary": 256}, r"\[.*\], together 257, rows of .*, but there are 256 classes by vocabulary"),
    "class weights": ({"weight": torch.ones(258)}, "258 classes by class weights"),
    "by vocabulary": ({"head": "chunked", "by": "vocabulary"}, 'by="sequence"'),
    "a filter where chunked stands in": ({**WIDE, "filter_eps": 0.1}, "has no filter_eps"),
    "float32 sums where chunked stands in": ({**WIDE, "accumulate": "float32"}, "allowed here: None"),
    "a target out of range": ({"target": P.target.clamp(min=257)}, r"lie in \[0, 257\).*got 257"),
    "workspace": ({"workspace": 1000}, "the least that works is"),
    "no rows": ({"linear_weight": "none"}, r"\(0, 16\)"),
    "no group": ({"group": None}, "group must be a ProcessGroup or a one-dimensional DeviceMesh, got NoneType"),
    "a mesh of two dimensions": ({"group": "2-D"}, "one-dimensional DeviceMesh, got 2 dimensions"),
}
"""What all ranks pass: (arguments, the message)."""


def refusals(size: int) -> Cases:
    found: Cases = {f"another {what} on one rank": partial(refused, size, *case) for what, case in LAST.items()}
    found |= {f"refused: {what}": partial(refused, size, {}, *case) for what, case in EVERY.items()}
    found["refused: DTensors that are not sharded by rows"] = partial(placed, size)
    found["refused: a backend for CUDA alone"] = backend
    for head in ("chunked", "fused") if size == 2 else ("chunked",):
        found[f"refused: a second backward and derivative, {head}"] = partial(only_once, head)
    found["options left out are the defaults"] = partial(the_same, size)
    return found


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
        "strided": lambda: P.w[part].t().contiguous().t().requires_grad_(),
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


def placed(size: int) -> None:
    """Each rank raises, also when only the last one places its weight so."""
    mesh, wrong = init_device_mesh("cpu", (size,)), "linear_weight must be sharded on dimension 0.*"
    rows, columns, whole = (distribute_tensor(P.w, mesh, [way]) for way in (Shard(0), Shard(1), Replicate()))
    mine = whole if dist.get_rank() == size - 1 else rows
    for w, message in ((columns, f"^{wrong}dim=1"), (mine, f"^rank {size - 1}: {wrong}Replicate")):
        raises(lambda w=w: linear_cross_entropy(P.e, w, P.target, group=mesh), message)


def the_same(size: int) -> None:
    """On the last rank some options are given as their defaults."""
    AGREED.clear()
    given = {"workspace": "1MiB"}
    if dist.get_rank() == size - 1:
        given = {"label_smoothing": 0.0, "softcap": None, "ignore_index": None, "workspace": 2**20}
    on_shards(P, ROWS[size], head="chunked", **given)


def backend() -> None:
    with patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        call = partial(linear_cross_entropy, P.e, P.w, P.target, group=dist.group.WORLD)
        raises(call, "nccl for cuda; use gloo for cpu")


def only_once(head: str) -> None:
    p = problem(9, 50, 4, dtype=torch.float32)
    e = p.e.requires_grad_()
    losses = [linear_cross_entropy(e, p.w, p.target.clamp(max=49), group=dist.group.WORLD, head=head) for _ in "12"]
    torch.autograd.grad(losses[0], e, retain_graph=True)
    if head == "chunked":
        raises(lambda: torch.autograd.grad(losses[0], e), "second backward")
    message = f'^head "{head}" has no second derivative .*; nor has any other under a group$'
    raises(lambda: torch.autograd.grad(losses[1], e, create_graph=True), message)
