"""Embedding, norm and head of mode `slide` with optimizer state on the host, updated on the device: the state comes to
it, and leaves again (`t1lib.train.travel`), beside the next forward.

As in `outer`, the next step needs few rows of the embedding at once. The device reads their state from the host's
memory row by row, and updates a copy of them ahead.

Between the head and that update nothing reads the weights, and an update makes them anew from their masters: for the
backward, where memory is short, they give up their place on the device.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.measure.memory import SMALL, pin, pinned_empty
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.narrow import Scratch
from t1lib.train.optim import OptimizerSpec, Updater
from t1lib.train.outer import LookedUp, Outer
from t1lib.train.pipeline import Pipeline
from t1lib.train.streams import Mark, send
from t1lib.train.travel import PIECE, Traveller, update_once

ROWS = 2048  # of the embedding that are updated ahead at a time


class TravellingOuter(Outer):
    """Updates `params`, none of them on the host, by the pipeline's `travel`."""

    def __init__(
        self, params: dict[str, nn.Parameter], embed: nn.Embedding, spec: OptimizerSpec, pipeline: Pipeline,
        trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        self._know(params, embed, pipeline, trace)
        self._there = params
        state = {n: _state_on_host(p, spec, pipeline.device) for n, p in params.items()}
        self.updater = Updater({n: p.data for n, p in params.items()}, spec, state=state)
        self._numbers = {n: len(pipeline.layers) + k for k, n in enumerate(params)}  # after all layers
        for name, number in self._numbers.items():
            pipeline.travel.add(number, Traveller(self._flat(name), None, [state[name]], grads_come=False))
        looked_up = {k: v for k, v in state.get(self._name, {}).items() if k != "step"}
        self._direct = pipeline.device.type == "cuda" and all(map(_address, looked_up.values()))
        self._seen = {k: _seen_by(pipeline.device, v) if self._direct else v for k, v in looked_up.items()}
        self._grads: dict[str, Tensor] = {}
        self._scale: Tensor | float = 1.0
        self._known: Mark = None  # mark before which gradients are not there, or rows are still read
        self._left: dict[str, Mark] = {}  # marks when new state is back on the host
        self._spare = {n: p for n, p in params.items() if p.ndim > 1 and "master" in state[n] and _alone(p)}
        self._away = False  # these have given up their place
        self._scratch = Scratch()

    def _flat(self, name: str) -> dict[str, Tensor]:
        return {k: v.view(-1) for k, v in self.updater.state[name].items() if k != "step"}

    def leave(self) -> None:
        for param in self._spare.values():
            param.untyped_storage().resize_(0)
        self._away = bool(self._spare)

    def _make_room(self) -> None:
        """Let the weights have a place again, with whatever is in it."""
        if self._away:
            for param in self._spare.values():
                param.untyped_storage().resize_(param.nbytes)
            self._away, self._known = False, self._pipeline.compute.mark()

    @torch.no_grad()
    def _restore(self) -> None:
        """No update will make the weights anew: take them from their masters."""
        self._pending, self._grads = False, {}
        if self._away:
            self._make_room()
            for name, param in self._spare.items():
                weight, master = param.data.view(-1), self._flat(name)["master"]
                if self._left.get(name) is not None:
                    self._left[name].synchronize()
                for few, exact in zip(weight.split(PIECE), master.split(PIECE), strict=True):
                    few.copy_(exact)

    def look_up(self, ids: Tensor) -> tuple[Tensor, LookedUp]:
        if not self._pending:
            self._restore()  # after a step that was given up
        return super().look_up(ids)

    def _ahead(self, rows: Tensor) -> Tensor:
        name, spec, device = self._name, self.updater.spec, self._pipeline.device
        self._make_room()
        weight, count = self.params[name].data, int(self.updater.state[name].get("step", 0))
        self._wait_for_state(self._left.get(name))
        found = []
        for few in rows.split(ROWS):
            there = send(few, device)
            own = {k: self._rows_of(v, few, there) for k, v in self._seen.items()}
            values = weight.new_empty(len(few), weight.shape[1]) if "master" in own else weight.index_select(0, there)
            grad = self._grads[name].index_select(0, there)
            update_once(values, grad, own, spec, self._scratch, count, self._factor, self._scale, None)
            found.append(values)
        self._known = self._pipeline.compute.mark()
        return torch.cat(found)

    def _wait_for_state(self, left: Mark) -> None:
        if self._direct:
            self._pipeline.compute.after(left)
        elif left is not None:
            left.synchronize()

    def _rows_of(self, source: Tensor, rows: Tensor, there: Tensor) -> Tensor:
        """A copy of a host tensor's rows on the device, where `there`, the same numbers, is.

        A GPU reads pinned memory by itself, in the order of its lane, and the host need not wait for anything.
        """
        return source.index_select(0, there) if self._direct else send(source.index_select(0, rows), there.device)

    def send(self, norm: Tensor, scale: Tensor | float, factor: float) -> None:
        """Take the gradients. The update waits for the next embedding, or for `ready`."""
        self._grads = dict(self._taken())
        self._scale, self._factor, self._pending = scale, factor, True
        self._known = self._pipeline.compute.mark()

    def settle(self, lost: bool) -> None:
        if lost:
            self._restore()

    def submit(self) -> None:
        if not self._pending:
            return
        self._make_room()
        self._pending, pipeline = False, self._pipeline
        lane = pipeline.travel.lanes[1]
        for name, number in self._numbers.items():
            grad, weight = self._grads.pop(name).view(-1), self.params[name].data.view(-1)
            left = self._left.get(name)
            marks = pipeline.travel.update(number, grad, (self._known,), self._factor, self._scale, None, left, weight)
            lane.uses(grad)
            _, self._filled, self._left[name] = marks
        pipeline.travel.settle(lost=False)

    def ready(self) -> None:
        if not self._pending:
            self._restore()
        self.submit()
        self._pipeline.compute.after(self._filled)

    def drain(self) -> None:
        self.ready()
        for mark in filter(None, self._left.values()):
            mark.synchronize()

    def refresh(self) -> None:
        """The device's weights are the only ones."""


def _alone(param: nn.Parameter) -> bool:
    """Whether nothing else is in the parameter's memory, and that may be given up."""
    storage = param.untyped_storage()
    return storage.resizable() and storage.nbytes() == param.nbytes


def _state_on_host(param: nn.Parameter, spec: OptimizerSpec, device: torch.device) -> dict[str, Tensor]:
    """The parameter's optimizer state, pinned."""
    state = Updater({"": param.detach().cpu()}, spec).state[""]
    return {k: v if k == "step" else _pinned(v.view(-1), device).view(v.shape) for k, v in state.items()}


def _pinned(flat: Tensor, device: torch.device) -> Tensor:
    """The host tensor in pinned memory: itself, unless it is small (`pinned_empty`)."""
    return pinned_empty(len(flat), flat.dtype, device).copy_(flat) if flat.nbytes < SMALL else pin(flat, device)


def _seen_by(device: torch.device, source: Tensor) -> Tensor:
    """A pinned tensor as one of the device, in the same memory."""
    kind = f"<i{source.element_size()}"
    facts = {"shape": tuple(source.shape), "typestr": kind, "data": (_address(source), False), "version": 3}
    return torch.as_tensor(_Memory(facts), device=device).view(source.dtype)


def _address(source: Tensor) -> int:
    """Where the current GPU finds a pinned host tensor; 0: it does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # not on Linux
        return 0
    found = ctypes.c_uint64()
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(source.data_ptr()), 0)
    return found.value if code == 0 else 0


class _Memory:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = facts
