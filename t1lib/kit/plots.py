"""Parts of figures that both reports draw."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t1lib.kit.style import BEHIND, PHASE_COLOURS, VARIANTS, subplots
from t1lib.kit.tables import memory_unit
from t1lib.measure.records import format_number, median, pick


def draw_grouped(
    axes: Axes, frame: pd.DataFrame, phase: str, names: list[str], kinds: dict[str, tuple[str, str]], what: str
) -> None:
    """Memory as grouped bars, one group per variant; `kinds`: metric in GiB → (label, colour), one bar each."""
    scale, unit = memory_unit([median(frame, k, phase, n) for k in kinds for n in names])
    made = {label: [median(frame, k, phase, n) * scale for n in names] for k, (label, _) in kinds.items()}
    table = pd.DataFrame(made, index=[VARIANTS[name].tick() for name in names])
    if table.size:
        table.plot.bar(ax=axes, width=0.8, rot=0, color=[colour for _, colour in kinds.values()])
        axes.margins(y=0.12)
    size = 6.5 if len(names) < 4 else 5.5
    for bars in axes.containers:
        axes.bar_label(bars, fmt=lambda v: format_number(float(v)) if v else "", fontsize=size, padding=1.5)
    axes.set_ylabel(f"{what} ({unit})")
    axes.grid(axis="x", visible=False)
    if names and kinds:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def draw_phases(axes: Axes, frame: pd.DataFrame, setting: str, names: list[str]) -> None:
    """One stacked bar per variant, the first on top: its median step, divided as the medians of its phases are."""
    metrics = {phase: phase.replace(" ", "_") + "_ms" for phase in PHASE_COLOURS}
    parts = pd.DataFrame({p: {n: median(frame, m, setting, n) for n in names} for p, m in metrics.items()}).fillna(0.0)
    wall = pd.Series({name: median(frame, "wall_ms", setting, name) for name in names}, dtype=float)
    parts = parts.mul(wall / parts.sum(axis=1), axis=0)  # medians of phases do not add up to that of the step
    parts = parts.loc[:, parts.sum() > 0].rename(index=lambda name: VARIANTS[name].label)
    if parts.size:
        parts.plot.barh(ax=axes, stacked=True, width=0.5, color=PHASE_COLOURS, legend=False)
    for row, name in enumerate(names):
        at, text = (wall[name], row), format_number(float(wall[name]))
        axes.annotate(text, at, (3, 0), textcoords="offset points", va="center", fontsize=7, bbox=BEHIND)
    axes.set(xlabel="median time of a step, by phase (ms)", xlim=(0, 1.1 * max(wall, default=1.0)))
    axes.invert_yaxis()


def draw_timeline(frame: pd.DataFrame, names: list[str]) -> Figure:
    """Allocated memory over one step, from the allocator's history; reserved memory dotted if the device has it."""
    figure, axes = subplots(2.7)
    scale, unit = memory_unit([float(pick(frame, "allocated_gib", "timeline", n).max()) for n in names])
    for name in names:
        style = VARIANTS[name]
        ms = pick(frame, "at_ms", "timeline", name).to_numpy()
        progress = ms / ms[-1] if len(ms) and ms[-1] > 0 else ms
        axes.plot(progress, pick(frame, "allocated_gib", "timeline", name) * scale, color=style.colour, lw=1.1,
                  label=style.label, drawstyle="steps-post")  # fmt: skip
        reserved = pick(frame, "reserved_gib", "timeline", name)
        if len(reserved):
            axes.plot(progress, reserved * scale, color=style.colour, lw=0.9, ls=":")
    axes.set(xlabel="progress within one step", ylabel=f"memory on the device ({unit})", ylim=(0, None), xlim=(0, 1))
    if len(pick(frame, "reserved_gib", "timeline")):
        axes.plot([], [], color="0.4", lw=0.9, ls=":", label="the same, reserved")  # one legend entry for all variants
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure
