"""Vocabulary-parallel heads: `linear_cross_entropy` with `group=`, over whose processes the weight is sharded."""

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: its defaults hold the group there is when it is imported, by the compiler later
from torch import Tensor
from torch.distributed import ProcessGroup

from t1lib.errors import T1Error, choose, require
from t1lib.heads.chunked import chunked
from t1lib.heads.fused import fused
from t1lib.heads.fused_plan import device_of
from t1lib.heads.options import (
    HeadStats,
    Settings,
    Shards,
    Tensors,
    autocast_dtype,
    check_settings,
    check_tensors,
    evenly_spaced,
    own_options,
)

HEADS = {"chunked": chunked, "fused": fused}  # those that work on shards of the weight
SAME = "every rank of the group must pass the same"
SETTINGS = set(Settings._fields) - {"shards"}
MOST = 4096  # calls remembered per group, as every new number of tokens adds one
# by group (not by its name, which a later group may have, too) and call: how many weight rows each rank holds
AGREED: WeakKeyDictionary[ProcessGroup, dict[str, tuple[int, ...]]] = WeakKeyDictionary()


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, group: ProcessGroup, sequence_parallel: bool = False,
    head: str = "fused", linear_bias: Tensor | None = None, weight: Tensor | None = None,
    token_weight: Tensor | None = None, **options: Any,
) -> Tensor | tuple[Tensor, HeadStats]:  # fmt: skip
    """`t1lib.heads.linear_cross_entropy` for a vocabulary-parallel layer: each rank of `group` holds some weight rows.
    Arguments and results are the same, with head "chunked" (by sequence) or "fused" (without tail), except for:

    input, target       the same on every rank; targets are indices into the whole vocabulary
    sequence_parallel   if True, input, target and token_weight hold each rank's own tokens, the same number on every
                        rank, in rank order; so do per-token losses, statistics and dE. "mean" and "sum" are over all
    linear_weight       (rows, D): the rank's classes, at least one, which follow those of the lower ranks. For a
                        DTensor that is sharded by rows, pass its `to_local()`: the gradient reaches the DTensor
    linear_bias         (rows)
    weight              (V) for the whole vocabulary, all ranks' rows together; the same on every rank
    workspace           per rank; the hidden states gathered under sequence_parallel are not counted
    filter_eps          only where the kernels of `fused` run

    Unless losses are per rank (sequence_parallel with "none"), every rank returns the same loss and must call
    backward with the same upstream gradient. dE is summed over the ranks in float32 (or float64). The first time that a
    rank makes a call with these shapes, dtypes and options, all ranks compare theirs: `T1Error` on every rank if they
    differ, or for anything not allowed. After that, a rank whose call differs waits for the backend's timeout. Source:
    Megatron-LM (Shoeybi et al. 2019, section 3)."""
    ready = dist.is_available() and dist.is_initialized()
    require(ready, "torch.distributed is not initialised; call torch.distributed.init_process_group first")
    got = type(group).__name__
    require(isinstance(group, ProcessGroup), f"group must be a ProcessGroup, as `mesh.get_group()` is, got {got}")
    device = linear_weight.device if isinstance(linear_weight, Tensor) else torch.device("cpu")
    called: dict[str, Any] = {"head": head, "sequence_parallel": sequence_parallel}
    error, rows = None, 0
    try:
        require_backend(group, device.type)
        own = {name: value for name, value in options.items() if name not in SETTINGS}
        own_options(head, HEADS[choose("head", head, HEADS)], own)
        require(own.get("by", "sequence") == "sequence", 'head "chunked" takes by="sequence" under a group')
        settings = check_settings(Settings(**{name: options[name] for name in SETTINGS & set(options)}))
        w, b = linear_weight, linear_bias
        tensors = Tensors(input, w, target, b, weight, token_weight)
        check_tensors(tensors)
        require(w.dim() == 2 and len(w) > 0, f"linear_weight must have shape (rows, D), got {tuple(w.shape)}")
        fits = b is None or b.shape == w.shape[:1]
        require(fits, f"linear_bias must have shape ({len(w)},), got {() if b is None else tuple(b.shape)}")
        called |= {**settings._asdict(), **own, "autocast": autocast_dtype(input), "grad mode": torch.is_grad_enabled()}
        called |= {"device": device_of(device), **{n: _described(t, n) for n, t in tensors._asdict().items()}}
        rows = len(w)
    except T1Error as e:
        error = str(e)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # through which objects are sent
        held = _agree(group, called, error, rows)
    settings = settings._replace(shards=Shards(group.group_name, held, sequence_parallel))
    loss, stats = HEADS[head](tensors, settings, **own)
    return (loss, stats) if settings.return_stats else loss


@torch._disable_dynamo
def _agree(group: ProcessGroup, called: dict[str, Any], error: str | None, rows: int) -> tuple[int, ...]:
    """Compare a call with the other ranks' when this rank first makes it; return how many weight rows each rank holds.
    Raises `T1Error` on every rank: for the first `error` in rank order, or for a fact that differs."""
    known, key = AGREED.setdefault(group, {}), repr((called, rows))
    if error is None and key in known:
        return known[key]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (error, called, rows), group=group)
    errors, facts, held = (list(x) for x in zip(*told, strict=True))
    for rank, e in enumerate(errors):
        require(e is None, str(e) if all(other == e for other in errors) else f"rank {rank}: {e}")
    if len({repr(f) for f in facts}) > 1:
        raise T1Error(f"{difference(facts)}; {SAME}")
    if len(known) >= MOST:
        known.clear()
    known[key] = tuple(held)
    return known[key]


def difference(every: list[dict[str, Any]]) -> str:
    """The first fact about which the ranks disagree: rank 0's value and the first other one; "nothing" for none."""
    names = dict.fromkeys(name for facts in every for name in facts)
    told = {name: [repr(facts[name]) if name in facts else "nothing" for facts in every] for name in names}
    name, values = next((name, values) for name, values in told.items() if len(set(values)) > 1)
    rank, other = next((rank, value) for rank, value in enumerate(values) if value != values[0])
    return f"ranks disagree about {name}: {values[0]} on rank 0, {other} on rank {rank}"


def require_backend(group: ProcessGroup, device: str) -> None:
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if device not in backends or (backends[device], device) == ("gloo", "cuda"):  # gloo lacks some collectives there
        use = {"cpu": "gloo", "cuda": "nccl"}.get(device, "one that serves it")
        found = ", ".join(f"{b} for {d}" for d, b in backends.items())
        raise T1Error(f"tensors are on {device}, but the group's backend is {found}; use {use} for {device}")


def _described(value: Any, name: str) -> Any:
    """What ranks must agree on about a tensor: not a shard's rows, but whether kernels need a copy of it."""
    if value is None:
        return None
    shape = ("rows", *value.shape[1:]) if name in ("linear_weight", "linear_bias") else tuple(value.shape)
    as_it_is = (value.dim() == 0 or value.stride(-1) == 1) and (name != "input" or evenly_spaced(value))
    return type(value).__name__, value.dtype, shape, "requires grad" if value.requires_grad else "constant", as_it_is
