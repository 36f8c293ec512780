"""Updates on the device of what has its optimizer state on the host: the state comes, and leaves again, in pieces.

A step of AdamW reads and writes 24 bytes of state a parameter. The host's cores are slow at that, and wanted for
launching; the link is idle for most of a step, and the device updates in no time. So a piece of a layer's state comes
in while another one is updated and a third one leaves, all beside the layers' computing.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.host_layers import HostLayers
from t1lib.train.narrow import Scratch
from t1lib.train.optim import OptimizerSpec, Updater
from t1lib.train.streams import Lane, Mark

PIECE = 1 << 21  # numbers of a layer: enough to keep the link busy, few beside a layer
SLOTS = 6  # pieces on the device: on their way in, updated, on their way out; enough of these while weights come in


Marks = tuple[Mark, Mark, Mark]


def update_once(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], spec: OptimizerSpec, scratch: Scratch, step: Tensor | None,
    count: int, factor: float, scale: Tensor | float, lost: Tensor | None,
) -> None:  # fmt: skip
    """Update a tensor and its state, which has seen `count` updates, and this one in `step` on the device; the rest as
    `Updater.step` has it."""
    state = state if step is None else state | {"step": step}
    Updater({"": weight}, spec, scratch, {"": state}, count).apply({"": grad}, factor, scale, lost)


@dataclass(frozen=True)
class Traveller:
    """What is updated at a time: its state by key, and its weights, flat on the host and as long as one another.

    weights      None: they are on the device alone
    counted      states of an updater, whose steps go on
    grads_come   whether its gradients are on the host, too
    """

    state: dict[str, Tensor]
    weights: Tensor | None
    counted: Collection[dict[str, Tensor]]
    grads_come: bool

    @property
    def count(self) -> int:
        """Of its updates up to now."""
        return int(next(iter(self.counted)).get("step", 0))

    def step_on(self, device: torch.device) -> Tensor | None:
        """That count with the update to come, () on the device, where the optimizer asks for it."""
        counts = "step" in next(iter(self.counted))
        return torch.full((), self.count + 1.0, device=device) if counts else None

    def pieces(self) -> list[slice]:
        numel = len(next(iter(self.state.values())) if self.weights is None else self.weights)
        return [slice(at, min(at + PIECE, numel)) for at in range(0, numel, PIECE)]


def _layer(host: HostLayers, index: int, grads_come: bool) -> Traveller:
    """This rank's part of a layer."""
    state = {key: flat[host.part] for key, flat in host.flat_state(index).items()}
    return Traveller(state, host.host_flat[index][host.part], host.updaters[index].state.values(), grads_come)


