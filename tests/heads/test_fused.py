"""Head `fused` without a GPU: its kernels in Triton's interpreter, and the fallback to `chunked`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from head_cases import assert_close, problem, run

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_by_the_interpreter():
    """In two separate processes: Triton decides on import whether kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "fused_interpreted.py"), "-k"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = {"cwd": HERE.parent.parent, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    first = "test_agrees_with_full or test_first_chunk or test_columns"
    halves = (first, f"not ({first})")
    processes = [subprocess.Popen([*command, half], text=True, **options) for half in halves]
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-6000:]


def test_chunked_computes_where_the_kernels_cannot():
    p = problem(37, 257, 16)
    for own in ({}, {"chunks": 3}, {"accumulate": "float32"}):
        assert_close(run("fused", p, **own), run("full", p), 1e-11)


def test_options_of_its_own_are_checked():
    p = problem(5, 257, 16)
    with pytest.raises(T1Error, match="unknown accumulate 'bfloat16'; allowed: float32"):
        linear_cross_entropy(p.e, p.w, p.target, head="fused", accumulate="bfloat16")
    with pytest.raises(T1Error, match="chunks or workspace, not both"):
        linear_cross_entropy(p.e, p.w, p.target, head="fused", chunks=2, workspace="1GiB")
    with pytest.raises(T1Error, match="its options: chunks, accumulate"):
        linear_cross_entropy(p.e, p.w, p.target, head="fused", by="sequence")
