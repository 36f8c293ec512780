"""What is kept of a layer between forward and backward: its graph, or its input, from which it is recomputed."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._pytree import tree_map

from t1lib.errors import T1Error, require
from t1lib.memory import pinned_zeros
from t1lib.plan.cost import LEAVING
from t1lib.timing import synchronize
from t1lib.train.lanes import uninterrupted
from t1lib.train.layers import HostLayer
from t1lib.train.schedule import Schedule


class Piece(NamedTuple):
    """Some rows of a batch on their way through a layer: hidden states (b, …), and the layer's other arguments."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_rows(piece: Piece, rows: int | None) -> list[Piece]:
    """Cut a batch into pieces of at most `rows` rows. Arguments are cut as well if they are tensors of two or more
    dimensions, the first of which is the number of rows; all others go to every piece. Raises `T1Error` for a matrix
    (not of integers) that may have one row per row of the batch or per token, and a `BlockMask` of several rows."""
    count = len(piece.hidden)
    if rows is None or rows >= count:
        return [piece]

    def is_mask(value: Any) -> bool:
        return hasattr(value, "kv_num_blocks")

    def cut(start: int, value: Any) -> Any:
        several = is_mask(value) and len(value.kv_num_blocks) > 1  # its functions identify rows by their number
        require(not several, f"a BlockMask of several rows with micro_batch={rows}; allowed: None, or a mask of 1 row")
        if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != count:
            return value
        positions = not value.is_floating_point() and value.dtype != torch.bool
        if value.dim() == 2 and not positions and piece.hidden.shape[1:2] == (count,):
            shape = f"an argument of shape {tuple(value.shape)}: of the {count} rows, or of the {count} tokens of each?"
            raise T1Error(f"{shape} Add a dimension, or leave micro_batch out")
        return value[start : start + rows]

    starts = range(0, count, rows)
    others = (tree_map(partial(cut, start), (piece.args, piece.kwargs), is_leaf=is_mask) for start in starts)
    return [Piece(piece.hidden[start : start + rows], *given) for start, given in zip(starts, others, strict=True)]


SWITCHES = ("training", "_active_adapter", "_disable_adapters")  # of a module's mode; the latter two are PEFT's


