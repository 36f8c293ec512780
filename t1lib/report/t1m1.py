"""T1M1's figures, as functions of its records alone. The notebook defines the phases of the records."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from t1lib.kit.plots import draw_grouped, draw_phases, draw_timeline, memory_unit
from t1lib.kit.select import layer_ms, median, pick, present
from t1lib.kit.style import FLOOR, VARIANTS, bar_labels, plain_numbers, subplots
from t1lib.measure.records import numeric
from t1lib.report.lanes import draw_lanes

MODES = ("gpu", "ckpt", "slide", "fsdp")
OWN = (*MODES, "slide-device")  # variants in the report's own setting
ABLATION = {  # the three in the middle are of runs before `stream`, which has one switch for all overlaps
    "slide": "overlapped",
    "no-in": "weights\nnot prefetched",
    "no-out": "gradients\nnot overlapped",
    "no-update": "update\nnot overlapped",
    "none": "no\noverlap",
    "device": "overlapped,\ndevice updates",
}
LANES = {"in": "weights in", "compute": "compute", "out": "gradients out", "update": "CPU update"}


def fig1_breakdown(frame: pd.DataFrame) -> Figure:
    """Time of a step's phases; the overlapped CPU update is drawn next to it, not added to it (difference D6)."""
    figure, axes = subplots(2.6)
    modes = present(frame, "wall_ms", "own", MODES)
    draw_phases(axes, frame, "own", modes)
    for row, mode in enumerate(modes):
        update = layer_ms(frame, mode, "update", "update").sum()
        if update > 0:
            axes.barh(row + 0.36, update, height=0.16, color="0.75", hatch="////", edgecolor="0.4", linewidth=0.5,
                      label="CPU update, overlapped")  # fmt: skip
    floor = median(frame, "link_ms", "own", "slide")
    if floor > 0:
        axes.axvline(floor, label="link floor of slide", **FLOOR)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def fig2_peak_memory(frame: pd.DataFrame) -> Figure:
    """Exact memory peaks over the measured steps, from a fresh process per variant."""
    figure, (device, host) = subplots(2.5, 2)
    modes = present(frame, "allocated_gib", "own", MODES)
    kinds = {"allocated_gib": ("allocated", "0.45"), "reserved_gib": ("reserved", "0.75")}
    kinds = {k: v for k, v in kinds.items() if len(pick(frame, k, "own"))}
    draw_grouped(device, frame, "own", modes, kinds, "peak on the device")
    kinds = {"host_setup_gib": ("during set-up", "0.45"), "host_gib": ("steady state", "0.75")}
    draw_grouped(host, frame, "own", modes, kinds, "peak host memory")
    return figure


def fig3_timeline(frame: pd.DataFrame) -> Figure:
    return draw_timeline(frame, present(frame, "at_ms", "timeline", MODES))


def _per_layer(frame: pd.DataFrame, axes: Axes, phase: str, lanes: tuple[str, ...] = ("compute",)) -> None:
    for mode in MODES:
        style = VARIANTS[mode]
        for lane in lanes:
            values = layer_ms(frame, mode, lane, phase)
            # Slide's recomputation has spans of its own; ckpt's backward spans, and those of CUDA graphs, include it.
            if phase == "backward" and mode == "slide" and len(values):
                values = values.add(layer_ms(frame, mode, lane, "recompute"), fill_value=0)
            if len(values):
                label = style.label + (" (on the CPU)" if lane == "update" else "")
                axes.plot(values.index, values, color=style.colour, marker=style.marker, ms=3, lw=1, label=label)
    axes.set(xlabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def fig4_layer_forward(frame: pd.DataFrame) -> Figure:
    """Forward time by layer, instrumented pass."""
    figure, axes = subplots(2.3)
    _per_layer(frame, axes, "forward")
    axes.set(ylabel="forward (ms)", ylim=(0, None))
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def fig5_layer_backward(frame: pd.DataFrame) -> Figure:
    """Backward by layer, and the recomputation in it where a trace can separate it, instrumented pass."""
    figure, (backward, recompute) = subplots(2.4, 2, sharey=True)
    _per_layer(frame, backward, "backward")
    _per_layer(frame, recompute, "recompute")
    backward.set(ylabel="time (ms)", ylim=(0, None), title="backward with recomputation")
    recompute.set(title="of it, recomputation")
    figure.legend(*backward.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def fig6_layer_update(frame: pd.DataFrame) -> Figure:
    """Update by layer, instrumented pass: on the device for gpu and ckpt, on the CPU for slide."""
    figure, axes = subplots(2.3)
    _per_layer(frame, axes, "update", ("compute", "update"))
    axes.set(ylabel="update (ms)", yscale="log")
    plain_numbers(axes)
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def fig7_lanes(frame: pd.DataFrame) -> Figure:
    """One traced step of slide in the report's own setting."""
    return draw_lanes(frame, "slide", LANES)


def fig8_ablation(frame: pd.DataFrame) -> Figure:
    """What each overlap is worth: slide's step with one or all switched off; and with updates on the device."""
    figure, axes = subplots(2.5)
    names = present(frame, "wall_ms", "ablation", ABLATION)
    values = [median(frame, "wall_ms", "ablation", n) for n in names]
    bars = axes.bar([ABLATION[n] for n in names], values, color=VARIANTS["slide"].colour, width=0.55)
    bar_labels(axes, bars)
    # Each bar has its own floor: updates on the device leave the first layers' weights there.
    for place, name in enumerate(names):
        floor = median(frame, "link_ms", "own", "slide-device" if name == "device" else "slide")
        axes.plot([place - 0.45, place + 0.45], [floor] * 2, label=None if place else "link floor", **FLOOR)
    axes.set(ylabel="median time of a step (ms)")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0))
    return figure


