"""What stands behind a streamed model: where everything lies, and how a layer runs as one autograd function."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.errors import T1Error, require
from t1lib.memory import GIB, host_available, trim_heap
from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace
from t1lib.train.activations import Autocast, Inputs, Piece, Randomness, Saved, kept_graph, split_rows, tensors_in
from t1lib.train.lanes import uninterrupted
from t1lib.train.layers import HostLayer, Layout, streamed_names
from t1lib.train.optimizer import ResidentUpdates, StreamOptimizer, groups_of, rules_of
from t1lib.train.recompute import Recomputation
from t1lib.train.schedule import Schedule
from t1lib.train.travel import Span
from t1lib.train.update import Precision, Rule

CACHES = ("past_key_values", "past_key_value")  # a recomputation would append to them a second time


class Engine:
    """One streamed model. Its layers call `run`, its optimizer `step`.

    wish    gpu_memory, plan_for and choice, as in `stream`
    host    the layers whose parameters are on the host
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, stack: Sequence[nn.Module], device: torch.device,
        precision: Precision, micro_batch: int | None, in_backward: bool, overlap: bool, wish: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.model, self.stack, self.device, self.precision = model, list(stack), device, precision
        self.micro_batch, self.in_backward, self.overlap, self.wish = micro_batch, in_backward, overlap, wish
        self.trace: NoTrace = NoTrace()
        self._refuse(streamed := streamed_names(self.stack))
        first = dict(self.stack[0].named_parameters())
        self._groups, self._optimizer = groups_of(optimizer), optimizer
        order = sorted(streamed, key=lambda n: self._groups.get(id(first[n]), 0))  # one group side by side
        self.layout = Layout({n: first[n] for n in order})
        self._require_host_memory()
        self.schedule: Schedule | None = None  # until everything has its place
        self.host: list[HostLayer] = []
        self._homes: dict[int, tuple[HostLayer, str]] = {}  # by the id of a streamed parameter
        self.optimizer = StreamOptimizer(self, optimizer)
        del self._optimizer
        self.resident = ResidentUpdates(precision, self.optimizer.state)
        self._take_over()
        gpu_memory, plan_for, choice = wish
        if gpu_memory is None or choice is not None:
            self.place(choice or Choice())
        elif plan_for is not None:
            self._plan(*plan_for)

    # -- placing ---------------------------------------------------------------------------------------------------

    def _refuse(self, streamed: list[str]) -> None:
        seen: dict[int, str] = {}
        for index, layer in enumerate(self.stack):
            for name, param in layer.named_parameters():
                if name in streamed:
                    where = f"{name!r} of layer {index}"
                    require(id(param) not in seen, f"{where} is also {seen.get(id(param))}: stream would untie them")
                    seen[id(param)] = where
        inside = {id(m) for layer in self.stack for m in layer.modules()}
        for prefix, module in self.model.named_modules():
            for name, param in module.named_parameters(recurse=False) if id(module) not in inside else ():
                where = f"{prefix}.{name}".strip(".")
                require(id(param) not in seen, f"{where!r} is also {seen.get(id(param))}: stream would untie them")

    def _require_host_memory(self) -> None:
        """Refuse before anything is moved. One layer's weights are held twice, as they move layer by layer."""
        dtype, rules = self.layout.dtype, rules_of(self._optimizer.param_groups, self.device)
        like = torch.empty(0, dtype=dtype)
        kinds = {k: d for rule in rules for k, d in self.precision.kinds(like, rule).items()}
        each = sum(kind.itemsize for kind in kinds.values()) + dtype.itemsize * (not self.in_backward)
        trained = sum(next(iter(layer.parameters())).requires_grad for layer in self.stack)
        need = self.layout.numel * (dtype.itemsize + trained * each)
        free = host_available()
        require(need <= free, f"the host has {free / GIB:.1f} GiB to give; streaming needs {need / GIB:.1f} GiB more")

    def _take_over(self) -> None:
        """Move the layers' parameters to the host, the rest to the device, and make the layers run through `run`."""
        names = {id(layer): name for name, layer in self.model.named_modules()}
        for index, layer in enumerate(self.stack):
            held = HostLayer(layer, index, names[id(layer)], self.layout, self.device)
            held.spans = self._spans(held)
            self.host.append(held)
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
        me = weakref.ref(self)  # the model must not keep its engine alive
        for index, layer in enumerate(self.stack):
            layer.forward = partial(_run, me, index)
            layer._apply = partial(_stay, layer)
        self.model._t1_engine = me
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)

    def _spans(self, held: HostLayer) -> list[Span]:
        """The layer's parameters by group; on a CPU each alone, as PyTorch would update it."""
        spans: list[Span] = []
        for name in self.layout.shapes:
            at, group = self.layout.span(name), self._groups.get(id(held.params[name]), -1)
            if spans and spans[-1].group == group and self.device.type == "cuda":
                at = slice(spans.pop().at.start, at.stop)
            spans.append(Span(at, group))
        return [span for span in spans if span.group >= 0]

    def place(self, choice: Choice) -> None:
        """Make the buffers, and keep on the device what `choice` keeps there."""
        count = len(self.stack)
        for name, value, most in (("resident", choice.resident, count), ("keep", choice.keep, count)):
            require(0 <= value <= most, f"choice of {name}={value}; allowed: 0 to {most}, the model's layers")
        require(choice.slots >= 1 and choice.grad_slots >= 1, "choice of 0 slots; allowed: 1 or more")
        self.choice = choice
        for held in self.host[: choice.resident]:
            held.show()
            for name, param in held.params.items():
                param.data = held.views[name].to(self.device)
                del self._homes[id(param)]
        self.host = self.host[choice.resident :]
        share = choice.host_share
        on_host = {h.index for n, h in enumerate(self.host) if int((n + 1) * share + 1e-9) > int(n * share + 1e-9)}
        self.schedule = Schedule(
            {held.index: held for held in self.host}, self.layout, self.device, slots=choice.slots,
            grad_slots=choice.grad_slots, on_host=on_host, in_backward=self.in_backward, precision=self.precision,
            rules=self.optimizer.rules, overlap=self.overlap, trace=lambda: self.trace,
        )  # fmt: skip
        for held in self.host if self.schedule.has_state else ():
            for name, param in held.params.items() if held.trained else ():
                state = {key: self.layout.views(flat)[name] for key, flat in held.state.items()}
                self.optimizer.state[param] = {"step": held.step, **state}
        lanes = self.schedule.inward, self.schedule.outward
        self._inputs = Inputs(self.device, *lanes, lambda: self.trace) if choice.inputs == "host" else None
        self._recomputation = Recomputation(whole=False)
        weakref.finalize(self, self.schedule.thread.close)
        before, self.optimizer._before = self.optimizer._before, {}
        self.optimizer.take_over(before)

    def others(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters that do not stream."""
        for group in self.optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in self._homes)

    def weight_of(self, param: nn.Parameter) -> Tensor:
        held, name = self._homes.get(id(param), (None, ""))
        return param.data if held is None else held.views[name]

    def state_of(self, param: nn.Parameter, rule: Rule) -> dict[str, Tensor]:
        return self.optimizer.state[param] if id(param) in self._homes else self.resident.state_of(param, rule)

    # -- a layer ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def run(self, index: int, *args: Any, **kwargs: Any) -> Tensor:
        """Run layer `index` as the model calls it."""
        hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), ())
        require(isinstance(hidden, Tensor), f"layer {index} was called without a tensor of hidden states first")
        if self.schedule is None:
            self._plan(*hidden.shape[:2])
        layer, grad = self.stack[index], torch.is_grad_enabled()
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

    def forward(self, index: int, whole: Piece, save: bool, wanted: bool) -> tuple[Tensor, Saved]:
        """Run the layer on a batch; returns the output and, with `save`, what the backward needs. wanted: whether the
        input needs a gradient"""
        schedule, keep = self.schedule, save and index >= len(self.stack) - self.choice.keep
        saved, outputs = Saved(Autocast.now(self.device), graphs=[] if keep else None), []
        streams = index in schedule.layers
        self._bind(index)
        try:
            for piece in split_rows(whole, self.micro_batch):
                random = Randomness.now(self.device) if save and not keep else None
                with saved.autocast.again(), self.trace.span("compute", "forward", index):
                    if keep:
                        x = piece.hidden.detach().requires_grad_(wanted)
                        buffer = partial(schedule.buffer, index) if streams else None
                        with torch.enable_grad(), kept_graph(buffer):
                            out = self._call(index, x, piece)
                        saved.graphs.append((x, out))
                    else:
                        out = self._call(index, piece.hidden, piece)
                outputs.append(out.detach())
                if random is not None:
                    random.note_use()
                    saved.random.append(random)
        finally:
            following = index + self.choice.slots
            self._release(index, following if save else following % len(self.stack))
        if save and not keep and self._inputs is not None:
            saved.input = self._inputs.put(whole.hidden, index)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), saved

    def backward(self, index: int, whole: Piece, saved: Saved, grad: Tensor, wanted: bool) -> Tensor | None:
        """Return the gradient of the layer's input, given that of its output, and send off the layer's own."""
        found: list[Tensor] = []
        self._bind(index, again=True)
        try:
            for k, piece in enumerate(split_rows(whole, self.micro_batch)):
                part = grad if len(grad) == len(piece.hidden) else grad[k * self.micro_batch :][: len(piece.hidden)]
                with ExitStack() as stack:
                    if saved.graphs is None:
                        x = piece.hidden.detach().requires_grad_(wanted)
                        stack.enter_context(saved.autocast.again())
                        span = self.trace.span("compute", "recompute", index)
                        with torch.enable_grad(), saved.random[k].again(), span:
                            out = self._recomputation.run(self.stack[index], partial(self._call, index, x, piece))
                    else:
                        x, out = saved.graphs[k]
                if k == 0 and index in self.schedule.layers:
                    self.schedule.want_gradients(index)
                with self.trace.span("compute", "backward", index):
                    torch.autograd.backward(out, part)
                found.append(x.grad)
            with uninterrupted():
                if index in self.schedule.layers:
                    self.schedule.gradients_done(index)
                self._release(index, index - self.choice.slots, again=True)
                if index in self.schedule.layers:
                    self.schedule.send(index)
        except BaseException:
            self._release(index, -1, again=True)
            raise
        if not wanted:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

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
        if schedule is None:
            return
        for held in self.host:
            few = held.trained and 0 < len(held.absent) < len(held.params)
            require(not few, f"p.grad is None for some parameters of {held.name}: set all of a layer to None, or none")
        rules = self.optimizer.rules()
        with uninterrupted():
            self.resident.step(self.optimizer.param_groups, rules, lambda p: id(p) not in self._homes)
            for held in self.host:
                if held.has_gradients:
                    schedule.begin(held, rules)
            schedule.start()

    def drain(self) -> None:
        """Wait until all updates have ended."""
        if self.schedule is not None:
            self.schedule.drain()

    def close(self) -> None:
        """Give the model back as an ordinary one."""
        try:
            self.drain()
        finally:
            for held in self.host:
                held.give_back()
            self.host, self._homes = [], {}
            for layer in self.stack:
                layer.__dict__.pop("forward", None)
                layer.__dict__.pop("_apply", None)
            self.model.__dict__.pop("_t1_engine", None)
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


def _run(me: "weakref.ref[Engine]", index: int, *args: Any, **kwargs: Any) -> Tensor:
    engine = me()
    require(engine is not None, "the model's optimizer is gone: keep what `stream` returned as long as the model runs")
    return engine.run(index, *args, **kwargs)


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
