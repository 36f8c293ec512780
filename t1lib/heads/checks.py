"""Checks of a head's arguments: one `T1Error` for each kind of bad value, naming it and what is allowed."""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from t1lib.errors import T1Error, choose, is_whole, require

REDUCTIONS = ("mean", "sum", "none")
UNITS = {"B": 1, "": 1} | {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
UNITS |= {f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}


def parse_bytes(size: int | str) -> int:
    """Bytes from an int or a string such as "256MiB", "1.5GiB", "2GB" or "4096"; `T1Error` for anything else."""
    allowed = "allowed: a whole number of bytes >= 0, or a number with one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
    if isinstance(size, int) and not isinstance(size, bool):
        require(size >= 0, f"bad size {size!r}; {allowed}")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if match is None or match[2] not in UNITS:
        raise T1Error(f"bad size {size!r}; {allowed}")
    return int(float(match[1]) * UNITS[match[2]])


def tensors(**named: Tensor | None) -> None:
    """Require that everything given is a tensor, on the device of `input`."""
    optional = ("linear_bias", "weight", "token_weight")
    for name, value in named.items():
        if value is None and name in optional:
            continue
        require(isinstance(value, Tensor), f"{name} must be a tensor, got {type(value).__name__}")
        device = named["input"].device
        require(value.device == device, f"{name} is on {value.device}, input on {device}; put all on one device")


def operands(e: Tensor, w: Tensor, b: Tensor | None, same_dtype: bool = True) -> None:
    """Require shapes (…, D), (V, D), (V), a floating-point input and, with `same_dtype`, one dtype."""
    require(e.is_floating_point(), f"input must be floating point, got {e.dtype}")
    require(e.dim() >= 1, "input must have shape (…, D), got a scalar")
    require(e.shape[-1] >= 1, f"input must have at least one feature (…, D), got shape {tuple(e.shape)}")
    require(w.dim() == 2, f"linear_weight must have shape (V, D), got {tuple(w.shape)}")
    require(w.shape[0] > 0, f"linear_weight must have at least one row, got {tuple(w.shape)}")
    require(
        e.shape[-1] == w.shape[1],
        f"input {tuple(e.shape)} and linear_weight {tuple(w.shape)} must agree in their last dimension D",
    )
    for name, value in (("linear_weight", w), ("linear_bias", b)):
        dtype = e.dtype if value is None else value.dtype
        require(dtype == e.dtype or not same_dtype, f"{name} is {dtype}, input {e.dtype}; cast it, or use autocast")
    if b is not None:
        require(b.shape == w.shape[:1], f"linear_bias must have shape ({w.shape[0]},), got {tuple(b.shape)}")


def targets(
    target: Tensor, e: Tensor, vocab: int, ignore_index: int, flatten: Callable[[Tensor], Tensor] = torch.flatten
) -> Tensor:
    """Require class indices of shape (…), each in [0, V) or `ignore_index`; return them flattened, in int64."""
    lead = tuple(e.shape[:-1])
    if target.is_floating_point() and tuple(target.shape) == (*lead, vocab):
        raise T1Error("target holds class probabilities, which no head takes; give class indices of shape (…)")
    integer = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    require(integer, f"target must hold integer class indices, got {target.dtype}")
    require(
        tuple(target.shape) == lead,
        f"target must have shape {lead}, that of input {tuple(e.shape)} without D; got {tuple(target.shape)}",
    )
    index(ignore_index)
    flat = flatten(target).long().contiguous()  # kernels read it with stride 1
    _in_range(flat, vocab, ignore_index)
    return flat


def index(ignore_index: int) -> None:
    """Require an integer that a target can hold."""
    fits = is_whole(ignore_index, -(2**63), 2**63 - 1)
    require(fits, f"ignore_index must be an int of 64 bits, got {ignore_index!r}")


def _in_range(target: Tensor, vocab: int, ignore_index: int) -> None:
    fine = (target == ignore_index) | ((target >= 0) & (target < vocab))
    message = f"target must lie in [0, {vocab}) or be ignore_index {ignore_index}"
    if target.is_cuda:  # reading a value would make the host wait for the device
        torch._assert_async(fine.all(), message)
    elif not fine.all():
        raise T1Error(f"{message}; got {target[~fine][0].item()}")


def weights(weight: Tensor | None, token_weight: Tensor | None, vocab: int, shape: torch.Size) -> None:
    """Require class weights (V) and token weights of the target's shape, neither of which requires a gradient."""
    if weight is not None:
        require(weight.is_floating_point(), f"weight must be floating point, got {weight.dtype}")
        require(tuple(weight.shape) == (vocab,), f"weight must have shape ({vocab},), got {tuple(weight.shape)}")
    if token_weight is not None:
        require(not token_weight.is_complex(), f"token_weight must be real, got {token_weight.dtype}")
        fits = token_weight.shape == shape
        require(fits, f"token_weight must have the target's shape {tuple(shape)}, got {tuple(token_weight.shape)}")
    for name, value in (("weight", weight), ("token_weight", token_weight)):
        constant = value is None or not value.requires_grad
        require(constant, f"{name} requires a gradient, but heads treat it as a constant; pass {name}.detach()")


def scalars(
    reduction: str, label_smoothing: float, softcap: float | None, z_loss: float, filter_eps: float | None
) -> None:
    """Require a known reduction, and each numeric option in its range."""
    choose("reduction", reduction, REDUCTIONS)
    _number("label_smoothing", label_smoothing, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    _number("z_loss", z_loss, "a finite number >= 0", lambda x: 0 <= x < math.inf)
    if softcap is not None:
        _number("softcap", softcap, "None or a finite number > 0", lambda x: 0 < x < math.inf)
    if filter_eps is not None:
        _number("filter_eps", filter_eps, "None or a number in (0, 1)", lambda x: 0 < x < 1)


def _number(name: str, value: float, allowed: str, test) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and test(value)):  # not `require`: the compiler cannot trace a message with a symbolic value
        raise T1Error(f"{name} must be {allowed}, got {value!r}")


def count(name: str, value: int) -> None:
    """Require a whole number of at least 1."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, f"{name} must be an int >= 1, got {value!r}")
