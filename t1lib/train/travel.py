"""Updates on the device with optimizer state that lives on the host: the state is copied in and back out in pieces.

A step of AdamW reads and writes 24 bytes of state per parameter. The host's cores are slow at that, and needed for
launching kernels; the link is idle for most of a step, and the update itself takes the device almost no time. So one
piece of a layer's state comes in while another is updated and a third leaves, all while layers compute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.optimizers import Rule
from t1lib.plan.cost import PIECE, slots_for
from t1lib.timing import NoTrace
from t1lib.train.lanes import Lane, Mark
from t1lib.train.update import Scratch, update

TOGETHER = 4  # pieces that the host queues at a time, so that it switches lanes less often


class Span(NamedTuple):
    """Elements of a flat buffer that are updated by one rule; count: updates so far, including the coming one."""

    at: slice
    rule: Rule
    count: int


class Update(NamedTuple):
    """An update to be made: gradients (flat: on the host they come in with the state; or on the device in pieces, as
    `Travel` cuts them), what of them to apply, their factor, and marks to wait for before both are read."""

    grads: Tensor | list[Tensor]
    spans: list[Span]
    scale: Tensor | None
    known: Sequence[Mark]
    whole: bool  # whether the spans cover everything: then weights are rebuilt of their masters, and need not come in


@dataclass(eq=False)
class Traveller:
    """What one update covers, a layer or a matrix.

    index   the layer's number, for the trace
    flat    its weights on the host, or None: they are on the device only
    state   the optimizer's, on the host, by key; flat, in the order of the weights
    left    mark at which the host's weights and state are up to date
    """

    index: int
    flat: Tensor | None
    state: dict[str, Tensor] = field(default_factory=dict)
    left: Mark = None

    def on_host(self) -> dict[str, Tensor]:
        """State, and the weights if they are there, by key."""
        return self.state | ({} if self.flat is None else {"weight": self.flat})


class Piece(NamedTuple):
    """A range of a traveller's elements, and the host tensors that hold them, by key."""

    at: slice
    held: dict[str, Tensor]


