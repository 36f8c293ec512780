"""The figures of `cce`, as functions of its records alone; `t1lib.measure.head_run` defines their phases."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from t1lib.kit.select import median
from t1lib.kit.style import FLOOR, SHADES, WIDTH, subplots
from t1lib.measure.head_cases import FILTER_EPS
from t1lib.measure.records import numeric
from t1lib.report.cce_select import (
    DATA,
    METHODS,
    bar_rows,
    describe,
    is_filtered,
    phases,
    plain_variant,
    three,
    variant_label,
    variant_style,
    variants,
    workspace,
)


def _marker_size(mib: float) -> float:
    """Marker area in points²: 14 for no workspace, growing by a constant step per doubling well above 16 MiB."""
    return 14 + 11 * np.log2(1 + max(mib, 0.0) / 16)


def _plain_log(axis: object, subs: tuple[float, ...]) -> None:
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_errors(frame: pd.DataFrame, axes: Axes, phase: str) -> list[str]:
    """Plot error of dE against time for every variant, small markers over large ones. Returns the variants drawn."""
    floor, shape = three(frame, phase), phase.split("/")[1]
    points = []
    for name in variants(frame, phase):
        time, error = median(frame, "both_ms", phase, name), median(frame, "error_dE", phase, name)
        mib = workspace(frame, shape, name)
        if time > 0 and error > 0 and mib == mib:
            points.append((_marker_size(mib), time / floor, error, name))
    for size, x, y, name in sorted(points, reverse=True):
        look = variant_style(name)
        axes.scatter(x, y, s=size, marker=look.marker, edgecolor=look.colour, linewidth=1.0,
                     facecolor=_face(frame, phase, name), zorder=3)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="time / three matrix products")
    _plain_log(axes.xaxis, (1, 1.5, 2, 3, 5, 7))
    axes.margins(0.12)
    return [name for *_, name in points]


def _face(frame: pd.DataFrame, phase: str, name: str) -> tuple[float, ...] | str:
    """A marker's fill: pale; for `fused` hollow in its second workspace, solid in a third."""
    own = [n for n in variants(frame, phase) if n not in METHODS and not is_filtered(n)]
    colour = variant_style(name).colour
    return ((*colour, 0.45), "none", colour)[min(own.index(name), 2) if name in own else 0]


def fig1_error_time_memory(frame: pd.DataFrame) -> Figure:
    """Error of dE against time, marker area by workspace: on peaked random data and on a model's hidden states."""
    found = [*phases(frame, "peaked"), *phases(frame, "real")]
    figure, panels = subplots(3.4, max(len(found), 1), squeeze=False, sharey=True)
    handles: dict[str, Line2D] = {}
    for axes, phase in zip(panels[0], found, strict=False):
        for name in _draw_errors(frame, axes, phase):
            look, face = variant_style(name), _face(frame, phase, name)
            handles[variant_label(name)] = Line2D([], [], ls="none", marker=look.marker, ms=5.5, color=look.colour,
                                                  markerfacecolor=face)  # fmt: skip
        axes.set_title(f"{DATA[phase.split('/')[0]]}, {describe(frame, phase)}")
    panels[0][0].set_ylabel("relative error of dE")
    for mib in (0, 256, 4096, 24576):
        label = f"{mib} MiB" if mib else "area: workspace 0"
        handles[label] = Line2D([], [], ls="none", marker="o", color="0.6", ms=_marker_size(mib) ** 0.5)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, columnspacing=1.2)
    return figure


def fig2_sparsity(frame: pd.DataFrame) -> Figure:
    """Mean probability of the k-th most probable token, on random operands and on those of a trained model."""
    figure, axes = subplots(2.8)
    rows = numeric(frame)
    rows = rows[(rows["phase"] == "sparsity") & (rows["metric"] == "probability")]
    for index, (data, found) in enumerate(rows.groupby("variant", sort=True)):
        kept = found[found["value"] > 0]
        axes.plot(kept["step"].astype(float), kept["value"], color=SHADES[index], lw=1.5, marker="os^"[index], ms=2.5,
                  label=f"hidden states: {DATA[data]}")  # fmt: skip
    axes.axhline(FILTER_EPS, label="the filter's bound, $2^{-12}$", **FLOOR)
    axes.set(xscale="log", yscale="log", xlabel="rank of the token", ylabel="mean probability")
    axes.legend(loc="lower left")
    return figure


