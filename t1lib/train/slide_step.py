"""The schedule of one step in mode `slide`.

For layer i (T1M1 §3.1, SlideFormer arXiv:2603.16428; here with everything overlapped):

    forward   weights i come in | layer i computes, keeping only its input
    backward  weights i come in | layer i is recomputed, then its gradients | gradients i leave | the CPU updates i

Each column is a lane (`t1lib.train.pipeline`), and all lanes overlap: while layer i computes, the weights of the next
layer come in, the gradients of the previous one leave, and the CPU updates the one before that. All micro-batches of a
batch pass through a layer before the next layer starts, so weights and gradients cross the link no more often than
without micro-batches.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from t1lib.measure.timing import PhaseTimer
from t1lib.train.activations_old import Activations, Saved
from t1lib.train.batch import Piece
from t1lib.train.graphs import LayerGraphs
from t1lib.train.models import layer_arguments
from t1lib.train.outer_old import LookedUp, Outer
from t1lib.train.pipeline import Pipeline
from t1lib.train.recompute import Recomputation
from t1lib.train.several import Several
from t1lib.train.vocabulary import StreamedHead


class SlideStep(Several):
    """Runs the schedule; `SlideTrainer` sets up the attributes that it uses."""

    _hooks_backward = False  # this class runs each layer's backward itself

    pipeline: Pipeline
    slots: int
    _activations: Activations
    _recomputation: Recomputation
    _graphs: LayerGraphs | None  # None: layers run eagerly
    _graph_tokens: int
    _outer: Outer | None  # None: no optimizer state outside the layers is on the host
    _head: StreamedHead | None  # None: the head's weight is on the device
    _head_name: str
    _lowest: int  # the lowest layer that the backward reaches; none below needs a gradient
    _together: bool  # no layer is updated before the last gradient is known
    # Arguments of all layers, by shape and dtype of the first one's input.
    _known: dict[tuple[torch.Size, torch.dtype], list[dict[str, Any]]]

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, hidden: list[Tensor], kwargs: list[list[dict[str, Any]]], save: bool) -> list[Tensor]:
        """Run all micro-batches through one layer after another; a slot that a layer leaves receives the next one.

        kwargs   the layers' arguments, by micro-batch and layer
        save     save activations for a backward pass
        """
        self.pipeline.begin()
        self._activations.begin()
        for index in range(len(self.parts.layers)):
            self.pipeline.bind(index)
            compute = partial(self._compute_piece, index, kwargs)
            if save:
                buffer = partial(self.pipeline.buffer, index)
                hidden = self._activations.run(index, hidden, index > self._lowest, compute, buffer)
            else:
                hidden = [compute(k, x) for k, x in enumerate(hidden)]
            self.pipeline.release(index, index + self.slots)
            if self._outer is not None:
                self._outer.passed(index)
        return hidden

    def _compute_piece(self, index: int, kwargs: list[list[dict[str, Any]]], k: int, hidden: Tensor) -> Tensor:
        arguments = kwargs[k][index]
        if torch.is_grad_enabled() or not self._has_graph(index, hidden):
            return self._compute(index, hidden, arguments)
        with self.trace.span("compute", "forward", index):
            function = partial(self._call_layer, index)
            x = hidden.detach()  # like the input of a capture, so that `torch.compile` cannot tell them apart
            return self._graphs.run(index, self.pipeline.place(index), function, x, arguments)

    def _has_graph(self, index: int, hidden: Tensor) -> bool:
        few = hidden.shape[:-1].numel() <= self._graph_tokens
        return self._graphs is not None and few and index in self.pipeline.streamed

    def _embed(self, piece: Piece) -> Tensor:
        if self._outer is None:
            return super()._embed(piece)
        embedded, looked_up = self._outer.look_up(piece.ids)
        if looked_up.values.requires_grad:
            self._looked_up.append(looked_up)
        return embedded

    def _embeddings_backward(self, embeddings: list[tuple[Tensor, Tensor]]) -> None:
        super()._embeddings_backward(embeddings)
        for looked_up in self._looked_up:
            self._outer.add_gradient(looked_up)
        self._looked_up = []

    def _begin(self, pieces: list[Piece]) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
        """Return the first layer's inputs and the arguments of all layers, by micro-batch."""
        self._looked_up: list[LookedUp] = []
        if self._outer is not None:
            self._outer.begin()
        known, self._known, hidden, kwargs = self._known, {}, [], []
        for embedded in map(self._embed, pieces):
            key, first = (embedded.shape, embedded.dtype), embedded
            arguments = known.get(key) or self._known.get(key)
            if arguments is None:
                first, arguments = layer_arguments(self.parts, embedded)
            if first is embedded:  # the layers' arguments depend on the shape alone
                self._known[key] = arguments
            hidden.append(first)
            kwargs.append(arguments)
        return hidden, kwargs

    def _ids_of(self, batch: dict[str, Tensor]) -> list[Tensor]:
        return [piece.ids for piece in self._pieces(batch)]

    def _losses(self, pieces: list[Piece], timer: PhaseTimer) -> Iterator[Tensor]:
        outputs = self._forward(*self._begin(pieces), save=False)
        timer.mark("forward")
        if self._outer is not None:
            self._outer.ready()
        if self._head is not None:
            yield from self._head.forward([self.parts.norm(x) for x in outputs], pieces).losses
            return
        for x, piece in zip(outputs, pieces, strict=True):
            yield self._loss(self.parts.norm(x), piece, timer)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        begun, kwargs = self._begin(pieces)
        embeddings = [(hidden, hidden.detach().requires_grad_(hidden.requires_grad)) for hidden in begun]
        hidden = self._forward([leaf for _, leaf in embeddings], kwargs, save=True)
        timer.mark("forward")
        if self._outer is not None:
            self._outer.ready()
        run_head = self._head_backward if self._head is None else self._streamed_head_backward
        with self.trace.span("compute", "head", -1):
            total, grads = run_head(hidden, pieces, timer)
        if self._outer is not None:
            self._outer.leave()
            if self._upcoming is not None:
                self._outer.announce(partial(self._ids_of, self._upcoming))
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
        return self.ranks.sum(total, self.device)

    def _head_backward(
        self, hidden: list[Tensor], pieces: list[Piece], timer: PhaseTimer
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients of the last layer's outputs; the outputs themselves are released."""
        total, grads = torch.zeros((), device=self.device), []
        for k, piece in enumerate(pieces):
            x = hidden[k].detach().requires_grad_()
            hidden[k] = None
            loss = self._loss(self.parts.norm(x), piece, timer)
            total += loss.detach()
            loss.backward()
            timer.mark("head_backward")
            grads.append(x.grad)
        return total, grads

    def _streamed_head_backward(
        self, hidden: list[Tensor], pieces: list[Piece], timer: PhaseTimer
    ) -> tuple[Tensor, list[Tensor]]:
        """The same with the head in pieces of the vocabulary; the norm is recomputed for its gradients."""
        with torch.no_grad():
            normed = [self.parts.norm(x) for x in hidden]
        found = self._head.forward(normed, pieces)
        timer.mark("head_forward")
        shared = self._outer is not None and self._outer.rows is not None and self.parts.tied
        made, norms = self._head.gradients(found, self._outer.rows.take if shared else None)
        if norms:
            self._outer.add_norms(self._head_name, norms)
        grads = []
        for k, grad in enumerate(made):
            x = hidden[k].detach().requires_grad_()
            hidden[k] = None
            out = self.parts.norm(x)
            out.backward(grad.to(out.dtype))
            grads.append(x.grad)
        timer.mark("head_backward")
        return sum(found.losses), grads

    def _layer_backward(
        self, index: int, grads: list[Tensor], kwargs: list[list[dict[str, Any]]]
    ) -> list[Tensor | None]:
        """Return the gradients of the layer's inputs, given those of its outputs, and send off the layer's own.

        The layer is recomputed if its activations were not kept.
        """
        pipeline = self.pipeline
        saved = self._activations.take(index)
        pipeline.bind(index, again=True)
        onward = [self._piece_backward(index, k, s, grads[k], kwargs[k][index]) for k, s in enumerate(saved)]
        factor = self.schedule(self.steps)
        self._norms |= pipeline.gradients_done(index, factor)
        following = index - self.slots
        pipeline.release(index, following if following >= self._lowest else -1, again=True)
        pipeline.send(index, factor)
        return onward

    def _piece_backward(self, index: int, k: int, saved: Saved, grad: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Run the backward of the layer's k-th micro-batch.

        The wait for a gradient slot comes as late as possible: after the recomputation, but before a CUDA graph, which
        contains recomputation and backward.
        """
        x, out = saved.input, saved.output
        wanted = index > self._lowest or x.requires_grad
        graph = out is None and self._has_graph(index, x)
        if out is None and not graph:
            with torch.enable_grad():
                x = x.detach().requires_grad_(wanted)
                out = self._recomputation.run(self.parts.layers[index], partial(self._compute, index, x, kwargs))
        if k == 0:
            self.pipeline.want_gradients(index)
        if graph:
            place, function = self.pipeline.place(index, gradients=True), partial(self._again, index, wanted)
            with self.trace.span("compute", "backward", index):
                return self._graphs.run(index, (*place, wanted), function, x.detach(), grad, kwargs)
        if out.requires_grad:
            with self.trace.span("compute", "backward", index):
                torch.autograd.backward(out, grad)
        return x.grad

    def _again(self, index: int, wanted: bool, x: Tensor, grad: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Recompute the layer and run its backward. Weight gradients add up; the input's is returned if `wanted`."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(wanted)
            out = self._recomputation.run(self.parts.layers[index], partial(self._call_layer, index, x, kwargs))
        torch.autograd.backward(out, grad)
        return x.grad

    def _update(self) -> Tensor:
        """Update what is on the device, then queue the updates that waited for the norm of all gradients."""
        if self._outer is not None:
            self._norms |= self._outer.norms()
        for param in self._resident_trainable().values():
            if param.grad is not None:
                self.ranks.add(param.grad)
        self._norms |= self.pipeline.norms()
        norm, factor = super()._update(), self.schedule(self.steps)
        self.pipeline.update_all(norm, self._scale, factor)
        if self._outer is not None:
            self._outer.send(norm, self._scale, factor)
        return norm

    def _may_update(self, norm: Tensor) -> bool:
        return super()._may_update(norm) if self._together else True  # otherwise layers have been updated already

    def _settle(self, lost: bool) -> None:
        self.pipeline.settle(lost)
        if self._outer is not None:
            self._outer.settle(lost)

    def _spoiled(self) -> str:
        return super()._spoiled() if self._together else "updates had begun, some by it: go on from a checkpoint"
