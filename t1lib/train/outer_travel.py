"""Embedding, norm and head of mode `slide` with optimizer state on the host, updated on the device: the state is copied
to the device and back (`t1lib.train.travel`) during the next forward.

As in `outer`, the next step needs only a few rows of the embedding right away. The host gathers the state of these rows
(during the previous step, if the batch is known by then) and sends it; a copy of the rows is updated ahead of time.

Nothing reads the weights between the head's backward and that update. During the layers' backward, when memory is
tightest, their device memory is therefore released if the update rebuilds them from their masters, or if the host holds
a copy as well ("parked").
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from t1lib.measure.memory import SMALL, pin, pinned_zeros
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.ahead import RowsAhead, in_parts
from t1lib.train.narrow import Scratch
from t1lib.train.optim import Updater
from t1lib.train.outer_old import Outer
from t1lib.train.pipeline import Pipeline
from t1lib.train.spec import OptimizerSpec
from t1lib.train.streams import Mark, send
from t1lib.train.travel_old import PIECE, Traveller, update_once


class TravellingOuter(Outer):
    """Updates `params`, whose weights are on the device, through the pipeline's `travel`.

    parked   for weights that have no master, the host keeps a copy, which travels in and out with their state
    """

    def __init__(
        self, params: dict[str, nn.Parameter], embed: nn.Embedding, spec: OptimizerSpec, pipeline: Pipeline,
        trace: Callable[[], Trace | NoTrace], parked: bool,
    ) -> None:  # fmt: skip
        self._know(params, embed, pipeline, trace)
        self._there = params
        state = {n: _state_on_host(p, spec, pipeline.device) for n, p in params.items()}
        self.updater = Updater({n: p.data for n, p in params.items()}, spec, state=state)
        self._numbers = {n: len(pipeline.layers) + k for k, n in enumerate(params)}  # after all layers
        self._spare = {n: p for n, p in params.items() if _is_spare(p) and (parked or "master" in state[n])}
        bare = [n for n in self._spare if "master" not in state[n]]
        self._parked = {n: _pinned(params[n].data.view(-1).to("cpu", copy=True), pipeline.device) for n in bare}
        self._travellers = {
            n: Traveller(self._flat(n), self._parked.get(n), [state[n]], False, pipeline.travel.size) for n in params
        }
        for name, number in self._numbers.items():
            pipeline.travel.add(number, self._travellers[name])
        self._rows = None if self._name is None else self._rows_ahead(self._name)
        self._grads: dict[str, Tensor] = {}
        self._scale: Tensor | float = 1.0
        self._known: Mark = None  # marks when gradients are complete and rows have been read
        self._left: dict[str, Mark] = {}  # marks when the new state is back on the host
        self._underway: Iterator[None] = iter(())  # queues the rest of the update, piece by piece
        self._pieces = sum(len(traveller.pieces) for traveller in self._travellers.values())
        self._passed: Mark = None  # marks when the previous layer was computed
        self._away = False  # whether the device memory of `_spare` is released
        self._scratch = Scratch()

    def _flat(self, name: str) -> dict[str, Tensor]:
        return {k: v.view(-1) for k, v in self.updater.state[name].items() if k != "step"}

    def _rows_ahead(self, name: str) -> RowsAhead:
        held = dict(self.updater.state[name])
        if name in self._parked:
            held["weight"] = self._parked[name].view(self.params[name].shape)
        return RowsAhead(held, self._pipeline, partial(self._wait_for, name))

    def leave(self) -> None:
        for param in self._spare.values():
            param.untyped_storage().resize_(0)
        self._away = bool(self._spare)

    def _make_room(self) -> None:
        """Reallocate the weights' device memory, with undefined content."""
        if self._away:
            for param in self._spare.values():
                param.untyped_storage().resize_(param.nbytes)
            self._away, self._known = False, self._pipeline.compute.mark()

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore the weights from the host, when no update is going to rebuild them."""
        self._make_room()
        for name, param in self._spare.items():
            weight = param.data.view(-1)
            exact = self._parked[name] if name in self._parked else self._flat(name)["master"]
            self._wait_for(name)
            for few, values in zip(weight.split(PIECE), exact.split(PIECE), strict=True):
                few.copy_(values)

    def begin(self) -> None:
        if self._rows is not None:
            self._rows.begin()

    def announce(self, ids: Callable[[], list[Tensor]]) -> None:
        if self._rows is not None:
            self._rows.announce(ids)

    def _rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super()._rows_of(ids) if self._rows is None else self._rows.looked_up(ids)

    def _wait_for(self, name: str) -> None:
        """Wait until the state on the host is up to date."""
        if self._left.get(name) is not None:
            self._left[name].synchronize()

    def _ahead(self, rows: Tensor) -> Tensor:
        name, spec, device = self._name, self.updater.spec, self._pipeline.device
        self._make_room()
        weight, traveller = self.params[name].data, self._travellers[name]
        count, step = traveller.count, traveller.step_on(device)
        self._wait_for(name)
        found = []
        for few, there in zip(in_parts(rows), in_parts(send(rows, device)), strict=True):
            own = self._rows.send(few)
            values = own.pop("weight", None)
            if values is None:
                made = "master" in own
                values = weight.new_empty(len(few), weight.shape[1]) if made else weight.index_select(0, there)
            grad = self._grads[name].index_select(0, there)
            update_once(values, grad, own, spec, self._scratch, step, count, self._factor, self._scale, None)
            found.append(values)
        self._known = self._pipeline.compute.mark()
        return torch.cat(found)

    def send(self, norm: Tensor, scale: Tensor | float, factor: float) -> None:
        """Keep the gradients. The update comes later: after the next look-ups (`passed`) or in `ready`."""
        self._grads = dict(self._taken())
        self._scale, self._factor, self._pending = scale, factor, True
        self._known = self._pipeline.compute.mark()

    def settle(self, lost: bool) -> None:
        if lost:
            self._pending, self._grads = False, {}
            self.ready()

    def passed(self, index: int) -> None:
        """Queue a share of the update, to overlap with this layer and leave the link free for weights in between. With
        `together` the layers' own state travels in the forward as well and goes first: `ready` then queues it all."""
        if self._pipeline.together:
            return
        self._begin_update()
        self._pipeline.travel.lanes[0].after(self._passed)
        others = max(len(self._pipeline.layers) - 1, 1)
        share = min(index + 1, others) * self._pieces // others - min(index, others) * self._pieces // others
        for _ in islice(self._underway, share):
            pass
        self._passed = self._pipeline.compute.mark()

    def _begin_update(self) -> None:
        if self._pending:
            self._make_room()
            if self._rows is not None:
                self._rows.forget()
            self._pending, self._underway = False, self._update_by_piece()

    def _update_by_piece(self) -> Iterator[None]:
        travel = self._pipeline.travel
        for name, number in self._numbers.items():
            grad, weight = self._grads[name].view(-1), self.params[name].data.view(-1)
            known, left = (self._known,), self._left.get(name)
            for _ in travel.by_piece(number, grad, known, self._factor, self._scale, None, left, weight, together=1):
                _, self._filled, self._left[name] = travel.marks(number)
                yield
        travel.settle(lost=False)

    def ready(self) -> None:
        self._begin_update()
        for _ in self._underway:
            pass
        self._pipeline.compute.after(self._filled)
        self._grads, self._scale = {}, 1.0  # freed only now: the memory is reused in compute order
        if self._away:
            self._restore()

    def drain(self) -> None:
        self.ready()
        for mark in filter(None, self._left.values()):
            mark.synchronize()

    def refresh(self) -> None:
        """The weights on the device have changed: drop or overwrite the copies on the host."""
        if self._rows is not None:
            self._rows.forget()
        for name, held in self._parked.items():
            held.copy_(self.params[name].data.view(-1))

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


def _is_spare(param: nn.Parameter) -> bool:
    """Whether the parameter is a matrix with a storage of its own, which can be released."""
    storage = param.untyped_storage()
    return param.ndim > 1 and storage.resizable() and storage.nbytes() == param.nbytes


def _state_on_host(param: nn.Parameter, spec: OptimizerSpec, device: torch.device) -> dict[str, Tensor]:
    """The parameter's new optimizer state, in pinned memory."""
    state = Updater({"": param.detach().cpu()}, spec).state[""]
    return {k: v if k == "step" else _pinned(v.view(-1), device).view(v.shape) for k, v in state.items()}


def _pinned(flat: Tensor, device: torch.device) -> Tensor:
    """The host tensor in pinned memory: pinned in place, or copied if it is small (`pinned_zeros`)."""
    return pinned_zeros(len(flat), flat.dtype, device).copy_(flat) if flat.nbytes < SMALL else pin(flat, device)
