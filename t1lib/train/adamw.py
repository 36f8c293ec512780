"""AdamW for 16-bit parameters with a master, in one pass on a GPU: every value of the state is read and written once.
PyTorch's fused AdamW takes tensors of one dtype, and would need widening, rounding and splitting in passes of their
own."""

import math
from typing import Any

import torch
from torch import Tensor

from t1lib.heads.scale import triton

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

    @triton.jit(do_not_specialize=["count"])
    def adamw_kernel(
        weight, grad, first, second, master, low, scale, numel, count, sign, rate, corrected_rate, correction, decay,
        beta1, rest1, beta2, rest2, eps, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(grad + at, inside, 0).to(tl.float32)
        if scale is not None:  # rounded, as clipping in place rounds it
            g = (g * tl.load(scale).to(tl.float32)).to(grad.dtype.element_ty).to(tl.float32)
        g *= sign
        m, v = tl.load(first + at, inside, 0), tl.load(second + at, inside, 0)
        if NARROW:
            m, v = _widened(m), _widened(v)
        if low is None:
            p = tl.load(master + at, inside, 0)
        else:
            rest, high = tl.load(low + at, inside, 0).to(tl.int32), tl.load(weight + at, inside, 0).to(tl.int32)
            rest = tl.where((high & 0x7FFF) == 0, tl.maximum(rest, 0), rest)  # see `update.join`
            p = ((high << 16) + rest).to(tl.float32, bitcast=True)
        m = m * beta1 + g * rest1
        v = v * beta2 + g * g * rest2
        spread = tl.div_rn(tl.sqrt_rn(v), correction) + eps
        p = p * (1.0 - rate * decay) - tl.div_rn(corrected_rate * m, spread)
        if NARROW:
            noise = tl.randint(count, at)
            tl.store(first + at, _chance(m, noise & 0xFFFF), inside)
            tl.store(second + at, _chance(v, (noise >> 16) & 0xFFFF), inside)
        else:
            tl.store(first + at, m, inside)
            tl.store(second + at, v, inside)
        if low is None:
            tl.store(master + at, p, inside)
            tl.store(weight + at, p.to(weight.dtype.element_ty), inside)
        else:  # ties round away from zero, so that the remainder fits 16 bits
            bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)  # else a nan's bits may become −0
            tl.store(low + at, bits.to(tl.int16), inside)
            tl.store(weight + at, ((bits + 32768) >> 16).to(tl.int16), inside)


@torch.no_grad()
def adamw_(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], rule: dict[str, Any], count: int,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Update a 16-bit `weight` (N) and its `state` in place (Loshchilov and Hutter, arXiv:1711.05101). All tensors are
    contiguous and on one device.

    grad    (N), 16 or 32 bits
    state   "exp_avg" and "exp_avg_sq", float32, or bfloat16 with stochastic rounding (seeded by the count, so that a
            run can be repeated); and the master: "master" float32, or "low" int16 (`t1lib.train.update.join`)
    rule    a group of `torch.optim.AdamW`
    count   updates so far, including this one
    scale   factor of the gradient, (), on the device
    """
    first, second = state["exp_avg"], state["exp_avg_sq"]
    narrow = first.dtype == torch.bfloat16
    if narrow:
        first, second = first.view(torch.int16), second.view(torch.int16)
    low = state.get("low")
    weight = weight if low is None else weight.view(torch.int16)
    beta1, beta2 = rule["betas"]
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    with torch.cuda.device_of(weight):
        adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
            weight, grad, first, second, state.get("master"), low, scale, weight.numel(), count,
            -1.0 if rule["maximize"] else 1.0, rule["lr"], rule["lr"] / correction1, math.sqrt(correction2),
            rule["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, rule["eps"], narrow, BLOCK,
        )  # fmt: skip
