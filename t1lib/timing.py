"""Timers of a step and its phases, and spans of work on parallel lanes, such as layers' calls.

A mark is an event on a CUDA stream, not waited for until the step is over; on a CPU, it is a clock reading.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Mark = torch.cuda.Event | float


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_now(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between_ms(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        return (end - start) * 1e3
    return start.elapsed_time(end)


class PhaseTimer:
    """Times a step and its consecutive phases: `mark` ends and names a phase, without waiting. `stop` waits once, for
    the work queued on the current stream, not for slide's copies for the next step, which are on other streams."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._wall = time.perf_counter()
        self._marks: list[tuple[str, Mark]] = [("start", mark_now(self.device))]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, mark_now(self.device)))

    def stop(self) -> tuple[float, dict[str, float]]:
        """The wall time, and the time of each phase (of the same name: their sum), in ms."""
        done = mark_now(self.device)
        if isinstance(done, torch.cuda.Event):
            done.synchronize()
        wall = (time.perf_counter() - self._wall) * 1e3
        phases: dict[str, float] = {}
        for (_, start), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            phases[name] = phases.get(name, 0.0) + between_ms(start, end)
        return wall, phases


@dataclass
class Span:
    """One piece of work: `lane` (compute, in, out, update), `phase`, `layer`; start and end in ms from its zero."""

    lane: str
    phase: str
    layer: int
    start: float
    end: float


class Trace:
    """Spans of one instrumented step, on device lanes (CUDA events) and host lanes (clock), with a common zero."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._open, self._closed = device, {}, []
        synchronize(device)  # so that the event and the clock below mark the same instant
        self._clock, self._zero = time.perf_counter(), mark_now(device)

    def begin(self, lane: str, phase: str, layer: int) -> None:
        self._open[lane, phase, layer] = mark_now(self.device)

    def end(self, lane: str, phase: str, layer: int) -> None:
        start = self._open.pop((lane, phase, layer), None)
        if start is not None:
            self._closed.append((lane, phase, layer, start, mark_now(self.device)))

    @contextmanager
    def span(self, lane: str, phase: str, layer: int, host: bool = False) -> Iterator[None]:
        """A span of device work on the current stream; or of work on the `host`, in any thread."""
        device = torch.device("cpu") if host else self.device
        start = mark_now(device)
        try:
            yield
        finally:  # PyTorch's checkpointing stops a recomputation early by raising an exception
            self._closed.append((lane, phase, layer, start, mark_now(device)))

    def spans(self) -> list[Span]:
        """Synchronise and return all finished spans, ordered by start."""
        synchronize(self.device)

        def ms(mark: Mark) -> float:
            return between_ms(self._clock if isinstance(mark, float) else self._zero, mark)

        return sorted((Span(*what, ms(a), ms(b)) for *what, a, b in self._closed), key=lambda span: span.start)


class NoTrace:
    """Stands in for a `Trace` and records nothing."""

    def begin(self, lane: str, phase: str, layer: int) -> None: ...

    end = begin

    def span(self, lane: str, phase: str, layer: int, host: bool = False) -> nullcontext:
        return nullcontext()


def wrap_layers(layers: Sequence[nn.Module], trace: Callable[[], Trace | NoTrace], recompute: bool) -> None:
    """Record each call of a layer in what `trace()` then returns. recompute: in the backward, run the layers again"""
    for index, layer in enumerate(layers):
        own = getattr(layer.forward, "own", layer.forward)  # if wrapped already, for a trainer that was not closed
        traced = partial(_traced, index, own, trace)
        layer.forward = partial(checkpoint, traced, use_reentrant=False) if recompute else traced
        layer.forward.own = own


def _traced(
    index: int, forward: Callable[..., Tensor], trace: Callable[[], Trace | NoTrace], *args: Any, **kwargs: Any
) -> Tensor:
    in_backward = torch._C._current_graph_task_id() != -1
    with trace().span("compute", "recompute" if in_backward else "forward", index):
        out = forward(*args, **kwargs)
    if isinstance(trace(), Trace) and out.requires_grad and not in_backward:
        out.register_hook(partial(_begin_backward, index, trace()))
    return out


def _begin_backward(index: int, trace: Trace, _: Tensor) -> None:
    # Called when the gradient of this layer's output is ready: the layer above is done, this one begins.
    trace.end("compute", "backward", index + 1)
    trace.begin("compute", "backward", index)
