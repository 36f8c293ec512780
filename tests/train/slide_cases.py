"""Cases of mode `slide` on several processes that hold one copy of the layers, against mode `gpu` in one."""

import math
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import (
    ADAM,
    DOUBLE,
    LARGE,
    SGD,
    SINGLE,
    UNTIED,
    compare,
    evaluation,
    even,
    last_rows_ignored,
    same_everywhere,
    tiny,
)
from fsdp_manners import on_from, refused, saved_and_on, trainer
from processes import Cases
from test_parity import OPTIMIZERS, assert_same
from test_races import races_in
from test_steps import EVERYTHING, ragged

from t1lib.errors import T1Error
from t1lib.train import OptimizerSpec, make_trainer
from t1lib.train.pipeline import Pipeline
from t1lib.train.shared import Landings

LATE = 0.05  # seconds
MASTERS = {"name": "adamw", "lr": 1e-2, "master_weights": True}
HOST_NUMBERS = {"rel": 1e-5, "abs": 1e-8, "norm": 1e-6}  # gradients on the host are clipped in float32


def slides(size: int, folder: Path) -> Cases:
    """All cases with two processes; with three, those that depend on the number of processes."""
    every = {**EVERYTHING, "optimizer": SGD, "head": "full"}
    plain = {"optimizer": SGD, "head": "full"}
    found: Cases = {
        "slide, the same on all ranks": partial(same_everywhere, "slide"),
        "slide, evaluation": partial(evaluation, "slide"),
    }
    for update in ("host", "device", "both"):
        own = {"update": update}
        found[f"slide, everything, updates on {update}"] = partial(agrees, ragged(3), HOST_NUMBERS, own=own, **every)
        found[f"slide, updates at once on {update}"] = partial(agrees, even(), DOUBLE, own=own, **plain)
    if size == 3:
        return found | {"slide goes on from two processes": partial(on_from, folder / "slid", "slide")}
    rest = {"resident": 1, "keep": 1, "inputs": "host", "host_grads": 1}
    alone = {"overlap_in": False, "overlap_out": False, "overlap_update": False, "slots": 1}
    return found | {
        "slide, untied": partial(agrees, ragged(2), HOST_NUMBERS, UNTIED, **every),
        "slide, float32": partial(agrees, even(), SINGLE, {"dtype": torch.float32}, **plain),
        "slide, AdamW": partial(agrees, even(), ADAM, optimizer=OPTIMIZERS["adamw"], head="full"),
        "slide, without state": partial(agrees, even(), DOUBLE, optimizer=LARGE, head="full"),
        "slide, the rest resident": partial(agrees, even(), DOUBLE, own=rest, **plain),
        "slide, nothing overlaps": partial(agrees, even(), DOUBLE, own=alone, **plain),
        "slide, layers alone": partial(agrees, even(), DOUBLE, **plain, train="layers"),
        "slide, a rank without a token that counts": partial(agrees, last_rows_ignored(), DOUBLE, **plain),
        "slide, some of a layer trains": some_of_a_layer,
        "slide, 16 bits": partial(sixteen_bits, {}),
        "slide, 16 bits, split masters, narrow moments": partial(
            sixteen_bits, {"split_master": True, "moments": "bfloat16"}
        ),
        "slide, one copy for all": one_copy,
        "slide, a rank that is late": late,
        "slide, no stale weight": stale_is_noticed,
        "slide, updates are announced once": announced_once,
        "slide, no races": no_races,
        "slide, raise": partial(no_number, "raise"),
        "slide, skip": partial(no_number, "skip"),
        "slide, saved, and on in one process or many": partial(saved_and_on, folder / "slid", "slide"),
        "slide, an error on another thread": error_elsewhere,
        "slide, an update that fails on a rank": update_fails,
        "slide, a lost step with updates on the device": lost_step,
        "slide, memory that is not shared": not_shared,
        "slide, refused: outer": partial(
            refused, partial(trainer, "slide", outer="host"), "^outer='host' in 2 processes; allowed: 'device'"
        ),
        "slide, refused: a budget": partial(
            refused, partial(trainer, "slide", gpu_memory="1GiB", plan_for=(6, 9)), "^gpu_memory is for one process"
        ),
        "slide, refused: other options on a rank": other_options,
        "slide, refused: updates elsewhere on a rank": other_share,
    }


