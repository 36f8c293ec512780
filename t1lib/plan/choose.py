"""The fastest choice of what streaming keeps on the device within a budget of memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from t1lib.errors import T1Error
from t1lib.memory import in_words
from t1lib.plan.cost import Choice, device_bytes, host_bytes, reserved_bytes
from t1lib.plan.duration import step_ms
from t1lib.plan.rates import H200, Machine
from t1lib.plan.work import Work

SHARES = 0.0, 1 / 8, 1 / 4, 1 / 3, 1 / 2, 1.0  # of the streamed layers, updated by the CPU
MARGIN = 1.04  # what runs reserved was at most this much more than predicted, in nine of ten (measured)


class Found(NamedTuple):
    """A choice, with the bytes that it is predicted to reserve on the device, and the ms of a step."""

    choice: Choice
    reserved: float
    ms: float


def kinds(work: Work) -> Iterator[Choice]:
    """All choices but for how many layers are resident or kept."""
    outers = ("device", "host") if work.outer else ("device",)
    shares = SHARES if work.cuda and work.frozen < work.layers else (float(work.frozen < work.layers),)
    gradients = (2,) if work.together or not work.state else (2, 4, 8)
    for outer, inputs, slots, places, share in product(outers, ("device", "host"), (2, 3), gradients, shares):
        if share < 1 or places == 2:
            yield Choice(slots, 0, 0, inputs, outer, places, share)


def _grid(work: Work, kind: Choice) -> tuple[Choice, np.ndarray]:
    """The kind with every number of resident layers (rows) and of kept ones (columns); the bytes that each reserves."""
    each = np.arange(work.layers + 1)
    grid = replace(kind, resident=each[:, None], keep=each[None, :])
    return grid, reserved_bytes(work, device_bytes(work, grid), grid)


def least(work: Work) -> Found:
    """The choice that reserves the least, without its time."""
    found = []
    for kind in kinds(work):
        reserved = _grid(work, kind)[1]
        resident, keep = np.unravel_index(np.argmin(reserved), reserved.shape)
        found.append(Found(replace(kind, resident=int(resident), keep=int(keep)), float(reserved.min()), np.nan))
    return min(found, key=lambda one: one.reserved)


def choose_plan(work: Work, budget: int, machine: Machine = H200, host: int | None = None) -> Choice:
    """The fastest choice that reserves no more than `budget` bytes; among equally fast ones, the smallest.

    Predictions of what is reserved may be low by a few per cent, so that a choice is taken only if there is a `MARGIN`
    left; but the one that needs the least is taken whenever it should fit. A larger budget is never slower.

    host   bytes that the host should hold at most; if every choice needs more, one that needs the least is taken
           (None: no limit)

    Raises `T1Error` if no choice fits; the message says the least budget that works.
    """
    best: tuple[float, float, float, Choice] | None = None
    for kind in kinds(work):
        grid, reserved = _grid(work, kind)
        fits = reserved * MARGIN <= budget
        if not fits.any():
            continue
        beyond = np.maximum(host_bytes(work, grid) - (np.inf if host is None else host), 0) + np.zeros_like(reserved)
        ms = np.round(step_ms(work, grid, machine) + np.zeros_like(reserved), 3)
        at = np.lexsort((reserved[fits], ms[fits], beyond[fits]))[0]
        resident, keep = (int(index[at]) for index in np.nonzero(fits))
        key = tuple(float(values[resident, keep]) for values in (beyond, ms, reserved))
        if best is None or key < best[:3]:
            best = (*key, replace(kind, resident=resident, keep=keep))
    if best is not None:
        return best[3]
    smallest = least(work)
    if smallest.reserved > budget:
        raise T1Error(
            f"gpu_memory of {in_words(budget)} is too small for one layer at a time; the least that works for "
            f"{work.tokens} tokens per step, {work.micro_tokens} at a time, is {int(smallest.reserved) // 2**20 + 1}MiB "
            f"({in_words(work.workspace)} of it are the output layer's workspace)"
        )
    return smallest.choice
