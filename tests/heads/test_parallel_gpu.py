"""The vocabulary-parallel heads on two CUDA devices, or on one that two ranks share, through NCCL; and the same task
on two CPU processes."""

from typing import Any
from unittest.mock import patch

import parallel_cases
import pytest
import torch
import torch.distributed as dist
from head_cases import REDUCTIONS, Problem, error_bounds, options, problem
from parallel_cases import CHUNKED, expected, on_shards, own_rows
from torch import Tensor

from t1lib.errors import T1Error
from t1lib.heads.parallel import AGREED, linear_cross_entropy
from t1lib.measure.ranks import run_ranks
from t1lib.measure.records import Records

DTYPES = ("bfloat16", "float32")
HEADS = {"chunked": CHUNKED, "fused": {"head": "fused", "chunks": 2}}
DEALS = ("plain", "dealt")  # dealt: tokens are sharded; also with a softcap and token weights
CASES = {f"{d}, {r}, {h}, {t}": (d, r, h, t) for d in DTYPES for r in REDUCTIONS for h in HEADS for t in DEALS}
FACTORS = {"loss": 1.05, "input": 1.05, "linear_weight": 1.5, "linear_bias": 1.5}  # as in test_fused_gpu.py
DIFFERENT = {"an option": "softcap", "a shape": "input"}  # what differs on the last rank, and what the error names
LARGE = {"tokens": 512, "rows": [5001, 4000], "hidden": 256}
SMALL = {"tokens": 64, "rows": [160, 97], "hidden": 32}

Found = dict[tuple[str, str, str, int | str], float]


def compare_all(records: Records, device: torch.device, tokens: int, rows: list[int], hidden: int) -> None:
    """The task of each rank. For each of DIFFERENT, record how many ranks get an error. For each of CASES, called
    twice, record the worst rank's errors relative to their bounds, and whether the call was new to the ranks."""
    sizes = {"n": tokens, "v": sum(rows), "d": hidden, "device": device}
    with patch.object(parallel_cases, "upstream_for", torch.ones_like):  # other values round again in 16 bits
        for what in DIFFERENT:
            refused = is_refused(what, problem(**sizes, dtype=torch.float32), rows)
            records.add("call", "refused", over_ranks(refused, dist.ReduceOp.SUM), phase=what)
        for case, (dtype, reduction, head, deal) in CASES.items():
            p = problem(**sizes, dtype=getattr(torch, dtype))
            compare(records, case, p, tuple(rows), HEADS[head], deal == "dealt", reduction)


def compare(
    records: Records, case: str, p: Problem, rows: tuple[int, ...], own: dict[str, Any], dealt: bool, reduction: str
) -> None:
    kwargs = {"reduction": reduction, "sequence_parallel": dealt}
    kwargs |= options("softcap", p) | options("token_weight", p) if dealt else {}
    exact, usual = (expected(p, rows, dtype=dtype, **kwargs) for dtype in (torch.float64, p.e.dtype))
    by_chunks = {"linear_weight": error_bounds("softcap" if dealt else "plain", own)["dw"]}
    factors = FACTORS | (by_chunks if own["head"] == "chunked" else {})
    for step in range(2):
        known = len(AGREED.get(dist.group.WORLD, ()))
        got = on_shards(p, rows, **kwargs, **own)
        new = len(AGREED[dist.group.WORLD]) - known
        records.add("call", "new", over_ranks(new), phase=case, step=step)
        for name, factor in factors.items():
            allowed = bound(p.e.dtype, exact[name], usual[name], factor)
            error = (got[name].double() - exact[name]).norm()
            records.add(name, "error", over_ranks(error / allowed), phase=case, step=step)


def bound(dtype: torch.dtype, exact: Tensor, usual: Tensor, factor: float) -> Tensor:
    """How large an error may be. In 16 bits: `factor` times that of head `full` in one process. In a scalar loss,
    errors of tokens may happen to cancel, so it has a bound of its own."""
    if dtype == torch.float32:
        return 1e-5 * exact.norm()
    if exact.dim() == 0:
        return 1e-3 * exact.norm()
    return factor * (usual.double() - exact).norm() + 1e-6 * exact.norm()


def is_refused(what: str, p: Problem, rows: list[int]) -> bool:
    """Whether this rank gets the error when the last one passes another option, or one token less."""
    last = dist.get_rank() == len(rows) - 1
    softcap = 3.0 if last and what == "an option" else 2.0
    tokens = slice(len(p.e) - (last and what == "a shape"))
    w = p.w[own_rows(tuple(rows))]
    try:
        linear_cross_entropy(p.e[tokens], w, p.target[tokens], group=dist.group.WORLD, softcap=softcap)
    except T1Error as error:
        return f"ranks disagree about {DIFFERENT[what]}: " in str(error)
    return False


def over_ranks(value: Any, op: Any = dist.ReduceOp.MAX) -> float:
    number = torch.tensor(float(value))
    dist.all_reduce(number, op)
    return number.item()


def on_two(device: str, sizes: dict[str, Any], limit: float) -> Found:
    rows = run_ranks(compare_all, sizes, 2, device, limit, threads=1)
    return {(row["phase"], row["variant"], row["metric"], row["step"]): row["value"] for row in rows}


def check(found: Found, case: str) -> None:
    """Check that errors are within their bounds and that only the first of the two calls was new."""
    for step in range(2):
        assert found[case, "call", "new", step] == 1 - step
        for name in FACTORS:
            assert found[case, name, "error", step] <= 1, f"{case}: {name}, call {step}"


def test_on_two_processes_of_the_cpu():
    found = on_two("cpu", SMALL, 100.0)
    for case in CASES:
        check(found, case)
    assert [found[what, "call", "refused", ""] for what in DIFFERENT] == [2, 2]


@pytest.fixture(scope="module")
def through_nccl() -> Found:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return on_two("cuda", LARGE, 240.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_two_processes_with_gpus(through_nccl, case):
    check(through_nccl, case)


@pytest.mark.gpu
@pytest.mark.parametrize("what", DIFFERENT)
def test_another_call_by_one_process_is_an_error_on_both(through_nccl, what):
    assert through_nccl[what, "call", "refused", ""] == 2
