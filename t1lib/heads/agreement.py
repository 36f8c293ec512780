"""Do the processes of a group make the same call? Asked before anything else: a collective of unlike sizes hangs.

Every call sends three integers a process: a digest of the call, rows of the weight, and whether it is the first such
call. On a CPU they are read and compared each time. On CUDA reading them makes the host wait for the device, so it is
done once for a digest; after that the device compares them with what was found then, and an assertion there ends all.
"""

import hashlib
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from t1lib.errors import T1Error
from t1lib.heads.shards import all_gather

SAME = "every rank of the group must pass the same"
READ = ("cpu",)  # where the integers are read each time: nothing has to be waited for
ERROR = "an error"  # the fact that a process sends in place of a call; no option has this name
MOST = 4096  # calls of a group to remember, lest texts of ever new lengths fill the memory


class _Known(NamedTuple):
    """Of a call that agreed before: what this process sends, what it receives, and the rows that each holds."""

    mine: Tensor
    every: Tensor
    rows: tuple[int, ...]


KNOWN: WeakKeyDictionary[ProcessGroup, dict[tuple, _Known]] = WeakKeyDictionary()
"""By the group itself: the next one may have the name of one that was destroyed."""


def agree(group: ProcessGroup, facts: dict[str, Any], rows: int, device: torch.device) -> tuple[int, ...]:
    """The rows of the weight that each process holds, in the order of ranks.

    facts   what must be the same everywhere, by name, as values with a `repr`

    Raises `T1Error` on every process if one of `facts` differs: the error of a process that sends one (`tell`), or else
    what differs.
    """
    text = repr(sorted(facts.items()))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)
    calls, key = KNOWN.setdefault(group, {}), (digest, rows, device)
    if key in calls:
        known = calls[key]
        same = (_exchange(group, known.mine) == known.every)[:, :2].all()
        torch._assert_async(same, f"ranks of the group disagree about the call; {SAME} shapes and options")
        return known.rows
    mine = torch.tensor([digest, rows, 1], device=device)
    every = _exchange(group, mine)
    digests, held, fresh = every.t().tolist()
    if len(set(digests)) > 1:
        if not all(fresh):
            raise T1Error(facts.get(ERROR, f"another rank makes a different call; {SAME}"))
        told: list[dict[str, Any]] = [{}] * len(digests)
        with torch.cuda.device_of(mine):  # on which objects travel
            dist.all_gather_object(told, facts, group=group)
        errors = (f"rank {rank}: {theirs[ERROR]}" for rank, theirs in enumerate(told) if ERROR in theirs)
        raise T1Error(next(errors, None) or f"{difference(told)}; {SAME}")
    if device.type not in READ:
        if len(calls) >= MOST:
            calls.clear()
        calls[key] = _Known(mine * torch.tensor([1, 1, 0], device=device), every, tuple(held))
    return tuple(held)


def tell(group: ProcessGroup, error: T1Error, device: torch.device) -> None:
    """Send an error in place of a call. Returns if every process sends the same one; otherwise raises as `agree` does.

    device   where the others send their calls; if the group's backend does not serve it, one that is served
    """
    if not _serves(_backends(group), device.type):
        here = torch.cuda.is_available() and _serves(_backends(group), "cuda")
        device = torch.device("cuda" if here else "cpu")
    agree(group, {ERROR: str(error)}, 0, device)


def _exchange(group: ProcessGroup, mine: Tensor) -> Tensor:
    """(processes, integers)."""
    every = mine.new_empty(dist.get_world_size(group) * len(mine))
    all_gather(every, mine, group=group)
    return every.view(-1, len(mine))


def difference(every: list[dict[str, Any]]) -> str:
    """The first thing about which the ranks' facts, in the order of ranks, disagree, and what each of them has.

    "nothing" is what a rank has that lacks the fact: None is something.
    """
    names = dict.fromkeys(name for facts in every for name in facts)
    shown = {name: [repr(facts[name]) if name in facts else "nothing" for facts in every] for name in names}
    name = next(name for name, values in shown.items() if len(set(values)) > 1)
    values = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(shown[name]))
    return f"ranks disagree about {name}: {values}"


def digest_of(tensor: Tensor) -> str:
    """The same for two tensors of one dtype on a CPU where they hold the same values, bit by bit, in the same order."""
    flat = tensor.detach().flatten().contiguous()
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:16]


def require_backend(group: ProcessGroup, device: str) -> None:
    """Raise `T1Error` unless the group's backend serves tensors on this type of device."""
    backends = _backends(group)
    if not _serves(backends, device):
        use = {"cpu": "gloo", "cuda": "nccl"}.get(device, "one that serves it")
        found = ", ".join(f"{b} for {d}" for d, b in backends.items())
        raise T1Error(f"tensors are on {device}, but the group's backend is {found}; use {use} for {device}")


def _backends(group: ProcessGroup) -> dict[str, str]:
    """By type of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _serves(backends: dict[str, str], device: str) -> bool:
    return device in backends and (backends[device], device) != ("gloo", "cuda")  # gloo has not all collectives there