@dataclass(eq=False)
class Saved:
    """What a layer's forward leaves for its backward, by micro-batch; made as the forward begins."""

    device: torch.device
    modes: list[list[Any]]  # of each of the layer's modules
    hooks: list[int]  # of each module inside the layer, see `hooks_of`
    version: int  # of the weights
    rows: int | None  # that were computed at a time
    given: tuple[Any, ...]  # args and kwargs beside the input, without caches: a recomputation would append to them
    random: list[list[Tensor] | None] = field(default_factory=list)  # generators' states before each; None: drew none
    graphs: list[tuple[Tensor, Tensor]] | None = None  # input and output with the graph between them, if it is kept
    input: "OnHost | None" = None
    noted: list[tuple[Tensor, int]] = field(default_factory=list)  # tensors with their versions, see `note`

    def __post_init__(self) -> None:
        """Note the autocast state, for `autocast()`. Autocast's cache of narrowed weights is off: it would keep those
        of all layers, and stale ones when a slot's content has changed."""
        device = self.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self.autocast = partial(torch.autocast, device, dtype, enabled, cache_enabled=False)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that the backward reads, as they are now. (Inference tensors have no versions.)"""
        self.noted = [(t, t._version) for t in tensors if not t.is_inference()]

    @property
    def changed(self) -> bool:
        """Whether one of them has been changed in place since."""
        return any(tensor._version != version for tensor, version in self.noted)

    def random_state(self) -> list[Tensor]:
        """The states of the random number generators: the CPU's and, for a GPU, the device's."""
        cuda = self.device.type == "cuda"
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self.device)] if cuda else [])]

    @contextmanager
    def drawing_again(self, number: int) -> Iterator[None]:
        """Draw this micro-batch's random numbers again within the context; then restore the generators' states."""
        if self.random[number] is None:
            yield
            return
        own, *others = self.random[number]
        with torch.random.fork_rng([self.device] * len(others)):
            torch.set_rng_state(own)
            for state in others:
                torch.cuda.set_rng_state(state, self.device)
            yield

    @staticmethod
    def modes_of(modules: Iterable[nn.Module]) -> list[list[Any]]:
        """`SWITCHES` of each module; a missing one counts as False, since PEFT may set it to False later."""
        return [[own.get(name) or False for name in SWITCHES] for own in map(vars, modules)]

    @staticmethod
    def hooks_of(modules: list[nn.Module]) -> list[int]:
        """How many hooks each of a layer's modules, but the first, itself, has that may give it other arguments. PEFT
        sets such hooks for one call of the model (aLoRA's offsets, adapters' names): a recomputation would lack
        them."""
        return [len(module._forward_pre_hooks_with_kwargs) for module in modules[1:]]


class Inputs:
    """Offloads layers' inputs to pinned host buffers, which are reused, and brings them back. The device memory is
    allocated and freed on the compute lane, which waits for the copies. Otherwise the host, which runs far ahead of the
    device, would find none of that memory free yet, and allocate as much again."""

    def __init__(self, schedule: Schedule) -> None:
        self.engine, self.device, self.compute = schedule.engine, schedule.device, schedule.compute
        self.inward, self.outward = schedule.inward, schedule.outward
        self.free: list[Tensor] = []  # buffers of bytes that nobody uses; other threads may append some at any time
        self.leaving: list[weakref.ref[OnHost]] = []  # still on the device, while their copies may run

    def buffer(self, nbytes: int) -> Tensor:
        """A buffer of so many bytes or more: the smallest that fits, or a new one in place of the next smaller, so that
        batches of ever other lengths need no more than the longest alone would."""
        fits = [at for at, held in enumerate(self.free) if len(held) >= nbytes]
        if fits:
            return self.free.pop(min(fits, key=lambda at: len(self.free[at])))
        if self.free:
            synchronize(self.device)  # copies from it, or to it, may still be queued
            self.free.pop(max(range(len(self.free)), key=lambda at: len(self.free[at])))
        return pinned_zeros(nbytes, torch.uint8, self.device)

    def put(self, tensor: Tensor, layer: int) -> "OnHost":
        """Queue the copy to the host. The `LEAVING` latest stay on the device for now."""
        found = OnHost(self, tensor.detach(), layer)
        self.leaving.append(weakref.ref(found))
        earlier = self.leaving.pop(0)() if len(self.leaving) > LEAVING else None
        if earlier is not None:
            earlier.leave()
        return found


class OnHost:
    """A tensor that is copied to the host, waits there, and comes back when it or the one put after it is taken."""

    _buffer = _left = _back = None  # for `__del__`, if an interrupt ends `__init__`; marks of both copies

    def __init__(self, inputs: Inputs, tensor: Tensor, layer: int) -> None:
        buffer = inputs.buffer(tensor.nbytes)
        self._inputs, self._layer, self._buffer, self._tensor = inputs, layer, buffer, tensor
        self._values = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._version = tensor._version
        self._changed: bool | None = None  # in place, before it had left; None until then
        # The backward goes the other way: the tensor that was put before this one is needed next.
        self._before = inputs.leaving[-1] if inputs.leaving else lambda: None
        span = inputs.engine.trace.span("out", "inputs", layer)
        self._left = inputs.outward.copy(self._values, tensor, span, inputs.compute.mark())

    def leave(self) -> None:
        """Free the device's copy once it has left."""
        if self._tensor is not None:  # not if it has been taken meanwhile
            self._changed = self._tensor._version != self._version
            self._inputs.compute.after(self._left)
            self._left = self._tensor = None

    def prefetch(self) -> None:
        if self._tensor is None and self._buffer is not None:
            inputs, span = self._inputs, self._inputs.engine.trace.span("in", "inputs", self._layer)
            self._tensor = torch.empty_like(self._values, device=inputs.device)
            self._back = inputs.inward.copy(self._tensor, self._values, span, inputs.compute.mark())

    def take(self) -> Tensor:
        """Return the tensor, on the device, and start bringing back the one that was put before it. Raises `T1Error`
        if it was changed before it had left."""
        if self._changed is None:
            self._changed = self._tensor._version != self._version
        changed = f"the input of layer {self._layer} was changed in place between its forward and its backward"
        require(not self._changed, changed)
        self.prefetch()
        before = self._before()
        if before is not None:
            before.prefetch()
        found = self._tensor
        self._give_back()
        return found

    def _give_back(self) -> None:
        """Let the buffer be used again, once the copies have ended; also after a forward without a backward."""
        if self._buffer is not None:
            with uninterrupted():  # Python calls `__del__` anywhere, and drops what is raised in it
                held, buffer, self._buffer = self._tensor, self._buffer, None
                self._tensor = self._values = None  # a view would keep a buffer that is replaced
                self._inputs.compute.after(self._left, self._back)
                del held  # not before: its memory may be reused from here on
                self._left = self._back = None
                self._inputs.free.append(buffer)

    __del__ = _give_back


