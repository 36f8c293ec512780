"""AdamW for 16-bit parameters with a master, in one pass on a GPU: every value of the state is read and written once.

PyTorch's fused AdamW takes tensors of one dtype. With it, gradients would have to be widened and weights rounded, split
masters joined and split again, 16-bit moments widened and rounded, each in a pass of its own.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from t1lib.heads.scale import triton

if TYPE_CHECKING:
    from t1lib.train.spec import OptimizerSpec

BLOCK = 1024

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _chance(wide, noise):
        """Round float32 to bfloat16's bits stochastically: P(up) is the relative distance from the lower neighbour."""
        return ((wide.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16)

    @triton.jit
    def _widened(bits):
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def adamw_kernel(
        weight, grad, first, second, master, low, step, scale, lost, numel, times, rate, decay, beta1, rest1, beta2,
        rest2, log_beta1, log_beta2, eps, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        count = tl.load(step)
        g = tl.load(grad + at, inside, 0).to(tl.float32) * times
        if scale is not None:
            g *= tl.load(scale).to(tl.float32)
        m, v = tl.load(first + at, inside, 0), tl.load(second + at, inside, 0)
        if NARROW:
            m, v = _widened(m), _widened(v)
        if low is None:
            p = tl.load(master + at, inside, 0)
        else:
            rest = tl.load(low + at, inside, 0).to(tl.int32)
            p = ((tl.load(weight + at, inside, 0).to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)
        # in float64, because beta2 is close to 1
        correction1 = (1.0 - tl.exp2(count.to(tl.float64) * log_beta1)).to(tl.float32)
        correction2 = (1.0 - tl.exp2(count.to(tl.float64) * log_beta2)).to(tl.float32)
        new_m = m * beta1 + g * rest1
        new_v = v * beta2 + g * g * rest2
        spread = tl.div_rn(tl.sqrt_rn(new_v), tl.sqrt_rn(correction2)) + eps
        new_p = p * (1.0 - rate * decay) - tl.div_rn(rate / correction1 * new_m, spread)
        if lost is not None:
            kept = tl.load(lost) != 0
            m, v, p = tl.where(kept, m, new_m), tl.where(kept, v, new_v), tl.where(kept, p, new_p)
        else:
            m, v, p = new_m, new_v, new_p
        if NARROW:
            noise = tl.randint(count.to(tl.int32), at)
            tl.store(first + at, _chance(m, noise & 0xFFFF), inside)
            tl.store(second + at, _chance(v, (noise >> 16) & 0xFFFF), inside)
        else:
            tl.store(first + at, m, inside)
            tl.store(second + at, v, inside)
        if low is None:
            tl.store(master + at, p, inside)
            tl.store(weight + at, p.to(weight.dtype.element_ty), inside)
        else:  # ties round away from zero, so that the remainder fits 16 bits
            bits = p.to(tl.int32, bitcast=True)
            tl.store(low + at, bits.to(tl.int16), inside)
            tl.store(weight + at, ((bits + 32768) >> 16).to(tl.int16), inside)


def has_kernel(weight: Tensor) -> bool:
    """Whether the kernel can run on this parameter: it is on a GPU, and Triton is installed."""
    return triton is not None and weight.is_cuda


@torch.no_grad()
def adamw_(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], spec: "OptimizerSpec", lr: float,
    scale: Tensor | float = 1.0, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Update a 16-bit `weight` (N) and its `state` in place. All tensors are contiguous and on one device.

    grad    (N), 16 or 32 bits
    state   "step" () float32, which already counts this update; "exp_avg" and "exp_avg_sq", float32, or bfloat16 with
            stochastic rounding (seeded by the step, so that a run can be repeated); and the master: "master" float32,
            or "low" int16 (`t1lib.train.narrow.join`)
    scale   factor of the gradient: a number, or a tensor () on the device
    lost    () on the device: if not 0, nothing changes

    Weight decay is decoupled from the gradient, and bias is corrected (Loshchilov and Hutter, arXiv:1711.05101).
    """
    first, second = state["exp_avg"], state["exp_avg_sq"]
    narrow = first.dtype == torch.bfloat16
    if narrow:
        first, second = first.view(torch.int16), second.view(torch.int16)
    low = state.get("low")
    weight = weight if low is None else weight.view(torch.int16)
    by, times = (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)
    beta1, beta2 = spec.betas
    numel = weight.numel()
    with torch.cuda.device_of(weight):
        adamw_kernel[(triton.cdiv(numel, BLOCK),)](
            weight, grad, first, second, state.get("master"), low, state["step"], by, lost, numel, times, lr,
            spec.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, _log2(beta1), _log2(beta2), spec.eps, narrow, BLOCK,
        )  # fmt: skip


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf
