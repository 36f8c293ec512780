"""One optimizer update of a list of tensors, by the rule of a parameter group of `torch.optim`.

16-bit parameters with a float32 master are updated in pieces: each is widened, updated and rounded (on a CPU, while it
is in the caches). On a GPU a single kernel does all this for AdamW, reading and writing every value of the state once.
(PyTorch's fused AdamW takes tensors of one dtype, and would need widening, rounding and splitting in passes of their
own.) All else is updated by PyTorch.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from t1lib.errors import require
from t1lib.heads.kernels import FMA, triton
from t1lib.optimizers import Precision, Rule

DEVICE_PIECE = 1 << 25  # values that a device updates at a time: enough to keep it busy, few enough to hold in float32
HOST_PIECE = 1 << 17  # values that each core of the host updates at a time: their float32 state stays in its caches
BLOCK = 1024  # values that one program of the kernel updates

State = dict[str, Tensor]

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _chance(wide, noise):
        """Round float32 to bfloat16's bits stochastically: P(up) is the relative distance from the lower neighbour."""
        return ((wide.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16)

    @triton.jit
    def _widened(bits):
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    @triton.jit(do_not_specialize=["count"])
    def adamw_kernel(
        weight, grad, mean, square, master, low, scale, numel, count, sign, rate, corrected_rate, correction, decay,
        beta1, rest1, beta2, rest2, eps, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(grad + at, inside, 0).to(tl.float32)
        if scale is not None:  # rounded, as clipping in place rounds it
            g = (g * tl.load(scale).to(tl.float32)).to(grad.dtype.element_ty).to(tl.float32)
        g *= sign
        m, v = tl.load(mean + at, inside, 0), tl.load(square + at, inside, 0)
        if NARROW:
            m, v = _widened(m), _widened(v)
        if low is None:
            p = tl.load(master + at, inside, 0)
        else:
            rest, high = tl.load(low + at, inside, 0).to(tl.int32), tl.load(weight + at, inside, 0).to(tl.int32)
            rest = tl.where((high & 0x7FFF) == 0, tl.maximum(rest, 0), rest)  # see `join`
            p = ((high << 16) + rest).to(tl.float32, bitcast=True)
        m = m * beta1 + g * rest1
        v = v * beta2 + g * g * rest2
        spread = tl.div_rn(tl.sqrt_rn(v), correction) + eps
        p = p * (1.0 - rate * decay) - tl.div_rn(corrected_rate * m, spread)
        if NARROW:
            noise = tl.randint(count, at)
            tl.store(mean + at, _chance(m, noise & 0xFFFF), inside)
            tl.store(square + at, _chance(v, (noise >> 16) & 0xFFFF), inside)
        else:
            tl.store(mean + at, m, inside)
            tl.store(square + at, v, inside)
        if low is None:
            tl.store(master + at, p, inside)
            tl.store(weight + at, p.to(weight.dtype.element_ty), inside)
        else:  # ties round away from zero, so that the remainder fits 16 bits
            bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)  # else a nan's bits may become −0
            tl.store(low + at, bits.to(tl.int16), inside)
            tl.store(weight + at, ((bits + 32768) >> 16).to(tl.int16), inside)


@torch.no_grad()
def adamw_(weight: Tensor, grad: Tensor, state: State, rule: Rule, count: int, scale: Tensor | None = None) -> None:
    """As `update`, of a 16-bit `weight` (N), by `torch.optim.AdamW` (Loshchilov and Hutter, arXiv:1711.05101). All
    tensors are contiguous and on one device; grad: (N), 16 or 32 bits. The state has "exp_avg" and "exp_avg_sq",
    float32, or bfloat16 with stochastic rounding (seeded by the count, so that a run can be repeated); and the master:
    "master" float32, or "low" int16 (see `join`)."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    narrow = mean.dtype == torch.bfloat16
    if narrow:
        mean, square = mean.view(torch.int16), square.view(torch.int16)
    low = state.get("low")
    weight = weight if low is None else weight.view(torch.int16)
    beta1, beta2 = rule["betas"]
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    with torch.cuda.device_of(weight):
        adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
            weight, grad, mean, square, state.get("master"), low, scale, weight.numel(), count,
            -1.0 if rule["maximize"] else 1.0, rule["lr"], rule["lr"] / correction1, math.sqrt(correction2),
            rule["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, rule["eps"], narrow, BLOCK, **FMA,
        )  # fmt: skip


def new_state(param: Tensor, rule: Rule, precision: Precision) -> State:
    """Fresh state of a parameter, on its device. (How many updates it has seen is counted apart.)"""
    return {
        key: param.detach().float() if key == "master" else torch.zeros_like(param, dtype=dtype)
        for key, dtype in precision.state_dtypes(param, rule).items()
    }


def step_tensor(count: int, device: torch.device | str = "cpu") -> Tensor:
    """A count of updates as `torch.optim` keeps it, (); float32 even if the default dtype has 16 bits: too few."""
    return torch.tensor(count, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32), device=device)


def join(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """float32 with the bits of the bfloat16 `high` as its upper half, plus the int16 `low`; but beside a 0, a negative
    `low` counts as 0. `split` makes no such pair, but somebody may have written the 0, and the sum would be nan."""
    bits = torch.empty(high.shape, dtype=torch.int32, device=high.device) if out is None else out.view(torch.int32)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(torch.where(high == 0, low.clamp_min(0), low))
    return bits.view(torch.float32)


def split(wide: Tensor, high: Tensor, low: Tensor) -> None:
    """high ← `wide` rounded to bfloat16, low ← what `join` adds to it. Ties round away from zero, so that `low` fits 16
    bits. `wide` is overwritten."""
    wide.masked_fill_(wide.isnan(), torch.nan)  # other bits of a nan may become −0
    bits = wide.view(torch.int32)
    low.copy_(bits)  # its lower half, as a signed number
    high.view(torch.int16).copy_(bits.add_(32768).bitwise_right_shift_(16))


def follow(master: Tensor, weight: Tensor) -> None:
    """Let a master follow its weight where somebody has written to it: where the weight is not the rounded master."""
    torch.where(master.to(weight.dtype) == weight, master, weight.float(), out=master)


class Scratch:
    """Reusable float32 buffers for one piece, and the noise for the stochastic rounding of moments; for one device."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._noise: Tensor | None = None

    def buffer(self, key: str, like: Tensor) -> Tensor:
        held = self._buffers.get(key)
        if held is None or held.numel() < like.numel():
            with torch.inference_mode(False):  # an evaluation may come before the update
                held = self._buffers[key] = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return held[: like.numel()]

    def round_by_chance(self, wide: Tensor, out: Tensor, step: int) -> None:
        """out (bfloat16) ← wide, stochastically rounded: P(up) is the relative distance from the lower neighbour. Where
        a piece starts reading the noise depends only on step and size, so that a run can be repeated."""
        if self._noise is None or self._noise.numel() < 2 * wide.numel():
            generator = torch.Generator().manual_seed(0)
            size = 2 * max(wide.numel(), 1 << 16)
            noise = torch.randint(1 << 16, (size,), dtype=torch.int32, device="cpu", generator=generator)
            self._noise = noise.to(wide.device)
        start = step * 7919 % wide.numel()
        bits = wide.view(torch.int32)
        bits.add_(self._noise[start : start + wide.numel()]).bitwise_right_shift_(16)
        out.view(torch.int16).copy_(bits)


@torch.no_grad()
def update(
    weights: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], rule: Rule, count: int,
    scale: Tensor | None = None, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """Update tensors of one dtype and their states in place; gradients may be overwritten. count: updates so far,
    including this one; scale: factor of the gradients, (), on their device"""
    if any(state.keys() & {"master", "low"} for state in states):
        for weight, grad, state in zip(weights, grads, states, strict=True):
            _wide(weight.view(-1), grad.reshape(-1), state, rule, count, scale, scratch or Scratch())
        return
    if scale is not None:
        torch._foreach_mul_(grads, scale)
    _torchs(weights, grads, states, rule, count)


def _torchs(
    weights: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], rule: Rule, count: int
) -> None:
    """PyTorch's update, with the implementation that the rule names: see `ResidentOptimizer.rules`."""
    common = {k: rule[k] for k in ("lr", "weight_decay", "maximize", "foreach", "fused")}
    if "betas" in rule:
        steps = [step_tensor(count - 1, w.device if rule["fused"] else "cpu") for w in weights]
        adamw(
            weights, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], steps,
            amsgrad=False, beta1=rule["betas"][0], beta2=rule["betas"][1], eps=rule["eps"], **common,
        )  # fmt: skip
        return
    # On the CPU, PyTorch's fused SGD (2.11, 2.13) leaves 16-bit tensors of 32 or more elements unchanged.
    if any(w.dtype.itemsize == 2 and w.device.type == "cpu" for w in weights):
        common["fused"] = False
    buffers, fresh = [s.get("momentum_buffer") for s in states], count == 1
    for buffer in buffers if fresh else ():  # PyTorch would make it of the gradient, without dampening, as −0 + g is g
        if buffer is not None:
            buffer.fill_(-0.0)
    sgd(
        weights, grads, buffers, momentum=rule["momentum"], dampening=0 if fresh else rule["dampening"],
        nesterov=rule["nesterov"], **common,
    )  # fmt: skip


