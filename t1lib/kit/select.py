"""Selections from records, shared by figures, tables and numbers."""

from collections.abc import Iterable

import pandas as pd

from t1lib.measure.records import numeric


def pick(frame: pd.DataFrame, metric: str, phase: str = "", variant: str | None = None) -> pd.Series:
    """Values of a metric in a phase (of one variant if given), in the order in which they were measured."""
    rows = numeric(frame)
    rows = rows[(rows["metric"] == metric) & (rows["phase"] == phase)]
    return (rows if variant is None else rows[rows["variant"] == variant])["value"]


def present(frame: pd.DataFrame, metric: str, phase: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that have a value of this metric."""
    return [n for n in names if len(pick(frame, metric, phase, n))]


def median(frame: pd.DataFrame, metric: str, phase: str, variant: str) -> float:
    """Median of a variant's samples; NaN where there are none."""
    return float(pick(frame, metric, phase, variant).median())


def spans(frame: pd.DataFrame, variant: str, lane: str, phase: str | None = None) -> pd.DataFrame:
    """Spans of a variant on a lane: columns `step` (traced), `phase`, `layer`, `start_ms`, `end_ms`."""
    rows = numeric(frame)
    rows = rows[(rows["variant"] == variant) & rows["phase"].str.startswith(f"span/{lane}/")]
    parts = rows["phase"].str.split("/", expand=True)
    if not len(rows):
        return pd.DataFrame(columns=["step", "phase", "layer", "start_ms", "end_ms"])
    rows = rows.assign(span=parts[2], layer=parts[3].astype(int))
    key = ["step", "span", "layer"]  # with micro-batches, a layer has several spans of one phase per step
    rows = rows.assign(piece=rows.groupby([*key, "metric"]).cumcount())
    table = rows.pivot_table(index=[*key, "piece"], columns="metric", values="value").reset_index()
    table = table.rename(columns={"span": "phase"})
    return table if phase is None else table[table["phase"] == phase]


def layer_ms(frame: pd.DataFrame, variant: str, lane: str, phase: str) -> pd.Series:
    """Median duration by layer (ms) over the traced steps; without layer −1, which is work outside the stack."""
    found = spans(frame, variant, lane, phase)
    found = found[found["layer"] >= 0]
    steps = found.assign(ms=found["end_ms"] - found["start_ms"]).groupby(["step", "layer"])["ms"].sum()
    return steps.groupby("layer").median()
