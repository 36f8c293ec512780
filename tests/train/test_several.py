"""Mode `fsdp` on two and three processes, which run this file, against mode `gpu` in one."""

import sys
from pathlib import Path

import pytest
from fsdp_cases import cases
from processes import SIZES, Outcomes, work

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the worker forks, and gloo listens on lo")
pytestmark = [pytest.mark.slow, LINUX]
NAMES = [(size, name) for size in SIZES for name in cases(size, Path())]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), tmp_path_factory.mktemp("several"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


if __name__ == "__main__":
    work(Path(sys.argv[1]), cases)