def _wide(
    weight: Tensor, grad: Tensor, state: State, rule: Rule, count: int, scale: Tensor | None, scratch: Scratch
) -> None:
    """Update a flat 16-bit tensor that has a master: with one kernel, or piece by piece."""
    flat = {k: v.view(-1) for k, v in state.items()}
    if "betas" in rule and weight.is_cuda and triton is not None:
        adamw_(weight, grad, flat, rule, count, scale)
        return
    size = HOST_PIECE * torch.get_num_threads() if weight.device.type == "cpu" else DEVICE_PIECE
    for start in range(0, weight.numel(), size):
        piece = slice(start, start + size)
        part = {k: v[piece] for k, v in flat.items()}
        g = scratch.buffer("grad", grad[piece]).copy_(grad[piece])
        if scale is not None:
            g.mul_(scale)
            g.copy_(g.to(grad.dtype))  # rounded, as clipping in place rounds it
        low, master = part.pop("low", None), part.pop("master", None)
        if low is not None:
            master = join(weight[piece], low, out=scratch.buffer("master", low))
        wide = {k: v if v.dtype == torch.float32 else scratch.buffer(k, v).copy_(v) for k, v in part.items()}
        _torchs([master], [g], [wide], rule, count)
        for key, value in part.items():
            if value is not wide[key]:
                scratch.round_by_chance(wide[key], value, count)
        if low is None:
            weight[piece].copy_(master)
        else:
            split(master, weight[piece], low)


