"""Host buffers in which tensors of the forward pass wait for the backward pass, in mode `slide`."""

from collections.abc import Callable

import torch
from torch import Tensor

from t1lib.measure.memory import pinned_zeros
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.streams import Lane, Mark

LEAVING = 2  # latest groups of a `HostStore` that stay on the device: a copy may take as long as a layer computes


class HostStore:
    """Offloads tensors to pinned host buffers and brings them back, by key. A key's first number is its group. Buffers
    are kept for the next step.

    The tensors' device memory is allocated and freed on the compute lane, which waits for their copies. Otherwise the
    host, which runs far ahead of the device, would find none of that memory free yet, and allocate as much again.
    """

    def __init__(
        self, device: torch.device, compute: Lane, inward: Lane, outward: Lane, trace: Callable[[], Trace | NoTrace]
    ) -> None:  # fmt: skip
        self.device, self._compute, self._in, self._out = device, compute, inward, outward
        self._trace = trace  # records the spans of copies
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._left: dict[tuple[int, int], Mark] = {}
        self._leaving: dict[tuple[int, int], Tensor] = {}  # kept on the device while their copies may run
        self._back: dict[int, Mark] = {}

    def put(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Queue the copy to the host. Tensors of the `LEAVING` latest groups stay on the device for now."""
        group, buffer = key[0], self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = pinned_zeros(tensor.numel(), tensor.dtype, self.device).view(tensor.shape)
        self._out.after(self._compute.mark())
        with self._out.active(), self._trace().span("out", "inputs", group, self._out.stream):
            buffer.copy_(tensor, non_blocking=True)
        self._left[key], self._leaving[key] = self._out.mark(), tensor
        self._let_go([key for key in self._leaving if key[0] <= group - LEAVING])

    def bring(self, key: tuple[int, int]) -> Tensor:
        """The tensor, to be used after `arrived`: still on the device, or its copy from the host, queued here."""
        if key in self._leaving:
            return self._leaving[key]
        tensor = torch.empty_like(self._buffers[key], device=self.device)
        self._in.after(self._compute.mark())
        with self._in.active(), self._trace().span("in", "inputs", key[0], self._in.stream):
            tensor.copy_(self._buffers[key], non_blocking=True)
        self._back[key[0]] = self._in.mark()
        return tensor

    def arrived(self, group: int) -> None:
        """Make the compute lane wait for this group's copies, in either direction."""
        self._let_go([key for key in self._leaving if key[0] == group])
        self._compute.after(self._back.pop(group, None))

    def _let_go(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            self._compute.after(self._left[key])
            del self._leaving[key]
