"""T1M3's tables and numbers, from its records alone."""

import pandas as pd

from t1lib.measure.records import Numbers, statuses
from t1lib.report import published
from t1lib.report.select import median, pick
from t1lib.report.t1m1_tables import differences, published_numbers
from t1lib.report.t1m3 import HEAD_VARIANTS
from t1lib.report.tables import MISSING, Table, make_table, median_iqr

STEP = dict.fromkeys(["wall_ms", "head_forward_ms", "head_backward_ms", "backward_ms"], "ms")
STEP |= {"forward_ms": "ms", "optimizer_ms": "ms"}
STEP |= {"allocated_gib": "GiB", "reserved_gib": "GiB"}
HEAD = dict.fromkeys(["both_ms", "forward_ms", "backward_ms", "host_ms", "floor_ms"], "ms")
HEAD |= {"workspace_mib": "MiB", "error_loss": "", "error_dE": "", "error_dW": ""}
OVER_FULL = (("step", "wall_ms"), ("step", "allocated_gib"), ("head", "both_ms"), ("head", "workspace_mib"))


def table1(frame: pd.DataFrame) -> Table:
    """T1M3's Table 1: the heads within a training step."""
    status = statuses(frame[frame["phase"] == "step"])
    rows = []
    for name in HEAD_VARIANTS:
        wall = pick(frame, "wall_ms", "step", name)
        rows.append({
            "head": name,
            "status": status.get(name, MISSING),
            "n": len(wall) or None,
            "wall, median [IQR] (ms)": median_iqr(wall) if len(wall) else MISSING,
            "allocated (GiB)": median(frame, "allocated_gib", "step", name),
            "reserved (GiB)": median(frame, "reserved_gib", "step", name),
            "head fwd (ms)": median(frame, "head_forward_ms", "step", name),
            "head bwd (ms)": median(frame, "head_backward_ms", "step", name),
            "other bwd (ms)": median(frame, "backward_ms", "step", name),
        })  # fmt: skip
    return make_table(rows, text_columns=2)


def table2_head(frame: pd.DataFrame) -> Table:
    """The output layer alone: time next to its floor, workspace, errors against float64."""
    status = statuses(frame[frame["phase"] == "head"])
    rows = []
    for name in HEAD_VARIANTS:
        rows.append({
            "head": name,
            "status": status.get(name, MISSING),
            "loss (ms)": median(frame, "forward_ms", "head", name),
            "both (ms)": median(frame, "both_ms", "head", name),
            "× three products": median(frame, "both_ms", "head", name) / median(frame, "floor_ms", "head", name),
            "host (ms)": median(frame, "host_ms", "head", name),
            "workspace (MiB)": median(frame, "workspace_mib", "head", name),
            "error loss": median(frame, "error_loss", "head", name),
            "error dE": median(frame, "error_dE", "head", name),
            "error dW": median(frame, "error_dW", "head", name),
        })  # fmt: skip
    return make_table(rows, text_columns=2)


def table3_published(frame: pd.DataFrame) -> Table:
    """Published against measured; the published `chunked` is by vocabulary, its head's weight untrained (D1, D2)."""
    labels = {"wall_ms": "wall (ms)", "allocated_gib": "allocated (GiB)", "reserved_gib": "reserved (GiB)"}
    rows = []
    for metric, label in labels.items():
        theirs = {head: published.T1M3[head][metric] for head in ("full", "chunked")}
        text = {head: format(value, published.digits(metric, value)) for head, value in theirs.items()}
        ours = {name: median(frame, metric, "step", name) for name in HEAD_VARIANTS}
        rows.append({
            "quantity": label,
            "full, published": text["full"],
            "full": ours["full"],
            "chunked, published": text["chunked"],
            "by sequence": ours["chunked"],
            "by vocabulary": ours["chunked-vocabulary"],
            "fused": ours["fused"],
            "chunked / full, published": theirs["chunked"] / theirs["full"],
            "by sequence / full": ours["chunked"] / ours["full"],
            "by vocabulary / full": ours["chunked-vocabulary"] / ours["full"],
            "fused / full": ours["fused"] / ours["full"],
        })  # fmt: skip
    return make_table(rows)


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """Every number that the report's prose quotes: `t1m3.step.<head>.<metric>`, `t1m3.head.<head>.<metric>`, ratios."""
    for name in HEAD_VARIANTS:
        for phase, metrics in (("step", STEP), ("head", HEAD)):
            for metric, unit in metrics.items():
                out.set(f"t1m3.{phase}.{name}.{metric}", median(frame, metric, phase, name), unit)
        for phase, metric in OVER_FULL:
            ratio = median(frame, metric, phase, name) / median(frame, metric, phase, "full")
            out.set(f"t1m3.{phase}.{name}.{metric}_over_full", ratio, "", ".3f")
        over_floor = median(frame, "both_ms", "head", name) / median(frame, "floor_ms", "head", name)
        out.set(f"t1m3.head.{name}.over_floor", over_floor, "", ".2f")
        saved = median(frame, "allocated_gib", "step", "full") - median(frame, "allocated_gib", "step", name)
        out.set(f"t1m3.step.{name}.saved_gib", saved, "GiB")
        out.set(f"t1m3.step.{name}.n", len(pick(frame, "wall_ms", "step", name)))
    out.set("t1m3.step.loss_difference", median(frame, "loss_difference", "step", "all"))
    for metric in ("tokens", "vocabulary", "hidden", "chunks"):
        out.set(f"t1m3.{metric}", median(frame, metric, "step", "all"), "", ".0f")
    out.set("t1m3.budget_mib", median(frame, "budget_mib", "step", "all"), "MiB")
    for metric in sorted({"fused_mib", *frame[frame["phase"] == "expected"]["metric"]}):
        out.set(f"t1m3.expected.{metric}", median(frame, metric, "expected", "head"))
    published_numbers("t1m3", published.T1M3, out)
    full, chunked = published.T1M3["full"], published.T1M3["chunked"]
    out.set("t1m3.published.wall_over_full", chunked["wall_ms"] / full["wall_ms"], "", ".3f")
    for kind in ("allocated", "reserved"):
        out.set(f"t1m3.published.{kind}_saved_gib", full[f"{kind}_gib"] - chunked[f"{kind}_gib"], "GiB", ".2f")


TABLES = {
    "table1": table1,
    "table2_head": table2_head,
    "table3_published": table3_published,
    "table4_differences": lambda frame: differences("T1M3"),
}
