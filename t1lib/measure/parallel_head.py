"""An output layer sharded over ranks and measured on all of them at once: run by the notebook `parallel` with torchrun.

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
from t1lib.measure.chunk_bench import Call, OutputLayer, Result, compare
from t1lib.measure.collectives import Exchange, SharedLeadIn, largest, overheard, ran
from t1lib.measure.records import Records
from t1lib.measure.timing import rounds, time_ms
from t1lib.memory import host_available

MIB = 2**20
HEADS = ("full", *SHARDED)  # `full` on one rank alone
FULL_BYTES = 16  # per logit: an upper bound on what head full holds at its peak


class ShardCall(Call):
    """A `Call` where each rank holds only its own rows of the weight."""

    def __call__(self, e: Tensor, w: Tensor, y: Tensor, **given: Any) -> Tensor:
        own = {"head": self.head, "reduction": self.reduction, **self.options}
        return linear_cross_entropy(e, w, y, group=dist.group.WORLD, **own, **given)


class Share(OutputLayer):
    """This rank's rows of an `OutputLayer`'s weight; hidden states and targets are the same on every rank.

    exact_share   loss, dE, and dW of this rank's rows, computed from the whole weight in the reference's dtype
    """

    def __init__(self, *, device: torch.device, **shape: Any) -> None:
        super().__init__(device=str(device), lead=SharedLeadIn(device), **shape)
        mine = slice(*self._bounds(len(self.w)))
        exact = self.exact("mean")
        self.exact_share: Result | None = exact._replace(dW=exact.dW[mine].clone())
        self.w = self.w.detach()[mine].clone().requires_grad_()
        del exact
        if device.type == "cuda":
            torch.cuda.empty_cache()  # frees the reference's memory for the heads

    @staticmethod
    def _bounds(rows: int) -> tuple[int, int]:
        """Start and end (exclusive) of this rank's rows, split evenly: the first ranks may have one more."""
        rank, (least, more) = dist.get_rank(), divmod(rows, dist.get_world_size())
        first = rank * least + min(rank, more)
        return first, first + least + (rank < more)

    def exchange(self, call: Call) -> Exchange:
        """The collectives of a call, recorded for replay."""
        with overheard() as exchange:
            self.result(call)
        return exchange


def measure_head(
    records: Records, device: torch.device, *, phase: str, heads: list[str], workspace: str, error_bound: float,
    iters: int, warmup: int, **shape: Any,
) -> None:  # fmt: skip
    """Errors, memory, and times interleaved with the floor, of heads on the ranks of this group.

    workspace   per rank, of the heads that take one: all but `full`
    shape       tokens, vocabulary, hidden, dtype, seed and reference of the `OutputLayer`

    A head whose error exceeds `error_bound` is `wrong`, one that cannot run here `unavailable`; `full` is `skipped`
    if its logits would not fit. None of these is timed, nor are ranks that share a GPU.
    """
    for head in heads:
        choose("head", head, HEADS)
    layer = Share(device=device, **shape)
    kind = Call if dist.get_world_size() == 1 else ShardCall
    calls = {h: kind(h, options={} if h == "full" else {"workspace": parse_bytes(workspace)}) for h in heads}
    calls = {h: call for h, call in calls.items() if _runs(records, phase, layer, h)}
    sound = {h: call for h, call in calls.items() if _admit(records, phase, layer, call, error_bound)}
    layer.exact_share = None
    for head, call in sound.items():
        _file_memory(records, phase, layer, head, call)
    runners: dict[tuple[str, str], Callable[[], dict[str, float]]] = {("floor", ""): layer.product_times}
    for head, call in sound.items():
        runners[head, ""] = partial(layer.times, call)
        if dist.get_world_size() > 1:
            exchange = layer.exchange(call)
            records.add(head, "collectives", exchange.count, phase=phase)
            records.add(head, "exchanged_mib", exchange.nbytes / MIB, "MiB", phase)
            runners[head, "collectives"] = partial(_alone, layer, exchange)
    if ran(device) == "shared":
        return
    for step, turns in enumerate(rounds(list(runners), warmup + iters), -warmup):
        for variant, what in turns:
            times = largest(runners[variant, what]())
            if step >= 0:
                for name, ms in times.items():
                    records.add(variant, f"{name}_ms", ms, "ms", phase, step)


def _alone(layer: Share, exchange: Exchange) -> dict[str, float]:
    return {"collectives": time_ms(exchange.run, layer.device, layer.lead)}


def _runs(records: Records, phase: str, layer: Share, head: str) -> bool:
    """Whether to try a head; all ranks must decide alike, because if one failed alone the others would wait for it."""
    why = "its kernels need a CUDA device and Triton" if head == "fused" and not kernels_run(layer.e) else ""
    if head not in SHARDED and dist.get_world_size() > 1:
        why = "it does not shard its weight"
    if why:
        records.status(head, "unavailable", phase)
        print(f"{phase}: {head} is unavailable: {why}")
        return False
    free = torch.cuda.mem_get_info(layer.device)[0] if layer.device.type == "cuda" else host_available()
    need = len(layer.e) * len(layer.w) * FULL_BYTES
    if head == "full" and largest({"beyond": need - free})["beyond"] > 0:
        records.status(head, "skipped", phase)
        print(f"{phase}: full is skipped: its logits may take {need / MIB:,.0f} MiB, {free / MIB:,.0f} are free")
        return False
    return True


def _admit(records: Records, phase: str, layer: Share, call: Call, bound: float) -> bool:
    """Record the errors of loss, dE and dW; returns whether all are within the bound on every rank."""
    errors = largest(compare(layer.result(call), layer.exact_share))
    for name, value in errors.items():
        records.add(call.head, f"error_{name}", value, "", phase)
    sound = all(value <= bound for value in errors.values())  # false for NaN
    records.status(call.head, ran(layer.device) if sound else "wrong", phase)
    return sound


def _file_memory(records: Records, phase: str, layer: Share, head: str, call: Call) -> None:
    """Record what a rank holds at the head's peak, by kind; on its own GPU also what is outside PyTorch's allocator."""
    parts = {"weight": layer.w.nbytes, "dW": layer.w.nbytes, "hidden": layer.e.nbytes, "dE": layer.e.nbytes}
    parts["workspace"] = layer.memory(call)["workspace"]
    parts["held"] = sum(parts.values())
    if layer.device.type == "cuda" and ran(layer.device) == "ok":
        free, total = torch.cuda.mem_get_info(layer.device)
        parts["outside"] = total - free - torch.cuda.memory_reserved(layer.device)
    for name, value in largest(parts).items():
        records.add(head, f"{name}_mib", value / MIB, "MiB", phase)
