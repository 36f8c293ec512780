"""Vocabulary-parallel heads: `linear_cross_entropy` with `group=`, over whose processes the weight is sharded."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from t1lib.errors import T1Error, choose, require
from t1lib.heads import DEFAULT_HEAD, checks, fused_plan
from t1lib.heads.agreement import agree, digest_of, require_backend, tell
from t1lib.heads.chunked import chunked
from t1lib.heads.contract import HeadStats, defaults, prepare
from t1lib.heads.fused import fused
from t1lib.heads.parallel_full import full
from t1lib.heads.shards import Shards

__all__ = ["HEADS", "linear_cross_entropy"]

HEADS = {"full": full, "chunked": chunked, "fused": fused}
"""The heads that work on shards of the weight, by the names of `t1lib.heads.HEADS`."""

OPERANDS = {"linear_bias", "weight", "token_weight", "shards", "cast"}
DEFAULTS = {
    name: {k: v for k, v in (defaults(prepare) | defaults(head)).items() if k not in OPERANDS}
    for name, head in HEADS.items()
}
"""Defaults of the options that each head takes."""


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    vocabulary: int | None = None,
    sequence_parallel: bool = False,
    head: str = DEFAULT_HEAD,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, HeadStats]:
    """`t1lib.heads.linear_cross_entropy` for a vocabulary-parallel layer: each rank of `group` holds some weight rows.

    This is a separate function so that nobody who forgets `group` mistakes the loss over one shard for the loss, and
    so that single-process programs import nothing from `torch.distributed`. Arguments and results are those of
    `t1lib.heads.linear_cross_entropy` except for:

    input, target       the same on every rank; targets are indices into the whole vocabulary
    sequence_parallel   if True, input, target and token_weight hold each rank's own tokens, the same number on every
                        rank, in rank order. Per-token losses, statistics and dE are then those of the rank's own
                        tokens; "mean" and "sum" are over all tokens
    linear_weight       (rows, D): the rank's classes, which follow those of the lower ranks; ranks may differ in rows,
                        but each has at least one. Or a DTensor with dimension 0 sharded over a one-dimensional mesh;
                        its gradient is then a DTensor, too
    linear_bias         (rows), or a DTensor sharded in the same way
    group               ProcessGroup or one-dimensional DeviceMesh; None: the mesh of the DTensor
    vocabulary          V, to check the shards against; None: V is the sum of their rows
    weight              (V) class weights of the whole vocabulary, the same on every rank, so that neither a target's
                        weight nor the denominator needs a collective
    workspace           per rank; the hidden states gathered under sequence_parallel are not counted
    options             the remaining options of `t1lib.heads.linear_cross_entropy` and those of the head

    Unless losses are per rank (sequence_parallel with "none"), every rank returns the same loss and must call backward
    with the same upstream gradient. Each rank gets the gradient of its own rows of the weight. dE is summed over the
    ranks in float32 (float64 for float64 operands) and is the same on all of them, or covers the rank's own tokens.
    There is no second derivative. No rank ever holds another rank's logits: the ranks exchange some 16 bytes per token
    and rank, and the token's row of dE.

    A call first exchanges the integers by which the ranks compare it; under sequence_parallel, the call and its
    backward also gather the tokens. Beyond that, the collectives of a call and its backward are:

    full                    two small ones for the loss, and one for dE, which overlaps the product of the weight's
                            gradient
    fused                   a small one for the loss (two if the first chunk is stored in the memory of dW); for each
                            chunk of tokens a small one, and one for its rows of dE, which overlaps the next chunk.
                            Those rows are all-reduced even under sequence_parallel, which takes twice the bytes of the
                            reduce-scatter that the other heads use there
    chunked by sequence     for each chunk a small one (under "none" again in the backward), and one for its rows of dE,
                            which overlaps the next chunk; under sequence_parallel, instead of the latter, one
                            reduce-scatter of dE after the last chunk
    chunked by vocabulary   a small one for the loss, and one for dE, which overlaps nothing

    Raises `T1Error` on every rank if the call differs between ranks, if the shards do not add up to the vocabulary, for
    a head, an option or an operand that is not allowed, for a backend that does not serve the tensors' device, and
    without `torch.distributed.init_process_group`. On CUDA, once the ranks have agreed on a call, later calls like it
    are compared by the device alone; a rank that differs then stops the others with a device assertion.

    Not detected: hidden states that differ between ranks (their last bits may), and targets and weights that differ,
    unless these are on a CPU. A rank that finds no group raises `T1Error` alone, and the others wait until the
    backend's timeout. All ranks wait that long if their operands are on different types of device in a group that has
    a backend for each type.

    Source: Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al. 2019, section 3).
    """
    group = _group_of(group, linear_weight)
    e, y, device = input, target, _device(linear_weight if isinstance(linear_weight, Tensor) else input)
    try:
        require_backend(group, device.type)
        w, b = _local(group, linear_weight, "linear_weight"), _local(group, linear_bias, "linear_bias")
        called = {"head": choose("head", head, HEADS), **_filled(head, options)}
    except T1Error as error:
        tell(group, error, device)
        raise
    plain = {"input": e, "target": y, "weight": weight, "token_weight": token_weight}
    whole = linear_weight.shape[0] if isinstance(linear_weight, DTensor) else None
    called |= {"vocabulary": vocabulary, "sequence_parallel": sequence_parallel, "rows of the DTensor": whole}
    values = _values(weight=weight, **({} if sequence_parallel else {"target": y, "token_weight": token_weight}))
    rows = agree(group, {**called, **_facts(plain, w, b), **values, **_machine(device)}, _rows_of(w), device)
    _check(plain, w, b, rows)
    _check_sizes(rows, vocabulary, whole, weight)
    shards = Shards(group, dist.get_rank(group), rows, sequence_parallel)
    return HEADS[head](e, w, y, linear_bias=b, weight=weight, token_weight=token_weight, shards=shards, **options)


def _filled(head: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with defaults for those left out, so that a default passed explicitly gives the same call.

    For the same reason the workspace is converted to bytes.
    """
    filled = DEFAULTS[head] | options
    if filled["ignore_index"] is None:
        filled["ignore_index"] = DEFAULTS[head]["ignore_index"]
    if filled["workspace"] is not None:
        filled["workspace"] = checks.parse_bytes(filled["workspace"])
    return filled


