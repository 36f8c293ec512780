"""Mode `slide`: the layers' weights, gradients and optimizer state live on the host; the device holds a few at a time.

One step, for layer i (T1M1 §3.1, SlideFormer arXiv:2603.16428; here with everything overlapped):

    forward   weights i come in | layer i computes, keeping only its input
    backward  weights i come in | layer i computes again, then its gradients | gradients i leave | the CPU updates i

Each column is a lane (`t1lib.train.pipeline`): while layer i computes, weights of the next layer come in, gradients of
the last one leave, and the CPU updates the one before. Of a batch in micro-batches, all go through a layer before the
next one comes: weights and gradients cross the link once a step.
"""

from collections.abc import Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import choose, require
from t1lib.measure.memory import GIB, host_available
from t1lib.measure.timing import PhaseTimer
from t1lib.train.activations import Activations, Saved
from t1lib.train.batch import Piece
from t1lib.train.graphs import GRAPH_TOKENS, LayerGraphs, can_capture
from t1lib.train.models import layer_arguments
from t1lib.train.optim import Updater
from t1lib.train.outer import Outer
from t1lib.train.pipeline import Pipeline
from t1lib.train.placement import choose_by_budget, host_bytes, refuse_dropout, spare_modules, trained_outside
from t1lib.train.streams import HostStore
from t1lib.train.trainer import Trainer, default_device

PLACES = ("host", "device")


