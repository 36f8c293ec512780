"""Embedding and head with their optimizer state on the host: it travels to the device during the next forward.

The next step begins with the embedding, so it would have to wait for the whole update. But it needs only a few rows:
the host gathers and sends the state of these rows, and a copy of them is updated ahead of the whole matrix.

Nothing reads the two matrices between the head's backward and that update. So their weights' device memory is released
in the layers' backward, when memory is tightest; the update rebuilds them from masters, or from copies on the host.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from t1lib.memory import pinned_zeros
from t1lib.plan.cost import GATHERED, PIECE, ROWS
from t1lib.train.lanes import Mark, wait_for
from t1lib.train.layers import Streamed, unwatched
from t1lib.train.resident import ResidentOptimizer, version_of
from t1lib.train.travel import Room, Span, Traveller, Update
from t1lib.train.update import Scratch, follow, update

if TYPE_CHECKING:
    from t1lib.train.engine import Engine


class Stage(Enum):
    """Where the weights of `Outer` stand. A step leads through the stages in turn, and `ready` from any to the first.
    In the others the parameters are `Streamed`: whoever looks at one comes to `ready`."""

    COMPLETE = auto()  # on the device
    RELEASED = auto()  # from the head's backward on (`backward_begins`): on the host alone, unless somebody holds them
    PENDING = auto()  # from the optimizer's step on (`begin`): gradients are taken, and the update has yet to begin
    UNDERWAY = auto()  # from the next forward on (`forward_done`): the update is being queued


class OuterParam(Traveller):
    """One matrix whose state is on the host. flat: the host's copy of the weights, if the state has no whole master"""

    def __init__(self, param: nn.Parameter, index: int, optimizer: ResidentOptimizer) -> None:
        self.param, self.group = param, optimizer.groups[id(param)]
        dtypes = optimizer.precision.state_dtypes(param, optimizer.rules()[self.group])
        on_host = partial(pinned_zeros, param.numel(), device=param.device)
        state = {key: on_host(dtype) for key, dtype in dtypes.items()}
        super().__init__(index, None if "master" in state else on_host(param.dtype), state)
        self.exact = state.get("master", self.flat)  # the weights on the host, or their whole master
        self.exact.copy_(param.data.view(-1).cpu())
        self.update: Update | None = None  # pending or under way
        self.equal_at = version_of(param)  # when the weights and the host's copy were last equal
        self.released = False  # whether they are on the host only, though the device's memory may be allocated again

    def accept_writes(self) -> None:
        """Let the host's copy follow what somebody wrote to the weights on the device."""
        if self.released or self.equal_at == version_of(self.param):
            return
        wait_for(self.left)
        if not self.param.is_contiguous():  # assigned to `p.data`
            self.param.data = self.param.data.contiguous()
        self.equal_at = version_of(self.param)
        now = self.param.data.view(-1).cpu()
        self.exact.copy_(now) if self.flat is not None else follow(self.exact, now)

    def release(self) -> None:
        """Free the weights' device memory, but not if a graph has saved the parameter for its backward, or somebody has
        a view of the memory (else the parameter has two references, Python's and its gradient accumulator's, and so has
        its storage, its own and the one here). Nor if somebody has written to weights with a whole master: it would
        follow, and lose its low bits, though the old values may be written back before the update."""
        if self.flat is not None:
            self.accept_writes()
        if self.equal_at != version_of(self.param):
            return
        storage = self.param.untyped_storage()
        own = storage.resizable() and storage.nbytes() == self.param.nbytes
        if own and self.param._use_count() <= 2 and torch._C._storage_Use_Count(storage._cdata) <= 2:
            storage.resize_(0)
            self.released = True

    def refill(self) -> None:
        """Bring the weights back from the host."""
        wait_for(self.left)
        for few, values in zip(self.param.data.view(-1).split(PIECE), self.exact.split(PIECE), strict=True):
            few.copy_(values)
        self.released = False


