"""The arguments of a head: checked once per call, and what follows from them."""

import functools
import inspect
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd.forward_ad import unpack_dual

from t1lib.errors import T1Error, choose, is_number, is_whole, require, shown

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
UNITS = {"B": 1, "": 1} | {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
UNITS |= {f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "label_smoothing": ("a number in [0, 1]", lambda x: 0 <= x <= 1),
    "softcap": ("None or a number in [1e-30, 1e30]", lambda x: 1e-30 <= x <= 1e30),  # float32 has its reciprocal, too
    "z_loss": ("a finite number >= 0", lambda x: x >= 0),
    "filter_eps": ("None or a number in (0, 1)", lambda x: 0 < x < 1),
}


class HeadStats(NamedTuple):
    """Detached statistics per token, each of the target's shape; 0, 0 and False at ignored tokens. Logits are those
    after the softcap; lse and logprob have the loss's dtype."""

    lse: Tensor  # log-sum-exp of the token's logits
    logprob: Tensor  # log-probability of the target, not weighted
    correct: Tensor  # bool: no logit exceeds the target's (`fused`: by more than about 1e-6 · max(its size, 1))


class Tensors(NamedTuple):
    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    token_weight: Tensor | None = None


def evenly_spaced(input: Tensor) -> bool:
    """Whether an input (…, D) can be viewed as (N, D); `hidden[:, :-1]`, for one, must be copied."""
    outer = list(zip(input.shape[:-1], input.stride(), strict=False))
    if not torch.compiler.is_compiling():  # the compiler may not know whether a size is 1: it counts as others do
        outer = [(size, stride) for size, stride in outer if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(outer))


class Shards(NamedTuple):
    """One process's view of the sharding: it holds the weight's rows [`first`, `first + rows[rank]`)."""

    name: str  # of the group, because an operator of PyTorch's cannot take a group
    rows: tuple[int, ...]  # of the weight on each of the `size` processes of `group`, in rank order
    sequence: bool  # whether the tokens are sharded, too: the same number on every process, in rank order

    group = property(lambda self: dist.distributed_c10d._resolve_process_group(self.name))
    rank = property(lambda self: dist.get_rank(self.group))
    first = property(lambda self: sum(self.rows[: self.rank]))
    size = property(lambda self: len(self.rows))

    def gather(self, mine: Tensor) -> Tensor:
        """(size · n, …): the values (n, …) of every process, in rank order."""
        # the older name is deprecated in PyTorch 2.13, but the only one in earlier versions
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        every = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        all_gather(every, mine.contiguous(), group=self.group)
        return every


class Settings(NamedTuple):
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    workspace: int | None = None  # bytes
    filter_eps: float | None = None
    return_stats: bool = False
    shards: Shards | None = None  # None: this process holds all of the weight


class Options:
    """What a head needs to know of a call besides its operands. Vectors over tokens are flat (N), over classes (V).

    target   as an index into the whole vocabulary
    valid    which tokens are not ignored
    vocab    rows of the weight on this process; `most`: on the process with the most; `classes`: on all together
    dtype    of the loss and of all arithmetic on logits: float32, or float64 for float64 operands
    same_dtype: the operands must agree in dtype. check: not needed in the backward of a call that was checked."""

    def __init__(self, tensors: Tensors, settings: Settings, same_dtype: bool = True, check: bool = True) -> None:
        input, w, target, _, weight, token_weight = tensors
        self.settings, self.shape, shards = settings, target.shape, settings.shards
        self.vocab = w.shape[0] if w.dim() else 0
        self.first, rows = (0, [self.vocab]) if shards is None else (shards.first, shards.rows)
        self.classes, self.most = sum(rows), max(rows)
        if check:
            _check_shapes(tensors, self.classes, same_dtype)
        self.target = self.tokens(target.flatten().long()).contiguous()  # kernels read it with stride 1
        self.dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        if token_weight is not None:
            token_weight = self.tokens(token_weight.flatten()).to(self.dtype).masked_fill(~self.valid, 0.0)
        self.token_weight = token_weight
        self.class_weight = None if weight is None else weight.to(self.dtype).contiguous()
        self.local_class_weight = None if weight is None else self.class_weight[self.first :][: self.vocab]

    valid = functools.cached_property(lambda self: self.target != self.settings.ignore_index)
    target_or_0 = property(lambda self: self.target.masked_fill(~self.valid, 0))  # 0 at ignored tokens

    def tokens(self, mine: Tensor) -> Tensor:
        """Gather the values of all tokens, (N, …), from those of the tokens that each process was given."""
        shards = self.settings.shards
        return shards.gather(mine) if shards is not None and shards.sequence else mine

    def own_tokens(self, every: Tensor) -> Tensor:
        """Select from the values of all tokens, (N, …), those of the tokens that this process was given."""
        shards = self.settings.shards
        sharded = shards is not None and shards.sequence
        return every.tensor_split(shards.size)[shards.rank].clone() if sharded else every

    @functools.cached_property
    def target_weight(self) -> Tensor:
        """(N): the class weight of each token's target, 1 without class weights; 0 at ignored tokens."""
        if self.class_weight is None:
            return self.valid.to(self.dtype)
        return self.class_weight[self.target_or_0].masked_fill(~self.valid, 0.0)

    @functools.cached_property
    def class_sum(self) -> Tensor | float:
        """Sum of the class weights over the vocabulary; V without class weights."""
        return float(self.classes) if self.class_weight is None else self.class_weight.sum()

    @functools.cached_property
    def denominator(self) -> Tensor:
        """Scalar that `mean` divides by: the sum over valid tokens of token weight times the target's class weight."""
        return self.mask(self.target_weight).sum()

    def mask(self, losses: Tensor) -> Tensor:
        """Multiply (N) per-token losses by the token weight and set them to 0 at ignored tokens."""
        return torch.where(self.valid, losses if self.token_weight is None else losses * self.token_weight, 0.0)

    def losses(self, lse: Tensor, logprob: Tensor, pull: Tensor) -> Tensor:
        """(N) masked losses by the equation in `chunked`, from vectors of per-token statistics."""
        smooth, z_loss = self.settings.label_smoothing, self.settings.z_loss
        losses = -(1.0 - smooth) * logprob * self.target_weight
        if smooth:
            losses = losses + smooth / self.classes * (self.class_sum * lse - pull)
        return self.mask(losses + z_loss * lse.square() if z_loss else losses)

    def reduce(self, losses: Tensor) -> Tensor:
        if self.settings.reduction == "none":
            return self.own_tokens(losses).reshape(self.shape).clone()  # no view, so that `losses *= mask` works
        return losses.sum() if self.settings.reduction == "sum" else losses.sum() / self.denominator

    def factors(self, upstream: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N) each: r, A without its z-loss part, B and E of the gradient's equation in `chunked`, given dL / d(what
        `reduce` returns)."""
        if self.settings.reduction == "mean":
            upstream = upstream / self.denominator
        elif self.settings.reduction == "none":
            upstream = self.tokens(upstream.flatten())
        # mask last: if every token is ignored, upstream / denominator is infinite, but the gradient must be 0
        r = self.mask(upstream * torch.ones_like(self.target, dtype=self.dtype))
        weighted, smooth = r * self.target_weight, self.settings.label_smoothing
        if not smooth:
            return r, weighted, weighted, torch.zeros_like(r)
        b, even = weighted * (1.0 - smooth), r * (smooth / self.classes)
        return r, b + even * self.class_sum, b, even

    def stats(self, lse: Tensor, logprob: Tensor, correct: Tensor) -> HeadStats:
        """`HeadStats` from flat (N) values, cleared at ignored tokens."""
        cleared = (torch.where(self.valid, lse, 0.0), torch.where(self.valid, logprob, 0.0), correct & self.valid)
        return HeadStats(*(self.own_tokens(x).reshape(self.shape).detach() for x in cleared))


def on_flat_operands(compute: Callable) -> Callable:
    """Decorator: turn `compute(e, w, b, opts, *, own options)` into an entry of `HEADS`. It gets checked, flat and cast
    operands e (N, D), w (V, D), b (V) or None. Hidden states of ignored tokens are 0: not even nan may get through."""

    @functools.wraps(compute)
    def head(tensors: Tensors, settings: Settings, **own: Any) -> tuple[Tensor, HeadStats | None]:
        e, w, target, b, *rest = tensors
        dtype = autocast_dtype(e)
        if dtype is not None:  # as in `F.linear`
            e, w, b = (t if t is None or t.dtype not in DTYPES[:3] else t.to(dtype) for t in (e, w, b))
        opts = Options(Tensors(e, w, target, b, *rest), settings)
        check_range(opts)
        with torch.autocast(e.device.type, enabled=False):  # operands are already cast, the rest is float32
            e = torch.where(opts.own_tokens(opts.valid)[:, None], e.reshape(-1, e.shape[-1]), 0.0)
            return compute(e, w, b, opts, **own)

    return head


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that operands on the tensor's device are cast to; None outside autocast."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def own_options(name: str, head: Callable, given: dict[str, Any]) -> None:
    own = [p.name for p in inspect.signature(head).parameters.values() if p.kind is p.KEYWORD_ONLY]
    others = ["head", *Settings._fields[:-1], *Tensors._fields[3:]]  # not in `given`, but what a misspelt name may mean
    for key in given:
        choose(f"option of head {name!r}:", key, [*own, *others])


def parse_bytes(size: int | str, least: int = 0) -> int:
    """Bytes from an int or a string such as "256MiB", "1.5GiB", "2GB" (10⁹ each) or "4096"; `T1Error` for anything
    else, for more than 2**60, and for fewer than `least`, as when a unit was forgotten."""
    found = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", size)
        found = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else None
    if not is_whole(found, least, 2**60):
        allowed = f"{least} to 2**60 bytes, as a whole number or with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        raise T1Error(f"bad size {shown(size)}; allowed: {allowed}")
    return found


def check_tensors(tensors: Tensors) -> None:
    for name, value in zip(Tensors._fields, tensors, strict=True):
        if value is None and name in Tensors._field_defaults:
            continue
        require(isinstance(value, Tensor), f"{name} must be a tensor, got {type(value).__name__}")
        whole = type(value).__name__ != "DTensor"
        require(whole, f"{name} is a DTensor; pass its full_tensor() or, under a group, its to_local()")
        device = tensors.input.device
        require(value.device == device, f"{name} is on {value.device}, input on {device}; put all on one device")
        dense = value.layout == torch.strided and not (value.is_nested or value.is_quantized or value.is_meta)
        require(dense, f"{name} must be a dense tensor, got one that is sparse, nested, quantized, of mkldnn, on meta")
        if not torch.compiler.is_compiling():
            plain = unpack_dual(value).tangent is None and not is_functorch_wrapped_tensor(value)
            require(plain, f"{name} is within forward-mode differentiation or torch.func; allowed: plain autograd")


def check_settings(given: Settings) -> Settings:
    choose("reduction", given.reduction, ("mean", "sum", "none"))
    require(isinstance(given.return_stats, bool), "return_stats must be True or False")
    index = -100 if given.ignore_index is None else given.ignore_index
    # no `require`, here and below, because the compiler cannot trace a symbolic value's message
    if not is_whole(index, -(2**63), 2**63 - 1):
        raise T1Error(f"ignore_index must be an int of 64 bits, got {shown(index)}")
    checked = {"ignore_index": index, "workspace": None if given.workspace is None else parse_bytes(given.workspace)}
    for name, (allowed, fits) in NUMBERS.items():
        value = getattr(given, name)
        if value is None and Settings._field_defaults[name] is None:
            continue
        if not (is_number(value) and abs(value) < 1.7e308 and fits(value)):  # an int may be too large for a float
            raise T1Error(f"{name} must be {allowed}, got {shown(value)}")
        checked[name] = float(value)
    return given._replace(**checked)


def _check_shapes(tensors: Tensors, classes: int, same_dtype: bool) -> None:
    """Require shapes, dtypes and constants as `linear_cross_entropy` documents; classes, same_dtype as in `Options`."""
    e, w, target, *_ = tensors
    shape, lead = tuple(e.shape), tuple(e.shape[:-1])
    require(len(shape) >= 1 and shape[-1] >= 1, f"input must have shape (…, D) with D >= 1, got {shape}")
    fits = w.dim() == 2 and w.shape[0] >= 1 and w.shape[1] == shape[-1]
    require(fits, f"linear_weight must have shape (V, D) with V >= 1 and D = {shape[-1]}, got {tuple(w.shape)}")
    other = target.is_floating_point() or target.is_complex() or target.dtype in (torch.bool, torch.uint64)
    require(not other, f"target must hold class indices, int64 at most, not class probabilities; got {target.dtype}")
    shapes = {"linear_bias": (len(w),), "target": lead, "weight": (classes,), "token_weight": lead}
    for name, value in tensors._asdict().items():
        if value is None:
            continue
        if name in ("input", "linear_weight", "linear_bias"):
            require(value.dtype in DTYPES, f"{name} must be bfloat16, float16, float32 or float64; got {value.dtype}")
            same = value.dtype == e.dtype or (not same_dtype and value.dtype != torch.float64)
            require(same, f"{name} is {value.dtype}, input {e.dtype}; cast it, or use autocast")
        wanted = shapes.get(name, value.shape)
        require(value.shape == wanted, f"{name} must have shape {wanted}, got {tuple(value.shape)}")
        if name in ("weight", "token_weight"):
            real = value.is_floating_point() or (name == "token_weight" and not value.is_complex())
            require(real, f"{name} must be floating point, got {value.dtype}")
            require(not value.requires_grad, f"{name} requires a gradient, but is a constant here; use {name}.detach()")


def check_range(opts: Options, in_range: Tensor | None = None) -> None:
    """Raise `T1Error` for a target out of range; on CUDA, a device-side assertion. in_range: () bool, whether all
    targets are in range, where a kernel has checked that already."""
    flat, ignored = opts.target, opts.settings.ignore_index
    if in_range is None or not flat.is_cuda:
        wrong = (flat != ignored) & ((flat < 0) | (flat >= opts.classes))
        in_range = ~wrong.any()
    message = f"target must lie in [0, {opts.classes}) or be ignore_index {ignored}"
    if flat.is_cuda:  # reading a value would make the host wait for the device
        torch._assert_async(in_range, message)
    elif not in_range:
        raise T1Error(f"{message}; got {flat[wrong][0].item()}")


def check_chunks(chunks: int | None, settings: Settings) -> None:
    if not (chunks is None or is_whole(chunks, 1, 2**31)):  # as in `check_settings`
        raise T1Error(f"chunks must be an int >= 1, got {shown(chunks)}")
    require(chunks is None or settings.workspace is None, "give chunks or workspace, not both: each sets the size")


def need_workspace(workspace: int | None, least: int, head: str) -> None:
    """Raise a `T1Error` that states the least that works if the call's workspace is below `least` bytes."""
    if workspace is not None and workspace < least:
        small = f"workspace of {workspace} bytes is too small for head {head!r} here"
        raise T1Error(f"{small}; the least that works is {least} bytes ({least / 2**20:.2f}MiB)")


def require_plain_backward(head: str, upstream: Tensor | None, grouped: bool = False) -> None:
    """Raise a `T1Error` in a backward with create_graph=True (then grad mode is on) or with a batch of upstream
    gradients. grouped: whether the call was given a process group."""
    advice = "nor has any other under a group" if grouped else 'use head "full"'
    require(not torch.is_grad_enabled(), f'head "{head}" has no second derivative (create_graph=True); {advice}')
    batched = type(upstream) is Tensor and is_legacy_batchedtensor(upstream)
    require(not batched, f'head "{head}" has no batched backward (is_grads_batched, vectorize); {advice}')


def spent(head: str, instead: str) -> T1Error:
    """The error of a second backward, where the forward made the gradients and the first backward gave them away."""
    given = "its gradients were made in the forward and given away by the first"
    return T1Error(f'second backward through head "{head}": {given}; call it again, or use {instead}')
