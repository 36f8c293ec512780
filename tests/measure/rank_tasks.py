"""Tasks for the ranks of test_ranks.py, importable by name in their processes."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from t1lib.errors import T1Error


def add_up(records, device, phase, pids):
    """Sum the rank numbers, counted from 1."""
    (Path(pids) / str(os.getpid())).touch()
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    records.add("all", "sum", total, phase=phase)
    records.add("all", "threads", torch.get_num_threads(), phase=phase)
    print(f"this is rank {dist.get_rank()}")


def fail(records, device, phase, how, pids):
    """The last rank ends in one of `WAYS`; the others wait for it in a collective."""
    (Path(pids) / str(os.getpid())).touch()
    dist.all_reduce(torch.ones(1, device=device))  # all have left their note before one of them ends
    if dist.get_rank() == dist.get_world_size() - 1:
        WAYS[how]()
    dist.all_reduce(torch.ones(1, device=device))


def stumble():
    raise ValueError("this is what it says\nin two lines")


def refuse():
    raise T1Error("bad input")


def run_out():
    raise MemoryError("no memory")


def leave():
    os._exit(7)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def oversleep():
    time.sleep(600)


WAYS = {"raises": stumble, "refuses": refuse, "oom": run_out, "exits": leave, "killed": die, "sleeps": oversleep}
