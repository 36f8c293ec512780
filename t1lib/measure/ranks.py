"""Runs a function in several processes on this host at once: with one GPU each, or on the CPU. Where there are fewer
GPUs than processes, they share them: that shows that results are right, not how fast they come. No process outlives the
call: a rank that fails or ends early ends all of them, and so does the time limit."""

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from multiprocessing import connection
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.errors import reason
from t1lib.measure.isolate import Isolated, VariantFailed, VariantOutOfMemory
from t1lib.measure.records import Records
from t1lib.timing import synchronize

MOMENT = 1.0  # seconds after an error in which to see whether it came of another rank's end


def share_gpus(ranks: int, device: str) -> bool:
    """Whether that many ranks share the GPUs of this host, because there are fewer. device: cpu or cuda"""
    return device == "cuda" and ranks > torch.cuda.device_count()


def ran(device: torch.device) -> str:
    """The status of what has run on ranks: `shared` if there are fewer GPUs than ranks, otherwise `ok`."""
    return "shared" if share_gpus(dist.get_world_size(), device.type) else "ok"


def across(values: dict[str, float], combine: Callable[..., Tensor] = torch.amax) -> dict[str, float]:
    """The maximum of each value over the ranks, or what else combines them; NaN if any is. Returned on every rank, once
    all have called this."""
    mine = torch.tensor(list(values.values()), dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return dict(zip(values, combine(torch.stack(every), dim=0).tolist(), strict=True))


def measure_ranks(
    records: Records, task: Callable[..., None], settings: dict[str, Any], ranks: int, *, name: str,
    variants: Sequence[str], device: str, limit: float,
) -> None:  # fmt: skip
    """Run a task in `ranks` processes, which share the cores; what rank 0 records is added, in phase `<name>/<ranks>`,
    and what it prints is printed here.

    task       module-level function, called as `task(records, device, phase=…, **settings)` on every rank, in a process
               group of all; settings must be picklable
    variants   those that become `oom` if memory runs out
    limit      seconds that the task may take

    Raises `T1Error` and `UnavailableError` as a rank raised them, and `VariantFailed`, whose first line names the rank,
    for an exception in a rank, a rank that ended without a message, or the time limit.
    """
    phase = f"{name}/{ranks}"
    if share_gpus(ranks, device):
        print(f"{phase}: shared, more ranks than GPUs ({torch.cuda.device_count()})")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with ExitStack() as stack:
            workers = []
            for rank in range(ranks):
                where = dict(rank=rank, ranks=ranks, kind=device, port=store.port)
                workers.append(stack.enter_context(closing(Isolated(Rank, where, wait=False))))
            for worker in workers:
                worker.receive()
            for worker in workers:
                worker.send("run", task=task, settings=settings | {"phase": phase})
            rows, printed = _result(workers, limit)
    except VariantOutOfMemory as error:
        for variant in variants:
            records.status(variant, "oom", phase, reason(error))
    else:
        print(printed, end="")
        records.extend(rows)


def _result(workers: list[Isolated], limit: float) -> Any:
    """What rank 0 returns, once all have. Raises for the first that is lost, else for the first that fails, and for the
    time limit."""
    end, among = time.monotonic() + limit, f"of {len(workers)}"
    left, result, failures = {worker.pipe: rank for rank, worker in enumerate(workers)}, None, []
    while left and (ready := connection.wait(left, max(0.0, end - time.monotonic()))):
        for rank in [left.pop(pipe) for pipe in ready]:
            try:
                value = workers[rank].receive(end=False)  # its end would make the others fail, or abort them
                result = value if rank == 0 else result
            except Exception as error:
                failures.append((workers[rank].process.is_alive(), rank, error))
                end = min(end, time.monotonic() + MOMENT)
    if failures:
        _, rank, error = min(failures, key=itemgetter(0))  # a lost one before those that fail because of it
        named = isinstance(error, VariantFailed | VariantOutOfMemory)
        raise type(error)(f"rank {rank} {among}: {error}") if named else error
    if left:
        raise VariantFailed(f"rank {', '.join(map(str, left.values()))} {among} took longer than {limit:g} s")
    return result


class Rank(NamedTuple):
    """One of the processes, as it sees itself.

    kind    cpu or cuda
    port    of the store, on the loopback interface, through which the ranks find each other
    """

    rank: int
    ranks: int
    kind: str
    port: int

    def run(self, task: Callable[..., None], settings: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """The rows that the task recorded and the text that it printed."""
        torch.set_num_threads(max(1, torch.get_num_threads() // self.ranks))
        records, printed = Records(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):  # every rank would give the same warnings
            device = self._join()
            task(records, device, **settings)
            synchronize(device)  # a rank that ended before another's collectives have would make those fail
        return records.rows, printed.getvalue()

    def _join(self) -> torch.device:
        """Join the group of all ranks; returns this rank's device. With GPUs, gloo handles host tensors. NCCL refuses
        two ranks of one host on one GPU, so where they share one, each claims to be a host of its own."""
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ |= {"NCCL_SOCKET_IFNAME": loopback, "GLOO_SOCKET_IFNAME": loopback, "NCCL_NVLS_ENABLE": "0"}
        # the rest as torchrun does
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(self.rank))
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.ranks))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        device, backend = torch.device("cpu"), "gloo"
        if self.kind == "cuda":
            if share_gpus(self.ranks, self.kind):
                os.environ["NCCL_HOSTID"] = f"rank {self.rank}"
            device, backend = torch.device("cuda", self.rank % torch.cuda.device_count()), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        dist.init_process_group(backend)
        return device
