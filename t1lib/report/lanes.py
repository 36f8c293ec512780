"""A traced step as lanes: what runs when, beside what, and where nothing does."""

import pandas as pd
from matplotlib.figure import Figure

from t1lib.report.select import spans
from t1lib.report.style import PHASE_COLOURS, subplots

HOST_SHADES = {
    "weights": "0.35", "weights again": "0.55", "gradients": "0.45", "update": "0.75", "state": "0.65",
    "inputs": "0.85", "device update": "0.25",
}  # fmt: skip
IDLE = {"facecolor": (0.97, 0.85, 0.83), "edgecolor": "none"}


def _busy_ms(bars: pd.DataFrame, until: float) -> float:
    """Time before `until` in which at least one of the spans runs."""
    busy, reached = 0.0, 0.0
    for start, end in sorted(zip(bars["start_ms"], bars["end_ms"], strict=True)):
        start, end = max(start, reached), min(end, until)
        if end > start:
            busy, reached = busy + end - start, end
    return busy


def _end(bars: pd.DataFrame) -> float:
    return float(bars["end_ms"].max()) if len(bars) else 0.0


def draw_lanes(frame: pd.DataFrame, variant: str, lanes: dict[str, str]) -> Figure:
    """One traced step: what each lane does when, and how much of the time until the computing ends it does nothing."""
    figure, axes = subplots(2.4)
    found = {lane: spans(frame, variant, lane) for lane in lanes}
    found = {lane: bars[bars["step"] == bars["step"].min()] for lane, bars in found.items()}
    stop, last = _end(found["compute"]), max(map(_end, found.values()))
    named: set[str] = set()
    for row, lane_bars in enumerate(found.values()):
        axes.broken_barh([(0, stop)], (row - 0.36, 0.72), label="idle" if row == 0 else None, **IDLE)
        for phase, group in lane_bars.groupby("phase", sort=False):
            bars = list(zip(group["start_ms"], group["end_ms"] - group["start_ms"], strict=True))
            colour, legend = PHASE_COLOURS.get(phase) or HOST_SHADES[phase], None if phase in named else phase
            named.add(phase)
            edge = {"edgecolor": "white", "linewidth": 0.3} if phase == "update" else {"edgecolor": "none"}
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolor=colour, label=legend, **edge)
        share = 1 - _busy_ms(lane_bars, stop) / max(stop, 1e-9)
        axes.annotate(f"{share:.0%} idle", (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    axes.set_yticks(range(len(lanes)), list(lanes.values()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="time within the step (ms)", xlim=(0, last or 1))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure
