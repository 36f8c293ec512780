"""The engine behind a streamed model: it decides and knows where everything lies, from `stream` to `close`."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.errors import T1Error, require
from t1lib.memory import trim_heap
from t1lib.optimizers import Precision
from t1lib.plan.cost import Choice, which_stay
from t1lib.timing import NoTrace
from t1lib.train.activations import Piece
from t1lib.train.lanes import uninterrupted
from t1lib.train.layers import HostLayer, Layout, streamed_names
from t1lib.train.optimizer import StreamOptimizer, clear_gradients
from t1lib.train.outer import Outer
from t1lib.train.passes import Passes, without_caches
from t1lib.train.placing import planned, refuse_recorded, refuse_shared, require_host_memory
from t1lib.train.schedule import Schedule


class Engine:
    """One streamed model. Its layers call `run`, its optimizer `step`. Arguments are as in `stream`; budget: bytes of
    gpu_memory; former: the model's engine so far, closed once nothing but too little host memory can be refused"""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, stack: Sequence[nn.Module], *, device: torch.device,
        precision: Precision, micro_batch: int | None, in_backward: bool, accumulate: bool, overlap: bool,
        budget: int | None, plan_for: tuple[int, int] | None, choice: Choice | None, head: dict[str, Any] | None,
        former: "Engine | None",
    ) -> None:  # fmt: skip
        self.model, self.stack, self.device, self.precision = model, list(stack), device, precision
        self.micro_batch, self.in_backward, self.overlap, self.budget = micro_batch, in_backward, overlap, budget
        self.accumulate, self.head = accumulate and not in_backward, head
        self.trace: NoTrace = NoTrace()
        self._lock = threading.RLock()
        self.optimizer = StreamOptimizer(self, optimizer)
        groups = self.optimizer.groups
        streamed = streamed_names(self.stack, groups)
        refuse_shared(model, self.stack, streamed)
        params = dict(self.stack[0].named_parameters())  # as in all layers
        order = sorted(streamed, key=lambda n: groups.get(id(params[n]), 0))  # a group's parameters side by side
        self.layout = Layout({n: params[n] for n in order})
        if former is not None:
            former.close()
        require_host_memory(self, choice)
        self.host: list[HostLayer] = []
        self.streamed: set[int] = set()  # ids of the parameters on the host
        self.outer: Outer | None = None  # updates matrices outside the layers whose state is on the host
        self.schedule: Schedule | None = None
        self.passes: Passes | None = None
        self.closed = self.placed = False
        self.undo = ExitStack()  # how `close` restores the model
        if choice is None and budget is None:
            choice = Choice()
        elif choice is None and plan_for is not None:
            choice = planned(self, None, *plan_for)
        try:
            with self.alone():
                self._install()
                if choice is not None:
                    self.place(choice)
        except BaseException:
            self.close()
            raise

    def _install(self) -> None:
        """Move the layers' parameters to the host, the rest to the device, and make the layers run through `run`."""
        self.forwards = [layer.forward for layer in self.stack]
        for index, layer in enumerate(self.stack):
            self.host.append(HostLayer(self, index))
            self.streamed.update(map(id, self.host[-1].params.values()))
            self._replace(layer, "forward", _Instead(self, Engine.run, index))
            self._replace(layer, "_apply", partial(_apply, self.layout.dtype, True, layer))
        for param in self.model.parameters():
            if id(param) not in self.streamed and param.device != self.device:
                param.data = param.data.to(self.device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        trim_heap()  # gives back the memory that the layers occupied before they moved
        self._replace(self.model, "zero_grad", _Instead(self, Engine.zero_grad))
        self._replace(self.model, "_apply", partial(_apply, self.layout.dtype, False, self.model))
        if hasattr(self.model, "config"):
            self.undo.callback(self.model.register_forward_pre_hook(refuse_recorded, with_kwargs=True).remove)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Give a module another method, or attribute, until `close`."""
        own = module.__dict__
        self.undo.callback(own.update, {name: own[name]} if name in own else {})
        self.undo.callback(own.pop, name, None)  # runs first: the stack is undone in reverse order
        own[name] = value

    def place(self, choice: Choice) -> None:
        """Make the buffers, and keep on the device what `choice` keeps there. If that fails, it closes the engine."""
        given = self.optimizer.state
        try:
            self._place(choice)
        except BaseException:
            self.close()
            self.optimizer.state, self.placed = given, False
            raise

    def _place(self, choice: Choice) -> None:
        self._drop_runners()  # of the buffers that an evaluation made, if one came first
        stay = which_stay([held.trained for held in self.host], choice.resident)
        for held in compress(self.host, stay):
            held.give_back(self.device)
            self.streamed.difference_update(map(id, held.params.values()))
        self.host = list(compress(self.host, ~stay))
        self._make_runners(choice, trains=True)
        before, counts = self.optimizer.state, self.optimizer.counts
        state = self.optimizer.state = defaultdict(dict)
        for held in self.host:
            views = {key: self.layout.views(flat) for key, flat in held.state.items()}
            for name, param in held.params.items():
                counts[param] = 0
                if views:
                    state[param] = {key: by_name[name] for key, by_name in views.items()}
        for held in () if self.outer is None else self.outer.held:
            counts[held.param] = 0
            state[held.param] = {key: flat.view(held.param.shape) for key, flat in held.state.items()}
        self.placed = True
        self.optimizer.take_over(before)

    def may_travel(self) -> list[nn.Parameter]:
        """Trained matrices outside the layers, of the layers' dtype, whose gradients are dense."""
        stay = {id(p) for layer in self.stack for p in layer.parameters()}
        embeddings = [m for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        stay |= {id(embedding.weight) for embedding in embeddings if embedding.sparse}
        found = [p for p in self.model.parameters() if id(p) not in stay and id(p) in self.optimizer.groups]
        found = [p for p in found if p.requires_grad and p.dim() > 1 and p.is_contiguous()]
        return [p for p in found if p.dtype == self.layout.dtype]

    def _make_runners(self, choice: Choice, trains: bool) -> None:
        self.choice, outer = choice, self.may_travel() if choice.outer == "host" else []
        self.schedule = Schedule(self, outer, trains)
        self._end_thread = weakref.finalize(self, self.schedule.thread.close)
        if outer:
            self.outer = Outer(self, outer)
            if self.outer.embed is not None:
                self._replace(self.outer.embed, "forward", _Instead(self, Engine.look_up, self.outer.embed.forward))
        self.passes = Passes(self)

    def _drop_runners(self) -> None:
        """Free what runs the layers, once nothing that is queued uses it."""
        if self.schedule is not None:
            self._end_thread()
        if self.passes is not None:
            self.passes.close()
        self.schedule = self.outer = self.passes = None

    @torch.compiler.disable
    def run(self, index: int, *args: Any, **kwargs: Any) -> Tensor:
        """Run layer `index` as the model calls it. If there is no plan yet, the first call that trains makes it."""
        with self.alone():
            if self.closed:  # by another thread, since the model called this; or somebody kept this method
                return self.forwards[index](*args, **kwargs)
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), ())
            require(isinstance(hidden, Tensor), f"layer {index} was called without a tensor of hidden states first")
            if not self.placed:
                self._place_for(hidden, args, kwargs)
            return self.passes.run(index, hidden, args, kwargs)

    def _place_for(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a layer's first arguments if they train; else only what runs the layers."""
        trains = torch.is_grad_enabled()
        with torch.inference_mode(False):  # buffers are for training, too; this enables gradients
            if trains:
                fits = hidden.dim() > 1 and hidden.numel() > 0
                require(fits, f"gpu_memory, and a first batch of {tuple(hidden.shape)}; allowed: rows of tokens")
                piece = Piece(hidden, *without_caches(args, kwargs))  # a layer is run on it to see what it saves
                self.place(planned(self, piece, *hidden.shape[:2]))
            elif self.passes is None:
                self._make_runners(Choice(), trains=False)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Whatever uses the engine does so in this context: another thread, which may want to evaluate, waits until it
        ends, and signals such as Ctrl-C are heard only then."""
        with self._lock:  # for a wait that can be interrupted; handlers, which may wait for that thread, run without it
            pass
        with uninterrupted(), self._lock:
            yield

    @torch.compiler.disable
    def look_up(self, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        """Run the embedding whose state is on the host, and whose forward this replaces."""
        with self.alone():
            return forward(input) if self.closed else self.outer.look_up(input)

    def step(self) -> None:
        """Begin an update of everything that has gradients."""
        with self.alone():
            require(not self.closed, "a step of an optimizer that was closed; make another one, or stream again")
            if not self.placed:
                # Without a plan nothing can be updated yet, and to return would silently lose these gradients.
                early = "a step before the first forward, for which gpu_memory is planned; allowed: plan_for, or choice"
                require(not any(p.grad is not None for p in self.others()), early)
                return
            for held in self.host:  # first: it may raise
                held.accept_writes()
            self.optimizer.update(self.streamed | self.travelling)
            if self.outer is not None:
                self.outer.begin()
            self.schedule.step()

    @property
    def travelling(self) -> set[int]:
        """Ids of parameters outside the layers whose state is on the host."""
        return set() if self.outer is None else {id(held.param) for held in self.outer.held}

    def others(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in self.streamed)

    def unstreamed(self) -> list[nn.Parameter]:
        """The parameters that do not stream: the model's, and any that only the optimizer still has."""
        found = {id(p): p for p in (*self.model.parameters(), *self.others())}
        return [p for key, p in found.items() if key not in self.streamed]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """In place of `nn.Module.zero_grad`, which looks at each gradient first, and so would wait for all updates."""
        self.optimizer.zero_grad(set_to_none)
        clear_gradients(self.unstreamed(), set_to_none)  # the optimizer may not have all of them

    @property
    def failed(self) -> bool:
        """Whether an update has failed, so that nothing is left but to close."""
        return self.schedule is not None and bool(self.schedule.thread.error or self.schedule.travel.failed)

    def drain(self) -> None:
        with self.alone():
            try:
                if self.schedule is not None:
                    self.schedule.drain()
            finally:
                if self.outer is not None:
                    self.outer.drain()

    def close(self) -> None:
        """Give the model back as an ordinary one."""
        with self.alone():
            if self.closed:
                return
            self.closed = True
            try:
                for held in self.host:
                    held.accept_writes(assigned=True)
                self.drain()
            except BaseException:  # of an update, which may have changed some gradients
                for held in self.host:
                    held.grads.forget()
                raise
            finally:
                for held in self.host:
                    self.undo.callback(held.give_back)
                self.host, self.streamed = [], set()
                self.undo.callback(self._drop_runners)
                self.undo.close()  # in reverse order, and all of it, even if some fails


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a model that streams as a whole."""
    return getattr(vars(model).get("zero_grad"), "engine", None)


class _Instead:
    """Replaces a module's method with one of the engine's. first: passed before the arguments"""

    def __init__(self, engine: Engine, method: Callable[..., Any], *first: Any) -> None:
        self.engine, self._method, self._first = engine, method, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self.engine, *self._first, *args, **kwargs)

    def __reduce__(self) -> Any:  # `copy.deepcopy` and `pickle` come here
        raise T1Error("a copy of a streamed model would run the original's layers: copy its state_dict()")


def _apply(
    held: torch.dtype, stays: bool, module: nn.Module, function: Callable[[Tensor], Tensor], *recurse: Any, **named: Any
) -> nn.Module:
    """Replaces `nn.Module._apply`, which `.to(device)` and `.half()` call, in the model and in its streamed layers.
    held: the layers' dtype; stays: True for a layer, which is not moved"""
    dtype = function(torch.zeros(0, dtype=held)).dtype
    require(dtype == held, f"a streamed model cannot become {dtype}: convert it before `stream`")
    return module if stays else type(module)._apply(module, function, *recurse, **named)
