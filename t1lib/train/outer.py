"""Embedding and head with their optimizer state on the host: it travels to the device during the next forward.

The next step begins with the embedding, so it would have to wait for the whole update. But it needs only a few rows:
the host gathers and sends the state of these rows, and a copy of them is updated ahead of the whole matrix.

Nothing reads the two matrices between the head's backward and that update. So their weights' device memory is released
in the layers' backward, when memory is tightest; the update rebuilds them from masters, or from copies on the host.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from t1lib.memory import pinned_zeros
from t1lib.plan.cost import GATHERED, ROWS
from t1lib.train.lanes import Mark, uninterrupted, wait_for
from t1lib.train.layers import Streamed, unwatched
from t1lib.train.resident import ResidentOptimizer, version_of
from t1lib.train.travel import PIECE, Span, Traveller, Update
from t1lib.train.update import Scratch, follow, update

if TYPE_CHECKING:
    from t1lib.train.engine import Engine


class OuterParam(Traveller):
    """One matrix whose state is on the host. flat: the host's copy of the weights, if the state has no whole master"""

    def __init__(self, param: nn.Parameter, index: int, optimizer: ResidentOptimizer) -> None:
        self.param, self.group = param, optimizer.groups[id(param)]
        kinds = optimizer.precision.kinds(param, optimizer.rules()[self.group])
        on_host = partial(pinned_zeros, param.numel(), device=param.device)
        state = {key: on_host(dtype) for key, dtype in kinds.items()}
        super().__init__(index, None if "master" in state else on_host(param.dtype), state)
        self.exact.copy_(param.data.view(-1).cpu())
        self.grad: Tensor | None = None  # of the update that is pending
        self.known = version_of(param)  # as it was when the host's copy and the weights were last equal

    @property
    def exact(self) -> Tensor:
        """The weights on the host, or their whole master."""
        return self.state["master"] if self.flat is None else self.flat


