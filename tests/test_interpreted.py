"""Kernels without a GPU, by Triton's interpreter, in a process of its own: Triton decides on import what runs them."""

from pathlib import Path

import pytest
from copies import python

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = "heads/fused_interpreted.py", "train/adamw_interpreted.py", "test_defaults.py"


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_by_the_interpreter(which):
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    files = [HERE / name for name in FILES]
    python("-m", "pytest", *options, "-m", which, *files, cwd=HERE.parent, TRITON_INTERPRET="1")
