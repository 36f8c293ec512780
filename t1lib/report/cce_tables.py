"""The tables of `cce`, from its records alone."""

from collections.abc import Callable

import pandas as pd

from t1lib.kit import published
from t1lib.kit.select import median, pick
from t1lib.kit.tables import MISSING, Table, make_table, median_iqr
from t1lib.measure.records import numeric, statuses
from t1lib.report.cce_select import (
    DATA,
    METHODS,
    bar_rows,
    beside,
    describe,
    filter_pairs,
    is_filtered,
    mean_variants,
    measured,
    own_shape,
    phases,
    three,
    variant_label,
    variants,
    workspace,
)

ERRORS = ("loss", "dE", "dW")
WORK = {"logits": "loss alone", "three": "loss, gradients", "plain": "with the change"}
OVER = {"logits": "logits product", "three": "three products", "plain": "without it"}


def table1(frame: pd.DataFrame) -> Table:
    """Time and memory on the paper's own shape, for the loss, the gradients, and both."""
    shape = own_shape(frame)
    phase, status = f"flat/{shape}", statuses(frame[frame["phase"] == f"flat/{shape}"])
    logits, all_three = median(frame, "logits_ms", phase, "floor"), three(frame, phase)
    rows = []
    for name in mean_variants(frame, phase):
        both = pick(frame, "both_ms", phase, name)
        loss = median(frame, "loss_ms", phase, name)
        rows.append({
            "head": name,
            "status": status.get(name, MISSING),
            "loss (ms)": loss,
            "× logits": loss / logits,
            "backward (ms)": median(frame, "backward_ms", phase, name),
            "loss + gradients, median [IQR] (ms)": median_iqr(both),
            "× three": median(frame, "both_ms", phase, name) / all_three,
            "loss (MiB)": workspace(frame, shape, name, "loss_workspace_mib"),
            "loss + gradients (MiB)": workspace(frame, shape, name),
        })  # fmt: skip
    return make_table(rows, text_columns=2)


def table2_bars(frame: pd.DataFrame) -> Table:
    """The bars for `fused`: its workspace and time for each kind of work on each shape, next to the bar."""
    rows = []
    for row in bar_rows(frame):
        rows.append({
            "shape": row["shape"],
            "work": WORK[row["over"]],
            "head": variant_label(row["variant"]),
            "workspace (MiB)": row["mib"],
            "at most (MiB)": row["most_mib"],
            "time (ms)": row["ms"],
            "over": OVER[row["over"]],
            "ratio": float(f"{row['ratio']:.3f}") if row["ratio"] == row["ratio"] else None,
            "at most": row["limit"],
            "met": "yes" if row["met"] else "no",
        })  # fmt: skip
    return make_table(rows, text_columns=3)


def table3_peers(frame: pd.DataFrame) -> Table:
    """Each method on each shape, next to `fused` within the same memory (or the `fused` that takes least)."""
    rows = []
    for phase in phases(frame, "flat"):
        shape, status = phase.split("/")[1], statuses(frame[frame["phase"] == phase])
        for name in (v for v in variants(frame, phase) if v in METHODS):
            own, ms = beside(frame, shape, name), median(frame, "both_ms", phase, name)
            ours = median(frame, "both_ms", phase, own) if own else float("nan")
            rows.append({
                "shape": f"{shape}: {describe(frame, phase)}",
                "head": variant_label(name),
                "status": status.get(name, MISSING),
                "loss + gradients (ms)": ms,
                "× three": ms / three(frame, phase),
                "workspace (MiB)": workspace(frame, shape, name),
                "beside it": variant_label(own) if own else MISSING,
                "its time (ms)": ours,
                "its workspace (MiB)": workspace(frame, shape, own) if own else None,
                "its time / time": ours / ms,
            })  # fmt: skip
    return make_table(rows, text_columns=3)


def table4_errors(frame: pd.DataFrame) -> Table:
    """Relative errors of loss, dE and dW against the wide reference, and their ratios to those of `full`."""
    rows = []
    for phase in measured(frame):
        data, shape = phase.split("/")
        for name in mean_variants(frame, phase):
            found = {which: median(frame, f"error_{which}", phase, name) for which in ERRORS}
            base = {which: median(frame, f"error_{which}", phase, "full") for which in ERRORS}
            if any(value == value for value in found.values()):
                row = {"data": DATA[data], "shape": shape, "head": variant_label(name)}
                row |= {f"error of {which}": found[which] for which in ERRORS}
                rows.append(row | {f"{which} / full's": _over(found[which], base[which]) for which in ERRORS})
    return make_table(rows or [{"data": MISSING, "shape": MISSING}], text_columns=3)


