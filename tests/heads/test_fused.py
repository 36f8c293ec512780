"""The kernels of head `fused` without a GPU: the tests of two other files, by Triton's interpreter.

Each file runs in a process of its own, because Triton decides on import whether kernels are interpreted.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("fused_interpreted.py", "fused_manners.py")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run(selection: str) -> None:
    """Run the selected tests of both files at once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = {"cwd": HERE.parent.parent, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [subprocess.Popen([*command, "-m", selection, HERE / f], text=True, **options) for f in FILES]
    outputs = [process.communicate()[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output[-6000:]


def test_kernels_by_the_interpreter():
    run("not slow")


@pytest.mark.slow
def test_more_cases_by_the_interpreter():
    run("slow")
