"""The vocabulary-parallel heads on two and three processes against one; each set of processes runs all cases."""

from pathlib import Path

import pytest

from t1lib.errors import T1Error
from t1lib.heads.parallel import linear_cross_entropy

pytest.importorskip("triton")
from parallel_worker import alone, cases
from processes import SIZES, Outcomes

WORKER = Path(__file__).parent / "parallel_worker.py"
NAMES = [(size, name) for size in SIZES for name in {**cases(size), **alone(size)}]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(WORKER, tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_without_a_group():
    with pytest.raises(T1Error, match=r"not initialised; call torch\.distributed\.init_process_group"):
        linear_cross_entropy(None, None, None)
