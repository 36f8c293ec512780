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
