"""How ranks measure together: start at the same time, report the slowest, time their collectives alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.heads import parallel
from t1lib.measure.ranks import share_gpus
from t1lib.measure.timing import LeadIn


class SharedLeadIn(LeadIn):
    """A lead-in that ends in a collective, so that no rank's device continues before all have reached it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._token = torch.ones(1, device=device)

    def queue(self) -> None:
        super().queue()
        dist.all_reduce(self._token, dist.ReduceOp.MAX)  # on CUDA, enqueued on the device


def ran(device: torch.device) -> str:
    """The status of what has run: `shared` if there are fewer GPUs than ranks, otherwise `ok`."""
    return "shared" if share_gpus(dist.get_world_size(), device.type) else "ok"


def largest(values: dict[str, float]) -> dict[str, float]:
    """The maximum of each value over the ranks, returned on every rank; NaN if it is NaN on any."""
    return dict(zip(values, _every(values).amax(0).tolist(), strict=True))


def total(values: dict[str, float]) -> dict[str, float]:
    """The sum of each value over the ranks, returned on every rank."""
    return dict(zip(values, _every(values).sum(0).tolist(), strict=True))


def _every(values: dict[str, float]) -> Tensor:
    """All ranks' values: (ranks, values) float64."""
    mine = torch.tensor(list(values.values()), dtype=torch.float64)
    every = mine.new_empty(dist.get_world_size() * len(mine))
    parallel.all_gather(every, mine)
    return every.view(-1, len(mine))


def meet() -> None:
    """Block the host until all ranks have called this."""
    largest({"": 0.0})


@dataclass
class Exchange:
    """The collectives that a head's call starts on this rank, in order, for replay without the computation between.

    calls   they themselves, on tensors of their own
    nbytes  bytes that this rank contributes to them
    """

    calls: list[Callable[[], Any]] = field(default_factory=list)
    nbytes: int = 0

    count = property(lambda self: len(self.calls))

    def run(self) -> None:
        """Replay all collectives, one after the other."""
        for call in self.calls:
            call()


@contextmanager
def overheard() -> Iterator[Exchange]:
    """Record the collectives that the vocabulary-parallel heads start inside the `with` block."""
    exchange = Exchange()

    def listen(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def noted(*tensors: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
            exchange.nbytes += tensors[-1].nbytes  # the last one is the input
            own = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
            exchange.calls.append(partial(function, *own, group=group))  # each is awaited
            return function(*tensors, group=group, **options)

        return patch.object(module, name, noted)

    with listen(parallel, "all_gather"), listen(dist, "all_reduce"):  # as `t1lib.heads.parallel` names them
        yield exchange