class Travel:
    """Lanes and device slots through which state travels.

    kinds    dtypes of what a piece holds, by key: state, "weight", and "grad" if gradients wait on the host
    numel    elements of the largest traveller
    overlap  False: all work is queued behind the computation
    """

    def __init__(
        self, device: torch.device, kinds: dict[str, torch.dtype], numel: int, overlap: bool,
        trace: Callable[[], NoTrace],
    ) -> None:  # fmt: skip
        self._size, self._trace = max(1, min(PIECE, numel)), trace  # elements of a piece, at most
        inward, updates, outward = Lane(device, overlap), Lane(device, overlap, urgent=True), Lane(device, overlap)
        self.lanes = inward, updates, outward
        count = slots_for(sum(dtype.itemsize for dtype in kinds.values())) if kinds else 0
        self._slots = [
            {key: torch.zeros(self._size, dtype=dtype, device=device) for key, dtype in kinds.items()}
            for _ in range(count)
        ]
        self._freed: list[Mark] = [None] * count  # marks at which a slot's content has left
        self._turn, self._scratch = 0, Scratch()
        self._pieces: dict[int, list[Piece]] = {}  # by the traveller's index

    def cut(self, flat: Tensor) -> list[Tensor]:
        """A copy of a flat tensor in pieces, some of which share an allocation: small ones would waste a quarter of the
        allocator's segments, and large ones would not fit where inputs were."""
        blocks = flat.split(TOGETHER * self._size)
        return [piece for block in blocks for piece in block.clone().split(self._size)]

    def pieces(self, traveller: Traveller) -> list[Piece]:
        """What the host holds, cut into pieces for which a slot has room."""
        if traveller.index not in self._pieces:
            whole, size = traveller.on_host(), self._size
            numel = len(next(iter(whole.values())))
            cuts = [slice(start, min(start + size, numel)) for start in range(0, numel, size)]
            self._pieces[traveller.index] = [Piece(at, {key: flat[at] for key, flat in whole.items()}) for at in cuts]
        return self._pieces[traveller.index]

    def by_piece(
        self, traveller: Traveller, given: Update, onto: Tensor | None, there: bool, together: int = TOGETHER
    ) -> Iterator[tuple[Mark, Mark]]:
        """Queue an update, `together` pieces at a time; gives the marks at which gradients have been read, and weights
        are updated.

        onto     flat, on the device: receives the new weights, too, or alone if the host has none
        there    whether `onto` holds the weights already, so that they need not come in
        """
        inward, lane, outward = self.lanes
        waited = isinstance(given.grads, list)
        come_too = not waited and not given.grads.is_cuda and "grad" in self._slots[0]
        there = there or traveller.flat is None
        absent = {"weight"} if there or ("master" in traveller.state and given.whole) else set()
        inward.after(traveller.left, *(given.known if come_too else ()))
        lane.after(*given.known)
        if given.scale is not None:
            lane.uses(given.scale)
        pieces = self.pieces(traveller)
        for at in range(0, len(pieces), together):
            few, come, marks = pieces[at : at + together], given.grads if come_too else None, []
            with inward.active():
                underway = [(piece, *self._bring(traveller, piece, come, absent)) for piece in few]
            with lane.active():
                for number, (piece, slot, _, arrived) in enumerate(underway, at):
                    lane.after(arrived)
                    with self._trace().span("update", "device update", traveller.index, lane.stream):
                        own = given.grads[number if waited else piece.at]
                        grad = slot["grad"] if come_too else own
                        self._update(piece, slot, grad, given, None if onto is None else onto[piece.at], there)
                    marks.append(lane.mark())
            with outward.active():
                for (piece, slot, turn, _), mark in zip(underway, marks, strict=True):
                    outward.after(mark)
                    with self._trace().span("out", "state", traveller.index, outward.stream):
                        home = list(piece.held.values())
                        torch._foreach_copy_(home, [slot[key] for key in piece.held], non_blocking=True)
                    self._freed[turn] = outward.mark()
            traveller.left = outward.mark()
            yield (inward.mark() if come_too else marks[-1]), marks[-1]

    def _bring(
        self, traveller: Traveller, piece: Piece, grads: Tensor | None, absent: set[str]
    ) -> tuple[dict[str, Tensor], int, Mark]:
        """Queue the copy of a piece into the next slot: that slot, its number, and the mark when it has come in."""
        inward, turn = self.lanes[0], self._turn
        self._turn = (turn + 1) % len(self._slots)
        size = piece.at.stop - piece.at.start
        slot = {key: buffer[:size] for key, buffer in self._slots[turn].items()}
        come = {key: flat for key, flat in piece.held.items() if key not in absent}
        come |= {} if grads is None else {"grad": grads[piece.at]}
        inward.after(self._freed[turn])
        with self._trace().span("in", "state", traveller.index, inward.stream):
            torch._foreach_copy_([slot[key] for key in come], list(come.values()), non_blocking=True)
        return slot, turn, inward.mark()

    def _update(
        self, piece: Piece, slot: dict[str, Tensor], grad: Tensor, given: Update, onto: Tensor | None, there: bool
    ) -> None:
        """Update the weights, in their place in `onto` if they are there, and copy them where else they belong."""
        weight = onto if there else slot["weight"]
        state = {key: slot[key] for key in piece.held if key != "weight"}
        start, stop = piece.at.start, piece.at.stop
        for whole, rule, count in given.spans:
            at = slice(max(whole.start, start) - start, min(whole.stop, stop) - start)
            if at.start < at.stop:
                parts = {key: flat[at] for key, flat in state.items()}
                update([weight[at]], [grad[at]], [parts], rule, count, given.scale, self._scratch)
        if there and "weight" in piece.held:
            slot["weight"].copy_(weight)
        elif not there and onto is not None:
            onto.copy_(weight)

    def device_tensors(self) -> list[Tensor]:
        return [buffer for slot in self._slots for buffer in slot.values()]
