"""A race detector for the lanes of mode `slide`, on a CPU: are marks and waits alone enough to order all accesses?

On a CPU, a lane's work runs at once, in program order, so a missing wait changes no value. This module tracks the order
with vector clocks instead. Every lane and every host thread is an actor. A lane's work comes after everything that the
issuing thread knew of; a mark carries what its lane knew to whoever waits for it; what threads hand to each other
carries what they knew. Two accesses to the same bytes by different actors, at least one of them a write and neither
known to the other, are a race. PyTorch's CUDA sanitizer does something similar on a GPU, but is unaware of threads.

The buffers that live from step to step are watched: slots, host buffers, optimizer state.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from t1lib.train import inward, outer, outward, shared, streams, travel

Clock = dict[Any, int]
COMPUTE = "computing"
_active = threading.local()  # the lane whose work the thread issues; `blind`: it reads only because on a CPU


class Races:
    """The clocks of all actors, the last accesses to watched memory, and the races found."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.accesses = 0
        self._clocks: dict[Any, Clock] = {}
        self._watched: dict[int, tuple[str, bool]] = {}
        self._last: dict[int, list[tuple[Any, int, int, int, bool, str]]] = {}
        self._lock = threading.RLock()

    def watch(self, name: str, tensors: Any, on_host: bool) -> None:
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                self._watched[tensor.untyped_storage().data_ptr()] = f"{name} {number}", on_host

    def holds(self, tensor: Tensor) -> bool | None:
        """Whether the tensor lies in watched memory of the host (True) or the device (False); None: not watched."""
        return self._watched.get(_start(tensor), (None, None))[1]

    # -- clocks ----------------------------------------------------------------------------------------------------

    def snapshot(self, actor: Any) -> Clock:
        with self._lock:
            return dict(self._clocks.setdefault(actor, {}))

    def learn(self, actor: Any, known: Clock | None) -> None:
        with self._lock:
            own = self._clocks.setdefault(actor, {})
            for other, at in (known or {}).items():
                own[other] = max(own.get(other, 0), at)

    def access(self, actor: Any, tensors: list[tuple[Tensor, bool]], what: str) -> None:
        """Record a piece of an actor's work: the tensors that it touches, and whether it writes them."""
        with self._lock:
            self.learn(actor, self.snapshot(_thread()))
            clock = self._clocks[actor]
            clock[actor] = clock.get(actor, 0) + 1
            for tensor, writes in tensors:
                if _start(tensor) in self._watched and tensor.numel():
                    self._check(actor, clock, tensor, writes, what)

    def _check(self, actor: Any, clock: Clock, tensor: Tensor, writes: bool, what: str) -> None:
        self.accesses += 1
        low, high = _span(tensor)
        kept = []
        for before in self._last.setdefault(_start(tensor), []):
            other, at, start, stop, wrote, did = before
            known = clock.get(other, 0) >= at
            apart = stop <= low or high <= start
            if not (known or apart) and (wrote or writes):
                name = self._watched[_start(tensor)][0]
                self.found.append(f"{name}: {what} of {actor} beside {did} of {other}")
            if apart or not (known and writes and low <= start and stop <= high):
                kept.append(before)
        kept.append((actor, clock[actor], low, high, writes, what))
        self._last[_start(tensor)] = kept


def _thread() -> str:
    return f"thread {threading.current_thread().name}"


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes that the tensor spans in its storage."""
    low = tensor.storage_offset()
    high = low + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return low * tensor.element_size(), high * tensor.element_size()


class Watching(TorchDispatchMode):
    """Reports every operation of this thread as work of the active lane, the compute lane, or the thread itself."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        touched = list(_touched(func, args, kwargs or {}))
        held = [self._races.holds(tensor) for tensor, _ in touched]
        actor = getattr(_active, "lane", None)
        if actor is None:
            here = threading.current_thread() is threading.main_thread() and not any(held)
            actor = COMPUTE if here or False in held else _thread()
        waits = func is torch.ops.aten._local_scalar_dense.default and actor == COMPUTE
        if waits and not getattr(_active, "blind", False):
            self._races.learn(_thread(), self._races.snapshot(COMPUTE))
        self._races.access(actor, touched, str(func))
        return func(*args, **(kwargs or {}))


