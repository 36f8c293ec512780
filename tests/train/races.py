"""A race detector for streaming, on a CPU: are marks and waits alone enough to order all accesses?

On a CPU, a lane's work is done at once, in program order, so a missing wait changes no value. Vector clocks follow the
order instead. Lanes and threads are actors. A lane's work comes after all that the thread that queues it knows of; a
mark carries what its lane knew to whoever waits for it, and a job what the thread that submits it knows to the update
thread, and back to whoever waits for the job. Two accesses to the same bytes by different actors, of which at least one
writes, are a race if the later actor does not know of the earlier access. Watched is what lives from step to step, in
the host's memory and in what would be the device's; not memory that is freed and used again, nor CUDA graphs.
"""

import threading
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from t1lib.train import activations, layers, outer, schedule
from t1lib.train.engine import Engine
from t1lib.train.lanes import Lane, UpdateThread
from t1lib.train.layers import Gradients
from t1lib.train.outer import OuterParam
from t1lib.train.schedule import Schedule

Clock = dict[str, int]
COMPUTE = "the compute lane"
COPY, TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
VALUELESS = ("aten.detach", "aten.empty", "aten.new_", "aten._has_compatible_shallow_copy_type")  # these read no values


class Access(NamedTuple):
    actor: str
    at: int  # by the actor's own clock
    start: int  # the first byte's address
    stop: int
    writes: bool
    what: str


class Races:
    """The clocks of all actors, their accesses to watched memory, and the races found."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.lane = threading.local()  # `name`: of the lane whose work the thread queues
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._memory: list[tuple[int, int, str]] = []  # first address, end, whose it is
        self._kept: list[Tensor] = []  # so that watched memory is not used for anything else
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by memory: those that still matter
        self._lock = threading.RLock()

    def watch(self, tensor: Tensor, whose: str) -> None:
        with self._lock:
            self._kept.append(tensor)
            insort(self._memory, (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, whose))

    def memory(self, address: int) -> tuple[int, int, str] | None:
        number = bisect_right(self._memory, address, key=lambda memory: memory[0]) - 1
        return self._memory[number] if number >= 0 and address < self._memory[number][1] else None

    def knows(self, actor: str) -> Clock:
        with self._lock:
            return dict(self._clocks[actor])

    def learn(self, actor: str, known: Clock) -> None:
        with self._lock:
            own = self._clocks[actor]
            own.update({other: max(own.get(other, 0), at) for other, at in known.items()})

    def work(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operation, of the lane that is active, or by where the tensors lie of the compute lane or the thread."""
        touched = [(tensor, writes) for tensor, writes in _touched(func, args, kwargs) if tensor.numel()]
        whose = {memory[2] for tensor, _ in touched if (memory := self.memory(tensor.data_ptr()))}
        queued = func in (COPY, TO_COPY) and (kwargs.get("non_blocking") or args[2:] == (True,))
        on_device = queued or "the device" in whose
        actor = getattr(self.lane, "name", None) or (COMPUTE if on_device else thread())
        with self._lock:
            self.learn(actor, self._clocks[thread()])
            clock = self._clocks[actor]
            clock[actor] = clock.get(actor, 0) + 1
            for tensor, writes in touched:
                start, last = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
                stop = start + (1 + sum((size - 1) * stride for size, stride in last)) * tensor.itemsize
                self._check(Access(actor, clock[actor], start, stop, writes, str(func)), clock)
        if func is COPY and not queued and len(whose) == 2:  # a copy between both waits for the device
            self.learn(thread(), self.knows(actor))

    def _check(self, now: Access, clock: Clock) -> None:
        memory = self.memory(now.start)
        if memory is None:
            return
        still = []
        for before in self._accesses[memory[0]]:
            known = clock.get(before.actor, 0) >= before.at
            apart = before.stop <= now.start or now.stop <= before.start
            if not (known or apart) and (before.writes or now.writes):
                self.found.append(f"{now.what} of {now.actor} beside {before.what} of {before.actor}, in {memory[2]}")
            if apart or not (known and now.writes and now.start <= before.start and before.stop <= now.stop):
                still.append(before)
        self._accesses[memory[0]] = [*still, now]


def thread() -> str:
    return threading.current_thread().name


