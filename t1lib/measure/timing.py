"""Times of functions, behind queued work and in turns."""

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from t1lib.timing import PhaseTimer, synchronize

T = TypeVar("T")


def lead_in(device: torch.device, ms: float = 100.0) -> Callable[[], None]:
    """A function that queues work ahead of a sample, without waiting, so that the device is busy and warm while the
    host issues the timed work, as it is in a training step. On an idle device, a sample would measure the host's
    launches instead, and at a clock rate not yet lowered by the power limit: on an H200 it takes 100 ms of products to
    settle (docs/log.md). Does nothing on a CPU, where calls return when work is done."""
    if device.type != "cuda":
        return lambda: None
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    product = partial(torch.mm, a, a, out=torch.empty_like(a))
    count = max(1, round(ms / median_ms(product, device)))

    def queue() -> None:
        for _ in range(count):
            product()

    return queue


def phases_ms(
    phases: dict[str, Callable[[], object]], device: torch.device, lead: Callable[[], None] | None = None
) -> tuple[dict[str, float], float]:
    """Times in ms of functions that are called one after the other, from an idle device or from the end of the lead-in;
    and the time that the host takes to issue all of them, which is hidden while the device still has queued work."""
    synchronize(device)
    if lead is not None:
        lead()
    timer, begun = PhaseTimer(device), time.perf_counter()
    for name, function in phases.items():
        function()
        timer.mark(name)
    host = (time.perf_counter() - begun) * 1e3
    return timer.stop()[1], host


def median_ms(function: Callable[[], object], device: torch.device, repeats: int = 7, warmup: int = 2) -> float:
    """Median time of a call in ms over `repeats` samples, after `warmup` others."""
    return median([phases_ms({"": function}, device)[0][""] for _ in range(warmup + repeats)][warmup:])


def rounds(things: Sequence[T], number: int) -> list[list[T]]:
    """`number` rounds in which each of `things` has one turn, in a new random order per round (fixed seed): clock drift
    affects all of them alike, and so does whatever ran just before, which on an H200 can be worth several per cent."""
    draw = random.Random(0)
    return [draw.sample(things, len(things)) for _ in range(number)]


def progress(items: Iterable[Any] | None = None, what: str = "", total: int | None = None) -> tqdm:
    """Iterate over `items`, with a line as soon as that has taken two seconds, in JupyterLab, in a terminal and in an
    executed notebook; or a bar to be moved with `update`."""
    return tqdm(items, what, total, file=sys.stdout, delay=2, mininterval=0.5, ncols=90, position=0)
