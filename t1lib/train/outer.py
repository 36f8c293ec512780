"""Embedding, norm and head of mode `slide` with optimizer state on the host; weights and gradients are on the device,
or, of embedding and head, on the host as well.

Their gradients are complete when the backward ends, and the next step begins with the embedding: it would wait for all
of them to be updated. It needs few rows, though. Those are updated ahead, on a copy of their state; the whole follows
on the worker's thread while the layers are computed, and is done before norm and head are.
"""

import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from t1lib.errors import require
from t1lib.measure.memory import pinned_zeros
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.optim import Updater, norms_of
from t1lib.train.pipeline import Pipeline
from t1lib.train.rows import HostRows
from t1lib.train.spec import OptimizerSpec
from t1lib.train.streams import Mark, send


class LookedUp(NamedTuple):
    """Rows of the embedding (R), on the host, none of them twice; what they hold, which gets the gradient (R, D)."""

    rows: Tensor
    values: Tensor


class Outer:
    """Updates `params` from state on the host.

    embed      the model's embedding; its parameter may be frozen, and may be the head's too
    streamed   names of those whose weights and gradients are on the host as well: the embedding's, the head's
    pipeline   whose lanes and worker are used
    """

    def __init__(
        self, params: dict[str, nn.Parameter], embed: nn.Embedding, spec: OptimizerSpec, pipeline: Pipeline,
        trace: Callable[[], Trace | NoTrace], streamed: set[str],
    ) -> None:  # fmt: skip
        self._know(params, embed, pipeline, trace)
        self._there = {n: p for n, p in params.items() if n not in streamed}
        device = pipeline.device
        self.weights = {n: _pinned_like(p, device) for n, p in params.items()}
        self.grads = {n: _pinned_like(p, device) for n, p in params.items()}
        for name in streamed:
            self.weights[name].copy_(params[name].data)
            params[name].data = self.weights[name]
        self.refresh()
        self.updater = Updater(self.weights, spec)
        self.rows = HostRows(self.grads[self._name], pipeline) if self._name in streamed else None
        self._numbers = pinned_zeros(2, torch.float32, device)  # norm of all gradients, factor of these
        self._arrived: Mark = None
        self._ready: threading.Event | None = None

    def _know(
        self, params: dict[str, nn.Parameter], embed: nn.Embedding, pipeline: Pipeline,
        trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        self.params, self.embed, self._pipeline, self._trace = params, embed, pipeline, trace
        self._name = next((n for n, p in params.items() if p is embed.weight), None)
        self.rows: HostRows | None = None
        self._norms: dict[str, list[Tensor]] = {}  # of the streamed gradients' pieces
        self._factor = 1.0
        self._pending = False  # gradients are there, and their update has not been submitted
        self._filled: Mark = None  # when the updated weights are on the device

    # -- the embedding ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the look-ups of a step."""
        if self.rows is not None:
            self.rows.begin()

    def look_up(self, ids: Tensor) -> tuple[Tensor, LookedUp]:
        """What the embedding makes of `ids`, and its rows that did."""
        rows, places = self._rows_of(ids)
        device, weight = self._pipeline.device, self.embed.weight
        if self._pending and self._name is not None:
            values = self._ahead(rows).to(device, non_blocking=True)
        else:
            self.ready()
            values = weight.detach()[rows.to(weight.device)].to(device)
        values.requires_grad_(weight.requires_grad and torch.is_grad_enabled())
        if self.rows is not None:
            self.rows.ask(rows)
        padding, self.embed.padding_idx = self.embed.padding_idx, None
        try:  # the module's own forward, over the rows alone
            self.embed.padding_idx = _place_of(padding, rows)
            embedded = functional_call(self.embed, {"weight": values}, (send(places, device),))
        finally:
            self.embed.padding_idx = padding
        return embedded, LookedUp(rows, values)

    def _rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that `ids` name, none of them twice, and for each of `ids` its place among them; on the host."""
        return torch.unique(ids.cpu(), return_inverse=True)

    def _ahead(self, rows: Tensor) -> Tensor:
        """The embedding's rows as the update to come will leave them."""
        norm, scale = self._read()
        if not math.isfinite(norm):
            return self.weights[self._name][rows]
        return self.updater.peek(self._name, rows, self.grads[self._name], self._factor, scale)

    def add_gradient(self, looked_up: LookedUp) -> None:
        """Add to the embedding's gradient that of its rows."""
        grad = looked_up.values.grad
        if self.rows is not None:
            self.rows.add(looked_up.rows, grad)
            return
        weight = self.embed.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, send(looked_up.rows, weight.device), grad)

    # -- the update ------------------------------------------------------------------------------------------------

    def add_norms(self, name: str, norms: list[Tensor]) -> None:
        """Norms of the pieces of a streamed gradient, which are on their way to the host."""
        self._norms[name] = norms

    def norms(self) -> dict[str, Tensor]:
        """Of all gradients of this step."""
        if self.rows is not None:
            self._norms.setdefault(self._name, []).append(self.rows.norm())
        streamed = {n: torch.linalg.vector_norm(torch.stack(found)) for n, found in self._norms.items()}
        self._norms = {}
        return streamed | norms_of({n: p.grad for n, p in self._there.items() if p.grad is not None})

    def send(self, norm: Tensor, scale: Tensor | float, factor: float) -> None:
        """Queue the copy of the gradients to the host. The update waits for the next embedding, or for `ready`."""
        lane = self._pipeline.outward
        both = torch.stack([norm, scale if isinstance(scale, Tensor) else norm.new_full((), scale)])
        lane.after(self._pipeline.compute.mark())
        with lane.active(), self._trace().span("out", "gradients", -1, lane.stream):
            for name, grad in self._taken():
                self.grads[name].copy_(lane.uses(grad), non_blocking=True)
            if self.rows is not None:
                self.rows.send()
            self._numbers.copy_(lane.uses(both), non_blocking=True)
        self._arrived, self._factor, self._pending = lane.mark(), factor, True

    def _taken(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients on the device, which the parameters have no more."""
        for name, param in self._there.items():
            require(param.grad is not None, f"{name!r} is to be trained and got no gradient")
            grad, param.grad = param.grad, None
            yield name, grad

    def _read(self) -> tuple[float, float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        if self.rows is not None:
            self.rows.arrived()
        return float(self._numbers[0]), float(self._numbers[1])

    def passed(self, index: int) -> None:
        """The forward's work up to this layer is queued: the device has something to do while the host does this."""
        if index == 0:
            self._submit()

    def _submit(self) -> None:
        """Let the update that waits run, after those of the layers; then the weights go to the device."""
        if not self._pending:
            return
        self._pending, self._ready = False, threading.Event()
        worker, last = self._pipeline.worker, len(self._pipeline.layers)
        worker.submit(last, partial(self._update, self._trace()))
        worker.then(last, self._copy_in, self._ready)

    def _update(self, trace: Trace | NoTrace) -> None:
        norm, scale = self._read()
        if math.isfinite(norm):
            with trace.host_span("update", "update", -1):
                self.updater.step(self.grads, self._factor, scale)
        if self.rows is not None:
            self.rows.clear()

    def _copy_in(self) -> None:
        lane = self._pipeline.inward
        with lane.active():
            for name, param in self._there.items():
                param.data.copy_(self.weights[name], non_blocking=True)
        self._filled = lane.mark()
        self._ready.set()

    def leave(self) -> None:
        """After the head: until the update, nothing needs the weights."""

    def announce(self, ids: Callable[[], list[Tensor]]) -> None:
        """The next step's micro-batches will be these, if the batch fits the model."""

    def settle(self, lost: bool) -> None:
        """The host knows whether the step's gradients are finite; `_read` finds that out, too."""

    def ready(self) -> None:
        """From here on the device finds the updated weights."""
        self._submit()
        if self._ready is not None:
            self._ready.wait()
            self._pipeline.worker.check()
            self._pipeline.compute.after(self._filled)
            self._ready = None

    def drain(self) -> None:
        """Wait for the update."""
        self.ready()

    def close(self) -> None:
        """After `drain`."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights over from the device."""
        for name, param in self._there.items():
            self.weights[name].copy_(param)


def _pinned_like(param: nn.Parameter, device: torch.device) -> Tensor:
    return pinned_zeros(param.numel(), param.dtype, device).view(param.shape)


def _place_of(value: int | None, rows: Tensor) -> int | None:
    found = [] if value is None else (rows == value).nonzero().flatten().tolist()
    return found[0] if found else None
