"""What streaming runs on: ordered queues of device work, marks between them, and the thread that updates layers."""

import atexit
import itertools
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

import torch
from torch import Tensor

Mark = torch.cuda.Event | None  # a point in a lane's work; None: there is nothing to wait for
SPARE = 2  # cores that updates leave to the threads that launch kernels, if there are many cores


class NoTrace:
    """Stands in for a `t1lib.measure.timing.Trace`, and records nothing."""

    def span(self, lane: str, phase: str, layer: int, stream: "torch.cuda.Stream | None" = None) -> nullcontext:
        return nullcontext()

    host_span = span

    def begin(self, lane: str, phase: str, layer: int) -> None: ...

    def end(self, lane: str, phase: str, layer: int) -> None: ...


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

    def after(self, *marks: Mark) -> None:
        for mark in marks:
            if mark is not None:
                self.stream.wait_event(mark)

    def uses(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory is not reused before the lane reaches this point, even if it is freed earlier."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)
        return tensor


def wait_for(mark: Mark) -> None:
    """Make the host wait for a mark."""
    if mark is not None:
        mark.synchronize()


class _Job:
    """An update that was submitted, and what follows it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.actions: list[Callable[[], None]] = []


class UpdateThread:
    """Runs jobs on a thread of its own; of those waiting, the one with the lowest number goes first.

    The next forward needs layer 0 first, although its gradients come last. An error in a job is raised by `wait`,
    `then` or `check`. The thread starts with the first job.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._count = itertools.count()  # of two jobs of one number, the earlier goes first
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, number: int, update: Callable[[], None]) -> None:
        self.check()
        if self._thread is None:
            # It knows the queue, not the engine: an engine that nobody holds any more can be freed.
            self._thread = threading.Thread(target=self._run, name="t1-update", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # the interpreter would abort if it ended during an update
        job = self._jobs[number] = _Job()
        self._queue.put((number, next(self._count), update, job))

    def then(self, number: int, action: Callable[[], None]) -> None:
        """Run `action` once the job of this number is done: now, or later on the thread; never after an error."""
        job = self._jobs.get(number)
        with self._lock:
            later = job is not None and not job.done.is_set()
            if later:
                job.actions.append(action)
        if not later:
            self.check()
            action()

    def wait(self, number: int) -> None:
        """Wait until the job of this number, if there is one, is done."""
        job = self._jobs.get(number)
        if job is not None:
            job.done.wait()
            self._jobs.pop(number, None)
        self.check()

    def check(self) -> None:
        """Raise the error of a job, if one failed."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        for number in list(self._jobs):
            self.wait(number)

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._queue.put((sys.maxsize, next(self._count), None, None))  # after all layers
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        if self._device.type == "cuda":  # a new thread would start with the first device
            torch.cuda.set_device(self._device)
        cores = torch.get_num_threads()
        if cores >= 4 * SPARE:
            torch.set_num_threads(cores - SPARE)  # for this thread's loops
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one job. Nothing of it is held while the thread waits for the next: that would keep the engine alive."""
        _, _, update, job = self._queue.get()
        if update is None:
            return False
        self._try(update)
        with self._lock:
            job.done.set()
            actions, job.actions = job.actions, []
        for action in actions:
            self._try(action)
        return True

    def _try(self, action: Callable[[], None]) -> None:
        try:
            if self._error is None:
                action()
        except BaseException as error:  # raised later in the waiting thread
            self._error = error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C and SIGTERM off until the end: what is queued in here is queued as a whole, or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda *which: asked.append(which))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in asked[:1]:
            before[number](number, frame)
