"""How a streamed model's layers run: each as one autograd function of the whole batch, `micro_batch` rows at a time.

The forward keeps the layer's input; the backward recomputes the layer from it, with the same random numbers. The last
`keep` layers keep their activations instead. Where kernel launches set the pace, layers run as CUDA graphs.
"""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves
from transformers import Cache

from t1lib.errors import T1Error, require
from t1lib.plan.work import launch_bound
from t1lib.train.activations import Inputs, Piece, Recompute, Saved, kept_graph, split_rows
from t1lib.train.graphs import LayerGraphs

if TYPE_CHECKING:
    from t1lib.train.engine import Engine


class Passes:
    """Forward and backward of an engine's layers."""

    def __init__(self, engine: "Engine") -> None:
        self.engine, self.stack, choice, self.device = engine, engine.stack, engine.choice, engine.device
        self._schedule, self._outer = engine.schedule, engine.outer  # which the engine may let go earlier
        self._kept = len(self.stack) - choice.keep  # the first layer that keeps its activations
        own = zip(self.stack, engine.forwards, strict=True)
        plain = all(getattr(forward, "__func__", None) is type(layer).forward for layer, forward in own)
        known = all(type(layer).__module__.startswith("transformers.models.") for layer in self.stack)
        self._recompute = Recompute(whole=not (plain and known))  # a compiled layer, for one, is recomputed whole
        # By layer, what each should find when it runs: a module's dict of parameters, a name in it, and the parameter.
        self._expected = [
            [(m._parameters, n, p) for m in layer.modules() for n, p in m._parameters.items() if p is not None]
            for layer in self.stack
        ]
        self._inputs = Inputs(self._schedule) if choice.inputs == "host" else None
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        # By layer and whether it trains, where it records tensors with a graph, such as an auxiliary loss; found once.
        self._recorded: dict[tuple[int, bool], list[tuple[dict[str, Any], str]]] = {}
        # Layers that may run as CUDA graphs: all that they use comes in through the slots or as an argument.
        held = self._schedule.layers.items()
        allowed = {i for i, own in held if len(own.params) == len([*self.stack[i].parameters()])}
        self._graphs = LayerGraphs(self.stack, allowed)
        self._graph_tokens = launch_bound(engine.layout.numel) if self.device.type == "cuda" else -1  # at most

    def close(self) -> None:
        """Let go of all buffers: an earlier loss may still hold this, and inputs on the host."""
        if self._inputs is not None:
            self._inputs.free.clear()
        self._schedule = self._outer = self._inputs = None
        self._graphs = LayerGraphs([], set())

    def run(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run layer `index` on hidden states (B, …) with the other arguments that the model gives it."""
        self._refuse_surroundings(index, hidden)
        layer, grad = self.stack[index], torch.is_grad_enabled()
        trains = grad and any(p.requires_grad for p in layer.parameters())
        caches = [getattr(v, "self_attention_cache", v) for v in (*args, *kwargs.values()) if isinstance(v, Cache)]
        keys = [getattr(cache.layers[index], "keys", None) for cache in caches if index < len(cache.layers)]
        earlier = [found for found in keys if found is not None]  # keys of earlier tokens
        if not (trains or (grad and any(t.requires_grad for t in (hidden, *earlier)))):
            return self.forward(index, Piece(hidden, args, kwargs), save=False)[0]
        require(not earlier, "past_key_values that hold tokens, as in prefix tuning; to decode, use torch.no_grad()")
        self._refuse_to_train(index)
        if layer.training:  # caches stay empty, as under transformers' own checkpointing
            args, kwargs = without_caches(args, kwargs)
        out = _Layer.apply(self._anchor if trains else None, hidden, self, index, args, kwargs)
        for own, name in self._recorded.get((index, layer.training), ()):
            if isinstance(own.get(name), Tensor):
                own[name] = _Recorded.apply(self._anchor, own[name].detach(), f"{name!r} of layer {index}")
        return out

    def _refuse_surroundings(self, index: int, hidden: Tensor) -> None:
        """Raise `T1Error` if the layer has other parameters now, or something transforms the call."""
        for params, name, own in self._expected[index]:
            if params.get(name) is not own and params.get(name) is not None:
                where = f"{name!r} in layer {index} is another parameter than `stream` was given"
                raise T1Error(f"{where}, as in functional_call; allowed: changes of its values")
        within = parametrize._cache_enabled or torch._C._functorch.is_gradtrackingtensor(hidden)
        within = within or torch.autograd.forward_ad._current_level >= 0
        require(not within, "streamed layers within parametrize.cached(), torch.func, or forward-mode differentiation")

    def _refuse_to_train(self, index: int) -> None:
        """Raise `T1Error` for a layer whose gradients would be wrong or lost."""
        layer, held = self.stack[index], self._schedule.layers.get(index)
        late = held is not None and not held.trained and any(p.requires_grad for p in held.params.values())
        require(not late, f"layer {index} was unfrozen after `stream`: close the optimizer, then stream again")
        twice = getattr(layer, "gradient_checkpointing", False) and layer.training
        require(not twice, "the model's own gradient checkpointing is on; stream recomputes layers itself: turn it off")

    def forward(self, index: int, whole: Piece, save: bool, wanted: bool = False) -> tuple[Tensor, Saved]:
        """Run the layer on a batch; returns its output and, with `save`, what the backward needs. wanted: whether the
        input needs a gradient"""
        keep, schedule = save and index >= self._kept, self._schedule
        held, modules = schedule.layers.get(index), [*self.stack[index].modules()]
        merged = any(own.get("_disable_adapters") and own.get("merged_adapters") for own in map(vars, modules))
        unmerged = "merged adapters that are disabled, which PEFT unmerges on the way: unmerge_adapter() first"
        require(not merged or held is None, unmerged)  # PEFT would take them out of the slot's copy of the weights
        version, graphs = 0 if held is None else held.version, [] if keep else None
        rows = None if has_cache(whole) else self.engine.micro_batch
        given, outputs = without_caches(whole.args, whole.kwargs), []
        modes, hooks = Saved.modes_of(modules), Saved.hooks_of(modules)
        saved = Saved(self.device, modes, hooks, version, rows, given, graphs=graphs)
        try:
            schedule.bind(index)
            noted = () if held is None else held.params.values()
            if save:
                tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
                needy = f"layer {index} is given an argument that needs a gradient, beside its hidden states"
                require(not any(tensor.requires_grad for tensor in tensors), needy)
                if held is not None:
                    held.refuse_hooks()
                if not keep:  # a graph that is kept notices by itself what else is changed
                    noted = [*tensors, *(param for *_, param in self._expected[index])]
            saved.note(noted)
            for piece in split_rows(whole, rows):
                with saved.autocast():
                    if keep:
                        with self.engine.trace.span("compute", "forward", index):
                            saved.graphs.append(self._with_graph(index, piece, wanted))
                        out = saved.graphs[-1][1]
                    else:
                        out = self._without_graph(index, piece, saved if save else None)
                lost = f"layer {index} is frozen, but something in it, or an argument, needs a gradient"
                require(save or not out.requires_grad, lost)
                grown = f"layer {index} returns {tuple(out.shape)} for {tuple(piece.hidden.shape)}"
                cut = rows is None or out.shape[:1] == piece.hidden.shape[:1]
                require(cut, f"{grown}; with micro_batch, give what differs by row 2 dimensions")
                outputs.append(out.detach())
            require(not saved.changed, f"layer {index} writes to an argument, or to its weights, within its call")
            if self._outer is not None:
                self._outer.forward_done(index)
        finally:
            schedule.release(index, around=not save)
        if save and not keep and self._inputs is not None:
            saved.input = self._inputs.put(whole.hidden, index)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), saved

    def _call(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        out = self.engine.forwards[index](hidden, *args, **kwargs)
        kind = type(out).__name__
        require(isinstance(out, Tensor), f"layer {index} returns a {kind}; allowed: one tensor, the hidden states")
        return out

    def _without_graph(self, index: int, piece: Piece, saved: Saved | None) -> Tensor:
        """Run the layer; returns its output. saved: None, or what gets the random numbers' state if it draws any"""
        before = None if saved is None else saved.random_state()
        with self.engine.trace.span("compute", "forward", index):
            if self._may_replay(index, piece):
                key = self._schedule.layers[index].slot, self.stack[index].training
                given = piece.hidden.detach(), piece.args, piece.kwargs
                out = self._graphs.run(index, key, partial(self._call, index), *given)
            else:
                out = self._call(index, *piece)
        if saved is not None:
            drew = not all(map(torch.equal, before, saved.random_state()))
            saved.random.append(before if drew else None)
            if drew:
                self._graphs.stop()
        return out

    def _with_graph(self, index: int, piece: Piece, wanted: bool, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layer, or recompute it; returns its input and its output, with the graph between them."""
        x = piece.hidden.detach().requires_grad_(wanted)
        call = partial(self._call, index, x, piece.args, piece.kwargs)
        with torch.enable_grad(), nullcontext() if recompute else kept_graph(self._schedule.layers.get(index)):
            out = self._recompute.run(self.stack[index], call) if recompute else call()
        if (index, self.stack[index].training) not in self._recorded:
            self._find_recorded(index)
        return x, out

    def _find_recorded(self, index: int) -> None:
        """Find where the layer, which has just run with a graph, has recorded tensors of it."""
        every = [(vars(m), n, v) for m in self.stack[index].modules() for n, v in vars(m).items()]
        found = [(own, n) for own, n, v in every if isinstance(v, Tensor) and v.grad_fn is not None]
        self._recorded[index, self.stack[index].training] = found
        if found:
            self._graphs.stop()  # a replay would record nothing

    def _may_replay(self, index: int, piece: Piece) -> bool:
        """Whether the layer may run as a CUDA graph: it is launch-bound, and does the same every time."""
        odd = torch.is_autocast_enabled(self.device.type) or torch.is_inference_mode_enabled() or has_cache(piece)
        bound = piece.hidden.shape[:-1].numel() <= self._graph_tokens
        return bound and not odd and self._graphs.allow(index)

    def backward(self, index: int, hidden: Tensor | None, saved: Saved, grad: Tensor, wanted: bool) -> Tensor | None:
        """Return the gradient of the layer's input, given that of its output; the gradients of its parameters go to the
        schedule. hidden: the input; None: graphs are kept"""
        gone = "a backward after close(), of a forward before it; run the forward again"
        require(self.engine.passes is self, gone)
        schedule, found, replayed = self._schedule, [], False
        held = schedule.layers.get(index)
        # With updates in the backward, `bind_gradients` refuses a second one before step(), in clearer words.
        twice = schedule.in_backward and held is not None and held.grads.backward is not None
        late = held is not None and held.version != saved.version and not twice
        require(not late, f"a backward through layer {index}, which has been updated since that forward")
        if self._outer is not None:
            self._outer.backward_begins(index)
        try:
            schedule.bind(index, backward=True)
            changed = f"an argument or a weight of layer {index} was changed in place after its forward; run that again"
            require(not saved.changed, changed)
            kept = saved.graphs is not None
            pieces = saved.graphs if kept else split_rows(Piece(hidden.detach(), *saved.given), saved.rows)
            if held is not None:
                held.refuse_hooks()
            for k, (piece, part) in enumerate(zip(pieces, grad.split(saved.rows or len(grad)), strict=True)):
                graph = piece if kept else self._recomputed(index, piece, saved, k, wanted)
                if k == 0:
                    schedule.bind_gradients(index)  # not before: it waits for a slot
                if graph is None:
                    with saved.autocast():
                        found.append(self._replay(index, piece, part, wanted))
                    replayed = True
                    continue
                x, out = graph
                with self.engine.trace.span("compute", "backward", index):
                    if out.requires_grad:  # not if the layer was skipped, and its input needs no gradient
                        torch.autograd.backward(out, part)
                found.append(x.grad)
            if held is not None:
                self._graphs.note_gradients(held, replayed)
            schedule.backward_done(index)
        except BaseException:
            schedule.release(index, backward=True, follows=False)
            raise
        if not wanted:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

    def _recomputed(
        self, index: int, piece: Piece, saved: Saved, number: int, wanted: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Recompute the layer on a micro-batch; returns its input and its output. None: a CUDA graph is to do it"""
        with saved.autocast():
            if saved.random[number] is None and self._may_replay(index, piece):
                return None
            with saved.drawing_again(number), self.engine.trace.span("compute", "recompute", index):
                return self._with_graph(index, piece, wanted, recompute=True)

    def _replay(self, index: int, piece: Piece, part: Tensor, wanted: bool) -> Tensor | None:
        """Recompute the layer and run its backward as one CUDA graph; returns the input's gradient."""

        def call(hidden: Tensor, args: Any, kwargs: Any, grad: Tensor) -> Tensor | None:
            x, out = self._with_graph(index, Piece(hidden, args, kwargs), wanted, recompute=True)
            torch.autograd.backward(out, grad)
            return x.grad

        held = self._schedule.layers[index]
        key = held.slot, held.grads.slot, self.stack[index].training, wanted
        with self.engine.trace.span("compute", "backward", index):
            return self._graphs.run(index, key, call, piece.hidden.detach(), piece.args, piece.kwargs, part)


def has_cache(piece: Piece) -> bool:
    return any(isinstance(value, Cache) for value in (*piece.args, *piece.kwargs.values()))


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    return args, {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, hidden: Tensor, passes: Passes, index: int, args: Any, kwargs: Any
    ) -> Tensor:
        ctx.passes, ctx.index, before = passes, index, hidden._version
        out, ctx.saved = passes.forward(index, Piece(hidden, args, kwargs), True, wanted=ctx.needs_input_grad[1])
        require(hidden._version == before, f"layer {index} writes to its input, from which it is to be recomputed")
        kept = ctx.saved.graphs is not None or ctx.saved.input is not None
        ctx.save_for_backward(*([] if kept else [hidden]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require(not torch.is_grad_enabled(), "create_graph=True through streamed layers; allowed: loss.backward()")
        # The node that accumulates the anchor's gradient runs only in a whole backward.
        partly = ctx.needs_input_grad[0] and not torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        require(not partly, "autograd.grad, or backward(inputs=…), through streamed layers; allowed: loss.backward()")
        saved, hidden = ctx.saved, None
        require(saved is not None, "a second backward through a streamed layer; run the forward again")
        modules = [*ctx.passes.stack[ctx.index].modules()]
        same = saved.modes == Saved.modes_of(modules)
        found = f"layer {ctx.index} was put into training or evaluation mode, or its adapters were switched, between"
        require(same, f"{found} its forward and its backward; allowed: before or after both")
        same = saved.graphs is not None or saved.hooks == Saved.hooks_of(modules)
        found = f"hooks inside layer {ctx.index} that are given keyword arguments were added or removed between"
        require(same, f"{found} its forward and its backward, as PEFT does for aLoRA; allowed: before or after both")
        passes, ctx.passes, ctx.saved = ctx.passes, None, None  # so that somebody who keeps the loss keeps nothing else
        with passes.engine.alone():
            if saved.graphs is None:
                hidden = ctx.saved_tensors[0] if saved.input is None else saved.input.take()
            found = passes.backward(ctx.index, hidden, saved, grad, ctx.needs_input_grad[1])
        return None, found, None, None, None, None


class _Recorded(torch.autograd.Function):
    """A tensor that a layer has recorded in its forward, which keeps no graph: a loss on it would have no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.detach()  # not itself, which nobody could then change in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise T1Error(f"a loss on {ctx.name}, recorded in its forward; allowed: losses on what the model returns")
