"""Tests on several processes: for each group size, one set of processes runs all cases of a worker.

A worker is a script that calls `work`. Its test module uses `Outcomes` and makes each case a test of its own.
"""

import json
import os
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from copies import python
from torch.multiprocessing import start_processes

HERE = Path(__file__).parent
SIZES = (2, 3)
SECONDS_A_COLLECTIVE = 30  # a collective that waits longer fails
PORTS: list[int] = []  # for process groups that are created one after another
Cases = dict[str, Callable[[], None]]


class Outcomes:
    """Tracebacks by process and case, for each group size. The worker runs once, in `folder`, and covers all sizes."""

    def __init__(self, worker: Path, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        python(worker, folder, cwd=folder, TRITON_INTERPRET="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=path)

    def of(self, size: int) -> list[dict[str, str]]:
        return [json.loads((self.folder / f"{size}.{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def work(folder: Path, cases: Callable[[int, Path], Cases], alone: Callable[[int, Path], Cases] | None = None) -> None:
    """The body of a worker script, started as `WORKER FOLDER`. It forks, so that slow imports happen only once.

    All processes run every case of `cases` in one process group, in the same order; then every case of `alone`, without
    a group but in torchrun's environment: RANK etc. are set, and `next_port()` selects the port of the next group.
    Each process writes {case: traceback, or "" if it passed}.
    """
    for size in SIZES:
        PORTS[:] = free_ports(8) if alone else []
        start_processes(_run, (size, folder, cases, alone), size, start_method="fork")


def _run(rank: int, size: int, folder: Path, cases: Callable, alone: Callable | None) -> None:
    limit, store = timedelta(seconds=SECONDS_A_COLLECTIVE), folder / f"store{size}"
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=size, timeout=limit)
    found = {name: _outcome(case) for name, case in cases(size, folder).items()}
    dist.destroy_process_group()
    if alone is not None:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
        next_port()
        found |= {name: _outcome(case) for name, case in alone(size, folder).items()}
    (folder / f"{size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def free_ports(count: int) -> list[int]:
    """Unused ports, below the system's ephemeral range: it could hand out ports of that range before they are used."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            found.add(port)
    return list(found)


def next_port() -> None:
    """Give the next process group a port that no earlier group has used, the same on all processes."""
    os.environ["MASTER_PORT"] = str(PORTS.pop())


def _outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""
