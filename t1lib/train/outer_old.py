"""Embedding, norm and head of mode `slide` with their optimizer state on the host. Weights and gradients are on the
device, except that those of embedding and head may be on the host instead.

Their gradients are complete only when the backward pass ends, and the next step starts with the embedding, so it would
have to wait for the whole update. But it needs only a few rows of the embedding. These rows are updated ahead of time,
on a copy of their state; the full update runs on the worker's thread while the layers are computed, and finishes before
norm and head are.
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
from t1lib.train.narrow import wide
from t1lib.train.optim import Updater, norms_of
from t1lib.train.pipeline import Pipeline
from t1lib.train.rows import HostRows
from t1lib.train.spec import OptimizerSpec
from t1lib.train.streams import Mark, send


class LookedUp(NamedTuple):
    """The distinct embedding rows (R) that were looked up, on the host, and their values (R, D), which receive the
    gradient."""

    rows: Tensor
    values: Tensor


class Outer:
    """Updates `params` on the host, where their optimizer state is.

    embed      the model's embedding; its weight may be frozen, and may be shared with the head
    streamed   names of the parameters (of embedding and head) whose weights and gradients are held on the host only
    pipeline   provides the lanes and the worker
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
        dtype = wide(next(iter(self.weights.values())).dtype)
        self._numbers = pinned_zeros(2, dtype, device)  # norm of all gradients, and their scale
        self._arrived: Mark = None
        self._ready: threading.Event | None = None

    def _know(
        self, params: dict[str, nn.Parameter], embed: nn.Embedding, pipeline: Pipeline,
        trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        self.params, self.embed, self._pipeline, self._trace = params, embed, pipeline, trace
        self._name = next((n for n, p in params.items() if p is embed.weight), None)
        self.rows: HostRows | None = None
        self._norms: dict[str, list[Tensor]] = {}  # norms of the pieces of each streamed gradient
        self._factor = 1.0
        self._pending = False  # gradients were sent, but their update is not submitted yet
        self._filled: Mark = None  # marks when the updated weights are on the device

    # -- the embedding ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Call before the look-ups of a step."""
        if self.rows is not None:
            self.rows.begin()

    def look_up(self, ids: Tensor) -> tuple[Tensor, LookedUp]:
        """Embed `ids`; returns the embeddings and the rows that were looked up."""
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
        try:  # the module's own forward, on these rows only
            self.embed.padding_idx = _place_of(padding, rows)
            embedded = functional_call(self.embed, {"weight": values}, (send(places, device),))
        finally:
            self.embed.padding_idx = padding
        return embedded, LookedUp(rows, values)

    def _rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct rows that `ids` refer to, and the position of each of `ids` among them; both on the host."""
        return torch.unique(ids.cpu(), return_inverse=True)

    def _ahead(self, rows: Tensor) -> Tensor:
        """The embedding's rows as the pending update will leave them."""
        norm, scale = self._read()
        if not math.isfinite(norm):
            return self.weights[self._name][rows]
        return self.updater.peek(self._name, rows, self.grads[self._name], self._factor, scale)

    def add_gradient(self, looked_up: LookedUp) -> None:
        """Add the gradient of the looked-up rows to the embedding's gradient."""
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
        """Record the norms of a streamed gradient's pieces, which are on their way to the host."""
        self._norms[name] = norms

    def norms(self) -> dict[str, Tensor]:
        """Norms of all gradients of this step, by parameter name."""
        if self.rows is not None:
            self._norms.setdefault(self._name, []).append(self.rows.norm())
        streamed = {n: torch.linalg.vector_norm(torch.stack(found)) for n, found in self._norms.items()}
        self._norms = {}
        return streamed | norms_of({n: p.grad for n, p in self._there.items() if p.grad is not None})

    def send(self, norm: Tensor, scale: Tensor | float, factor: float) -> None:
        """Queue the copy of the gradients to the host. The update comes later: after the next look-ups (`passed`) or
        in `ready`."""
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
        """Detach the gradients on the device from their parameters and yield them by name."""
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
        """Called when the forward is queued up to this layer: the device is busy while the host submits the update."""
        if index == 0:
            self._submit()

    def _submit(self) -> None:
        """Submit the pending update, to run after those of the layers; the weights are then copied to the device."""
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
        """Called after the head's backward: nothing reads the weights from here until the update."""

    def announce(self, ids: Callable[[], list[Tensor]]) -> None:
        """Called with a function that gives the ids of the next step's micro-batches, if its batch fits the model."""

    def settle(self, lost: bool) -> None:
        """Called once the host knows whether the step's gradients are finite; here `_read` finds that out itself."""

    def ready(self) -> None:
        """Make the device's further work see the updated weights."""
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
        """Release what is held; call `drain` first."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights from the device to the host."""
        for name, param in self._there.items():
            self.weights[name].copy_(param)


def _pinned_like(param: nn.Parameter, device: torch.device) -> Tensor:
    return pinned_zeros(param.numel(), param.dtype, device).view(param.shape)


def _place_of(value: int | None, rows: Tensor) -> int | None:
    found = [] if value is None else (rows == value).nonzero().flatten().tolist()
    return found[0] if found else None
