"""What the notebook `parallel` measures on several ranks: an output layer whose weight is sharded over them, and a
training step with rows of its own on each. Times are the slowest rank's, errors and memory the largest of any rank."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.heads import parallel as sharded
from t1lib.heads import parse_bytes
from t1lib.heads.fused import kernels_run
from t1lib.measure.heads import Case, HeadBench, Key, Runner, free_cached
from t1lib.measure.ranks import across, ran
from t1lib.measure.records import Records

MIB = 2**20
HEADS = ("full", *sharded.HEADS)  # `full` on one rank alone
PEAKS = ("allocated_gib", "reserved_gib", "host_gib")  # of a training step


class Share(HeadBench):
    """This rank's rows of a `HeadBench`'s weight; hidden states and targets are the same on every rank. The reference,
    whose dW is that of these rows, is computed from the whole weight, once."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Lead-ins end in a collective, so that no rank's device continues before all have reached it.
        self.lead.last = partial(dist.all_reduce, torch.ones(1, device=self.device), dist.ReduceOp.MAX)
        self.group: dist.ProcessGroup | None = None
        kept, rank, ranks = self.reference(Case("full")), dist.get_rank(), dist.get_world_size()
        kept["dW"] = kept["dW"].tensor_split(ranks)[rank].clone()
        self.w = self.w.tensor_split(ranks)[rank].clone()  # the first ranks may have one row more
        self.group = dist.group.WORLD if ranks > 1 else None
        free_cached()  # the reference's memory, for the heads

    def function(self, case: Case) -> Callable[..., Any]:
        if self.group is None:
            return super().function(case)
        return partial(sharded.linear_cross_entropy, head=case.method, group=self.group, **case.settings)

    def attempt(self, variant: str, action: Callable[[], Any]) -> tuple[Any, str, str]:
        """The largest values of any rank. Where there are several, an error ends this one, and then the others, which
        would wait for it."""
        found, status, why = super().attempt(variant, action) if self.group is None else (action(), "ok", "")
        return (across(found), ran(self.device), why) if status == "ok" else (found, status, why)


@contextmanager
def overheard() -> Iterator[list[partial[Any]]]:
    """Record the collectives that the vocabulary-parallel heads start on this rank inside the `with` block, in order:
    calls on tensors of their own, for replay without the computation between. The last tensor of each is the input,
    whose bytes this rank contributes."""
    calls: list[partial[Any]] = []

    def noted(function: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        own = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        calls.append(partial(function, *own, group=group))  # each is awaited
        return function(*tensors, group=group, **options)

    # as `t1lib.heads.parallel` names them
    gather, reduce = partial(noted, sharded.all_gather), partial(noted, dist.all_reduce)
    with patch.object(sharded, "all_gather", gather), patch.object(dist, "all_reduce", reduce):
        yield calls


def measure_head(
    records: Records, device: torch.device, *, phase: str, heads: list[str], workspace: str, error_bound: float,
    iters: int, warmup: int, **given: Any,
) -> None:  # fmt: skip
    """Errors, memory, and times interleaved with those of `floor`, the three products of a rank's own rows, of heads on
    the ranks of this group; on one rank, of the ordinary heads. A head whose error exceeds `error_bound` is `wrong`,
    one that cannot run here `unavailable`. Neither is timed, nor are ranks that share a GPU.

    workspace   per rank, of the heads that take one: all but `full`
    given       tokens, vocabulary, hidden, dtype, seed and reference of the `HeadBench`
    """
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
        _file_memory(records, phase, bench, head, case)
        runners[head, phase] = partial(bench.times, case)
        if bench.group is not None:
            with overheard() as collectives:
                bench.result(case)
            sent = sum(call.args[-1].nbytes for call in collectives)
            records.put(head, phase, {"collectives": len(collectives), "exchanged_mib": sent / MIB})
            alone = {"collectives": lambda calls=collectives: [call() for call in calls]}
            runners[head, phase, "collectives"] = partial(bench.phases, alone)
    if ran(device) == "ok":
        bench.take_turns(records, runners, iters, warmup)


def _file_memory(records: Records, phase: str, bench: Share, head: str, case: Case) -> None:
    """Record what a rank holds at the head's peak, by kind; on its own GPU also what is outside PyTorch's allocator."""
    parts = {"weight": bench.w.nbytes, "dW": bench.w.nbytes, "hidden": bench.e.nbytes, "dE": bench.e.nbytes}
    parts["workspace"] = bench.memory(case)["workspace"]
    parts["held"] = sum(parts.values())
    if bench.device.type == "cuda" and ran(bench.device) == "ok":
        free, whole = torch.cuda.mem_get_info(bench.device)
        parts["outside"] = whole - free - torch.cuda.memory_reserved(bench.device)
    records.put(head, phase, {f"{name}_mib": value / MIB for name, value in across(parts).items()})


def measure_step(
    records: Records, device: torch.device, *, phase: str, mode: str, rows: int, most: int, steps: int, warmup: int,
    loss_steps: int, **session: Any,
) -> None:  # fmt: skip
    """Time and memory (`host_all`: of all ranks, with shared memory counted once) of training in `mode` on the ranks of
    this group, no time if they share a GPU; and in phase `losses/<ranks>` its losses.

    rows      rows of the batch per rank
    most      the largest number of ranks compared: losses are of `most` · `rows` rows in micro-batches of `rows`
    session   further arguments of `TrainSession`
    """
    # Imported here so that the notebook, which only passes this function on, does not need transformers.
    from t1lib.measure.session import TrainSession

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
    own, mapped = across({"": peaks["host_gib"] - peaks["mapped_gib"]}, torch.sum), across({"": peaks["mapped_gib"]})
    records.put(mode, phase, {"host_all_gib": own[""] + mapped[""], "tokens": rows * ranks * session["seq"]})
    records.status(mode, status, phase)
    train.trainer.close()
    del train
    gc.collect()  # free all that is left of that session
    train = TrainSession(batch=rows * most, micro_batch=rows, **session)
    for step, loss in enumerate(train.warm_up(loss_steps)):
        records.put(mode, f"losses/{ranks}", {"loss": loss}, step)
    train.trainer.close()
