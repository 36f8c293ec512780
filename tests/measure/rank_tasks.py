"""What the ranks of test_ranks.py do: importable by name in their processes."""

import os
import signal
import time

import torch
import torch.distributed as dist

from t1lib.errors import T1Error


def tell(records, device, phase, text):
    """Every rank's number plus one adds up."""
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    records.add("all", "sum", total, phase=phase)
    if dist.get_rank() == 0:
        print(text)


def end(records, device, how, phase=""):
    """Rank 1 ends in the way that is asked for, the others wait for it in a collective."""
    if dist.get_rank() == 1:
        ways = {"raise": _raise, "refuse": _refuse, "memory": _memory, "exit": _exit, "kill": _kill, "sleep": _sleep}
        ways[how]()
    dist.all_reduce(torch.ones(1, device=device))


def _raise():
    raise ValueError("this is rank 1\nwith a second line")


def _refuse():
    raise T1Error("this is bad input")


def _memory():
    raise MemoryError("no memory on rank 1")


def _exit():
    os._exit(7)


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep():
    time.sleep(600)
