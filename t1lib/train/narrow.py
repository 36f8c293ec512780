"""16-bit numbers: the dtype to sum them in, split masters, stochastic rounding, and buffers to widen them into."""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this dtype are summed: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


def join(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """float32 whose bits are those of the bfloat16 `high`, shifted to the upper half, plus the int16 `low`."""
    bits = torch.empty(high.shape, dtype=torch.int32, device=high.device) if out is None else out.view(torch.int32)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    return bits.view(torch.float32)


def split(wide: Tensor, high: Tensor, low: Tensor) -> None:
    """high ← `wide` rounded to bfloat16, low ← what `join` adds to it.

    Ties round away from zero, so that `low` fits 16 bits. `wide` is overwritten.
    """
    bits = wide.view(torch.int32)
    low.copy_(bits)  # its lower half, as a signed number
    high.view(torch.int16).copy_(bits.add_(32768).bitwise_right_shift_(16))


class Scratch:
    """Reusable float32 buffers for one piece, and the noise for the stochastic rounding of moments."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._noise: Tensor | None = None

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        held = self._buffers.get(key)
        if held is None or held.numel() < like.numel() or held.device != like.device:
            held = self._buffers[key] = torch.empty(like.numel(), device=like.device)
        return held[: like.numel()]

    def widen(self, key: str, value: Tensor) -> Tensor:
        return self._buffer(key, value).copy_(value)

    def join(self, high: Tensor, low: Tensor) -> Tensor:
        return join(high, low, out=self._buffer("master", high))

    def round_by_chance(self, wide: Tensor, out: Tensor, step: int) -> None:
        """out (bfloat16) ← wide, stochastically rounded: P(up) is the relative distance from the lower neighbour.

        The noise is drawn once. Where a piece starts reading it depends only on the step and the piece's size, so that
        a run can be repeated. `wide` is overwritten.
        """
        if self._noise is None or self._noise.numel() < 2 * wide.numel():
            generator = torch.Generator().manual_seed(0)
            size = 2 * max(wide.numel(), 1 << 16)
            self._noise = torch.randint(1 << 16, (size,), dtype=torch.int32, generator=generator).to(wide.device)
        start = step * 7919 % wide.numel()
        bits = wide.view(torch.int32)
        bits.add_(self._noise[start : start + wide.numel()]).bitwise_right_shift_(16)
        out.view(torch.int16).copy_(bits)
