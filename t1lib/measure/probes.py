"""Building blocks of measurements: times of functions, behind queued work and in turns; and memory: the allocator's
own history, exact peaks on the device and on the host, pinned bytes."""

import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from t1lib.errors import require
from t1lib.memory import _registered
from t1lib.timing import PhaseTimer, synchronize

# Event in the allocator's history → sign with which its size counts for bytes allocated, for bytes reserved.
CHANGES = {"alloc": (1, 0), "free_completed": (-1, 0), "segment_alloc": (0, 1), "segment_map": (0, 1)}
CHANGES |= {"segment_free": (0, -1), "segment_unmap": (0, -1)}
MOST_EVENTS = 1_000_000  # that the allocator's history holds; it drops the oldest
LEAD_MS = 100.0  # on an H200, the clock takes this long to settle under products (docs/log.md)

T = TypeVar("T")


def lead_in(device: torch.device) -> Callable[[], None]:
    """A function that queues work for `LEAD_MS` ahead of a sample, without waiting, so that the device is busy and warm
    while the host issues the timed work, as it is in a training step. On an idle device, a sample would measure the
    host's launches instead, and at a clock rate not yet lowered by the power limit. Does nothing on a CPU, where calls
    return when work is done."""
    if device.type != "cuda":
        return lambda: None
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    product = partial(torch.mm, a, a, out=torch.empty_like(a))
    number = max(1, round(LEAD_MS / median_ms(product, device)))

    def queue() -> None:
        for _ in range(number):
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
    """A progress bar over `items` or, without them, one to be moved with `update`. It is a line of text in JupyterLab,
    in a terminal and in an executed notebook alike, and appears after two seconds."""
    return tqdm(items, what, total, file=sys.stdout, delay=2, mininterval=0.5, ncols=90, position=0)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under `tensors` (views and tied weights count once)."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class AllocatorTimeline:
    """Every allocation and release within a `with` block, from the allocator's history: exact, without polling.

    points    [(ms since entry, bytes allocated, bytes reserved or, on a CPU, None)]
    baseline  bytes live at entry: for the caller to state on a CPU, read from the allocator on CUDA

    On CUDA it counts the bytes requested, without the allocator's rounding (up to a few per cent less than
    `max_memory_allocated`); on a CPU, by the profiler, those of this thread. Recording slows down small operations:
    take times from another pass."""

    def __init__(self, device: torch.device | str, baseline: int = 0) -> None:
        self.device, self.baseline = torch.device(device), baseline
        self.points: list[tuple[float, int, int | None]] = []

    def __enter__(self) -> "AllocatorTimeline":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.baseline = torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
            self._held = torch.cuda.memory_reserved(self.device)
            torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all of its own: it would note each start and stop
            cpu = torch.profiler.ProfilerActivity.CPU
            self._profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
            self._profile.__enter__()
        self._start_us = time.time_ns() / 1e3
        return self

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            trace = torch.cuda.memory._snapshot()["device_traces"][self.device.index or 0]
            torch.cuda.memory._record_memory_history(enabled=None)
            require(len(trace) < MOST_EVENTS, f"{MOST_EVENTS} allocations or more; allowed in a timeline: fewer")
            events, reserved = [(e["time_us"], e["action"], e["size"]) for e in trace], self._held
        else:
            self._profile.__exit__(*exc)
            found = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            found.sort(key=lambda e: e.start_ns())
            events, reserved = [(e.start_ns() / 1e3, "alloc", e.nbytes()) for e in found], None
        allocated = self.baseline
        self.points = [(0.0, allocated, reserved)]
        for time_us, action, size in events:
            if action in CHANGES:
                live, held = CHANGES[action]
                allocated += live * size
                reserved = None if reserved is None else reserved + held * size
                self.points.append(((time_us - self._start_us) / 1e3, allocated, reserved))

    @property
    def peak(self) -> int:
        """Most bytes allocated."""
        return max(allocated for _, allocated, _ in self.points)


class HostPeak:
    """Exact peak of this process's resident memory (Linux's VmHWM) since the last `HostPeak` was made: all share it."""

    def __init__(self) -> None:
        self.exact = False
        with suppress(OSError):
            self.exact = Path("/proc/self/clear_refs").write_text("5") > 0

    def read(self) -> float:
        """The peak in bytes; NaN where it is not `exact`, as elsewhere than on Linux."""
        if not self.exact:
            return float("nan")
        return float(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def pinned_bytes() -> int:
    """Bytes of host memory pinned by this process: the kit's own buffers and PyTorch's pinned allocator."""
    stats = torch.cuda.memory.host_memory_stats() if torch.cuda.is_available() else {}
    return sum(_registered.values()) + stats.get("allocated_bytes.current", 0)
