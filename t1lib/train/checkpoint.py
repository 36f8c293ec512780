"""Checkpoints on disk: a folder a step, a file for every layer, complete or not there."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from t1lib.errors import T1Error, require
from t1lib.files import remove, writing
from t1lib.train.trainer import Trainer

META = "checkpoint.json"
KNOWN = {"step": int, "skipped": int, "parts": list}  # what it says


def save_checkpoint(trainer: Trainer, folder: str | Path, keep: int = 1) -> Path:
    """Write the trainer's state to `folder/step-<n>` and return that; of older ones only the last `keep` - 1 stay.

    One layer is copied at a time. The folder gets its name when all is on the disk: whenever this is interrupted, or
    the disk is full, the checkpoint before is still whole; what a killed process left half is removed first. Of several
    processes all must call it, with a folder that all see; they gather layer after layer, and write in turn, as many
    side by side as they are: the format says nothing of how many. Raises `T1Error`, on all of them, if it cannot be
    written.
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
        ranks.first(files.drop)  # gone before any rank goes on
        raise
    except BaseException:
        if ranks.rank == 0:
            files.drop()
        raise
    return files.whole


def _gather(trainer: Trainer, some: Sequence[str]) -> dict[str, Any]:
    """Gather these parts, at most one for each rank. Returns this rank's, if there is one, by its file."""
    own = {}
    for turn, part in enumerate(some):
        state = trainer.state_part(part)
        if turn == trainer.ranks.rank:
            own[f"{part}.pt"] = state
    return own


class _Files:
    """A checkpoint that is being written."""

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
        with writing(self.whole):
            _discard(self.whole)
            os.replace(self._partial, self.whole)
        for old in checkpoints(self.folder)[:-keep]:
            _discard(old)

    def drop(self) -> None:
        remove(self._partial)


def _discard(checkpoint: Path) -> None:
    """Remove it, under another name: what is left if this is interrupted is no checkpoint, and goes with the next."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    with suppress(OSError):
        os.replace(checkpoint, aside)
    remove(aside)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def checkpoints(folder: Path) -> list[Path]:
    """Those in `folder` that are complete, the oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / META).is_file())


def load_checkpoint(trainer: Trainer, folder: str | Path) -> int:
    """Take over the last checkpoint in `folder`, or the one that `folder` is, and return its step.

    Of several processes each reads its own part of every tensor. Raises `T1Error`, on all of them and before anything
    is changed, if there is none or it is of another model.
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
    """A checkpoint as `Trainer.state_dict` gives it; its tensors are mapped, not read."""
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
