"""Where tensors of a forward wait on the host for the backward, in mode `slide`."""

from collections.abc import Callable

import torch
from torch import Tensor

from t1lib.measure.memory import pinned_zeros
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.streams import Lane, Mark

LEAVING = 2  # groups of a `HostStore`: a copy has the time that a layer's computing takes


class HostStore:
    """Tensors that leave the device for a while, by key: pinned buffers, kept for the next time. Keys begin with a
    number that groups them.

    Their memory on the device is taken and given back in the order of the computing, which waits for their copies.
    The host, far ahead of the device, would else find none of it free yet, and take as much again.
    """

    def __init__(
        self, device: torch.device, compute: Lane, inward: Lane, outward: Lane, trace: Callable[[], Trace | NoTrace]
    ) -> None:  # fmt: skip
        self.device, self._compute, self._in, self._out = device, compute, inward, outward
        self._trace = trace  # what spans of copies are reported to
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._left: dict[tuple[int, int], Mark] = {}
        self._leaving: dict[tuple[int, int], Tensor] = {}  # still there, as long as their copies may run
        self._back: dict[int, Mark] = {}

    def put(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Queue the copy to the host. Of the `LEAVING` latest groups all stays on the device."""
        group, buffer = key[0], self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = pinned_zeros(tensor.numel(), tensor.dtype, self.device).view(tensor.shape)
        self._out.after(self._compute.mark())
        with self._out.active(), self._trace().span("out", "inputs", group, self._out.stream):
            buffer.copy_(tensor, non_blocking=True)
        self._left[key], self._leaving[key] = self._out.mark(), tensor
        self._let_go([key for key in self._leaving if key[0] <= group - LEAVING])

    def bring(self, key: tuple[int, int]) -> Tensor:
        """The tensor, to be used after `arrived`: the one that is still there, or a copy that is queued here."""
        if key in self._leaving:
            return self._leaving[key]
        tensor = torch.empty_like(self._buffers[key], device=self.device)
        self._in.after(self._compute.mark())
        with self._in.active(), self._trace().span("in", "inputs", key[0], self._in.stream):
            tensor.copy_(self._buffers[key], non_blocking=True)
        self._back[key[0]] = self._in.mark()
        return tensor

    def arrived(self, group: int) -> None:
        """Let the computing wait for what still leaves, or was brought, of this group."""
        self._let_go([key for key in self._leaving if key[0] == group])
        self._compute.after(self._back.pop(group, None))

    def _let_go(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            self._compute.after(self._left[key])
            del self._leaving[key]