def _over(up: float, down: float) -> float | None:
    """The ratio of two errors; None if `down` is zero or missing."""
    return up / down if down > 0 else None


def table5_sparsity(frame: pd.DataFrame) -> Table:
    """How much of the softmax lies below the filter's bound, and how many tiles the filter has to compute."""
    rows = []
    found = numeric(frame[frame["phase"] == "sparsity"])
    for data in (d for d in DATA if d in set(found["variant"])):
        rows.append({
            "hidden states": DATA[data],
            "mean largest probability": float(pick(frame, "probability", "sparsity", data).iloc[0]),
            "mass below the bound": median(frame, "mass_below", "sparsity", data),
            "entries below it": median(frame, "entries_below", "sparsity", data),
            "tiles to compute": median(frame, "tiles", "sparsity", data),
            "the same, vocabulary sorted": median(frame, "tiles_sorted", "sparsity", data),
        })  # fmt: skip
    return make_table(rows or [{"hidden states": MISSING, "tiles to compute": MISSING}])


def table6_filter(frame: pd.DataFrame) -> Table:
    """What gradient filtering saves and costs: each filtered head next to the same head without the filter."""
    rows = []
    for phase in measured(frame):
        data, shape = phase.split("/")
        for name, exact in filter_pairs(frame, phase):
            times = {v: median(frame, "both_ms", phase, v) for v in (name, exact)}
            errors = {v: [median(frame, f"error_{w}", phase, v) for w in ("dE", "dW")] for v in (name, exact)}
            rows.append({
                "data": DATA[data],
                "shape": shape,
                "filtered": variant_label(name),
                "exact": variant_label(exact),
                "filtered (ms)": times[name],
                "exact (ms)": times[exact],
                "time / exact": times[name] / times[exact],
                "error of dE": errors[name][0],
                "exact's of dE": errors[exact][0],
                "error of dW": errors[name][1],
                "exact's of dW": errors[exact][1],
            })  # fmt: skip
    return make_table(rows or [{"data": MISSING, "shape": MISSING}], text_columns=4)


def _published(frame: pd.DataFrame, kinds: dict[str, str], ours: dict[str, Callable[[str], float]]) -> Table:
    """A row for each published method, then those that only this kit measures; `kinds`: key → column."""
    phase = f"flat/{own_shape(frame)}"
    names = [name for name, _ in published.CCE.values()]
    further = [(variant_label(v), v, {}) for v in mean_variants(frame, phase) if v not in names and not is_filtered(v)]
    rows = []
    for label, name, values in [*((k, *v) for k, v in published.CCE.items()), *further]:
        row: dict[str, object] = {"method": label}
        for kind, column in kinds.items():
            row[f"{column}, published"] = values.get(kind)
            row[f"{column}, measured"] = ours[kind](name) if name else None
        rows.append(row)
    return make_table(rows)


def table7_published_ms(frame: pd.DataFrame) -> Table:
    """The times (ms) of the paper's Table 1, on an A100, next to the measured ones; its gradient is the backward."""
    phase = f"flat/{own_shape(frame)}"
    ours = {k: lambda v, m=m: median(frame, m, phase, v) for k, m in
            {"loss_ms": "loss_ms", "gradient_ms": "backward_ms", "both_ms": "both_ms"}.items()}  # fmt: skip
    ours["over_full"] = lambda v: median(frame, "both_ms", phase, v) / median(frame, "both_ms", phase, "full")
    columns = {"loss_ms": "loss (ms)", "gradient_ms": "gradients (ms)", "both_ms": "both (ms)"}
    return _published(frame, columns | {"over_full": "both / full"}, ours)


def table8_published_mib(frame: pd.DataFrame) -> Table:
    """The memory of the paper's Table 1, which includes the gradients: they are added to the measured workspaces."""
    shape = own_shape(frame)
    gradients = median(frame, "gradients_mib", f"flat/{shape}", "all")
    ours = {
        "loss_mb": lambda v: workspace(frame, shape, v, "loss_workspace_mib"),
        "both_mb": lambda v: workspace(frame, shape, v) + gradients,
    }
    return _published(frame, {"loss_mb": "loss (MiB)", "both_mb": "loss + gradients (MiB)"}, ours)


TABLES = {
    "table1": table1,
    "table2_bars": table2_bars,
    "table3_peers": table3_peers,
    "table4_errors": table4_errors,
    "table5_sparsity": table5_sparsity,
    "table6_filter": table6_filter,
    "table7_published_ms": table7_published_ms,
    "table8_published_mib": table8_published_mib,
}