class Outer:
    """Updates `params`, an engine's matrices outside the layers. The engine puts `look_up` in place of the forward of
    `embed`, the first embedding among them."""

    def __init__(self, engine: "Engine", params: list[nn.Parameter]) -> None:
        self._schedule, self._layers, self._optimizer = engine.schedule, len(engine.stack), engine.optimizer
        self._counts, self._rules = self._optimizer.counts, self._optimizer.rules()
        self.held = [OuterParam(p, self._layers + k, self._optimizer) for k, p in enumerate(params)]
        own = {id(held.param): held for held in self.held}
        embeddings = (m for m in _looked_up(engine.model) if id(m.weight) in own)
        self._pending = self._away = False  # whether an update has yet to begin; whether weights' memory is released
        self._underway: Iterator[None] = iter(())  # queues the rest of the update, piece by piece
        self._pieces = sum(len(self._schedule.travel.pieces(held.param.numel())) for held in self.held)
        self._known: Mark = None  # marks when gradients are complete and rows have been read
        self._filled: Mark = None  # marks when the updated weights are on the device
        self._passed: Mark = None  # marks when the previous layer was computed
        self._scratch = Scratch()
        self.embed = embed = next(embeddings, None)
        if embed is not None:
            self._forward, self._own = embed.forward, own[id(embed.weight)]
            self._whole = {key: flat.view(embed.weight.shape) for key, flat in self._own.on_host().items()}
            most, width = min(ROWS, len(embed.weight)), embed.weight.shape[1]
            zeros = partial(pinned_zeros, most * width, device=self._schedule.device)
            pinned = [{k: zeros(v.dtype).view(most, width) for k, v in self._whole.items()} for _ in range(GATHERED)]
            self._rows = cycle([[rows, None] for rows in pinned])  # buffers, with marks when their rows have left

    @unwatched
    def forward_done(self, index: int) -> None:
        """Call when layer `index` is queued. If layers are updated in the backward, the link has room now: a share of
        this update is queued, so that weights come in between shares. All of it is queued before the head."""
        last = self._layers - 1
        if self._schedule.in_backward:
            with uninterrupted():
                self._begin_update()
                self._schedule.travel.lanes[0].after(self._passed)
                others = max(last, 1)
                share = min(index + 1, others) * self._pieces // others - min(index, others) * self._pieces // others
                for _ in islice(self._underway, share):
                    pass
            self._passed = self._schedule.compute.mark()
        if index == last:
            self.ready()

    @unwatched
    def backward_begins(self, index: int) -> None:
        """Call before layer `index` runs backward. At the last layer, just after the head's backward, the weights'
        memory is released, unless something else still holds it."""
        if index < self._layers - 1 or self._pending:
            return
        if not self._away:
            self._take_over()
        with uninterrupted():
            self._away = True
            self._hide()
            for held in self.held:
                storage = held.param.untyped_storage()
                own = storage.resizable() and storage.nbytes() == held.param.nbytes
                if own and not _is_saved(held.param, storage):
                    storage.resize_(0)

    def look_up(self, input: Tensor) -> Tensor:
        """In place of the embedding's forward."""
        embed, weight, ids = self.embed, self.embed.weight, input
        # A checkpoint would run this again in the backward, no longer ahead of the update, and save other indices.
        alone = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        ahead = self._pending and self._own.grad is not None and self._own.param is weight and alone and ids.numel() > 0
        if not ahead or embed.max_norm is not None or embed.scale_grad_by_freq or embed.sparse:
            self.ready()
            return self._forward(ids)
        rows, places = torch.unique(ids.cpu(), return_inverse=True)
        there = rows.to(ids.device)
        with torch.no_grad():
            values = self._ahead(rows, there)
        if torch.is_grad_enabled() and weight.requires_grad:
            values = _Rows.apply(weight, values, there)
        padding = embed.padding_idx
        place = None if padding is None else next(iter((rows == padding).nonzero().flatten().tolist()), None)
        try:  # the module's own forward, on these rows only
            embed.padding_idx, embed._parameters["weight"] = place, values
            return self._forward(places.to(ids.device))
        finally:
            embed.padding_idx, embed._parameters["weight"] = padding, weight

    @unwatched
    def _ahead(self, rows: Tensor, there: Tensor) -> Tensor:
        """The embedding's rows as the pending update will leave them. there: `rows` on the device, to which the host
        sends their state through pinned buffers"""
        self._make_room()
        own, compute, found = self._own, self._schedule.compute, []
        wait_for(own.left)
        for few, which in zip(rows.split(ROWS), there.split(ROWS), strict=True):
            turn = next(self._rows)
            wait_for(turn[1])
            pinned = {key: buffer[: len(few)] for key, buffer in turn[0].items()}
            for key, buffer in pinned.items():
                torch.index_select(self._whole[key], 0, few, out=buffer)
            sent = {key: buffer.to(there.device, non_blocking=True, copy=True) for key, buffer in pinned.items()}
            turn[1] = compute.mark()
            state = {key: value.view(-1) for key, value in sent.items()}
            grad = own.grad.index_select(0, which).reshape(-1)
            values = state.pop("weight") if "weight" in state else torch.empty_like(grad)  # rebuilt from the master
            rule, count = self._rules[own.group], self._counts[own.param]
            update([values], [grad], [state], rule, count, None, self._scratch)
            found.append(values.view(len(few), -1))
        self._known = compute.mark()
        return torch.cat(found)

    @unwatched
    def begin(self) -> None:
        """Take the gradients. The update comes later: after the next look-up (`forward_done`), or in `ready`. It comes
        at once if somebody holds a gradient, and may change it."""
        if self._pending or not self._away:
            self.ready()
            self._take_over()
        at_once = any(_references(held.param) > _references(ALONE) for held in self.held)
        for held in self.held:
            held.grad = None if held.param.grad is None else held.param.grad.contiguous()
            if held.grad is not None:
                self._counts[held.param] += 1
        self._rules, self._pending = self._optimizer.rules(), any(held.grad is not None for held in self.held)
        self._known = self._schedule.compute.mark()
        if self._pending:
            self._hide()
        if at_once or not self._pending:
            self.ready()

    @unwatched
    def ready(self) -> None:
        """Make the device's further work see the updated weights."""
        with uninterrupted():
            self._begin_update()
            for _ in self._underway:
                pass
            self._schedule.compute.after(self._filled)
            for held in self.held:
                held.grad = None  # freed only now: the memory is reused in compute order
            if self._away:  # released, and no update is going to rebuild them
                self._make_room()
                for held in self.held:
                    self._refill(held)
            for held in self.held:  # last: until then whoever looks at one comes here
                held.param.__class__ = nn.Parameter
                held.param.__dict__.pop("_home", None)

    def _begin_update(self) -> None:
        if self._pending:
            self._make_room()
            self._pending, self._underway = False, self._update_by_piece()

    def _update_by_piece(self) -> Iterator[None]:
        for held in self.held:
            if held.grad is None:
                self._refill(held)
                continue
            span = Span(slice(0, held.param.numel()), self._rules[held.group], self._counts[held.param])
            given = Update(held.grad.reshape(-1), [span], (self._known,), whole=True, onto=held.param.data.view(-1))
            for _, updated in self._schedule.travel.by_piece(held, given, together=1):
                self._filled = updated
                yield

    def _make_room(self) -> None:
        """Allocate the weights' device memory again, with undefined content."""
        if self._away:
            for held in self.held:
                storage = held.param.untyped_storage()
                if storage.nbytes() == 0:
                    storage.resize_(held.param.nbytes)
                    held.known = version_of(held.param)
            self._away, self._known = False, self._schedule.compute.mark()

    @torch.no_grad()
    def _refill(self, held: OuterParam) -> None:
        """Bring the weights back from the host."""
        wait_for(held.left)
        for few, values in zip(held.param.data.view(-1).split(PIECE), held.exact.split(PIECE), strict=True):
            few.copy_(values)

    def _hide(self) -> None:
        """Whoever looks at the weights from here on makes them complete first."""
        for held in self.held:
            held.param.__class__, held.param._home = Streamed, self

    visit = ready

    @unwatched
    def visit_gradient(self) -> None:
        """Somebody looks at a gradient, and may change it: an update that is pending has to read it first."""
        if any(held.grad is not None for held in self.held):
            self.ready()

    def drain(self) -> None:
        self.ready()
        for held in self.held:
            wait_for(held.left)
        self._take_over()

    @unwatched
    @torch.no_grad()
    def _take_over(self) -> None:
        """Take over what was written to the weights on the device."""
        if all(held.known == version_of(held.param) for held in self.held):
            return
        for held in self.held:
            wait_for(held.left)
            if not held.param.is_contiguous():  # assigned to `p.data`
                held.param.data = held.param.data.contiguous()
            held.known = version_of(held.param)
            now = held.param.data.view(-1).cpu()
            if held.flat is not None:
                held.flat.copy_(now)
            else:
                follow(held.state["master"], now)


