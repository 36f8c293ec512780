"""What the notebook `parallel` measures in several processes on this host, with one GPU each, or on the CPU: an output
layer whose weight is sharded over them, and a training step with rows of its own on each. Where there are fewer GPUs
than ranks, ranks share them: that shows that results are right, not how fast they come. Times are the slowest rank's,
errors and memory the largest of any rank. No process outlives `measure_ranks`: a rank that fails or ends early ends all
of them, and so does the time limit."""

import gc
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from functools import cached_property, partial
from multiprocessing import connection
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.errors import reason
from t1lib.heads import parallel as sharded
from t1lib.heads import parse_bytes
from t1lib.heads.fused import kernels_run
from t1lib.measure.heads import Case, HeadBench, Key, Runner, free_cached
from t1lib.measure.isolate import Isolated, VariantFailed, VariantOutOfMemory
from t1lib.measure.probes import lead_in
from t1lib.measure.records import Records, Row
from t1lib.measure.session import TrainSession
from t1lib.timing import synchronize
from t1lib.train.batch import join

MIB = 2**20
PEAKS = ("allocated_gib", "reserved_gib", "host_gib")  # of a training step
MOMENT = 1.0  # seconds to wait after an error, as another rank's end may have caused it


def share_gpus(ranks: int, device: str) -> bool:
    """Whether that many ranks share the GPUs of this host, because there are fewer. device: cpu or cuda"""
    return device == "cuda" and ranks > torch.cuda.device_count()


def ran(device: torch.device) -> str:
    """The status of what has run on ranks: `shared` if there are fewer GPUs than ranks, otherwise `ok`."""
    return "shared" if share_gpus(dist.get_world_size(), device.type) else "ok"


