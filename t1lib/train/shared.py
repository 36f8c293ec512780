"""Host memory shared by the processes of one host, and how each process learns what the others have updated in it.

The memory has no name and no file: it is freed when the last process that maps it ends, even by a crash.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from t1lib.errors import T1Error
from t1lib.measure.memory import pin, pinned_zeros
from t1lib.train.ranks import Ranks
from t1lib.train.streams import Mark, way_in

TICK = 1e-4  # seconds between polls of other processes and of CUDA events


class HostMemory:
    """Allocates memory for the state of a model: private to this process, or shared by all `ranks` of this host."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of zeros that `device` can copy from and to, see `pinned_zeros`. All ranks must call this, and
        all get the same memory.

        Raises `T1Error`, on all ranks, if they cannot share memory.
        """
        if self.ranks.alone:
            return pinned_zeros(numel, dtype, device)
        held: list[int] = []
        try:
            path = self.ranks.first(partial(_new_memory, max(numel, 1) * dtype.itemsize, held))
            found: list[Tensor] = []
            self.ranks.share(lambda: found.append(_map(path, max(numel, 1), dtype)))
        finally:
            for descriptor in held:
                os.close(descriptor)
        return pin(found[0], device)[:numel]


def _new_memory(nbytes: int, held: list[int]) -> str:
    """Create shared memory; return a path by which other processes map it while the descriptor in `held` is open."""
    if not hasattr(os, "memfd_create"):
        raise T1Error("several processes share the host's state on Linux alone; start one")
    held.append(os.memfd_create("t1"))
    try:
        os.ftruncate(held[0], nbytes)
    except OSError as error:
        raise T1Error(f"no {nbytes} bytes of memory to share: {error.strerror}") from error
    return f"/proc/{os.getpid()}/fd/{held[0]}"


def _map(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    try:
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
    except RuntimeError as error:
        raise T1Error(
            f"the processes cannot share memory ({path}: {str(error).splitlines()[0]}); "
            "mode slide takes those of one host, in one container; take mode fsdp across hosts"
        ) from error


class Landings:
    """Counts how often each rank has updated its part of each layer, and runs actions that wait for these updates.

    One thread does both: it announces this rank's updates once they are on the host, and runs an action once all ranks
    have announced the updates that it waits for. An error in an action, or in another rank's update, is raised by
    `check`.
    """

    def __init__(self, memory: HostMemory, layers: int, device: torch.device) -> None:
        ranks, self._enter = memory.ranks, way_in(device)
        counts = memory.zeros(ranks.size * (layers + 1), torch.int64, torch.device("cpu"))
        counts = counts.view(ranks.size, layers + 1).numpy()  # each rank writes its own row
        self._counts, self._failed = counts[:, :layers], counts[:, layers]
        self._rank, self._own = ranks.rank, self._counts[ranks.rank]
        self._due = [0] * layers
        self._coming: list[tuple[int, Mark]] = []
        self._waiting: list[tuple[int, int, Callable[[], None], threading.Event]] = []
        self._changed, self._closed = threading.Condition(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="t1-landings", daemon=True)
        self._thread.start()

    def due(self, layer: int) -> None:
        """From here on, actions on this layer wait for one more update of it."""
        self._due[layer] += 1

    def landed(self, layer: int, mark: Mark = None) -> None:
        """This rank has updated its part of the layer, which is on the host once `mark` is reached."""
        with self._changed:
            self._coming.append((layer, mark))
            self._changed.notify()

    def then(self, layer: int, action: Callable[[], None], given_up: threading.Event) -> None:
        """Run `action` on the thread once every rank's part of the layer has had all updates due so far. Actions keep
        their order. After an error, `given_up` is set instead."""
        with self._changed:
            self._waiting.append((layer, self._due[layer], action, given_up))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Report that this rank has failed, so that no rank waits for it any longer."""
        self._error = self._error or error
        self._failed[self._rank] = 1

    def check(self) -> None:
        """Raise the error that occurred here, or a `T1Error` that names the rank that failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Announce the updates that are still in flight, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        self._enter()
        while True:
            with self._changed:
                while not (self._coming or self._waiting or self._closed):
                    self._changed.wait()
                if self._closed and not self._coming:
                    return
            if not (self._announce() or self._let_go()):
                time.sleep(TICK)

    def _announce(self) -> bool:
        with self._changed:
            coming, self._coming = self._coming, []
        late = []
        for layer, mark in coming:
            if mark is None or mark.query():
                self._own[layer] += 1
            else:
                late.append((layer, mark))
        with self._changed:
            self._coming = late + self._coming
        return len(late) < len(coming)

    def _let_go(self) -> bool:
        with self._changed:
            layer, count, action, given_up = self._waiting[0] if self._waiting else (0, 0, None, None)
        if self._error is None and self._failed.any():
            rank = int(self._failed.argmax())
            self._error = T1Error(f"rank {rank} failed to copy or update a layer, and says why")
        if action is None or (self._error is None and int(self._counts[:, layer].min()) < count):
            return False
        with self._changed:
            self._waiting.pop(0)
        try:
            if self._error is None:
                action()
        except BaseException as error:  # `check` raises it in the waiting thread
            self.fail(error)
        given_up.set()
        return True
