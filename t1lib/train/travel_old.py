"""Updates on the device with optimizer state that lives on the host: the state is copied in and back out in pieces.

A step of AdamW reads and writes 24 bytes of state per parameter. The host's cores are slow at that, and needed for
launching kernels; the link is idle for most of a step, and the update itself takes the device almost no time. So one
piece of a layer's state comes in while another is updated and a third leaves, all while layers compute.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.host_layers import HostLayers
from t1lib.train.narrow import Scratch
from t1lib.train.optim import Updater
from t1lib.train.spec import OptimizerSpec
from t1lib.train.streams import Lane, Mark

PIECE = 5 << 19  # elements of a piece: enough to keep the link busy, few compared to a layer
SLOTS = 5  # least number of pieces on the device: coming in, being updated, leaving; with spares while weights come in
ROOM = 80  # bytes per element of a piece in all slots together; with more slots, pieces come in further ahead
TOGETHER = 4  # pieces that the host queues at a time, so that it switches lanes less often


Marks = tuple[Mark, Mark, Mark]


def slots_for(nbytes: int) -> int:
    """The number of slots for pieces of `nbytes` bytes per element."""
    return max(SLOTS, ROOM // nbytes)


def update_once(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], spec: OptimizerSpec, scratch: Scratch, step: Tensor | None,
    count: int, factor: float, scale: Tensor | float, lost: Tensor | None,
) -> None:  # fmt: skip
    """Update a tensor and its optimizer state. `count` is the number of updates so far; `step`, on the device, includes
    this one (None: the optimizer does not use it). The other arguments are those of `Updater.step`."""
    state = state if step is None else state | {"step": step}
    Updater({"": weight}, spec, scratch, {"": state}, count).apply({"": grad}, factor, scale, lost)


@dataclass(frozen=True)
class Traveller:
    """What one update covers, such as a layer: its optimizer state by key, and its weights, as flat host tensors of
    equal length.

    weights      None: they are on the device only
    counted      an updater's states, whose step counts advance with each update
    grads_come   whether its gradients are on the host, too
    size         elements per piece, for which a slot has room
    """

    state: dict[str, Tensor]
    weights: Tensor | None
    counted: Collection[dict[str, Tensor]]
    grads_come: bool
    size: int

    @property
    def count(self) -> int:
        """Number of updates so far."""
        return int(next(iter(self.counted)).get("step", 0))

    def step_on(self, device: torch.device) -> Tensor | None:
        """The count including the next update, () on the device; None if the optimizer does not use it."""
        counts = "step" in next(iter(self.counted))
        return torch.full((), self.count + 1.0, device=device) if counts else None

    @cached_property
    def pieces(self) -> list["Piece"]:
        held = self.state | ({} if self.weights is None else {"weight": self.weights})
        numel = len(next(iter(held.values())))
        spans = [slice(at, min(at + self.size, numel)) for at in range(0, numel, self.size)]
        return [Piece(span, {key: flat[span] for key, flat in held.items()}) for span in spans]


class Piece(NamedTuple):
    """A range of a traveller's elements, and the host tensors that hold them, by key: state, and maybe "weight"."""

    span: slice
    held: dict[str, Tensor]


class Underway(NamedTuple):
    """A piece in its device slot (and that slot's number), and the mark at which it has come in, or is updated."""

    piece: Piece
    number: int
    slot: dict[str, Tensor]
    mark: Mark


def _weights(piece: Piece, slot: dict[str, Tensor], onto: Tensor | None, there: bool) -> tuple[Tensor, Tensor | None]:
    """The weights to update, and where to copy them afterwards (None: nowhere). If they are `there`, those in `onto`
    are updated, and copied to the slot if the host keeps them, too. Otherwise those in the slot are updated, and copied
    to `onto`, if given."""
    if there:
        return onto[piece.span], slot["weight"] if "weight" in piece.held else None
    return slot["weight"], None if onto is None else onto[piece.span]


def _layer(host: HostLayers, index: int, grads_come: bool, size: int) -> Traveller:
    """The traveller that is this rank's part of a layer."""
    state = {key: flat[host.part] for key, flat in host.flat_state(index).items()}
    return Traveller(state, host.host_flat[index][host.part], host.updaters[index].state.values(), grads_come, size)