class Travel:
    """Updates `layers` of `host` on the device, of each this rank's part, and what else is added. All of their
    parameters are trained.

    host_grads   whether gradients wait on the host, and come in with the state
    trace        what spans of work are reported to

    lanes        in, update, out
    """

    def __init__(
        self, host: HostLayers, layers: Collection[int], host_grads: bool, trace: Callable[[], Trace | NoTrace]
    ) -> None:
        self.spec, self._trace, self._device = host.spec, trace, host.device
        self._travellers = {index: _layer(host, index, host_grads) for index in layers}
        self.lanes = Lane(host.device, True), Lane(host.device, True, urgent=True), Lane(host.device, True)
        kinds, size = {"weight": host.layout.dtype}, max(1, min(PIECE, host.own_layout.numel))
        for traveller in list(self._travellers.values())[:1]:
            kinds |= {key: flat.dtype for key, flat in traveller.state.items()}
        kinds |= {"grad": host.layout.dtype} if host_grads else {}
        count = SLOTS if self._travellers else 0
        self._slots = [
            {key: torch.zeros(size, dtype=dtype, device=host.device) for key, dtype in kinds.items()}
            for _ in range(count)
        ]
        self._freed: list[Mark] = [None] * SLOTS  # marks when what was in a slot has left
        self._turn = 0
        self._updated: list[int] = []  # what was updated and is not counted yet
        self._scratch = Scratch()

    def add(self, index: int, traveller: Traveller) -> None:
        """Let this be updated by that number, too."""
        self._travellers[index] = traveller

    def update(self, *arguments: Any) -> Marks:
        """Queue an update, all of its pieces (the arguments are those of `by_piece`)."""
        *_, marks = self.by_piece(*arguments)
        return marks

    def by_piece(
        self, index: int, grads: Tensor, marks: Collection[Mark], factor: float, scale: Tensor | float,
        lost: Tensor | None, left: Mark, onto: Tensor | None,
    ) -> Iterator[Marks]:  # fmt: skip
        """Queue an update, a piece at a time. Returns marks: gradients read, updated, back on the host, so far.

        grads      flat, as long as the part, on the device, or on the host (`host_grads`)
        marks      before which neither they nor the rest is there
        factor     of the learning rate; scale: of the gradients
        lost       () float32 on the device: other than 0, nothing changes
        left       mark when the state was last back on the host
        onto       flat, on the device: where the new weights go, too; or alone, where the host has none
        """
        inward, lane, outward = self.lanes
        traveller = self._travellers[index]
        self._updated.append(index)
        if lost is not None and not lost.is_cuda and lost:
            yield None, None, None
            return
        lost, scale = (lane.uses(x) if isinstance(x, Tensor) else x for x in (lost, scale))
        for mark in (left, *(marks if traveller.grads_come else ())):
            inward.after(mark)
        for mark in marks:
            lane.after(mark)
        count = traveller.count
        with lane.active():
            step = traveller.step_on(self._device)
        for piece in traveller.pieces():
            slot = self._bring(index, piece, grads)
            lane.after(inward.mark())
            with lane.active(), self._trace().span("update", "device update", index, lane.stream):
                weight = slot["weight"] if traveller.weights is not None else onto[piece]
                grad = slot["grad"] if traveller.grads_come else grads[piece]
                state = {key: slot[key] for key in traveller.state}
                update_once(weight, grad, state, self.spec, self._scratch, step, count, factor, scale, lost)
                if onto is not None and traveller.weights is not None:
                    onto[piece].copy_(weight)
            updated = lane.mark()
            outward.after(updated)
            self._return(index, piece, slot)
            yield inward.mark() if traveller.grads_come else updated, updated, outward.mark()

    def settle(self, lost: bool) -> None:
        """Count the updates since the last call, unless they were lost."""
        for index in self._updated:
            for state in self._travellers[index].counted:
                if "step" in state and not lost:
                    state["step"] += 1
        self._updated = []

    def _bring(self, index: int, piece: slice, grads: Tensor) -> dict[str, Tensor]:
        """Queue a piece's way in; the buffers, as long as the piece is."""
        inward, traveller = self.lanes[0], self._travellers[index]
        slot = {key: buffer[: piece.stop - piece.start] for key, buffer in self._slots[self._turn].items()}
        inward.after(self._freed[self._turn])
        come = dict(traveller.state)
        if traveller.weights is not None and "master" not in come:
            come["weight"] = traveller.weights
        if traveller.grads_come:
            come["grad"] = grads
        with inward.active(), self._trace().span("in", "state", index, inward.stream):
            for key, flat in come.items():
                slot[key].copy_(flat[piece], non_blocking=True)
        return slot

    def _return(self, index: int, piece: slice, slot: dict[str, Tensor]) -> None:
        outward, traveller = self.lanes[2], self._travellers[index]
        leave = traveller.state | ({} if traveller.weights is None else {"weight": traveller.weights})
        with outward.active(), self._trace().span("out", "state", index, outward.stream):
            for key, flat in leave.items():
                flat[piece].copy_(slot[key], non_blocking=True)
        self._freed[self._turn] = outward.mark()
        self._turn = (self._turn + 1) % SLOTS

    def bytes_a_step(self) -> int:
        """Of state that crosses the link each way."""
        return sum(flat.nbytes for traveller in self._travellers.values() for flat in traveller.state.values())

    def device_tensors(self) -> list[Tensor]:
        return [buffer for slot in self._slots for buffer in slot.values()]
