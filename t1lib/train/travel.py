"""Updates on the device of layers whose optimizer state the host holds: the state comes, and leaves again, in pieces.

A step of AdamW reads and writes 24 bytes of state a parameter. The host's cores are slow at that, and wanted for
launching; the link is idle for most of a step, and the device updates in no time. So a piece of a layer's state comes
in while another one is updated and a third one leaves, all beside the layers' computing.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.host_layers import HostLayers
from t1lib.train.narrow import Scratch
from t1lib.train.optim import Updater
from t1lib.train.streams import Lane, Mark

PIECE = 1 << 23  # numbers of a layer: enough to keep the link busy, few beside a layer
SLOTS = 2  # pieces on the device: one that comes in, one that is updated or leaves


class Travel:
    """Updates `layers` of `host` on the device, of each this rank's part. All their parameters are trained.

    host_grads   whether gradients wait on the host, and come in with the state
    trace        what spans of work are reported to
    """

    def __init__(
        self, host: HostLayers, layers: Collection[int], host_grads: bool, trace: Callable[[], Trace | NoTrace]
    ) -> None:
        self._host, self._grads_come, self._trace = host, host_grads, trace
        self._state = {index: self._part_of_state(index) for index in layers}
        self._weights = {index: host.host_flat[index][host.part] for index in layers}
        self._weight_comes = "master" not in self._keys()
        self.lanes = [Lane(host.device, own_stream=True) for _ in range(3)]  # in, update, out
        numel = host.own_layout.numel
        size = max(1, min(PIECE, numel))
        self._pieces = [slice(at, min(at + size, numel)) for at in range(0, numel, size)]
        kinds = {key: flat.dtype for key, flat in next(iter(self._state.values()), {}).items()}
        kinds |= {"weight": host.layout.dtype} | ({"grad": host.layout.dtype} if host_grads else {})
        self._slots = [self._buffers(kinds, size) for _ in range(SLOTS if self._state else 0)]
        self._freed: list[Mark] = [None] * SLOTS  # marks when what was in a slot has left
        self._turn = 0
        self._updated: list[int] = []  # layers whose updates are not counted yet
        self._scratch = Scratch()

    def _keys(self) -> list[str]:
        return list(next(iter(self._state.values()), {}))

    def _part_of_state(self, index: int) -> dict[str, Tensor]:
        return {key: flat[self._host.part] for key, flat in self._host.flat_state(index).items()}

    def _buffers(self, kinds: dict[str, torch.dtype], size: int) -> dict[str, Tensor]:
        return {key: torch.zeros(size, dtype=dtype, device=self._host.device) for key, dtype in kinds.items()}

    def update(
        self, index: int, grads: Tensor, marks: Collection[Mark], factor: float, scale: Tensor | float, lost: Tensor,
        left: Mark, onto: Tensor | None,
    ) -> tuple[Mark, Mark, Mark]:  # fmt: skip
        """Queue a layer's update. Returns marks: gradients read, layer updated, all of it back on the host.

        grads      flat, as long as the part, on the device, or on the host (`host_grads`)
        marks      before which neither they nor the rest is there
        factor     of the learning rate; scale: of the gradients
        lost       () float32 on the device: other than 0, nothing changes
        left       mark when the layer was last back on the host
        onto       flat, on the device: where the new weights go, too
        """
        inward, lane, outward = self.lanes
        self._updated.append(index)
        if not lost.is_cuda and lost:
            return None, None, None
        lost, scale = lane.uses(lost), lane.uses(scale) if isinstance(scale, Tensor) else scale
        for mark in (left, *(marks if self._grads_come else ())):
            inward.after(mark)
        for mark in marks:
            lane.after(mark)
        count = self._count(index)
        for piece in self._pieces:
            slot = self._bring(index, piece, grads if self._grads_come else None)
            lane.after(inward.mark())
            with lane.active(), self._trace().span("update", "device update", index, lane.stream):
                grad = slot["grad"] if self._grads_come else grads[piece]
                self._step(slot, grad, count, factor, scale, lost)
                if onto is not None:
                    onto[piece].copy_(slot["weight"])
            outward.after(lane.mark())
            self._return(index, piece, slot)
        return inward.mark() if self._grads_come else lane.mark(), lane.mark(), outward.mark()

    def _count(self, index: int) -> int:
        """Of the layer's updates up to now."""
        state = next(iter(self._host.updaters[index].state.values()))
        return int(state.get("step", 0))

    def settle(self, lost: bool) -> None:
        """Count the updates since the last call, unless they were lost."""
        for index in self._updated:
            for state in self._host.updaters[index].state.values():
                if "step" in state and not lost:
                    state["step"] += 1
        self._updated = []

    def _bring(self, index: int, piece: slice, grads: Tensor | None) -> dict[str, Tensor]:
        """Queue a piece's way in; the buffers, as long as the piece is."""
        inward, state = self.lanes[0], self._state[index]
        slot = {key: buffer[: piece.stop - piece.start] for key, buffer in self._slots[self._turn].items()}
        inward.after(self._freed[self._turn])
        come = dict(state)
        if self._weight_comes:
            come["weight"] = self._weights[index]
        if grads is not None:
            come["grad"] = grads
        with inward.active(), self._trace().span("in", "state", index, inward.stream):
            for key, flat in come.items():
                slot[key].copy_(flat[piece], non_blocking=True)
        return slot

    def _step(
        self, slot: dict[str, Tensor], grad: Tensor, count: int, factor: float, scale: Tensor | float, lost: Tensor
    ) -> None:
        state = {key: slot[key] for key in self._keys()}
        if "exp_avg" in state:
            state["step"] = torch.full((), float(count), device=grad.device)
        updater = Updater({"": slot["weight"]}, self._host.spec, self._scratch, {"": state}, count)
        updater.step({"": grad}, factor, scale, lost)

    def _return(self, index: int, piece: slice, slot: dict[str, Tensor]) -> None:
        outward = self.lanes[2]
        leave = {**self._state[index], "weight": self._weights[index]}
        with outward.active(), self._trace().span("out", "state", index, outward.stream):
            for key, flat in leave.items():
                flat[piece].copy_(slot[key], non_blocking=True)
        self._freed[self._turn] = outward.mark()
        self._turn = (self._turn + 1) % SLOTS

    def bytes_a_step(self) -> int:
        """Of state that crosses the link each way."""
        return sum(flat.nbytes for state in self._state.values() for flat in state.values())

    def device_tensors(self) -> list[Tensor]:
        return [buffer for slot in self._slots for buffer in slot.values()]