class _Rows(torch.autograd.Function):
    """Rows of a weight (V, D), with `values` (n, D) given in their place; their gradient goes to the whole weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        ctx.like = weight.shape, weight.dtype
        ctx.save_for_backward(rows)
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (shape, dtype), (rows,) = ctx.like, ctx.saved_tensors
        return torch.zeros(shape, dtype=dtype, device=grad.device).index_copy_(0, rows, grad), None, None


def _looked_up(model: nn.Module) -> Iterator[nn.Embedding]:
    """Embeddings that look up the ids they are given. Others, such as those of positions, may make ids from a mask."""
    given = None
    with suppress(AttributeError, NotImplementedError):
        given = model.get_input_embeddings()  # may have its own forward, which scales what it has looked up
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (module is given or type(module).forward is nn.Embedding.forward):
            yield module


def _is_saved(param: nn.Parameter, storage: torch.UntypedStorage) -> bool:
    """Whether a graph has saved the parameter for its backward, or somebody holds a view of its memory. Otherwise the
    parameter has two references, Python's and its gradient accumulator's; its storage two, its own and `storage`."""
    return param._use_count() > 2 or torch._C._storage_Use_Count(storage._cdata) > 2


def _references(param: nn.Parameter) -> int:
    """How many references there are to the parameter's gradient and to the gradient's memory; 0 without a gradient."""
    if param.grad is None:
        return 0
    storage = param.grad.untyped_storage()
    return sys.getrefcount(param.grad) + torch._C._storage_Use_Count(storage._cdata)


ALONE = nn.Parameter(torch.zeros(1, device="cpu"))
ALONE.grad = torch.zeros(1, device="cpu")  # for comparison: nobody else refers to it
