"""The mechanisms beneath mode `slide`: layers in flat host buffers, device slots, copy lanes, and the update worker."""

import atexit
import copy
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from t1lib.errors import T1Error
from t1lib.measure.memory import pinned_zeros

Mark = torch.cuda.Event | None  # a point in a lane's work; None: there is nothing to wait for
SPARE = 2  # cores that updates leave to the threads that launch kernels, if there are many cores
ALIGN = 128  # elements; each parameter begins at a multiple of this in a flat buffer, which suits the device's loads


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A copy to a GPU starts from pinned memory, so that the host does not wait for it."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def way_in(device: torch.device) -> Callable[[], object]:
    """A function by which a new thread makes `device` its current one. It would otherwise start with the first device,
    whichever one its process uses."""
    if device.type != "cuda":
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device() if device.index is None else device.index)


class Layout:
    """Where each parameter of a layer lies in one flat buffer. The layers, by index, must be alike in names, shapes and
    dtype: raises `T1Error` if they are not.

    trained_only   include only parameters that require a gradient
    parts          number of parts of equal length into which the buffer can be cut

    Without layers the buffer is empty.
    """

    def __init__(self, layers: Mapping[int, nn.Module], trained_only: bool = False, parts: int = 1) -> None:
        def params(layer: nn.Module) -> dict[str, nn.Parameter]:
            return {n: p for n, p in layer.named_parameters() if p.requires_grad or not trained_only}

        number, first = next(((i, params(layer)) for i, layer in layers.items()), (0, {}))
        self.shapes = {n: p.shape for n, p in first.items()}
        self.dtype = next((p.dtype for p in first.values()), torch.float32)
        for index, layer in layers.items():
            found = {n: p.shape for n, p in params(layer).items()}
            odd = [n for n in {**self.shapes, **found} if found.get(n) != self.shapes.get(n)]
            odd += [n for n, p in params(layer).items() if p.dtype != self.dtype]
            if odd:
                what = " in what is trained," if trained_only else ""
                differs = f"layer {index} differs from layer {number}{what} at {odd[0]!r}"
                raise T1Error(f"{differs}: slide streams layers that are alike")
        self.offsets, self.numel = {}, 0
        for name, shape in self.shapes.items():
            self.offsets[name] = self.numel
            self.numel += -(-shape.numel() // ALIGN) * ALIGN
        self.numel = -(-self.numel // (parts * ALIGN)) * parts * ALIGN

    def part(self, span: slice) -> "Layout":
        """The layout of a part of the buffer: the elements in that part of each parameter that has any, flattened."""
        found = copy.copy(self)
        found.shapes, found.offsets, found.numel = {}, {}, span.stop - span.start
        for name in self.shapes:
            inside = self.inside(name, span)
            if inside.start < inside.stop:
                found.shapes[name] = torch.Size([inside.stop - inside.start])
                found.offsets[name] = self.offsets[name] + inside.start - span.start
        return found

    def inside(self, name: str, span: slice) -> slice:
        """The range of a parameter's elements that lies in a part of the buffer."""
        offset, numel = self.offsets[name], self.shapes[name].numel()
        return slice(*(min(max(end - offset, 0), numel) for end in (span.start, span.stop)))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views into a flat buffer of `numel` elements."""
        return {n: flat[self.offsets[n] : self.offsets[n] + s.numel()].view(s) for n, s in self.shapes.items()}


class Lane:
    """An ordered queue of device work: a CUDA stream of its own, or the current one; on a CPU, work is done at once.

    Marks (CUDA events) order lanes among each other: `after(mark)` holds a lane back until the mark's lane has reached
    it, without making the host wait. Work of an `urgent` lane goes first wherever the device has a choice.
    """

    def __init__(self, device: torch.device, own_stream: bool, urgent: bool = False) -> None:
        self.cuda, self._device = device.type == "cuda", device
        self.own = torch.cuda.Stream(device, priority=-urgent) if self.cuda and own_stream else None

    @property
    def stream(self) -> "torch.cuda.Stream | None":
        if not self.cuda:
            return None
        return self.own or torch.cuda.current_stream(self._device)

    def active(self) -> AbstractContextManager:
        return torch.cuda.stream(self.own) if self.own is not None else nullcontext()

    def mark(self) -> Mark:
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def after(self, mark: Mark) -> None:
        if mark is not None:
            self.stream.wait_event(mark)

    def uses(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory is not reused before the lane reaches this point, even if it is freed earlier."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)
        return tensor


class Slots:
    """`count` flat device buffers that hold one layer each, used in turn: layer i goes to slot i mod count."""

    def __init__(self, count: int, layout: Layout, device: torch.device) -> None:
        self.flat = [torch.zeros(layout.numel, dtype=layout.dtype, device=device) for _ in range(count)]
        self.views = [layout.views(flat) for flat in self.flat]
        self.holds: list[int | None] = [None] * count  # index of the layer in each slot
        self.filled: list[Mark] = [None] * count  # marks when the content is complete
        self.freed: list[Mark] = [None] * count  # marks when the content is no longer needed

    def of(self, layer: int) -> int:
        return layer % len(self.flat)


class HostPool:
    """A few pinned host buffers for gradients on their way to the update; `take` waits until one is free."""

    def __init__(self, count: int, layout: Layout, device: torch.device) -> None:
        self.buffers = [pinned_zeros(layout.numel, layout.dtype, device) for _ in range(count)]
        self.views = [layout.views(flat) for flat in self.buffers]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(count):
            self._free.put(index)

    def take(self) -> int:
        return self._free.get()

    def give(self, index: int) -> None:
        self._free.put(index)


class UpdateWorker:
    """Runs one update per layer on a thread of its own; among waiting updates, the lowest layer goes first.

    The next forward needs layer 0 first, although its gradients come last: updates are needed in the order of the
    layers. `then` adds an action that follows an update. An error in an update is raised by `wait`, `then` or `check`.
    """

    def __init__(self, device: torch.device) -> None:
        self._enter = way_in(device)
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None, _Pending | None]]
        self._queue = queue.PriorityQueue()
        self._count = itertools.count()  # of two updates of one layer, the earlier goes first
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="t1-update", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # the interpreter would abort if it ended during an update

    def submit(self, layer: int, update: Callable[[], None]) -> None:
        pending = self._pending[layer] = _Pending()
        self._queue.put((layer, next(self._count), update, pending))

    def then(self, layer: int, action: Callable[[], None], given_up: threading.Event) -> None:
        """Run `action` once the layer's update is done: immediately, or later on the worker's thread. After an error,
        `given_up` is set instead."""
        pending = self._pending.get(layer)
        with self._lock:
            later = pending is not None and not pending.done.is_set()
            if later:
                pending.actions.append((action, given_up))
        if not later:
            self.check()
            action()

    def wait(self, layer: int) -> None:
        """Wait until the layer's update, if one was submitted, is done."""
        pending = self._pending.pop(layer, None)
        if pending is not None:
            pending.done.wait()
        self.check()

    def check(self) -> None:
        """Raise the error of an update, if one failed."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        for layer in list(self._pending):
            self.wait(layer)

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        atexit.unregister(self.close)
        self._queue.put((sys.maxsize, next(self._count), None, None))  # after all layers
        self._thread.join()

    def _run(self) -> None:
        self._enter()
        cores = torch.get_num_threads()
        if cores >= 4 * SPARE:
            torch.set_num_threads(cores - SPARE)  # for this thread's loops
        while True:
            _, _, update, pending = self._queue.get()
            if update is None:
                return
            self._try(update)
            with self._lock:
                pending.done.set()
            for action, given_up in pending.actions:
                self._try(action)
                given_up.set()
            del update, pending  # they keep the trainer alive, and the next one may take long to come

    def _try(self, action: Callable[[], None]) -> None:
        try:
            if self._error is None:
                action()
        except BaseException as error:  # raised later in the waiting thread
            self._error = error


class _Pending:
    """A submitted update, and the actions that follow it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.actions: list[tuple[Callable[[], None], threading.Event]] = []
