"""When each layer's weights come to the device, when its gradients leave, and when it is updated.

    forward    weights i come in | layer i computes
    backward   weights i come in | layer i is recomputed, then its gradients | gradients i leave
    updates    the state of layer i comes in, is updated and leaves during the next forward, ahead of the layer; or the
               CPU updates the layer. With `update_in_backward`, all this begins in the backward.

Each column is a lane, and all lanes overlap. A layer's weights are not sent before its update is done, and what a slot
holds is known at any time, so stale weights are never read.
"""

from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from t1lib.errors import require
from t1lib.memory import pinned_zeros
from t1lib.optimizers import Rule
from t1lib.plan.cost import updated_by_host
from t1lib.timing import NoTrace
from t1lib.train.lanes import Lane, Mark, UpdateThread, wait_for
from t1lib.train.layers import HostLayer, Slot
from t1lib.train.travel import Travel, Update
from t1lib.train.update import Scratch, norms_of, update

if TYPE_CHECKING:
    from t1lib.train.engine import Engine


class Schedule:
    """Moves the weights, gradients and optimizer state of the engine's layers on the host. Calls for others do nothing.

    guests   parameters outside the layers whose state travels, too
    trains   False: only forwards are run, so neither state nor gradients need room
    """

    def __init__(self, engine: "Engine", guests: list[Tensor], trains: bool) -> None:
        layout, device, choice, overlap = engine.layout, engine.device, engine.choice, engine.overlap
        self.engine, self.device, self.in_backward = engine, device, engine.in_backward
        self._rules, self._order = engine.optimizer.rules, [*engine.host]  # as layers run, and take turns in the slots
        self.layers = {layer.index: layer for layer in self._order}
        trained = [layer for layer in self._order if layer.trained and trains]
        by_host = [layer for number, layer in enumerate(self._order) if updated_by_host(number, choice.host_share)]
        self.weights = [Slot(layout, device) for _ in range(min(choice.slots, len(self._order)))]
        self.grads = [Slot(layout, device) for _ in range(min(choice.slots, len(trained)))]
        self.compute, self.inward, self.outward = Lane(device, False), Lane(device, overlap), Lane(device, overlap)
        self.thread = UpdateThread(device)
        self._scratch = Scratch()  # the update thread's
        self._sent: tuple[Tensor, Tensor, Mark] | None = None  # the gradients' factor, its copy on the host, its mark
        self._open: int | None = None  # autograd's number of a backward that has begun, and not ended, since a step
        self._keep_on_device = choice.grads == "device" and not self.in_backward  # gradients that wait for step()
        precision, rules = engine.precision, self._rules()
        dtypes = precision.state_dtypes(torch.empty(0, dtype=layout.dtype), *rules) if trained or guests else {}
        # Joining and splitting masters takes the CPU longer than moving them.
        joins = 0 < len(by_host) < len(trained) and precision.masters == "split"
        by_cpu = replace(precision, masters="whole").state_dtypes(trained[0].flat, *rules) if joins else dtypes
        for layer, slot in zip(self._order, cycle(self.weights), strict=False):
            layer.slot = slot
        for layer, slot in zip(trained, cycle(self.grads), strict=False):
            layer.grads.slot, layer.travels = slot, layer not in by_host
            kept = (dtypes if layer.travels else by_cpu).items()
            layer.state = {key: pinned_zeros(layout.numel, dtype, device) for key, dtype in kept}
            if "master" in layer.state:
                layer.state["master"].copy_(layer.flat)
        # Updates in the backward that need no state are made in the slots, and the new weights leave.
        self.stateless = self.in_backward and not dtypes
        # Others read the weights in their slot, right after the backward, unless a master rebuilds them.
        self._read_slots = self.in_backward and bool(dtypes) and "master" not in dtypes
        any_travels = guests or (not self.stateless and any(layer.travels for layer in self._order))
        dtypes = {"weight": layout.dtype, **dtypes} | ({} if self.in_backward else {"grad": layout.dtype})
        numel = max([layout.numel, *(guest.numel() for guest in guests)])
        self.travel = Travel(engine, dtypes if any_travels else {}, numel)
        # Zeroing the buffers, and earlier work in the same memory, may still be queued: no copy may overtake it.
        made = self.compute.mark()
        for lane in (self.inward, self.outward, *self.travel.lanes):
            lane.after(made)

    # -- weights: each layer's slot is filled, bound to its parameters while it computes, and released -----------------

    def fetch(self, layer: HostLayer, backward: bool = False) -> None:
        """Fill the layer's slot: with a copy of the host's weights as soon as they are up to date, or by the pending
        update. backward: whether it is for the backward, the second time in this step"""
        slot = layer.slot
        if slot.holds is not None:
            within = f"layer {layer.index} is called within the call of layer {slot.holds.index}, whose slot it needs"
            require(not slot.holds.bound, within)
            self.thread.wait(slot.holds.index)  # else its copy, if not queued yet, would later overwrite this one
        if layer.update is not None:
            slot.holds = layer
            self._update_on_device(layer)
            return
        phase = "weights again" if backward else "weights"
        slot.holds = None  # until the copy is sure to be queued
        self.thread.then(layer.index, partial(self._copy_in, layer, phase, self.engine.trace))
        slot.holds = layer

    def _copy_in(self, layer: HostLayer, phase: str, trace: NoTrace) -> None:
        slot, span = layer.slot, trace.span("in", phase, layer.index)
        slot.filled = layer.read = self.inward.copy(slot.flat, layer.flat, span, slot.freed, layer.left)

    def bind(self, index: int, backward: bool = False) -> None:
        """Point the layer's parameters at its slot, which the device finds filled."""
        layer = self.layers.get(index)
        if layer is None:
            return
        layer.accept_writes()
        if not layer.in_slot:
            self.fetch(layer, backward)
        self.thread.wait(layer.index)
        self.compute.after(layer.slot.filled)
        if layer.grads.waiting is not None and not backward:
            # The forward's inputs need these gradients' memory. Those still wanted, and later ones, go to the host.
            if layer.grads.any:
                layer.grads.complete()
                self._keep_on_device = False
            self.compute.after(layer.grads.arrived)  # an update may still be reading them
            layer.grads.waiting = None
        layer.bind(layer.slot.views)

    def release(self, index: int, backward: bool = False, around: bool = False, follows: bool = True) -> None:
        """Point the parameters back at the host; if a layer `follows` in the slot, it comes in: see `fetch_next`."""
        layer = self.layers.get(index)
        if layer is not None and layer.bound:  # not if an error came before
            layer.slot.freed = self.compute.mark()
            layer.unbind()
            if follows:
                self.fetch_next(layer, backward, around)

    def fetch_next(self, layer: HostLayer, backward: bool, around: bool = False) -> None:
        """Fetch the layer that has this one's slot next, once the device has left it: in the forward or the backward.
        around: the first layers run after the last ones"""
        ahead, count = len(self.weights), len(self._order)
        turn = self._order.index(layer) + (-ahead if backward else ahead)
        turn = turn % ahead if around and turn >= count else turn
        if 0 <= turn < count and not self._order[turn].in_slot:
            self.fetch(self._order[turn], backward)

    # -- gradients: each backward sums them in a slot; then they wait for an update, or are used by one at once --------

    def bind_gradients(self, index: int) -> None:
        """Give the layer's parameters a slot for their gradients: zeroed, or with what has been summed so far."""
        layer = self.layers.get(index)
        if layer is None or not layer.trained:
            return
        grads, slot = layer.grads, layer.grads.slot
        if self.in_backward:
            twice = "a second backward before step(), with update_in_backward=True: leave that out to accumulate"
            require(grads.backward is None, twice)
            if self._open is None:
                self._open = torch._C._current_graph_task_id()
                Variable._execution_engine.queue_callback(self._backward_ended)  # not called after an error
        grads.reached = set()
        before, grads.backward = grads.backward, torch._C._current_graph_task_id()
        self.compute.after(slot.freed)
        if grads.any:
            beside = "a backward while gradients are there, with accumulate=False: call zero_grad(), or leave that out"
            require(self.engine.accumulate or before == grads.backward, beside)
            grads.complete()
            slot.flat.copy_(grads.gather(), non_blocking=True)
            for name in grads.absent:
                slot.views[name].zero_()
        else:
            slot.flat.zero_()
        for name, param in layer.params.items():
            param.grad = slot.views[name]

    def backward_done(self, index: int) -> None:
        """Release the layer, whose gradients are complete: they, or new weights, leave, or its update begins."""
        layer = self.layers.get(index)
        if layer is None or not layer.trained:
            self.release(index, backward=True)
            return
        grads, slot = layer.grads, layer.grads.slot
        norms = norms_of(list(slot.views.values()), exact=self.device.type == "cpu")
        before, grads.absent = grads.absent, grads.absent - grads.reached
        grads.norms = {n: norm for n, norm in zip(layer.params, norms, strict=True) if n not in grads.absent}
        if not self.in_backward or not layer.travels:
            try:
                self._keep_gradients(layer)
            except BaseException:  # such as too little memory
                grads.absent, grads.norms = before, None
                raise
        if not self.in_backward:
            return
        if not layer.travels:
            self._prepare_update(layer, self._rules())
        elif self.stateless:
            self._update_in_slot(layer)
        else:
            self._update_at_once(layer)
        grads.absent = set(layer.params)

    def _keep_gradients(self, layer: HostLayer) -> None:
        """Let gradients wait for an update: on the host or, in memory that layers' inputs have left, on the device."""
        grads, slot = layer.grads, layer.grads.slot
        slot.filled = self.compute.mark()
        self.release(layer.index, backward=True)
        if grads.seen is not None:
            grads.update_seen(slot.views)  # the host waits for it
            slot.freed = slot.filled
        elif self._keep_on_device and layer.travels:
            grads.waiting = slot.flat.clone()
            slot.freed, grads.arrived, grads.scale = self.compute.mark(), None, None
        else:
            grads.arrived, grads.scale, grads.waiting = self._send(layer, grads.buffer(), "gradients"), None, None

    def _update_in_slot(self, layer: HostLayer) -> None:
        """Update the weights in their slot, by a rule without state; copied over the gradients, they leave."""
        weights, slot = layer.slot.flat, layer.grads.slot
        with self.engine.trace.span("compute", "update", layer.index):
            for at, rule, count in layer.count_update(self._rules()):
                update([weights[at]], [slot.flat[at]], [{}], rule, count)
            slot.flat.copy_(weights)
        slot.filled = self.compute.mark()
        self.release(layer.index, backward=True)
        layer.left = self._send(layer, layer.flat, "weights")

    def _update_at_once(self, layer: HostLayer) -> None:
        """Queue the update on the device, with state that comes in; the next layer waits for the slot if it is read."""
        slot = layer.grads.slot
        slot.filled = self.compute.mark()
        self.release(layer.index, backward=True, follows=not self._read_slots)
        layer.update_master()
        spans = layer.count_update(self._rules())
        layer.update = Update(slot.flat, spans, (slot.filled,), not layer.grads.absent)
        slot.freed = self._update_on_device(layer)
        if self._read_slots:
            self.fetch_next(layer, backward=True)

    def _send(self, layer: HostLayer, to: Tensor, what: str) -> Mark:
        """Queue the copy of the layer's gradient slot to the host; returns the mark when it has arrived."""
        slot, span = layer.grads.slot, self.engine.trace.span("out", what, layer.index)
        slot.freed = self.outward.copy(to, slot.flat, span, slot.filled, layer.grads.arrived)
        return slot.freed

    def _backward_ended(self) -> None:
        self._open = None

    def forget_backward(self, failed: bool) -> None:
        """Let another backward begin before a step, even with updates in the backward. failed: forget only one that
        failed, which may have updated layers"""
        for layer in self._order:
            if not failed or layer.grads.backward == self._open:
                layer.grads.backward = None
        self._open = None

    # -- updates: prepared for all layers at once, then run by the CPU, or by the device when a layer is fetched -------

    def step(self) -> None:
        """Begin the updates of all layers that have gradients, and fetch the first layers: the next forward's."""
        rules, self._open = self._rules(), None
        for layer in self._order:
            layer.grads.backward = None
            if layer.grads.any:
                self._prepare_update(layer, rules)
        for layer in self._order[: len(self.weights)]:
            if not layer.in_slot:
                self.fetch(layer)

    def _prepare_update(self, layer: HostLayer, rules: list[Rule]) -> None:
        """Let the layer be updated: by the CPU when its gradients have arrived, or on the device when it is fetched."""
        self.finish_update(layer)
        layer.update_master()
        grads = layer.grads
        given, scale, mark = grads.gather() if grads.waiting is None else grads.waiting, grads.scale, None
        if layer.travels:
            mark = self.compute.mark()
        elif scale is not None and scale.is_cuda:
            scale, mark = self._on_host(scale)
        pending = Update(given, layer.count_update(rules), (grads.arrived, mark), not grads.absent, scale)
        copied = layer.travels and not given.is_cuda  # they come in with the state
        if not copied and not layer.state.keys() & {"master", "low"}:
            grads.scale = None  # this update multiplies the gradients themselves
        if layer.travels:
            layer.update = pending
            return
        if layer.slot.holds is layer:
            layer.slot.holds = None  # stale from here on
        job = partial(self._update_on_host, layer, pending, self.engine.trace)
        self.thread.submit(layer.index, job, *pending.known, layer.read)  # an evaluation may not have run yet
        if not self.engine.overlap:
            self.thread.wait(layer.index)

    def _on_host(self, scale: Tensor) -> tuple[Tensor, Mark]:
        """The gradients' factor in pinned memory, and the mark when it is there; sent once for all layers."""
        if self._sent is None or self._sent[0] is not scale:
            lane = self.outward
            lane.after(self.compute.mark())
            with lane.active():
                self._sent = scale, lane.uses(scale).to("cpu", non_blocking=True), lane.mark()
        return self._sent[1:]

    def _update_on_host(self, layer: HostLayer, pending: Update, trace: NoTrace) -> None:
        """On the update thread, once the gradients have arrived."""
        with trace.span("update", "update", layer.index, host=True):
            for at, rule, count in pending.spans:
                state = {key: flat[at] for key, flat in layer.state.items()}
                update([layer.flat[at]], [pending.grads[at]], [state], rule, count, pending.scale, self._scratch)

    def _update_on_device(self, layer: HostLayer) -> Mark:
        """Queue the pending update on the device, onto the layer's slot if it holds this layer; returns the mark at
        which its gradients have been read. This takes the host a millisecond, so it is not done for all at once."""
        pending, slot = layer.update, layer.slot
        if slot.holds is layer:
            self.thread.wait(layer.index)
            known = (*pending.known, slot.freed, slot.filled)
            pending = pending._replace(known=known, onto=slot.flat, there=self._read_slots)
        *_, (layer.grads.arrived, updated) = self.travel.by_piece(layer, pending)
        layer.update = None
        if slot.holds is layer:
            slot.filled = slot.freed = updated
        return layer.grads.arrived

    def finish_update(self, layer: HostLayer) -> None:
        """Queue the layer's update if one is pending on the device; wait for the CPU's if there is one."""
        with self.engine.alone():
            if layer.update is not None:
                self._update_on_device(layer)
            self.thread.wait(layer.index)

    def drain(self) -> None:
        """Wait for all updates, and for weights on their way to the host or from there."""
        for layer in self._order:
            layer.accept_writes()
            self.finish_update(layer)
        for layer in self._order:
            wait_for(layer.read)
            wait_for(layer.left)
            layer.update_master()

    def device_tensors(self) -> list[Tensor]:
        waiting = [layer.grads.waiting for layer in self._order if layer.grads.waiting is not None]
        pieces = [buffer for room in self.travel.rooms for buffer in room.buffers.values()]
        return [*(slot.flat for slot in (*self.weights, *self.grads)), *waiting, *pieces]
