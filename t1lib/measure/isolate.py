"""A fresh process for every variant, with all of them measured in turn.

Memory claims need a process that has done nothing else; times need the variants interleaved, so that drift affects
all alike. `measure_variants` provides both: one process per variant, all alive, taking turns.
"""

import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import torch

from t1lib.errors import T1Error, UnavailableError
from t1lib.measure.progress import progress
from t1lib.measure.records import Records

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""By which the host's allocator, CUDA's runtime, Triton and cuBLAS say so, in errors of no type of its own."""


class VariantOutOfMemory(MemoryError):
    """The variant's process ran out of device or host memory."""


class VariantFailed(RuntimeError):
    """The variant's process failed in any other way; the message holds the traceback, if there is one."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that device or host memory ran out."""
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def told(error: BaseException) -> tuple[str, str]:
    """An exception as (kind, text) to send to another process, where `raised` rebuilds it."""
    known = {T1Error: "bad", UnavailableError: "unavailable"}.get(type(error), "error")
    kind = "oom" if is_out_of_memory(error) else known
    return kind, "".join(traceback.format_exception(error)) if kind == "error" else str(error)


def raised(kind: str, text: str) -> Exception:
    """The exception that `told` encoded; errors other than its known kinds become `VariantFailed`."""
    kinds = {"oom": VariantOutOfMemory, "unavailable": UnavailableError, "bad": T1Error, "error": VariantFailed}
    return kinds[kind](text)


def _serve(pipe: Connection, factory: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Main loop of the process: build the session, then answer calls until the other end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    session = None
    try:
        session = factory(**settings)
        pipe.send(("ok", None))
        while True:
            method, kwargs = pipe.recv()
            pipe.send(("ok", getattr(session, method)(**kwargs)))
    except (EOFError, ConnectionError):  # closed, perhaps during a call
        return
    except BaseException as error:
        pipe.send(told(error))


class Isolated:
    """`factory(**settings)` in a process of its own; `call` runs its methods there. Both must be picklable.

    wait   block until the session is built; otherwise call `ready` to do so
    """

    def __init__(self, factory: Callable[..., Any], settings: dict[str, Any], wait: bool = True) -> None:
        # Idle variants must not spin on cores that the running one needs; OpenMP reads this when it loads.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # On a CPU PyTorch's profiler warns about blocks allocated before it began; torch reads this when it loads.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        context = mp.get_context(method)
        if method == "forkserver":  # imports are done once, before any device is touched
            context.set_forkserver_preload([__name__, factory.__module__])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, factory, settings), daemon=True)
        self._process.start()
        other.close()
        if wait:
            self.ready()

    def ready(self) -> None:
        """Block until the session is built. Raises what `call` raises."""
        self._receive()

    def call(self, method: str, **kwargs: Any) -> Any:
        """Run the session's method and return its result. Raises `VariantOutOfMemory`, `VariantFailed`,
        `T1Error` or `UnavailableError`."""
        return self._receive((method, kwargs))

    def _receive(self, *requests: tuple[str, dict[str, Any]]) -> Any:
        try:
            for request in requests:
                self._pipe.send(request)
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):  # broken pipe: the process ended, perhaps during the turns of others
            self._process.join(10)
            code = self._process.exitcode
            if code == -getattr(signal, "SIGKILL", 9):  # as the system does when memory runs out
                raise VariantOutOfMemory("the process was killed: host memory") from None
            raise VariantFailed(f"the process ended with exit code {code}") from None
        if kind != "ok":
            raise raised(kind, value)
        return value

    def close(self, patience: float = 10.0) -> None:
        """End the process, which has this many seconds to finish what it is doing."""
        self._pipe.close()
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()


Protocol = Callable[[str, Callable[..., Any]], Generator[None, None, None]]


def measure_variants(
    factory: Callable[..., Any],
    variants: dict[str, dict[str, Any]],
    protocol: Protocol,
    records: Records,
    together: bool = True,
    phase: str = "",
) -> None:
    """Run `protocol(variant, call)` for every variant, each in a fresh process that holds `factory(**settings)`.

    The protocol is a generator that calls the session's methods, as in `call("step", n=3)`, and yields where the next
    variant may take its turn. With `together=False` the variants run one after the other, for a device that cannot hold
    all of them at once. A variant that runs out of memory gets a row with status `oom`, one that lacks something
    optional a row with status `unavailable`, and the others continue; one that finishes gets status `ok`, unless its
    protocol recorded another.
    """
    waiting = list(variants.items())
    if not together:
        for name, settings in waiting:
            measure_variants(factory, {name: settings}, protocol, records, phase=phase)
        return
    running: dict[str, tuple[Isolated, Generator[None, None, None]]] = {}
    bar = progress(what=f"{phase}, {len(variants)} variants")

    def turn(name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except VariantOutOfMemory:
            records.status(name, "oom", phase=phase)
        except UnavailableError:
            records.status(name, "unavailable", phase=phase)
        except StopIteration:
            if not any((r["variant"], r["phase"], r["metric"]) == (name, phase, "status") for r in records.own):
                records.status(name, "ok", phase=phase)
        if name in running:
            running.pop(name)[0].close()
        return None

    try:
        for name, settings in waiting:  # all at once: building a model and its state mostly keeps a single core busy
            worker = Isolated(factory, settings, wait=False)
            running[name] = worker, protocol(name, worker.call)
        for name in list(running):
            turn(name, running[name][0].ready)
        while running:
            for name in list(running):
                turn(name, lambda name=name: next(running[name][1]))
                bar.update()
    finally:  # there are some left if this was interrupted, or one has failed
        bar.close()
        for worker, _ in running.values():
            worker.close(patience=0.0)
