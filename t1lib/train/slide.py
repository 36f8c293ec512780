"""Mode `slide`: the layers' weights, gradients and optimizer state live on the host; the device holds a few at a time.

One step, for layer i (T1M1 §3.1, SlideFormer arXiv:2603.16428; here with everything overlapped):

    forward   weights i come in | layer i computes, keeping only its input
    backward  weights i come in | layer i computes again, then its gradients | gradients i leave | the CPU updates i

Each column is a lane: while layer i computes, weights of the next layer come in, gradients of the last one leave, and
the CPU updates the one before. The lanes are ordered by events on the device and by one wait a layer on the host: a
layer's weights are not sent before its update is done, so no stale weight is ever read.
"""

import math
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.measure.memory import pinned_empty
from t1lib.measure.timing import NoTrace, PhaseTimer, Trace
from t1lib.train.optim import Scratch, Updater
from t1lib.train.streams import HostPool, Lane, Layout, Slots, UpdateWorker
from t1lib.train.trainer import Piece, Trainer, norms_of


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
        layers = self.parts.layers
        trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        frozen = not self.parts.embed.weight.requires_grad
        self._lowest = min(trained, default=len(layers)) if frozen else 0  # below it nobody wants a gradient
        self._grad_layout = Layout([layers[i] for i in trained], trained_only=True)
        self._weights = Slots(self.slots, self.layout, self.device)
        self._grads = Slots(self.grad_slots, self._grad_layout, self.device)
        waiting = len(trained) if self._holds_gradients() else min(self.host_grads, len(trained))
        self._host_grads = HostPool(waiting, self._grad_layout, self.device)
        self._host_norms = pinned_empty(len(layers), torch.float32, self.device)
        self._compute_lane = Lane(self.device, own_stream=False)
        self._in_lane = Lane(self.device, own_stream=self.overlap_in)
        self._out_lane = Lane(self.device, own_stream=self.overlap_out)
        self._worker = UpdateWorker()
        self._coming: dict[int, threading.Event] = {}
        self._waiting: list[tuple[int, int]] = []  # layers and their gradients, until the norm of all is known
        names = {id(layer): name for name, layer in self.model.named_modules()}
        self._names = [names[id(layer)] for layer in layers]
        scratch = Scratch()  # updates run one after the other
        self._updaters = [
            Updater({n: views[n] for n, _ in self._trained(i)}, self.spec, scratch)
            for i, views in enumerate(self._host_views)
        ]

    def _holds_gradients(self) -> bool:
        """Whether no layer may be updated before the gradients of all are known."""
        return self.max_grad_norm is not None or self.nonfinite == "skip"

    def _trained(self, index: int) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.parts.layers[index].named_parameters() if p.requires_grad]

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

    def _arguments(self, embedded: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
        """What the model's own forward gives the first layer, and each layer beside its input: masks, rotations, …

        The forward is run with layers and norm that hand on what they get, and watched: a model that does something
        between layers or after the norm cannot be streamed.
        """
        seen: list[tuple[Tensor, dict[str, Any]]] = []

        def layer(hidden: Tensor, **kwargs: Any) -> Tensor:
            seen.append((hidden, kwargs))
            return hidden

        own = [(m, m.__dict__.get("forward")) for m in (*self.parts.layers, self.parts.norm)]
        try:
            for module, _ in own[:-1]:
                module.forward = layer
            self.parts.norm.forward = lambda hidden: hidden
            out = self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state
        finally:
            for module, forward in own:
                module.__dict__.pop("forward") if forward is None else setattr(module, "forward", forward)
        first = seen[0][0]
        plain = len(seen) == len(self.parts.layers) and out is first and all(hidden is first for hidden, _ in seen)
        require(plain, "the model computes something between its layers: slide cannot run them one at a time")
        return first, [kwargs for _, kwargs in seen]

    def _through_layers(
        self, hidden: list[Tensor], kwargs: list[list[dict[str, Any]]], keep: bool
    ) -> list[list[Tensor]]:
        """All pieces through layer after layer, weights coming in once; inputs of each layer if `keep`, then outputs.

        `hidden` by piece, `kwargs` by piece and layer. The slot that a layer leaves takes the one that comes next.
        """
        last, inputs = len(self.parts.layers) - 1, []
        for index in range(last + 1):
            self._bind(index)
            inputs = [*inputs, hidden] if keep else [hidden]
            hidden = [self._compute(index, x, kw[index]) for x, kw in zip(hidden, kwargs, strict=True)]
            if index == 0 and self.overlap_in:
                for early in range(1, min(self.slots, last + 1)):
                    self._fetch(early)
            self._release(index, following=index + self.slots)
        return [*inputs, hidden]

    def _losses(self, pieces: list[Piece], timer: PhaseTimer) -> Iterator[Tensor]:
        hidden, kwargs = zip(*(self._arguments(self._embed(piece)) for piece in pieces), strict=True)
        *_, hidden = self._through_layers(list(hidden), list(kwargs), keep=False)
        timer.mark("forward")
        for x, piece in zip(hidden, pieces, strict=True):
            yield self._loss(self.parts.norm(x), piece, timer)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        embeddings, kwargs = [], []
        for piece in pieces:
            embedded = self._embed(piece)
            hidden, arguments = self._arguments(embedded)
            embeddings.append((hidden, hidden.detach().requires_grad_(hidden.requires_grad)))
            kwargs.append(arguments)
        with torch.no_grad():
            *inputs, hidden = self._through_layers([leaf for _, leaf in embeddings], kwargs, keep=True)
        timer.mark("forward")
        total, grads = torch.zeros((), device=self.device), []
        for k, piece in enumerate(pieces):
            x = hidden[k].detach().requires_grad_()
            loss = self._loss(self.parts.norm(x), piece, timer)
            total += loss.detach()
            loss.backward()
            timer.mark("head_backward")
            grads.append(x.grad)
            hidden[k] = None
        self._in_backward = True
        try:
            for index in reversed(range(self._lowest, len(inputs))):
                grads = self._layer_backward(index, inputs.pop(), grads, kwargs)
        finally:
            self._in_backward = False
        for (_, leaf), grad in zip(embeddings, grads, strict=True):
            leaf.grad = grad
        self._embeddings_backward(embeddings)
        timer.mark("backward")
        return total

    def _layer_backward(
        self, index: int, inputs: list[Tensor], grads: list[Tensor], kwargs: list[list[dict[str, Any]]]
    ) -> list[Tensor | None]:
        """Layer `index` again with a graph, piece by piece; gradients go to a slot, to the host and into the update.

        Returns the gradients of its inputs; the first layer's only where the embedding wants them.
        """
        self._bind(index)
        slot = self._grads.of(index)
        self._compute_lane.after(self._grads.freed[slot])
        self._grads.flat[slot].zero_()
        trained = dict(self._trained(index))
        for name, param in trained.items():
            param.grad = self._grads.views[slot][name]
        onward = []
        for hidden, grad_out, kw in zip(inputs, grads, kwargs, strict=True):
            with torch.enable_grad():
                x = hidden.detach().requires_grad_(index > self._lowest or hidden.requires_grad)
                out = self._compute(index, x, kw[index])
            if out.requires_grad:
                with self.trace.span("compute", "backward", index):
                    torch.autograd.backward(out, grad_out)
            onward.append(x.grad)
        norm = self._gather_norms(index, slot) if trained else None
        self._grads.filled[slot] = self._compute_lane.mark()
        self._release(index, following=index - self.slots)
        if norm is not None:
            self._send_gradients(index, slot, norm)
        return onward
    def _bind(self, index: int) -> None:
        """Point the layer's parameters at its slot, filled when the device comes to use them."""
        slot = self._weights.of(index)
        if self._weights.holds[slot] != index:
            self._fetch(index)
        if index in self._coming:
            self._coming.pop(index).wait()
        self._worker.check()
        self._compute_lane.after(self._weights.filled[slot])
        for name, param in self.parts.layers[index].named_parameters():
            param.data = self._weights.views[slot][name]

    def _release(self, index: int, following: int) -> None:
        """Point the parameters back at the host; let the slot's next layer come in once the device has left it."""
        slot = self._weights.of(index)
        for name, param in self.parts.layers[index].named_parameters():
            param.data, param.grad = self._host_views[index][name], None
        self._weights.freed[slot] = self._compute_lane.mark()
        lowest = self._lowest if self._in_backward else 0
        if self.overlap_in and lowest <= following < len(self.parts.layers):
            self._fetch(following)

    def _fetch(self, index: int) -> None:
        """Let the layer's weights come into its slot: now, or on the worker's thread as soon as they are updated."""
        self._weights.holds[self._weights.of(index)] = index
        queued = self._coming[index] = threading.Event()
        phase = "weights again" if self._in_backward else "weights"
        self._worker.then(index, partial(self._copy_in, index, phase, queued, self.trace), queued)

    def _copy_in(self, index: int, phase: str, queued: threading.Event, trace: Trace | NoTrace) -> None:
        slot, lane = self._weights.of(index), self._in_lane
        lane.after(self._weights.freed[slot])
        with lane.active(), trace.span("in", phase, index, lane.stream):
            self._weights.flat[slot].copy_(self._host_flat[index], non_blocking=True)
        self._weights.filled[slot] = lane.mark()
        queued.set()

    def _gather_norms(self, index: int, slot: int) -> Tensor:
        """Norm of the layer's gradients; those of its parameters are kept for the norm of all."""
        norms = norms_of({n: self._grads.views[slot][n] for n, _ in self._trained(index)})
        self._norms |= {f"{self._names[index]}.{n}": norm for n, norm in norms.items()}
        return torch.linalg.vector_norm(torch.stack(list(norms.values())).float())

    def _send_gradients(self, index: int, slot: int, norm: Tensor) -> None:
        """Queue the copy of the gradients to the host, and the update that follows it or the end of the backward."""
        held, lane = self._host_grads.take(), self._out_lane
        lane.after(self._grads.filled[slot])
        with lane.active(), self.trace.span("out", "gradients", index, lane.stream):
            self._host_grads.buffers[held].copy_(self._grads.flat[slot], non_blocking=True)
            self._host_norms[index].copy_(norm, non_blocking=True)
        self._grads.freed[slot] = arrived = lane.mark()
        weights_slot = self._weights.of(index)
        if self._weights.holds[weights_slot] == index:
            self._weights.holds[weights_slot] = None  # out of date from here on
        if self._holds_gradients():
            self._waiting.append((index, held))
        else:
            self._submit(index, held, arrived, self._host_norms[index], None)

    def _submit(
        self, index: int, held: int, arrived: "torch.cuda.Event | None", norm: Tensor, scale: Tensor | None
    ) -> None:
        factor = self.schedule(self.steps)
        update = partial(self._update_layer, index, held, arrived, norm, scale, factor, self.trace)
        self._worker.submit(index, update)
        if not self.overlap_update:
            self._worker.wait(index)

    def _update_layer(
        self, index: int, held: int, arrived: "torch.cuda.Event | None", norm: Tensor, scale: Tensor | None,
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
                    self._updaters[index].step(self._host_grads.views[held], factor, by)
        finally:
            self._host_grads.give(held)

    def _update(self) -> Tensor:
        """What is on the device; then the layers that waited for the norm of all, in the order of the next forward."""
        norm = super()._update()
        if self._waiting:
            lane = self._out_lane
            lane.after(self._compute_lane.mark())
            with lane.active():
                both = torch.stack([norm, torch.as_tensor(self._scale, device=self.device)])
                host = pinned_empty(2, torch.float32, self.device).copy_(both, non_blocking=True)
            arrived = lane.mark()
            for index, held in sorted(self._waiting):
                self._submit(index, held, arrived, host[0], host[1])
        self._waiting = []
        return norm

    def _spoiled(self) -> str:
        return super()._spoiled() if self._holds_gradients() else "layers above are updated: go on from a checkpoint"

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
