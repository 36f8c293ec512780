"""Like layers on the host, a few at a time on the device: weights in, gradients out, updates on the host.

Three lanes run beside the computing: copies in, copies out, and the worker that updates. They are ordered by events on
the device and by one wait a layer on the host: a layer's weights are not sent before its update is done, so no stale
weight is ever read.

Several processes of one host, each with a device of its own, hold the layers together: a layer's gradients are added up
over them on the devices, each updates its part of the layer, and all wait for all parts before they read it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.heads.shards import reduce_scatter
from t1lib.measure.memory import pinned_empty
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.inward import Inward
from t1lib.train.narrow import wide
from t1lib.train.optim import OptimizerSpec, Updater, has_no_state, norms_of
from t1lib.train.ranks import Ranks
from t1lib.train.streams import HostPool, Lane, Mark, Slots
from t1lib.train.travel import Travel

AHEAD = 4  # layers that the queued updates on the device are ahead of the weights that come in, at least


class Pipeline(Inward):
    """Lets the layers that the host holds come to the device, and their gradients or new weights leave it. For layers
    below the `first` nothing is to be done.

    slots        device buffers for weights; grad_slots: for gradients
    host_grads   pinned host buffers for gradients that wait for their update
    together     no layer is updated before the gradients of all are known (`update_all`)
    on_device    layers that are updated on the device. Without state, and not together: as soon as their gradients are
                 there, and their weights leave in place of the gradients. Else their state travels (`travel`)
    ranks        processes that hold the layers together
    overlap_*    whether weights come in, gradients leave and updates run while the device computes
    trace        what spans of work are reported to
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec, *,
        slots: int, grad_slots: int, host_grads: int, together: bool, on_device: Collection[int], ranks: Ranks,
        overlap_in: bool, overlap_out: bool, overlap_update: bool, trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        super().__init__(layers, first, names, device, spec, ranks, slots, overlap_in, trace)
        self.together, self.on_device, self.overlap_update = together, on_device, overlap_update
        self.grads = Slots(grad_slots, self.grad_layout, device)
        on_host = set(self.trained) - set(on_device)
        waiting = len(self.trained) if together else min(host_grads, len(on_host))
        self._host_grads = HostPool(waiting, self.own_layout, device)
        self._host_norms = pinned_empty(len(layers), torch.float32, device)
        self.outward = Lane(device, own_stream=overlap_out)
        self._norms = torch.zeros(0 if ranks.alone else len(layers), dtype=wide(self.layout.dtype), device=device)
        self._summed: Mark = None  # when the last layer's part is added up, and its norm taken
        self._waiting: list[tuple[int, int]] = []  # layers and their gradients, until those of all are known
        self._later: dict[int, tuple[Callable[[], None], int]] = {}  # updates on the device to be queued, and gradients
        stays = has_no_state(spec) and not together and ranks.alone
        self._slot_updaters = [Updater(v, spec) for v in self.weights.views] if stays and on_device else []
        self.travel = Travel(self, () if stays else on_device, together, trace)

    def fetch(self, index: int, again: bool = False) -> None:
        self._queue_updates(index + AHEAD)
        super().fetch(index, again)

    def bind(self, index: int, again: bool = False) -> None:
        self._queue_updates(index + AHEAD)  # also of what is in its slot still
        super().bind(index, again)

    def settle(self, lost: bool) -> None:
        """The host knows whether the step's gradients are finite."""
        self.travel.settle(lost)
        if lost:
            for _, held in self._later.values():
                self._host_grads.give(held)
            self._later = {}

    def place(self, index: int, gradients: bool = False) -> tuple[Any, ...]:
        """Where the layer's weights and gradients are on the device: the same for layers that take turns there."""
        names = tuple(n for n, _ in self.trainable(index)) if gradients else ()
        return self.weights.of(index), names, self.grads.of(index) if names else None

    # -- gradients and updates -------------------------------------------------------------------------------------

    def want_gradients(self, index: int) -> None:
        """Let the layer's gradients add up in a slot that begins at 0."""
        if index not in self.trained:
            return
        slot = self.grads.of(index)
        self.compute.after(self.grads.freed[slot])
        self.grads.flat[slot].zero_()
        for name, param in self.trainable(index):
            param.grad = self.grads.views[slot][name]

    def gradients_done(self, index: int, factor: float) -> dict[str, Tensor]:
        """The layer's gradients are complete: their norms, by the parameter's name in the model where they are to be
        clipped, else one by the layer's name: few launches, which is what a step of few tokens is made of.

        factor: of the learning rate
        """
        if index not in self.trained:
            return {}
        slot, name = self.grads.of(index), self.names[index]
        if self.landings is not None:  # they are not yet added up
            self.grads.filled[slot] = self.compute.mark()
            return {}
        if self.together:
            norms = {f"{name}.{n}": norm for n, norm in norms_of(self.grads.views[slot]).items()}
            self._norm = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        else:
            self._norm = torch.linalg.vector_norm(self.grads.flat[slot], dtype=torch.float32)
            norms = {name: self._norm}
        if index in self.on_device and self._slot_updaters:
            self._descend(index, factor)
        self.grads.filled[slot] = self.compute.mark()
        return norms

    def _descend(self, index: int, factor: float) -> None:
        """Update the weights in their slot, if the gradients are finite, and put them where the gradients were."""
        slot, held = self.grads.of(index), self.weights.of(index)
        with self._trace().span("compute", "update", index):
            self.grads.flat[slot].masked_fill_(self._norm.isfinite().logical_not(), 0)
            self._slot_updaters[held].step(self.grads.views[slot], factor)
            self.grads.flat[slot].copy_(self.weights.flat[held])

    def send(self, index: int, factor: float) -> None:
        """Queue the copy of the gradients to the host, and the update that follows it (or `update_all`); or that of the
        weights, where they are updated on the device.

        factor: of the learning rate
        """
        if index not in self.trained:
            return
        there = index in self.on_device
        if there and self._slot_updaters:
            self._send_weights(index)
            return
        slot, known = self.grads.of(index), self.compute
        own, held_in = self.grads.flat[slot][self.part], self.weights.of(index)
        if self.landings is not None:
            known = self.outward
            self._sum(index)
        if self.weights.holds[held_in] == index and not (there and self.landings is None):
            self.weights.holds[held_in] = None  # out of date from here on
        if there and not self.together:
            with known.active():
                lost = self._norm.isfinite().logical_not().float()
            self.grads.freed[slot], _, _ = self._travel(index, own, known.mark(), factor, 1.0, lost)
        else:
            self._send_gradients(index, own, factor)
        self._norm = None

    def _send_gradients(self, index: int, own: Tensor, factor: float) -> None:
        held, lane, slot = self._host_grads.take(), self.outward, self.grads.of(index)
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "gradients", index, lane.stream):
            self._host_grads.buffers[held].copy_(own, non_blocking=True)
            self._host_norms[index].copy_(lane.uses(self._norm), non_blocking=True)
        self.grads.freed[slot] = arrived = lane.mark()
        if self.together:
            self._waiting.append((index, held))
        else:
            self._submit(index, held, arrived, self._host_norms[index], None, factor)

    def _sum(self, index: int) -> None:
        """Add up this rank's part of the layer's gradients over all ranks, in place; then that part's norm."""
        slot, lane = self.grads.of(index), self.outward
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "sum over ranks", index, lane.stream):
            flat = self.grads.flat[slot]
            own = torch.empty_like(flat[self.part])
            reduce_scatter(own, flat, group=self.ranks.group)
            flat[self.part].copy_(own)
            self._norm = self._norms[index]
            torch.linalg.vector_norm(own, dtype=self._norms.dtype, out=self._norm)
        self.grads.filled[slot] = self._summed = lane.mark()

    def norms(self) -> dict[str, Tensor]:
        """Of each layer's gradients, where several ranks have added them up."""
        if self.landings is None:
            return {}
        self.compute.after(self._summed)
        whole = self.ranks.sum(self._norms.square(), self.device).sqrt()
        return {self.names[index]: whole[index] for index in self.trained}

    def _send_weights(self, index: int) -> None:
        lane, slot = self.outward, self.grads.of(index)
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "weights", index, lane.stream):
            self.host_flat[index].copy_(self.grads.flat[slot], non_blocking=True)
        self._norm = None
        self.grads.freed[slot] = self._left[index] = lane.mark()

    def _travel(
        self, index: int, grads: Tensor, known: Mark, factor: float, scale: Tensor | float, lost: Tensor | None
    ) -> tuple[Mark, Mark, Mark]:
        """Update the layer on the device, and its weights in their slot if they are still there.

        known: mark before which gradients and factors are not there. Returns what `Travel.update` does.
        """
        held = self.weights.of(index)
        stays = self.weights.holds[held] == index
        onto, freed = (self.weights.flat[held], self.weights.freed[held]) if stays else (None, None)
        left = self._left.get(index)
        marks = self.travel.update(index, grads, (known, freed), factor, scale, lost, left, onto)
        _, updated, self._left[index] = marks
        if stays:
            self.weights.filled[held] = updated
        if not self.overlap_update:
            self.compute.after(self._left[index])
        if self.landings is not None:
            self.landings.due(index)
            self.landings.landed(index, self._left[index])
        return marks

    def update_all(self, norm: Tensor, scale: Tensor | float, factor: float) -> None:
        """Queue the updates that waited, in the order of the next forward: gradients times `scale`, if finite."""
        if not self._waiting:
            return
        lane = self.outward
        both = torch.stack([norm, scale if isinstance(scale, Tensor) else norm.new_full((), scale)])
        lane.after(self.compute.mark())
        with lane.active():
            host = pinned_empty(2, torch.float32, self.device).copy_(lane.uses(both), non_blocking=True)
        arrived, known = lane.mark(), self.compute.mark()
        for index, held in sorted(self._waiting):
            if index in self.on_device:
                self._later[index] = partial(self._travel_from_host, index, held, arrived, known, factor, scale), held
            else:
                self._submit(index, held, arrived, host[0], host[1], factor)
        self._waiting = []
        if not self.overlap_update:
            self._queue_updates(len(self.layers))

    def _queue_updates(self, until: int) -> None:
        """Queue updates on the device that waited, of layers up to this one. To queue all of them at the end of a step
        would leave the device without work: it takes the host a millisecond or two a layer."""
        for index in [i for i in self._later if i <= until]:
            update, _ = self._later.pop(index)
            update()
            self.travel.settle(lost=False)

    def _travel_from_host(
        self, index: int, held: int, arrived: Mark, known: Mark, factor: float, scale: Tensor | float
    ) -> None:
        self.travel.lanes[0].after(arrived)
        self._travel(index, self._host_grads.buffers[held], known, factor, scale, None)
        self._host_grads.give(held)  # the next gradients follow weights that this update has left

    def _submit(self, index: int, held: int, *arguments: Any) -> None:
        if self.landings is not None:
            self.landings.due(index)
        self.worker.submit(index, partial(self._update, index, held, *arguments, self._trace()))
        if not self.overlap_update:
            self.worker.wait(index)

    def _update(
        self, index: int, held: int, arrived: Mark, norm: Tensor, scale: Tensor | None,
        factor: float, trace: Trace | NoTrace,
    ) -> None:  # fmt: skip
        """On the worker's thread: wait for the gradients, update the layer on the host, give the buffer back.

        norm, scale: of the gradients, which must be finite, and their factor; on the host when `arrived` is.
        """
        try:
            if arrived is not None:
                arrived.synchronize()
            if math.isfinite(float(norm)):
                with trace.host_span("update", "update", index):
                    by = 1.0 if scale is None else float(scale)
                    self.update_own(index, self._host_grads.views[held], factor, by)
        finally:
            self._host_grads.give(held)
        if self.landings is not None:
            self.landings.landed(index)

    # -- accounting ------------------------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        return [*self.weights.flat, *self.grads.flat, *self.travel.device_tensors()]

    def update_bytes(self) -> int:
        """Least that an update moves in the host's memory (`bytes_to_update`), of what this rank updates there."""
        return self.bytes_to_update(set(self.trained) - set(self.on_device)) // self.ranks.size

    def link_bytes(self) -> tuple[int, int, int]:
        """Least that a step sends: in during the forward, in during the backward, out."""
        total, layers = self.bytes_a_pass(), max(len(self.streamed), 1)
        again = total // layers * max(layers - len(self.weights.flat), 0)  # at the turn the last layers are still there
        # and at the end the first ones, up to date
        current = len(self.on_device) == len(self.streamed) > 0 and self.landings is None
        state = self.travel.bytes_a_step()
        return again if current else total, again + state, total // self.ranks.size + state

    def drain(self) -> None:
        """Wait for the updates that still run, and for weights on their way."""
        self._queue_updates(len(self.layers))
        self.worker.drain()
        for mark in filter(None, self._left.values()):
            mark.synchronize()

    def close(self) -> None:
        self.drain()
        self.worker.close()
        if self.landings is not None:
            self.landings.close()
