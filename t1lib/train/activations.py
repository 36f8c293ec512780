"""What mode `slide` keeps of a layer between forward and backward: its input, or all that its gradients need."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from t1lib.train.store import HostStore


@dataclass
class Saved:
    """Of one layer and micro-batch: its input, and its output with the graph behind it if that was kept.

    Input None: it is on the host.
    """

    input: Tensor | None
    output: Tensor | None = None


class Activations:
    """Saves by layer and micro-batch.

    kept     how many layers, the last ones, keep their graph: they are not computed again
    store    where inputs of the others wait on the host; None: they stay on the device
    """

    def __init__(self, layers: int, kept: int, store: HostStore | None) -> None:
        self._first_kept, self._store = layers - kept, store
        self._saved: dict[int, list[Saved]] = {}

    def begin(self) -> None:
        """Before a forward: forget what a step that was given up has left."""
        self._saved.clear()

    def run(
        self, index: int, hidden: list[Tensor], wanted: bool, compute: Callable[[int, Tensor], Tensor],
        buffer: Callable[[], Tensor | None],
    ) -> list[Tensor]:  # fmt: skip
        """The layer's outputs for the micro-batches `hidden`. wanted: whether its inputs want a gradient.

        compute(k, x) runs the layer; buffer() is what holds its weights when it is asked, None if they are never moved.
        """
        if self._store is not None:
            self._store.arrived(index)  # of a step that was given up
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
        """Let inputs that wait on the host come back."""
        for k, saved in enumerate(self._saved.get(index, ())):
            if saved.input is None:
                saved.input = self._store.bring((index, k))

    def take(self, index: int) -> list[Saved]:
        """What was saved of the layer, which is forgotten here; that of the layer below starts to come back."""
        self.prefetch(index)
        self.prefetch(index - 1)
        saved = self._saved.pop(index)
        if self._store is not None:
            self._store.arrived(index)
        return saved


def _rebinding(buffer: Callable[[], Tensor | None]) -> AbstractContextManager:
    """Save views of the layer's weights as where they lie in its buffer: at the backward that is another one, or holds
    them again after others."""
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
