"""Sends the device the optimizer state of the embedding rows that a step looks up before their update has run.

The host has to gather this state, which takes longer than sending it. If a step's batch is known during the previous
step, a separate thread gathers it while the device runs the backward.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from t1lib.errors import T1Error
from t1lib.memory import pinned_zeros
from t1lib.plan.cost import GATHERED, ROWS
from t1lib.train.lanes import Mark, UpdateThread, wait_for
from t1lib.train.schedule import Schedule


def in_parts(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows into parts that `RowsAhead.send` takes."""
    return rows.split(ROWS)


class RowsAhead:
    """Gathers rows of a parameter's optimizer state, (V, D) for each key, and sends them to the device.

    settled   blocks until the state on the host includes the last update
    """

    def __init__(self, state: dict[str, Tensor], schedule: Schedule, settled: Callable[[], None]) -> None:
        self.gathered = [_Gathered(state, schedule) for _ in range(GATHERED)]  # used in turn
        self._turn, self._settled, self._worker = 0, settled, UpdateThread(schedule.device)
        self._known: list[tuple[Tensor, Tensor, Tensor]] = []  # announced micro-batches: ids, rows, places
        self._found = 0  # how many of these were looked up

    def begin(self) -> None:
        """Call before a step's look-ups."""
        self._worker.wait(0)
        self._turn = self._found = 0

    def announce(self, ids: Callable[[], list[Tensor]]) -> None:
        """Start gathering the rows of the next step's micro-batches, `ids()`. A `T1Error` of `ids` is suppressed."""
        self._worker.submit(0, partial(self._gather, ids))

    def _gather(self, ids: Callable[[], list[Tensor]]) -> None:
        """Runs on the worker's thread."""
        self._known = []
        with suppress(T1Error):  # an invalid batch: its own step reports it
            self._known = [(piece, *_unique(piece)) for piece in ids()]
        self._settled()
        few = (part for _, rows, _ in self._known for part in in_parts(rows))
        for gathered, rows in zip(self.gathered, few, strict=False):
            gathered.fill(rows)

    def looked_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct rows of a micro-batch, and the index of each of `ids` among them."""
        if self._found < len(self._known) and torch.equal(self._known[self._found][0], ids.cpu()):
            self._found += 1
            return self._known[self._found - 1][1:]
        return _unique(ids)

    def forget(self) -> None:
        """Discard what was gathered: the state is about to change."""
        self._worker.wait(0)
        for gathered in self.gathered:
            gathered.count = 0

    def send(self, rows: Tensor) -> dict[str, Tensor]:
        """Return a copy, on the device, of the state of up to `ROWS` rows."""
        gathered, self._turn = self.gathered[self._turn], (self._turn + 1) % GATHERED
        return gathered.send(rows)

    def close(self) -> None:
        self._worker.close()


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    return torch.unique(ids.cpu(), return_inverse=True)


class _Gathered:
    """Pinned buffers for `ROWS` rows on their way to the device. `count`: how many rows they hold."""

    def __init__(self, state: dict[str, Tensor], schedule: Schedule) -> None:
        self._state = state
        size = {k: (min(ROWS, len(v)), v.shape[1]) for k, v in self._state.items()}
        empty = {k: pinned_zeros(n * width, self._state[k].dtype, schedule.device) for k, (n, width) in size.items()}
        self.buffers = {k: buffer.view(size[k]) for k, buffer in empty.items()}
        self._device, self._compute = schedule.device, schedule.compute
        self._left: Mark = None  # when the previous rows have left
        self._rows, self.count = torch.empty(min(n for n, _ in size.values()), dtype=torch.int64), 0

    def fill(self, rows: Tensor) -> None:
        wait_for(self._left)
        for key, buffer in self.buffers.items():
            torch.index_select(self._state[key], 0, rows, out=buffer[: len(rows)])
        self._rows[: len(rows)], self.count = rows, len(rows)

    def send(self, rows: Tensor) -> dict[str, Tensor]:
        if not torch.equal(self._rows[: self.count], rows):
            self.fill(rows)
        own = {key: buffer[: len(rows)] for key, buffer in self.buffers.items()}
        found = {key: few.to(self._device, non_blocking=True, copy=True) for key, few in own.items()}
        self._left, self.count = self._compute.mark(), 0
        return found
