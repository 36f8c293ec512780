"""What stands behind a streamed model: where everything lies, and how a layer runs as one autograd function."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.errors import T1Error, require
from t1lib.memory import trim_heap
from t1lib.plan.cost import Choice, updated_by_host
from t1lib.plan.work import launch_bound
from t1lib.timing import NoTrace
from t1lib.train.activations import Autocast, Inputs, Piece, Randomness, Saved, kept_graph, split_rows, tensors_in
from t1lib.train.graphs import LayerGraphs
from t1lib.train.lanes import UpdateThread, uninterrupted
from t1lib.train.layers import HostLayer, Layout, streamed_names
from t1lib.train.optimizer import ResidentUpdates, StreamOptimizer, groups_of, rules_of
from t1lib.train.outer import Outer
from t1lib.train.placing import planned, refuse_shared, require_host_memory
from t1lib.train.recompute import Recomputation
from t1lib.train.schedule import Schedule
from t1lib.train.update import Precision, Rule

WORKSPACE = 2**29  # bytes that are planned for a patched head
CACHES = ("past_key_values", "past_key_value")  # a recomputation would append to them a second time


class Engine:
    """One streamed model. Its layers call `run`, its optimizer `step`.

    wish    bytes of gpu_memory, plan_for and choice, as in `stream`
    head    of the loss, as in `stream`
    host    the layers whose parameters are on the host
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, stack: Sequence[nn.Module], device: torch.device,
        precision: Precision, micro_batch: int | None, in_backward: bool, overlap: bool, wish: tuple[Any, ...],
        head: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        self.model, self.stack, self.device, self.precision = model, list(stack), device, precision
        self.micro_batch, self.in_backward, self.overlap, self.wish = micro_batch, in_backward, overlap, wish
        self.head = head
        self.trace: NoTrace = NoTrace()
        streamed, self._groups = streamed_names(self.stack), groups_of(optimizer)
        refuse_shared(model, self.stack, streamed)
        first = dict(self.stack[0].named_parameters())
        order = sorted(streamed, key=lambda n: self._groups.get(id(first[n]), 0))  # one group side by side
        self.layout = Layout({n: first[n] for n in order})
        require_host_memory(self.layout, self.stack, precision, rules_of(optimizer.param_groups, device), in_backward)
        self.schedule: Schedule | None = None  # until everything has its place
        self.host: list[HostLayer] = []
        self.closed, self.placed, self.outer = False, False, None
        self._updated: set[int] = set()  # layers that were updated since the last step, in the backward
        self._homes: dict[int, tuple[HostLayer, str]] = {}  # by the id of a streamed parameter
        self.optimizer = StreamOptimizer(self, optimizer)
        self._inputs: Inputs | None = None  # where layers' inputs wait on the host
        self._graphs: LayerGraphs | None = None
        self._alike: set[int] = set()  # layers all of whose parameters stream
        self._graph_tokens = launch_bound(self.layout.numel)
        self._random: set[int] = set()  # layers that draw random numbers
        # Forwards whose last layer has not run backward: a head's backward may still read its weight.
        self._open: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.resident = ResidentUpdates(precision, self.optimizer.state)
        budget, plan_for, choice = wish
        if choice is None and budget is None:
            choice = Choice()
        elif choice is None and plan_for is not None:
            choice = planned(self, None, *plan_for)
        try:
            self._take_over()
            if choice is not None:
                self.place(choice)
        except BaseException:
            self.close()
            raise

    # -- placing ---------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Move the layers' parameters to the host, the rest to the device, and make the layers run through `run`."""
        for index, layer in enumerate(self.stack):
            self.host.append(HostLayer(layer, index, self.layout, self.device, self._groups))
        self._homes = {id(p): (held, n) for held in self.host for n, p in held.params.items()}
        for module in self.model.modules():
            for param in module._parameters.values():
                if param is not None and id(param) not in self._homes:
                    _move(param, self.device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        trim_heap()  # gives back the memory that the layers occupied before they moved
        self._forwards = [layer.forward for layer in self.stack]
        replaced = any("forward" in vars(layer) for layer in self.stack)  # such as compiled: nothing can be left out
        self._recomputation = Recomputation(whole=replaced)
        me = weakref.ref(self)  # the model must not keep its engine alive
        for index, layer in enumerate(self.stack):
            layer.forward = partial(_run, me, index)
            layer._apply = partial(_stay, layer)
        self.model.zero_grad = partial(_zero_grad, me, self.model)
        self.model._t1_engine = me
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)

    def place(self, choice: Choice) -> None:
        """Make the buffers, and keep on the device what `choice` keeps there."""
        self.choice = choice
        for held in self.host[: choice.resident]:
            held.show()
            for name, param in held.params.items():
                param.data = held.views[name].to(self.device)
                del self._homes[id(param)]
        self.host = self.host[choice.resident :]
        outer = self._travelling() if choice.outer == "host" else []
        self.schedule = self._schedule(choice, guests=[p for p, _ in outer])
        self.placed = True
        for held in self.host if self.schedule.has_state else ():
            for name, param in held.params.items() if held.trained else ():
                state = {key: self.layout.views(flat)[name] for key, flat in held.state.items()}
                self.optimizer.state[param] = state
        if outer:
            params = {param for param, _ in outer}
            embed = next((m for m in self.model.modules() if type(m).__name__.endswith("Embedding")
                          and isinstance(m, nn.Embedding) and m.weight in params), None)  # fmt: skip
            self.outer = Outer(outer, embed, self.schedule, self.optimizer.rules(), self.precision)
            for held in self.outer.held:
                self.optimizer.state[held.param] = held.state
        lanes = self.schedule.inward, self.schedule.outward
        self._inputs = Inputs(self.device, *lanes, lambda: self.trace) if choice.inputs == "host" else None
        self._alike = {h.index for h in self.host if len(h.params) == sum(1 for _ in h.module.parameters())}
        if self.device.type == "cuda":
            self._graphs = LayerGraphs(self.stack)
            for held in self.host:
                held.kind = self._graphs.kinds[held.index]
        before, self.optimizer._before = self.optimizer._before, None
        self.optimizer.check(before)
        self.optimizer.take_over(before)

    def _schedule(self, choice: Choice, **others: Any) -> Schedule:
        made = Schedule(
            {held.index: held for held in self.host}, self.layout, self.device, slots=choice.slots,
            grad_slots=choice.grad_slots,
            on_host={h.index for k, h in enumerate(self.host) if updated_by_host(k, choice.host_share)},
            in_backward=self.in_backward, precision=self.precision, rules=self.optimizer.rules, overlap=self.overlap,
            trace=lambda: self.trace, **others,
        )  # fmt: skip
        weakref.finalize(self, _end, made.thread, self.device)
        return made

    def _travelling(self) -> list[tuple[nn.Parameter, int]]:
        """Trained matrices outside the layers, of the layers' dtype, with the numbers of their groups."""
        inside = {id(p) for layer in self.stack for p in layer.parameters()}
        found = [p for p in self.model.parameters() if id(p) not in inside and id(p) in self._groups]
        found = [p for p in found if p.requires_grad and p.dim() > 1 and p.dtype == self.layout.dtype]
        return [(p, self._groups[id(p)]) for p in found if p.is_contiguous()]

    def others(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters that do not stream."""
        for group in self.optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in self._homes)

    def weight_of(self, param: nn.Parameter) -> Tensor:
        held, name = self._homes.get(id(param), (None, ""))
        return param.data if held is None else held.views[name]

    def state_of(self, param: nn.Parameter, rule: Rule) -> dict[str, Tensor]:
        if id(param) in self._homes or self._travels(param):
            return self.optimizer.state.get(param, {})
        return self.resident.state_of(param, rule)

    def count_of(self, param: nn.Parameter) -> int:
        """How many updates the parameter has seen."""
        if id(param) in self._homes:
            held, name = self._homes[id(param)]
            return held.counts[name]
        return self.outer.by_param[param].count if self._travels(param) else self.resident.counts.get(param, 0)

    def set_count(self, param: nn.Parameter, count: int) -> None:
        if id(param) in self._homes:
            held, name = self._homes[id(param)]
            held.counts[name] = count
        elif self._travels(param):
            self.outer.by_param[param].count = count
        else:
            self.resident.counts[param] = count

    def _travels(self, param: nn.Parameter) -> bool:
        return self.outer is not None and param in self.outer.by_param

    def changed(self) -> None:
        """Weights and state were loaded: what was copied of them is out of date."""
        for held in self.host:
            held.touched = True
        if self.outer is not None:
            self.outer.refresh()

    # -- a layer ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def run(self, index: int, *args: Any, **kwargs: Any) -> Tensor:
        """Run layer `index` as the model calls it."""
        hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), ())
        require(isinstance(hidden, Tensor), f"layer {index} was called without a tensor of hidden states first")
        layer, grad = self.stack[index], torch.is_grad_enabled()
        if not self.placed and (grad or self.schedule is None):
            with torch.inference_mode(False):  # buffers are for training, too
                self._be_placed(grad, Piece(hidden, args, kwargs))
        trains = grad and any(p.requires_grad for p in layer.parameters())
        if not (trains or (grad and hidden.requires_grad)):
            with torch.no_grad():
                return self.forward(index, Piece(hidden, args, kwargs), save=False, wanted=False)[0]
        again = getattr(layer, "gradient_checkpointing", False) and layer.training
        require(not again, "the model's own gradient checkpointing is on; stream recomputes layers itself: turn it off")
        needy = any(t.requires_grad for t in tensors_in(args, kwargs))
        require(not needy, f"layer {index} is given an argument that needs a gradient, beside its hidden states")
        kwargs |= {name: None for name in CACHES if kwargs.get(name) is not None}
        return _Layer.apply(self._anchor if trains else None, hidden, self, index, args, kwargs)

    def _be_placed(self, trains: bool, piece: Piece) -> None:
        if trains and not self.placed:
            self.place(planned(self, piece, *piece.hidden.shape[:2]))
        elif self.schedule is None:  # the batches that are trained on are not known yet
            self.choice, self.schedule = Choice(), self._schedule(Choice(), trains=False)

    def forward(self, index: int, whole: Piece, save: bool, wanted: bool) -> tuple[Tensor, Saved]:
        """Run the layer on a batch; returns the output and, with `save`, what the backward needs. wanted: whether the
        input needs a gradient"""
        schedule, keep = self.schedule, save and index >= len(self.stack) - self.choice.keep
        saved, outputs = Saved(Autocast.now(self.device), graphs=[] if keep else None), []
        streams = index in schedule.layers
        self._bind(index)
        try:
            cached = any(whole.kwargs.get(name) is not None for name in CACHES)
            for piece in split_rows(whole, None if cached else self.micro_batch):
                random = Randomness.now(self.device) if save and not keep else None
                with saved.autocast.again(), self.trace.span("compute", "forward", index):
                    if keep:
                        x = piece.hidden.detach().requires_grad_(wanted)
                        buffer = partial(schedule.buffer, index) if streams else None
                        with torch.enable_grad(), kept_graph(buffer):
                            out = self._call(index, x, piece)
                        saved.graphs.append((x, out))
                    elif self._has_graph(index, piece):
                        call = lambda x, a, kw: self._call(index, x, Piece(x, a, kw))  # noqa: E731
                        place = schedule.place(index), self.stack[index].training
                        out = self._graphs.run(index, place, call, piece.hidden.detach(), piece.args, piece.kwargs)
                    else:
                        out = self._call(index, piece.hidden, piece)
                outputs.append(out.detach())
                if random is not None:
                    random.note_use()
                    saved.random.append(random)
                    if random.used:
                        self._random.add(index)
            if self.outer is not None:
                self.outer.passed(index, len(self.stack))
                if index == len(self.stack) - 1:
                    self.outer.ready()
        finally:
            following = index + self.choice.slots
            self._release(index, following if save else following % len(self.stack))
        if save and index == len(self.stack) - 1:
            self._open.add(saved)
        if save and not keep and self._inputs is not None:
            saved.input = self._inputs.put(whole.hidden, index)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), saved

    def backward(self, index: int, whole: Piece, saved: Saved, grad: Tensor, wanted: bool) -> Tensor | None:
        """Return the gradient of the layer's input, given that of its output, and send off the layer's own."""
        found, graphed = [], False
        self._open.discard(saved)
        if self.outer is not None and index == len(self.stack) - 1 and not self._open:
            self.outer.leave()
        self._bind(index, again=True)
        try:
            for k, piece in enumerate(split_rows(whole, self.micro_batch)):
                part = grad if len(grad) == len(piece.hidden) else grad[k * self.micro_batch :][: len(piece.hidden)]
                eager = saved.graphs is not None or saved.random[k].used or saved.autocast.enabled
                if not eager and self._has_graph(index, piece):
                    graphed = True
                    if k == 0:
                        self._want_gradients(index)
                    place = self.schedule.place(index, gradients=True), self.stack[index].training, wanted
                    again = partial(self._again, index, wanted)
                    with self.trace.span("compute", "backward", index):
                        arguments = piece.hidden.detach(), part, piece.args, piece.kwargs
                        found.append(self._graphs.run(index, place, again, *arguments))
                    continue
                with ExitStack() as stack:
                    if saved.graphs is None:
                        x = piece.hidden.detach().requires_grad_(wanted)
                        stack.enter_context(saved.autocast.again())
                        span = self.trace.span("compute", "recompute", index)
                        with torch.enable_grad(), saved.random[k].again(), span:
                            out = self._recomputation.run(self.stack[index], partial(self._call, index, x, piece))
                    else:
                        x, out = saved.graphs[k]
                if k == 0:
                    self._want_gradients(index)
                with self.trace.span("compute", "backward", index):
                    torch.autograd.backward(out, part)
                found.append(x.grad)
            with uninterrupted():
                if index in self.schedule.layers:
                    self.schedule.gradients_done(index, graphed)
                self._release(index, index - self.choice.slots, again=True)
                if index in self.schedule.layers:
                    self.schedule.send(index)
        except BaseException:
            self._release(index, -1, again=True)
            raise
        if not wanted:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

    def _again(self, index: int, wanted: bool, x: Tensor, grad: Tensor, args: Any, kwargs: Any) -> Tensor | None:
        """Recompute the layer and run its backward: what a CUDA graph holds."""
        x = x.detach().requires_grad_(wanted)
        with torch.enable_grad():
            call = partial(self._call, index, x, Piece(x, args, kwargs))
            out = self._recomputation.run(self.stack[index], call)
        torch.autograd.backward(out, grad)
        return x.grad

    def _has_graph(self, index: int, piece: Piece) -> bool:
        """Whether the layer may run as a CUDA graph: it is launch-bound, does the same every time, and all that it uses
        comes in through the slots or as an argument."""
        if self._graphs is None or index not in self._alike or index in self._random:
            return False
        few = piece.hidden.shape[:-1].numel() <= self._graph_tokens
        odd = torch.is_autocast_enabled(self.device.type) or torch.is_inference_mode_enabled()
        return few and not odd and all(piece.kwargs.get(name) is None for name in CACHES)

    def _want_gradients(self, index: int) -> None:
        if index not in self.schedule.layers:
            return
        if self.in_backward and self.schedule.layers[index].trained:
            twice = "a second backward before step(), with update_in_backward=True: leave that out to accumulate"
            require(index not in self._updated, twice)
            self._updated.add(index)
        self.schedule.want_gradients(index)

    def _call(self, index: int, hidden: Tensor, piece: Piece) -> Tensor:
        out = self._forwards[index](hidden, *piece.args, **piece.kwargs)
        kind = type(out).__name__
        require(isinstance(out, Tensor), f"layer {index} returns a {kind}; allowed: one tensor, the hidden states")
        return out

    def _bind(self, index: int, again: bool = False) -> None:
        if index in self.schedule.layers:
            self.schedule.bind(index, again)

    def _release(self, index: int, following: int, again: bool = False) -> None:
        if index in self.schedule.layers:
            self.schedule.release(index, following, again)

    # -- updates ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin an update of everything that has gradients."""
        schedule = self.schedule
        require(not self.closed, "a step of an optimizer that was closed; make another one, or stream again")
        if not self.placed:
            return
        rules, self._updated = self.optimizer.rules(), set()
        with uninterrupted():
            stays = lambda p: id(p) not in self._homes and not self._travels(p)  # noqa: E731
            self.resident.step(self.optimizer.param_groups, rules, stays)
            for held in self.host:
                if held.has_gradients:
                    schedule.begin(held, rules)
            if self.outer is not None:
                self.outer.begin(rules)
            schedule.start()

    def drain(self) -> None:
        """Wait until all updates have ended."""
        if self.schedule is not None:
            self.schedule.drain()
            if self.outer is not None:
                self.outer.drain()

    def close(self) -> None:
        """Give the model back as an ordinary one."""
        if self.closed:
            return
        self.closed = True
        try:
            self.drain()
            if self.outer is not None:
                self.outer.close()
        finally:
            for held in self.host:
                held.give_back()
            self.host, self._homes = [], {}
            for layer in self.stack:
                layer.__dict__.pop("forward", None)
                layer.__dict__.pop("_apply", None)
            for name in ("_t1_engine", "zero_grad"):
                self.model.__dict__.pop(name, None)
            if self.schedule is not None:
                self.schedule.thread.close()


class _Layer(torch.autograd.Function):
    """One layer on the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, hidden: Tensor, engine: Engine, index: int, args: Any, kwargs: Any
    ) -> Tensor:
        ctx.engine, ctx.index, ctx.args, ctx.kwargs = engine, index, args, kwargs
        out, ctx.saved = engine.forward(index, Piece(hidden, args, kwargs), save=True, wanted=ctx.needs_input_grad[1])
        on_device = ctx.saved.graphs is None and ctx.saved.input is None
        ctx.save_for_backward(*([hidden] if on_device else []))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise T1Error("a second backward through a streamed layer; run the forward again")
        if saved.graphs is not None:
            hidden = torch.cat([x for x, _ in saved.graphs]) if len(saved.graphs) > 1 else saved.graphs[0][0]
        else:
            hidden = ctx.saved_tensors[0] if saved.input is None else saved.input.take()
        piece = Piece(hidden.detach(), ctx.args, ctx.kwargs)
        return None, ctx.engine.backward(ctx.index, piece, saved, grad, ctx.needs_input_grad[1]), None, None, None, None


def _end(thread: UpdateThread, device: torch.device) -> None:
    """After the last reference to an engine: nothing may still be using the memory that goes with it."""
    thread.close()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(me: "weakref.ref[Engine]", index: int, *args: Any, **kwargs: Any) -> Tensor:
    engine = me()
    require(engine is not None, "the model's optimizer is gone: keep what `stream` returned as long as the model runs")
    return engine.run(index, *args, **kwargs)


def _zero_grad(me: "weakref.ref[Engine]", model: nn.Module, set_to_none: bool = True) -> None:
    """In place of `nn.Module.zero_grad`, which looks at each gradient first, and so would wait for all updates."""
    engine = me()
    if engine is None:
        nn.Module.zero_grad(model, set_to_none)
        return
    engine.optimizer.zero_grad(set_to_none)
    for param in model.parameters():  # the optimizer may not have all of them
        if id(param) not in engine._homes and param.grad is not None:
            param.grad = None if set_to_none else torch.zeros_like(param.grad)


def _stay(layer: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module._apply`, which `.to(device)` and `.half()` call: a streamed layer stays where it is."""
    like = next(layer.parameters())
    with torch._C.DisableTorchFunctionSubclass():
        dtype = function(torch.zeros(0, dtype=like.dtype)).dtype
    require(dtype == like.dtype, f"a streamed model cannot become {dtype}: convert it before `stream`")
    return layer


def _move(param: nn.Parameter, device: torch.device) -> None:
    if param.device != device:
        param.data = param.data.to(device)
        param.grad = None if param.grad is None else param.grad.to(device)
