"""Floors: the least time the hardware allows, measured in the same process as what is compared with them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from t1lib.measure.timing import median_ms
from t1lib.memory import pinned_zeros
from t1lib.timing import between_ms, mark_now, synchronize


@dataclass(frozen=True)
class Link:
    """Copy rates between pinned host memory and the device, in bytes/s; `both_*` with both directions active."""

    host_to_device: float
    device_to_host: float
    both_in: float
    both_out: float

    def step_ms(self, forward_in: int, backward_in: int, backward_out: int) -> float:
        """Least time in ms of a step's copies: weights in for the forward; then weights in alongside gradients out.

        Once the shorter direction is done, the rest of the longer one runs at the rate of that direction alone.
        """
        forward = forward_in / self.host_to_device
        together = min(backward_in / self.both_in, backward_out / self.both_out)
        rest_in = (backward_in - together * self.both_in) / self.host_to_device
        rest_out = (backward_out - together * self.both_out) / self.device_to_host
        return (forward + together + max(rest_in, rest_out, 0.0)) * 1e3


def measure_link(device: torch.device, nbytes: int = 2**28) -> Link:
    """Measure the link with copies of `nbytes`; on a CPU, where there is no link, plain copies of memory."""
    if device.type != "cuda":
        rate = measure_copy(nbytes) / 2
        return Link(rate, rate, rate, rate)
    host_in, host_out = (pinned_zeros(nbytes, torch.uint8, device).fill_(1) for _ in range(2))
    dev_in, dev_out = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    inward, outward = (torch.cuda.Stream(device), dev_in, host_in), (torch.cuda.Stream(device), host_out, dev_out)

    def rates(copies: int, *ways: tuple[torch.cuda.Stream, Tensor, Tensor]) -> list[float]:
        """Of copies on all of these ways at once: stream, target, source."""
        synchronize(device)
        marks = []
        for stream, target, source in ways:
            with torch.cuda.stream(stream):
                start = mark_now(device)
                for _ in range(copies):
                    target.copy_(source, non_blocking=True)
                marks.append((start, mark_now(device)))
        synchronize(device)
        return [nbytes * copies / between_ms(*ends) * 1e3 for ends in marks]

    def best(copies: int, *ways: tuple[torch.cuda.Stream, Tensor, Tensor]) -> list[float]:
        return [max(rate) for rate in zip(*(rates(copies, *ways) for _ in range(3)), strict=True)]

    rates(2, inward, outward)
    return Link(*best(4, inward), *best(4, outward), *best(8, inward, outward))


def measure_copy(nbytes: int) -> float:
    """Rate in bytes/s at which all cores copy within host memory, counting bytes read plus bytes written."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return 2 * nbytes / median_ms(lambda: target.copy_(source), torch.device("cpu")) * 1e3


def measure_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of random (size, size) matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / median_ms(lambda: torch.mm(a, a), device) * 1e3