class Travel:
    """Updates on the device this rank's part of each of the `layers` of `host`, and whatever else is added. All
    parameters of these layers must be trained.

    host_grads   whether gradients wait on the host, and come in with the state
    trace        returns the trace that records spans of work

    Attributes:
    lanes        in, update, out
    size         elements per piece, for which a slot has room
    """

    def __init__(
        self, host: HostLayers, layers: Collection[int], host_grads: bool, trace: Callable[[], Trace | NoTrace]
    ) -> None:
        self.spec, self._trace, self._device = host.spec, trace, host.device
        self.size = size = max(1, min(PIECE, host.own_layout.numel))
        self._travellers = {index: _layer(host, index, host_grads, size) for index in layers}
        self.lanes = Lane(host.device, True), Lane(host.device, True, urgent=True), Lane(host.device, True)
        kinds = {"weight": host.layout.dtype}
        for traveller in list(self._travellers.values())[:1]:
            kinds |= {key: flat.dtype for key, flat in traveller.state.items()}
        kinds |= {"grad": host.layout.dtype} if host_grads else {}
        count = slots_for(sum(dtype.itemsize for dtype in kinds.values())) if self._travellers else 0
        self._slots = [
            {key: torch.zeros(size, dtype=dtype, device=host.device) for key, dtype in kinds.items()}
            for _ in range(count)
        ]
        self._freed: list[Mark] = [None] * count  # marks at which a slot's content has left
        self._turn = 0
        self._updated: list[int] = []  # travellers whose update has not been counted yet
        self._beside = 0  # bytes of weights that travel with what was added
        self._scratch = Scratch()

    def add(self, index: int, traveller: Traveller) -> None:
        """Register another traveller under the number `index`."""
        self._travellers[index] = traveller
        self._beside += 0 if traveller.weights is None else traveller.weights.nbytes

    def update(self, index: int, *arguments: Any) -> Marks:
        """Queue an update with all its pieces and return its `marks`. The arguments are those of `by_piece`."""
        for _ in self.by_piece(index, *arguments):
            pass
        return self.marks(index)

    def marks(self, index: int) -> Marks:
        """Marks for the pieces of an update queued so far: gradients read, weights updated, state back on the host."""
        inward, lane, outward = self.lanes
        updated = lane.mark()
        return inward.mark() if self._travellers[index].grads_come else updated, updated, outward.mark()

    def by_piece(
        self, index: int, grads: Tensor, marks: Collection[Mark], factor: float, scale: Tensor | float,
        lost: Tensor | None, left: Mark, onto: Tensor | None, there: bool = False, together: int = TOGETHER,
    ) -> Iterator[None]:  # fmt: skip
        """Queue an update, `together` pieces at a time.

        grads      flat, as long as the traveller's state; on the device, or on the host (`host_grads`)
        marks      to wait for before gradients and other inputs are read
        factor     of the learning rate; scale: of the gradients
        lost       () float32 on the device: if it is not 0, nothing changes
        left       mark at which the state of the previous update is back on the host
        onto       flat, on the device: receives the new weights, too, or alone if the host has none
        there      whether `onto` holds the weights already, so that they need not come in
        """
        inward, lane, _ = self.lanes
        traveller = self._travellers[index]
        there = there or traveller.weights is None
        absent = {"weight"} if there or "master" in traveller.state else set()
        self._updated.append(index)
        if lost is not None and not lost.is_cuda and lost:
            return
        lost, scale = (lane.uses(x) if isinstance(x, Tensor) else x for x in (lost, scale))
        for mark in (left, *(marks if traveller.grads_come else ())):
            inward.after(mark)
        for mark in marks:
            lane.after(mark)
        count = traveller.count
        with lane.active():
            step = traveller.step_on(self._device)
        for at in range(0, len(traveller.pieces), together):
            come = self._bring(index, traveller.pieces[at : at + together], grads, absent)
            found = []
            with lane.active():
                for piece, number, slot, arrived in come:
                    lane.after(arrived)
                    with self._trace().span("update", "device update", index, lane.stream):
                        weight, copy = _weights(piece, slot, onto, there)
                        grad = slot["grad"] if traveller.grads_come else grads[piece.span]
                        state = {key: slot[key] for key in traveller.state}
                        update_once(weight, grad, state, self.spec, self._scratch, step, count, factor, scale, lost)
                        if copy is not None:
                            copy.copy_(weight)
                    found.append(Underway(piece, number, slot, lane.mark()))
            self._return(index, found)
            yield

    def settle(self, lost: bool) -> None:
        """Count the updates since the last call, unless the step was lost."""
        states = (state for index in self._updated for state in self._travellers[index].counted)
        steps = [] if lost else [state["step"] for state in states if "step" in state]
        if steps:
            torch._foreach_add_(steps, 1)
        self._updated = []

    def _bring(self, index: int, pieces: list[Piece], grads: Tensor, absent: Collection[str]) -> list[Underway]:
        """Queue the copies of the pieces into the next slots, except for the keys in `absent`."""
        inward, traveller, found = self.lanes[0], self._travellers[index], []
        with inward.active():
            for piece in pieces:
                number, self._turn = self._turn, (self._turn + 1) % len(self._slots)
                slot, size = self._slots[number], piece.span.stop - piece.span.start
                if size < self.size:
                    slot = {key: buffer[:size] for key, buffer in slot.items()}
                come = {key: flat for key, flat in piece.held.items() if key not in absent}
                come |= {"grad": grads[piece.span]} if traveller.grads_come else {}
                inward.after(self._freed[number])
                with self._trace().span("in", "state", index, inward.stream):
                    torch._foreach_copy_([slot[key] for key in come], list(come.values()), non_blocking=True)
                found.append(Underway(piece, number, slot, inward.mark()))
        return found

    def _return(self, index: int, updated: list[Underway]) -> None:
        """Queue the copies of the updated pieces back to the host, which free the slots."""
        outward = self.lanes[2]
        with outward.active():
            for piece, number, slot, mark in updated:
                outward.after(mark)
                with self._trace().span("out", "state", index, outward.stream):
                    left = list(piece.held.values())
                    torch._foreach_copy_(left, [slot[key] for key in piece.held], non_blocking=True)
                self._freed[number] = outward.mark()

    def bytes_a_step(self) -> int:
        """Bytes that cross the link each way per step: optimizer state, and weights of what was added."""
        state = sum(flat.nbytes for traveller in self._travellers.values() for flat in traveller.state.values())
        return state + self._beside

    def device_tensors(self) -> list[Tensor]:
        return [buffer for slot in self._slots for buffer in slot.values()]
