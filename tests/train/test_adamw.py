"""The update kernel, and the bytes of state that each layout keeps."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from t1lib.optimizers import OptimizerSpec
from t1lib.train.update import join, new_state, split


def test_bytes_per_parameter():
    """State of a 2-byte parameter: 12 bytes in float32, 8 with 16-bit moments, 6 with a split master as well."""
    weight, rule = torch.zeros(1000, dtype=torch.bfloat16), {"betas": (0.9, 0.999)}
    for own, expected in (({}, 12), ({"moments": "bfloat16"}, 8), ({"moments": "bfloat16", "split_master": True}, 6)):
        spec = OptimizerSpec("adamw", **own)
        assert sum(t.nbytes for t in new_state(weight, rule, spec.precision).values()) == expected * 1000
        assert sum(kind.itemsize for kind in spec.kinds(weight).values()) == expected


def test_a_master_survives_being_split():
    torch.manual_seed(0)
    master = torch.cat([torch.randn(999), torch.tensor([0.0, -0.0, torch.inf, 1.0 + 2**-8, 1.0 - 2**-9])])
    weight, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split(master.clone(), weight, low)
    assert torch.equal(join(weight, low), master)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernel_by_the_interpreter(which):
    """In a separate process: Triton decides on import whether kernels are interpreted."""
    cases = Path(__file__).parent / "adamw_interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cases.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
