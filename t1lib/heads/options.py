"""The arguments of a head: checked once per call, and what follows from them."""

import functools
import inspect
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t1lib.errors import T1Error, choose, is_whole, require, shown

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
UNITS = {"B": 1, "": 1} | {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
UNITS |= {f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}
SOFTCAPS = (1e-30, 1e30)  # beyond these a cap of float32 logits is no different, but its reciprocal may overflow


class HeadStats(NamedTuple):
    """Detached statistics per token, each of the target's shape; 0, 0 and False at ignored tokens.

    `lse`: log-sum-exp of the token's logits. `logprob`: log-probability of the target, not weighted.
    `correct`: whether no logit exceeds the target's (ties count as correct; so does, with head `fused`, a logit that is
    higher by 1e-6 of its size, or of 1, because it comes from another product than the target's).
    """

    lse: Tensor
    logprob: Tensor
    correct: Tensor


class Tensors(NamedTuple):
    """The tensors of a call, by the names and in the shapes that `linear_cross_entropy` gives them."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    token_weight: Tensor | None = None


class Settings(NamedTuple):
    """The other arguments of a call, checked. `workspace` in bytes.

    shards   which process holds which rows of the weight, a `parallel.Shards`; None: this one holds them all
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    workspace: int | None = None
    filter_eps: float | None = None
    return_stats: bool = False
    shards: Any = None


class Options:
    """What a head needs to know of a call besides its operands. Vectors over tokens are flat (N), over classes (V).

    target        as an index into the whole vocabulary; `local_target`: into this process's rows of the weight
    valid         which tokens are not ignored
    class_weight  of the whole vocabulary; `local_class_weight`: of this process's rows
    vocab         rows of the weight on this process; `classes`: on all together
    dtype         of the loss and of all arithmetic on logits: float32, or float64 for float64 operands
    """

    def __init__(self, tensors: Tensors, settings: Settings, same_dtype: bool = True, check: bool = True) -> None:
        """From a call's tensors, whose shapes, dtypes and range of targets are checked.

        With shards, linear_weight and linear_bias are this process's rows only, target that of the tokens given to it.
        same_dtype   the operands must agree in dtype, because the head does not cast them itself
        check        not needed in the backward of a call that was checked
        """
        input, w, target, _, weight, token_weight = tensors
        self.settings, self.shape, self.vocab = settings, target.shape, w.shape[0] if w.dim() else 0
        first, self.classes, tokens = 0, self.vocab, Tensor.contiguous  # kernels read targets with stride 1
        if settings.shards is not None:
            shards = settings.shards
            first, self.classes, tokens = shards.first, sum(shards.rows), shards.tokens
        if check:
            _check_shapes(tensors, self.classes, same_dtype)
        self.target = tokens(target.flatten().long())
        self.local_target = self.target - first if first else self.target
        self.valid = self.target != settings.ignore_index
        if check:
            _check_range(self)
        self.dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        self.token_weight = token_weight
        if token_weight is not None:
            self.token_weight = tokens(token_weight.flatten()).to(self.dtype).masked_fill(~self.valid, 0.0)
        self.class_weight = None if weight is None else weight.to(self.dtype).contiguous()
        self.local_class_weight = None if weight is None else self.class_weight[first : first + self.vocab]

    def own(self, every: Tensor) -> Tensor:
        """Select from the values of all tokens, (N, …), those of the tokens that this process was given."""
        return every if self.settings.shards is None else self.settings.shards.own(every)

    @cached_property
    def target_weight(self) -> Tensor | None:
        """(N): the class weight of each token's target, 0 at ignored tokens; None without class weights."""
        if self.class_weight is None:
            return None
        return self.class_weight[self.target.masked_fill(~self.valid, 0)].masked_fill(~self.valid, 0.0)

    @cached_property
    def class_sum(self) -> Tensor | float:
        """Sum of the class weights over the vocabulary; V without class weights."""
        return float(self.classes) if self.class_weight is None else self.class_weight.sum()

    @cached_property
    def denominator(self) -> Tensor:
        """Scalar that `mean` divides by: the sum over valid tokens of token weight times the target's class weight."""
        weight = self.valid.to(self.dtype)
        for factor in (self.token_weight, self.target_weight):
            weight = weight if factor is None else weight * factor
        return weight.sum()

    def mask(self, losses: Tensor) -> Tensor:
        """Multiply (N) per-token losses by the token weight and set them to 0 at ignored tokens."""
        weighted = losses if self.token_weight is None else losses * self.token_weight
        return torch.where(self.valid, weighted, 0.0)

    def losses(self, lse: Tensor, logprob: Tensor, pull: Tensor) -> Tensor:
        """(N) masked losses by the equation in `chunked`, from vectors of per-token statistics."""
        smooth, z_loss = self.settings.label_smoothing, self.settings.z_loss
        losses = -(1.0 - smooth) * logprob
        if self.target_weight is not None:
            losses = losses * self.target_weight
        if smooth:
            losses = losses + smooth / self.classes * (self.class_sum * lse - pull)
        return self.mask(losses + z_loss * lse.square() if z_loss else losses)

    def reduce(self, losses: Tensor) -> Tensor:
        """Reduce masked (N) losses to what the call returns."""
        if self.settings.reduction == "none":
            return self.own(losses).reshape(self.shape)
        return losses.sum() if self.settings.reduction == "sum" else losses.sum() / self.denominator

    def factors(self, upstream: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N) each: r, A without its z-loss part, B and E of the gradient's equation in `chunked`, given dL / d(what
        `reduce` returns)."""
        if self.settings.reduction == "mean":
            upstream = upstream / self.denominator
        elif self.settings.reduction == "none":
            shards, upstream = self.settings.shards, upstream.flatten()
            upstream = upstream if shards is None else shards.tokens(upstream)
        # mask last: if every token is ignored, upstream / denominator is infinite, but the gradient must be 0
        r = self.mask(upstream * torch.ones_like(self.target, dtype=self.dtype))
        weighted, smooth = r if self.target_weight is None else r * self.target_weight, self.settings.label_smoothing
        if not smooth:
            return r, weighted, weighted, torch.zeros_like(r)
        target, even = weighted * (1.0 - smooth), r * (smooth / self.classes)
        return r, target + even * self.class_sum, target, even

    def stats(self, lse: Tensor, logprob: Tensor, correct: Tensor) -> HeadStats:
        """`HeadStats` from flat (N) values, cleared at ignored tokens."""
        cleared = (torch.where(self.valid, lse, 0.0), torch.where(self.valid, logprob, 0.0), correct & self.valid)
        return HeadStats(*(self.own(x).reshape(self.shape).detach() for x in cleared))


def on_flat_operands(compute: Callable) -> Callable:
    """Decorator: give `compute(e, w, b, opts, *, own options)`, which takes checked, flat, cast operands e (N, D),
    w (V, D), b (V) or None, the arguments of an entry of `HEADS`.

    Hidden states of ignored tokens become 0: whatever is there, NaN included, must not reach a gradient.
    """

    @functools.wraps(compute)
    def head(tensors: Tensors, settings: Settings, **own: Any) -> tuple[Tensor, HeadStats | None]:
        device = tensors.input.device.type
        if torch.is_autocast_enabled(device):  # as in `F.linear`
            dtype = torch.get_autocast_dtype(device)
            for name in ("input", "linear_weight", "linear_bias"):
                t = getattr(tensors, name)
                if t is not None and t.is_floating_point() and t.dtype != torch.float64:
                    tensors = tensors._replace(**{name: t.to(dtype)})
        opts = Options(tensors, settings)
        e, w, _, b, *_ = tensors
        with torch.autocast(device, enabled=False):  # operands are already cast, the rest is float32
            e = torch.where(opts.own(opts.valid)[:, None], e.reshape(-1, e.shape[-1]), 0.0)
            return compute(e, w, b, opts, **own)

    return head


def own_options(name: str, head: Callable, given: dict[str, Any]) -> None:
    """Raise a `T1Error`, listing the options of head `name`, if `given` holds any other."""
    own = [p.name for p in inspect.signature(head).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in given:
        allowed = ", ".join(own) or "none of its own"
        require(key in own, f"unknown option {shown(key)} for head {name!r}; its options: {allowed}")


def parse_bytes(size: int | str) -> int:
    """Bytes from an int or a string such as "256MiB", "1.5GiB", "2GB" or "4096"; `T1Error` for anything else."""
    found = size if isinstance(size, int) and not isinstance(size, bool) else None
    text = size if isinstance(size, str) else ""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if match is not None and match[2] in UNITS:
        found = int(float(match[1]) * UNITS[match[2]])
    if found is None or not 0 <= found <= 2**60:
        raise T1Error(
            f"bad size {shown(size)}; allowed: a whole number of bytes from 0 to 2**60, or a number with one of "
            "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        )
    return found


def check_tensors(tensors: Tensors) -> None:
    """Require that everything given is a dense tensor, on the device of `input`."""
    for name, value in zip(Tensors._fields, tensors, strict=True):
        if value is None and name in Tensors._field_defaults:
            continue
        require(isinstance(value, Tensor), f"{name} must be a tensor, got {type(value).__name__}")
        dense = value.layout == torch.strided and not value.is_nested and not value.is_quantized
        require(dense, f"{name} must be a dense tensor, got one that is sparse, nested, quantized or of mkldnn")
        device = tensors.input.device
        require(value.device == device, f"{name} is on {value.device}, input on {device}; put all on one device")


def check_settings(given: Settings) -> Settings:
    """Settings as heads take them, from arguments of any type: a known reduction, an index that a target can hold, and
    each number in its range."""
    _, ignore_index, smooth, softcap, z_loss, size, filter_eps, *_ = given
    choose("reduction", given.reduction, ("mean", "sum", "none"))
    ignore_index = -100 if ignore_index is None else ignore_index
    if not is_whole(ignore_index, -(2**63), 2**63 - 1):
        raise T1Error(f"ignore_index must be an int of 64 bits, got {shown(ignore_index)}")
    smooth = _number("label_smoothing", smooth, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    z_loss = _number("z_loss", z_loss, "a finite number >= 0", lambda x: x >= 0)
    if softcap is not None:
        softcap = _number("softcap", softcap, "None or a finite number > 0", lambda x: x > 0)
        softcap = min(max(softcap, SOFTCAPS[0]), SOFTCAPS[1])
    if filter_eps is not None:
        filter_eps = _number("filter_eps", filter_eps, "None or a number in (0, 1)", lambda x: 0 < x < 1)
    size = None if size is None else parse_bytes(size)
    require(isinstance(given.return_stats, bool), "return_stats must be True or False")
    return Settings(given.reduction, ignore_index, smooth, softcap, z_loss, size, filter_eps, given.return_stats)


def _number(name: str, value: float, allowed: str, test: Callable[[float], bool]) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # an int may be too large for a float; no `require`, because the compiler cannot trace a symbolic value's message
    if not (number and abs(value) < 1.7e308 and test(value)):
        raise T1Error(f"{name} must be {allowed}, got {shown(value)}")
    return float(value)


def _check_shapes(tensors: Tensors, classes: int, same_dtype: bool) -> None:
    """Require the dtypes and shapes that `linear_cross_entropy` documents, and constant weights of classes and tokens.

    classes      in the whole vocabulary
    same_dtype   as in `Options`
    """
    e, w, target, *_ = tensors
    given = {name: value for name, value in tensors._asdict().items() if value is not None}
    for name in ("input", "linear_weight", "linear_bias"):
        dtype = given.get(name, e).dtype
        known = f"{name} must be floating point: bfloat16, float16, float32 or float64; got {dtype}"
        require(dtype in DTYPES, known)
        same = dtype == e.dtype or (not same_dtype and dtype != torch.float64)
        require(same, f"{name} is {dtype}, input {e.dtype}; cast it, or use autocast")
    shape, lead = tuple(e.shape), tuple(e.shape[:-1])
    require(len(shape) >= 1 and shape[-1] >= 1, f"input must have shape (…, D) with D >= 1, got {shape}")
    fits = w.dim() == 2 and w.shape[0] >= 1
    require(fits, f"linear_weight must have shape (V, D) with V >= 1, got {tuple(w.shape)}")
    same = shape[-1] == w.shape[1]
    require(same, f"input {shape} and linear_weight {tuple(w.shape)} must agree in their last dimension D")
    if target.is_floating_point() and target.shape == (*lead, classes):
        raise T1Error("target holds class probabilities, which no head takes; give class indices of shape (…)")
    other = target.is_floating_point() or target.is_complex() or target.dtype in (torch.bool, torch.uint64)
    require(not other, f"target must hold class indices of an integer type up to int64, got {target.dtype}")
    shapes = {"linear_bias": (len(w),), "target": lead, "weight": (classes,), "token_weight": lead}
    for name, value in given.items():
        wanted = shapes.get(name, value.shape)
        require(value.shape == wanted, f"{name} must have shape {wanted}, got {tuple(value.shape)}")
    for name in [name for name in ("weight", "token_weight") if name in given]:
        real = given[name].is_floating_point() or (name == "token_weight" and not given[name].is_complex())
        require(real, f"{name} must be floating point, got {given[name].dtype}")
        constant = not given[name].requires_grad
        require(constant, f"{name} requires a gradient, but heads treat it as a constant; pass {name}.detach()")


def _check_range(opts: Options) -> None:
    flat, classes = opts.target, opts.classes
    wrong = opts.valid & ((flat < 0) | (flat >= classes))
    message = f"target must lie in [0, {classes}) or be ignore_index {opts.settings.ignore_index}"
    if flat.is_cuda:  # reading a value would make the host wait for the device
        torch._assert_async(~wrong.any(), message)
    elif wrong.any():
        raise T1Error(f"{message}; got {flat[wrong][0].item()}")


def check_chunks(chunks: int | None, settings: Settings) -> None:
    """Require None, or a whole number of at least 1 and no workspace."""
    require(chunks is None or is_whole(chunks, 1, 2**31), f"chunks must be an int >= 1, got {shown(chunks)}")
    one = chunks is None or settings.workspace is None
    require(one, "give chunks or workspace, not both: each sets the chunk size")


def need_workspace(workspace: int | None, least: int, head: str) -> None:
    """Raise a `T1Error` that states the least that works if the call's workspace is below `least` bytes."""
    if workspace is not None and workspace < least:
        raise T1Error(
            f"workspace of {workspace} bytes is too small for head {head!r} here; "
            f"the least that works is {least} bytes ({least / 2**20:.2f}MiB)"
        )


def refuse_create_graph(head: str, grouped: bool = False) -> None:
    """For use in a backward: raise a `T1Error` under create_graph=True, the only case in which grad mode is on there.

    Otherwise the gradients would be taken for constants, and second derivatives would be silently wrong.
    `grouped`: the vocabulary is sharded over a group.
    """
    advice = "nor has any other under a group" if grouped else 'use head "full"'
    require(not torch.is_grad_enabled(), f'head "{head}" has no second derivative (create_graph=True); {advice}')


def spent(head: str, instead: str) -> T1Error:
    """The error of a second backward, where the forward made the gradients and the first backward gave them away."""
    return T1Error(
        f'second backward through head "{head}": its gradients were made in the forward and given away by the first; '
        f"call it again, or use {instead}"
    )
