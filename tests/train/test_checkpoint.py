"""Checkpoints on disk: complete or absent, whenever a run is killed; refused for another model; resumed in any mode."""

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from full_disk import largest_file
from test_parity import assert_same, batches, model

from t1lib.errors import T1Error
from t1lib.train import OptimizerSpec, checkpoint, make_trainer
from t1lib.train.checkpoint import META, load_checkpoint, save_checkpoint

SPEC = OptimizerSpec("adamw", lr=1e-2)
MODULE = "transformers.models.qwen3.modeling_qwen3"


def _run(folder: Path, steps: int, threads: int) -> None:
    """The body of a process: continue from the last checkpoint, up to `steps` steps."""
    torch.set_num_threads(threads)  # their number decides the order of summation
    trainer = make_trainer(model("qwen3"), "slide", optimizer=SPEC, max_grad_norm=1.0)
    if list(folder.glob("step-*")):
        load_checkpoint(trainer, folder)
    for batch in batches(steps)[trainer.steps :]:
        record = trainer.step(batch)
        with (folder / "losses").open("a") as file:
            file.write(f"{record.step} {record.loss!r}\n")
        save_checkpoint(trainer, folder)
    trainer.close()


def test_any_mode_goes_on_from_any_others(tmp_path):
    data = batches(4)
    whole = make_trainer(model("qwen3"), "gpu", optimizer=SPEC)
    losses = [whole.step(batch).loss for batch in data]
    for first, second in (("gpu", "slide"), ("slide", "gpu"), ("slide", "slide")):
        folder = tmp_path / f"{first}-{second}"
        trainer = make_trainer(model("qwen3"), first, optimizer=SPEC)
        begun = [trainer.step(batch).loss for batch in data[:2]]
        save_checkpoint(trainer, folder)
        other = make_trainer(model("qwen3"), second, optimizer=SPEC)
        assert load_checkpoint(other, folder) == 2
        assert begun + [other.step(batch).loss for batch in data[2:]] == losses
        assert_same(whole.state_dict(), other.state_dict())


def test_killed_at_any_time_and_resumed(tmp_path):
    """A run that is killed at random times, again and again, has the losses of one that is not."""
    kills, folder = int(os.environ.get("T1_KILLS", "6")), tmp_path / "run"
    steps = 10 * kills  # a process makes a few before it is killed
    folder.mkdir()
    trainer = make_trainer(model("qwen3"), "slide", optimizer=SPEC, max_grad_norm=1.0)
    records = [trainer.step(batch) for batch in batches(steps)]
    expected = {record.step: record.loss for record in records}
    chance, killed = random.Random(0), 0
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "t1lib.train", MODULE])  # imported once, not at every start
    deadline = time.monotonic() + 40 * kills
    while len(list(folder.glob(f"step-{steps:08d}"))) == 0 and time.monotonic() < deadline:
        process = processes.Process(target=_run, args=(folder, steps, torch.get_num_threads()))
        process.start()
        begun = len(_losses(folder))
        while process.is_alive() and len(_losses(folder)) == begun:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        if killed < kills and process.is_alive():
            killed += 1
            process.kill()
        process.join()
    assert killed == kills
    found = _losses(folder)
    assert {step for step, _ in found} == set(expected)
    assert all(loss == expected[step] for step, loss in found)


def _losses(folder) -> list[tuple[int, float]]:
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss)) for step, loss in (line.split() for line in lines if line.count(" ") == 1)]


