"""The fastest choice of what streaming keeps on the device within a budget of memory."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from t1lib.errors import require
from t1lib.memory import in_words
from t1lib.plan.cost import Choice, device_bytes, host_bytes, reserved_bytes, step_ms
from t1lib.plan.rates import H200, Machine
from t1lib.plan.work import Work

# Of the streamed layers, updated by the CPU. Between a quarter and all of them, runs were up to a fifth slower than
# predicted, as the CPU and the link share the host's memory (H200).
SHARES = 0.0, 1 / 4, 1.0


def kinds(work: Work) -> Iterator[Choice]:
    """All choices, each with every number of resident layers (rows) and of kept ones (columns) at once. A third slot
    helps where updates read the weights."""
    layers = np.arange(work.layers + 1)
    outers = ("device", "host") if work.outer else ("device",)
    shares = SHARES if work.cuda and work.frozen < work.layers else (float(work.frozen < work.layers),)
    gradients = (2,) if work.together or not work.state else (2, 4, 8)
    weights = (2,) if work.masters else (2, 3)
    # Beside graphs, whose memory nothing else can use, gradients on the device reserved more than was expected.
    waiting = ("host", "device") if work.together and work.cuda and not work.graphed else ("host",)
    each = product(outers, ("device", "host"), weights, gradients, shares, waiting)
    for outer, inputs, slots, places, share, grads in each:
        yield Choice(slots, layers[:, None], layers[None, :], inputs, outer, places, share, grads)


def choose_plan(
    work: Work, budget: int, machine: Machine = H200, host: int | None = None, or_least: bool = False
) -> Choice:
    """The fastest choice that reserves no more than `budget` bytes; among equally fast ones, the smallest. It is never
    slower with a larger budget. Raises `T1Error` if no choice fits, which says the least budget that works.

    host       bytes that the host should hold at most; if every choice needs more, one that needs the least is taken
    or_least   if no choice fits, take the best one that fits into the least budget that works
    """
    grids, smallest, found = [], defaultdict(lambda: np.inf), []
    for choices in kinds(work):
        allocated = device_bytes(work, choices)
        expected, most = (reserved_bytes(work, allocated, choices, most) for most in (False, True))
        grids.append((choices, expected, most))
        smallest[choices.host_share] = min(smallest[choices.host_share], expected.min())
    least = int(min(smallest.values())) + 1
    require(
        or_least or budget >= least,
        f"gpu_memory of {in_words(budget)} is too small for one layer at a time; the least that works for "
        f"{work.tokens} tokens per step, {work.micro_tokens} at a time, is {least // 2**20 + 1}MiB "
        f"({in_words(work.workspace)} of it are the output layer's workspace)",
    )
    for choices, expected, most in grids:
        # A choice must fit with the most that it may reserve; the smallest for each share, where the expected fits.
        fits = (most <= budget) | ((expected <= max(budget, least)) & (expected == smallest[choices.host_share]))
        if fits.any():
            beyond = np.maximum(host_bytes(work, choices) - (np.inf if host is None else host), 0)
            ms = np.round(step_ms(work, choices, machine), 3)
            keys = np.stack(np.broadcast_arrays(beyond, ms, expected))[:, fits]
            best = np.lexsort(keys[::-1])[0]
            resident, keep = np.argwhere(fits)[best].tolist()
            found.append((tuple(keys[:, best]), replace(choices, resident=resident, keep=keep)))
    return min(found, key=lambda pair: pair[0])[1]
