"""Checkpoints on disk: a folder a step, a file for every layer, complete or not there."""

import json
import os
import shutil
from pathlib import Path

import torch

from t1lib.errors import T1Error, require
from t1lib.train.trainer import Trainer

META = "checkpoint.json"


def save_checkpoint(trainer: Trainer, folder: str | Path, keep: int = 1) -> Path:
    """Write the trainer's state to `folder/step-<n>` and return that; of older ones only the last `keep` - 1 stay.

    One layer is copied at a time. The folder gets its name when all is on the disk: whenever this is interrupted, or
    the disk is full, the checkpoint before is still whole. Raises `T1Error` if it cannot be written.
    """
    folder = Path(folder)
    whole, partial = folder / f"step-{trainer.steps:08d}", folder / f".step-{trainer.steps:08d}.partial"
    require(keep >= 1, f"keep={keep} checkpoints; allowed: 1 or more")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for part in trainer.state_parts():
            _write(partial / f"{part}.pt", lambda file, part=part: torch.save(trainer.state_part(part), file))
        meta = {"step": trainer.steps, "skipped": trainer.skipped, "parts": list(trainer.state_parts())}
        _write(partial / META, lambda file: file.write(json.dumps(meta).encode()))
        shutil.rmtree(whole, ignore_errors=True)
        os.replace(partial, whole)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise T1Error(f"cannot write checkpoint {whole}: {error.strerror or error}") from error
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return whole


def _write(path: Path, write) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _complete(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, the oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / META).is_file())


def load_checkpoint(trainer: Trainer, folder: str | Path) -> int:
    """Take over the last checkpoint in `folder`, or the one that `folder` is, and return its step.

    Raises `T1Error`, before anything is changed, if there is none or it is of another model.
    """
    folder = Path(folder)
    found = [folder] if (folder / META).is_file() else _complete(folder)
    require(bool(found), f"no checkpoint in {folder}: neither {META} nor a folder step-*")
    meta = json.loads((found[-1] / META).read_text())
    parts = {part: _read(found[-1] / f"{part}.pt") for part in meta["parts"]}  # mapped, not read
    saved = {kind: {n: v for p in parts.values() for n, v in p[kind].items()} for kind in ("model", "optimizer")}
    trainer.check_state(saved["model"], saved["optimizer"])
    for part in trainer.state_parts():
        trainer.load_part(part, saved)
    trainer.steps, trainer.skipped = meta["step"], meta["skipped"]
    return trainer.steps


def _read(path: Path) -> dict:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise T1Error(f"cannot read checkpoint file {path}: {str(error).splitlines()[0]}") from error