def agrees(data: list[dict], bound: dict[str, float], changes: dict | None = None, **options: Any) -> None:
    compare(lambda: tiny(num_hidden_layers=5, **(changes or {})), data, bound, mode="slide", **options)


def some_of_a_layer() -> None:
    """Only some parameters have gradients, so a rank's part of these is not its part of the weights."""

    def build():
        model = tiny(num_hidden_layers=3)
        for name, param in model.named_parameters():
            param.requires_grad_("q_proj" in name or "down_proj" in name or "embed" in name)
        return model

    compare(build, even(), DOUBLE, {"update": "host"}, "slide", optimizer=SGD, head="full", train="marked")


def sixteen_bits(layout: dict[str, Any]) -> None:
    """With masters, the update is that of one process up to the rounding of 16-bit gradients."""
    spec = OptimizerSpec(**MASTERS, **layout)
    for update in ("host", "device"):
        options = {"optimizer": spec, "head": "full"}
        one = make_trainer(tiny(torch.bfloat16), "gpu", **options)
        many = make_trainer(tiny(torch.bfloat16), "slide", update=update, **options)
        before = one.state_dict()["optimizer"]
        losses = [[t.step(batch).loss for batch in even(3)] for t in (one, many)]
        assert losses[1] == pytest.approx(losses[0], rel=0.02)
        found, wanted = (t.state_dict()["optimizer"] for t in (many, one))
        for name, state in wanted.items():
            moved = (state["master"] - before[name]["master"]).norm()
            assert (found[name]["master"] - state["master"]).norm() < 0.15 * moved, name
        many.close()


def one_copy() -> None:
    """What one rank writes, weights and state, the others see; the parts that the ranks update make up the whole."""
    many = trainer("slide")
    rank, pipeline = dist.get_rank(), many.pipeline
    flats = [pipeline.host_flat[1], *pipeline.flat_state(1).values()]
    for number, flat in enumerate(flats):
        if rank == 0:
            flat[-1] = 17.0 + number
    many.drain()
    assert [float(flat[-1]) for flat in flats] == [17.0, 18.0, 19.0]
    own = {n: len(t) for n, t in pipeline.own_updaters[1].tensors.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    whole = {n: t.numel() for n, t in pipeline.updaters[1].tensors.items()}
    assert {n: sum(part.get(n, 0) for part in every) for n in whole} == whole
    assert max(sum(part.values()) for part in every) < 0.7 * sum(whole.values())
    many.close()


def late() -> None:
    """One rank's updates come late; the other waits for them, layer by layer."""
    plain = Pipeline.update_own

    def slow(self: Pipeline, *arguments: Any) -> None:
        time.sleep(LATE * dist.get_rank())
        plain(self, *arguments)

    with patch.object(Pipeline, "update_own", slow):
        agrees(even(2), DOUBLE, own={"update": "host"}, optimizer=SGD, head="full")
        agrees(even(2), HOST_NUMBERS, own={"update": "host"}, optimizer=SGD, head="full", max_grad_norm=0.1)


def stale_is_noticed() -> None:
    """`late` fails if no rank waits."""
    with patch.object(Landings, "due", lambda self, layer: None):
        failed = False
        try:
            late()
        except AssertionError:
            failed = True
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, failed)
    assert any(every), every


def announced_once() -> None:
    for options in ({}, {"max_grad_norm": 0.1}):
        many = make_trainer(tiny(num_hidden_layers=4), "slide", update="both", optimizer=SGD, head="full", **options)
        for batch in even(2):
            many.step(batch)
        many.drain()
        many.pipeline.close()  # makes the announcements that are still pending
        many.ranks.meet()
        landings = many.pipeline.landings
        assert landings._due == [2] * 4
        assert landings._counts.tolist() == [[2] * 4] * many.ranks.size


