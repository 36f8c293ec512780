"""One process of the group of test_heads_parallel.py: every case, in the same order on all of them.

Run as `parallel_worker.py RANK PROCESSES STORE RESULTS`; writes {case: traceback, or "" where it passed}.
"""

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from parallel_cases import Cases, edges, exact, kernels
from parallel_manners import manners
from parallel_refusals import refusals

SECONDS = 30  # a collective that waits longer fails


def cases(size: int) -> Cases:
    return {**exact(size), **edges(size), **kernels(size), **manners(size), **refusals(size)}


def main(rank: int, size: int, store: str, results: str) -> None:
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=size, timeout=limit)
    found = {name: outcome(case) for name, case in cases(size).items()}
    Path(results).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
