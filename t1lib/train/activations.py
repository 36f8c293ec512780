"""What is kept of a layer between forward and backward: its whole graph, or its input, on the device or the host, from
which it is recomputed."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from t1lib.errors import T1Error
from t1lib.memory import pinned_zeros
from t1lib.plan.cost import LEAVING
from t1lib.timing import NoTrace
from t1lib.train.lanes import Lane, Mark


class Piece(NamedTuple):
    """Some rows of a batch on their way through a layer: hidden states (b, …), and the layer's other arguments."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_rows(piece: Piece, rows: int | None) -> list[Piece]:
    """Cut a batch into pieces of at most `rows` rows. Tensors of two or more dimensions that have a row each are cut
    along with it; all else goes to every piece. Raises `T1Error` for a matrix, such as a mask, of as many rows as the
    batch has rows and each of them tokens: it may belong to either."""
    count = len(piece.hidden)
    if rows is None or rows >= count:
        return [piece]

    def cut(start: int, value: Any) -> Any:
        own = isinstance(value, Tensor) and value.dim() > 1 and len(value) == count
        whole_numbers = own and not (value.is_floating_point() or value.dtype == torch.bool)  # such as positions
        if own and value.dim() == 2 and not whole_numbers and piece.hidden.shape[1:2] == (count,):
            shape = f"an argument of shape {tuple(value.shape)}: of the {count} rows, or of the {count} tokens of each?"
            raise T1Error(f"{shape} Add a dimension, or leave micro_batch out")
        return value[start : start + rows] if own else value

    return [
        Piece(piece.hidden[start : start + rows], *tree_map(partial(cut, start), (piece.args, piece.kwargs)))
        for start in range(0, count, rows)
    ]


def autocast_again(device: torch.device) -> Callable[[], AbstractContextManager]:
    """What brings today's autocast state back in the recomputation. Its cache of narrowed weights is off: it would keep
    those of all layers, and those of an earlier content of their slot."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def again() -> AbstractContextManager:
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)

    return again


class Randomness:
    """The state of the random number generators before a layer ran. used: whether the layer drew from them"""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._states, self.used = self._now(), False

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def note_use(self) -> None:
        self.used = not all(torch.equal(a, b) for a, b in zip(self._states, self._now(), strict=True))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more, and go on afterwards as if they had not been drawn."""
        if not self.used:
            yield
            return
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device in self._devices:
                torch.cuda.set_rng_state(self._states[1], device)
            yield


@dataclass(eq=False)
class Saved:
    """What a layer's forward leaves for its backward, by micro-batch.

    autocast   brings the forward's autocast state back
    graphs     inputs and outputs with the autograd graph between them, if the layer's activations are kept
    input      where the input waits, if it waits on the host
    """

    autocast: Callable[[], AbstractContextManager]
    random: list[Randomness] = field(default_factory=list)
    graphs: list[tuple[Tensor, Tensor]] | None = None
    input: "OnHost | None" = None


class Inputs:
    """Offloads layers' inputs to pinned host buffers, and brings them back. Buffers are used again.

    The device memory is allocated and freed on the compute lane, which waits for the copies. Otherwise the host, which
    runs far ahead of the device, would find none of that memory free yet, and allocate as much again.
    """

    def __init__(self, device: torch.device, inward: Lane, outward: Lane, trace: Callable[[], NoTrace]) -> None:
        self.device, self.compute, self.inward, self.outward = device, Lane(device, False), inward, outward
        self.trace = trace
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._leaving: list[OnHost] = []  # still on the device, while their copies may run

    def put(self, tensor: Tensor, layer: int) -> "OnHost":
        """Queue the copy to the host. The `LEAVING` latest stay on the device for now."""
        spare = self.free.get((tensor.shape, tensor.dtype))
        buffer = spare.pop() if spare else None
        if buffer is None:
            buffer = pinned_zeros(tensor.numel(), tensor.dtype, self.device).view(tensor.shape)
        self.outward.after(self.compute.mark())
        with self.outward.active(), self.trace().span("out", "inputs", layer, self.outward.stream):
            buffer.copy_(tensor, non_blocking=True)
        before = weakref.ref(self._leaving[-1]) if self._leaving else lambda: None
        self._leaving.append(OnHost(self, layer, before, buffer, tensor.detach(), self.outward.mark()))
        if len(self._leaving) > LEAVING:
            self._leaving.pop(0).let_go()
        return self._leaving[-1]


