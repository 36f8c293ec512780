"""Tables and numbers of experiment `chunks`, from its records alone."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from t1lib.kit.select import median, pick
from t1lib.kit.tables import MISSING, Table, cell, make_table, median_iqr
from t1lib.measure.records import Numbers, statuses
from t1lib.report.chunks import (
    COUNTED,
    HEADS,
    MIB,
    PRODUCTS,
    REDUCTIONS,
    balance_tokens,
    counts,
    floor_ms,
    gradients_mib,
    law,
    rates,
    shape,
)

SIZES = {"workspace_mib": "MiB", "kept_mib": "MiB"}
TIMES = {"forward_ms": "ms", "backward_ms": "ms", "both_ms": "ms"}
ERRORS = ("error_loss", "error_dE", "error_dW")


def _status(frame: pd.DataFrame, phase: str) -> dict[str, str]:
    return statuses(frame[frame["phase"] == phase])


def _whole(value: float) -> float | int:
    """A count as an int; NaN is returned as it is."""
    return value if value != value else int(value)


def table1(frame: pd.DataFrame) -> Table:
    """What the reviewers asked for: forward and backward latency, and storage, for each reduction."""
    rows, floor = [], floor_ms(frame, "reductions")
    for reduction in REDUCTIONS:
        status = _status(frame, reduction)
        for name in HEADS:
            both = pick(frame, "both_ms", reduction, name)
            rows.append({
                "reduction": reduction,
                "head": name,
                "status": status.get(name, MISSING),
                "n": len(both) or None,
                "loss alone (ms)": median(frame, "eval_ms", reduction, name),
                "forward (ms)": median(frame, "forward_ms", reduction, name),
                "backward (ms)": median(frame, "backward_ms", reduction, name),
                "both, median [IQR] (ms)": median_iqr(both),
                "× three products": median(frame, "both_ms", reduction, name) / floor,
                "workspace (MiB)": median(frame, "workspace_mib", reduction, name),
                "kept (MiB)": median(frame, "kept_mib", reduction, name),
            })  # fmt: skip
    return make_table(rows, text_columns=3)


def table2_counts(frame: pd.DataFrame) -> Table:
    """Workspace, time over the floor and error of the weight's gradient, by number of chunks."""
    rows, floor = [], floor_ms(frame, "chunks")
    for n in counts(frame):
        status, row = _status(frame, f"chunks/{n}"), {}
        row["chunks"] = str(n)
        for name in COUNTED:
            metrics = ("chunk_tokens", "workspace_mib", "both_ms", "error_dW")
            value = {k: median(frame, k, f"chunks/{n}", name) for k in metrics}
            row |= {
                f"{name}: status": status.get(name, MISSING),
                f"{name}: tokens": _whole(value["chunk_tokens"]),
                f"{name}: workspace (MiB)": value["workspace_mib"],
                f"{name}: both (ms)": value["both_ms"],
                f"{name}: × three products": value["both_ms"] / floor,
                f"{name}: error dW": value["error_dW"],
            }
        rows.append(row)
    return make_table(rows)


def _worst(frame: pd.DataFrame, name: str, phase: str, way: str) -> float:
    """Largest of a variant's differences in loss, dE and dW."""
    return float(np.max([median(frame, f"{way}_{k}", phase, name) for k in ("loss", "dE", "dW")]))


def table3_padding(frame: pd.DataFrame) -> Table:
    """Ignored tokens under every reduction: leaks, and differences from the problem without these tokens."""
    rows = []
    for reduction in REDUCTIONS:
        phase = f"padding/{reduction}"
        status = _status(frame, phase)
        for name in HEADS:
            rows.append({
                "reduction": reduction,
                "head": name,
                "status": status.get(name, MISSING),
                "values not 0": _whole(median(frame, "leaks", phase, name)),
                "ignored target: difference": _worst(frame, name, phase, "padded"),
                "token weight 0: difference": _worst(frame, name, phase, "weighted"),
                "error": _worst(frame, name, phase, "error"),
            })  # fmt: skip
    return make_table(rows, text_columns=3)


def table4_ignored(frame: pd.DataFrame) -> Table:
    """Time with half of the tokens ignored, against time with none ignored."""
    rows = []
    for name in HEADS:
        every, half = (median(frame, "both_ms", f"ignored/{k}", name) for k in ("none", "half"))
        row = {"head": name, "n": len(pick(frame, "both_ms", "ignored/none", name)) or None}
        rows.append(row | {"none ignored (ms)": every, "half ignored (ms)": half, "half / none": half / every})
    return make_table(rows)


def table5_answers(frame: pd.DataFrame) -> Table:
    """What the pull request claims and what its reviewers asked, answered for `fused` from the records."""

    def latency(reduction: str, name: str) -> str:
        return " + ".join(cell(median(frame, f"{k}_ms", reduction, name)) for k in ("forward", "backward")) + " ms"

    floor = floor_ms(frame, "reductions")
    over = {r: cell(median(frame, "both_ms", r, "fused") / floor) for r in REDUCTIONS}
    mib = {name: cell(median(frame, "workspace_mib", "mean", name)) for name in ("fused", "full")}
    leaks, worst = (_over_reductions(partial(value, frame, "fused")) for value in (_leaks, _ignoring))
    half, every = (median(frame, "both_ms", f"ignored/{k}", "fused") for k in ("half", "none"))
    answers = {
        "peak memory as 1 / chunks": _law_text(frame),
        "forward and backward latency (mean)": f"{latency('mean', 'fused')}, {over['mean']} × three products;"
        f" full: {latency('mean', 'full')}",
        "storage (mean)": f"{mib['fused']} MiB beyond inputs and gradients; full: {mib['full']} MiB",
        "reduction none": f"{latency('none', 'fused')}, {over['none']} × three products",
        "masking and padding": f"{cell(leaks)} values other than 0 at ignored tokens, under all reductions;"
        f" largest difference from the problem without them: {cell(worst)}",
        "half of the tokens ignored": f"{cell(half / every)} × the time with none",
        "size of a chunk": f"traffic = arithmetic at {cell(balance_tokens(frame))} tokens",
        "Triton on Blackwell": "not measured",
    }
    return make_table(({"asked": k, "answer, head fused": v} for k, v in answers.items()), text_columns=2)


