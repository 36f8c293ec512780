"""The vocabulary-parallel heads on two CUDA devices through NCCL, or on two CPU processes."""

import pytest
import torch
import torch.distributed as dist
from head_cases import REDUCTIONS, options, problem, refusal
from parallel_cases import CHUNKED, agrees, own_rows, sixteen_bits

from t1lib.heads.parallel import linear_cross_entropy
from t1lib.measure.ranks import measure_ranks
from t1lib.measure.records import Records

HEADS = {"chunked": CHUNKED, "fused": {"head": "fused", "chunks": 2}}
LARGE = {"tokens": 512, "rows": [5001, 4000], "hidden": 256}
SMALL = {"tokens": 64, "rows": [160, 97], "hidden": 32}


def compare_all(records: Records, device: torch.device, phase: str, tokens: int, rows: list[int], hidden: int) -> None:
    """The task of each rank. Calls are made twice, because the ranks compare only the first. Then one that differs."""
    sizes, rows = {"n": tokens, "v": sum(rows), "d": hidden, "device": device}, tuple(rows)
    single, half = (problem(**sizes, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for own in HEADS.values():
        for reduction in REDUCTIONS:
            for dealt in (False, True):
                more = options("softcap", single) | options("token_weight", single) if dealt else {}
                kwargs = {"reduction": reduction, "sequence_parallel": dealt, **more}
                for _ in range(2):
                    agrees(single, rows, 3e-5, **own, **kwargs)
                    sixteen_bits(half, rows, own, **kwargs)
    last = dist.get_rank() == len(rows) - 1
    call = dict(group=dist.group.WORLD, softcap=3.0 if last else 2.0)
    message = refusal(lambda: linear_cross_entropy(single.e, single.w[own_rows(rows)], single.target, **call))
    assert "ranks disagree about softcap: " in message
    records.add("all", "done", 1.0, phase=phase)


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        pytest.param("cpu", SMALL, marks=pytest.mark.slow),
        pytest.param("cuda", LARGE, marks=pytest.mark.gpu),
    ],
)
def test_on_two_processes(device, sizes):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    records = Records()
    measure_ranks(records, compare_all, sizes, 2, name="heads", variants=[], device=device, limit=240.0)
    assert [row["metric"] for row in records.rows] == ["done"]
