"""Do the processes of a group make the same call? Asked before anything else: a collective of unlike sizes hangs.

Every call sends a few integers a process: a digest of the call, rows of the weight, the least and the largest target.
On a CPU they are read and compared each time. On CUDA reading them makes the host wait for the device, so it is done
once for a digest; after that the device compares them with what was found then, and an assertion there ends all.
"""

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from t1lib.errors import T1Error
from t1lib.heads.shards import all_gather

SAME = "every rank of the group must pass the same"
READ = ("cpu",)  # where the integers are read each time: nothing has to be waited for
MOST = 4096  # calls to remember, lest texts of ever new lengths fill the memory


class _Known(NamedTuple):
    """Of a call that agreed before: what this process sends, what it receives, and the rows that each holds."""

    mine: Tensor
    every: Tensor
    rows: tuple[int, ...]


KNOWN: dict[tuple, _Known] = {}


def agree(group: ProcessGroup, facts: dict[str, Any], rows: int, device: torch.device) -> tuple[int, ...]:
    """The rows of the weight that each process holds, in the order of ranks.

    facts   what must be the same everywhere, by name, as values with a `repr`

    Raises `T1Error` on every process if one of `facts` differs.
    """
    text = repr(sorted(facts.items()))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)
    key = (group.group_name, dist.get_rank(group), dist.get_world_size(group), digest, rows, device)
    if key in KNOWN:
        known = KNOWN[key]
        same = (_exchange(group, known.mine) == known.every)[:, :2].all()
        torch._assert_async(same, f"ranks of the group disagree about the call; {SAME} shapes and options")
        return known.rows
    mine = torch.tensor([digest, rows, 1], device=device)
    every = _exchange(group, mine)
    digests, held, fresh = every.t().tolist()
    if len(set(digests)) > 1:
        if not all(fresh):
            raise T1Error(f"another rank makes a different call; {SAME}")
        told: list[dict[str, Any]] = [{}] * len(digests)
        dist.all_gather_object(told, facts, group=group)
        raise T1Error(f"{difference(told)}; {SAME}")
    if device.type not in READ:
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        KNOWN[key] = _Known(mine * torch.tensor([1, 1, 0], device=device), every, tuple(held))
    return tuple(held)


def _exchange(group: ProcessGroup, mine: Tensor) -> Tensor:
    """(processes, integers)."""
    every = mine.new_empty(dist.get_world_size(group) * len(mine))
    all_gather(every, mine, group=group)
    return every.view(-1, len(mine))


def difference(every: list[dict[str, Any]]) -> str:
    """The first thing about which the ranks' facts, in the order of ranks, disagree, and what each of them has."""
    names = dict.fromkeys(name for facts in every for name in facts)
    name = next(n for n in names if len({repr(f.get(n)) for f in every}) > 1)
    values = ", ".join(f"{f.get(name)!r} on rank {rank}" for rank, f in enumerate(every))
    return f"ranks disagree about {name}: {values}"


def require_backend(group: ProcessGroup, device: str) -> None:
    """Raise `T1Error` unless the group's backend serves tensors on this type of device."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    served = backends.get(device)
    if served is None or (served == "gloo" and device == "cuda"):  # gloo has not all collectives there
        use = {"cpu": "gloo", "cuda": "nccl"}.get(device, "one that serves it")
        found = ", ".join(f"{b} for {d}" for d, b in backends.items())
        raise T1Error(f"tensors are on {device}, but the group's backend is {found}; use {use} for {device}")
