"""The worker of test_several.py: how one of two processes ends the other; then every case, in the same order on all."""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fsdp_cases import numbers
from fsdp_command import commands, fails, is_killed
from fsdp_manners import checkpoints, refusals
from processes import Cases, as_torchrun_does, forked, free_ports, work

ENDS = {"fails": fails, "is killed": is_killed}


def cases(size: int, folder: Path) -> Cases:
    return {**numbers(size), **checkpoints(size, folder), **refusals(size)}


def ended(name: str, folder: Path) -> None:
    """Run two processes, one of which ends as `name` says; write their exit codes, outputs and seconds."""
    folder.mkdir()
    start, ports = time.monotonic(), free_ports(2)
    codes = forked(2, partial(_told, ENDS[name], folder, ports))
    outputs = [(folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    result = {"codes": codes, "outputs": outputs, "seconds": time.monotonic() - start}
    (folder / "ended.json").write_text(json.dumps(result), encoding="utf-8")


def _told(call: Callable[[Path], None], folder: Path, ports: list[int], rank: int) -> None:
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    as_torchrun_does(rank, 2, ports)
    call(folder / "run")


if __name__ == "__main__":
    for name in ENDS:
        ended(name, Path(sys.argv[1]) / name)
    work(Path(sys.argv[1]), cases, commands)