class Outer:
    """Updates `params`, an engine's matrices outside the layers. The engine puts `look_up` in place of the forward of
    `embed`, the first embedding among them."""

    def __init__(self, engine: "Engine", params: list[nn.Parameter]) -> None:
        self._schedule, self._layers, self._optimizer = engine.schedule, len(engine.stack), engine.optimizer
        self.held = [OuterParam(p, self._layers + k, self._optimizer) for k, p in enumerate(params)]
        own = {id(held.param): held for held in self.held}
        embeddings = (m for m in _looked_up(engine.model) if id(m.weight) in own)
        self._stage = Stage.COMPLETE
        self._rest: Iterator[None] = iter(())  # queues the rest of the update that is under way, piece by piece
        self._pieces = sum(len(self._schedule.travel.pieces(held.param.numel())) for held in self.held)
        self._known: Mark = None  # marks when gradients are complete and rows have been read
        self._filled: Mark = None  # marks when the updated weights are on the device
        self._passed: Mark = None  # marks when the previous layer was computed
        self._scratch = Scratch()
        engine.undo.callback(self.complete)  # which an update's error may have kept from it
        me = weakref.ref(self)
        for held in self.held:  # autograd is about to add to a gradient: an update that is pending has to read it first
            engine.undo.callback(held.param.register_hook(lambda grad: me() and me().visit_gradient()).remove)
        self.embed = embed = next(embeddings, None)
        if embed is not None:
            self._forward, self._table = embed.forward, own[id(embed.weight)]
            self._host = {key: flat.view(embed.weight.shape) for key, flat in self._table.on_host().items()}
            most, width = min(ROWS, len(embed.weight)), embed.weight.shape[1]
            zeros = partial(pinned_zeros, most * width, device=self._schedule.device)
            rows = [{k: zeros(v.dtype).view(most, width) for k, v in self._host.items()} for _ in range(GATHERED)]
            self._turns = cycle(map(Room, rows))

    @unwatched
    def forward_done(self, index: int) -> None:
        """Call when layer `index` is queued. If layers are updated in the backward, the link has room now: a share of
        this update is queued, so that weights come in between shares. All of it is queued before the head."""
        if self._schedule.in_backward:
            self._begin_update()
            self._schedule.travel.lanes[0].after(self._passed)
            others = max(self._layers - 1, 1)
            share = (index + 1) * self._pieces // others - index * self._pieces // others
            for _ in islice(self._rest, share):
                pass
            self._passed = self._schedule.compute.mark()
        if index == self._layers - 1:
            self.ready()

    @unwatched
    def backward_begins(self, index: int) -> None:
        """Call before layer `index` runs backward. At the last layer, just after the head's backward, the weights'
        memory is released, unless something else still holds it."""
        if index < self._layers - 1 or self._stage is Stage.PENDING:
            return
        if self._stage is Stage.UNDERWAY:  # an error ended its forward, and this backward is of an earlier one
            self.ready()
        self._stage = Stage.RELEASED
        for held in self.held:
            held.param.__class__, held.param._home = Streamed, self  # whoever looks at it comes to `ready`
            held.release()

    def look_up(self, input: Tensor) -> Tensor:
        """In place of the embedding's forward. If an update is pending, it sees the rows as that will leave them."""
        embed, weight = self.embed, self.embed.weight
        # A checkpoint would run this again in the backward, no longer ahead of the update, and save other indices.
        once = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        plain = embed.max_norm is None and not embed.scale_grad_by_freq and not embed.sparse
        ahead = self._stage is Stage.PENDING and self._table.update is not None and self._table.param is weight
        if not (ahead and once and plain and input.numel() > 0):
            self.ready()
            return self._forward(input)
        rows, at = torch.unique(input.cpu(), return_inverse=True)
        there = rows.to(input.device)
        values = _Rows.apply(weight, self._ahead(rows, there), there)
        padding = embed.padding_idx
        found = [] if padding is None else (rows == padding).nonzero().flatten().tolist()
        try:  # the module's own forward, on these rows only
            embed.padding_idx, embed._parameters["weight"] = next(iter(found), None), values
            return self._forward(at.to(input.device))
        finally:
            embed.padding_idx, embed._parameters["weight"] = padding, weight

    @unwatched
    @torch.no_grad()
    def _ahead(self, rows: Tensor, there: Tensor) -> Tensor:
        """The embedding's rows as the pending update will leave them. there: `rows` on the device, to which the host
        sends their state through pinned buffers"""
        self._make_room()
        table, compute, found = self._table, self._schedule.compute, []
        grads, (span,) = table.update.grads.view_as(table.param), table.update.spans
        wait_for(table.left)
        for few, which in zip(rows.split(ROWS), there.split(ROWS), strict=True):
            turn = next(self._turns)
            wait_for(turn.left)
            pinned = {key: buffer[: len(few)] for key, buffer in turn.buffers.items()}
            for key, buffer in pinned.items():
                torch.index_select(self._host[key], 0, few, out=buffer)
            sent = {key: buffer.to(there.device, non_blocking=True, copy=True) for key, buffer in pinned.items()}
            turn.left = compute.mark()
            state = {key: value.view(-1) for key, value in sent.items()}
            grad = grads.index_select(0, which).reshape(-1)
            values = state.pop("weight") if "weight" in state else torch.empty_like(grad)  # rebuilt from the master
            update([values], [grad], [state], span.rule, span.count, None, self._scratch)
            found.append(values.view(len(few), -1))
        self._known = compute.mark()
        return torch.cat(found)

    @unwatched
    def begin(self) -> None:
        """Take the gradients. The update comes later: after the next look-up (`forward_done`), or in `ready`. It comes
        at once if somebody holds a gradient, and may change it."""
        if self._stage is not Stage.RELEASED:
            self.ready()
        for held in self.held:
            held.accept_writes()
        at_once = any(_references(held.param) > _references(ALONE) for held in self.held)
        rules, counts = self._optimizer.rules(), self._optimizer.counts
        for held in self.held:
            if held.param.grad is not None:
                counts[held.param] += 1
                span = Span(slice(0, held.param.numel()), rules[held.group], counts[held.param])
                held.update = Update(held.param.grad.contiguous().view(-1), [span], (), whole=True)
                torch.autograd.graph.increment_version(held.param)  # PyTorch refuses a backward of an earlier forward
                held.equal_at = version_of(held.param)
        if any(held.update is not None for held in self.held):
            self._stage, self._known = Stage.PENDING, self._schedule.compute.mark()
            for held in self.held:
                held.param.__class__, held.param._home = Streamed, self
        if at_once or self._stage is not Stage.PENDING:
            self.ready()

    @unwatched
    def ready(self) -> None:
        """Make the device's further work see the updated weights."""
        with self._schedule.engine.alone():
            self._begin_update()
            for _ in self._rest:
                pass
            self._schedule.compute.after(self._filled)
            for held in self.held:
                held.update = None  # freed only now: the memory is reused in compute order
            self.complete()

    @unwatched
    def complete(self) -> None:
        """Bring back the weights that no update has rebuilt, and make the parameters ordinary ones."""
        self._make_room()
        for held in self.held:
            if held.released:
                held.refill()
        self._stage, self._rest = Stage.COMPLETE, iter(())  # a generator would hold this, in a cycle
        for held in self.held:  # last: until then whoever looks at one comes to `ready`
            held.param.__class__ = nn.Parameter
            held.param.__dict__.pop("_home", None)

    def _begin_update(self) -> None:
        """Begin the update if one is pending; whoever goes through `_rest` queues it."""
        if self._stage is Stage.PENDING:
            self._make_room()
            self._stage, self._rest = Stage.UNDERWAY, self._by_piece()

    def _by_piece(self, first: int = 0) -> Iterator[None]:
        """Queue the updates from matrix number `first` on, piece by piece."""
        for number, held in enumerate(self.held[first:], first):
            if held.update is None:
                continue
            given = held.update._replace(known=(self._known,), onto=held.param.data.view(-1))
            try:
                for _, updated in self._schedule.travel.by_piece(held, given, together=1):
                    self._filled = updated
                    yield
            except BaseException:
                self._rest = self._by_piece(number)  # for the next try
                raise
            held.released = False

    def _make_room(self) -> None:
        """Allocate what was released, with undefined content. The update waits for earlier work in the same memory."""
        empty = [held for held in self.held if held.param.untyped_storage().nbytes() == 0]
        if empty:
            self._known = self._schedule.compute.mark()
        for held in empty:
            held.param.untyped_storage().resize_(held.param.nbytes)
            held.equal_at = version_of(held.param)

    visit = ready

    @unwatched
    def visit_gradient(self) -> None:
        """Somebody looks at a gradient, and may change it: an update that is pending has to read it first."""
        if self._stage in (Stage.PENDING, Stage.UNDERWAY):
            self.ready()

    def drain(self) -> None:
        self.ready()
        for held in self.held:
            wait_for(held.left)
            held.accept_writes()


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


def _references(param: nn.Parameter) -> int:
    """How many references there are to the parameter's gradient and to the gradient's memory; 0 without a gradient."""
    if param.grad is None:
        return 0
    storage = param.grad.untyped_storage()
    return sys.getrefcount(param.grad) + torch._C._storage_Use_Count(storage._cdata)


ALONE = nn.Parameter(torch.zeros(1, device="cpu"))
ALONE.grad = torch.zeros(1, device="cpu")  # for comparison: nobody else refers to it
