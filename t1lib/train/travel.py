"""Updates on the device with optimizer state that lives on the host: one piece of it comes in while another is updated
and a third leaves, all while layers compute. (The host's cores are slow at the 24 bytes of float32 state that AdamW
reads and writes per parameter, and needed for launching kernels; the link is idle for most of a step.)"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from t1lib.errors import reason, require
from t1lib.optimizers import Rule
from t1lib.plan.cost import PIECE, slots_for
from t1lib.train.lanes import Lane, Mark
from t1lib.train.update import Scratch, update

if TYPE_CHECKING:
    from t1lib.train.engine import Engine

TOGETHER = 4  # pieces that the host queues at a time, so that it switches lanes less often


class Span(NamedTuple):
    """Elements of a flat buffer that are updated by one rule; count: updates so far, including the coming one."""

    at: slice
    rule: Rule
    count: int


class Update(NamedTuple):
    grads: Tensor  # flat; those in the CPU's memory come in with the state
    spans: list[Span]
    known: Sequence[Mark]  # to wait for before gradients and their factor are read
    whole: bool  # whether the spans cover everything: then masters rebuild the weights, which need not come in
    scale: Tensor | None = None  # factor of the gradients
    onto: Tensor | None = None  # flat, on the device: receives the new weights, too, or alone if the host has none
    there: bool = False  # whether `onto` holds the weights already, so that they need not come in


@dataclass(eq=False)
class Traveller:
    """What one update covers, a layer or a matrix."""

    index: int  # the layer's number, for the trace
    flat: Tensor | None  # its weights on the host; None: they are on the device only
    state: dict[str, Tensor] = field(default_factory=dict)  # on the host, by key; flat, in the order of the weights
    left: Mark = None  # when the host's weights and state are up to date

    def on_host(self) -> dict[str, Tensor]:
        """State, and the weights if they are there, by key."""
        return self.state | ({} if self.flat is None else {"weight": self.flat})


@dataclass
class Room:
    """Buffers for a part of what travels, by key: a piece on the device, flat, or gathered rows on the host."""

    buffers: dict[str, Tensor]
    left: Mark = None  # when that has left


class Travel:
    """Lanes and device buffers through which state travels.

    dtypes   of what a piece holds, by key: state, "weight", and "grad" if gradients wait on the host
    numel    elements of the largest traveller
    """

    def __init__(self, engine: "Engine", dtypes: dict[str, torch.dtype], numel: int) -> None:
        self._engine, device, overlap = engine, engine.device, engine.overlap
        self._size = max(1, min(PIECE, numel))  # elements of a piece, at most
        inward, updates, outward = Lane(device, overlap), Lane(device, overlap, urgent=True), Lane(device, overlap)
        self.lanes = inward, updates, outward
        count = slots_for(sum(dtype.itemsize for dtype in dtypes.values())) if dtypes else 0
        zeros = partial(torch.zeros, self._size, device=device)
        self.rooms = [Room({key: zeros(dtype=dtype) for key, dtype in dtypes.items()}) for _ in range(count)]
        self._turns = cycle(self.rooms)
        self._scratch = Scratch()
        self.failed = ""  # what ended an update of which a part has been made

    def pieces(self, numel: int) -> list[slice]:
        """Slices that cut `numel` elements into pieces that fit a `Room`."""
        return [slice(start, min(start + self._size, numel)) for start in range(0, numel, self._size)]

    def by_piece(self, traveller: Traveller, given: Update, together: int = TOGETHER) -> Iterator[tuple[Mark, Mark]]:
        """Queue an update, `together` pieces at a time. Each time yields two marks: at the first their gradients have
        been read, at the second their weights are updated. After an error one may try again, unless a part of the
        update has been made: then every other raises `T1Error`."""
        ended = f"an update ended halfway, by {self.failed}"
        require(not self.failed, f"{ended}; allowed: to close the optimizer, stream again, and load a checkpoint")
        inward, lane, outward = self.lanes
        given = given._replace(there=given.there or traveller.flat is None)
        rebuilt = given.there or ("master" in traveller.state and given.whole)
        come_too = not given.grads.is_cuda and "grad" in self.rooms[0].buffers
        leaves = traveller.on_host()
        comes = {key: flat for key, flat in leaves.items() if key != "weight" or not rebuilt}
        comes |= {"grad": given.grads} if come_too else {}
        inward.after(traveller.left, *(given.known if come_too else ()))
        lane.after(*given.known)
        if given.scale is not None:
            lane.uses(given.scale)
        pieces, copy = self.pieces(len(next(iter(leaves.values())))), partial(self._copy, traveller.index)
        masters = traveller.state.keys() & {"master", "low"}
        changed = False  # whether anything that a second try would need has changed
        try:
            for start in range(0, len(pieces), together):
                underway, marks = [], []
                with inward.active():
                    for at in pieces[start : start + together]:
                        room = next(self._turns)
                        here = {key: buffer[: at.stop - at.start] for key, buffer in room.buffers.items()}
                        inward.after(room.left)
                        copy("in", [here[key] for key in comes], [flat[at] for flat in comes.values()])
                        underway.append((at, here, room, inward.mark()))
                changed |= (given.there and "master" not in masters) or not (come_too or masters)  # weights; gradients
                with lane.active():
                    for at, here, _, arrived in underway:
                        lane.after(arrived)
                        with self._engine.trace.span("update", "device update", traveller.index):
                            grad = here["grad"] if come_too else given.grads[at]
                            self._update(at, here, leaves.keys(), grad, given)
                        marks.append(lane.mark())
                changed = True
                with outward.active():
                    for (at, here, room, _), mark in zip(underway, marks, strict=True):
                        outward.after(mark)
                        copy("out", [flat[at] for flat in leaves.values()], [here[key] for key in leaves])
                        room.left = outward.mark()
                traveller.left = outward.mark()
                yield (inward.mark() if come_too else marks[-1]), marks[-1]
        except BaseException as error:
            if changed:
                self.failed = f"{type(error).__name__}: {reason(error)}"
            inward.after(lane.mark())  # a second try brings its pieces into the same rooms
            raise

    def _copy(self, index: int, way: str, to: list[Tensor], source: list[Tensor]) -> None:
        with self._engine.trace.span(way, "state", index):
            torch._foreach_copy_(to, source, non_blocking=True)

    def _update(self, at: slice, here: dict[str, Tensor], keys: Set[str], grad: Tensor, given: Update) -> None:
        """Update a piece's weights, in `onto` if they are there, else `here`; then copy them where else needed."""
        onto = None if given.onto is None else given.onto[at]
        weight = onto if given.there else here["weight"]
        for whole, rule, count in given.spans:
            own = slice(max(whole.start, at.start) - at.start, min(whole.stop, at.stop) - at.start)
            if own.start < own.stop:
                state = {key: here[key][own] for key in keys if key != "weight"}
                update([weight[own]], [grad[own]], [state], rule, count, given.scale, self._scratch)
        if given.there and "weight" in keys:
            here["weight"].copy_(weight)
        elif not given.there and onto is not None:
            onto.copy_(weight)
