"""Timers of a step and its phases, and spans of work on parallel lanes.

On a CUDA device a mark is an event on the current stream: nothing waits until
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
    """Wait for all work queued on `device`; nothing to wait for on a CPU."""
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

    `stop` waits once for what was queued on the current stream (copies that slide lets run on into the next step have
    their own); `mark` never does. All times are in ms.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = device = torch.device(device)
        self._wall = time.perf_counter()
        self._marks: list[tuple[str, Mark]] = [("start", _mark(device))]

    def mark(self, phase: str) -> None:
        """End the phase that runs now and call it `phase`."""
        self._marks.append((phase, _mark(self.device)))

    def stop(self) -> tuple[float, dict[str, float]]:
        """Wait; return the wall time and the time of each phase (same names are summed), in ms."""
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
    """One piece of work: `lane` (compute, in, out, update), `phase`, `layer`; start and end in ms since the trace's."""

    lane: str
    phase: str
    layer: int
    start: float
    end: float


@dataclass
class Trace:
    """Spans of one instrumented step, on device lanes (CUDA events) and host lanes (clock) with one common zero."""

    device: torch.device
    _open: dict[tuple[str, str, int], Mark] = field(default_factory=dict)
    _closed: list[tuple[str, str, int, Mark, Mark]] = field(default_factory=list)

    def __post_init__(self) -> None:
        synchronize(self.device)  # so that the event and the clock below name the same instant
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
        finally:  # PyTorch's checkpoint leaves a recomputation by an exception when it has what it needs
            self._closed.append((lane, phase, layer, start, _mark(self.device, stream)))

    @contextmanager
    def host_span(self, lane: str, phase: str, layer: int) -> Iterator[None]:
        """A span of work on the host, measured by the clock; may be called from any thread."""
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
    """The clean pass: takes a trace's place and records nothing."""

    def begin(self, lane: str, phase: str, layer: int) -> None: ...

    def end(self, lane: str, phase: str, layer: int) -> None: ...

    def span(self, lane: str, phase: str, layer: int, stream: "torch.cuda.Stream | None" = None) -> nullcontext:
        return nullcontext()

    host_span = span


class LeadIn:
    """Work queued ahead of a sample: the device is busy while the host issues what is timed, and warm.

    In a training step the host runs ahead of the device, and a loss's launches wait in the queue; from an idle device
    their issue would be measured instead, and at a clock that the power limit has not brought down yet: on an H200 it
    takes 100 ms of products to settle (docs/log.md). Nothing on a CPU, where no call returns before its work is done.
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
        """Start the work; returns at once."""
        for _ in range(self._count):
            self._product()


def settle(device: torch.device, lead: LeadIn | None = None) -> None:
    """Before a sample: wait until the device is idle, then start the lead-in, if there is one."""
    synchronize(device)
    if lead is not None:
        lead.queue()


def time_ms(function: Callable[[], object], device: torch.device, lead: LeadIn | None = None) -> float:
    """Time of one call in ms, from an idle device (or from the end of a lead-in) to an idle device."""
    settle(device, lead)
    start = _mark(device)
    function()
    end = _mark(device)
    synchronize(device)
    return _between_ms(start, end)


def phases_ms(
    loss: Callable[[], T], backward: Callable[[T], object], device: torch.device, lead: LeadIn | None = None
) -> dict[str, float]:
    """Times in ms of a loss (`forward`), of its gradients (`backward`), and of both; and what the host takes to issue
    both (`host`), which a device that has work to go on with does not wait for."""
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
    """`number` rounds in which each of `things` has one turn; orders drawn anew for each, from a fixed seed.

    A drift of the clocks then falls on all of them alike, and so does what ran before, which on an H200 seems to be
    worth up to 4 % (docs/log.md).
    """
    draw = random.Random(0)
    for _ in range(number):
        yield draw.sample(things, len(things))


def interleaved_ms(
    functions: dict[str, Callable[[], object]], device: torch.device, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time several functions in `rounds`: `repeats` samples in ms of each, after `warmup` rounds."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turns in rounds(list(functions), warmup + repeats):
        for name in turns:
            samples[name].append(time_ms(functions[name], device))
    return {name: times[warmup:] for name, times in samples.items()}


def median_ms(function: Callable[[], object], device: torch.device, repeats: int = 5, warmup: int = 2) -> float:
    """Median time of a call in ms over `repeats` samples."""
    return median(interleaved_ms({"": function}, device, repeats, warmup)[""])
