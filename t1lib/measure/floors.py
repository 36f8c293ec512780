"""Floors: the least time the hardware allows, measured in the same process as what is compared with them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from t1lib.measure.timing import LeadIn, median_ms, settle
from t1lib.memory import pinned_zeros
from t1lib.timing import PhaseTimer, synchronize


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
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def timed(copies: int, use_in: bool, use_out: bool) -> tuple[float, float]:
        synchronize(device)
        marks = {}
        for stream, use, to, source in ((inward, use_in, dev_in, host_in), (outward, use_out, host_out, dev_out)):
            if use:
                with torch.cuda.stream(stream):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    for _ in range(copies):
                        to.copy_(source, non_blocking=True)
                    end.record()
                    marks[stream] = (start, end)
        synchronize(device)
        ms = [marks[s][0].elapsed_time(marks[s][1]) if s in marks else float("inf") for s in (inward, outward)]
        return nbytes * copies / ms[0] * 1e3, nbytes * copies / ms[1] * 1e3

    timed(2, True, True)
    alone_in = max(timed(4, True, False)[0] for _ in range(3))
    alone_out = max(timed(4, False, True)[1] for _ in range(3))
    both = [timed(8, True, True) for _ in range(3)]
    return Link(alone_in, alone_out, max(b[0] for b in both), max(b[1] for b in both))


def measure_copy(nbytes: int) -> float:
    """Rate in bytes/s at which all cores copy within host memory, counting bytes read plus bytes written."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return 2 * nbytes / median_ms(lambda: target.copy_(source), torch.device("cpu")) * 1e3


def measure_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of random (size, size) matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / median_ms(lambda: torch.mm(a, a), device) * 1e3


def products_ms(e: Tensor, w: Tensor, results: tuple[Tensor, Tensor, Tensor], lead: LeadIn) -> dict[str, float]:
    """Times in ms of the three products of e (N, D) and w (V, D), back to back as in a head, queued behind `lead`.

    results   output buffers: logits (N, V), dE (N, D), dW (V, D)
    """
    z, d_e, d_w = results
    settle(e.device, lead)
    timer = PhaseTimer(e.device)
    torch.mm(e, w.T, out=z)
    timer.mark("logits")
    torch.mm(z, w, out=d_e)
    timer.mark("dE")
    torch.mm(z.T, e, out=d_w)
    timer.mark("dW")
    return timer.stop()[1]
