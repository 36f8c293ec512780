"""Check that all ranks of a group make the same call, before any other collective: mismatched sizes would hang.

In every call each rank sends three integers: a digest of the call, its number of weight rows, and whether it makes this
call for the first time. On a CPU they are read and compared every time. On CUDA reading them makes the host wait for
the device, so that is done once per digest; from then on the device compares them with the values found the first
time, and a mismatch is a device assertion, which ends the process.
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
READ = ("cpu",)  # device types on which the integers are read every time, because nothing has to be waited for
ERROR = "an error"  # name of the fact that a rank sends in place of a call; no option has this name
MOST = 4096  # calls remembered per group: a limit, as every new sequence length adds one


class _Known(NamedTuple):
    """A call that agreed before: what this rank sends, what it receives, and how many weight rows each rank holds."""

    mine: Tensor
    every: Tensor
    rows: tuple[int, ...]


KNOWN: WeakKeyDictionary[ProcessGroup, dict[tuple, _Known]] = WeakKeyDictionary()
"""Keyed by the group object, not by its name, which a new group may take over from a destroyed one."""


def agree(group: ProcessGroup, facts: dict[str, Any], rows: int, device: torch.device) -> tuple[int, ...]:
    """Check that all ranks make the same call; return how many rows of the weight each rank holds, in rank order.

    facts   what must be the same on every rank, by name; values are compared by their `repr`
    rows    number of weight rows on this rank

    Raises `T1Error` on every rank if one of `facts` differs. The message is the error that a rank sent in place of its
    call (`tell`) if there is one, otherwise what differs.
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
        with torch.cuda.device_of(mine):  # the device that all_gather_object uses
            dist.all_gather_object(told, facts, group=group)
        errors = (f"rank {rank}: {theirs[ERROR]}" for rank, theirs in enumerate(told) if ERROR in theirs)
        raise T1Error(next(errors, None) or f"{difference(told)}; {SAME}")
    if device.type not in READ:
        if len(calls) >= MOST:
            calls.clear()
        calls[key] = _Known(mine * torch.tensor([1, 1, 0], device=device), every, tuple(held))
    return tuple(held)


def tell(group: ProcessGroup, error: T1Error, device: torch.device) -> None:
    """Send an error in place of a call. Returns if every rank sends the same one; otherwise raises as `agree` does.

    device   where the other ranks send their calls; if the group's backend does not serve it, another one is used
    """
    if not _serves(_backends(group), device.type):
        here = torch.cuda.is_available() and _serves(_backends(group), "cuda")
        device = torch.device("cuda" if here else "cpu")
    agree(group, {ERROR: str(error)}, 0, device)


def _exchange(group: ProcessGroup, mine: Tensor) -> Tensor:
    """(ranks, integers): what every rank sends."""
    every = mine.new_empty(dist.get_world_size(group) * len(mine))
    all_gather(every, mine, group=group)
    return every.view(-1, len(mine))


def difference(every: list[dict[str, Any]]) -> str:
    """Describe the first fact about which the ranks disagree, with each rank's value; `every` is in rank order.

    A rank that lacks the fact is shown with "nothing", because None is a value.
    """
    names = dict.fromkeys(name for facts in every for name in facts)
    shown = {name: [repr(facts[name]) if name in facts else "nothing" for facts in every] for name in names}
    name = next(name for name, values in shown.items() if len(set(values)) > 1)
    values = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(shown[name]))
    return f"ranks disagree about {name}: {values}"


def digest_of(tensor: Tensor) -> str:
    """Digest of a CPU tensor; equal for tensors of one dtype that hold bitwise the same values in the same order."""
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
    """The group's backend for each device type."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _serves(backends: dict[str, str], device: str) -> bool:
    return device in backends and (backends[device], device) != ("gloo", "cuda")  # gloo lacks some collectives there