def norms_of(grads: Sequence[Tensor], exact: bool) -> list[Tensor]:
    """Euclidean norms in float32 (float64 for float64), on the gradients' device. exact: as PyTorch computes them"""
    found, wide = [], [torch.promote_types(g.dtype, torch.float32) for g in grads]
    if exact or not grads or grads[0].device.type != "cpu":
        return list(torch._foreach_norm(list(grads), 2, dtype=wide[0])) if grads else []
    for grad, dtype in zip(grads, wide, strict=True):  # on all cores: PyTorch's own norm uses one
        pieces = (piece.to(dtype) for piece in grad.reshape(-1).split(HOST_PIECE * torch.get_num_threads()))
        found.append(torch.stack([torch.dot(piece, piece) for piece in pieces]).sum().sqrt())
    return found


def shown_state(weight: Tensor, state: State, count: int) -> State:
    """A parameter's state as `state_dict` shows it: as `torch.optim` does, and independent of how masters are kept."""
    found = {k: v for k, v in state.items() if k != "low"}
    if "low" in state:
        found["master"] = join(weight.detach().to(state["low"].device), state["low"])
    return {"step": step_tensor(count), **found} if "exp_avg" in state else found


def check_state(weight: Tensor, keys: Collection[str], saved: State, name: str) -> None:
    """Raise `T1Error` unless `saved`, as `shown_state` or PyTorch's optimizers give it, fits a state of these keys."""
    keys = set(keys)
    saved = {k: v for k, v in saved.items() if v is not None}
    foreign = saved.keys() - keys - {"master", "step"}
    require(not foreign, f"the state of {name} has {', '.join(sorted(foreign))}: it is another optimizer's")
    needed = (keys | ({"step"} if "exp_avg" in keys else set())) - {"low", "master"}
    lacking = needed - saved.keys()
    require(not (saved and lacking), f"the state of {name} lacks {', '.join(sorted(lacking))}")
    for key in (keys | {"master"}) & saved.keys():
        shape = tuple(getattr(saved[key], "shape", ()))
        require(shape == tuple(weight.shape), f"{key} of {name} has shape {shape}; allowed: {tuple(weight.shape)}")


@torch.no_grad()
def take_state(weight: Tensor, state: State, saved: State) -> int:
    """Copy a saved state, which must have passed `check_state`, into `state`; returns how many updates it has seen. If
    masters are kept, the weight is set to a saved one, or one is made from the weight. All else missing becomes 0."""
    saved = {k: v for k, v in saved.items() if v is not None}
    if "low" in state and "master" in saved:
        split(saved["master"].to(torch.float32, copy=True), weight, state["low"])
    elif "low" in state:
        state["low"].zero_()
    elif "master" in state:
        weight.copy_(state["master"].copy_(saved.get("master", weight)))
    for key in state.keys() - {"master", "low"}:
        value = saved.get(key, 0)
        state[key].copy_(value) if isinstance(value, Tensor) else state[key].fill_(value)
    return int(saved.get("step", 1 if "momentum_buffer" in saved else 0))
