"""An output layer sharded over ranks and measured on all of them at once: run by the notebook `parallel`.

Phase `head/<ranks>`. Variants: the heads, and `floor`, the three products of a rank's own rows. Times are the slowest
rank's, errors and memory the largest of any rank. On one rank the ordinary heads run, without a process group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.errors import choose
from t1lib.heads import parse_bytes
from t1lib.heads.fused import kernels_run
from t1lib.heads.parallel import HEADS as SHARDED
from t1lib.heads.parallel import linear_cross_entropy
from t1lib.measure.collectives import Exchange, SharedLeadIn, largest, overheard, ran
from t1lib.measure.heads import Case, HeadBench, Key, Runner, free_cached
from t1lib.measure.records import Records
from t1lib.measure.timing import time_ms
from t1lib.memory import host_available

MIB = 2**20
HEADS = ("full", *SHARDED)  # `full` on one rank alone
FULL_BYTES = 16  # per logit: an upper bound on what head full holds at its peak


class Share(HeadBench):
    """This rank's rows of a `HeadBench`'s weight; hidden states and targets are the same on every rank.

    The reference, whose dW is that of these rows, is computed from the whole weight, once.
    """

    def __init__(self, *, device: torch.device, **given: Any) -> None:
        super().__init__(device=str(device), lead=SharedLeadIn(device), **given)
        self.group: dist.ProcessGroup | None = None
        whole = super().reference(Case("full"))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._references["mean"] = whole | {"dW": whole["dW"].tensor_split(ranks)[rank].clone()}
        self.w = self.w.tensor_split(ranks)[rank].clone()  # the first ranks may have one row more
        self.group = dist.group.WORLD if ranks > 1 else None
        del whole
        free_cached()  # the reference's memory, for the heads

    def reference(self, case: Case, valid: Tensor | None = None) -> dict[str, Tensor]:
        return self._references["mean"]

    def function(self, case: Case) -> Callable[..., Any]:
        if self.group is None:
            return super().function(case)
        return partial(linear_cross_entropy, head=case.method, group=self.group, **case.settings)

    def attempt(self, variant: str, action: Callable[[], Any]) -> tuple[Any, str, str]:
        """The largest values of any rank; an error ends this rank, and then the others, which would wait for it."""
        return largest(action()), ran(self.device), ""

    def exchange(self, case: Case) -> Exchange:
        """The collectives of a call, recorded for replay."""
        with overheard() as exchange:
            self.result(case)
        return exchange


def measure_head(
    records: Records, device: torch.device, *, phase: str, heads: list[str], workspace: str, error_bound: float,
    iters: int, warmup: int, **given: Any,
) -> None:  # fmt: skip
    """Errors, memory, and times interleaved with the floor, of heads on the ranks of this group.

    workspace   per rank, of the heads that take one: all but `full`
    given       tokens, vocabulary, hidden, dtype, seed and reference of the `HeadBench`

    A head whose error exceeds `error_bound` is `wrong`, one that cannot run here `unavailable`; `full` is `skipped`
    if its logits would not fit. None of these is timed, nor are ranks that share a GPU.
    """
    for head in heads:
        choose("head", head, HEADS)
    bench = Share(device=device, **given)
    cases = {head: Case(head, {} if head == "full" else {"workspace": parse_bytes(workspace)}) for head in heads}
    cases = {head: case for head, case in cases.items() if _runs(records, phase, bench, head)}
    cases = {head: case for head, case in cases.items() if bench.admit(records, head, phase, case, error_bound)}
    runners: dict[Key, Runner] = {("floor", phase): bench.products}
    for head, case in cases.items():
        _file_memory(records, phase, bench, head, case)
        runners[head, phase] = partial(bench.times, case)
        if bench.group is not None:
            exchange = bench.exchange(case)
            records.add(head, "collectives", exchange.count, phase=phase)
            records.add(head, "exchanged_mib", exchange.nbytes / MIB, "MiB", phase)
            runners[head, phase, "collectives"] = partial(_alone, bench, exchange)
    if ran(device) == "ok":
        bench.take_turns(records, runners, iters, warmup)


def _alone(bench: Share, exchange: Exchange, queued: bool) -> dict[str, float]:
    return {"collectives": time_ms(exchange.run, bench.device, bench.lead if queued else None)}


def _runs(records: Records, phase: str, bench: Share, head: str) -> bool:
    """Whether to try a head; all ranks must decide alike, because if one failed alone the others would wait for it."""
    state, why = "unavailable", ""
    if head == "fused" and not kernels_run(bench.e):
        why = "its kernels need a CUDA device and Triton"
    elif head not in SHARDED and dist.get_world_size() > 1:
        why = "it does not shard its weight"
    elif head == "full":
        free = torch.cuda.mem_get_info(bench.device)[0] if bench.device.type == "cuda" else host_available()
        need = len(bench.e) * len(bench.w) * FULL_BYTES
        if largest({"beyond": need - free})["beyond"] > 0:
            state, why = "skipped", f"its logits may take {need / MIB:,.0f} MiB, {free / MIB:,.0f} are free"
    if why:
        records.status(head, state, phase, why)
    return not why


def _file_memory(records: Records, phase: str, bench: Share, head: str, case: Case) -> None:
    """Record what a rank holds at the head's peak, by kind; on its own GPU also what is outside PyTorch's allocator."""
    parts = {"weight": bench.w.nbytes, "dW": bench.w.nbytes, "hidden": bench.e.nbytes, "dE": bench.e.nbytes}
    parts["workspace"] = bench.memory(case)["workspace"]
    parts["held"] = sum(parts.values())
    if bench.device.type == "cuda" and ran(bench.device) == "ok":
        free, total = torch.cuda.mem_get_info(bench.device)
        parts["outside"] = total - free - torch.cuda.memory_reserved(bench.device)
    for name, value in largest(parts).items():
        records.add(head, f"{name}_mib", value / MIB, "MiB", phase)