def fig9_tokens(frame: pd.DataFrame) -> Figure:
    """Time of a step against its tokens, and the floors of link, host update and computing."""
    figure, axes = subplots(2.9)
    rows = _by_tokens(frame, "wall_ms")
    for mode in MODES:
        medians = rows[rows["variant"] == mode].groupby("tokens")["value"].median()
        if len(medians):
            style = VARIANTS[mode]
            axes.plot(medians.index, medians, color=style.colour, marker=style.marker, ms=4, lw=1.1, label=style.label)
    below = FLOOR | {"linestyle": ":", "linewidth": 3.0, "color": "0.65"}  # may coincide with the link's
    axes.axhline(median(frame, "update_floor_ms", "own", "slide"), label="floor, update", **below)
    axes.axhline(median(frame, "link_ms", "own", "slide"), label="floor, link", **FLOOR)
    computing = _by_tokens(frame, "compute_floor_ms").groupby("tokens")["value"].median()
    axes.plot(computing.index, computing, label="floor, computing", **FLOOR | {"linestyle": "-."})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_numbers(axes)
    ticks = sorted(rows["tokens"].unique())
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set(xlabel="tokens a step", ylabel="median time of a step (ms)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _by_tokens(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of a metric in the sweep over tokens, with the column `tokens`."""
    rows = numeric(frame)
    rows = rows[(rows["metric"] == metric) & rows["phase"].str.startswith("tokens/")]
    return rows.assign(tokens=rows["phase"].str.removeprefix("tokens/").astype(int))


def fig10_budget(frame: pd.DataFrame) -> Figure:
    """A real step's time against the device memory it takes: slide under several budgets, next to the modes."""
    figure, axes = subplots(2.7)
    memory = "reserved_gib" if len(pick(frame, "reserved_gib", "real")) else "allocated_gib"
    names = list(dict.fromkeys(frame[frame["phase"] == "budget"]["variant"]))
    points = [(median(frame, memory, "budget", n), median(frame, "wall_ms", "budget", n)) for n in names]
    points = sorted(p for p in points if p[0] == p[0] and p[1] == p[1])
    scale, unit = memory_unit([x for x, _ in points])
    style = VARIANTS["slide"]
    axes.plot([x * scale for x, _ in points], [y for _, y in points], color=style.colour, marker=style.marker, ms=4,
              lw=1.1, label="slide, by budget")  # fmt: skip
    for mode in present(frame, "wall_ms", "real", MODES):
        style = VARIANTS[mode]
        x, y = median(frame, memory, "real", mode) * scale, median(frame, "wall_ms", "real", mode)
        axes.plot([x], [y], color=style.colour, marker=style.marker, ms=6, ls="none", mfc="none", label=style.label)
    held = [median(frame, memory, "real", m) for m in present(frame, memory, "real", MODES)] + [x for x, _ in points]
    if held and max(held) > 8 * min(held):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel=f"{memory.removesuffix('_gib')} on the device ({unit})", ylim=(0, 1.08 * axes.get_ylim()[1]))
    axes.set(ylabel="median time of a step (ms)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def fig11_real_lanes(frame: pd.DataFrame) -> Figure:
    """One traced step of slide with the real loss and AdamW; updates of the step before may still run at its start."""
    lanes = {"in": "link in", "compute": "compute", "out": "link out", "update": "updates"}
    return draw_lanes(frame, "slide-real", lanes)


ROUNDING = ("gpu-whole", "gpu-single")  # gpu with other micro-batches


def losses_apart(frame: pd.DataFrame, variants: Sequence[str]) -> pd.Series:
    """By step: the largest difference between gpu's loss and those of `variants`, in nats."""
    losses = [pick(frame, "loss", "parity", mode).reset_index(drop=True) for mode in ("gpu", *variants)]
    return pd.concat([(loss - losses[0]).abs() for loss in losses[1:]], axis=1).max(axis=1)


def fig12_parity(frame: pd.DataFrame) -> Figure:
    """Losses of gpu and slide by step; and their distance, next to that of a gpu run that sums in another order."""
    figure, (losses, apart) = subplots(2.5, 2)
    for mode, width in (("gpu", 2.4), ("slide", 0.9)):
        style = VARIANTS[mode]
        losses.plot(pick(frame, "loss", "parity", mode).to_numpy(), color=style.colour, lw=width, label=style.label)
    labels = {"slide and gpu": ("slide",), "gpu, with other micro-batches, and gpu": ROUNDING}
    for label, variants in labels.items():
        found, style = losses_apart(frame, variants), VARIANTS[variants[0].split("-")[0]]
        found = found[found > 0]
        label += "" if len(found) else ": no difference"
        apart.plot(found.index, found, color=style.colour, marker=style.marker, ms=2.5, ls="none", label=label)
    losses.set(xlabel="training step", ylabel="loss (nats a token)", ylim=(0, 1.05 * losses.get_ylim()[1]))
    apart.set(xlabel="training step", ylabel="difference (nats a token)", xlim=losses.get_xlim(), ylim=(0, None))
    apart.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    losses.legend(loc="best")
    apart.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


FIGURES = {
    f.__name__: f
    for f in (
        fig1_breakdown, fig2_peak_memory, fig3_timeline, fig4_layer_forward, fig5_layer_backward, fig6_layer_update,
        fig7_lanes, fig8_ablation, fig9_tokens, fig10_budget, fig11_real_lanes, fig12_parity,
    )
}  # fmt: skip
