"""One rank of `t1lib.measure.ranks.run_ranks`: `torchrun … --module t1lib.measure.parallel_worker JSON`."""

import faulthandler
import importlib
import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from t1lib.measure.isolate import told
from t1lib.measure.ranks import share_gpus
from t1lib.measure.records import Records


def main(text: str) -> None:
    """Run the task in a process group. An error is written to a file for the launcher.

    The process then exits immediately: threads of the communication library might wait a long time for other ranks,
    and shutting down an interpreter with PyTorch takes a second or two.
    """
    call, rank = json.loads(text), int(os.environ["RANK"])
    folder = Path(call["folder"])
    if rank:
        sys.stdout = io.StringIO()  # only rank 0 prints
    threading.Thread(target=_end_with, args=((call["launcher"], os.getppid()),), daemon=True).start()
    with (folder / f"{rank}.stack").open("w", encoding="utf-8") as stack:
        faulthandler.dump_traceback_later(max(call["until"] - time.time(), 0.1), file=stack)
        try:
            _run(call, rank, folder)
        except BaseException as error:
            at, (kind, message) = time.time(), told(error)
            line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            entry = {"at": at, "rank": rank, "kind": kind, "line": line, "text": message}
            (folder / f"{rank}.error.json").write_text(json.dumps(entry), encoding="utf-8")
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)


def _run(call: dict[str, Any], rank: int, folder: Path) -> None:
    module, _, name = call["task"].partition(":")
    task, records, device = getattr(importlib.import_module(module), name), Records(), _join(call["device"])
    task(records, device, **call["settings"])
    if rank == 0:
        lines = [json.dumps(row) + "\n" for row in records.rows]
        (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    dist.destroy_process_group()


def _join(kind: str) -> torch.device:
    """Join the group of all ranks; returns this rank's device. With GPUs, gloo handles host tensors.

    Where there are fewer GPUs than ranks, ranks share them. NCCL refuses two ranks of one host on one GPU, so each
    claims to be a host of its own; they then exchange through sockets.
    """
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    rank = int(os.environ["LOCAL_RANK"])
    if share_gpus(int(os.environ["WORLD_SIZE"]), kind):
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def _end_with(processes: tuple[int, ...]) -> None:
    """Exit once one of `processes` is gone: one that is killed outright cannot end this process itself."""
    while all(map(psutil.pid_exists, processes)):
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
