"""Vocabulary-parallel heads: `linear_cross_entropy` with `group=`, over whose processes the weight is sharded."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from t1lib.errors import T1Error, choose, require, shown
from t1lib.heads.chunked import chunked
from t1lib.heads.fused import fused
from t1lib.heads.fused_plan import device_of
from t1lib.heads.options import HeadStats, Settings, Tensors, check_settings, check_tensors, own_options

HEADS = {"chunked": chunked, "fused": fused}
"""The heads that work on shards of the weight, by the names of `t1lib.heads.HEADS`."""

SAME = "every rank of the group must pass the same"
SETTINGS = set(Settings._fields) - {"shards"}
MOST = 4096  # calls remembered per group, as every new number of tokens adds one
AGREED: WeakKeyDictionary[ProcessGroup, dict[str, tuple[int, ...]]] = WeakKeyDictionary()
"""By group (not by its name, which a new group may take over) and call: how many weight rows each rank holds."""

# the older name is deprecated in PyTorch 2.13 but the only one in earlier versions
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Shards:
    """One process's view of the sharding: it holds the rows `first` … `first + rows[rank]` of the weight.

    rows        number of weight rows on each of the `size` processes of `group`, in rank order
    sequence    whether the tokens are sharded, too: the same number on every process, in rank order
    """

    group: ProcessGroup
    rows: tuple[int, ...]
    sequence: bool

    rank = property(lambda self: dist.get_rank(self.group))
    first = property(lambda self: sum(self.rows[: self.rank]))
    size = property(lambda self: len(self.rows))

    def gather(self, mine: Tensor) -> Tensor:
        """(size · n, …): the values (n, …) of every process, in rank order."""
        every = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        all_gather(every, mine.contiguous(), group=self.group)
        return every

    def tokens(self, mine: Tensor) -> Tensor:
        """(N, …): the values of all tokens, gathered from those of each process's tokens if the tokens are sharded."""
        return self.gather(mine) if self.sequence else mine

    def own(self, every: Tensor) -> Tensor:
        """The values of this process's tokens, selected from those of all tokens, (N, …)."""
        return every.chunk(self.size)[self.rank].clone() if self.sequence and len(every) else every

    def start_sum(self, part: Tensor) -> dist.Work:
        """Start to sum the processes' values in place, while the device computes something else."""
        return dist.all_reduce(part, group=self.group, async_op=True)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, group: ProcessGroup | DeviceMesh | None = None,
    vocabulary: int | None = None, sequence_parallel: bool = False, head: str = "fused",
    linear_bias: Tensor | None = None, weight: Tensor | None = None, token_weight: Tensor | None = None, **options: Any,
) -> Tensor | tuple[Tensor, HeadStats]:  # fmt: skip
    """`t1lib.heads.linear_cross_entropy` for a vocabulary-parallel layer: each rank of `group` holds some weight rows.

    A function of its own, so that nobody who forgets `group` takes the loss over one shard for the loss. Arguments and
    results are those of `t1lib.heads.linear_cross_entropy`, with head "chunked" (by sequence) or "fused", except for:

    input, target       the same on every rank; targets are indices into the whole vocabulary
    sequence_parallel   if True, input, target and token_weight hold each rank's own tokens, the same number on every
                        rank, in rank order; so do per-token losses, statistics and dE. "mean" and "sum" are over all
    linear_weight       (rows, D): the rank's classes, one at least, which follow those of the lower ranks; or a DTensor
                        with dimension 0 sharded over a one-dimensional mesh, whose gradient is a DTensor, too
    linear_bias         (rows), or a DTensor sharded in the same way
    group               ProcessGroup or one-dimensional DeviceMesh; None: the mesh of the DTensor
    vocabulary          V, to check the shards against; None: V is the sum of their rows
    weight              (V) class weights of the whole vocabulary, the same on every rank
    workspace           per rank; the hidden states gathered under sequence_parallel are not counted

    Unless losses are per rank (sequence_parallel with "none"), every rank returns the same loss and must call backward
    with the same upstream gradient. Each rank gets the gradient of its own rows of the weight. dE is summed over the
    ranks in float32 (float64 for float64 operands), in an all-reduce per chunk of tokens that overlaps the next chunk;
    it is the same on all ranks, or covers the rank's own tokens. No rank ever holds another rank's logits.

    The first time that a rank makes a call (by shapes, dtypes and options), the ranks compare it: `T1Error` on every
    rank if it differs, if the shards do not add up to the vocabulary, or for anything that is not allowed. Later calls
    like it are not compared: a rank that then makes another one waits, as with any collective, until the backend's
    timeout. Also raises `T1Error` for a backend that does not serve the tensors' device, and without a process group.

    Source: Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al. 2019, section 3).
    """
    group = _group_of(group, linear_weight)
    device = linear_weight.device if isinstance(linear_weight, Tensor) else torch.device("cpu")
    called: dict[str, Any] = {"head": head, "vocabulary": vocabulary, "sequence_parallel": sequence_parallel}
    whole = linear_weight.shape[0] if isinstance(linear_weight, DTensor) else None
    implied = {"vocabulary is": vocabulary, "the weight as a DTensor has": whole}
    error, rows = None, 0
    try:
        require_backend(group, device.type)
        own = {name: value for name, value in options.items() if name not in SETTINGS}
        own_options(head, HEADS[choose("head", head, HEADS)], own)
        require(own.get("by", "sequence") == "sequence", 'head "chunked" takes by="sequence" under a group')
        settings = check_settings(Settings(**{name: options[name] for name in SETTINGS & set(options)}))
        w, b = _local(group, linear_weight, "linear_weight"), _local(group, linear_bias, "linear_bias")
        tensors = Tensors(input, w, target, b, weight, token_weight)
        check_tensors(tensors)
        require(w.dim() == 2 and len(w) > 0, f"linear_weight must have shape (rows, D), got {tuple(w.shape)}")
        fits = b is None or b.shape == w.shape[:1]
        require(fits, f"linear_bias must have shape ({len(w)},), got {() if b is None else tuple(b.shape)}")
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        called |= {**settings._asdict(), **own, "autocast": autocast, "grad mode": torch.is_grad_enabled()}
        called |= {"device": device_of(device), **{n: _described(t, n) for n, t in tensors._asdict().items()}}
        implied["class weights are given for"] = None if weight is None else weight.numel()
        rows = len(w)
    except T1Error as e:
        error = str(e)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # through which objects are sent
        held = _agree(group, called, error, rows, implied)
    settings = settings._replace(shards=Shards(group, held, sequence_parallel))
    loss, stats = HEADS[head](tensors, settings, **own)
    return (loss, stats) if settings.return_stats else loss