@dataclass(eq=False)
class OnHost:
    """A tensor that waits on the host. before: gives the one that was put there before it, which is wanted after it"""

    _inputs: Inputs
    _layer: int
    _before: "Callable[[], OnHost | None]"
    _buffer: Tensor | None
    _tensor: Tensor | None
    _left: Mark
    _back: Mark = None

    def let_go(self) -> None:
        """Free the device's copy once it has left."""
        self._inputs.compute.after(self._left)
        self._left = self._tensor = None

    def prefetch(self) -> None:
        """Start bringing it back."""
        if self._tensor is None and self._buffer is not None:
            lane = self._inputs.inward
            self._tensor = torch.empty_like(self._buffer, device=self._inputs.device)
            lane.after(self._inputs.compute.mark())
            with lane.active(), self._inputs.trace().span("in", "inputs", self._layer, lane.stream):
                self._tensor.copy_(self._buffer, non_blocking=True)
            self._back = lane.mark()

    def take(self) -> Tensor:
        """The tensor on the device; and start bringing back the one before it."""
        self.prefetch()
        before = self._before()
        if before is not None:
            before.prefetch()
        found = self._tensor
        self._give_back()
        return found

    def __del__(self) -> None:
        """Also of a forward without a backward."""
        self._give_back()

    def _give_back(self) -> None:
        """Let the buffer be used again, once the copies have ended."""
        if self._buffer is not None:
            buffer, self._buffer, self._tensor = self._buffer, None, None
            self._inputs.compute.after(self._left, self._back)
            self._left = self._back = None
            self._inputs.free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)


def kept_graph(buffer: Callable[[], Tensor] | None) -> AbstractContextManager:
    """Make autograd save views of the layer's weights as positions in their buffer, and rebuild them in the backward:
    by then the weights are in another buffer, or in the same one again after those of other layers.

    buffer   returns the buffer that holds the weights at that moment; None: they never move
    """
    if buffer is None:
        return nullcontext()
    start = buffer().untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Tensor | tuple[int, torch.Size, tuple[int, ...]]:
        if tensor.untyped_storage().data_ptr() != start:
            return tensor
        return tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(packed: Tensor | tuple[int, torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        offset, size, stride = packed
        return buffer().as_strided(size, stride, offset)

    return saved_tensors_hooks(pack, unpack)


class Recompute:
    """Recomputes layers of one kind for their gradients, without the last matrix product: most layers end by adding it
    to the residual, so no gradient depends on its result. Whether that is so is observed on the first layer.
    (PyTorch's checkpoint also stops there, but needs a graph kept since the forward.)

    whole   always compute the last product as well
    """

    def __init__(self, whole: bool) -> None:
        self._last: str | None = "" if whole else None  # its name in a layer; "": needed; None: not known yet

    def run(self, layer: nn.Module, call: Callable[[], Tensor]) -> Tensor:
        """Run the layer through call() and return its output, for its graph only: the values may be missing."""
        if self._last is None:
            out, self._last = _watched(layer, call)
            return out
        product = layer.get_submodule(self._last)
        if not _plain(product):  # the layer itself, or somebody looks at the product by now
            return call()
        product.forward = lambda x: _Unread.apply(_narrowed(x), _narrowed(product.weight))
        try:
            out = call()
        finally:
            del product.forward
        if out._base is None:
            out.untyped_storage().resize_(0)  # never read, but alive for the whole backward
        return out


def _watched(layer: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, str]:
    """What call() returns, and the name of the last product if nothing is saved for the backward after it, else ""."""
    last = ""

    def computed(name: str, *_: Any) -> None:
        nonlocal last
        last = name

    def saved(tensor: Tensor) -> Tensor:
        nonlocal last
        last = ""
        return tensor

    products = [(n, m) for n, m in layer.named_modules() if _plain(m)]
    hooks = [module.register_forward_hook(partial(computed, name)) for name, module in products]
    try:
        with saved_tensors_hooks(saved, lambda tensor: tensor):
            out = call()
    finally:
        for hook in hooks:
            hook.remove()
    return out, last


def _plain(module: nn.Module) -> bool:
    """Whether the module is a bare matrix product: a `Linear` with no bias, no replaced forward, no forward hooks."""
    own = "forward" not in vars(module) and not module._forward_hooks
    return type(module) is nn.Linear and module.bias is None and own


def _narrowed(tensor: Tensor) -> Tensor:
    """As autocast gives a tensor to a matrix product."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


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
