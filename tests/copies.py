"""Copies of this checkout, and Python in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def python(*arguments: str | Path, cwd: Path, code: int = 0, **environment: str) -> str:
    """What Python prints with these arguments; its errors, where it must end with another exit code than 0."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **environment}
    options = dict(cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
    return done.stderr if code else done.stdout
