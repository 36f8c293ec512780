"""When each layer's weights come to the device, when its gradients leave, and when it is updated.

    forward    weights i come in | layer i computes
    backward   weights i come in | layer i is recomputed, then its gradients | gradients i leave
    updates    the state of layer i comes in, is updated and leaves during the next forward, ahead of the layer; or the
               CPU updates the layer. In the backward, if nothing has to wait for the last gradient.

Each column is a lane, and all lanes overlap. A layer's weights are not sent before its update is done, and what a slot
holds is known at any time, so stale weights are never read.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from t1lib.memory import pinned_zeros
from t1lib.timing import NoTrace
from t1lib.train.lanes import Lane, Mark, UpdateThread, uninterrupted, wait_for
from t1lib.train.layers import HostLayer, Layout
from t1lib.train.narrow import Scratch
from t1lib.train.travel import Span, Travel, Traveller, Update
from t1lib.train.update import Precision, Rule, norms_of, update


class Slots:
    """`count` flat device buffers that hold one layer each, used in turn: layer i goes to slot i mod count."""

    def __init__(self, count: int, layout: Layout, device: torch.device) -> None:
        self.flat = [torch.zeros(layout.numel, dtype=layout.dtype, device=device) for _ in range(count)]
        self.views = [layout.views(flat) for flat in self.flat]
        self.holds: list[int | None] = [None] * count  # index of the layer in each slot
        self.filled: list[Mark] = [None] * count  # marks when the content is complete
        self.freed: list[Mark] = [None] * count  # marks when the content is no longer needed

    def of(self, layer: int) -> int:
        return layer % len(self.flat)


class Schedule:
    """Moves the weights, gradients and optimizer state of `layers`, by index.

    slots, grad_slots   device buffers for weights and for gradients
    on_host             indices of the layers that the CPU updates
    in_backward         layers are updated as soon as their gradients are complete
    rules               the parameter groups' hyperparameters; asked for when an update begins
    overlap             False: nothing runs beside the computation (to measure what the overlap is worth)
    trace               returns what records the spans of work
    guests              parameters outside the layers whose state travels, too
    trains              False: only forwards are run, so that neither state nor gradients need room
    """

    def __init__(
        self, layers: dict[int, HostLayer], layout: Layout, device: torch.device, *, slots: int, grad_slots: int,
        on_host: set[int], in_backward: bool, precision: Precision, rules: Callable[[], list[Rule]], overlap: bool,
        trace: Callable[[], NoTrace], guests: Sequence[Tensor] = (), trains: bool = True,
    ) -> None:  # fmt: skip
        self.layers, self.layout, self.device, self.on_host = layers, layout, device, on_host
        self.in_backward, self._rules, self.overlap, self._trace = in_backward, rules, overlap, trace
        self.weights = Slots(min(slots, len(layers)), layout, device)
        trained = [i for i, layer in layers.items() if layer.trained and trains]
        self.grads = Slots(min(grad_slots, len(trained)), layout, device)
        self.compute, self.inward, self.outward = Lane(device, False), Lane(device, overlap), Lane(device, overlap)
        self.thread = UpdateThread(device)
        self._coming: dict[int, threading.Event] = {}
        self._following = -1  # layer to fetch into a slot once the update that reads it is queued
        self._reached: dict[int, set[str]] = {}  # parameters that got a gradient, by the kind of layer
        self._scratch = Scratch()  # the update thread's
        self._sent: tuple[Tensor, Tensor, Mark] | None = None  # the gradients' factor, its copy on the host, its mark
        kinds = self._make_state(trained, precision)
        whole = replace(precision, masters="whole") if precision.masters == "split" else precision
        if 0 < len(on_host) < len(trained):  # joining and splitting masters takes the CPU longer than moving them
            self._make_state([i for i in trained if i in on_host], whole)
        for rule in rules() if guests else ():
            kinds |= precision.kinds(guests[0], rule)
        there = [i for i in trained if i not in on_host]
        # Updates that need nothing but weights and gradients are made in the slots, and the new weights leave.
        self.stateless = in_backward and not kinds
        self.has_state = bool(kinds)
        travels = (there and not self.stateless) or guests
        kinds = {"weight": layout.dtype, **kinds} | ({} if in_backward else {"grad": layout.dtype})
        numel = max([layout.numel, *(guest.numel() for guest in guests)])
        self.travel = Travel(device, kinds if travels else {}, numel, trace)
        self.travellers = {i: Traveller(layers[i].state, layers[i].flat, i, self.travel.size) for i in there}
        self._master = "master" in kinds
        for layer in layers.values():
            layer.settle, layer.keeps_gradients = self.settle, not in_backward

    def _make_state(self, trained: list[int], precision: Precision) -> dict[str, torch.dtype]:
        """Give each trained layer its optimizer state, flat on the host; returns the state's keys and dtypes."""
        kinds: dict[str, torch.dtype] = {}
        for rule in self._rules() if trained else ():
            kinds |= precision.kinds(self.layers[trained[0]].flat, rule)
        for index in trained:
            layer = self.layers[index]
            layer.state.clear()
            for key, dtype in kinds.items():
                layer.state[key] = pinned_zeros(self.layout.numel, dtype, self.device)
            if "master" in kinds:
                layer.state["master"].copy_(layer.flat)
        return kinds

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
        queued = threading.Event()
        phase = "weights again" if again else "weights"
        try:
            self.weights.holds[slot], self._coming[index] = index, queued
            self.thread.then(index, partial(self._copy_in, index, phase, queued, self._trace()))
        except BaseException:
            self.weights.holds[slot] = None
            self._coming.pop(index, None)
            raise

    def _copy_in(self, index: int, phase: str, queued: threading.Event, trace: NoTrace) -> None:
        slot, lane = self.weights.of(index), self.inward
        lane.after(self.weights.freed[slot], self.layers[index].left)
        with lane.active(), trace.span("in", phase, index, lane.stream):
            self.weights.flat[slot].copy_(self.layers[index].flat, non_blocking=True)
        self.weights.filled[slot] = lane.mark()
        queued.set()

    def bind(self, index: int, again: bool = False) -> None:
        """Point the layer's parameters at its slot; the device waits until the slot is filled before it uses them."""
        slot, layer = self.weights.of(index), self.layers[index]
        if layer.touched:
            self._take_over_weights(layer)
        if self.weights.holds[slot] != index:
            self.fetch(index, again)
        self._arrive(index)
        self.thread.check()
        self.compute.after(self.weights.filled[slot])
        layer.bind(self.weights.views[slot])

    def _take_over_weights(self, layer: HostLayer) -> None:
        """Take over what may have been written to the host's weights: masters follow them, and no slot holds them."""
        self.finish(layer)
        wait_for(layer.left)
        layer.take_over()
        layer.touched, slot = False, self.weights.of(layer.index)
        if self.weights.holds[slot] == layer.index:
            self._arrive(layer.index)
            self.weights.holds[slot] = None
        if "master" in layer.state:
            master = layer.state["master"]
            torch.where(master.to(layer.flat.dtype) == layer.flat, master, layer.flat.float(), out=master)

    def _arrive(self, index: int) -> None:
        queued = self._coming.get(index)
        while queued is not None and not queued.wait(0.2):
            self.thread.check()
        self._coming.pop(index, None)

    def buffer(self, index: int) -> Tensor:
        """The device buffer that holds the layer's weights while they are bound."""
        return self.weights.flat[self.weights.of(index)]

    def place(self, index: int, gradients: bool = False) -> tuple[Any, ...]:
        """Where the layer's weights and gradients lie on the device: equal for layers that take turns there."""
        trained = gradients and self.layers[index].trained
        return self.weights.of(index), self.grads.of(index) if trained else None

    def release(self, index: int, following: int, again: bool = False) -> None:
        """Point the parameters back at the host; layer `following` comes in once the device has left the slot."""
        slot = self.weights.of(index)
        self.layers[index].unbind()
        self.weights.freed[slot] = self.compute.mark()
        reads = again and self._reads_slot(index)
        self._following = following if reads and self.overlap else -1
        if self.overlap and not reads and following in self.layers and self.weights.holds[slot] != following:
            self.fetch(following, again)

    def _reads_slot(self, index: int) -> bool:
        """Whether the layer is updated right after its backward and reads its weights from their slot, because its
        state has no master to rebuild them from."""
        return self.in_backward and index in self.travellers and not self.stateless and not self._master

    # -- gradients leave -----------------------------------------------------------------------------------------------

    def want_gradients(self, index: int) -> None:
        """Give the layer's parameters a slot for their gradients: zeroed, or with what has been summed so far."""
        layer = self.layers[index]
        if not layer.trained:
            return
        slot, layer.reached = self.grads.of(index), set()
        self.compute.after(self.grads.freed[slot])
        if layer.has_gradients:
            layer.see_gradients()
            self.grads.flat[slot].copy_(layer.grads, non_blocking=True)
            for name in layer.absent:
                self.grads.views[slot][name].zero_()
        else:
            self.grads.flat[slot].zero_()
        for name, param in layer.params.items():
            param.grad = self.grads.views[slot][name]

    def gradients_done(self, index: int, graphed: bool) -> None:
        """Call when the layer's gradients are complete, before `release`: their norms are computed, and updates that
        need no state are made. graphed: a CUDA graph made them, and may have called no hooks"""
        layer = self.layers[index]
        if not layer.trained:
            return
        slot = self.grads.of(index)
        if graphed and not layer.reached:  # then it reaches what it did when a layer of this kind ran eagerly
            layer.reached = set(self._reached[layer.kind])
        self._reached[layer.kind] = layer.reached
        layer.norms = norms_of(list(self.grads.views[slot].values()), exact=self.device.type == "cpu")
        if self.stateless and index in self.travellers:
            held, rules = self.weights.of(index), self._rules()
            layer.absent -= layer.reached
            with self._trace().span("compute", "update", index):
                for at, group, count in layer.spans():
                    update([self.weights.flat[held][at]], [self.grads.flat[slot][at]], [{}], rules[group], count)
                self.grads.flat[slot].copy_(self.weights.flat[held])
        self.grads.filled[slot] = self.compute.mark()

    def send(self, index: int) -> None:
        """Call after `release`: gradients, or new weights, leave for the host; in the backward, an update begins."""
        layer = self.layers[index]
        if not layer.trained:
            return
        slot, lane, there = self.grads.of(index), self.outward, index in self.travellers
        layer.absent -= layer.reached
        if self.in_backward and there and not self.stateless:
            known = (self.grads.filled[slot],)
            layer.update = Update(self.grads.flat[slot], layer.spans(), self._rules(), 1.0, known, layer.whole)
            layer.absent = set(layer.params)
            self.grads.freed[slot] = self._begin_update(layer)
            if self._following in self.layers:
                self.fetch(self._following, again=True)
            return
        to = layer.flat if self.stateless and there else layer.room_for_gradients()
        lane.after(self.grads.filled[slot], layer.arrived)
        what = "weights" if to is layer.flat else "gradients"
        with lane.active(), self._trace().span("out", what, index, lane.stream):
            to.copy_(self.grads.flat[slot], non_blocking=True)
        self.grads.freed[slot] = arrived = lane.mark()
        if to is layer.flat:
            layer.left, layer.absent = arrived, set(layer.params)
            return
        layer.arrived, layer.scale = arrived, None
        if self.in_backward:
            self.begin(layer, self._rules())
            layer.absent = set(layer.params)
        if not self.overlap:
            self.compute.after(arrived)

    # -- updates -------------------------------------------------------------------------------------------------------

    def begin(self, layer: HostLayer, rules: list[Rule]) -> None:
        """Begin the layer's update, whose gradients wait on the host: the CPU starts when they have arrived; on the
        device it waits until the layer is fetched."""
        self.finish(layer)
        if layer.touched:
            self._take_over_weights(layer)
        slot, scale = self.weights.of(layer.index), 1.0 if layer.scale is None else layer.scale
        if layer.index in self.travellers:
            known = layer.arrived, self.compute.mark()
            layer.update = Update(layer.grads, layer.spans(), rules, scale, known, layer.whole)
        else:
            if self.weights.holds[slot] == layer.index:
                self.weights.holds[slot] = None  # stale from here on
            arguments = layer, layer.spans(), rules, layer.arrived, *self._on_host(scale), self._trace()
            if not layer.state.keys() & {"master", "low"}:
                layer.scale = None  # this update multiplies the gradients themselves
            self.thread.submit(layer.index, partial(self._update_on_host, *arguments))
        if not self.overlap:
            self.finish(layer)

    def _on_host(self, scale: Tensor | float) -> tuple[Tensor | float, Mark]:
        """A factor for the CPU's updates, and the mark at which it has arrived. All layers have the same factor."""
        if not (isinstance(scale, Tensor) and scale.is_cuda):
            return scale, None
        if self._sent is None or self._sent[0] is not scale:
            lane, host = self.outward, pinned_zeros(1, torch.float32, self.device)
            lane.after(self.compute.mark())
            with lane.active():
                host.copy_(lane.uses(scale).view(1), non_blocking=True)
            self._sent = scale, host, lane.mark()
        return self._sent[1:]

    def _update_on_host(
        self, layer: HostLayer, spans: list[Span], rules: list[Rule], arrived: Mark, scale: Tensor | float, mark: Mark,
        trace: NoTrace,
    ) -> None:  # fmt: skip
        """On the update thread."""
        wait_for(arrived)
        wait_for(mark)
        with trace.host_span("update", "update", layer.index):
            by = float(scale) if self.device.type == "cuda" else scale
            for at, group, count in spans:
                state = {key: flat[at] for key, flat in layer.state.items()}
                update([layer.flat[at]], [layer.grads[at]], [state], rules[group], count, by, self._scratch)

    def _begin_update(self, layer: HostLayer) -> Mark:
        """Queue the pending update on the device, onto the layer's slot if it holds this layer; returns the mark at
        which its gradients have been read. Queuing one takes the host a millisecond: to queue all at once would leave
        the device idle."""
        with uninterrupted():
            return self._queue_update(layer)

    def _queue_update(self, layer: HostLayer) -> Mark:
        given, index = layer.update, layer.index
        held = self.weights.of(index)
        onto = self.weights.flat[held] if self.weights.holds[held] == index else None
        there = onto is not None and self._reads_slot(index)
        if onto is not None:
            self._arrive(index)
            given = given._replace(known=(*given.known, self.weights.freed[held], self.weights.filled[held]))
        marks = self.travel.update(self.travellers[index], given, layer.left, onto, there)
        layer.left, layer.update, layer.arrived = marks.left, None, marks.read
        if onto is not None:
            self.weights.filled[held] = self.weights.freed[held] = marks.updated
        if not self.overlap:
            self.compute.after(marks.left)
        return marks.read

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

    def start(self) -> None:
        """Call after the updates have begun: the first layers' turn comes next."""
        for index in list(self.layers)[: len(self.weights.flat)] if self.overlap else ():
            if self.layers[index].update is not None or self.weights.holds[self.weights.of(index)] != index:
                self.fetch(index)

    def drain(self) -> None:
        """Wait for all updates, and for weights on their way to the host."""
        for layer in self.layers.values():
            self.finish(layer)
        self.thread.drain()
        for layer in self.layers.values():
            wait_for(layer.left)

    def device_tensors(self) -> list[Tensor]:
        return [*self.weights.flat, *self.grads.flat, *self.travel.device_tensors()]
