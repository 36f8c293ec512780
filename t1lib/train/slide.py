"""Mode `slide`: the layers' weights, gradients and optimizer state live on the host; the device holds a few at a time.

One step, for layer i (T1M1 §3.1, SlideFormer arXiv:2603.16428; here with everything overlapped):

    forward   weights i come in | layer i computes, keeping only its input
    backward  weights i come in | layer i computes again, then its gradients | gradients i leave | the CPU updates i

Each column is a lane: while layer i computes, weights of the next layer come in, gradients of the last one leave, and
the CPU updates the one before. The lanes are ordered by events on the device and by one wait a layer on the host: a
layer's weights are not sent before its update is done, so no stale weight is ever read.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.measure.memory import pinned_empty
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.optim import Updater
from t1lib.train.streams import HostPool, Lane, Layout, Slots, UpdateWorker
from t1lib.train.trainer import Trainer


class SlideTrainer(Trainer):
    """Streams the layers. Beyond `Trainer`'s arguments:

    slots            device buffers for weights; 2 are enough to send one layer while another computes
    grad_slots       device buffers for gradients
    host_grads       pinned host buffers for gradients that wait for their update
    overlap_in       weights of the next layer come in while this one computes (else just before it)
    overlap_out      gradients leave while the next layer computes (else before it does)
    overlap_update   the CPU updates a layer while the device goes on (else the step waits for it)
    embedding        where a frozen embedding is looked up, "host" or "device"; a trained one is on the device

    Embedding, norm and head, when they train, stay on the device and are updated there.
    """

    mode = "slide"

    def __init__(
        self, model: PreTrainedModel, *, slots: int = 2, grad_slots: int = 2, host_grads: int = 4,
        overlap_in: bool = True, overlap_out: bool = True, overlap_update: bool = True, embedding: str = "host",
        **common: Any,
    ) -> None:  # fmt: skip
        for name, value in (("slots", slots), ("grad_slots", grad_slots), ("host_grads", host_grads)):
            require(value >= 1, f"{name}={value}; allowed: 1 or more")
        require(embedding in ("host", "device"), f"embedding {embedding!r}; allowed: host, device")
        enough = slots >= 2 or overlap_in is False
        require(enough, f"slots={slots} cannot overlap; allowed: 2 or more, or overlap_in=False")
        self.overlap_in, self.overlap_update, self.overlap_out = overlap_in, overlap_update, overlap_out
        self.slots, self.grad_slots, self.host_grads, self._embedding = slots, grad_slots, host_grads, embedding
        super().__init__(model, **common)

    # -- where things live -----------------------------------------------------------------------------------------

    def _place(self) -> None:
        self._refuse_dropout()
        layers = self.parts.layers
        self.layout = Layout(layers)
        self._host_flat, self._host_views = [], []
        for layer in layers:
            flat = pinned_empty(self.layout.numel, self.layout.dtype, self.device).zero_()
            views = self.layout.views(flat)
            for name, param in layer.named_parameters():
                views[name].copy_(param.data)
                param.data = views[name]
            self._host_flat.append(flat)
            self._host_views.append(views)
        for module in self._resident_modules():
            module._apply(lambda t: t.to(self.device), recurse=False)
        for module in layers.modules():  # of the layers, only buffers stay on the device
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        self._make_pipeline()

    def _resident_modules(self) -> list[nn.Module]:
        """Modules outside the layers that the device needs: all but a frozen embedding or head that it never uses."""
        parts, spare = self.parts, set()
        if self.train == "layers" and self.loss == "mean_square":
            spare.add(parts.head)
        if self.train == "layers" and self._embedding == "host" and (self.loss == "mean_square" or not parts.tied):
            spare.add(parts.embed)
        outside = set(self.model.modules()) - set(parts.layers.modules()) - spare
        return [m for m in self.model.modules() if m in outside]

    def _make_pipeline(self) -> None:
        self._weights = Slots(self.slots, self.layout, self.device)
        self._grads = Slots(self.grad_slots, self.layout, self.device)
        self._host_grads = HostPool(self.host_grads, self.layout, self.device)
        self._compute_lane = Lane(self.device, own_stream=False)
        self._in_lane = Lane(self.device, own_stream=self.overlap_in)
        self._out_lane = Lane(self.device, own_stream=self.overlap_out)
        self._worker = UpdateWorker()
        # Updates run one after the other, so one buffer for gradients widened to float32 serves all layers.
        widen = self.spec.master_weights and self.layout.dtype != torch.float32
        scratch = torch.empty(self.layout.numel) if widen else None
        self._updaters = [Updater(views, self.spec, scratch) for views in self._host_views]
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)

    def _refuse_dropout(self) -> None:
        for name, value in self.model.config.to_dict().items():
            require(
                not (name.endswith(("dropout", "pdrop")) and value),
                f"the model's {name} is {value}: slide computes layers twice and allows only 0",
            )

    def _resident_trainable(self) -> dict[str, nn.Parameter]:
        streamed = {id(p) for p in self.parts.layers.parameters()}
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in streamed}

    # -- the schedule ----------------------------------------------------------------------------------------------

    def _run_layer(self, index: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        return _StreamedLayer.apply(hidden, self._anchor, self, index, kwargs)

    def layer_forward(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Layer `index` without a graph; then the slot it leaves takes the layer that comes next into it."""
        self._bind(index)
        out = self._compute(index, hidden, kwargs)
        if index == 0 and self.overlap_in:
            for early in range(1, min(self.slots, len(self.parts.layers))):
                self._fetch(early)
        self._release(index, following=index + self.slots)
        return out

    def layer_backward(self, index: int, hidden: Tensor, grad_out: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Layer `index` again with a graph; its gradients go to a gradient slot, to the host and into the update."""
        self._bind(index)
        slot = self._grads.of(index)
        self._compute_lane.after(self._grads.freed[slot])
        self._grads.flat[slot].zero_()
        for name, param in self.parts.layers[index].named_parameters():
            param.grad = self._grads.views[slot][name]
        with torch.enable_grad():
            x = hidden.detach().requires_grad_(hidden.requires_grad)
            out = self._compute(index, x, kwargs)
        with self.trace.span("compute", "backward", index):
            torch.autograd.backward(out, grad_out)
        self._grads.filled[slot] = self._compute_lane.mark()
        self._release(index, following=index - self.slots)
        self._send_gradients(index, slot)
        return x.grad

    def _bind(self, index: int) -> None:
        """Point the layer's parameters at its slot, filled when the device comes to use them."""
        slot = self._weights.of(index)
        if self._weights.holds[slot] != index:
            self._fetch(index)
        self._compute_lane.after(self._weights.filled[slot])
        for name, param in self.parts.layers[index].named_parameters():
            param.data = self._weights.views[slot][name]

    def _release(self, index: int, following: int) -> None:
        """Point the parameters back at the host; let the slot's next layer come in once the device has left it."""
        slot = self._weights.of(index)
        for name, param in self.parts.layers[index].named_parameters():
            param.data, param.grad = self._host_views[index][name], None
        self._weights.freed[slot] = self._compute_lane.mark()
        if self.overlap_in and 0 <= following < len(self.parts.layers):
            self._fetch(following)

    def _fetch(self, index: int) -> None:
        """Queue the copy of the layer's weights into its slot."""
        self._worker.wait(index)
        slot, lane = self._weights.of(index), self._in_lane
        lane.after(self._weights.freed[slot])
        phase = "weights again" if self._in_backward else "weights"
        with lane.active(), self.trace.span("in", phase, index, lane.stream):
            self._weights.flat[slot].copy_(self._host_flat[index], non_blocking=True)
        self._weights.filled[slot], self._weights.holds[slot] = lane.mark(), index

    def _send_gradients(self, index: int, slot: int) -> None:
        """Queue the copy of the gradients to the host, and the update that follows it."""
        held, lane = self._host_grads.take(), self._out_lane
        lane.after(self._grads.filled[slot])
        with lane.active(), self.trace.span("out", "gradients", index, lane.stream):
            self._host_grads.buffers[held].copy_(self._grads.flat[slot], non_blocking=True)
        self._grads.freed[slot] = arrived = lane.mark()
        weights_slot = self._weights.of(index)
        if self._weights.holds[weights_slot] == index:
            self._weights.holds[weights_slot] = None  # out of date from here on
        self._worker.submit(index, partial(self._update_layer, index, held, arrived, self.trace))
        if not self.overlap_update:
            self._worker.wait(index)

    def _update_layer(
        self, index: int, held: int, arrived: "torch.cuda.Event | None", trace: Trace | NoTrace
    ) -> None:
        """On the worker's thread: wait for the gradients, update the layer on the host, give the buffer back."""
        try:
            if arrived is not None:
                arrived.synchronize()
            with trace.host_span("update", "update", index):
                self._updaters[index].step(self._host_grads.views[held])
        finally:
            self._host_grads.give(held)

    # -- accounting and checkpoints --------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        rest = [t for m in self._resident_modules() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        return [*rest, *self._weights.flat, *self._grads.flat, *self._rest.state_tensors()]

    def streamed_bytes(self) -> int:
        """Bytes of one pass of all layers' weights, which is also that of all their gradients."""
        return len(self._host_flat) * self._host_flat[0].nbytes

    def drain(self) -> None:
        """Wait for the updates that still run; a step itself does not."""
        self._worker.drain()

    def state_dict(self) -> dict[str, Any]:
        self.drain()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drain()
        super().load_state_dict(state)
        self._weights.holds = [None] * len(self._weights.holds)

    def _named_updaters(self) -> list[tuple[str, Updater]]:
        names = {id(layer): name for name, layer in self.model.named_modules()}
        layers = zip(self.parts.layers, self._updaters, strict=True)
        return [*super()._named_updaters(), *((names[id(layer)] + ".", updater) for layer, updater in layers)]

    def close(self) -> None:
        self.drain()
        self._worker.close()
        super().close()


class _StreamedLayer(torch.autograd.Function):
    """A streamed layer as a node of the model's graph; the anchor makes it one even if its input has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, trainer: SlideTrainer, index: int, kwargs: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.trainer, ctx.index, ctx.kwargs = trainer, index, kwargs
        return trainer.layer_forward(index, hidden, kwargs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        return ctx.trainer.layer_backward(ctx.index, hidden, grad_out, ctx.kwargs), None, None, None, None
