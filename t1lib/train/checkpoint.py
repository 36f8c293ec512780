"""Checkpoints on disk, one in a folder: complete or absent, whenever power fails.

    folder/checkpoint.json                              the step, and the SHA-256 of every file
    folder/step-00000300/{layer-0000.pt, …, rest.pt}

`checkpoint.json` names the files of the checkpoint before until the new ones are on the disk.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from t1lib.errors import T1Error, reason, require
from t1lib.files import read_signed, remove, signed, sync, writing
from t1lib.train.loop import Trainer

META, PARTIAL = "checkpoint.json", ".checkpoint.json.partial"
KINDS = ("model", "optimizer")
READERS = 8  # threads that read files to verify them


def save_checkpoint(trainer: Trainer, folder: str | Path) -> Path:
    """Write the trainer's state to `folder`, in place of the checkpoint there; returns the path of the files' folder.

    One layer is copied at a time. If the call is interrupted or the disk is full, the checkpoint before is still whole.
    Raises `T1Error` if the checkpoint cannot be written, and if several processes train the model.
    """
    trainer.require_one_process()
    folder, sums = Path(folder), {}
    path = _begin(folder, trainer.steps)
    try:
        with ThreadPoolExecutor(1) as pool:  # a file is hashed while the next one is written
            for part, names in trainer.state_parts().items():
                file, state = path / f"{part}.pt", trainer.state_of(names)
                with writing(path):
                    _write(file, partial(torch.save, state))
                sums[file.name] = pool.submit(_digest, file)
        files = {name: digest.result() for name, digest in sums.items()}
        _end(path, {"step": trainer.steps, "folder": path.name, "files": files})
    except BaseException:
        _sweep(folder)
        raise
    return path


def has_checkpoint(folder: Path) -> bool:
    return (folder / META).is_file()


def _begin(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        _sweep(folder)  # what killed processes left
        if path.exists():
            path = path.with_name(f"{path.name}-again")
        remove(path)
        path.mkdir()
    return path


def _end(path: Path, facts: dict[str, Any]) -> None:
    folder = path.parent
    with writing(path):
        sync(path)
        _write(folder / PARTIAL, lambda file: file.write(signed(facts)))
        os.replace(folder / PARTIAL, folder / META)
        sync(folder)
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove what is no part of the checkpoint in `folder`; nothing, if it cannot be read."""
    with suppress(T1Error):
        used = read_signed(folder / META)["folder"] if has_checkpoint(folder) else ""
        for path in (*folder.glob(f"step-{'[0-9]' * 8}*"), folder / PARTIAL):
            if path.name != used:
                remove(path)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise T1Error(f"cannot read {path}: {error.strerror or error}") from None


def load_checkpoint(trainer: Trainer, folder: str | Path) -> int:
    """Load the checkpoint in `folder`, and return its step.

    All files are compared with their checksums first. Raises `T1Error`, before anything is changed, if there is no
    checkpoint, if it is damaged or of another model, and if several processes train the model.
    """
    folder = Path(folder)
    require(has_checkpoint(folder), f"no checkpoint in {folder}: no {META}")
    meta = read_signed(folder / META)
    path, sums = folder / meta["folder"], meta["files"]
    with ThreadPoolExecutor(READERS) as pool:
        for name, digest in zip(sums, pool.map(lambda name: _digest(path / name), sums), strict=True):
            require(digest == sums[name], f"{path / name} is damaged: its checksum is not the one written")
    parts = [_read(path / name) for name in sums]
    state = {kind: {n: v for part in parts for n, v in part[kind].items()} for kind in KINDS}
    trainer.load_state_dict(state | {"step": meta["step"]})
    return trainer.steps


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """A part of the state; its tensors are memory-mapped, not read."""
    try:
        part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {kind: dict(part[kind]) for kind in KINDS}
    except Exception as error:  # of many kinds, for a file that is no part of a checkpoint
        raise T1Error(f"cannot read {path}, which should be a part of a state: {reason(error)}") from error
