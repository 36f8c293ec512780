"""Embedding and head with their optimizer state on the host: it travels to the device during the next forward.

Their gradients are complete only when the backward ends, and the next step begins with the embedding, so it would have
to wait for the whole update. But it needs only a few rows: the host gathers the state of these rows (during the
previous step, if the batch is known by then) and sends it, and a copy of the rows is updated ahead of all.

Nothing reads the weights between the head's backward and that update. During the layers' backward, when memory is
tightest, their device memory is released: the update rebuilds them from their masters, or from a copy on the host.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.memory import SMALL, pin, pinned_zeros
from t1lib.train.ahead import RowsAhead, in_parts
from t1lib.train.lanes import Mark, uninterrupted, wait_for
from t1lib.train.layers import Streamed
from t1lib.train.narrow import Scratch
from t1lib.train.schedule import Schedule
from t1lib.train.travel import PIECE, Span, Traveller, Update
from t1lib.train.update import Precision, Rule, new_state, update


def _unwatched(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method use the parameters without counting as somebody who looks at them."""

    @wraps(method)
    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args)

    return run


class OuterParam:
    """One parameter whose state is on the host.

    state     by key, in pinned memory; count: updates so far
    weights   the host's copy, flat, if the state has no whole master; else None
    left      mark at which the host's state is up to date
    """

    def __init__(
        self, param: nn.Parameter, group: int, number: int, rule: Rule, precision: Precision, size: int
    ) -> None:
        self.param, self.group, device = param, group, param.device
        state = new_state(param.detach().cpu(), rule, precision)
        self.state = {k: _pinned(v.view(-1), device).view(v.shape) for k, v in state.items()}
        self.flat, self.count = {k: v.view(-1) for k, v in self.state.items()}, 0
        copy = None if "master" in self.flat else param.data.view(-1).to("cpu", copy=True)
        self.weights = None if copy is None else _pinned(copy, device)
        self.traveller = Traveller(self.flat, self.weights, number, size)
        self.grad: Tensor | None = None
        self.left: Mark = None
        self.version = param._version  # changes if somebody else writes to the weights
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # look-ups that have not run backward

    def wait(self) -> None:
        """Wait until the state on the host is up to date."""
        wait_for(self.left)


