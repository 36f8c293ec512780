"""Checkpoints on disk: one folder per step, one file per layer; a checkpoint is either complete or absent."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from t1lib.errors import T1Error, require
from t1lib.files import remove, writing
from t1lib.train.trainer import Trainer

META = "checkpoint.json"
KNOWN = {"step": int, "skipped": int, "parts": list}  # fields of that file and their types


def save_checkpoint(trainer: Trainer, folder: str | Path, keep: int = 1) -> Path:
    """Write the trainer's state to `folder/step-<n>` and return that path.

    Of the checkpoints of earlier steps the last `keep` - 1 stay.

    One layer is copied at a time. The folder gets its final name once everything is on disk: if the call is interrupted
    or the disk is full, the previous checkpoint is still whole. Partial files of a killed process are removed first.
    With several processes, all must call it with a folder that all of them see; they gather one layer for each rank,
    then all ranks write theirs in parallel, and so on. The format does not depend on the number of processes. Raises
    `T1Error`, on all of them, if the checkpoint cannot be written.
    """
    require(keep >= 1, f"keep={keep} checkpoints; allowed: 1 or more")
    files, ranks = _Files(Path(folder), trainer.steps), trainer.ranks
    parts = list(trainer.state_parts())
    try:
        ranks.first(files.begin)
        for at in range(0, len(parts), ranks.size):
            ranks.share(partial(files.save, _gather(trainer, parts[at : at + ranks.size])))
        meta = json.dumps({"step": trainer.steps, "skipped": trainer.skipped, "parts": parts})
        ranks.first(lambda: files.end(meta, keep))
    except T1Error:
        ranks.first(files.drop)  # removed before any rank continues
        raise
    except BaseException:
        if ranks.rank == 0:
            files.drop()
        raise
    return files.whole


def _gather(trainer: Trainer, some: Sequence[str]) -> dict[str, Any]:
    """Gather these parts, at most one for each rank. Returns this rank's part, if it has one, by file name."""
    own = {}
    for turn, part in enumerate(some):
        state = trainer.state_part(part)
        if turn == trainer.ranks.rank:
            own[f"{part}.pt"] = state
    return own


class _Files:
    """The files of a checkpoint that is being written."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.whole = folder, folder / f"step-{step:08d}"
        self._partial = folder / f".step-{step:08d}.partial"

    def begin(self) -> None:
        for left in self.folder.glob(".step-*.partial"):
            remove(left)
        with writing(self.whole):
            self._partial.mkdir(parents=True)

    def save(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            self.add(name, partial(torch.save, state))

    def add(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        with writing(self.whole):
            _write(self._partial / name, write)

    def end(self, meta: str, keep: int) -> None:
        self.add(META, lambda file: file.write(meta.encode()))
        with writing(self.whole), _aside(self.whole):
            os.replace(self._partial, self.whole)
        older = [path for path in checkpoints(self.folder) if path.name < self.whole.name]
        for old in older[: max(len(older) - keep + 1, 0)]:
            _discard(old)

    def drop(self) -> None:
        remove(self._partial)


@contextmanager
def _aside(checkpoint: Path) -> Iterator[None]:
    """Rename the checkpoint, if there is one, and remove it in the end, or put it back where nothing took its place.

    What is left if the removal is interrupted is no checkpoint, and goes with the next one.
    """
    aside = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    with suppress(OSError):
        os.replace(checkpoint, aside)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.replace(aside, checkpoint)
        raise
    remove(aside)


def _discard(checkpoint: Path) -> None:
    with _aside(checkpoint):
        pass


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, in the order of their steps."""
    return sorted(p for p in folder.glob("step-*") if (p / META).is_file())


def load_checkpoint(trainer: Trainer, folder: str | Path) -> int:
    """Load the last checkpoint in `folder`, or `folder` itself if it is a checkpoint, and return its step.

    With several processes, each reads its own part of every tensor. Raises `T1Error`, on all of them and before
    anything is changed, if there is no checkpoint or it is of another model.
    """
    saved: dict[str, Any] = {}

    def open_and_check() -> str:
        path = _last(Path(folder))
        saved.update(_opened(path))
        trainer.check_state(saved["model"], saved["optimizer"])
        return path.name

    found = trainer.ranks.share(open_and_check)
    require(len(set(found)) == 1, f"ranks find different checkpoints in {folder}: {', '.join(found)}")
    for part in trainer.state_parts():
        trainer.load_part(part, saved)
    trainer.steps, trainer.skipped = saved["step"], saved["skipped"]
    return trainer.steps


def _last(folder: Path) -> Path:
    found = [folder] if (folder / META).is_file() else checkpoints(folder)
    require(bool(found), f"no checkpoint in {folder}: neither {META} nor a folder step-*")
    return found[-1]


def _opened(path: Path) -> dict[str, Any]:
    """A checkpoint in the format of `Trainer.state_dict`; its tensors are memory-mapped, not read."""
    meta = _read_meta(path / META)
    parts = [_read(path / f"{part}.pt") for part in meta["parts"]]
    kinds = {kind: {n: v for part in parts for n, v in part[kind].items()} for kind in ("model", "optimizer")}
    return {"step": meta["step"], "skipped": meta["skipped"], **kinds}


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise T1Error(f"cannot read checkpoint file {path}: {error}") from None
    known = isinstance(meta, dict) and all(isinstance(meta.get(name), kind) for name, kind in KNOWN.items())
    require(known, f"checkpoint file {path} is broken; allowed: an object with {', '.join(KNOWN)}")
    return meta


def _read(path: Path) -> dict:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise T1Error(f"cannot read checkpoint file {path}: {str(error).splitlines()[0]}") from error
