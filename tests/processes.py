"""Tests on several processes: for each group size, one set of processes runs all cases of a worker.

A worker is a script that calls `work`. Its test module uses `Outcomes` and makes each case a test of its own.
"""

import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from copies import python
from interpreter import mend
from torch.multiprocessing import start_processes

HERE = Path(__file__).parent
SIZES = (2, 3)
SECONDS_A_COLLECTIVE = 30  # a collective that waits longer fails
Cases = dict[str, Callable[[], None]]


class Outcomes:
    """Tracebacks by process and case, for each group size. The worker runs once, in `folder`, and covers all sizes."""

    def __init__(self, worker: Path, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        python(worker, folder, cwd=folder, TRITON_INTERPRET="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=path)

    def of(self, size: int) -> list[dict[str, str]]:
        return [json.loads((self.folder / f"{size}.{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def work(folder: Path, cases: Callable[[int, Path], Cases]) -> None:
    """The body of a worker script, started as `WORKER FOLDER`. It forks, so that slow imports happen only once.

    All processes run every case of `cases` in one process group, in the same order. Each process writes
    {case: traceback, or "" if it passed}.
    """
    mend()
    for size in SIZES:
        start_processes(_run, (size, folder, cases), size, start_method="fork")


def _run(rank: int, size: int, folder: Path, cases: Callable[[int, Path], Cases]) -> None:
    join(folder / f"store{size}", rank, size)
    found = {name: _outcome(case) for name, case in cases(size, folder).items()}
    if dist.is_initialized():  # not if a case that makes groups itself has failed
        dist.destroy_process_group()
    (folder / f"{size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def join(store: Path, rank: int, size: int) -> None:
    """Make the process group of the processes that meet at this file, and wait until all have joined: if one that has
    joined closed its connections at once, it would break those that the others still make."""
    limit = timedelta(seconds=SECONDS_A_COLLECTIVE)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=size, timeout=limit)
    dist.barrier()


def _outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""
