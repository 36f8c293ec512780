"""The vocabulary-parallel heads, and `patch_head`, on two and three processes, which run this script, against one."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")
from huggingface_fsdp import wrapped
from parallel_cases import Cases, values
from parallel_manners import groups_made_anew, manners, refusals
from processes import SIZES, Outcomes, work

from t1lib.errors import T1Error
from t1lib.heads.parallel import linear_cross_entropy


def cases(size: int, folder: Path | None = None) -> Cases:
    found = {**values(size), **manners(size), **refusals(size)}
    return {**found, **wrapped()} if size == 2 else found


def alone(size: int, folder: Path | None = None) -> Cases:
    return {"groups made anew": partial(groups_made_anew, size)}


NAMES = [(size, name) for size in SIZES for name in {**cases(size), **alone(size)}]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_without_a_group():
    with pytest.raises(T1Error, match=r"not initialised; call torch\.distributed\.init_process_group"):
        linear_cross_entropy(None, None, None)


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # once, not in each process

    work(Path(sys.argv[1]), cases, alone)
