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

from t1lib.errors import require
from t1lib.memory import pinned_zeros
from t1lib.optimizers import Rule
from t1lib.plan.cost import updated_by_host
from t1lib.timing import NoTrace
from t1lib.train.lanes import Lane, Mark, UpdateThread, uninterrupted, wait_for
from t1lib.train.layers import HostLayer, Slot
from t1lib.train.travel import Travel, Update
from t1lib.train.update import Scratch, norms_of, update

if TYPE_CHECKING:
    from t1lib.train.engine import Engine


class Schedule:
    """Moves the weights, gradients and optimizer state of the engine's layers on the host. Calls for others do nothing.

    guests   parameters outside the layers whose state travels, too
    trains   False: only forwards are run, so that neither state nor gradients need room
    """

    def __init__(self, engine: "Engine", guests: list[Tensor], trains: bool) -> None:
        self.engine, self._order = engine, list(engine.host)  # in which the layers run, and take turns in the slots
        self.layers = {layer.index: layer for layer in self._order}
        self.device, self.in_backward, self._rules = engine.device, engine.in_backward, engine.optimizer.rules
        layout, device, choice, overlap = engine.layout, engine.device, engine.choice, engine.overlap
        self.aborted = False  # whether an error ended a backward since the last step
        self._waits_on_device = choice.grads == "device" and not self.in_backward
        trained = [layer for layer in self._order if layer.trained and trains]
        self.weights = [Slot(layout, device) for _ in range(min(choice.slots, len(self._order)))]
        self.grads = [Slot(layout, device) for _ in range(min(choice.grad_slots, len(trained)))]
        self.compute, self.inward, self.outward = Lane(device, False), Lane(device, overlap), Lane(device, overlap)
        self.thread = UpdateThread(device)
        self._scratch = Scratch()  # the update thread's
        self._sent: tuple[Tensor, Tensor, Mark] | None = None  # the gradients' factor, its copy on the host, its mark
        precision, rules = engine.precision, self._rules()
        by_host = [layer for place, layer in enumerate(self._order) if updated_by_host(place, choice.host_share)]
        # Joining and splitting masters takes the CPU longer than moving them.
        joins = 0 < len(by_host) < len(trained) and precision.masters == "split"
        slots, grad_slots = cycle(self.weights), cycle(self.grads)
        for layer in self._order:
            layer.slot = next(slots)
            layer.settle, layer.keeps_gradients = self.settle, not self.in_backward
            layer.travels = layer in trained and layer not in by_host
            if layer in trained:
                layer.grad_slot = next(grad_slots)
                kept = replace(precision, masters="whole") if joins and layer in by_host else precision
                kinds = kept.kinds(layer.flat, *rules).items()
                layer.state = {key: pinned_zeros(layout.numel, dtype, device) for key, dtype in kinds}
            if "master" in layer.state:
                layer.state["master"].copy_(layer.flat)
        kinds = precision.kinds(torch.empty(0, dtype=layout.dtype), *rules) if trained or guests else {}
        # Updates in the backward that need no state are made in the slots, and the new weights leave.
        self.stateless = self.in_backward and not kinds
        # Others read the weights in their slot, right after the backward, unless a master rebuilds them.
        self._read_slots = self.in_backward and bool(kinds) and "master" not in kinds
        any_travels = guests or (not self.stateless and any(layer.travels for layer in self._order))
        kinds = {"weight": layout.dtype, **kinds} | ({} if self.in_backward else {"grad": layout.dtype})
        numel = max([layout.numel, *(guest.numel() for guest in guests)])
        self.travel = Travel(engine, kinds if any_travels else {}, numel)
        # Zeroing the buffers, and earlier work in the same memory, may still be queued: no copy may overtake it.
        made = self.compute.mark()
        for lane in (self.inward, self.outward, *self.travel.lanes):
            lane.after(made)

    def fetch(self, layer: HostLayer, again: bool = False) -> None:
        """Fill the layer's slot: with a copy of the host's weights as soon as they are up to date, or by the pending
        update. again: whether this is the second time in this step"""
        slot = layer.slot
        if slot.holds is not None:
            self.thread.wait(slot.holds.index)  # else its copy, if not queued yet, would later overwrite this one
        if layer.update is not None:
            slot.holds = layer
            self._begin_update(layer)
            return
        phase = "weights again" if again else "weights"
        with uninterrupted():  # else a copy might be queued for a slot that counts as free
            slot.holds = None  # until the copy is sure to be queued
            self.thread.then(layer.index, partial(self._copy_in, layer, phase, self.engine.trace))
            slot.holds = layer

    def _copy_in(self, layer: HostLayer, phase: str, trace: NoTrace) -> None:
        slot, lane = layer.slot, self.inward
        lane.after(slot.freed, layer.left)
        with lane.active(), trace.span("in", phase, layer.index):
            slot.flat.copy_(layer.flat, non_blocking=True)
        slot.filled = lane.mark()

    def bind(self, index: int, again: bool = False) -> None:
        """Point the layer's parameters at its slot, which the device finds filled."""
        layer = self.layers.get(index)
        if layer is None:
            return
        self.take_over(layer)
        if layer.slot.holds is not layer:
            self.fetch(layer, again)
        self.thread.wait(layer.index)
        self.compute.after(layer.slot.filled)
        if layer.waiting is not None and layer.update is None and not again:
            # The forward's inputs need these gradients' memory. Those still wanted, and later ones, go to the host.
            if layer.has_gradients:
                layer.see_gradients()
                self._waits_on_device = False
            self.compute.after(layer.arrived)  # an update may still be reading them
            layer.waiting = None
        layer.bind(layer.slot.views)

    def take_over(self, *layers: HostLayer) -> None:
        """Take over what may have been written to the host's weights of these layers; a slot's copy is then stale."""
        for layer in layers:
            if layer.touched:
                if layer.slot.holds is layer:
                    layer.slot.holds = None
                layer.take_over()

    def release(self, index: int, again: bool = False, around: bool = False, follows: bool = True) -> None:
        """Point the parameters back at the host; if a layer `follows` in the slot, it comes in: see `fetch_next`."""
        layer = self.layers.get(index)
        if layer is not None:
            layer.unbind()
            layer.slot.freed = self.compute.mark()
            if follows:
                self.fetch_next(layer, again, around)

    def fetch_next(self, layer: HostLayer, again: bool, around: bool = False) -> None:
        """Fetch the layer that has this one's slot next, once the device has left it: in the forward or, with `again`,
        in the backward. around: the first layers run after the last ones"""
        turn, count = self._order.index(layer) + (-1 if again else 1) * len(self.weights), len(self._order)
        turn = turn % count if around else turn
        if 0 <= turn < count and layer.slot.holds is not self._order[turn]:
            self.fetch(self._order[turn], again)

    def want_gradients(self, index: int) -> None:
        """Give the layer's parameters a slot for their gradients: zeroed, or with what has been summed so far."""
        layer = self.layers.get(index)
        if layer is None or not layer.trained:
            return
        if self.in_backward:
            twice = "a second backward before step(), with update_in_backward=True: leave that out to accumulate"
            require(layer.backward is None, twice)
        slot, layer.reached = layer.grad_slot, set()
        before, layer.backward = layer.backward, torch._C._current_graph_task_id()
        self.compute.after(slot.freed)
        if layer.has_gradients:
            beside = "a backward while gradients are there, with accumulate=False: call zero_grad(), or leave that out"
            require(self.engine.accumulate or before == layer.backward, beside)
            layer.see_gradients()
            slot.flat.copy_(layer.gather(), non_blocking=True)
            for name in layer.absent:
                slot.views[name].zero_()
        else:
            slot.flat.zero_()
        for name, param in layer.params.items():
            param.grad = slot.views[name]

    def backward_done(self, index: int) -> None:
        """Release the layer, whose gradients are complete: they, or new weights, leave, or its update begins."""
        layer = self.layers.get(index)
        if layer is None or not layer.trained:
            self.release(index, again=True)
            return
        slot, weights = layer.grad_slot, layer.slot.flat
        layer.absent -= layer.reached
        norms = norms_of(list(slot.views.values()), exact=self.device.type == "cpu")
        layer.norms = {n: norm for n, norm in zip(layer.params, norms, strict=True) if n not in layer.absent}
        in_slot = self.stateless and layer.travels
        if in_slot:  # the new weights, put in place of the gradients, leave
            with self.engine.trace.span("compute", "update", index):
                for at, rule, count in layer.spans(self._rules()):
                    update([weights[at]], [slot.flat[at]], [{}], rule, count)
                slot.flat.copy_(weights)
        slot.filled = self.compute.mark()
        reads = self._read_slots and layer.travels
        self.release(index, again=True, follows=not reads)
        if in_slot:
            layer.left = self._send(layer, layer.flat, "weights")
        elif self.in_backward and layer.travels:
            layer.update = Update(slot.flat, layer.spans(self._rules()), (slot.filled,), not layer.absent)
            slot.freed = self._begin_update(layer)
            if reads:
                self.fetch_next(layer, again=True)
        elif layer.seen is not None:
            layer.add_up(slot.views)  # the host waits for it
            slot.freed = slot.filled
        elif self._waits_on_device and layer.travels:
            layer.waiting = self.travel.cut(slot.flat)
            slot.freed, layer.arrived, layer.scale = self.compute.mark(), None, None
        else:
            layer.arrived, layer.scale = self._send(layer, layer.room_for_gradients(), "gradients"), None
            if self.in_backward:
                self.begin(layer, self._rules())
        if self.in_backward:
            layer.absent = set(layer.params)

    def _send(self, layer: HostLayer, to: Tensor, what: str) -> Mark:
        """Queue the copy of the layer's gradient slot to the host; returns the mark when it has arrived."""
        slot, lane = layer.grad_slot, self.outward
        lane.after(slot.filled, layer.arrived)
        with lane.active(), self.engine.trace.span("out", what, layer.index):
            to.copy_(slot.flat, non_blocking=True)
        slot.freed = lane.mark()
        return slot.freed

    def abort(self) -> None:
        """Note that an error ended a backward. Not if a whole one came before: its updates stand; this was refused."""
        now = torch._C._current_graph_task_id()
        self.aborted = all(layer.backward in (None, now) for layer in self._order)

    def begin_anew(self) -> None:
        """After an aborted backward, which may have updated layers, let another one begin."""
        if self.aborted:
            for layer in self._order:
                layer.backward = None
        self.aborted = False

    def step(self) -> None:
        """Begin the updates of all layers that have gradients, and fetch the first layers: the next forward's."""
        rules, self.aborted = self._rules(), False
        for layer in self._order:
            layer.backward = None
            if layer.has_gradients:
                self.begin(layer, rules)
        for layer in self._order[: len(self.weights)]:
            if layer.update is not None or layer.slot.holds is not layer:
                self.fetch(layer)

    def begin(self, layer: HostLayer, rules: list[Rule]) -> None:
        """Begin the layer's update: by the CPU when its gradients have arrived, on the device when it is fetched."""
        self.finish(layer)
        layer.follow()
        grads, scale, mark = layer.waiting or layer.gather(), layer.scale, None
        if layer.travels:
            mark = self.compute.mark()
        elif scale is not None and scale.is_cuda:  # it goes to the CPU, once for all layers
            if self._sent is None or self._sent[0] is not scale:
                lane = self.outward
                lane.after(self.compute.mark())
                with lane.active():
                    self._sent = scale, lane.uses(scale).to("cpu", non_blocking=True), lane.mark()  # in pinned memory
            scale, mark = self._sent[1:]
        given = Update(grads, layer.spans(rules), (layer.arrived, mark), not layer.absent, scale)
        layer.version += bool(given.spans)
        copied = layer.travels and layer.waiting is None
        if not copied and not layer.state.keys() & {"master", "low"}:
            layer.scale = None  # this update multiplies the gradients themselves
        if layer.travels:
            layer.update = given
            return
        if layer.slot.holds is layer:
            layer.slot.holds = None  # stale from here on
        self.thread.submit(layer.index, partial(self._update_on_host, layer, given, self.engine.trace), *given.known)
        if not self.engine.overlap:
            self.thread.wait(layer.index)

    def _update_on_host(self, layer: HostLayer, given: Update, trace: NoTrace) -> None:
        """On the update thread, once the gradients have arrived."""
        with trace.span("update", "update", layer.index, host=True):
            for at, rule, count in given.spans:
                state = {key: flat[at] for key, flat in layer.state.items()}
                update([layer.flat[at]], [given.grads[at]], [state], rule, count, given.scale, self._scratch)

    def _begin_update(self, layer: HostLayer) -> Mark:
        """Queue the pending update on the device, onto the layer's slot if it holds this layer; returns the mark at
        which its gradients have been read. This takes the host a millisecond: not for all layers at once."""
        given, slot = layer.update, layer.slot
        with uninterrupted():
            if slot.holds is layer:
                self.thread.wait(layer.index)
                known = (*given.known, slot.freed, slot.filled)
                given = given._replace(known=known, onto=slot.flat, there=self._read_slots)
            *_, (layer.arrived, updated) = self.travel.by_piece(layer, given)
            layer.update = None
            if slot.holds is layer:
                slot.filled = slot.freed = updated
        return layer.arrived

    def finish(self, layer: HostLayer) -> None:
        """Begin what is pending for the layer, and wait for the CPU's update if there is one."""
        if layer.update is not None:
            self._begin_update(layer)
        self.thread.wait(layer.index)

    def settle(self, layer: HostLayer) -> None:
        """As `finish`, and wait until a copy to the slot has read the host's weights. `left` may still be to come."""
        self.finish(layer)
        if layer.slot.holds is layer:
            wait_for(layer.slot.filled)

    def drain(self) -> None:
        """Wait for all updates, and for weights on their way to the host."""
        for layer in self._order:
            self.finish(layer)
        for layer in self._order:
            wait_for(layer.left)
            layer.follow()

    def device_tensors(self) -> list[Tensor]:
        waiting = [piece for layer in self._order for piece in layer.waiting or ()]
        pieces = [buffer for slot in self.travel.slots for buffer in slot.values()]
        return [*(slot.flat for slot in (*self.weights, *self.grads)), *waiting, *pieces]
