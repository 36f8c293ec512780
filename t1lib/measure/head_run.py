"""Measures a plan's cases and records the results: workspaces in one process per method, times in one process per set
of operands.

Phases of the records: `workspace/<shape>` and `<data>/<shape>`; variants: those of the cases, and `floor`, the three
products. Metrics: workspace_mib, forward_ms, backward_ms, both_ms, host_ms, error_loss, error_dE, error_dW; for the
loss alone they have the prefix `loss_`, and the time is `loss_ms`.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch

from t1lib.measure.head_bench import HeadBench, WorkspaceBench
from t1lib.measure.head_cases import Case, Shape
from t1lib.measure.isolate import Isolated, VariantOutOfMemory
from t1lib.measure.peers import PEERS
from t1lib.measure.records import STATUSES, Records

MIB = 2**20


class Gate(NamedTuple):
    """Largest relative error with which a time counts: `own` for the kit's heads, `peer` for others and filtered."""

    own: float
    peer: float

    def bound(self, case: Case) -> float:
        foreign = case.method in PEERS or case.method == "torch" or case.filtered
        return self.peer if foreign else self.own


def measure_workspaces(
    records: Records, cases: dict[Shape, list[Case]], settings: dict[str, Any], processes: int = 1
) -> None:
    """Peak workspaces of all cases, a fresh process per method; `processes` at once, which does not affect counts."""
    methods = list(dict.fromkeys(case.method for found in cases.values() for case in found))

    def one(method: str) -> list[tuple[Shape, Case, int | str]]:
        found: list[tuple[Shape, Case, int | str]] = []
        with ExitStack() as workers:
            worker = None
            for shape, all_cases in cases.items():
                own = [case for case in all_cases if case.method == method]
                try:
                    if own and worker is None:
                        worker = workers.enter_context(closing(Isolated(WorkspaceBench, settings)))
                    measured = worker.call("measure", shape=shape, cases=own) if own else {}
                except VariantOutOfMemory:  # not even the operands fit: the next shape starts a new process
                    measured, worker = {case.key: "oom" for case in own}, None
                found += [(shape, case, measured[case.key]) for case in own]
        return found

    with ThreadPoolExecutor(processes) as pool:
        for method, found in zip(methods, pool.map(one, methods), strict=True):
            for shape, case, value in found:
                if isinstance(value, str):
                    records.status(case.variant, value, f"workspace/{shape.name}")
                else:
                    metric = f"{case.prefix}workspace_mib"
                    records.add(case.variant, metric, value / MIB, "MiB", f"workspace/{shape.name}")
            print(f"workspaces of {method}: {', '.join(_shown(value) for *_, value in found)}")


def _shown(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value / MIB:,.4g} MiB"


def measure_times(
    records: Records, phase: str, shape: Shape, cases: list[Case], settings: dict[str, Any], gate: Gate,
    repeats: int, warmup: int, turns: int = 1, softmax: str = "",
) -> None:  # fmt: skip
    """Errors, then interleaved times of all cases and the floors, in one process that holds one set of operands.

    `softmax`, if given, is the name under which the sparsity of the softmax (`t1lib.measure.softmax`) is recorded too.
    If the process runs out of memory, such as for the operands, every variant becomes `oom`.
    """
    for name in ("tokens", "vocabulary", "hidden"):
        records.add("all", name, getattr(shape, name), "", phase)
    gradients = (shape.tokens + shape.vocabulary) * shape.hidden * getattr(torch, settings["dtype"]).itemsize
    records.add("all", "gradients_mib", gradients / MIB, "MiB", phase)
    worker = None
    try:
        worker = Isolated(HeadBench, {"shape": shape} | settings)
        if softmax:
            add_sparsity(records, softmax, worker.call("sparsity"))
        fine = _prepare(records, phase, cases, worker, gate, warmup)
        worker.call("forget_reference")
        by_key, count = {case.key: case for case in cases}, Counter()
        for key, times in worker.call("samples", cases=fine, repeats=repeats, turns=turns):
            variant = by_key[key].variant if key in by_key else key
            for name, ms in times.items():
                records.add(variant, f"{name}_ms", ms, "ms", phase, count[key])
            count[key] += 1
    except VariantOutOfMemory:
        for variant in dict.fromkeys(case.variant for case in cases):
            records.status(variant, "oom", phase)
        return
    finally:
        if worker is not None:
            worker.close()
    print(f"{phase}: {len(fine)} of {len(cases)} cases timed")


def _prepare(records: Records, phase: str, cases: list[Case], worker: Isolated, gate: Gate, warmup: int) -> list[Case]:
    """Record errors and statuses; return the cases that may be timed. A variant gets the status of its worst case."""
    fine, states = [], {}
    for case in cases:
        status, errors, reason = worker.call("prepare", case=case, bound=gate.bound(case), warmup=warmup)
        for which, value in errors.items():
            records.add(case.variant, f"{case.prefix}error_{which}", value, "", phase)
        if status == "ok":
            fine.append(case)
        else:
            print(f"{phase}: {case.key} is {status}: {reason}")
        known = states.get(case.variant, "ok")
        states[case.variant] = max(known, status, key=STATUSES.index)
    for variant, status in states.items():
        records.status(variant, status, phase)
    return fine


def add_sparsity(records: Records, data: str, facts: dict[str, Any]) -> None:
    """Record what `t1lib.measure.softmax.sparsity` found for one kind of data, in the phase `sparsity`."""
    facts = dict(facts)
    for rank, value in zip(facts.pop("ranks"), facts.pop("probability"), strict=True):
        records.add(data, "probability", value, "", "sparsity", rank)
    for name, value in facts.items():
        records.add(data, name, value, "", "sparsity")
