"""What is kept of a layer between forward and backward: its input, on the device or the host, or its whole graph."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