def _touched(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Tensor, bool]]:
    """Tensors that an operation reads, or writes (True). One that only creates a view does neither."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                yield tensor, alias is not None


class CheckedMark:
    def __init__(self, races: Races, actor: str) -> None:
        self._races, self.known = races, races.snapshot(actor)

    def synchronize(self) -> None:
        self._races.learn(_thread(), self.known)

    def query(self) -> bool:
        self.synchronize()
        return True


def checked_lane(races: Races) -> type:
    """A class that replaces `Lane`."""
    names = iter(f"lane {number}" for number in range(100))

    class CheckedLane:
        def __init__(self, device: torch.device, own_stream: bool, urgent: bool = False) -> None:
            self.name, self.stream = next(names) if own_stream else COMPUTE, None

        @contextmanager
        def active(self) -> Iterator[None]:
            before, _active.lane = getattr(_active, "lane", None), self.name
            try:
                yield
            finally:
                _active.lane = before

        def mark(self) -> CheckedMark:
            races.learn(self.name, races.snapshot(_thread()))
            return CheckedMark(races, self.name)

        def after(self, mark: CheckedMark | None) -> None:
            races.learn(self.name, races.snapshot(_thread()))
            races.learn(self.name, mark.known if mark is not None else None)

        def uses(self, tensor: Tensor) -> Tensor:
            return tensor

    return CheckedLane


def _carried(races: Races, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call for another thread: that thread then knows what this one knows now, and is watched during it."""
    known = races.snapshot(_thread())

    @wraps(call)
    def there(*arguments: Any) -> Any:
        races.learn(_thread(), known)
        with Watching(races):
            return call(*arguments)

    return there


@contextmanager
def lanes_made_by(lane: Callable[..., Any]) -> Iterator[None]:
    """Trainers created in this context have lanes made by `lane`."""
    with ExitStack() as stack:
        for module in (inward, outward, travel):
            stack.enter_context(patch.object(module, "Lane", lane))
        yield


@contextmanager
def watched(races: Races) -> Iterator[None]:
    """Trainers created and run in this context are watched."""

    class CheckedEvent(threading.Event):
        known: Clock | None = None

        def set(self) -> None:
            self.known = (self.known or {}) | races.snapshot(_thread())
            super().set()

        def wait(self, timeout: float | None = None) -> bool:
            done = super().wait(timeout)
            races.learn(_thread(), self.known)
            return done

    submit, then, give, take = (
        streams.UpdateWorker.submit, streams.UpdateWorker.then, streams.HostPool.give, streams.HostPool.take,
    )  # fmt: skip
    landing, landed, update = shared.Landings.then, shared.Landings.landed, travel.Travel.update
    given: dict[tuple[int, int], Clock] = {}

    def checked_submit(self: Any, layer: int, update: Callable) -> None:
        submit(self, layer, _carried(races, update))

    def checked_then(self: Any, layer: int, action: Callable, given_up: Any) -> None:
        pending = self._pending.get(layer)
        if pending is not None and pending.done.is_set():
            races.learn(_thread(), pending.done.known)
        then(self, layer, _carried(races, action), given_up)

    def checked_landed(self: Any, layer: int, mark: CheckedMark | None = None) -> None:
        given[id(self), layer] = races.snapshot(_thread())
        landed(self, layer, mark)

    def checked_landing(self: Any, layer: int, action: Callable, given_up: Any) -> None:
        def landed_first() -> None:
            races.learn(_thread(), given.get((id(self), layer)))
            action()

        landing(self, layer, _carried(races, landed_first), given_up)

    def blind_update(self: Any, *arguments: Any) -> Any:
        """Only on a CPU does the update read whether gradients are lost."""
        _active.blind = True
        try:
            return update(self, *arguments)
        finally:
            _active.blind = False

    def checked_give(self: Any, index: int) -> None:
        given[id(self), index] = races.snapshot(_thread())
        give(self, index)

    def checked_take(self: Any) -> int:
        index = take(self)
        races.learn(_thread(), given.get((id(self), index)))
        return index

    lane = checked_lane(races)
    own = SimpleNamespace(Event=CheckedEvent, Lock=threading.Lock, Thread=threading.Thread)
    with ExitStack() as stack:
        stack.enter_context(lanes_made_by(lane))
        for module in (streams, inward, outer):
            stack.enter_context(patch.object(module, "threading", own))
        stack.enter_context(patch.object(shared.Landings, "then", checked_landing))
        stack.enter_context(patch.object(shared.Landings, "landed", checked_landed))
        stack.enter_context(patch.object(travel.Travel, "update", blind_update))
        stack.enter_context(patch.object(streams.UpdateWorker, "submit", checked_submit))
        stack.enter_context(patch.object(streams.UpdateWorker, "then", checked_then))
        stack.enter_context(patch.object(streams.HostPool, "give", checked_give))
        stack.enter_context(patch.object(streams.HostPool, "take", checked_take))
        yield