class Outer:
    """Updates matrices outside the layers through the schedule's `travel`.

    params    with their groups' numbers; on the device, of the layers' dtype
    embed     the model's embedding, or None if its weight is not among them
    """

    def __init__(
        self, params: list[tuple[nn.Parameter, int]], embed: nn.Embedding | None, schedule: Schedule,
        rules: list[Rule], precision: Precision,
    ) -> None:  # fmt: skip
        size, last = schedule.travel.size, len(schedule.layers)
        self.held = [OuterParam(p, g, last + k, rules[g], precision, size) for k, (p, g) in enumerate(params)]
        self.by_param = {h.param: h for h in self.held}
        self._schedule, self._embed = schedule, embed
        self._forward = None if embed is None else embed.forward
        self._rules = rules
        self._anchor = torch.zeros((), device=schedule.device, requires_grad=True)
        self._pending = False  # the update has not begun
        self._underway: Iterator[None] = iter(())  # queues the rest of the update, piece by piece
        self._known: Mark = None  # marks when gradients are complete and rows have been read
        self._filled: Mark = None  # marks when the updated weights are on the device
        self._away = False  # whether the weights' device memory is released
        self._scratch = Scratch()
        self._pieces = sum(len(h.traveller.pieces) for h in self.held)
        self._passed: Mark = None  # marks when the previous layer was computed
        self._rows: RowsAhead | None = None
        if embed is not None:
            own = self.by_param[embed.weight]
            state = dict(own.state) | ({} if own.weights is None else {"weight": own.weights.view(embed.weight.shape)})
            self._rows = RowsAhead(state, schedule, own.wait)
            embed.forward = self.look_up

    # -- the embedding -----------------------------------------------------------------------------------------------

    def look_up(self, ids: Tensor) -> Tensor:
        """In place of the embedding's forward."""
        embed = self._embed
        if embed.max_norm is not None or embed.scale_grad_by_freq or embed.sparse:
            self.ready()
            return self._forward(ids)
        rows, places = self._rows.looked_up(ids)
        there, own = rows.to(ids.device), self.by_param[embed.weight]
        if not self._pending:
            self.ready()
        with torch.no_grad():
            values = self._ahead(own, rows, there) if self._pending else embed.weight.index_select(0, there)
        if torch.is_grad_enabled() and embed.weight.requires_grad:
            again = self.gradient(embed.weight) is not None or len(own.waiting) > 0
            values = _Rows.apply(self._anchor, values, own, there, embed.weight if again else None)
        padding, weight = embed.padding_idx, embed._parameters["weight"]
        try:  # the module's own forward, on these rows only
            embed.padding_idx, embed._parameters["weight"] = _place_of(padding, rows), values
            return self._forward(places.to(ids.device))
        finally:
            embed.padding_idx, embed._parameters["weight"] = padding, weight

    @_unwatched
    def _ahead(self, own: OuterParam, rows: Tensor, there: Tensor) -> Tensor:
        """The embedding's rows as the pending update will leave them."""
        self._make_room()
        own.wait()
        rule, found = self._rules[own.group], []
        for few, which in zip(in_parts(rows), in_parts(there), strict=True):
            state = {key: value.view(-1) for key, value in self._rows.send(few).items()}
            grad = own.grad.index_select(0, which).view(-1)
            values = state.pop("weight") if "weight" in state else torch.empty_like(grad)  # made of the master
            update([values], [grad], [state], rule, own.count, scratch=self._scratch)
            found.append(values.view(len(few), -1))
        self._known = self._schedule.compute.mark()
        return torch.cat(found)

    def announce(self, ids: Callable[[], list[Tensor]]) -> None:
        """Gather the rows of the next step's batches, ids(), while the device is busy."""
        if self._rows is not None:
            self._rows.announce(ids)

    # -- the update --------------------------------------------------------------------------------------------------

    @_unwatched
    def begin(self, rules: list[Rule]) -> None:
        """Take the gradients. The update comes later: after the next look-up (`passed`), or in `ready`."""
        if self._pending or not self._away:
            self.ready()
        if self._rows is not None:
            self._rows.begin()
        for held in self.held:
            held.grad = self.gradient(held.param)
            if held.grad is not None:
                held.count += 1
        self._rules, self._pending = rules, any(h.grad is not None for h in self.held)
        self._known = self._schedule.compute.mark()
        if self._pending:
            self._hide()
        elif self._away:
            self._restore()

    @_unwatched
    def passed(self, index: int, layers: int) -> None:
        """Call when layer `index` is queued. Unless the layers' own state travels in the forward, a share of the update
        is queued, to overlap with this layer and leave the link free for weights in between."""
        if self._pending and self._schedule.in_backward:
            with uninterrupted():
                self._begin_update()
        if not self._schedule.in_backward:
            return
        self._schedule.travel.lanes[0].after(self._passed)
        others = max(layers - 1, 1)
        share = min(index + 1, others) * self._pieces // others - min(index, others) * self._pieces // others
        with uninterrupted():
            for _ in islice(self._underway, share):
                pass
        self._passed = self._schedule.compute.mark()

    @_unwatched
    def leave(self) -> None:
        """Call when the head's backward is done: release the weights' device memory."""
        if not self._pending and not self._away:
            if any(held.version != held.param._version for held in self.held):
                self.refresh()
            with uninterrupted():
                self._away = True
                self._hide()
                for held in self.held:
                    if _is_spare(held.param):
                        held.param.untyped_storage().resize_(0)

    @_unwatched
    def ready(self) -> None:
        """Make the device's further work see the updated weights."""
        with uninterrupted():
            self._begin_update()
            for _ in self._underway:
                pass
            self._schedule.compute.after(self._filled)
            for held in self.held:
                held.grad = None  # freed only now: the memory is reused in compute order
            if self._away:
                self._restore()
            for held in self.held:  # last: until then whoever looks at one comes here
                _plain(held.param)

    def _begin_update(self) -> None:
        if self._pending:
            self._make_room()
            if self._rows is not None:
                self._rows.forget()
            self._pending, self._underway = False, self._update_by_piece()

    def _update_by_piece(self) -> Iterator[None]:
        travel = self._schedule.travel
        for held in self.held:
            if held.grad is None:
                self._refill(held)
                continue
            span = Span(slice(0, held.param.numel()), held.group, held.count)
            given = Update(held.grad.view(-1), [span], self._rules, 1.0, (self._known,), True)
            weight = held.param.data.view(-1)
            for marks in travel.by_piece(held.traveller, given, held.left, weight, False, together=1):
                self._filled, held.left = marks.updated, marks.left
                yield

    def _make_room(self) -> None:
        """Allocate the weights' device memory again, with undefined content."""
        if self._away:
            for held in self.held:
                storage = held.param.untyped_storage()
                if storage.nbytes() == 0:
                    storage.resize_(held.param.numel() * held.param.element_size())
            self._away, self._known = False, self._schedule.compute.mark()

    def _restore(self) -> None:
        """Bring the weights back from the host, when no update is going to rebuild them."""
        self._make_room()
        for held in self.held:
            self._refill(held)

    @torch.no_grad()
    def _refill(self, held: OuterParam) -> None:
        held.wait()
        exact = held.flat["master"] if held.weights is None else held.weights
        for few, values in zip(held.param.data.view(-1).split(PIECE), exact.split(PIECE), strict=True):
            few.copy_(values)

    def _hide(self) -> None:
        """Whoever looks at the weights from here on makes them complete first."""
        for held in self.held:
            held.param.__class__, held.param._home = Streamed, self

    def visit(self) -> None:
        self.ready()

    @_unwatched
    def gradient(self, param: nn.Parameter) -> Tensor | None:
        return param.grad

    @_unwatched
    def set_gradient(self, param: nn.Parameter, value: Tensor | None) -> None:
        param.grad = value

    @_unwatched
    def drain(self) -> None:
        self.ready()
        for held in self.held:
            held.wait()

    @_unwatched
    @torch.no_grad()
    def refresh(self) -> None:
        """The weights on the device may have been changed: the host's copies follow."""
        if self._rows is not None:
            self._rows.forget()
        for held in self.held:
            held.wait()
            held.version, now = held.param._version, held.param.data.view(-1).cpu()
            if held.weights is not None:
                held.weights.copy_(now)
            else:
                master = held.flat["master"]
                torch.where(master.to(now.dtype) == now, master, now.float(), out=master)

    def close(self) -> None:
        self.drain()
        if self._embed is not None:
            self._embed.__dict__.pop("forward", None)
            self._rows.close()


