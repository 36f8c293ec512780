"""The gradient of an embedding on the host, for only the rows that a step looked up."""

import torch
from torch import Tensor

from t1lib.measure.memory import pinned_zeros
from t1lib.train.narrow import wide
from t1lib.train.pipeline import Pipeline
from t1lib.train.streams import send


class HostRows:
    """Accumulates the gradient of the step's rows (R) on the device, then writes it into `grad` (V, D) on the host.

    The other rows of `grad` hold the head's gradient if embedding and head share their weight, else 0. In the shared
    case the head's gradient of the step's rows is first moved here (`take`), so that rows and norm are complete on the
    device.
    """

    def __init__(self, grad: Tensor, pipeline: Pipeline) -> None:
        self._grad, self._pipeline = grad, pipeline
        self._host = pinned_zeros(0, grad.dtype, pipeline.device)
        self._here: Tensor | None = None  # (R, D) on the device
        self._left: Tensor | None = None  # rows whose gradient is on its way to the host
        self._placed: Tensor | None = None  # rows whose gradient is in `grad`
        self.begin()

    def begin(self) -> None:
        self._asked: list[Tensor] = []
        self._union: Tensor | None = None

    def ask(self, rows: Tensor) -> None:
        self._asked.append(rows)

    def _all(self) -> Tensor:
        """All rows of this step, sorted, on the host. The first call also allocates the gradient, zeroed."""
        if self._union is None:
            self._union = torch.unique(torch.cat(self._asked))
            shape = len(self._union), self._grad.shape[1]
            self._here = torch.zeros(shape, dtype=self._grad.dtype, device=self._pipeline.device)
        return self._union

    def take(self, start: int, stop: int, grad: Tensor) -> None:
        """Move this step's rows out of `grad`, the head's gradient of rows `start` to `stop`, to the buffer here."""
        rows = self._all()
        low, high = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
        if high > low:
            own = send(rows[low:high] - start, self._pipeline.device)
            self._here[low:high] = grad[own]
            grad.index_fill_(0, own, 0)

    def add(self, rows: Tensor, grad: Tensor) -> None:
        """Add the embedding's gradient of `rows`, which must be distinct."""
        places = torch.searchsorted(self._all(), rows)
        self._here.index_add_(0, send(places, self._pipeline.device), grad)

    def norm(self) -> Tensor:
        self._all()
        return torch.linalg.vector_norm(self._here, dtype=wide(self._grad.dtype))

    def send(self) -> None:
        """Queue the copy to the host on the current lane."""
        rows = self._all()
        if self._host.numel() < self._here.numel():
            self._host = pinned_zeros(self._here.numel(), self._grad.dtype, self._pipeline.device)
        lane = self._pipeline.outward
        self._host[: self._here.numel()].view_as(self._here).copy_(lane.uses(self._here), non_blocking=True)
        self._left, self._here = rows, None

    def arrived(self) -> None:
        """Called when the copy has arrived: write the rows into `grad`, once."""
        if self._left is not None:
            width = self._grad.shape[1]
            self._grad[self._left] = self._host[: len(self._left) * width].view(-1, width)
            self._left, self._placed = None, self._left

    def clear(self) -> None:
        """After the update: zero the rows, because the next step may not look them up."""
        if self._placed is not None:
            self._grad[self._placed] = 0
            self._placed = None
