"""When each layer's weights come to the device, when its gradients leave, and when it is updated.

    forward    weights i come in | layer i computes
    backward   weights i come in | layer i is recomputed, then its gradients | gradients i leave
    updates    the state of layer i comes in, is updated and leaves during the next forward, ahead of the layer; or the
               CPU updates the layer. In the backward, if nothing has to wait for the last gradient.

Each column is a lane, and all lanes overlap. A layer's weights are not sent before its update is done, and what a slot
holds is known at any time, so stale weights are never read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from t1lib.errors import require
from t1lib.memory import pinned_zeros
from t1lib.optimizers import Rule
from t1lib.plan.cost import HOST_GRADS, Choice, updated_by_host
from t1lib.timing import NoTrace
from t1lib.train.lanes import Lane, Mark, UpdateThread, uninterrupted, wait_for
from t1lib.train.layers import HostLayer, Layout, Slots
from t1lib.train.resident import ResidentOptimizer
from t1lib.train.travel import Travel, Update
from t1lib.train.update import Scratch, norms_of, update


class Schedule:
    """Moves the weights, gradients and optimizer state of `layers`, by index. Calls for other layers do nothing.

    optimizer    whose rules are asked for when an update begins
    in_backward  as `update_in_backward` of `stream`; accumulate as there
    overlap      False: all lanes are one queue, and the host waits for the CPU's updates
    guests       parameters outside the layers whose state travels, too
    trains       False: only forwards are run, so that neither state nor gradients need room
    """

    def __init__(
        self, layers: dict[int, HostLayer], layout: Layout, device: torch.device, choice: Choice,
        optimizer: ResidentOptimizer, *, in_backward: bool, accumulate: bool, overlap: bool,
        trace: Callable[[], NoTrace], guests: Sequence[Tensor], trains: bool,
    ) -> None:  # fmt: skip
        self.layers, self.layout, self.device = layers, layout, device
        self.in_backward, self._rules, self._overlap, self._trace = in_backward, optimizer.rules, overlap, trace
        self._accumulate = accumulate or in_backward  # which refuses more
        self._waits_on_device = choice.grads == "device" and not in_backward
        precision, rules = optimizer.precision, optimizer.rules()
        trained = [i for i, layer in layers.items() if layer.trained and trains]
        on_host = {i for place, i in enumerate(layers) if updated_by_host(place, choice.host_share)}
        self._order = list(layers)  # in which the layers run
        self.weights = Slots(min(choice.slots, len(layers)), self._order, layout, device)
        self.grads = Slots(min(choice.grad_slots, len(trained)), trained, layout, device)
        self.compute, self.inward, self.outward = Lane(device, False), Lane(device, overlap), Lane(device, overlap)
        self.thread = UpdateThread(device)
        self.updated: set[int] = set()  # layers that were updated since the last step, in the backward
        self._coming: dict[int, Future] = {}  # by layer: when the copy of its weights is queued
        self._following: int | None = None  # layer to fetch into a slot once the update that reads it is queued
        self._scratch = Scratch()  # the update thread's
        self._rooms: deque[tuple[int, Tensor]] = deque()  # host buffers for gradients: the layer that took each, and it
        self._sent: tuple[Tensor, Tensor, Mark] | None = None  # the gradients' factor, its copy on the host, its mark
        # Joining and splitting masters takes the CPU longer than moving them.
        whole = replace(precision, masters="whole") if precision.masters == "split" else precision
        both = 0 < len(on_host) < len(trained)
        for index in trained:
            kept = whole if both and index in on_host else precision
            layers[index].make_state(kept.kinds(layers[index].flat, *rules))
        for layer in layers.values():
            layer.travels = layer.index in trained and layer.index not in on_host
            layer.settle, layer.keeps_gradients = self.settle, not in_backward
        like = torch.empty(0, dtype=layout.dtype)
        kinds = precision.kinds(like, *rules) if trained or guests else {}
        # Updates that need nothing but weights and gradients are made in the slots, and the new weights leave.
        self.stateless = in_backward and not kinds
        # Others read the weights in their slot, right after the backward, unless a master rebuilds them.
        self._read_slots = in_backward and bool(kinds) and "master" not in kinds
        any_travels = guests or (not self.stateless and any(layer.travels for layer in layers.values()))
        kinds = {"weight": layout.dtype, **kinds} | ({} if in_backward else {"grad": layout.dtype})
        numel = max([layout.numel, *(guest.numel() for guest in guests)])
        self.travel = Travel(device, kinds if any_travels else {}, numel, overlap, trace)
        # The buffers' zeros, and what was in their memory before, may still be queued: no copy may overtake them.
        made = self.compute.mark()
        for lane in (self.inward, self.outward, *self.travel.lanes):
            lane.after(made)

    # -- weights come in -----------------------------------------------------------------------------------------------

    def fetch(self, index: int, again: bool = False) -> None:
        """Fill the layer's slot: with a copy of the host's weights as soon as they are up to date, or by the update
        that is pending. again: whether this is the second time in this step"""
        slot, layer = self.weights.of(index), self.layers[index]
        if self.weights.holds[slot] is not None:
            self._arrive(self.weights.holds[slot])  # a copy that is still to be queued would come too late
        if layer.update is not None:
            self.weights.holds[slot] = index
            self._begin_update(layer)
            return
        phase = "weights again" if again else "weights"
        self.weights.holds[slot] = None  # until the copy is sure to be queued
        self._coming[index] = self.thread.then(index, partial(self._copy_in, index, phase, self._trace()))
        self.weights.holds[slot] = index

    def _copy_in(self, index: int, phase: str, trace: NoTrace) -> None:
        slot, lane = self.weights.of(index), self.inward
        lane.after(self.weights.freed[slot], self.layers[index].left)
        with lane.active(), trace.span("in", phase, index, lane.stream):
            self.weights.flat[slot].copy_(self.layers[index].flat, non_blocking=True)
        self.weights.filled[slot] = lane.mark()

    def _arrive(self, index: int) -> None:
        if index in self._coming:
            self._coming[index].result()
            del self._coming[index]

    def bind(self, index: int, again: bool = False) -> None:
        """Point the layer's parameters at its slot; the device waits until the slot is filled before it uses them."""
        if index not in self.layers:
            return
        slot, layer = self.weights.of(index), self.layers[index]
        if layer.touched:
            self._take_over_weights(layer)
        if self.weights.holds[slot] != index:
            self.fetch(index, again)
        self._arrive(index)
        self.thread.check()
        self.compute.after(self.weights.filled[slot])
        if layer.waiting is not None and layer.update is None and not again:
            self._leave_device(layer)
        layer.bind(self.weights.views[slot])

    def _leave_device(self, layer: HostLayer) -> None:
        """A forward begins, whose inputs need the memory of gradients that have waited: they are gone, or wait for more
        of them, and then on the host from here on."""
        if layer.has_gradients:
            layer.see_gradients()
            self._waits_on_device = False
        self.compute.after(layer.arrived)  # an update may still be reading them
        layer.waiting = None

    def _take_over_weights(self, layer: HostLayer) -> None:
        """Take over what may have been written to the host's weights; no slot holds them."""
        self.finish(layer)
        wait_for(layer.left)
        layer.take_over()
        slot = self.weights.of(layer.index)
        if self.weights.holds[slot] == layer.index:
            self._arrive(layer.index)
            self.weights.holds[slot] = None

    def buffer(self, index: int) -> Tensor:
        """The device buffer that holds the layer's weights while they are bound."""
        return self.weights.flat[self.weights.of(index)]

    def place(self, index: int, gradients: bool = False) -> tuple[int, int | None]:
        """Where the layer's weights and gradients lie on the device: equal for layers that take turns there."""
        trained = gradients and self.layers[index].trained
        return self.weights.of(index), self.grads.of(index) if trained else None

    def release(self, index: int, again: bool = False, around: bool = False, follows: bool = True) -> None:
        """Point the parameters back at the host; once the device has left the slot, the layer that has it next comes
        in, unless it should not: in the forward or, with `again`, in the backward. around: the first layers run after
        the last ones"""
        if index not in self.layers:
            return
        slot, layer, count = self.weights.of(index), self.layers[index], len(self.layers)
        layer.unbind()
        self.weights.freed[slot] = self.compute.mark()
        turn = self._order.index(index) + (-1 if again else 1) * len(self.weights.flat)
        turn = turn % count if around else turn
        following = self._order[turn] if follows and 0 <= turn < count else None
        waits = again and self._read_slots and layer.travels
        self._following = following if waits else None
        if not waits and following is not None and self.weights.holds[slot] != following:
            self.fetch(following, again)

    # -- gradients leave -----------------------------------------------------------------------------------------------

    def want_gradients(self, index: int) -> None:
        """Give the layer's parameters a slot for their gradients: zeroed, or with what has been summed so far."""
        layer = self.layers.get(index)
        if layer is None or not layer.trained:
            return
        if self.in_backward:
            twice = "a second backward before step(), with update_in_backward=True: leave that out to accumulate"
            require(index not in self.updated, twice)
            self.updated.add(index)
        slot, layer.reached = self.grads.of(index), set()
        self.compute.after(self.grads.freed[slot])
        if layer.has_gradients:
            beside = "a backward while gradients are there, with accumulate=False: call zero_grad(), or leave that out"
            require(self._accumulate, beside)
            layer.see_gradients()
            self.grads.flat[slot].copy_(layer.grads, non_blocking=True)
            for name in layer.absent:
                self.grads.views[slot][name].zero_()
        else:
            self.grads.flat[slot].zero_()
        for name, param in layer.params.items():
            param.grad = self.grads.views[slot][name]

    def backward_done(self, index: int) -> None:
        """Release the layer, whose gradients are complete. They, or new weights, leave for the host; with updates in
        the backward, the layer's begins."""
        layer = self.layers.get(index)
        if layer is None or not layer.trained:
            self.release(index, again=True)
            return
        slot = self.grads.of(index)
        layer.absent -= layer.reached
        norms = norms_of(list(self.grads.views[slot].values()), exact=self.device.type == "cpu")
        layer.norms = {n: norm for n, norm in zip(layer.params, norms, strict=True) if n not in layer.absent}
        in_slot = self.stateless and layer.travels
        if in_slot:  # the new weights, put in place of the gradients, leave
            grads, weights = self.grads.flat[slot], self.buffer(index)
            with self._trace().span("compute", "update", index):
                for at, rule, count in layer.spans(self._rules()):
                    update([weights[at]], [grads[at]], [{}], rule, count)
                grads.copy_(weights)
        self.grads.filled[slot] = self.compute.mark()
        self.release(index, again=True)
        if in_slot:
            layer.left = self._send(layer, layer.flat, "weights")
        elif self.in_backward and layer.travels:
            known = (self.grads.filled[slot],)
            layer.update = Update(self.grads.flat[slot], layer.spans(self._rules()), None, known, layer.whole)
            self.grads.freed[slot] = self._begin_update(layer)
            if self._following is not None:
                self.fetch(self._following, again=True)
        elif self._waits_on_device and layer.travels:
            layer.waiting = self.travel.cut(self.grads.flat[slot])
            self.grads.freed[slot], layer.arrived, layer.scale = self.compute.mark(), None, None
        else:
            layer.arrived, layer.scale = self._send(layer, self._room_on_host(layer), "gradients"), None
            if self.in_backward:
                self.begin(layer, self._rules())
        if self.in_backward:
            layer.absent = set(layer.params)

    def _room_on_host(self, layer: HostLayer) -> Tensor:
        """A host buffer for the layer's gradients: its own or, where the CPU updates in the backward, one of a few."""
        if not self.in_backward:
            return layer.room_for_gradients()
        if len(self._rooms) < HOST_GRADS:
            room = pinned_zeros(self.layout.numel, self.layout.dtype, self.device)
        else:
            earlier, room = self._rooms.popleft()
            self.thread.wait(earlier)
        self._rooms.append((layer.index, room))
        layer.grads = room
        return room

    def _send(self, layer: HostLayer, to: Tensor, what: str) -> Mark:
        """Queue the copy of the layer's gradient slot to the host; returns the mark when it has arrived."""
        slot, lane = self.grads.of(layer.index), self.outward
        lane.after(self.grads.filled[slot], layer.arrived)
        with lane.active(), self._trace().span("out", what, layer.index, lane.stream):
            to.copy_(self.grads.flat[slot], non_blocking=True)
        self.grads.freed[slot] = arrived = lane.mark()
        return arrived

    # -- updates -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin the updates of all layers that have gradients; the first layers' turn comes next."""
        self.updated.clear()
        rules = self._rules()
        for layer in self.layers.values():
            if layer.has_gradients:
                self.begin(layer, rules)
        for index in self._order[: len(self.weights.flat)]:
            if self.layers[index].update is not None or self.weights.holds[self.weights.of(index)] != index:
                self.fetch(index)

    def begin(self, layer: HostLayer, rules: list[Rule]) -> None:
        """Begin the layer's update: the CPU starts when its gradients have arrived; on the device, wherever they wait,
        the update comes when the layer is fetched."""
        self.finish(layer)
        if layer.touched:
            self._take_over_weights(layer)
        grads = layer.waiting or layer.grads
        scale, mark = (layer.scale, self.compute.mark()) if layer.travels else self._on_host(layer.scale)
        given = Update(grads, layer.spans(rules), scale, (layer.arrived, mark), layer.whole)
        copied = layer.travels and layer.waiting is None
        if not copied and not layer.state.keys() & {"master", "low"}:
            layer.scale = None  # this update multiplies the gradients themselves
        if layer.travels:
            layer.update = given
            return
        slot = self.weights.of(layer.index)
        if self.weights.holds[slot] == layer.index:
            self.weights.holds[slot] = None  # stale from here on
        self.thread.submit(layer.index, partial(self._update_on_host, layer, given, self._trace()))
        if not self._overlap:
            self.thread.wait(layer.index)

    def _on_host(self, scale: Tensor | None) -> tuple[Tensor | None, Mark]:
        """A factor for the CPU's updates, and the mark at which it has arrived. All layers have the same factor."""
        if scale is None or not scale.is_cuda:
            return scale, None
        if self._sent is None or self._sent[0] is not scale:
            lane = self.outward
            lane.after(self.compute.mark())
            with lane.active():
                self._sent = scale, lane.uses(scale).to("cpu", non_blocking=True), lane.mark()  # in pinned memory
        return self._sent[1:]

    def _update_on_host(self, layer: HostLayer, given: Update, trace: NoTrace) -> None:
        """On the update thread."""
        for mark in given.known:
            wait_for(mark)
        with trace.host_span("update", "update", layer.index):
            for at, rule, count in given.spans:
                state = {key: flat[at] for key, flat in layer.state.items()}
                update([layer.flat[at]], [given.grads[at]], [state], rule, count, given.scale, self._scratch)

    def _begin_update(self, layer: HostLayer) -> Mark:
        """Queue the pending update on the device, onto the layer's slot if it holds this layer; returns the mark at
        which its gradients have been read. Queuing one takes the host a millisecond: to queue all at once would leave
        the device idle."""
        given, index = layer.update, layer.index
        held = self.weights.of(index)
        with uninterrupted():
            onto = self.weights.flat[held] if self.weights.holds[held] == index else None
            if onto is not None:
                self._arrive(index)
                given = given._replace(known=(*given.known, self.weights.freed[held], self.weights.filled[held]))
            there = onto is not None and self._read_slots
            *_, (layer.arrived, updated) = self.travel.by_piece(layer, given, onto, there)
            layer.update = None
            if onto is not None:
                self.weights.filled[held] = self.weights.freed[held] = updated
        return layer.arrived

    def finish(self, layer: HostLayer) -> None:
        """Begin what is pending for the layer, and wait for the CPU's update if there is one."""
        if layer.update is not None:
            self._begin_update(layer)
        self.thread.wait(layer.index)

    def settle(self, layer: HostLayer) -> None:
        """Let nothing that is queued touch the layer's host memory any more."""
        self.finish(layer)
        slot = self.weights.of(layer.index)
        if self.weights.holds[slot] == layer.index:
            self._arrive(layer.index)
            wait_for(self.weights.filled[slot])

    def drain(self) -> None:
        """Wait for all updates, and for weights on their way to the host."""
        for layer in self.layers.values():
            self.finish(layer)
        for layer in self.layers.values():
            wait_for(layer.left)

    def device_tensors(self) -> list[Tensor]:
        waiting = [piece for layer in self.layers.values() for piece in layer.waiting or ()]
        return [*self.weights.flat, *self.grads.flat, *waiting, *self.travel.device_tensors()]
