"""The kernels without a GPU: the tests of three other files, by Triton's interpreter.

They run in a process of their own, because Triton decides on import whether kernels are interpreted.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [
    HERE / "heads" / "fused_interpreted.py",
    HERE / "train" / "adamw_interpreted.py",
    HERE / "test_defaults.py",
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_by_the_interpreter(which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "-m", which, *FILES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
