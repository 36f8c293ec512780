"""How ranks measure together: start at the same time, report the slowest, time their collectives alone."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.heads import parallel
from t1lib.measure.ranks import share_gpus
from t1lib.measure.timing import LeadIn

USED = ((dist, "all_reduce"), (parallel, "all_gather"))
"""The collectives of `t1lib.heads.parallel`, by the names under which it calls them."""


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


class Exchange:
    """The collectives that a head's call starts on this rank, in order, for replay without the computation between.

    count   number of collectives
    nbytes  bytes that this rank contributes to them
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = []
        self._memory: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self.count = self.nbytes = 0

    def run(self) -> None:
        """Replay all collectives, one after the other, on separate buffers."""
        for function, arguments, options in self._calls:
            function(*arguments, **options)

    def note(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record a collective with buffers shaped like its tensors; the last tensor argument is the input."""
        self.count += 1
        self.nbytes += [x for x in arguments if isinstance(x, Tensor)][-1].nbytes
        own = [self._like(x) if isinstance(x, Tensor) else x for x in arguments]
        self._calls.append((function, own, {k: v for k, v in options.items() if k != "async_op"}))

    def _like(self, tensor: Tensor) -> Tensor:
        key = tensor.shape, tensor.dtype
        if key not in self._memory:
            self._memory[key] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        return self._memory[key]


@contextmanager
def overheard() -> Iterator[Exchange]:
    """Record the collectives that the vocabulary-parallel heads start inside the `with` block."""
    exchange = Exchange()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            exchange.note(function, arguments, options)
            return function(*arguments, **options)

        return noted

    with ExitStack() as stack:
        for module, name in USED:
            stack.enter_context(patch.object(module, name, noting(getattr(module, name))))
        yield exchange
