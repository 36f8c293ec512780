"""Cases of mode `fsdp` beyond its values: checkpoints across numbers of processes, and what every rank refuses."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import TWO, even, same_state, tiny
from loop_cases import OPTIMIZERS, assert_same, of_layers
from processes import Cases

from t1lib.errors import T1Error
from t1lib.train import OptimizerSpec, Trainer, checkpoint, make_trainer
from t1lib.train.checkpoint import META, PARTIAL, load_checkpoint, save_checkpoint

LONGEST = 10  # seconds that a refusal may take
SAVED = 2  # steps before a checkpoint
TOTAL = 4
ADAMW = {"optimizer": OPTIMIZERS["adamw"], "head": "full"}


def checkpoints(size: int, folder: Path) -> Cases:
    found: Cases = {"saved, and on in one process or many": partial(saved_and_on, folder / f"from{size}")}
    if size == 3:
        return found | {"on from two processes": partial(on_from, folder / "from2")}
    return found | {
        "masters in both layouts": masters,
        "a full disk": partial(full_disk, folder / "full"),
        "a checkpoint that does not fit": partial(does_not_fit, folder / "unfit"),
    }


def trainer(mode: str = "fsdp", **options: Any) -> Trainer:
    return make_trainer(tiny(), mode, **{**ADAMW, **options})


def saved_and_on(folder: Path) -> None:
    """Resumed with as many processes, the run is bitwise the same; in one process, it is the same within rounding.

    Both start from bitwise the same state. The losses of the unbroken run are stored beside the checkpoint, for a
    resume with another number of processes.
    """
    data, whole, one = even(TOTAL), trainer(), trainer("gpu")
    losses = [whole.step(batch).loss for batch in data[:SAVED]]
    save_checkpoint(whole, folder)
    state = whole.state_dict()
    losses += [whole.step(batch).loss for batch in data[SAVED:]]
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")

    again = make_trainer(tiny(seed=4), "fsdp", **ADAMW)
    again.step(data[3])  # state that the checkpoint must overwrite
    assert load_checkpoint(again, folder) == load_checkpoint(one, folder) == SAVED
    assert_same(state, again.state_dict())
    assert_same(state, one.state_dict())
    assert [again.step(batch).loss for batch in data[SAVED:]] == losses[SAVED:]
    assert_same(whole.state_dict(), again.state_dict())
    assert [one.step(batch).loss for batch in data[SAVED:]] == pytest.approx(losses[SAVED:], rel=1e-6)
    same_state(again, one, {"rel": 1e-6, "abs": 1e-8})
    again.load_state_dict(one.state_dict())
    assert_same(one.state_dict(), again.state_dict())
    for many in (whole, again):
        many.close()


def on_from(folder: Path) -> None:
    one, other = trainer("gpu"), trainer()
    losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    assert load_checkpoint(one, folder) == load_checkpoint(other, folder) == SAVED
    assert_same(one.state_dict(), other.state_dict())
    assert [other.step(batch).loss for batch in even(TOTAL)[SAVED:]] == pytest.approx(losses[SAVED:], rel=1e-6)
    other.close()


def masters() -> None:
    """16-bit weights, with whole masters or with only the bits of them that the weights lack."""
    spec = {"name": "adamw", "lr": 1e-2, "master_weights": True}
    whole = OptimizerSpec(**spec)
    first = make_trainer(tiny(torch.bfloat16), "fsdp", optimizer=whole, head="full")
    first.step(even(1)[0])
    for mode, split in (("gpu", True), ("fsdp", True), ("slide", False)):
        options = {"optimizer": OptimizerSpec(**spec, split_master=split), "head": "full"}
        other = make_trainer(tiny(torch.bfloat16, seed=3), mode, **options)
        other.load_state_dict(first.state_dict())
        assert_same(first.state_dict(), other.state_dict())
        other.close()
    first.close()


def refused(call: Any, message: str) -> None:
    """Assert that the call raises on every rank, without delay."""
    start = time.monotonic()
    with pytest.raises(T1Error, match=message):
        call()
    assert time.monotonic() - start < LONGEST


def full_disk(folder: Path) -> None:
    """Each rank writes its share, and all ranks report the one whose disk is full."""
    many, plain, written = trainer(), checkpoint._write, []
    parts, size, rank = list(many.state_parts()), dist.get_world_size(), dist.get_rank()

    def notes(path: Path, write: Any) -> str:
        written.append(path.name)
        return plain(path, write)

    with patch.object(checkpoint, "_write", notes):
        save_checkpoint(many, folder)
    assert written == [f"{part}.pt" for part in parts[rank::size]] + [PARTIAL] * (rank == 0)

    def full(path: Path, write: Any) -> str:
        if path.name == f"{parts[1]}.pt":
            raise OSError(28, "No space left on device")
        return plain(path, write)

    many.step(even(1)[0])
    with patch.object(checkpoint, "_write", full):
        refused(lambda: save_checkpoint(many, folder), "^rank 1: cannot write .*step-00000001: No space left on device")
    dist.barrier()  # rank 0 removes what was written
    assert sorted(p.name for p in folder.iterdir()) == [META, "step-00000000"]
    assert load_checkpoint(many, folder) == 0
    many.close()


def does_not_fit(folder: Path) -> None:
    """A checkpoint that one rank does not find, and one of another model."""
    many, other = trainer(), make_trainer(tiny(num_hidden_layers=1), "fsdp", **ADAMW)
    save_checkpoint(many, folder / "own")
    save_checkpoint(other, folder / "other")
    before = many.state_dict()
    place = folder / ("nowhere" if dist.get_rank() == dist.get_world_size() - 1 else "own")
    refused(lambda: load_checkpoint(many, place), "^rank 1: no checkpoint in")
    refused(lambda: load_checkpoint(many, folder / "other"), "^the checkpoint is of another model")
    assert_same(before, many.state_dict())
    many.close()


# -- bad input ---------------------------------------------------------------------------------------------------------


def refusals(size: int) -> Cases:
    found: Cases = {"refused: batches": bad_batches}
    if size == 3:
        return found
    return found | {
        "refused: other options on a rank": other_options,
        "refused: other numbers in the midst of a weight on a rank": other_numbers,
        "refused: a backend for CUDA alone": no_backend,
        "refused: a mean square": mean_square,
    }


def bad_batches() -> None:
    """Batches of the other ranks and of the last one, with the error they cause; none changes anything."""
    ids, size = even(1)[0]["input_ids"], dist.get_world_size()
    every = "pass the whole batch on"
    batches = [
        (ids, (ids + 1) % 97, every),
        (ids, ids[:5], every),
        (ids, ids.T.contiguous(), every),
        (ids, ids + 90, rf"^rank {size - 1}: input_ids hold \d+; allowed: 0 to 96"),
        (ids + 90, ids + 90, r"^input_ids hold \d+; allowed: 0 to 96"),
    ]
    many = trainer()
    before = many.state_dict()
    for others, last, message in batches:
        batch = last if dist.get_rank() == size - 1 else others
        refused(partial(many.step, {"input_ids": batch}), message)
    assert_same(before, many.state_dict())
    many.step(even(1)[0])
    many.close()


def other_options() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    many = partial(make_trainer, tiny(), "fsdp", **ADAMW, micro_batch=2 if last else None)
    refused(many, "ranks disagree about micro_batch: None.*every rank of the group must pass the same")


def other_numbers() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[50, 3] += dist.get_rank()
    refused(partial(make_trainer, model, "fsdp", **ADAMW), "ranks disagree about the model's weights")


def no_backend() -> None:
    with patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        refused(trainer, "tensors are on cpu, but the group's backend is nccl for cuda; use gloo for cpu")


def mean_square() -> None:
    options = {**ADAMW, "loss": "mean_square"}
    refused(
        lambda: make_trainer(of_layers(**TWO), "fsdp", **options), "'mean_square' in 2 processes; allowed: one process"
    )
