"""Files that are written completely or not at all, and one kind of error if the disk refuses."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from t1lib.errors import T1Error, require


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `T1Error`, naming `path`, if the disk refuses a write within this context, whichever library makes it."""
    try:
        yield
    except Exception as error:
        # PyTorch's zip writer raises its own error on top of the disk's; Rust libraries raise ones that quote it.
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__context__
        if found is None and "(os error " not in str(error):
            raise
        why = (found.strerror or str(found)) if found else str(error).splitlines()[0]
        raise T1Error(f"cannot write {path}: {why}") from error


@contextmanager
def whole(path: Path, writers: str = "") -> Iterator[Path]:
    """Yield a temporary path for a file or a folder, which replaces `path` once written: `path` is never incomplete.
    `writers` distinguishes processes that may write it at the same time. Raises `T1Error` if it cannot be written."""
    partial_path = path.with_name(f".{path.stem}{writers}.partial{path.suffix}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(partial_path)
            yield partial_path
            replace(partial_path, path)
    finally:
        remove(partial_path)


def replace(new: Path, path: Path) -> None:
    """Replace a file or a folder by `new`, in one file system; if that fails, `path` is as it was. A process that is
    killed while it replaces a folder may leave the old one as `.NAME.old`: `recover`."""
    recover(path)
    try:
        if path.is_dir():  # a rename replaces only empty ones
            os.replace(path, _aside(path))
        os.replace(new, path)
    finally:
        recover(path)


def recover(path: Path) -> None:
    """Finish or undo a `replace` that did not come to its end."""
    old = _aside(path)
    if old.is_dir() and path.exists():  # a file of this name is a user's
        remove(old)
    elif old.is_dir():
        os.replace(old, path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def write_signed(path: Path, content: dict[str, Any], writers: str = "") -> None:
    """Write `content` with its checksum, for `read_signed`. `writers` as in `whole`."""
    with whole(path, writers) as partial_path:
        partial_path.write_bytes(signed(content))


def signed(content: dict[str, Any]) -> bytes:
    """`content` as JSON, with its SHA-256 as one more field."""
    content = json.loads(json.dumps(content))  # normalised, as reading will return it
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1, ensure_ascii=False) + "\n").encode()


def read_signed(path: Path) -> dict[str, Any]:
    """The content that `signed` was given. Raises `T1Error` if the file cannot be read, or any byte has changed."""
    try:
        data = path.read_bytes()
        content = json.loads(data)
        del content["sha256"]
        whole = data == signed(content)
    except OSError as error:
        raise T1Error(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        whole = False
    require(whole, f"{path} is damaged: its checksum is not that of its content")
    return content


def sync(folder: Path) -> None:
    """Flush the entries of `folder` to disk, as `os.fsync` flushes a file's content; does nothing on Windows."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists and can be removed."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


@contextmanager
def locked(path: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock file `path` until the block or process ends. Raises `T1Error(otherwise)` if it is held already."""
    lock = FileLock(path, timeout=0)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire()
    require(lock.is_locked, otherwise)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def held(folder: Path, kept: str, otherwise: str) -> Iterator[None]:
    """Hold the lock file `.lock` in `folder`, which is created if missing; raises as `locked`. On exit, whatever this
    created is removed again, unless the folder then contains the file `kept`."""
    made = [path for path in (folder / ".lock", folder, *folder.parents) if not path.exists()]
    with locked(folder / ".lock", otherwise):
        try:
            yield
        finally:
            for path in made if not (folder / kept).exists() else ():
                with suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()


def cache_folder() -> Path:
    """Where tokenizers and rates of machines are kept: `T1_CACHE`, else t1kit in `XDG_CACHE_HOME` or ~/.cache. Raises
    `T1Error` if none of them is known."""
    if named := os.environ.get("T1_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t1kit"
    except RuntimeError:
        raise T1Error("this user has no home folder to keep a cache in; name one in T1_CACHE") from None
