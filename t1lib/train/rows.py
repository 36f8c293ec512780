"""The gradient of an embedding that is on the host: of the rows alone that a step looked up."""

import torch
from torch import Tensor

from t1lib.measure.memory import pinned_zeros
from t1lib.train.narrow import wide
from t1lib.train.pipeline import Pipeline
from t1lib.train.streams import send


class HostRows:
    """Gathers on the device what the step's rows (R) get, and puts it into `grad` (V, D), which is on the host.

    The rest of `grad` is the head's, where embedding and head share their weight, else 0. In the shared case the
    head's gradient of these rows is taken aside first: they are complete on the device, and so is their norm.
    """

    def __init__(self, grad: Tensor, pipeline: Pipeline) -> None:
        self._grad, self._pipeline = grad, pipeline
        self._host = pinned_zeros(0, grad.dtype, pipeline.device)
        self._here: Tensor | None = None  # (R, D) on the device
        self._left: Tensor | None = None  # rows that are on their way to `grad`
        self._placed: Tensor | None = None  # and that are there
        self.begin()

    def begin(self) -> None:
        self._asked: list[Tensor] = []
        self._union: Tensor | None = None

    def ask(self, rows: Tensor) -> None:
        self._asked.append(rows)

    def _all(self) -> Tensor:
        """All rows of this step in order, on the host; the gradient begins at 0."""
        if self._union is None:
            self._union = torch.unique(torch.cat(self._asked))
            shape = len(self._union), self._grad.shape[1]
            self._here = torch.zeros(shape, dtype=self._grad.dtype, device=self._pipeline.device)
        return self._union

    def take(self, start: int, stop: int, grad: Tensor) -> None:
        """Set aside what the head's gradient `grad` of the rows from `start` to `stop` has of this step's rows."""
        rows = self._all()
        low, high = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
        if high > low:
            own = send(rows[low:high] - start, self._pipeline.device)
            self._here[low:high] = grad[own]
            grad.index_fill_(0, own, 0)

    def add(self, rows: Tensor, grad: Tensor) -> None:
        """Add what the embedding's rows get, none of them twice."""
        places = torch.searchsorted(self._all(), rows)
        self._here.index_add_(0, send(places, self._pipeline.device), grad)

    def norm(self) -> Tensor:
        self._all()
        return torch.linalg.vector_norm(self._here, dtype=wide(self._grad.dtype))

    def send(self) -> None:
        """Queue the copy to the host, on the current lane."""
        rows = self._all()
        if self._host.numel() < self._here.numel():
            self._host = pinned_zeros(self._here.numel(), self._grad.dtype, self._pipeline.device)
        lane = self._pipeline.outward
        self._host[: self._here.numel()].view_as(self._here).copy_(lane.uses(self._here), non_blocking=True)
        self._left, self._here = rows, None

    def arrived(self) -> None:
        """The copy is there: the rows go to where they belong, once."""
        if self._left is not None:
            width = self._grad.shape[1]
            self._grad[self._left] = self._host[: len(self._left) * width].view(-1, width)
            self._left, self._placed = None, self._left

    def clear(self) -> None:
        """After the update: rows that the next step does not look up have no gradient but the head's."""
        if self._placed is not None:
            self._grad[self._placed] = 0
            self._placed = None