class _Rows(torch.autograd.Function):
    """Rows of the embedding's weight. Their gradient is added to the weight's in place. After an earlier look-up or
    backward, autograd sums what there is to add (`again` is the weight), in the order in which it always does."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, values: Tensor, own: OuterParam, rows: Tensor, again: Tensor | None
    ) -> Tensor:
        ctx.own, ctx.rows, ctx.again = own, rows, again is not None
        own.waiting.add(ctx)
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @_unwatched
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        param, found = ctx.own.param, None if ctx.again else ctx.own.param.grad
        ctx.own.waiting.discard(ctx)
        if found is None:
            found = torch.zeros(param.shape, dtype=param.dtype, device=grad.device)
        found.index_add_(0, ctx.rows, grad)
        if not ctx.again:
            param.grad = found
        return None, None, None, None, found if ctx.again else None


def _plain(param: nn.Parameter) -> None:
    param.__class__ = nn.Parameter
    param.__dict__.pop("_home", None)  # a model that is streamed no longer must not keep the buffers


def _is_spare(param: nn.Parameter) -> bool:
    """Whether the parameter has a storage of its own, which can be released."""
    storage = param.untyped_storage()
    return storage.resizable() and storage.nbytes() == param.numel() * param.element_size()


def _pinned(flat: Tensor, device: torch.device) -> Tensor:
    """The host tensor in pinned memory: pinned in place, or copied if it is small (`pinned_zeros`)."""
    return pinned_zeros(len(flat), flat.dtype, device).copy_(flat) if flat.nbytes < SMALL else pin(flat, device)


def _place_of(value: int | None, rows: Tensor) -> int | None:
    found = [] if value is None else (rows == value).nonzero().flatten().tolist()
    return found[0] if found else None
