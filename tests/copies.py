"""This checkout and copies of it, Python in a process of its own, waiting, and a disk that is full."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def names(folder: Path) -> list[str]:
    """What lies in it."""
    return sorted(path.name for path in folder.iterdir())


def copy_kit(root: Path, *more: str, source: Path = CHECKOUT) -> Path:
    """Copy to `root`, a value for T1_ROOT, the folders of a checkout that commands need, and these."""
    for name in ("docs", "notebooks", "params", *more):
        hidden = shutil.ignore_patterns(".ipynb_checkpoints")
        shutil.copytree(source / name, root / name, dirs_exist_ok=True, ignore=hidden)
    return root


def drawn(notebook: str, kind: str) -> list[str]:
    """The names of the figures or tables, as `kind` says, that a notebook makes, in its order."""
    text = (CHECKOUT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8")
    return re.findall(rf'run\.{kind}\(\\"(\w+)\\"', text)


def python(*arguments: str | Path, cwd: Path, code: int = 0, **environment: str) -> str:
    """What Python prints with these arguments; its errors, where it must end with another exit code than 0."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **environment}
    options = dict(cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
    return done.stderr if code else done.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` comes true within `seconds`: threads and processes end a little after their owner."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