def test_a_disk_that_fills_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    trainer = make_trainer(model("qwen3"), "slide", optimizer=SPEC)
    first, second = batches(2)
    trainer.step(first)
    save_checkpoint(trainer, tmp_path)
    state = trainer.state_dict()
    trainer.step(second)
    plain, written = torch.save, []

    def full(content, file):
        written.append(1)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        plain(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(T1Error, match="step-00000002: No space left on device"):
        save_checkpoint(trainer, tmp_path)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    load_checkpoint(trainer, tmp_path)
    assert_same(state, trainer.state_dict())


@pytest.mark.parametrize("size", [10, 1000, 20_000])
def test_a_file_that_cannot_grow_is_one_error(tmp_path, size):
    """PyTorch's writer raises its own error on top of the system's."""
    trainer = make_trainer(model("qwen3"), "gpu", optimizer=SPEC)
    trainer.step(batches(1)[0])
    with largest_file(size), pytest.raises(T1Error, match=r"^cannot write .*step-00000001: File too large$"):
        save_checkpoint(trainer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_leaves_nothing(tmp_path, monkeypatch):
    trainer, plain, written = make_trainer(model("qwen3"), "gpu", optimizer=SPEC), torch.save, []

    def interrupted(content, file):
        plain(content, file)
        written.append(1)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(trainer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed(tmp_path, monkeypatch):
    """Half a checkpoint of another step; and one whose removal had begun."""
    trainer = make_trainer(model("qwen3"), "gpu", optimizer=SPEC)
    (tmp_path / ".step-00000099.partial").mkdir()
    (tmp_path / ".step-00000099.partial" / "rest.pt").write_bytes(b"half")
    save_checkpoint(trainer, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]
    plain = shutil.rmtree

    def killed(path, **options):
        if (path / META).is_file():
            (path / META).unlink()
            raise KeyboardInterrupt
        plain(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    first, second = batches(2)
    trainer.step(first)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(trainer, tmp_path)
    monkeypatch.undo()
    assert load_checkpoint(trainer, tmp_path) == 1
    trainer.step(second)
    save_checkpoint(trainer, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", [META, "rest.pt"])
@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", "\0\1"])
def test_a_broken_file_is_named(tmp_path, name, content):
    trainer = make_trainer(model("qwen3"), "gpu", optimizer=SPEC)
    path = save_checkpoint(trainer, tmp_path) / name
    path.write_text(content)
    with pytest.raises(T1Error, match=f"checkpoint file {path}"):
        load_checkpoint(trainer, tmp_path)


def test_the_same_step_again_interrupted_keeps_one(tmp_path, monkeypatch):
    trainer = make_trainer(model("qwen3"), "gpu", optimizer=SPEC)
    save_checkpoint(trainer, tmp_path)
    plain = checkpoint.remove

    def interrupted(path):
        if ".old." in path.name and path.exists():
            raise KeyboardInterrupt
        plain(path)

    monkeypatch.setattr(checkpoint, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(trainer, tmp_path)
    monkeypatch.undo()
    assert load_checkpoint(trainer, tmp_path) == 0
    save_checkpoint(trainer, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]


def test_how_many_are_kept(tmp_path):
    trainer = make_trainer(model("qwen3"), "gpu", optimizer=SPEC)
    for batch in batches(4):
        trainer.step(batch)
        save_checkpoint(trainer, tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_going_on_from_an_earlier_step_removes_nothing_of_later_ones(tmp_path):
    trainer, seen = make_trainer(model("qwen3"), "gpu", optimizer=SPEC), batches(4)
    for batch in seen:
        trainer.step(batch)
        save_checkpoint(trainer, tmp_path, keep=4)
    load_checkpoint(trainer, tmp_path / "step-00000001")
    trainer.step(seen[0])
    assert save_checkpoint(trainer, tmp_path).is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 3, 4)]


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    trainer = make_trainer(model("qwen3"), "slide", optimizer=SPEC)
    trainer.step(batches(1)[0])
    save_checkpoint(trainer, tmp_path)
    other = make_trainer(model("llama"), "slide", optimizer=SPEC)
    before = other.state_dict()
    with pytest.raises(T1Error, match="it is of another model"):
        load_checkpoint(other, tmp_path)
    assert_same(before, other.state_dict())
    with pytest.raises(T1Error, match="no checkpoint in"):
        load_checkpoint(other, tmp_path / "empty")
