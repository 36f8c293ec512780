"""A fresh process for every variant: memory claims need one that has done nothing else. All of them live at once and
take turns, so that drift affects their times alike."""

import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import Any

from t1lib.errors import T1Error, UnavailableError, reason
from t1lib.measure.probes import progress
from t1lib.measure.records import Records
from t1lib.memory import is_out_of_memory


class VariantOutOfMemory(MemoryError):
    """The variant's process ran out of device or host memory."""


class VariantFailed(RuntimeError):
    """The variant's process failed in any other way; the message ends with the traceback, if there is one."""


def _outcome(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """(what the function returns, None), or (None, the error that the other process should raise)."""
    try:
        return function(*args, **kwargs), None
    except (T1Error, UnavailableError) as error:
        return None, error
    except BaseException as error:
        if is_out_of_memory(error):
            return None, VariantOutOfMemory(str(error))
        text = "".join(traceback.format_exception(error))
        return None, VariantFailed(f"{type(error).__name__}: {reason(error)}\n{text}")


def _serve(pipe: Connection, factory: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Body of the process: build the session, then answer calls until the other end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    session, error = _outcome(factory, **settings)
    with suppress(EOFError, ConnectionError):
        pipe.send((None, error))
        while error is None:  # else the process ends, and its memory is free
            method, kwargs = pipe.recv()
            pipe.send(_outcome(methodcaller(method, **kwargs), session))


def _end_with_parent() -> None:
    mp.parent_process().join()
    os._exit(1)  # also during a call: a parent that is killed outright cannot end this process itself


def server(*modules: str) -> mp.context.BaseContext:
    """What starts processes here. The first call begins it; it imports that call's `modules` once for all processes,
    before any device is touched, while the caller goes on. (Where a system cannot fork, each process imports.)"""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle variants must not spin on cores that others need
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its profiler warns of blocks allocated before it began
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    resource_tracker.ensure_running()  # else begun below, where it would let Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for the caller alone
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


class Isolated:
    """A session made by `factory(**settings)`, both picklable, in a process of its own, which the first error ends;
    `call` runs its methods there. wait: for the session to be built; if False, call `receive` once before `call`"""

    def __init__(self, factory: Callable[..., Any], settings: dict[str, Any], wait: bool = True) -> None:
        context = server(factory.__module__)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, factory, settings), daemon=True)
        self.process.start()
        other.close()
        if wait:
            self.receive()

    def call(self, method: str, **kwargs: Any) -> Any:
        """What the session's method returns. Raises `VariantOutOfMemory`, `VariantFailed`, or the kit's own errors."""
        self.send(method, **kwargs)
        return self.receive()

    def send(self, method: str, **kwargs: Any) -> None:
        """Have the session's method run; `receive` returns its result."""
        with suppress(ConnectionError):  # it ended during the turns of others, as `receive` will tell
            self.pipe.send((method, kwargs))

    def receive(self, end: bool = True) -> Any:
        """The next answer: None when the session is built, then a method's result. Raises as `call`; an error ends the
        process, unless `end` is False."""
        try:
            value, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(60)
            value, error = None, VariantFailed(f"the process ended with exit code {self.process.exitcode}")
            if self.process.exitcode == -getattr(signal, "SIGKILL", 9):  # as the system does when memory runs out
                error = VariantOutOfMemory("the process was killed: host memory")
        if error is None:
            return value
        if end:
            self.close()
        raise error

    def close(self) -> None:
        """End the process, whatever it is doing. When this returns, its memory is free."""
        self.pipe.close()
        self.process.kill()
        self.process.join(60)  # not for ever: to release pinned memory takes seconds, but a driver may hang


def measure_variants(
    factory: Callable[..., Any], variants: dict[str, dict[str, Any]],
    protocol: Callable[[str, Callable[..., Any]], Iterator[None]], records: Records, together: bool = True,
    phase: str = "",
) -> None:  # fmt: skip
    """Run `protocol(variant, call)` for every variant, each in a fresh process that holds `factory(**settings)`, and
    record its status: `oom`, `unavailable` if it lacks something optional, or `ok`, unless its protocol recorded one.

    The protocol is a generator that calls the session's methods, as in `call("step", n=3)`, and yields where the next
    variant may take its turn. With `together=False` the variants run one after the other, for a device that cannot hold
    all of them at once. Any other error ends all variants and is raised: `VariantFailed`, or a variant's `T1Error`."""

    def turns(name: str, settings: dict[str, Any]) -> Iterator[None]:
        state = "ok"
        with closing(Isolated(factory, settings, wait=False)) as worker:
            yield  # build all at once: each keeps mostly a single core busy
            try:
                worker.receive()
                yield
                yield from protocol(name, worker.call)
            except (VariantOutOfMemory, UnavailableError) as error:
                state = "oom" if isinstance(error, VariantOutOfMemory) else "unavailable"
        records.status(name, state, phase)

    with progress(what=f"{phase}, {len(variants)} variants") as bar, ExitStack() as stack:
        every = [stack.enter_context(closing(turns(*variant))) for variant in variants.items()]
        for running in [every] if together else [[own] for own in every]:
            while running:
                running = [own for own in running if next(own, "end") is None]
                bar.update()
