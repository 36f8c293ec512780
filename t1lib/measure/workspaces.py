"""Workspaces of output layers, in a fresh process for each method."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from t1lib.measure.heads import Case, HeadBench, Key, attempt
from t1lib.measure.isolate import Isolated, VariantOutOfMemory
from t1lib.measure.peers import PEERS
from t1lib.measure.progress import progress
from t1lib.measure.records import Records

MIB = 2**20


class Workspaces:
    """Workspaces of one method on one shape after another, in a process that measures nothing else."""

    def measure(self, cases: list[Case], **given: Any) -> list[int | str]:
        """Bytes of each case, or its status, on a `HeadBench`. Whatever the process holds beyond cuBLAS's own
        workspaces counts, what an earlier call or shape left behind, too."""
        gc.collect()
        bench = HeadBench(**given)
        found = [attempt(partial(bench.memory, case), case.method in PEERS) for case in cases]
        return [memory["workspace"] + memory["left"] if memory else status for memory, status, _ in found]


def measure_workspaces(
    records: Records, setting: dict[str, Any], shapes: dict[str, dict[str, int]], cases: dict[str, dict[Key, Case]],
    processes: int = 1,
) -> None:  # fmt: skip
    """Record the workspaces of the cases of each shape, in a fresh process for each method: phase `workspace/<shape>`.

    setting    dtype, device and seed of the `HeadBench`
    shapes     tokens, vocabulary and hidden by a shape's name; `cases` likewise, by variant and what tells two apart
    processes  how many measure at once, which does not affect counts
    """

    def one(method: str) -> list[tuple[str, str, Case, int | str]]:
        found, worker = [], None
        with ExitStack() as workers:
            for shape, sizes in shapes.items():
                own = {key: case for key, case in cases[shape].items() if case.method == method}
                if not own:
                    continue
                worker = worker or workers.enter_context(closing(Isolated(Workspaces, {})))
                try:
                    values = worker.call("measure", cases=list(own.values()), **setting, **sizes)
                except VariantOutOfMemory:  # not even the operands fit: the next shape starts a new process
                    values, worker = ["oom"] * len(own), None
                found += [(shape, key[0], own[key], value) for key, value in zip(own, values, strict=True)]
        return found

    methods = list(dict.fromkeys(case.method for own in cases.values() for case in own.values()))
    with ThreadPoolExecutor(processes) as pool:
        for found in progress(pool.map(one, methods), "methods", len(methods)):
            for shape, variant, case, value in found:
                if isinstance(value, str):
                    records.status(variant, value, f"workspace/{shape}")
                else:
                    records.put(variant, f"workspace/{shape}", {f"{case.prefix}workspace_mib": value / MIB})
