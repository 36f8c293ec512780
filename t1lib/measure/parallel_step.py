"""A training step on ranks, each with its own rows of the batch: run by the notebook `parallel`.

Phases: `step/<ranks>`, with a fixed number of rows per rank, for time and memory; `losses/<ranks>`, with the same total
rows on any number of ranks, for the losses. The variant is the mode. Times are the slowest rank's, memory the largest;
`host_all` is the host memory of all ranks, with shared memory counted once.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist

from t1lib.measure.ranks import largest, ran, total
from t1lib.measure.records import Records

PEAKS = ("allocated_gib", "reserved_gib", "host_gib")


def measure_step(
    records: Records, device: torch.device, *, phase: str, mode: str, rows: int, most: int, steps: int, warmup: int,
    loss_steps: int, **session: Any,
) -> None:  # fmt: skip
    """Time, memory and losses of training in `mode` on the ranks of this group; no time if they share a GPU.

    rows        rows of the batch per rank
    most        the largest number of ranks compared: losses are of `most` · `rows` rows in micro-batches of `rows`
    session     further arguments of `TrainSession`
    """
    # Imported here so that the notebook, which only passes this function on, does not need transformers.
    from t1lib.measure.session import TrainSession

    session |= {"mode": mode, "device": str(device)}
    ranks = dist.get_world_size()
    _add_times_and_memory(records, TrainSession(batch=rows * ranks, **session), mode, phase, steps, warmup)
    records.add(mode, "tokens", rows * ranks * session["seq"], "", phase)
    records.status(mode, ran(device), phase)
    gc.collect()  # free all that is left of that session
    together = TrainSession(batch=rows * most, micro_batch=rows, **session)
    for step, loss in enumerate(together.warm_up(loss_steps)):
        records.add(mode, "loss", loss, phase=f"losses/{ranks}", step=step)
    together.trainer.close()


def _add_times_and_memory(records: Records, train: Any, mode: str, phase: str, steps: int, warmup: int) -> None:
    train.warm_up(warmup)
    for step in range(steps):
        largest({"": 0.0})  # all ranks begin together
        found = train.step()
        slowest = largest({metric: value for metric, value in found.items() if metric != "loss"})
        if ran(train.device) == "ok":
            records.put(mode, phase, found | slowest, step)
    peaks = train.memory()
    records.put(mode, phase, largest({k: v for k, v in peaks.items() if k in PEAKS}))
    own, mapped = total({"": peaks["host_gib"] - peaks["mapped_gib"]})[""], largest({"": peaks["mapped_gib"]})[""]
    records.put(mode, phase, {"host_all_gib": own + mapped})
    train.trainer.close()
