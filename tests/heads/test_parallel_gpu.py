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
from t1lib.heads.parallel import linear_cross_entropy
from t1lib.measure.ranks import run_ranks
from t1lib.measure.records import Records

DTYPES = ("bfloat16", "float32")
HEADS = {"chunked": CHUNKED, "fused": {"head": "fused", "chunks": 2}}
DEALS = ("plain", "dealt")  # dealt: tokens are sharded; also with a softcap and token weights
CASES = {f"{d}, {r}, {h}, {t}": (d, r, h, t) for d in DTYPES for r in REDUCTIONS for h in HEADS for t in DEALS}
FACTORS = {"loss": 1.05, "input": 1.05, "linear_weight": 1.5, "linear_bias": 1.5}  # as in test_fused_gpu.py
LARGE = {"tokens": 512, "rows": [5001, 4000], "hidden": 256}
SMALL = {"tokens": 64, "rows": [160, 97], "hidden": 32}

Found = dict[tuple[str, str], float]


def compare_all(records: Records, device: torch.device, tokens: int, rows: list[int], hidden: int) -> None:
    """The task of each rank. Record how many ranks get an error when the last one passes another option; and for each
    of CASES, called twice, the worst rank's errors relative to their bounds."""
    sizes = {"n": tokens, "v": sum(rows), "d": hidden, "device": device}
    records.add("refused", "ranks", over_ranks(is_refused(problem(**sizes), rows), dist.ReduceOp.SUM))
    with patch.object(parallel_cases, "upstream_for", torch.ones_like):  # other values round again in 16 bits
        for case, (dtype, reduction, head, deal) in CASES.items():
            p = problem(**sizes, dtype=getattr(torch, dtype))
            for name, error in errors(p, tuple(rows), HEADS[head], deal == "dealt", reduction).items():
                records.add(name, "error", over_ranks(error), phase=case)


def errors(
    p: Problem, rows: tuple[int, ...], own: dict[str, Any], dealt: bool, reduction: str
) -> dict[str, float | Tensor]:
    kwargs = {"reduction": reduction, "sequence_parallel": dealt}
    kwargs |= options("softcap", p) | options("token_weight", p) if dealt else {}
    exact, usual = (expected(p, rows, dtype=dtype, **kwargs) for dtype in (torch.float64, p.e.dtype))
    by_chunks = {"linear_weight": error_bounds("softcap" if dealt else "plain", own)["dw"]}
    factors = FACTORS | (by_chunks if own["head"] == "chunked" else {})
    worst = dict.fromkeys(factors, torch.zeros(()))
    for _ in range(2):  # the ranks compare only the first of two calls
        got = on_shards(p, rows, **kwargs, **own)
        for name, factor in factors.items():
            allowed = bound(p.e.dtype, exact[name], usual[name], factor)
            error = (got[name].double() - exact[name]).norm() / allowed
            worst[name] = torch.maximum(worst[name], error.float().cpu())
    return worst


def bound(dtype: torch.dtype, exact: Tensor, usual: Tensor, factor: float) -> Tensor:
    """How large an error may be. In 16 bits: `factor` times that of head `full` in one process. In a scalar loss,
    errors of tokens may happen to cancel, so it has a bound of its own."""
    if dtype == torch.float32:
        return 1e-5 * exact.norm()
    if exact.dim() == 0:
        return 1e-3 * exact.norm()
    return factor * (usual.double() - exact).norm() + 1e-6 * exact.norm()


def is_refused(p: Problem, rows: list[int]) -> bool:
    softcap = 3.0 if dist.get_rank() == len(rows) - 1 else 2.0
    try:
        linear_cross_entropy(p.e, p.w[own_rows(tuple(rows))], p.target, group=dist.group.WORLD, softcap=softcap)
    except T1Error as error:
        return "ranks disagree about softcap: " in str(error)
    return False


def over_ranks(value: Any, op: Any = dist.ReduceOp.MAX) -> float:
    number = torch.tensor(float(value))
    dist.all_reduce(number, op)
    return number.item()


def on_two(device: str, sizes: dict[str, Any], limit: float) -> Found:
    rows = run_ranks(compare_all, sizes, 2, device, limit, threads=1)
    return {(row["phase"], row["variant"]): row["value"] for row in rows}


@pytest.mark.slow
def test_on_two_processes_of_the_cpu():
    found = on_two("cpu", SMALL, 100.0)
    assert found["", "refused"] == 2
    assert max(found[case, name] for case in CASES for name in FACTORS) <= 1


@pytest.fixture(scope="module")
def through_nccl() -> Found:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return on_two("cuda", LARGE, 240.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_two_processes_with_gpus(through_nccl, case):
    assert through_nccl["", "refused"] == 2
    for name in FACTORS:
        assert through_nccl[case, name] <= 1, name
