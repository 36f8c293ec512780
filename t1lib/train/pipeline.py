"""Identically shaped layers on the host, a few at a time on the device: weights in, gradients out, updates on the host.

Three lanes run alongside the computation: copies in, copies out, and the worker that updates. They are ordered by
events on the device and by one wait per layer on the host: a layer's weights are not sent before its update is done, so
stale weights are never read.

Several processes of one host, each with its own device, can share the layers: gradients are reduce-scattered between
the devices, each process updates its part of every layer, and all wait for every part before they read the layer.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.measure.memory import pinned_zeros
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.outward import Outward
from t1lib.train.ranks import Ranks
from t1lib.train.spec import OptimizerSpec
from t1lib.train.streams import Mark
from t1lib.train.travel_old import Travel


class Pipeline(Outward):
    """Brings host-resident layers to the device, and their gradients or new weights back. Layers below `first` stay on
    the device: nothing is done for them.

    slots        device buffers for weights; grad_slots: for gradients
    host_grads   pinned host buffers for gradients that wait for their update
    together     no layer is updated before the gradients of all are known (`update_all`)
    on_device    layers that are updated on the device. In one process, with an optimizer without state and without
                 `together`: as soon as their gradients are complete, and their weights leave in place of the gradients.
                 Otherwise their optimizer state travels to the device and back (`travel`)
    ranks        processes that share the layers
    overlap_*    whether weights come in, gradients leave and updates run while the device computes
    trace        receives the spans of work
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec, *,
        slots: int, grad_slots: int, host_grads: int, together: bool, on_device: Collection[int], ranks: Ranks,
        overlap_in: bool, overlap_out: bool, overlap_update: bool, trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        super().__init__(
            layers, first, names, device, spec, ranks, slots, grad_slots, host_grads, together, on_device,
            overlap_in, overlap_out, trace,
        )  # fmt: skip
        self.overlap_update = overlap_update
        self._later: dict[int, tuple[Callable[[], None], int]] = {}  # device update to be queued, its gradient buffer
        self._following = -1  # layer to fetch into a slot once the update that reads it is queued
        self.travel = Travel(self, () if self._stays else on_device, together, trace)

    def begin(self) -> None:
        for _, held in self._waiting:  # left by an aborted step
            self._host_grads.give(held)
        self._waiting = []
        super().begin()
        for index in self.streamed[: len(self.weights.flat)]:  # layers whose weights the slots may still hold
            self._update_waiting(index)

    def fetch(self, index: int, again: bool = False) -> None:
        """As in `Inward`; but if the layer's update on the device is still pending, it provides the weights."""
        if index in self._later:
            self.weights.holds[self.weights.of(index)] = index
            self._update_waiting(index)
        else:
            super().fetch(index, again)

    def release(self, index: int, following: int, again: bool = False) -> None:
        """As in `Inward`, except that a slot whose weights the layer's update reads is refilled only after that update,
        and that during a resident layer one pending update of a streamed layer is queued ahead of its turn."""
        reads = again and self._reads_slot(index)
        super().release(index, -1 if reads else following, again)
        self._following = following if reads and self.overlap_in else -1
        if index < self.first and self._later:
            self._update_waiting(min(self._later))

    def settle(self, lost: bool) -> None:
        """Called once the host knows whether the step's gradients are finite; `lost` if not."""
        self.travel.settle(lost)
        if lost:
            for _, held in self._later.values():
                self._host_grads.give(held)
            self._later = {}

    # -- updates ----------------------------------------------------------------------------------------------------

    def _reads_slot(self, index: int) -> bool:
        """Whether the layer is updated on the device right after its backward and reads its weights from their slot,
        because its state has no master to rebuild them from."""
        travels = index in self.on_device and not self._slot_updaters and self.landings is None
        return travels and not self.together and "master" not in self.flat_state(index)

    def _travel(
        self, index: int, grads: Tensor, known: Mark, factor: float, scale: Tensor | float, lost: Tensor | None
    ) -> tuple[Mark, Mark, Mark]:
        """Update the layer on the device, and its weights in their slot if they are still there.

        known: marks when gradients and `scale` are complete. Returns the marks of `Travel.update`.
        """
        held = self.weights.of(index)
        stays = self.weights.holds[held] == index
        onto, freed = (self.weights.flat[held], self.weights.freed[held]) if stays else (None, None)
        left, there = self._left.get(index), stays and self._reads_slot(index)
        marks = self.travel.update(index, grads, (known, freed), factor, scale, lost, left, onto, there)
        _, updated, self._left[index] = marks
        if stays:
            self.weights.filled[held] = self.weights.freed[held] = updated
        if self._following in self.streamed:
            self.fetch(self._following, again=True)
            self._following = -1
        if not self.overlap_update:
            self.compute.after(self._left[index])
        if self.landings is not None:
            self.landings.due(index)
            self.landings.landed(index, self._left[index])
        return marks

    def update_all(self, norm: Tensor, scale: Tensor | float, factor: float) -> None:
        """Queue the pending updates in the order of the next forward: gradients times `scale`, if they are finite."""
        if not self._waiting:
            return
        lane = self.outward
        both = torch.stack([norm, scale if isinstance(scale, Tensor) else norm.new_full((), scale)])
        lane.after(self.compute.mark())
        with lane.active():
            host = pinned_zeros(2, both.dtype, self.device).copy_(lane.uses(both), non_blocking=True)
        arrived, known = lane.mark(), self.compute.mark()
        for index, held in sorted(self._waiting):
            if index in self.on_device:
                self._later[index] = partial(self._travel_from_host, index, held, arrived, known, factor, scale), held
            else:
                self._submit(index, held, arrived, host[0], host[1], factor)
        self._waiting = []
        now = not self.overlap_update or self.landings is not None  # ranks wait for each other's parts
        if now and math.isfinite(float(norm)):  # otherwise `settle` drops them
            self._update_all_waiting()

    def _update_waiting(self, index: int) -> None:
        """Queue the layer's update on the device, if it is pending. Queuing one takes the host a millisecond or two:
        to queue all of them at the end of a step would leave the device idle."""
        if index in self._later:
            update, _ = self._later.pop(index)
            update()
            self.travel.settle(lost=False)

    def _update_all_waiting(self) -> None:
        for index in list(self._later):
            self._update_waiting(index)

    def _travel_from_host(
        self, index: int, held: int, arrived: Mark, known: Mark, factor: float, scale: Tensor | float
    ) -> None:
        self.travel.lanes[0].after(arrived)
        self._travel(index, self._host_grads.buffers[held], known, factor, scale, None)
        self._host_grads.give(held)  # not refilled before a forward with this update's weights

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

        norm, scale: norm of the gradients (no update unless it is finite) and their factor; valid after `arrived`.
        """
        try:
            if arrived is not None:
                arrived.synchronize()
            if math.isfinite(float(norm)):
                with trace.host_span("update", "update", index):
                    by = 1.0 if scale is None else float(scale)
                    self.update_own(index, self._host_grads.views[held], factor, by)
        except BaseException as error:
            if self.landings is not None:  # other ranks wait for this update
                self.landings.fail(error)
            raise
        finally:
            self._host_grads.give(held)
        if self.landings is not None:
            self.landings.landed(index)

    # -- accounting ------------------------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        return [*self.weights.flat, *self.grads.flat, *self.travel.device_tensors()]

    def update_bytes(self) -> int:
        """Fewest bytes that the updates of a step on the host move in its memory, per rank (`bytes_to_update`)."""
        return self.bytes_to_update(set(self.trained) - set(self.on_device)) // self.ranks.size

    def link_bytes(self) -> tuple[int, int, int]:
        """Fewest bytes that a step copies: in during the forward, in during the backward, out."""
        total, layers = self.bytes_a_pass(), max(len(self.streamed), 1)
        # When the backward starts, the last layers are still in their slots.
        again = total // layers * max(layers - len(self.weights.flat), 0)
        # When it ends, the first layers are in theirs: up to date if the device updates all layers.
        current = len(self.on_device) == len(self.streamed) > 0 and self.landings is None
        state = self.travel.bytes_a_step()
        return again if current else total, again + state, total // self.ranks.size + state

    def drain(self) -> None:
        """Wait for pending updates, and for weights on their way to the host."""
        self._update_all_waiting()
        self.worker.drain()
        for mark in filter(None, self._left.values()):
            mark.synchronize()

    def close(self) -> None:
        self.drain()
        self.worker.close()
        if self.landings is not None:
            self.landings.close()
