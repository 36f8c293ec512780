"""Checkpoints on disk: complete or absent, whenever a run is killed; refused when damaged or of another model."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch
from copies import names
from loop_cases import OPTIMIZERS, assert_same, even, model
from refusals import refused

from t1lib.files import read_signed, write_signed
from t1lib.train import checkpoint, make_trainer
from t1lib.train.checkpoint import META, load_checkpoint, save_checkpoint

SLOW = pytest.mark.slow


def a_trainer(layers=2):
    small = model(num_hidden_layers=layers, hidden_size=16, intermediate_size=32)
    return make_trainer(small, "gpu", optimizer=OPTIMIZERS["adamw"], max_grad_norm=1.0, head="full")


@pytest.fixture(scope="module")
def trained():
    """A trainer after one step. Tests may train it further and load into it."""
    trainer = a_trainer()
    trainer.step(even(1)[0])
    return trainer


class Killed(BaseException):
    """What ends a process within a test: from then on, nothing that would change the disk works."""


@contextmanager
def killed_at(call: int) -> Iterator[Callable[[], bool]]:
    """Kill at this call, counted from 0, of those that change the disk or bring it up to date; says whether it was."""
    made = []

    def counted(plain, *arguments, **options):
        made.append(1)
        if len(made) > call:
            raise Killed
        return plain(*arguments, **options)

    changing = ("replace", "unlink", "rmdir", "mkdir", "fsync")
    with patch.multiple(os, **{name: partial(counted, getattr(os, name)) for name in changing}):
        yield lambda: len(made) > call


@pytest.mark.parametrize(
    "before, last", [([1], 1), pytest.param([1], 2, marks=SLOW), pytest.param([2, 1], 1, marks=SLOW)]
)
def test_killed_at_any_point_there_is_a_complete_checkpoint(tmp_path, trained, before, last):
    """After steps `before`, step `last` is saved with other content: what loads is that, or what was there before."""
    point, killed, weight = 0, lambda: True, trained.parts.norm.weight.data
    while killed():
        folder = tmp_path / str(point)
        for trained.steps in before:
            weight.fill_(point)
            save_checkpoint(trained, folder)
        weight.fill_(point + 1)
        trained.steps = last
        with killed_at(point) as killed, suppress(Killed):
            save_checkpoint(trained, folder)
        assert load_checkpoint(trained, folder) in ((1, last) if killed() else (last,))
        assert float(weight[0]) in ((point, point + 1) if killed() else (point + 1,))
        path = save_checkpoint(trained, folder)
        assert names(folder) == [META, path.name]
        point += 1
    assert point > 10


def test_killed_in_its_checksums_it_leaves_no_step_without_its_name(tmp_path, trained):
    with patch.object(checkpoint, "_checksums", side_effect=Killed), pytest.raises(Killed):
        save_checkpoint(trained, tmp_path)
    assert names(tmp_path) == []


def test_a_checkpoint_that_cannot_be_read_is_replaced_but_not_removed(tmp_path, trained):
    path = save_checkpoint(trained, tmp_path)
    before = (tmp_path / META).read_text()
    (tmp_path / META).write_text("{")
    with patch.object(torch, "save", side_effect=Killed), pytest.raises(Killed):
        save_checkpoint(trained, tmp_path)
    (tmp_path / META).write_text(before)
    assert load_checkpoint(trained, tmp_path) == trained.steps
    (tmp_path / META).write_text("{")
    other = save_checkpoint(trained, tmp_path)
    assert path != other and names(tmp_path) == [META, other.name]


def test_the_last_is_the_one_that_was_saved_last(tmp_path, trained):
    """Not that of the highest step: a run may go on from an earlier one. What killed processes left is removed."""
    kept = ["best-step-00000001", "step-00000004-best", "step-00000005.bak", "step-by-step.txt"]
    for folder in ("step-00000099", ".step-00000099.partial", ".step-00000099-again.old"):
        (tmp_path / folder).mkdir()
    for name in ("step-00000099/rest.pt", ".checkpoint.partial.json", *kept):
        (tmp_path / name).write_text("half")
    with patch.object(torch, "save", side_effect=Killed), pytest.raises(Killed):
        save_checkpoint(trained, tmp_path)
    assert "step-00000099" not in names(tmp_path)  # before another is written, as the disk may be full
    for trained.steps in (1, 4, 2, 2, 2):
        path = save_checkpoint(trained, tmp_path)
        assert load_checkpoint(trained, tmp_path) == trained.steps
        assert names(tmp_path) == sorted([META, path.name, *kept])


def test_a_broken_file_is_named_and_changes_nothing(tmp_path, trained):
    """A flipped bit anywhere is found."""
    path, before, chance = save_checkpoint(trained, tmp_path), trained.state_dict(), random.Random(0)
    for file in (tmp_path / META, *(path / name for name in ("rest.pt", "layer-0000.pt", "layer-0001.pt"))):
        content = file.read_bytes()
        broken = [b"", b"{", b"[1]", b"[" * 100_000]
        for _ in range(8):
            place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
            broken.append(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        for other in broken:
            file.write_bytes(other)
            refused(partial(load_checkpoint, trained, tmp_path), str(file))
        file.unlink()
        missing = f"no checkpoint in {tmp_path}" if file.name == META else str(file)
        refused(partial(load_checkpoint, trained, tmp_path), missing)
        file.write_bytes(content)
    assert load_checkpoint(trained, tmp_path) == trained.steps
    assert_same(before, trained.state_dict())


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    """Damage by a program, which signs what it writes. Integer weights, such as a quantised model's, are not cut off of
    other numbers."""
    trainer = a_trainer()
    scales = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    trainer.model.model.register_parameter("scales", scales)
    path = save_checkpoint(trainer, tmp_path)
    part, facts = torch.load(path / "rest.pt", weights_only=True), read_signed(tmp_path / META)
    halves = part["model"] | {"model.scales": torch.tensor([0.5, 1.5, 2.5])}
    scales.zero_()
    assert load_checkpoint(trainer, tmp_path) == 0 and scales.tolist() == [0, 1, 2]
    before = trainer.state_dict()
    for other in ([part["model"], part["optimizer"]], part | {"model": halves}):
        torch.save(other, path / "rest.pt")
        facts["files"]["rest.pt"] = hashlib.sha256((path / "rest.pt").read_bytes()).hexdigest()
        write_signed(tmp_path / META, facts)
        refused(partial(load_checkpoint, trainer, tmp_path))
    save_checkpoint(a_trainer(layers=3), tmp_path)
    refused(partial(load_checkpoint, trainer, tmp_path), "of another model")
    assert_same(before, trainer.state_dict())


def test_the_names_of_a_checkpoint_reach_the_disk(tmp_path, trained, monkeypatch):
    """The new folder is synced before `checkpoint.json` names it, and the folder around it before the old one goes."""
    old = save_checkpoint(trained, tmp_path).name
    events, replace = [], os.replace
    plain = {"sync": checkpoint.sync, "remove": checkpoint.remove}
    monkeypatch.setattr(checkpoint, "sync", lambda path: (events.append(("sync", path.name)), plain["sync"](path)))
    monkeypatch.setattr(checkpoint, "remove", lambda path: (events.append(("gone", path.name)), plain["remove"](path)))
    monkeypatch.setattr(os, "replace", lambda path, name: (events.append(("named", name.name)), replace(path, name)))
    trained.steps += 1
    new = save_checkpoint(trained, tmp_path).name
    order = [event for event in events if event[0] != "gone" or event[1] == old]
    around = ("sync", tmp_path.name)
    assert order[-6:] == [("sync", f".{new}.partial"), ("named", new), around, ("named", META), around, ("gone", old)]