def _facts(plain: dict[str, Any], w: Any, b: Any) -> dict[str, Any]:
    """What must be the same on all ranks about the operands: those that are not sharded, and the shards w and b."""
    e = plain["input"]
    facts = {name: _describe(value, e) for name, value in plain.items()}
    facts |= {"linear_weight": _describe(w, e, 1), "linear_bias": _describe(b, e, 1)}
    facts["linear_bias has as many rows as linear_weight"] = b is None or _rows_of(b) == _rows_of(w)
    return facts


def _values(**named: Any) -> dict[str, str]:
    """Digests of the values of those that are plain CPU tensors, which can be read without waiting for a device."""
    here = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.device.type == "cpu"}
    return {f"values of {k}": digest_of(v) for k, v in here.items() if not isinstance(v, DTensor)}


def _check(plain: dict[str, Any], w: Any, b: Any, rows: tuple[int, ...]) -> None:
    """Raise `T1Error` for an operand that no head takes."""
    for name, value in plain.items():
        require(not isinstance(value, DTensor), f"{name} must be a plain tensor, got a DTensor; pass its local part")
    checks.tensors(linear_weight=w, linear_bias=b, **plain)
    require(min(rows) > 0, f"every rank must hold at least one row of linear_weight; they hold {rows}")
    checks.operands(plain["input"], w, b, same_dtype=False)


def _check_sizes(rows: tuple[int, ...], vocabulary: int | None, whole: int | None, weight: Tensor | None) -> None:
    """Raise `T1Error` unless the shards add up to every other number of classes that the call implies."""
    sizes = {
        "vocabulary is": vocabulary,
        "the weight as a DTensor has": whole,
        "class weights are given for": None if weight is None else weight.numel(),
    }
    for what, size in sizes.items():
        held = f"the ranks hold {' + '.join(map(str, rows))} = {sum(rows)} rows of linear_weight"
        require(size is None or size == sum(rows), f"{held}, but {what} {size!r} classes")


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
    mesh = tensor.device_mesh
    same = mesh.ndim == 1 and mesh.get_group() == group
    require(same, f"{name} must be sharded on a one-dimensional mesh, and group be that mesh or its group")
    placements = tuple(tensor.placements)
    require(placements == (Shard(0),), f"{name} must be sharded on dimension 0, (Shard(dim=0),), got {placements}")
    return tensor.to_local()


def _device(tensor: Any) -> torch.device:
    """The device on which the ranks compare the call: that of the operands."""
    return tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")


def _describe(value: Any, like: Any, skip: int = 0) -> Any:
    """What must agree about an argument: type, dtype, shape from dimension `skip` on, device, requires_grad."""
    if not isinstance(value, Tensor):
        return value if value is None else type(value).__name__
    place = value.device.type if isinstance(like, Tensor) and value.device == like.device else "on another device"
    shape = (*("rows",) * min(skip, value.dim()), *value.shape[skip:])
    return (type(value).__name__, value.dtype, shape, place, "requires grad" if value.requires_grad else "constant")


def _rows_of(tensor: Any) -> int:
    return len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0


def _machine(device: torch.device) -> dict[str, Any]:
    """The other facts that decide how a head computes."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return {"device": fused_plan.device_of(device), "autocast": autocast, "grad mode": torch.is_grad_enabled()}