def across(values: dict[str, float]) -> dict[str, float]:
    """On every rank, the maximum of each value over all of them; NaN if any is."""
    mine = torch.tensor(list(values.values()), dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return dict(zip(values, torch.stack(every).amax(dim=0).tolist(), strict=True))


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
    for an exception in a rank, a rank that ended without a message, or the time limit."""
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
                worker.send("run", task=task, settings=settings | {"phase": phase})
            rows, printed = _result(workers, limit)
    except VariantOutOfMemory as error:
        for variant in variants:
            records.status(variant, "oom", phase, reason(error))
    else:
        print(printed, end="")
        records.extend(rows)


def _result(workers: list[Isolated], limit: float) -> Any:
    """What rank 0 returns, once all are done. Raises if a rank died (reported first) or failed, and after `limit` s."""
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
        _, rank, error = min(failures, key=itemgetter(0))  # first a rank that died: others fail because of it
        named = isinstance(error, VariantFailed | VariantOutOfMemory)
        raise type(error)(f"rank {rank} {among}: {error}") if named else error
    if left:
        raise VariantFailed(f"rank {', '.join(map(str, left.values()))} {among} took longer than {limit:g} s")
    return result


class Rank:
    """One of the processes, as torchrun would have started it. kind: cpu or cuda; port: of the store on the loopback
    interface. NCCL refuses two ranks of one host on one GPU: where they share one, each claims to be its own host."""

    def __init__(self, rank: int, ranks: int, kind: str, port: int) -> None:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_NVLS_ENABLE": "0"}
        if share_gpus(ranks, kind):
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        self.device = torch.device("cuda", rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)

    def run(self, task: Callable[..., None], settings: dict[str, Any]) -> tuple[list[Row], str]:
        """The rows that the task recorded and the text that it printed, in the group of all ranks."""
        records, printed, cuda = Records(), io.StringIO(), self.device.type == "cuda"
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):  # every rank would give the same warnings
            if cuda:
                torch.cuda.set_device(self.device)
            join()
            task(records, self.device, **settings)
            synchronize(self.device)  # if a rank ended before another's collectives, those would fail
        return records.rows, printed.getvalue()


def own_rows(weight: Tensor) -> Tensor:
    """This rank's rows of a weight or its gradient; the first ranks may have one more than the others."""
    return weight.tensor_split(dist.get_world_size())[dist.get_rank()].clone()


class Share(HeadBench):
    """A `HeadBench` with only this rank's rows of the weight; hidden states and targets are the same on every rank. The
    reference is computed once, from the whole weight; of its dW, this rank's rows are kept."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.group = dist.group.WORLD if dist.get_world_size() > 1 else None
        exact = self.reference(Case("full"))
        exact["dW"] = own_rows(exact["dW"])
        self.w = own_rows(self.w)
        free_cached()  # the reference's memory, for the heads
        if self.group is not None:
            self._function = self._of_shards

    def _of_shards(self, head: str, **settings: Any) -> Callable[..., Tensor]:
        return partial(sharded.linear_cross_entropy, head=head, group=self.group, **settings)

    @cached_property
    def lead(self) -> Callable[..., None]:
        """The lead-in and a collective, so that no rank's device continues before all have reached it."""
        queue, one = lead_in(self.device), torch.ones(1, device=self.device)
        return lambda: (queue(), dist.all_reduce(one, dist.ReduceOp.MAX))

    def attempt(self, variant: str, action: Callable[[], Any]) -> tuple[Any, str, str]:
        """As `HeadBench.attempt`, with each value's maximum over all ranks. With several, no error is caught: one ends
        this rank, and then the others, which would wait for it."""
        found, status, why = super().attempt(variant, action) if self.group is None else (action(), "ok", "")
        return (across(found), ran(self.device), why) if status == "ok" else (found, status, why)


def measure_head(
    records: Records, device: torch.device, *, phase: str, heads: list[str], workspace: str, error_bound: float,
    iters: int, warmup: int, **given: Any,
) -> None:  # fmt: skip
    """Measure heads on the ranks of this group (on one rank, the ordinary heads): errors, memory, and times, in turns
    with `floor`, the three products of a rank's own rows. A head whose error exceeds `error_bound` is `wrong`,
    one that cannot run here `unavailable`. Neither is timed, nor are ranks that share a GPU.

    workspace   per rank, of all heads but `full`
    given       tokens, vocabulary, hidden, dtype, seed and reference of the `HeadBench`"""
    bench, cases, lacking = Share(device=device, **given), {}, {}
    # Known on all ranks alike: if a head failed on one alone, the others would wait for it.
    if not kernels_run(bench.e):
        lacking["fused"] = "its kernels need a CUDA device and Triton"
    if bench.group is not None:
        lacking["full"] = "it does not shard its weight"
    for head in heads:
        case = Case(head, {} if head == "full" else {"workspace": parse_bytes(workspace)})
        if head in lacking:
            records.status(head, "unavailable", phase, lacking[head])
        elif bench.admit(records, head, phase, case, error_bound):
            cases[head] = case
    runners: dict[Key, Runner] = {("floor", phase): bench.products}
    for head, case in cases.items():
        parts = {"weight": bench.w.nbytes, "dW": bench.w.nbytes, "hidden": bench.e.nbytes, "dE": bench.e.nbytes}
        parts["workspace"] = bench.memory(case)["workspace"]
        parts["held"] = sum(parts.values())  # by a rank, at the head's peak
        records.put(head, phase, {f"{name}_mib": value / MIB for name, value in across(parts).items()})
        runners[head, phase] = partial(bench.times, case)
    if ran(device) == "ok":
        bench.take_turns(records, runners, iters, warmup)


def measure_step(
    records: Records, device: torch.device, *, phase: str, mode: str, rows: int, most: int, steps: int, warmup: int,
    loss_steps: int, **session: Any,
) -> None:  # fmt: skip
    """Measure training in `mode` on the ranks of this group: memory, time unless they share a GPU and, in the phase
    `losses/<ranks>`, losses.

    rows      rows of the batch per rank
    most      the largest number of ranks compared: losses are of `most` · `rows` rows in micro-batches of `rows`
    session   further arguments of `TrainSession`"""
    session |= {"mode": mode, "device": str(device)}
    ranks, status = dist.get_world_size(), ran(device)
    train = TrainSession(batch=rows * ranks, **session)
    train.warm_up(warmup)
    for step in range(steps):
        across({"": 0.0})  # all ranks begin together
        found = train.step()
        slowest = across({metric: value for metric, value in found.items() if metric != "loss"})
        if status == "ok":
            records.put(mode, phase, found | slowest, step)
    peaks = train.memory()
    records.put(mode, phase, across({k: v for k, v in peaks.items() if k in PEAKS}))
    records.put(mode, phase, {"tokens": rows * ranks * session["seq"]})
    records.status(mode, status, phase)
    train.trainer.close()
    del train
    gc.collect()  # free all that is left of that session
    train = TrainSession(batch=rows * most, micro_batch=rows, **session)
    for step, loss in enumerate(train.warm_up(loss_steps)):
        records.put(mode, f"losses/{ranks}", {"loss": loss}, step)
    train.trainer.close()
