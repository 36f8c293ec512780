"""Floors: the least time the hardware allows, measured in the same process as what is compared with them."""

import torch
from torch import Tensor

from t1lib.measure.timing import median_ms
from t1lib.memory import pinned_zeros
from t1lib.timing import between_ms, mark_now, synchronize

LINK = ("h2d_gb_s", "d2h_gb_s", "both_in_gb_s", "both_out_gb_s")


def link_ms(rates: dict[str, float], forward_in: int, backward_in: int, backward_out: int) -> float:
    """Least time in ms of a step's copies (bytes): weights in for the forward; then weights in alongside gradients out.
    Once the shorter direction is done, the rest of the longer one runs at the rate of that direction alone."""
    h2d, d2h, both_in, both_out = (rates[name] * 1e6 for name in LINK)  # bytes/ms
    together = min(backward_in / both_in, backward_out / both_out)
    rest = max((backward_in - together * both_in) / h2d, (backward_out - together * both_out) / d2h, 0.0)
    return forward_in / h2d + together + rest


def measure_link(device: torch.device, nbytes: int = 2**28) -> dict[str, float]:
    """Rates in GB/s of copies of `nbytes` between pinned host memory and the device, by `LINK`: in, out, and in and out
    at the same time. On a CPU, where there is no link, those of plain copies of memory."""
    if device.type != "cuda":
        return dict.fromkeys(LINK, measure_copy(nbytes) / 2 / 1e9)
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
        return [nbytes * copies / between_ms(*ends) / 1e6 for ends in marks]

    def best(copies: int, *ways: tuple[torch.cuda.Stream, Tensor, Tensor]) -> list[float]:
        return [max(rate) for rate in zip(*(rates(copies, *ways) for _ in range(3)), strict=True)]

    rates(2, inward, outward)
    return dict(zip(LINK, best(4, inward) + best(4, outward) + best(8, inward, outward), strict=True))


def measure_copy(nbytes: int) -> float:
    """Rate in bytes/s at which all cores copy within host memory, counting bytes read plus bytes written."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return 2 * nbytes / median_ms(lambda: target.copy_(source), torch.device("cpu")) * 1e3


def measure_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of random (size, size) matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / median_ms(lambda: torch.mm(a, a), device) * 1e3
