"""A pytest plugin with the fixture `smoke_outputs`: all experiments, run once per session in a copy.

A test module takes it with `pytest_plugins = ["smoke_run"]`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ("cce", "chunks", "convergence", "frontier", "parallel", "t1m1", "t1m3")


@pytest.fixture(scope="session")
def smoke_outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout (a value for T1_ROOT) whose outputs/smoke/ holds finished runs. Copy it before changing it.

    Runs in the real checkout that are up to date are copied; the others are made here.
    """
    root = tmp_path_factory.mktemp("smoke")
    for name in ("notebooks", "params", "report"):
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in EXPERIMENTS:
        done = CHECKOUT / "outputs" / "smoke" / name
        if (done / "manifest.json").is_file():
            shutil.copytree(done, root / "outputs" / "smoke" / name)
    command = [sys.executable, "-m", "t1lib", "run", *EXPERIMENTS, "--profile", "smoke"]
    run = subprocess.run(command, cwd=root, env={**os.environ, "T1_ROOT": str(root)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return root
