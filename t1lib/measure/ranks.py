"""Runs a function in several processes on this host at once, started by torchrun: with one GPU each, or on the CPU.
Where there are fewer GPUs than processes, they share them: that shows that results are right, not how fast they come.

No process outlives the call: a rank that ends early ends all of them, and so does the time limit, with a message that
says which rank it was, and where.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from t1lib.measure.isolate import VariantFailed, VariantOutOfMemory, raised
from t1lib.measure.records import Records

WORKER = "t1lib.measure.parallel_worker"
PATIENCE = 3.0  # seconds: beyond the limit, for ranks to dump their stacks; after a kill, for processes to end
# Exit codes of ranks that fail only because another did: ended by torchrun, or by a communication library that has
# lost its peers.
SURVIVORS = (-getattr(signal, "SIGTERM", 15), -getattr(signal, "SIGABRT", 6))
_ENDED = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')


def share_gpus(ranks: int, device: str) -> bool:
    """Whether that many ranks share the GPUs of this host, because there are fewer. device: cpu or cuda"""
    return device == "cuda" and ranks > torch.cuda.device_count()


def measure_ranks(
    records: Records, task: Callable[..., None], settings: dict[str, Any], counts: Sequence[int], *, name: str,
    variants: Sequence[str], device: str, limit: float,
) -> None:  # fmt: skip
    """Run `task` on each number of ranks in turn, and add what it records in the phases `<name>/<ranks>`.

    task       module-level function, called as `task(records, device, phase=…, **settings)` on every rank, in a process
               group; only rank 0's records are kept. `settings` must be serializable as JSON
    variants   those that become `oom` if memory runs out
    limit      seconds that each number of ranks may take, counted from torchrun's start

    Raises what a rank raised, see `run_ranks`.
    """
    there = torch.cuda.device_count()
    for ranks in counts:
        phase = f"{name}/{ranks}"
        if share_gpus(ranks, device):
            print(f"{phase}: shared, there {'is 1 GPU' if there == 1 else f'are {there} GPUs'} for {ranks} ranks")
        try:
            threads = max(1, torch.get_num_threads() // ranks)  # a single rank gets all cores
            records.extend(run_ranks(task, settings | {"phase": phase}, ranks, device, limit, threads))
        except VariantOutOfMemory as error:
            print(f"{phase}: oom,", str(error).partition("\n")[0])
            for variant in variants:
                records.status(variant, "oom", phase)


def run_ranks(
    task: Callable[..., None], settings: dict[str, Any], ranks: int, device: str, limit: float, threads: int = 1
) -> list[dict[str, Any]]:
    """Run `task(records, device, **settings)` in `ranks` processes with `threads` threads each; returns rank 0's rows.

    What rank 0 prints is printed here. Raises `T1Error` and `UnavailableError` as a rank raised them,
    `VariantOutOfMemory` if one ran out of memory, and `VariantFailed` for any other failure: an exception in a rank,
    a rank that ended without a message, or the time limit. Its first line names the rank.
    """
    until = time.time() + limit
    with tempfile.TemporaryDirectory(prefix="t1-ranks-") as temporary:
        folder = Path(temporary)
        call = {"task": f"{task.__module__}:{task.__name__}", "settings": settings, "device": device, "until": until}
        call |= {"folder": temporary, "launcher": os.getpid()}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [*_torchrun(ranks), WORKER, json.dumps(call)], env=_environment(threads), stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
            code = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(until + PATIENCE - time.time())
            finally:
                _end(process)
        if code != 0:
            raise _failure(folder, ranks, None if code is None else _exit_codes(folder), limit)
        print((folder / "out").read_text(encoding="utf-8", errors="replace"), end="")
        return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def _torchrun(ranks: int) -> list[str]:
    # A numeric address needs no name resolution: a host may be unable to resolve its own name.
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), "--module"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def _environment(threads: int) -> dict[str, str]:
    """The processes communicate over the loopback interface, and can import what this one can."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    own = {"NCCL_SOCKET_IFNAME": loopback, "GLOO_SOCKET_IFNAME": loopback, "NCCL_NVLS_ENABLE": "0"}
    own |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | own


def _end(process: subprocess.Popen) -> None:
    """Kill torchrun and its descendants, and wait until they are gone: only then is a GPU's memory free."""
    family = []
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE
    while any(map(_runs, family)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _exit_codes(folder: Path) -> dict[int, int]:
    """Rank → exit code, for the ranks that torchrun reported as failed."""
    summary = (folder / "err").read_text(encoding="utf-8", errors="replace")
    return {int(rank): int(code) for rank, code in _ENDED.findall(summary)}


def _failure(folder: Path, ranks: int, codes: dict[int, int] | None, limit: float) -> Exception:
    """The exception to raise; `codes` is None if the time limit was reached.

    A rank that ends without a message makes others fail, so it takes precedence over their messages; otherwise the
    earliest message counts.
    """
    said = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.error.json")]
    said.sort(key=lambda entry: entry["at"])
    if codes is None and not said:
        return _too_long(folder, ranks, limit)
    silent = {r: c for r, c in (codes or {}).items() if r not in {entry["rank"] for entry in said}}
    first = [r for r, c in silent.items() if c not in SURVIVORS] or ([] if said else list(silent))
    if first:
        rank, code = first[0], silent[first[0]]
        if code == -getattr(signal, "SIGKILL", 9):
            return VariantFailed(f"rank {rank} of {ranks} was killed, as by a host whose memory runs out")
        return VariantFailed(f"rank {rank} of {ranks} ended with exit code {code}, without a message")
    if said:
        entry = said[0]
        where = f"rank {entry['rank']} of {ranks}: {entry['line']}\n" if entry["kind"] == "error" else ""
        return raised(entry["kind"], where + entry["text"])
    tail = (folder / "err").read_text(encoding="utf-8", errors="replace")[-2000:]
    return VariantFailed(f"torchrun of {ranks} ranks failed before they began\n{tail}")


def _too_long(folder: Path, ranks: int, limit: float) -> VariantFailed:
    """The error for the time limit: names the innermost line that each rank was at, and shows its stack."""
    stacks = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.stack"))}
    places = []
    for rank, stack in stacks.items():
        main = stack.rpartition("(most recent call first)")[2]  # the main thread is listed last
        frame = _FRAME.search(main)
        places.append(f"rank {rank} in {Path(frame[1]).name}:{frame[2]} {frame[3]}" if frame else f"rank {rank} silent")
    text = "; ".join(places) or "none had begun"
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return VariantFailed("\n".join([f"{who} took longer than {limit:g} s: {text}", *stacks.values()]))
