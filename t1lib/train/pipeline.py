"""Like layers on the host, a few at a time on the device: weights in, gradients out, updates on the host.

Three lanes run beside the computing: copies in, copies out, and the worker that updates. They are ordered by events on
the device and by one wait a layer on the host: a layer's weights are not sent before its update is done, so no stale
weight is ever read.
"""

import math
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.measure.memory import pinned_empty
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.host_layers import HostLayers
from t1lib.train.optim import OptimizerSpec, Updater, has_no_state, norms_of
from t1lib.train.streams import HostPool, Lane, Mark, Slots, UpdateWorker
from t1lib.train.travel import Travel


class Pipeline(HostLayers):
    """Lets the layers that the host holds come to the device, and their gradients or new weights leave it. For layers
    below the `first` nothing is to be done.

    slots        device buffers for weights; grad_slots: for gradients
    host_grads   pinned host buffers for gradients that wait for their update
    together     no layer is updated before the gradients of all are known (`update_all`)
    on_device    layers that are updated on the device. Without state, and not together: as soon as their gradients are
                 there, and their weights leave in place of the gradients. Else their state travels (`travel`)
    overlap_*    whether weights come in, gradients leave and updates run while the device computes
    trace        what spans of work are reported to
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec, *,
        slots: int, grad_slots: int, host_grads: int, together: bool, on_device: Collection[int], overlap_in: bool,
        overlap_out: bool, overlap_update: bool, trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        super().__init__(layers, first, names, device, spec)
        self.together, self.on_device = together, on_device
        self.overlap_in, self.overlap_update = overlap_in, overlap_update
        self._trace = trace
        self.weights = Slots(slots, self.layout, device)
        self.grads = Slots(grad_slots, self.grad_layout, device)
        on_host = set(self.trained) - set(on_device)
        waiting = len(self.trained) if together else min(host_grads, len(on_host))
        self._host_grads = HostPool(waiting, self.grad_layout, device)
        self._host_norms = pinned_empty(len(layers), torch.float32, device)
        self.compute = Lane(device, own_stream=False)
        self.inward, self.outward = Lane(device, own_stream=overlap_in), Lane(device, own_stream=overlap_out)
        self.worker = UpdateWorker()
        self._coming: dict[int, threading.Event] = {}
        self._left: dict[int, Mark] = {}  # marks when a layer's new weights are back on the host
        self._waiting: list[tuple[int, int]] = []  # layers and their gradients, until those of all are known
        self._read: dict[int, Mark] = {}  # marks when a host buffer's gradients have gone to the device
        stays = has_no_state(spec) and not together
        self._slot_updaters = [Updater(v, spec) for v in self.weights.views] if stays and on_device else []
        self.travel = Travel(self, () if stays else on_device, together, trace)

    # -- weights ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a forward: let the first layers come in."""
        if self._coming:  # a step was given up: its layers must not come in later, over those of this one
            for queued in self._coming.values():
                queued.wait()
            self._coming = {}
            self.forget()
        self.travel.settle(lost=False)
        for index in self.streamed[: len(self.weights.flat)]:
            if self.overlap_in and self.weights.holds[self.weights.of(index)] != index:
                self.fetch(index)

    def bind(self, index: int, again: bool = False) -> None:
        """Point the layer's parameters at its slot, filled when the device comes to use them."""
        if index < self.first:
            return
        slot = self.weights.of(index)
        if self.weights.holds[slot] != index:
            self.fetch(index, again)
        if index in self._coming:
            self._coming.pop(index).wait()
        self.worker.check()
        self.compute.after(self.weights.filled[slot])
        for name, param in self.layers[index].named_parameters():
            param.data = self.weights.views[slot][name]

    def buffer(self, index: int) -> Tensor | None:
        """What holds the layer's weights on the device while they are bound; None: they are always there."""
        return None if index < self.first else self.weights.flat[self.weights.of(index)]

    def place(self, index: int, gradients: bool = False) -> tuple[Any, ...]:
        """Where the layer's weights and gradients are on the device: the same for layers that take turns there."""
        names = tuple(n for n, _ in self.trainable(index)) if gradients else ()
        return self.weights.of(index), names, self.grads.of(index) if names else None

    def release(self, index: int, following: int, again: bool = False) -> None:
        """Point the parameters back at the host; let the slot's next layer come in once the device has left it."""
        if index < self.first:
            return
        slot = self.weights.of(index)
        for name, param in self.layers[index].named_parameters():
            param.data, param.grad = self.host_views[index][name], None
        self.weights.freed[slot] = self.compute.mark()
        if self.overlap_in and following in self.streamed:
            self.fetch(following, again)

    def fetch(self, index: int, again: bool = False) -> None:
        """Let the layer's weights come into its slot: now, or on the worker's thread as soon as they are updated.

        again: for the second time in this step
        """
        self.weights.holds[self.weights.of(index)] = index
        queued = self._coming[index] = threading.Event()
        phase = "weights again" if again else "weights"
        self.worker.then(index, partial(self._copy_in, index, phase, queued, self._trace()), queued)

    def _copy_in(self, index: int, phase: str, queued: threading.Event, trace: Trace | NoTrace) -> None:
        slot, lane = self.weights.of(index), self.inward
        lane.after(self.weights.freed[slot])
        lane.after(self._left.get(index))
        with lane.active(), trace.span("in", phase, index, lane.stream):
            self.weights.flat[slot].copy_(self.host_flat[index], non_blocking=True)
        self.weights.filled[slot] = lane.mark()
        queued.set()

    def forget(self) -> None:
        """What the slots hold is out of date."""
        self.weights.holds = [None] * len(self.weights.holds)

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
        slot = self.grads.of(index)
        if there and not self.together:
            lost = self._norm.isfinite().logical_not().float()
            marks = self._travel(index, self.grads.flat[slot], self.compute.mark(), factor, 1.0, lost)
            self._norm, self.grads.freed[slot] = None, marks[0]
            return
        held, lane = self._host_grads.take(), self.outward
        lane.after(self.grads.filled[slot])
        lane.after(self._read.pop(held, None))
        with lane.active(), self._trace().span("out", "gradients", index, lane.stream):
            self._host_grads.buffers[held].copy_(self.grads.flat[slot], non_blocking=True)
            self._host_norms[index].copy_(lane.uses(self._norm), non_blocking=True)
        self._norm = None
        self.grads.freed[slot] = arrived = lane.mark()
        if self.weights.holds[self.weights.of(index)] == index and not there:
            self.weights.holds[self.weights.of(index)] = None  # out of date from here on
        if self.together:
            self._waiting.append((index, held))
        else:
            self._submit(index, held, arrived, self._host_norms[index], None, factor)

    def _send_weights(self, index: int) -> None:
        lane, slot = self.outward, self.grads.of(index)
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "weights", index, lane.stream):
            self.host_flat[index].copy_(self.grads.flat[slot], non_blocking=True)
        self._norm = None
        self.grads.freed[slot] = self._left[index] = lane.mark()

    def _travel(
        self, index: int, grads: Tensor, known: Mark, factor: float, scale: Tensor | float, lost: Tensor
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
        arrived, lost = lane.mark(), norm.isfinite().logical_not().float()
        known = self.compute.mark()
        for index, held in sorted(self._waiting):
            if index in self.on_device:
                self.travel.lanes[0].after(arrived)
                grads = self._host_grads.buffers[held]
                self._read[held], _, _ = self._travel(index, grads, known, factor, scale, lost)
                self._host_grads.give(held)
            else:
                self._submit(index, held, arrived, host[0], host[1], factor)
        self._waiting = []

    def _submit(self, index: int, held: int, *arguments: Any) -> None:
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
                    self.updaters[index].step(self._host_grads.views[held], factor, by)
        finally:
            self._host_grads.give(held)

    # -- accounting ------------------------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        return [*self.weights.flat, *self.grads.flat, *self.travel.device_tensors()]

    def update_bytes(self) -> int:
        """Least that an update moves in the host's memory (`bytes_to_update`), of the layers that it updates."""
        return self.bytes_to_update(set(self.trained) - set(self.on_device))

    def link_bytes(self) -> tuple[int, int, int]:
        """Least that a step sends: in during the forward, in during the backward, out."""
        total, layers = self.bytes_a_pass(), max(len(self.streamed), 1)
        again = total // layers * max(layers - len(self.weights.flat), 0)  # at the turn the last layers are still there
        current = len(self.on_device) == len(self.streamed) > 0  # and at the end the first ones, up to date
        state = self.travel.bytes_a_step()
        return again if current else total, again + state, total + state

    def drain(self) -> None:
        """Wait for the updates that still run, and for weights on their way."""
        self.worker.drain()
        for mark in filter(None, self._left.values()):
            mark.synchronize()

    def close(self) -> None:
        self.drain()
        self.worker.close()
