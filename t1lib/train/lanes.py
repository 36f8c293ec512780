"""What streaming runs on: ordered queues of device work, marks between them, and the thread that updates layers."""

import signal
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mark = torch.cuda.Event | None  # a point in a lane's work; None: there is nothing to wait for
SPARE = 2  # cores that updates leave to the threads that launch kernels, if there are many cores
# Those whose handlers may raise in the middle of anything: Ctrl-C, schedulers', alarms, and PyTorch's for its workers.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGCHLD", "SIGUSR1", "SIGUSR2")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
_within = False  # whether the main thread is in `uninterrupted`
_asked: dict[int, tuple[Callable[..., Any], FrameType | None]] = {}  # what is to be called for signals that came there


class Lane:
    """An ordered queue of device work: a CUDA stream of its own, or the current one; on a CPU, work is done at once.
    `after(mark)` holds a lane back until the mark's lane has reached it, without making the host wait. Work of an
    `urgent` lane goes first wherever the device has a choice."""

    def __init__(self, device: torch.device, own_stream: bool, urgent: bool = False) -> None:
        self.cuda, self._device = device.type == "cuda", device
        self.own = torch.cuda.Stream(device, priority=-urgent) if self.cuda and own_stream else None

    @property
    def stream(self) -> "torch.cuda.Stream":
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

    def copy(self, to: Tensor, source: Tensor, span: AbstractContextManager, *marks: Mark) -> Mark:
        """Queue a copy that waits for the marks, within a trace's span; returns the mark at which it is done."""
        self.after(*marks)
        with self.active(), span:
            to.copy_(source, non_blocking=True)
        return self.mark()

    def uses(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory is not reused before the lane reaches this point, even if it is freed earlier."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)
        return tensor


def reached(mark: Mark) -> bool:
    """Whether a wait for the mark would return at once. Also True after a device error, which that wait then raises."""
    with suppress(RuntimeError):
        return mark is None or mark.query()
    return True


def wait_for(mark: Mark) -> None:
    if mark is not None:
        mark.synchronize()


class Job(NamedTuple):
    call: Callable[[], None]
    marks: tuple[Mark, ...]  # it begins once the device has reached them
    done: Future


class UpdateThread:
    """Runs jobs on a thread of its own. Of those whose marks the device has reached, the lowest number goes first: the
    next forward needs layer 0 first, although its gradients come last. After an error no job runs, and `wait` and
    `check` raise it."""

    def __init__(self, device: torch.device) -> None:
        # The thread starts with the first job, refers to no engine between jobs, and ends before the interpreter does.
        self._pool = ThreadPoolExecutor(1, "t1-update", partial(_prepare, device))
        self._waiting: dict[int, deque[Job]] = defaultdict(deque)
        self._last: dict[int, Future] = {}  # of each number's last job
        self.error: BaseException | None = None
        self._lock = threading.Lock()  # for `_waiting`
        self._own, self._device = 0, device  # `_own`: the thread's identifier, from its first job on

    def submit(self, number: int, job: Callable[[], None], *marks: Mark) -> None:
        """Run `job` on the thread once the device has reached the marks, after the earlier ones of this number."""
        with self._lock:
            self._pool.submit(self._run_next)  # first: it raises if the thread or the interpreter is shutting down
            done = self._last[number] = Future()
            self._waiting[number].append(Job(job, marks, done))

    def then(self, number: int, job: Callable[[], None]) -> None:
        """Run `job` once the jobs with this number are done: right here if they are, else later on the thread."""
        self.check()
        if number in self._last and not self._last[number].done():
            self.submit(number, job)
        else:
            job()

    def wait(self, number: int) -> None:
        if number in self._last:
            self._last[number].result()
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread after its jobs; wait for it (unless it calls, as it may drop an engine) and for the device."""
        self._pool.shutdown(wait=threading.get_ident() != self._own)
        self.error = None  # its traceback holds this thread, and with it what the job used, in a cycle
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _run_next(self) -> None:
        self._own = threading.get_ident()
        call, marks, done = self._take()
        try:
            self.check()
            for mark in marks:
                wait_for(mark)
            call()
        except BaseException as error:
            self.error = error
        del call  # before anybody learns that it is done, and counts what memory is held
        done.set_result(None)

    def _take(self) -> Job:
        """The job whose turn it is. If none can begin, the highest number's: its gradients come first."""
        with self._lock:
            found = [number for number, jobs in self._waiting.items() if jobs]
            ready = (number for number in sorted(found) if all(map(reached, self._waiting[number][0].marks)))
            return self._waiting[next(ready, max(found))].popleft()


def _prepare(device: torch.device) -> None:
    """Call on the thread that updates."""
    if device.type == "cuda":  # a new thread would start with the first device
        torch.cuda.set_device(device)
    cores = torch.get_num_threads()
    if cores >= 4 * SPARE:
        torch.set_num_threads(cores - SPARE)  # for this thread's loops


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put signals that Python handles, such as Ctrl-C, off until the end: what is done in here is done as a whole."""
    global _within
    if _within or threading.current_thread() is not threading.main_thread():
        yield
        return
    put: dict[int, _Later] = {}
    try:
        _within = True
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                put[number] = handler if isinstance(handler, _Later) else _Later(handler)
                signal.signal(number, put[number])
        yield
    finally:
        # A handler may raise from here on. Others' stand-ins are then left, and pass on what comes, until the end of
        # the next such context.
        _within = False
        try:
            for number, later in put.items():
                if signal.getsignal(number) is later:
                    signal.signal(number, later.handler)
        finally:
            _hear()


class _Later:
    """Stands in for a signal's handler."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _within:
            _asked[number] = self.handler, frame
        else:
            self.handler(number, frame)


def _hear() -> None:
    """Call the handlers of the signals that came, all of them, though some may raise."""
    if _asked:
        number, (handler, frame) = _asked.popitem()
        try:
            handler(number, frame)
        finally:
            _hear()
