"""The fastest choice of what streaming keeps on the device within a budget of memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from t1lib.errors import T1Error
from t1lib.memory import in_words
from t1lib.plan.cost import Choice, device_bytes, host_bytes, most_reserved_bytes, reserved_bytes
from t1lib.plan.duration import step_ms
from t1lib.plan.rates import H200, Machine
from t1lib.plan.work import Work

SHARES = 0.0, 1 / 8, 1 / 4, 1 / 3, 1 / 2, 1.0  # of the streamed layers, updated by the CPU


class Grid(NamedTuple):
    """Choices of one kind with every number of resident layers (rows) and of kept ones (columns); and the bytes that
    each is expected to reserve, and at most."""

    choices: Choice
    expected: np.ndarray
    most: np.ndarray

    def smallest(self) -> tuple[int, int]:
        """Row and column of the choice that reserves the least."""
        return tuple(map(int, np.unravel_index(np.argmin(self.expected), self.expected.shape)))

    def at(self, place: tuple[int, int]) -> Choice:
        return replace(self.choices, resident=place[0], keep=place[1])


def kinds(work: Work) -> Iterator[Choice]:
    """All choices but for how many layers are resident or kept."""
    outers = ("device", "host") if work.outer else ("device",)
    shares = SHARES if work.cuda and work.frozen < work.layers else (float(work.frozen < work.layers),)
    gradients = (2,) if work.together or not work.state else (2, 4, 8)
    for outer, inputs, slots, places, share in product(outers, ("device", "host"), (2, 3), gradients, shares):
        if share < 1 or places == 2:
            yield Choice(slots, 0, 0, inputs, outer, places, share)


def _grids(work: Work) -> list[Grid]:
    each, found = np.arange(work.layers + 1), []
    for kind in kinds(work):
        choices = replace(kind, resident=each[:, None], keep=each[None, :])
        allocated = device_bytes(work, choices)
        expected, most = (f(work, allocated, choices) for f in (reserved_bytes, most_reserved_bytes))
        found.append(Grid(choices, expected, most))
    return found


def _smallest(grids: list[Grid]) -> dict[float, Grid]:
    """By share, the grid with the choice that reserves the least."""
    found: dict[float, Grid] = {}
    for grid in grids:
        share = grid.choices.host_share
        if share not in found or grid.expected.min() < found[share].expected.min():
            found[share] = grid
    return found


def least_choice(work: Work) -> Choice:
    """The choice that reserves the least."""
    grid = min(_grids(work), key=lambda grid: grid.expected.min())
    return grid.at(grid.smallest())


def choose_plan(work: Work, budget: int, machine: Machine = H200, host: int | None = None) -> Choice:
    """The fastest choice that reserves no more than `budget` bytes; among equally fast ones, the smallest. With a larger
    budget, it is never slower.

    What is reserved may exceed what is expected, so that a choice must fit with the most that it may reserve; but the
    smallest one for each share of the host's updates is taken where the expected bytes fit.

    host   bytes that the host should hold at most; if every choice needs more, one that needs the least is taken
           (None: no limit)

    Raises `T1Error` if no choice fits; the message says the least budget that works.
    """
    grids, best = _grids(work), None
    smallest = _smallest(grids)
    for grid in grids:
        fits = grid.most <= budget
        if grid is smallest[grid.choices.host_share]:
            fits[grid.smallest()] |= grid.expected.min() <= budget
        if not fits.any():
            continue
        beyond = np.maximum(host_bytes(work, grid.choices) - (np.inf if host is None else host), 0)
        ms = np.round(step_ms(work, grid.choices, machine), 3)
        keys = np.stack(np.broadcast_arrays(beyond, ms, grid.expected))[:, fits]
        at = np.lexsort(keys[::-1])[0]
        key = tuple(keys[:, at])
        if best is None or key < best[0]:
            best = key, grid.at(tuple(int(index[at]) for index in np.nonzero(fits)))
    if best is None:
        need = min(grid.expected.min() for grid in grids)
        raise T1Error(
            f"gpu_memory of {in_words(budget)} is too small for one layer at a time; the least that works for "
            f"{work.tokens} tokens per step, {work.micro_tokens} at a time, is {int(need) // 2**20 + 1}MiB "
            f"({in_words(work.workspace)} of it are the output layer's workspace)"
        )
    return best[1]