def _touched(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Tensors that an operation reads, or writes (True). One that only makes a view does neither."""
    for index, argument in enumerate(() if str(func).startswith(VALUELESS) else func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is None or alias.is_write:
            tensors = value if isinstance(value, list | tuple) else [value]
            yield from ((tensor, alias is not None) for tensor in tensors if isinstance(tensor, Tensor))


class Watching(TorchDispatchMode):
    """Reports every operation of a thread."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._races.work(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Mark:
    def __init__(self, races: Races, lane: str) -> None:
        self._races, self.known = races, races.knows(lane)

    def synchronize(self) -> None:
        self._races.learn(thread(), self.known)

    def query(self) -> bool:
        self.synchronize()
        return True


class Stream:
    def __init__(self, races: Races, name: str) -> None:
        self.races, self.name = races, name

    def wait_event(self, mark: Mark) -> None:
        self.races.learn(self.name, mark.known)


def lane_of(races: Races) -> dict[str, Any]:
    """What replaces methods of `Lane`."""
    numbers = count()

    def __init__(self: Lane, device: torch.device, own_stream: bool, urgent: bool = False) -> None:
        self.own = Stream(races, f"lane {next(numbers)}" if own_stream else COMPUTE)

    @contextmanager
    def active(self: Lane) -> Iterator[None]:
        before, races.lane.name = getattr(races.lane, "name", None), self.own.name
        try:
            yield
        finally:
            races.lane.name = before

    def mark(self: Lane) -> Mark:
        races.learn(self.own.name, races.knows(thread()))
        return Mark(races, self.own.name)

    return {"__init__": __init__, "active": active, "mark": mark}


def thread_of(races: Races) -> dict[str, Any]:
    """What replaces methods of `UpdateThread`: jobs know what was known where they were submitted, and whoever waits
    for one learns what it knew in the end."""
    submit, then, wait, ended = UpdateThread.submit, UpdateThread.then, UpdateThread.wait, {}

    def submitted(self: UpdateThread, number: int, job: Callable[[], None], *marks: Mark) -> None:
        known = races.knows(thread())

        def there() -> None:
            races.learn(thread(), known)
            with Watching(races):
                job()
            ended[number] = races.knows(thread())

        submit(self, number, there, *marks)

    def waited(self: UpdateThread, number: int) -> None:
        wait(self, number)
        races.learn(thread(), ended.get(number, {}))

    def followed(self: UpdateThread, number: int, job: Callable[[], None]) -> None:
        def after() -> None:
            races.learn(thread(), ended.get(number, {}))
            job()

        then(self, number, after)

    return {"submit": submitted, "wait": waited, "then": followed}


@contextmanager
def watched(races: Races) -> Iterator[None]:
    """Look for races in what a model does that is streamed in this context."""

    def with_each(owner: Any, name: str, do: Callable[..., None]) -> Any:
        """Let `do` run after a function, with its result and its arguments."""
        function = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            do(found, *args)
            return found

        return patch.object(owner, name, both)

    def made(_: None, engine: Engine, *given: Any) -> None:
        travelling = () if engine.outer is None else engine.outer.held
        for tensor in (*engine.schedule.device_tensors(), *(held.param.data for held in travelling)):
            races.watch(tensor, "the device")

    def kept(_: None, own: Schedule, layer: layers.HostLayer) -> None:
        if layer.grads.waiting is not None:
            races.watch(layer.grads.waiting, "the device")

    def has_waited(*given: Any) -> None:  # it copies from the device to ordinary memory
        races.learn(thread(), races.knows(COMPUTE))

    with ExitStack() as stack:
        for owner, methods in ((Lane, lane_of(races)), (UpdateThread, thread_of(races))):
            for name, method in methods.items():
                stack.enter_context(patch.object(owner, name, method))
        for module in (activations, layers, outer, schedule):
            stack.enter_context(with_each(module, "pinned_zeros", lambda found, *given: races.watch(found, "the host")))
        stack.enter_context(with_each(Engine, "_make_runners", made))
        stack.enter_context(with_each(Schedule, "_keep_gradients", kept))
        stack.enter_context(with_each(Gradients, "update_seen", has_waited))
        stack.enter_context(patch.object(OuterParam, "release", lambda held: None))  # memory stays where it is
        stack.enter_context(Watching(races))
        yield
