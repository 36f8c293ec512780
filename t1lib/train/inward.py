"""How weights of layers on the host come to the device: slots, the lane that fills them, and what it waits for."""

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.host_layers import HostLayers
from t1lib.train.ranks import Ranks
from t1lib.train.shared import Landings
from t1lib.train.spec import OptimizerSpec
from t1lib.train.streams import Lane, Mark, Slots, UpdateWorker


class Inward(HostLayers):
    """The half of a `Pipeline` that brings weights to the device.

    slots        number of device buffers for weights
    overlap_in   whether weights come in while the device computes
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec,
        ranks: Ranks, on_device: Collection[int], slots: int, overlap_in: bool, trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        super().__init__(layers, first, names, device, spec, ranks, on_device)
        self.overlap_in, self._trace = overlap_in, trace
        self.weights = Slots(slots, self.layout, device)
        self.compute, self.inward = Lane(device, own_stream=False), Lane(device, own_stream=overlap_in)
        self.worker = UpdateWorker(device)
        self.landings = None if ranks.alone else Landings(self.memory, len(layers), device)
        self._coming: dict[int, threading.Event] = {}
        self._left: dict[int, Mark] = {}  # marks of when a layer's new weights are back on the host

    def begin(self) -> None:
        """Call before a forward: start copying in the first layers."""
        if self._coming:  # a step was aborted: its copies must not overwrite this step's weights
            for queued in self._coming.values():
                queued.wait()
            self._coming = {}
            self.forget()
        for index in self.streamed[: len(self.weights.flat)]:
            if self.overlap_in and self.weights.holds[self.weights.of(index)] != index:
                self.fetch(index)

    def bind(self, index: int, again: bool = False) -> None:
        """Point the layer's parameters at its slot; the device waits until the slot is filled before it uses them."""
        if index < self.first:
            return
        slot = self.weights.of(index)
        if self.weights.holds[slot] != index:
            self.fetch(index, again)
        if index in self._coming:
            self._coming.pop(index).wait()
        self.check()
        self.compute.after(self.weights.filled[slot])
        for name, param in self.layers[index].named_parameters():
            param.data = self.weights.views[slot][name]

    def buffer(self, index: int) -> Tensor | None:
        """The device buffer that holds the layer's weights while they are bound; None: they always stay there."""
        return None if index < self.first else self.weights.flat[self.weights.of(index)]

    def release(self, index: int, following: int, again: bool = False) -> None:
        """Point the parameters back at the host; layer `following` comes in once the device has left the slot."""
        if index < self.first:
            return
        slot = self.weights.of(index)
        for name, param in self.layers[index].named_parameters():
            param.data, param.grad = self.host_views[index][name], None
        self.weights.freed[slot] = self.compute.mark()
        if self.overlap_in and following in self.streamed:
            self.fetch(following, again)

    def fetch(self, index: int, again: bool = False) -> None:
        """Copy the layer's weights into its slot: now, or on another thread as soon as they are updated.

        again: whether this is the second time in this step
        """
        self.weights.holds[self.weights.of(index)] = index
        queued = self._coming[index] = threading.Event()
        phase = "weights again" if again else "weights"
        copy = partial(self._copy_in, index, phase, queued, self._trace())
        try:
            (self.landings or self.worker).then(index, copy, queued)
        except BaseException:
            queued.set()  # nothing will fill the slot, so nobody may wait for it
            raise

    def check(self) -> None:
        """Raise the error of an update or a copy that failed on another thread."""
        self.worker.check()
        if self.landings is not None:
            self.landings.check()

    def _copy_in(self, index: int, phase: str, queued: threading.Event, trace: Trace | NoTrace) -> None:
        slot, lane = self.weights.of(index), self.inward
        lane.after(self.weights.freed[slot])
        lane.after(self._left.get(index))
        with lane.active(), trace.span("in", phase, index, lane.stream):
            self.weights.flat[slot].copy_(self.host_flat[index], non_blocking=True)
        self.weights.filled[slot] = lane.mark()
        queued.set()

    def forget(self) -> None:
        """Mark what the slots hold as out of date."""
        self.weights.holds = [None] * len(self.weights.holds)