@torch.compiler.disable
def _agree(
    group: ProcessGroup, called: dict[str, Any], error: str | None, rows: int, implied: dict[str, int | None]
) -> tuple[int, ...]:
    """Compare a call that this rank makes for the first time; return how many weight rows each rank holds.

    error: what this rank found wrong already. implied: numbers of classes. Raises `T1Error` on every rank: for the
    first rank's error, else for the first fact that differs, else for classes that are not as many as the rows.
    """
    known, key = AGREED.setdefault(group, {}), repr((called, rows, implied))
    if error is None and key in known:
        return known[key]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (error, called, rows, implied), group=group)
    errors, facts, held, implied = (list(x) for x in zip(*told, strict=True))
    for rank, e in enumerate(errors):
        require(e is None, str(e) if all(other == e for other in errors) else f"rank {rank}: {e}")
    if len({repr(f) for f in facts}) > 1:
        raise T1Error(f"{difference(facts)}; {SAME}")
    summed = f"the ranks hold {shown(held)}, together {sum(held)}, rows of linear_weight"
    for what, size in (pair for each in implied for pair in each.items()):
        require(size is None or size == sum(held), f"{summed}, but {what} {size!r} classes")
    if len(known) >= MOST:
        known.clear()
    known[key] = tuple(held)
    return known[key]


def difference(every: list[dict[str, Any]]) -> str:
    """Describe the first fact about which the ranks disagree: rank 0's value and the first other one.

    A rank that lacks the fact is shown with "nothing", because None is a value. `every` is in rank order.
    """
    for name in dict.fromkeys(name for facts in every for name in facts):
        told = [repr(facts[name]) if name in facts else "nothing" for facts in every]
        if len(set(told)) > 1:
            break
    other = next(rank for rank, value in enumerate(told) if value != told[0])
    return f"ranks disagree about {name}: {told[0]} on rank 0, {told[other]} on rank {other}"


def require_backend(group: ProcessGroup, device: str) -> None:
    """Raise `T1Error` unless the group's backend serves tensors on this type of device."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if device not in backends or (backends[device], device) == ("gloo", "cuda"):  # gloo lacks some collectives there
        use = {"cpu": "gloo", "cuda": "nccl"}.get(device, "one that serves it")
        found = ", ".join(f"{b} for {d}" for d, b in backends.items())
        raise T1Error(f"tensors are on {device}, but the group's backend is {found}; use {use} for {device}")


def _group_of(group: ProcessGroup | DeviceMesh | None, linear_weight: Tensor) -> ProcessGroup:
    """The process group that `group` or the DTensor's mesh stands for."""
    ready = dist.is_available() and dist.is_initialized()
    require(ready, "torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if group is None and isinstance(linear_weight, DTensor):
        group = linear_weight.device_mesh
    if isinstance(group, DeviceMesh):
        require(group.ndim == 1, f"group must be a one-dimensional DeviceMesh, got {group.ndim} dimensions")
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise T1Error(f"group must be a ProcessGroup or a one-dimensional DeviceMesh, got {type(group).__name__}")
    return group


def _local(group: ProcessGroup, tensor: Tensor | None, name: str) -> Tensor | None:
    """This process's rows of a DTensor; any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    same = mesh.ndim == 1 and mesh.get_group() == group
    require(same, f"{name} must be sharded on a one-dimensional mesh, and group be that mesh or its group")
    require(placements == (Shard(0),), f"{name} must be sharded on dimension 0, (Shard(dim=0),), got {placements}")
    return tensor.to_local()


def _described(value: Any, name: str) -> Any:
    """What must agree about a tensor: type, dtype, shape (but for a shard's rows), whether it requires a gradient, and
    whether the kernels need a copy because its last dimension has no unit stride."""
    if value is None:
        return None
    shape = ("rows", *value.shape[1:]) if name in ("linear_weight", "linear_bias") else tuple(value.shape)
    facts = "requires grad" if value.requires_grad else "constant", value.dim() == 0 or value.stride(-1) == 1
    return type(value).__name__, value.dtype, shape, *facts
