"""T1M3's figures, as functions of its records alone."""

import pandas as pd
from matplotlib.figure import Figure

from t1lib.report.parts import draw_grouped, draw_phases, draw_timeline
from t1lib.report.select import median, present
from t1lib.report.style import FLOOR, PHASE_COLOURS, VARIANTS, bar_labels, subplots

HEAD_VARIANTS = ("full", "chunked", "chunked-vocabulary", "torch")


def fig1_timeline(frame: pd.DataFrame) -> Figure:
    """Exact allocations within one step (T1M3's Fig. 1 polled reserved memory: a flat line, difference D10)."""
    return draw_timeline(frame, present(frame, "at_ms", "timeline", HEAD_VARIANTS))


def fig2_peak_memory(frame: pd.DataFrame) -> Figure:
    """Exact peaks on the device over the measured steps."""
    figure, axes = subplots(2.6)
    names = present(frame, "allocated_gib", "step", HEAD_VARIANTS)
    kinds = {"allocated_gib": ("allocated", "0.45"), "reserved_gib": ("reserved", "0.75")}
    draw_grouped(axes, frame, "step", names, {k: v for k, v in kinds.items() if present(frame, k, "step", names)},
                 "peak on the device")  # fmt: skip
    return figure


def fig3_breakdown(frame: pd.DataFrame) -> Figure:
    """Where a step's time goes; a chunked head by sequence makes its gradients in the head's forward."""
    figure, axes = subplots(2.3)
    names = present(frame, "wall_ms", "step", HEAD_VARIANTS)
    draw_phases(axes, frame, "step", names)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def fig4_head_alone(frame: pd.DataFrame) -> Figure:
    """The output layer alone: loss and both gradients in time, and the memory beyond inputs and gradients."""
    figure, (time, memory) = subplots(2.6, 2)
    names = present(frame, "both_ms", "head", HEAD_VARIANTS)
    labels = [VARIANTS[n].tick() for n in names]
    forward, backward = ([median(frame, f"{k}_ms", "head", n) for n in names] for k in ("forward", "backward"))
    time.bar(labels, forward, color=PHASE_COLOURS["head forward"], width=0.55, label="loss")
    colour = PHASE_COLOURS["head backward"]
    bars = time.bar(labels, backward, bottom=forward, color=colour, width=0.55, label="gradients")
    time.bar_label(bars, [f"{a + b:.3g}" for a, b in zip(forward, backward, strict=True)], fontsize=6.5, padding=1.5)
    for name in names[:1]:  # every variant has measured it
        time.axhline(median(frame, "floor_ms", "head", name), label="three matrix products", **FLOOR)
    time.set(ylabel="median time (ms)")
    time.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=0.8, handlelength=1.4)
    mib = [median(frame, "workspace_mib", "head", n) for n in names]
    bar_labels(memory, memory.bar(labels, mib, color=[VARIANTS[n].colour for n in names], width=0.55))
    memory.set(ylabel="peak workspace (MiB)")
    for axes in (time, memory):
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
    return figure


FIGURES = {f.__name__: f for f in (fig1_timeline, fig2_peak_memory, fig3_breakdown, fig4_head_alone)}