def no_races() -> None:
    """Among the lanes and threads of this process; the cases above cover what other processes may touch."""
    clipped = {"update": "device", "max_grad_norm": 0.1}
    for options in ({"update": "host"}, {"update": "both", "grad_slots": 1}, clipped):
        races = races_in(options)
        assert races.accesses > 200 and not races.found, races.found


def no_number(nonfinite: str) -> None:
    """One rank's gradients are not finite: every rank reports it, and with "skip" nothing is updated."""
    many = make_trainer(tiny(), "slide", optimizer=SGD, head="full", nonfinite=nonfinite)
    many.step(even(1)[0])
    before = many.state_dict()
    kept = many.parts.norm.weight.detach().clone()
    if dist.get_rank() == 0:
        many.parts.norm.weight.data[0] = math.inf
    if nonfinite == "raise":
        with pytest.raises(T1Error, match="step 2: a gradient is not finite"):
            many.step(even(1)[0])
    else:
        assert many.step(even(1)[0]).skipped
    many.parts.norm.weight.data.copy_(kept)
    if nonfinite == "skip":
        assert_same(before | {"skipped": 1}, many.state_dict() | {"step": before["step"]})
        assert not many.step(even(1)[0]).skipped
    many.close()


def error_elsewhere() -> None:
    """A copy that fails on its thread makes the step raise: its error, or that another rank failed first."""
    many = trainer("slide")
    many.step(even(1)[0])
    given_up = threading.Event()
    many.pipeline.landings.then(0, lambda: 1 / 0, given_up)
    assert given_up.wait(10)
    with pytest.raises((ZeroDivisionError, T1Error)):
        many.step(even(1)[0])


def lost_step() -> None:
    """Updates that would be queued before the gradients are known to be finite change nothing."""
    many = trainer("slide", update="device", nonfinite="skip")
    first, second = even(2)
    many.step(first)
    before, weight = many.state_dict(), many.parts.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] = float("inf")
    assert many.step(second).skipped
    with torch.no_grad():
        weight.copy_(kept)
    after = many.state_dict()
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    assert not many.step(second).skipped
    many.close()


def update_fails() -> None:
    """No rank waits for an update that will never be announced."""
    last, plain = dist.get_rank() == dist.get_world_size() - 1, Pipeline.update_own

    def failing(self: Pipeline, index: int, *arguments: Any) -> None:
        if last and index == 0:
            raise ZeroDivisionError
        plain(self, index, *arguments)

    with patch.object(Pipeline, "update_own", failing):
        many = trainer("slide", update="host")
        many.step(even(1)[0])
        with pytest.raises(ZeroDivisionError) if last else pytest.raises(T1Error, match=r"^rank 1 failed to copy or"):
            many.step(even(1)[0])


def not_shared() -> None:
    """As for a process in another container, which cannot find the memory of the first one."""
    with patch.object(torch, "from_file", _not_there):
        refused(partial(trainer, "slide"), "the processes cannot share memory .*take mode fsdp across hosts")


def _not_there(*_: Any, **__: Any) -> None:
    raise RuntimeError("unable to open file </proc/1/fd/3> in read-write mode: No such file or directory (2)")


def other_options() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    refused(partial(trainer, "slide", resident=int(last)), "ranks disagree about resident: 0 on rank 0, 1 on rank 1")


def other_share() -> None:
    """Which layers are updated on the device decides which state lies in shared memory."""
    share = 0.3 if dist.get_rank() == dist.get_world_size() - 1 else 0.7
    many = partial(trainer, "slide", update="both", host_share=share)
    refused(many, r"ranks disagree about layers that are updated on the device: \[0\] on rank 0, \[0, 1\] on rank 1")
