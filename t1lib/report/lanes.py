"""A traced step as lanes: what runs when, what overlaps, and where lanes are idle."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from t1lib.kit.select import spans
from t1lib.kit.style import PHASE_COLOURS, subplots

HOST_SHADES = {
    "weights": "0.35", "weights again": "0.55", "gradients": "0.45", "update": "0.75", "state": "0.65",
    "inputs": "0.85", "device update": "0.25",
}  # fmt: skip
IDLE = {"facecolor": (0.97, 0.85, 0.83), "edgecolor": "none"}
REST = "left by the step before"


def _busy_ms(bars: pd.DataFrame, until: float) -> float:
    """Time before `until` (ms) during which at least one of the spans runs."""
    busy, reached = 0.0, 0.0
    for start, end in sorted(zip(bars["start_ms"], bars["end_ms"], strict=True)):
        start, end = max(start, reached), min(end, until)
        if end > start:
            busy, reached = busy + end - start, end
    return busy


def _rest(bars: pd.DataFrame, stop: float) -> pd.DataFrame:
    """The part of a lane's spans after `stop`, shifted to where it lies at the beginning of the next step."""
    left = bars[bars["end_ms"] > stop]
    return left.assign(start_ms=left["start_ms"].clip(lower=stop) - stop, end_ms=left["end_ms"] - stop)


def _end(bars: pd.DataFrame) -> float:
    return float(bars["end_ms"].max()) if len(bars) else 0.0


def draw_lanes(frame: pd.DataFrame, variant: str, lanes: dict[str, str]) -> Figure:
    """One traced step: what each lane does when, and what share of the time until computing ends it is idle.

    Work left over by the step before is not traced; what this step leaves over is drawn in its place.
    """
    figure, axes = subplots(2.4)
    found = {lane: spans(frame, variant, lane) for lane in lanes}
    found = {lane: bars[bars["step"] == bars["step"].min()] for lane, bars in found.items()}
    stop, last = _end(found["compute"]), max(map(_end, found.values()))
    named: set[str] = set()
    for row, bars in enumerate(found.values()):
        axes.broken_barh([(0, stop)], (row - 0.36, 0.72), label="idle" if row == 0 else None, **IDLE)
        rest = _rest(bars, stop).assign(phase=REST)
        for phase, group in pd.concat([bars, rest]).groupby("phase", sort=False):
            times = list(zip(group["start_ms"], group["end_ms"] - group["start_ms"], strict=True))
            axes.broken_barh(times, (row - 0.36, 0.72), label=None if phase in named else phase, **_look(phase))
            named.add(phase)
        share = 1 - _busy_ms(pd.concat([bars, rest]), stop) / max(stop, 1e-9)
        axes.annotate(f"{share:.0%} idle", (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    axes.set_yticks(range(len(lanes)), list(lanes.values()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="time within the step (ms)", xlim=(0, last or 1))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def _look(phase: str) -> dict[str, Any]:
    if phase == REST:
        return {"facecolor": "0.9", "edgecolor": "0.6", "hatch": "/////", "linewidth": 0.3}
    edge = {"edgecolor": "white", "linewidth": 0.3} if phase == "update" else {"edgecolor": "none"}
    return {"facecolor": PHASE_COLOURS.get(phase) or HOST_SHADES[phase]} | edge