def _draw_bars(axes: Axes, rows: list[dict[str, object]], shapes: list[str], label: str) -> None:
    """Groups of points, one point per shape, each with a horizontal mark at the limit that it must not exceed."""
    groups = list(dict.fromkeys((r["variant"], r["over"]) for r in sorted(rows, key=_order)))
    style = {s: dict(marker="os^DP"[i % 5], color=SHADES[i % 5], label=f"shape {s}") for i, s in enumerate(shapes)}
    marks: tuple[list[float], ...] = ([], [], [])
    for at, group in enumerate(groups):
        own = [row for row in rows if (row["variant"], row["over"]) == group]
        for index, row in enumerate(own):
            x = at + (index - (len(own) - 1) / 2) * 0.27
            for found, value in zip(marks, (row["limit"], x - 0.12, x + 0.12), strict=True):
                found.append(value)
            axes.plot([x], [row["ratio"]], ms=4, ls="none", **style[row["shape"]])
            away = 1 if row["ratio"] > row["limit"] else -1  # on the side away from the mark
            if row["ratio"] == row["ratio"]:
                axes.annotate(f"{row['ratio']:.2f}", (x, row["ratio"]), xytext=(0, 11 * away), rotation=90, ha="center",
                              textcoords="offset points", va="center", fontsize=5.5)  # fmt: skip
    axes.hlines(*marks, colors="0.55", linewidth=2.5, label="at most")
    axes.set_xticks(range(len(groups)), [_tick(*group) for group in groups], fontsize=6.5)
    axes.set(ylabel=label, xlim=(-0.6, max(len(groups), 1) - 0.4))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.2)


def _order(row: dict[str, object]) -> tuple[bool, bool, float]:
    """Sort key: the loss alone first, then the mean, then the changes; within each, larger workspaces first."""
    return row["over"] != "logits", row["variant"] != plain_variant(row["variant"]), -row["most_mib"]


def _tick(variant: str, over: str) -> str:
    """The label under a group: what is computed and, on the next line, the workspace."""
    *change, workspace = variant_label(variant).split(", ")[1:]
    plain = "loss alone" if over == "logits" else "mean"
    what = "".join(change) or plain
    return f"{_broken(what)}\n{workspace}"


def _broken(word: str) -> str:
    return word.replace("-", "-\n") if len(word) > 8 else word


def fig3_bars(frame: pd.DataFrame) -> Figure:
    """Time of `fused` over its floor by work, workspace and shape; and time with each change over that without it."""
    rows = bar_rows(frame)
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 4.8))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    _draw_bars(panels[0], [row for row in rows if row["over"] != "plain"], shapes, "time / floor")
    _draw_bars(panels[1], [row for row in rows if row["over"] == "plain"], shapes, "time / without the change")
    handles = dict(pair[::-1] for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True))
    if rows:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles))
    return figure


def fig4_training(frame: pd.DataFrame) -> Figure:
    """The small model's training loss, and its loss on the held-out text from which the hidden states are taken."""
    figure, axes = subplots(2.2)
    rows = numeric(frame)
    rows = rows[(rows["phase"] == "train") & (rows["metric"] == "loss")]
    axes.plot(rows["step"].astype(float), rows["value"], color=SHADES[0], lw=0.8, label="training text")
    axes.axhline(median(frame, "held_out_loss", "train", "model"), label="held-out text, at the end", **FLOOR)
    axes.set(xlabel="training step", ylabel="loss (nats a token)")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


FIGURES = {f.__name__: f for f in (fig1_error_time_memory, fig2_sparsity, fig3_bars, fig4_training)}