def _law_text(frame: pd.DataFrame) -> str:
    fitted = law(frame, "fused")
    if fitted is None:
        return MISSING
    expected = cell(median(frame, "fused_mib", "expected", "head"))
    fixed, whole, deviation = (cell(value) for value in fitted)
    return f"workspace = {fixed} + {whole} / chunks MiB (expected {expected}); largest relative deviation {deviation}"


def _leaks(frame: pd.DataFrame, name: str, phase: str) -> float:
    return median(frame, "leaks", phase, name)


def _ignoring(frame: pd.DataFrame, name: str, phase: str) -> float:
    """Largest difference from the problem without the ignored tokens, over both ways of ignoring them."""
    return float(np.max([_worst(frame, name, phase, way) for way in ("padded", "weighted")]))


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """`chunks.<reduction>.<head>.<metric>`, `chunks.count.<head>.<n>.<metric>`, `chunks.law.<head>.<term>`, …"""
    _reductions(frame, out)
    _counts(frame, out)
    for name in HEADS:
        every, half = (median(frame, "both_ms", f"ignored/{k}", name) for k in ("none", "half"))
        out.set(f"chunks.ignored.{name}.none_ms", every, "ms")
        out.set(f"chunks.ignored.{name}.half_ms", half, "ms")
        out.set(f"chunks.ignored.{name}.half_over_none", half / every, "", ".2f")
        out.set(f"chunks.padding.{name}.leaks", _over_reductions(partial(_leaks, frame, name)), "", ".0f")
        for way in ("padded", "weighted", "error"):
            worst = _over_reductions(lambda phase, name=name, way=way: _worst(frame, name, phase, way))
            out.set(f"chunks.padding.{name}.{way}", worst)
    for name in ("tokens", "vocabulary", "hidden"):
        out.set(f"chunks.{name}", shape(frame, name), "", ".0f")
    out.set("chunks.budget_mib", shape(frame, "workspace") / MIB, "MiB")
    for metric in sorted(set(frame[frame["phase"] == "expected"]["metric"])):
        out.set(f"chunks.expected.{metric}", median(frame, metric, "expected", "head"))
    products, copy = rates(frame)
    out.set("chunks.floor.three_ms", floor_ms(frame, "chunks"), "ms")
    for name in PRODUCTS:
        out.set(f"chunks.floor.{name}_ms", median(frame, f"{name}_ms", "chunks", "floor"), "ms")
    out.set("chunks.floor.tflop_s", products / 1e12, "TFLOP/s")
    out.set("chunks.floor.copy_tb_s", copy / 1e12, "TB/s")
    out.set("chunks.balance_tokens", balance_tokens(frame), "", ".0f")
    out.set("chunks.gradients_mib", gradients_mib(frame), "MiB")


def _over_reductions(value: Callable[[str], float]) -> float:
    """The maximum of `value(phase)` over the phases of all reductions; NaN if any is NaN."""
    return float(np.max([value(f"padding/{reduction}") for reduction in REDUCTIONS]))


def _reductions(frame: pd.DataFrame, out: Numbers) -> None:
    floor = floor_ms(frame, "reductions")
    for reduction in REDUCTIONS:
        for name in HEADS:
            for metric, unit in (TIMES | {"eval_ms": "ms"} | SIZES | dict.fromkeys(ERRORS, "")).items():
                out.set(f"chunks.{reduction}.{name}.{metric}", median(frame, metric, reduction, name), unit)
            both = median(frame, "both_ms", reduction, name)
            out.set(f"chunks.{reduction}.{name}.over_floor", both / floor, "", ".2f")
            over_full = both / median(frame, "both_ms", reduction, "full")
            out.set(f"chunks.{reduction}.{name}.over_full", over_full, "", ".2f")
            out.set(f"chunks.{reduction}.{name}.n", len(pick(frame, "both_ms", reduction, name)))


def _counts(frame: pd.DataFrame, out: Numbers) -> None:
    floor = floor_ms(frame, "chunks")
    for name in COUNTED:
        for n in counts(frame):
            phase = f"chunks/{n}"
            for metric, unit in (TIMES | SIZES | dict.fromkeys((*ERRORS, "chunk_tokens"), "")).items():
                out.set(f"chunks.count.{name}.{n}.{metric}", median(frame, metric, phase, name), unit)
            over = median(frame, "both_ms", phase, name) / floor
            out.set(f"chunks.count.{name}.{n}.over_floor", over, "", ".2f")
        fitted = law(frame, name)
        fixed, whole, deviation = fitted or (math.nan,) * 3
        logits = shape(frame, "tokens") * shape(frame, "vocabulary")
        out.set(f"chunks.law.{name}.fixed_mib", fixed, "MiB")
        out.set(f"chunks.law.{name}.whole_mib", whole, "MiB")
        out.set(f"chunks.law.{name}.bytes_a_logit", whole * MIB / logits, "", ".2f")
        out.set(f"chunks.law.{name}.deviation", deviation)


TABLES = {f.__name__: f for f in (table1, table2_counts, table3_padding, table4_ignored, table5_answers)}
