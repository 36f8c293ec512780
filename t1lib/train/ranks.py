"""The processes that train a model together: how they find each other, compare facts, and add up."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.errors import T1Error
from t1lib.heads.parallel import SAME, difference


@dataclass(frozen=True)
class Ranks:
    """All processes of the process group, which train one model together, as one of them sees them.

    Every rank must call the methods, in the same order; with a single process they cost nothing.
    """

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise `T1Error` on every rank unless all have the same facts."""
        every: list[dict[str, Any]] = [{}] * self.size
        dist.all_gather_object(every, facts)
        if len(set(map(repr, every))) > 1:
            raise T1Error(f"{difference(every)}; {SAME}")

    def sum(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The sum of a tensor over ranks, computed on `device`. The result is bitwise equal on all."""
        if self.alone:
            return tensor
        total = tensor.to(device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)


ALONE = Ranks()


def launched() -> int:
    """How many processes torchrun, or another launcher that sets its variables, started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def take_gpu() -> None:
    """With several processes, make the CUDA device of this one's local rank the current one, if it is there: before
    anything, such as weights, is allocated on the first one."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if launched() > 1 and number < torch.cuda.device_count():
        torch.cuda.set_device(number)


def join() -> None:
    """Create the process group of what torchrun started, or one of this process alone, for as long as the process runs:
    for tensors on GPUs if there are any, and for metadata in host memory in any case. Raises `T1Error` if the
    launcher's variables are incomplete."""
    size = launched()
    on_one_host = size in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if on_one_host else ():
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")  # the host's name may not resolve
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **alone)
    except ValueError as error:
        raise T1Error(f"WORLD_SIZE is {size}, but its processes cannot find each other: {error}") from None
