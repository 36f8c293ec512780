"""Tasks for the ranks of test_ranks.py, importable by name in their processes."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def add_up(records, device, phase, pids):
    """Sum the rank numbers, counted from 1."""
    note(pids)
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    records.add("all", "sum", total, phase=phase)
    print(f"this is rank {dist.get_rank()}")


def fail(records, device, how, pids):
    """Rank 1 ends in one of `WAYS`; the others wait for it in a collective."""
    note(pids)
    dist.all_reduce(torch.ones(1, device=device))  # all have left their note before one of them ends
    if dist.get_rank() == 1:
        WAYS[how]()
    dist.all_reduce(torch.ones(1, device=device))


def note(pids):
    """Leave a file named after this process, and one after its parent, which is torchrun."""
    for pid in (os.getpid(), os.getppid()):
        (Path(pids) / str(pid)).touch()


def stumble():
    raise ValueError("this is what it says\nin two lines")


def leave():
    os._exit(7)


def oversleep():
    time.sleep(600)


WAYS = {"raises": stumble, "exits": leave, "sleeps": oversleep}