class SlideTrainer(Trainer):
    """Streams the layers. Beyond `Trainer`'s arguments:

    slots            device buffers for weights; 2 are enough to send one layer while another computes
    grad_slots       device buffers for gradients
    host_grads       pinned host buffers for gradients that wait for their update; with `max_grad_norm` or
                     nonfinite="skip" there is one a layer, because no update may begin before the last gradient
    resident         how many layers, the first ones, stay on the device with gradients and optimizer state
    keep             how many layers, the last ones, keep their activations: they are not computed again
    inputs           where the other layers' inputs wait for the backward, "device" or "host"
    overlap_in       weights of the next layer come in while this one computes (else just before it)
    overlap_out      gradients leave while the next layer computes (else before it does)
    overlap_update   the CPU updates a layer while the device goes on (else the step waits for it)
    embedding        where a frozen embedding is looked up, "host" or "device"; a trained one is on the device
    outer            where embedding, norm and head, when they train, have their optimizer state and are updated,
                     "device" or "host"; their weights and gradients are on the device (`t1lib.train.outer`)
    graph_tokens     micro-batches of up to so many tokens take streamed layers as CUDA graphs (`t1lib.train.graphs`): a
                     launch a layer, and one for its recomputation with the backward; 0: never
    gpu_memory       bytes, or "2GiB": choose slots, resident, keep, inputs and outer so that steps of `plan_for`
                     (rows, tokens a row) are as fast as fit into it (`t1lib.plan`); `chosen` says what it came to
    """

    mode = "slide"
    _hooks_backward = False  # it runs each layer's backward itself

    def __init__(
        self, model: PreTrainedModel, *, slots: int = 2, grad_slots: int = 2, host_grads: int = 4, resident: int = 0,
        keep: int = 0, inputs: str = "device", overlap_in: bool = True, overlap_out: bool = True,
        overlap_update: bool = True, embedding: str = "host", outer: str = "device",
        graph_tokens: int = GRAPH_TOKENS, gpu_memory: str | int | None = None,
        plan_for: tuple[int, int] | None = None, **common: Any,
    ) -> None:  # fmt: skip
        self.chosen, self.predicted = None, {}
        if gpu_memory is not None:
            own = (slots, resident, keep, inputs, outer) == (2, 0, 0, "device", "device")
            require(own, "gpu_memory chooses slots, resident, keep, inputs and outer: give it or them")
            tokens = graph_tokens if can_capture(default_device(common.get("device"))) else 0
            self.chosen, self.predicted = choose_by_budget(
                model, gpu_memory, plan_for, common | {"embedding": embedding, "graph_tokens": tokens}
            )
            slots, resident, keep, inputs, outer = astuple(self.chosen)
        for name, value in (("slots", slots), ("grad_slots", grad_slots), ("host_grads", host_grads)):
            require(value >= 1, f"{name}={value}; allowed: 1 or more")
        require(graph_tokens >= 0, f"graph_tokens={graph_tokens}; allowed: 0 or more")
        self._graph_tokens = graph_tokens
        layers = model.config.num_hidden_layers
        for name, value in (("resident", resident), ("keep", keep)):
            require(0 <= value <= layers, f"{name}={value}; allowed: 0 to {layers}, the model's layers")
        self._embedding, self._inputs = choose("embedding", embedding, PLACES), choose("inputs", inputs, PLACES)
        self._outer_place = choose("outer", outer, PLACES)
        enough = slots >= 2 or overlap_in is False
        require(enough, f"slots={slots} cannot overlap; allowed: 2 or more, or overlap_in=False")
        self.slots, self.resident, self.keep = slots, resident, keep
        self._pipeline_options = {
            "slots": slots, "grad_slots": grad_slots, "host_grads": host_grads, "overlap_in": overlap_in,
            "overlap_out": overlap_out, "overlap_update": overlap_update,
        }  # fmt: skip
        super().__init__(model, **common)

    # -- where things live -----------------------------------------------------------------------------------------

    def _place(self) -> None:
        refuse_dropout(self.model)
        layers = self.parts.layers
        names = {id(layer): name for name, layer in self.model.named_modules()}
        self._together = self.max_grad_norm is not None or self.nonfinite == "skip"
        need, free = self._host_bytes(), host_available()
        require(need <= free, f"the host has {free / GIB:.1f} GiB to give; slide needs {need / GIB:.1f} GiB of it more")
        self.pipeline = Pipeline(
            layers, self.resident, [names[id(layer)] for layer in layers], self.device, self.spec,
            together=self._together, trace=lambda: self.trace, **self._pipeline_options,
        )  # fmt: skip
        for module in self._resident_modules():
            module._apply(lambda t: t.to(self.device), recurse=False)
        for module in layers.modules():  # of the layers, only buffers stay on the device
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        outer, self._outer = trained_outside(self.model, layers), None
        if self._outer_place == "host" and outer:
            self._outer = Outer(outer, self.parts.embed, self.spec, self.pipeline, trace=lambda: self.trace)
        frozen = not self.parts.embed.weight.requires_grad
        trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        self._lowest = min(trained, default=len(layers)) if frozen else 0  # no layer below wants a gradient
        lanes = self.pipeline.compute, self.pipeline.inward, self.pipeline.outward
        store = HostStore(self.device, *lanes) if self._inputs == "host" else None
        self._activations = Activations(len(layers), self.keep, store)
        self._graphs = LayerGraphs(layers) if self._graph_tokens and can_capture(self.device) else None

    def _host_bytes(self) -> int:
        layers = self.parts.layers[self.resident :]
        waiting = len(layers) if self._together else self._pipeline_options["host_grads"]
        outer = trained_outside(self.model, self.parts.layers) if self._outer_place == "host" else {}
        return host_bytes(layers, self.spec, waiting, outer)

    def _resident_modules(self) -> list[nn.Module]:
        """Modules that the device needs: all but streamed layers, and a frozen embedding or head that it never uses."""
        spare = spare_modules(self.parts, self.train, self.loss, self._embedding)
        streamed = {m for layer in self.parts.layers[self.resident :] for m in layer.modules()}
        return [m for m in self.model.modules() if m not in streamed | spare]

    def _resident_trainable(self) -> dict[str, nn.Parameter]:
        elsewhere = self._outer.params if self._outer else {}
        found = trained_outside(self.model, self.parts.layers[self.resident :])
        return {n: p for n, p in found.items() if n not in elsewhere}

    # -- the schedule ----------------------------------------------------------------------------------------------

    def _forward(self, hidden: list[Tensor], kwargs: list[list[dict[str, Any]]], save: bool) -> list[Tensor]:
        """All micro-batches through layer after layer; the slot that a layer leaves takes the one that comes next.

        `kwargs` by micro-batch and layer. save: for a backward
        """
        self.pipeline.begin()
        for index in range(len(self.parts.layers)):
            self.pipeline.bind(index)
            compute = partial(self._compute_piece, index, kwargs)
            if save:
                buffer = partial(self.pipeline.buffer, index)
                hidden = self._activations.run(index, hidden, index > self._lowest, compute, buffer)
            else:
                hidden = [compute(k, x) for k, x in enumerate(hidden)]
            self.pipeline.release(index, index + self.slots)
        return hidden

    def _compute_piece(self, index: int, kwargs: list[list[dict[str, Any]]], k: int, hidden: Tensor) -> Tensor:
        arguments = kwargs[k][index]
        if torch.is_grad_enabled() or not self._has_graph(index, hidden):
            return self._compute(index, hidden, arguments)
        with self.trace.span("compute", "forward", index):
            function = partial(self._call_layer, index)
            return self._graphs.run(index, self.pipeline.place(index), function, hidden, arguments)

    def _has_graph(self, index: int, hidden: Tensor) -> bool:
        few = hidden.shape[:-1].numel() <= self._graph_tokens
        return self._graphs is not None and few and index in self.pipeline.streamed

    def _embed(self, piece: Piece) -> Tensor:
        if self._outer is None:
            return super()._embed(piece)
        embedded, rows, values = self._outer.look_up(piece.ids)
        if values.requires_grad:
            self._looked_up.append((rows, values))
        return embedded

    def _embeddings_backward(self, embeddings: list[tuple[Tensor, Tensor]]) -> None:
        super()._embeddings_backward(embeddings)
        for rows, values in self._looked_up:
            self._outer.add_gradient(rows, values.grad)
        self._looked_up = []

    def _begin(self, pieces: list[Piece]) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
        """Inputs of the first layer and arguments of all layers, by micro-batch."""
        self._looked_up: list[tuple[Tensor, Tensor]] = []
        hidden, kwargs = zip(*(layer_arguments(self.parts, self._embed(piece)) for piece in pieces), strict=True)
        if self._outer is not None:
            self._outer.submit()
        return list(hidden), list(kwargs)

    def _losses(self, pieces: list[Piece], timer: PhaseTimer) -> Iterator[Tensor]:
        outputs = self._forward(*self._begin(pieces), save=False)
        timer.mark("forward")
        if self._outer is not None:
            self._outer.ready()
        for x, piece in zip(outputs, pieces, strict=True):
            yield self._loss(self.parts.norm(x), piece, timer)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        begun, kwargs = self._begin(pieces)
        embeddings = [(hidden, hidden.detach().requires_grad_(hidden.requires_grad)) for hidden in begun]
        hidden = self._forward([leaf for _, leaf in embeddings], kwargs, save=True)
        timer.mark("forward")
        if self._outer is not None:
            self._outer.ready()
        total, grads = torch.zeros((), device=self.device), []
        for k, piece in enumerate(pieces):
            x = hidden[k].detach().requires_grad_()
            hidden[k] = None
            loss = self._loss(self.parts.norm(x), piece, timer)
            total += loss.detach()
            loss.backward()
            timer.mark("head_backward")
            grads.append(x.grad)
        self._in_backward = True
        try:
            for index in reversed(range(self._lowest, len(self.parts.layers))):
                grads = self._layer_backward(index, grads, kwargs)
        finally:
            self._in_backward = False
        for (_, leaf), grad in zip(embeddings, grads, strict=True):
            leaf.grad = grad
        self._embeddings_backward(embeddings)
        timer.mark("backward")
        return total

    def _layer_backward(
        self, index: int, grads: list[Tensor], kwargs: list[list[dict[str, Any]]]
    ) -> list[Tensor | None]:
        """Gradients of the layer's inputs, from those of its outputs; the layer's own leave for the host.

        The layer is computed again where its activations were not kept.
        """
        pipeline = self.pipeline
        saved = self._activations.take(index)
        pipeline.bind(index, again=True)
        pipeline.want_gradients(index)
        onward = [self._piece_backward(index, s, grads[k], kwargs[k][index]) for k, s in enumerate(saved)]
        self._norms |= pipeline.gradients_done(index)
        following = index - self.slots
        pipeline.release(index, following if following >= self._lowest else -1, again=True)
        pipeline.send(index, self.schedule(self.steps))
        return onward

    def _piece_backward(self, index: int, saved: Saved, grad: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        x, out = saved.input, saved.output
        if out is not None:
            return self._gradients(index, x, out, grad)
        wanted = index > self._lowest or x.requires_grad
        if self._has_graph(index, x):
            place, function = self.pipeline.place(index, gradients=True), partial(self._again, index, wanted)
            with self.trace.span("compute", "backward", index):
                return self._graphs.run(index, (*place, wanted), function, x.detach(), grad, kwargs)
        with torch.enable_grad():
            x = x.detach().requires_grad_(wanted)
            out = self._compute(index, x, kwargs)
        return self._gradients(index, x, out, grad)

    def _again(self, index: int, wanted: bool, x: Tensor, grad: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The layer again, and its gradients: those of its weights add up, that of its input is returned if wanted."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(wanted)
            out = self._call_layer(index, x, kwargs)
        torch.autograd.backward(out, grad)
        return x.grad

    def _gradients(self, index: int, x: Tensor, out: Tensor, grad: Tensor) -> Tensor | None:
        if out.requires_grad:
            with self.trace.span("compute", "backward", index):
                torch.autograd.backward(out, grad)
        return x.grad

    def _update(self) -> Tensor:
        """What is on the device; then what waited for the norm of all."""
        if self._outer is not None:
            self._norms |= self._outer.norms()
        norm, factor = super()._update(), self.schedule(self.steps)
        self.pipeline.update_all(norm, self._scale, factor)
        if self._outer is not None:
            self._outer.send(norm, self._scale, factor)
        return norm

    def _may_update(self, norm: Tensor) -> bool:
        return super()._may_update(norm) if self._together else True  # else layers are updated already

    def _spoiled(self) -> str:
        return super()._spoiled() if self._together else "layers above are updated: go on from a checkpoint"

    # -- accounting and checkpoints --------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        rest = [t for m in self._resident_modules() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        return [*rest, *self.pipeline.device_tensors(), *self._rest.state_tensors()]

    def streamed_bytes(self) -> int:
        """Bytes of one pass of all layers' weights, which is also that of all their gradients."""
        return self.pipeline.bytes_a_pass()

    def drain(self) -> None:
        """Wait for the updates that still run; a step itself does not."""
        if self._outer is not None:
            self._outer.ready()
        self.pipeline.drain()

    def state_part(self, part: str) -> dict[str, dict[str, Any]]:
        self.drain()
        return super().state_part(part)

    def load_part(self, part: str, state: dict[str, Any]) -> None:
        self.drain()
        super().load_part(part, state)
        self.pipeline.forget()
        if self._outer is not None:
            self._outer.refresh()

    def _named_updaters(self) -> list[tuple[str, Updater]]:
        layers = [(self.pipeline.names[i], updater) for i, updater in self.pipeline.updaters.items()]
        outer = [("", self._outer.updater)] if self._outer is not None else []
        return [*super()._named_updaters(), *outer, *((name + ".", updater) for name, updater in layers)]

    def close(self) -> None:
        self.pipeline.close()
        super().close()
