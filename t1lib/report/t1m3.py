"""T1M3's figures, as functions of its records alone."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from t1lib.measure.records import format_number
from t1lib.report.parts import draw_grouped, draw_phases, draw_timeline
from t1lib.report.select import median, present
from t1lib.report.style import FLOOR, PHASE_COLOURS, VARIANTS, subplots

HEAD_VARIANTS = ("full", "chunked", "chunked-vocabulary", "fused", "torch")


def fig1_timeline(frame: pd.DataFrame) -> Figure:
    """Exact allocations within one step (T1M3's Fig. 1 polled reserved memory, a flat line: difference D10)."""
    return draw_timeline(frame, present(frame, "at_ms", "timeline", HEAD_VARIANTS))


def fig2_peak_memory(frame: pd.DataFrame) -> Figure:
    """Exact peaks of device memory over the measured steps."""
    figure, axes = subplots(2.6)
    names = present(frame, "allocated_gib", "step", HEAD_VARIANTS)
    kinds = {"allocated_gib": ("allocated", "0.45"), "reserved_gib": ("reserved", "0.75")}
    draw_grouped(axes, frame, "step", names, {k: v for k, v in kinds.items() if present(frame, k, "step", names)},
                 "peak on the device")  # fmt: skip
    return figure


def fig3_breakdown(frame: pd.DataFrame) -> Figure:
    """Where a step's time goes; `chunked` by sequence and `fused` compute their gradients in the head's forward."""
    figure, axes = subplots(2.3)
    names = present(frame, "wall_ms", "step", HEAD_VARIANTS)
    draw_phases(axes, frame, "step", names)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def fig4_head_alone(frame: pd.DataFrame) -> Figure:
    """The output layer alone: time of the loss and of both gradients, and memory beyond inputs and gradients."""
    figure, (time, memory) = subplots(2.5, 2, sharey=True)
    names = present(frame, "both_ms", "head", HEAD_VARIANTS)
    labels = [VARIANTS[n].tick() for n in names]
    forward, backward = ([median(frame, f"{k}_ms", "head", n) for n in names] for k in ("forward", "backward"))
    time.barh(labels, forward, color=PHASE_COLOURS["head forward"], height=0.55, label="loss")
    colour = PHASE_COLOURS["head backward"]
    bars = time.barh(labels, backward, left=forward, color=colour, height=0.55, label="gradients")
    both = [format_number(a + b) for a, b in zip(forward, backward, strict=True)]
    time.bar_label(bars, both, fontsize=6.5, padding=1.5)
    for name in names[:1]:  # every variant has measured this floor
        time.axvline(median(frame, "floor_ms", "head", name), label="three matrix products", **FLOOR)
    mib = [median(frame, "workspace_mib", "head", n) for n in names]
    bars = memory.barh(labels, mib, color=[VARIANTS[n].colour for n in names], height=0.55)
    memory.bar_label(bars, [format_number(value) for value in mib], fontsize=6.5, padding=1.5)
    for axes, what in ((time, "median time (ms)"), (memory, "peak workspace (MiB)")):
        axes.set_xlabel(what)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.15)
        axes.xaxis.set_major_locator(MaxNLocator(5, prune="upper"))  # a tick label at the edge would be cut off
    time.invert_yaxis()  # shared: the first variant on top
    figure.legend(*time.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


FIGURES = {f.__name__: f for f in (fig1_timeline, fig2_peak_memory, fig3_breakdown, fig4_head_alone)}