def kept_graph(layer: HostLayer | None) -> AbstractContextManager:
    """Make autograd save views of the layer's weights as positions in their slot, and rebuild them in the backward: by
    then the weights may have come in anew. layer: None if the weights never move"""
    if layer is None:
        return nullcontext()
    start = layer.slot.flat.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        own = tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() == start
        if own:
            return tensor.size(), tensor.stride(), tensor.storage_offset()
        # Detached: a saved output would refer to its own graph, in a cycle that no garbage collector frees.
        return tensor.detach(), None if tensor.is_inference() else tensor._version

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed[0], Tensor):
            return layer.slot.flat.as_strided(*packed)
        tensor, version = packed  # compared here, as such hooks switch PyTorch's own check off
        found = f"a tensor that layer {layer.index} needs for its backward was changed in place since its forward"
        require(version is None or tensor._version == version, found)
        return tensor

    return saved_tensors_hooks(pack, unpack)


class Recompute:
    """Recomputes layers for their gradients, without the last matrix product where no gradient depends on its result:
    most layers end by adding it to the residual. The first layer of each kind is watched to see whether that holds.
    (PyTorch's checkpoint also stops there, but needs a graph kept since the forward.) Only layers of transformers are
    known to do the same every time; others, and those whose modules have hooks, are recomputed whole."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._last: dict[tuple[Any, ...], str] = {}  # by a layer's modules and modes: the product to leave out, or ""

    def run(self, layer: nn.Module, call: Callable[[], Tensor]) -> Tensor:
        """Run the layer through call() and return its output, for its graph only: the values may be missing."""
        inner = [*layer.modules()][1:]
        if self._whole or _global_forward_hooks or any(m._forward_hooks for m in inner):
            return call()
        forwards = [getattr(m.forward, "__func__", m.forward) for m in inner]  # someone may replace that of one module
        kind = (*map(type, inner), *forwards, str(Saved.modes_of(inner)))
        if kind not in self._last:
            self._last[kind], out = self._watched(layer, call)
            return out
        product = layer.get_submodule(self._last[kind])
        if not _plain(product):  # for "" the layer itself; or the product's forward has been replaced since
            return call()
        product.forward = lambda x: _Unread.apply(_narrowed(x), _narrowed(product.weight))
        try:
            out = call()
        finally:
            del product.forward
        if out._base is None:
            out.untyped_storage().resize_(0)  # never read, but alive for the whole backward
        return out

    @staticmethod
    def _watched(layer: nn.Module, call: Callable[[], Tensor]) -> tuple[str, Tensor]:
        """Run the layer. Returns the name of the last product, or "" if that runs more than once, or if anything is
        saved for the backward after it; and the layer's output."""
        events = [""]  # names of products, and "" for what is saved
        products = [(n, m) for n, m in layer.named_modules() if _plain(m)]
        hooks = [m.register_forward_hook(lambda *_, name=name: events.append(name)) for name, m in products]
        try:
            with saved_tensors_hooks(lambda tensor: events.append("") or tensor.detach(), lambda tensor: tensor):
                out = call()
        finally:
            for hook in hooks:
                hook.remove()
        return (events[-1] if events.count(events[-1]) == 1 else ""), out


def _plain(module: nn.Module) -> bool:
    """Whether the module is a bare matrix product: a `Linear` with no bias and no replaced forward."""
    return type(module) is nn.Linear and module.bias is None and "forward" not in vars(module)


def _narrowed(tensor: Tensor) -> Tensor:
    """The tensor as autocast would pass it to a matrix product."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


class _Unread(torch.autograd.Function):
    """The product of x (…, K) and the transposed weight (N, K), never read: only its gradients are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        dx = (flat @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return dx, flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
