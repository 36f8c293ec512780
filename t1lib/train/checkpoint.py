"""Checkpoints on disk: a folder for each step, a file for each layer; each is complete or absent, whenever power fails.

    folder/step-00000300/{layer-0000.pt, …, rest.pt, checkpoint.json}

`checkpoint.json` is written last. It has the SHA-256 of every file, and the number of the save: the last checkpoint is
the one with the highest, not the one with the highest step. A folder is called `.step-….partial` while it is written,
and `.step-….old`, which still counts, while another save of its step takes its place.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from t1lib.errors import T1Error, require
from t1lib.files import read_signed, remove, signed, sync, writing
from t1lib.train.trainer import Trainer

META = "checkpoint.json"
KINDS = ("model", "optimizer")
READERS = 8  # threads that read files to verify them


def save_checkpoint(trainer: Trainer, folder: str | Path, keep: int = 1) -> Path:
    """Write the trainer's state to `folder/step-<n>` and return that path.

    Of the checkpoints of earlier steps the last `keep` - 1 stay. Those of later steps, which a run left when it went on
    from an earlier one, are renamed to `abandoned-<n>`, and stay until that name is needed again.

    One layer is copied at a time. The folder gets its name once everything is on disk: if the call is interrupted or
    the disk is full, the previous checkpoint is still whole. What a killed process left half is removed first.
    With several processes, all must call it with a folder that all of them see; they gather one layer for each rank,
    then all ranks write theirs in parallel, and so on. The format does not depend on the number of processes. Raises
    `T1Error`, on all of them, if the checkpoint cannot be written.
    """
    require(keep >= 1, f"keep={keep} checkpoints; allowed: 1 or more")
    writer, ranks = _Writer(Path(folder), trainer.steps), trainer.ranks
    parts, sums = list(trainer.state_parts()), {}
    try:
        ranks.first(writer.begin)
        for at in range(0, len(parts), ranks.size):
            own = _gather(trainer, parts[at : at + ranks.size])
            for written in ranks.share(partial(writer.add, own)):
                sums |= written
        facts = {"step": trainer.steps, "skipped": trainer.skipped, "files": sums}
        ranks.first(lambda: writer.end(facts, keep))
    except BaseException as error:
        if isinstance(error, T1Error):
            ranks.first(writer.drop)  # removed before any rank continues
        elif ranks.rank == 0:
            writer.drop()
        raise
    return writer.path


def _gather(trainer: Trainer, some: Sequence[str]) -> dict[str, Any]:
    """Gather these parts, at most one for each rank. Returns this rank's part, if it has one, by file name."""
    own = {}
    for turn, part in enumerate(some):
        state = trainer.state_part(part)
        if turn == trainer.ranks.rank:
            own[f"{part}.pt"] = state
    return own


class _Writer:
    """A checkpoint that is being written."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.path = folder, step, folder / f"step-{step:08d}"
        self._partial = _hidden(self.path, "partial")

    def begin(self) -> None:
        for left in self.folder.glob(".step-*.partial"):
            remove(left)
        with writing(self.path):
            self._partial.mkdir(parents=True)
            sync(self.folder.parent)

    def add(self, states: dict[str, Any]) -> dict[str, str]:
        """Write these files; returns the checksum of each."""
        with writing(self.path):
            return {name: _write(self._partial / name, partial(torch.save, state)) for name, state in states.items()}

    def end(self, facts: dict[str, Any], keep: int) -> None:
        """Write `checkpoint.json`, and give everything its final name."""
        facts = {"save": 1 + max(map(_save_of, _complete(self.folder).values()), default=0)} | facts
        old = _hidden(self.path, "old")
        with writing(self.path):
            _write(self._partial / META, lambda file: file.write(signed(facts)))
            sync(self._partial)
            if self.path.exists():
                remove(old)
                os.replace(self.path, old)
            os.replace(self._partial, self.path)
            sync(self.folder)
            remove(old)
            self._retire(keep)

    def _retire(self, keep: int) -> None:
        """Remove what is not to be kept of earlier steps, and set later steps aside."""
        found = sorted(_complete(self.folder).items())
        earlier = [path for step, path in found if step < self.step]
        for path in earlier[: max(len(earlier) - keep + 1, 0)]:
            gone = _hidden(path, "gone.partial")  # half removed, it is no checkpoint
            os.replace(path, gone)
            remove(gone)
        for step, path in found:
            if step > self.step:
                aside = self.folder / f"abandoned-{step:08d}"
                remove(aside)
                os.replace(path, aside)

    def drop(self) -> None:
        remove(self._partial)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".step-{_step_of(path):08d}.{suffix}")


def _step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for a folder that was renamed."""
    found = re.fullmatch(r"step-(\d+)|\.step-(\d+)\.old", path.name)
    return int(found[1] or found[2]) if found else None


