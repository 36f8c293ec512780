"""Timers of a step and its phases, and spans of work on parallel lanes.

On a CUDA device a mark is an event on the current stream, so nothing waits until
the step is over. On a CPU, where work is done when the call returns, a mark is
a clock reading.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch

Mark = torch.cuda.Event | float
T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mark(device: torch.device, stream: "torch.cuda.Stream | None" = None) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream(device))
    return event


def _between_ms(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        return (end - start) * 1e3
    return start.elapsed_time(end)


class PhaseTimer:
    """Wall time of a step and of its consecutive phases.

        timer = PhaseTimer(device)
        …forward…;  timer.mark("forward")
        …backward…; timer.mark("backward")
        wall_ms, phases = timer.stop()

    `stop` waits once, for the work queued on the current stream (slide's copies that continue into the next step are on
    other streams); `mark` never waits. All times are in ms.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = device = torch.device(device)
        self._wall = time.perf_counter()
        self._marks: list[tuple[str, Mark]] = [("start", _mark(device))]

    def mark(self, phase: str) -> None:
        """End the current phase and name it `phase`."""
        self._marks.append((phase, _mark(self.device)))

    def stop(self) -> tuple[float, dict[str, float]]:
        """Wait; return the wall time and the time of each phase in ms (phases of the same name are summed)."""
        done = _mark(self.device)
        if isinstance(done, torch.cuda.Event):
            done.synchronize()
        wall = (time.perf_counter() - self._wall) * 1e3
        phases: dict[str, float] = {}
        for (_, start), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            phases[name] = phases.get(name, 0.0) + _between_ms(start, end)
        return wall, phases


@dataclass
class Span:
    """One piece of work: `lane` (compute, in, out, update), `phase`, `layer`; start and end in ms of the trace."""

    lane: str
    phase: str
    layer: int
    start: float
    end: float


@dataclass
class Trace:
    """Spans of one instrumented step, on device lanes (CUDA events) and host lanes (clock), with a common zero."""

    device: torch.device
    _open: dict[tuple[str, str, int], Mark] = field(default_factory=dict)
    _closed: list[tuple[str, str, int, Mark, Mark]] = field(default_factory=list)

    def __post_init__(self) -> None:
        synchronize(self.device)  # so that the event and the clock below mark the same instant
        self._clock = time.perf_counter()
        self._zero = _mark(self.device)

    def begin(self, lane: str, phase: str, layer: int) -> None:
        self._open[lane, phase, layer] = _mark(self.device)

    def end(self, lane: str, phase: str, layer: int) -> None:
        start = self._open.pop((lane, phase, layer), None)
        if start is not None:
            self._closed.append((lane, phase, layer, start, _mark(self.device)))

    @contextmanager
    def span(self, lane: str, phase: str, layer: int, stream: "torch.cuda.Stream | None" = None) -> Iterator[None]:
        """A span of device work on `stream` (default: the current one)."""
        start = _mark(self.device, stream)
        try:
            yield
        finally:  # PyTorch's checkpointing stops a recomputation early by raising an exception
            self._closed.append((lane, phase, layer, start, _mark(self.device, stream)))

    @contextmanager
    def host_span(self, lane: str, phase: str, layer: int) -> Iterator[None]:
        """A span of work on the host, measured by the clock; may be used from any thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._closed.append((lane, phase, layer, start, time.perf_counter()))

    def spans(self) -> list[Span]:
        """Synchronise and return all finished spans, ordered by start."""
        synchronize(self.device)

        def ms(mark: Mark) -> float:
            if isinstance(mark, float):
                return (mark - self._clock) * 1e3
            return self._zero.elapsed_time(mark)

        spans = [Span(lane, phase, layer, ms(a), ms(b)) for lane, phase, layer, a, b in self._closed]
        return sorted(spans, key=lambda s: s.start)


class NoTrace:
    """For the clean pass: stands in for a `Trace` and records nothing."""

    def begin(self, lane: str, phase: str, layer: int) -> None: ...

    def end(self, lane: str, phase: str, layer: int) -> None: ...

    def span(self, lane: str, phase: str, layer: int, stream: "torch.cuda.Stream | None" = None) -> nullcontext:
        return nullcontext()

    host_span = span


class LeadIn:
    """Work queued ahead of a sample, so that the device is busy and warm while the host issues the timed work.

    In a training step the host runs ahead of the device, and a loss's kernels wait in the queue. On an idle device, a
    sample would measure the host's launches instead, and at a clock rate not yet lowered by the power limit: on an H200
    it takes 100 ms of products to settle (docs/log.md). Does nothing on a CPU, where calls return when work is done.
    """

    def __init__(self, device: torch.device, ms: float = 100.0) -> None:
        self._count = 0
        if device.type == "cuda":
            self._a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
            self._out = torch.empty_like(self._a)
            self._count = max(1, round(ms / median_ms(self._product, device, repeats=9)))

    def _product(self) -> None:
        torch.mm(self._a, self._a, out=self._out)

    def queue(self) -> None:
        """Queue the work; returns without waiting."""
        for _ in range(self._count):
            self._product()


def settle(device: torch.device, lead: LeadIn | None = None) -> None:
    """Prepare for a sample: wait until the device is idle, then queue the lead-in, if there is one."""
    synchronize(device)
    if lead is not None:
        lead.queue()


def time_ms(function: Callable[[], object], device: torch.device, lead: LeadIn | None = None) -> float:
    """Time of one call in ms, from an idle device (or the end of the lead-in) until the device is idle again."""
    settle(device, lead)
    start = _mark(device)
    function()
    end = _mark(device)
    synchronize(device)
    return _between_ms(start, end)


def phases_ms(
    loss: Callable[[], T], backward: Callable[[T], object], device: torch.device, lead: LeadIn | None = None
) -> dict[str, float]:
    """Times in ms of a loss (`forward`), of its gradients (`backward`), and of `both`; and the time that the host takes
    to issue both (`host`), which is hidden while the device still has queued work."""
    settle(device, lead)
    timer, begun = PhaseTimer(device), time.perf_counter()
    found = loss()
    timer.mark("forward")
    backward(found)
    timer.mark("backward")
    host = (time.perf_counter() - begun) * 1e3
    _, phases = timer.stop()
    return phases | {"both": sum(phases.values()), "host": host}


def rounds(things: Sequence[T], number: int) -> Iterator[list[T]]:
    """`number` rounds in which each of `things` has one turn, in a new random order per round (fixed seed).

    Clock drift then affects all of them alike, and so does the influence of whatever ran just before, which on an H200
    can be worth several per cent.
    """
    draw = random.Random(0)
    for _ in range(number):
        yield draw.sample(things, len(things))


def interleaved_ms(
    functions: dict[str, Callable[[], object]], device: torch.device, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time several functions in `rounds`: `repeats` samples of each in ms, after `warmup` rounds."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turns in rounds(list(functions), warmup + repeats):
        for name in turns:
            samples[name].append(time_ms(functions[name], device))
    return {name: times[warmup:] for name, times in samples.items()}


def median_ms(function: Callable[[], object], device: torch.device, repeats: int = 5, warmup: int = 2) -> float:
    """Median time of a call in ms over `repeats` samples."""
    return median(interleaved_ms({"": function}, device, repeats, warmup)[""])
