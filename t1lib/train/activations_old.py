"""What mode `slide` saves of a layer between forward and backward: only its input, or all that its gradients need."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from t1lib.train.store import HostStore


@dataclass
class Saved:
    """What is saved of one layer and micro-batch: its input, and its output with the autograd graph if that is kept.

    `input` is None while it waits on the host.
    """

    input: Tensor | None
    output: Tensor | None = None


class Activations:
    """Holds what is saved of each layer and micro-batch.

    kept     how many layers, the last ones, keep their autograd graph and so need no recomputation
    store    where the inputs of the other layers wait on the host; None: they stay on the device
    """

    def __init__(self, layers: int, kept: int, store: HostStore | None) -> None:
        self._first_kept, self._store = layers - kept, store
        self._saved: dict[int, list[Saved]] = {}

    def begin(self) -> None:
        """Call before a forward: discard what an aborted step left behind."""
        self._saved.clear()

    def run(
        self, index: int, hidden: list[Tensor], wanted: bool, compute: Callable[[int, Tensor], Tensor],
        buffer: Callable[[], Tensor | None],
    ) -> list[Tensor]:  # fmt: skip
        """Run the layer on the micro-batches `hidden`, save what its backward needs, and return the outputs.

        wanted         whether gradients of the layer's inputs are needed
        compute(k, x)  runs the layer on micro-batch k
        buffer()       returns the buffer that holds the layer's weights at that moment; None if they never move
        """
        if self._store is not None:
            self._store.arrived(index)  # wait for copies of an aborted step
        if index >= self._first_kept:
            inputs = [x.detach().requires_grad_(wanted or x.requires_grad) for x in hidden]
            with torch.enable_grad(), _rebinding(buffer):
                outputs = [compute(k, x) for k, x in enumerate(inputs)]
            self._saved[index] = [Saved(x, y) for x, y in zip(inputs, outputs, strict=True)]
            return [y.detach() for y in outputs]
        self._saved[index] = [Saved(x) for x in hidden]
        with torch.no_grad():
            outputs = [compute(k, x) for k, x in enumerate(hidden)]
        if self._store is not None and index > 0:
            for k, saved in enumerate(self._saved[index]):
                self._store.put((index, k), saved.input)
                saved.input = None
        return outputs

    def prefetch(self, index: int) -> None:
        """Start copying the layer's inputs back to the device, where they wait on the host."""
        for k, saved in enumerate(self._saved.get(index, ())):
            if saved.input is None:
                saved.input = self._store.bring((index, k))

    def take(self, index: int) -> list[Saved]:
        """Return what was saved of the layer, and forget it; start bringing back the inputs of the layer below."""
        self.prefetch(index)
        self.prefetch(index - 1)
        saved = self._saved.pop(index)
        if self._store is not None:
            self._store.arrived(index)
        return saved


def _rebinding(buffer: Callable[[], Tensor | None]) -> AbstractContextManager:
    """Make autograd save views of the layer's weights as positions in their buffer, and rebuild them in the backward:
    by then the weights are in another buffer, or in the same one again after those of other layers."""
    if buffer() is None:
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