def _complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `folder` by step; a name that another one is taking over counts until it has."""
    paths = [*folder.glob(".step-*.old"), *folder.glob("step-*")]
    steps = {path: _step_of(path) for path in paths if (path / META).is_file()}
    return {step: path for path, step in steps.items() if step is not None}


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, in the order in which they were saved."""
    return sorted(_complete(folder).values(), key=lambda path: _read_meta(path)["save"])


def _save_of(path: Path) -> int:
    with suppress(T1Error):  # a new checkpoint does not depend on whether older ones can be read
        return _read_meta(path)["save"]
    return 0


class _Summed:
    """A file that hashes what is written to it, in a thread of `pool` beside the writing."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool, self.sum, self.flush = file, pool, hashlib.sha256(), file.flush

    def write(self, data: bytes) -> int:
        hashing = self._pool.submit(self.sum.update, data)
        try:
            return self._file.write(data)
        finally:
            hashing.result()  # the writer may use the data's memory again


def _write(path: Path, write: Callable[[Any], object]) -> str:
    """Write a file, to the disk, and return its checksum."""
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        summed = _Summed(file, pool)
        write(summed)
        file.flush()
        os.fsync(file.fileno())
    return summed.sum.hexdigest()


def load_checkpoint(trainer: Trainer, folder: str | Path) -> int:
    """Load the last checkpoint in `folder`, or `folder` itself if it is a checkpoint, and return its step.

    All files are read and compared with their checksums first. With several processes, each verifies some of the files,
    and loads its own part of every tensor. Raises `T1Error`, on all of them and before anything is changed, if there is
    no checkpoint, or it is damaged or of another model.
    """
    saved: dict[str, Any] = {}

    def open_and_check() -> str:
        path = _last(Path(folder))
        meta = _read_meta(path)
        _verify(path, dict(list(meta["files"].items())[trainer.ranks.rank :: trainer.ranks.size]))
        parts = [_read(path / name) for name in meta["files"]]
        saved.update({kind: {n: v for part in parts for n, v in part[kind].items()} for kind in KINDS})
        trainer.check_state(saved["model"], saved["optimizer"])
        saved.update(step=meta["step"], skipped=meta["skipped"])
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


def _read_meta(path: Path) -> dict[str, Any]:
    meta = read_signed(path / META)
    named, step = _step_of(path.absolute()), meta["step"]
    require(named in (None, step), f"{path / META} is of step {step}; allowed: the step of its folder")
    return meta


def _verify(path: Path, sums: dict[str, str]) -> None:
    """Raise `T1Error` for a file that is not as it was written."""

    def verify(name: str) -> None:
        try:
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise T1Error(f"cannot read {path / name}: {error.strerror or error}") from None
        require(found == sums[name], f"{path / name} is damaged: its checksum is not the one written")

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(verify, sums))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """A part of the state; its tensors are memory-mapped, not read."""
    try:
        part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of many kinds, for a file that is no part of a checkpoint
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise T1Error(f"cannot read {path}: {reason[:100]}") from error
    whole = isinstance(part, dict) and all(isinstance(part.get(kind), dict) for kind in KINDS)
    require(whole, f"{path} holds no part of a state; allowed: {' and '.join(KINDS)}, by name")
    return part
