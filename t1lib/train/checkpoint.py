"""Checkpoints on disk, one per folder: complete or absent, even if the power fails.

    folder/checkpoint.json                              the step, and the SHA-256 of every file
    folder/step-00000300/{layer-0000.pt, …, rest.pt}

`checkpoint.json` names the files of the previous checkpoint until the new ones are on the disk.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from t1lib.errors import T1Error, reason, require
from t1lib.files import read_signed, remove, signed, sync, whole, writing
from t1lib.train.loop import Trainer

META = "checkpoint.json"
CONTENTS = ("model", "optimizer")  # of each file: weights and their optimizer state, by name
_STEP = re.compile(r"step-\d{8,10}(-again)?|\.step-\d{8,10}(-again)?\.(partial|old)")
READERS = 8  # threads that read files for their checksums


def save_checkpoint(trainer: Trainer, folder: str | Path) -> Path:
    """Write the trainer's state to `folder`, in place of the checkpoint there; returns the path of the files' folder.

    One layer is copied at a time. If the call is interrupted or the disk is full, the previous checkpoint stays whole.
    Raises `T1Error` if the checkpoint cannot be written, and if several processes train the model.
    """
    trainer.require_one_process()
    folder, files = Path(folder), []
    path = folder / f"step-{trainer.steps:08d}"
    taken = path.name  # so a checkpoint.json that cannot be read is taken to name this very folder
    with suppress(T1Error):
        taken = read_signed(folder / META)["folder"] if has_checkpoint(folder) else ""
        _sweep(folder, taken)  # what killed processes left
    if path.name == taken:
        path = path.with_name(f"{taken}-again")
    with whole(path) as partial_path:
        sync(folder.parent)
        partial_path.mkdir()
        for part, names in trainer.state_parts().items():
            files.append(f"{part}.pt")
            _write(partial_path / files[-1], partial(torch.save, trainer.state_of(names)))
        sync(partial_path)
        # Here, as they take long: killed meanwhile, it leaves no step that checkpoint.json lacks.
        facts = {"step": trainer.steps, "folder": path.name, "files": _checksums(partial_path, files)}
    with writing(folder):
        sync(folder)
        with whole(folder / META) as partial_path:
            _write(partial_path, lambda file: file.write(signed(facts)))
        sync(folder)
    _sweep(folder, path.name)
    return path


def _sweep(folder: Path, used: str) -> None:
    """Remove all step folders in `folder`, except `used`, which holds the checkpoint's files."""
    for path in step_folders(folder):
        if path.name != used:
            remove(path)


def step_folders(folder: Path) -> list[Path]:
    """The folders in `folder` with names that `save_checkpoint` gives; those of partial ones begin with a dot."""
    return [path for path in folder.glob("*step-*") if _STEP.fullmatch(path.name)]


def has_checkpoint(folder: Path) -> bool:
    return (folder / META).is_file()


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each of these files."""

    def checksum(name: str) -> tuple[str, str]:
        try:
            with (folder / name).open("rb") as file:
                return name, hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise T1Error(f"cannot read {folder / name}: {error.strerror or error}") from None

    with ThreadPoolExecutor(READERS) as pool:
        return dict(pool.map(checksum, names))


def load_checkpoint(trainer: Trainer, folder: str | Path) -> int:
    """Load the checkpoint in `folder`, and return its step.

    All files are compared with their checksums first. Raises `T1Error`, before anything is changed, if there is no
    checkpoint, if it is damaged or of another model, and if several processes train the model.
    """
    folder = Path(folder)
    require(has_checkpoint(folder), f"no checkpoint in {folder}: no {META}")
    meta = read_signed(folder / META)
    path = folder / meta["folder"]
    for name, found in _checksums(path, meta["files"]).items():
        require(found == meta["files"][name], f"{path / name} is damaged: its checksum is not the one written")
    parts = [_read(path / name) for name in meta["files"]]
    state = {kind: {n: v for part in parts for n, v in part[kind].items()} for kind in CONTENTS}
    trainer.load_state_dict(state | {"step": meta["step"]})
    return trainer.steps


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """A part of the state; its tensors are memory-mapped, not read."""
    try:
        part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {kind: dict(part[kind]) for kind in CONTENTS}
    except Exception as error:  # of many kinds, for a file that is no part of a checkpoint
        raise T1Error(f"cannot read {path}, which should be a part of a state: {reason(error)}") from error
