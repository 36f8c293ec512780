"""The figures of `cce`, as functions of its records alone, whose phases `t1lib.measure.head_run` writes."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from t1lib.measure.head_cases import FILTER_EPS
from t1lib.measure.records import numeric
from t1lib.report.cce_select import (
    DATA,
    bar_rows,
    describe,
    is_filtered,
    phases,
    three,
    variant_label,
    variant_style,
    variants,
    workspace,
)
from t1lib.report.select import median
from t1lib.report.style import FLOOR, SHADES, VARIANTS, WIDTH, subplots


def _marker_size(mib: float) -> float:
    """Area in points²: 16 for nothing, and the same step more for each doubling beyond 16 MiB."""
    return 16 + 16 * np.log2(1 + max(mib, 0.0) / 16)


def _plain_log(axis: object, subs: tuple[float, ...]) -> None:
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_errors(frame: pd.DataFrame, axes: Axes, phase: str) -> dict[str, object]:
    """Time and error of every variant with gradients of "mean"; returns label → marker for the legend."""
    shown, floor = {}, three(frame, phase)
    names = variants(frame, phase)
    hollow = [n for n in names if n not in VARIANTS and not is_filtered(n)][1:]  # `fused` in smaller workspaces
    for name in names:
        time, error = median(frame, "both_ms", phase, name), median(frame, "error_dE", phase, name)
        if time > 0 and error > 0:
            style, mib = variant_style(name), workspace(frame, phase.split("/")[1], name)
            shown[variant_label(name)] = axes.scatter(
                time / floor, error, s=_marker_size(mib if mib == mib else 0.0), marker=style.marker, zorder=3,
                edgecolor=style.colour, linewidth=1.2, facecolor="none" if name in hollow else style.colour,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="time / three matrix products", ylabel="relative error of dE")
    _plain_log(axes.xaxis, (1, 1.5, 2, 3, 5, 7))
    axes.margins(0.12)
    return shown


def fig1_error_time_memory(frame: pd.DataFrame) -> Figure:
    """Error of dE against time, the marker's area by workspace: on peaked random data and on a model's own states."""
    found = [*phases(frame, "peaked"), *phases(frame, "real")]
    figure, panels = subplots(3.6, max(len(found), 1), squeeze=False)
    shown: dict[str, object] = {}
    for axes, phase in zip(panels[0], found, strict=False):
        data, shape = phase.split("/")
        shown |= _draw_errors(frame, axes, phase)
        axes.set_title(f"{DATA[data]}, {describe(frame, phase) or shape}")
    sizes = [0, 256, 4096, 24576]
    grey = [panels[0][-1].scatter([], [], s=_marker_size(m), color="0.6", marker="o") for m in sizes]
    handles, labels = [*shown.values(), *grey], [*shown, *(f"{m} MiB" if m else "0 MiB of workspace" for m in sizes)]
    figure.legend(handles, labels, loc="outside upper center", ncols=4, columnspacing=1.2)
    return figure


def fig2_sparsity(frame: pd.DataFrame) -> Figure:
    """Mean probability of the k-th most probable token, on random operands and on a trained model's."""
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
    """Groups of points, one a shape, and over or under each the mark that it must not pass."""
    groups = list(dict.fromkeys((row["variant"], row["over"]) for row in rows))
    width = 0.8 / max(len(shapes), 1)
    for index, shape in enumerate(shapes):
        own = [row for row in rows if row["shape"] == shape]
        at = [groups.index((r["variant"], r["over"])) + (index - (len(shapes) - 1) / 2) * width for r in own]
        axes.hlines([r["limit"] for r in own], [x - 0.45 * width for x in at], [x + 0.45 * width for x in at],
                    colors="0.55", linewidth=2.5, label="at most" if index == 0 else None)  # fmt: skip
        style = dict(marker="os^DP"[index % 5], color=SHADES[index % 5], ms=4, ls="none", label=f"shape {shape}")
        axes.plot(at, [r["ratio"] for r in own], **style)
        for x, row in zip(at, own, strict=True):
            away = 1 if row["ratio"] > row["limit"] else -1  # on the side where the mark is not
            text = dict(xytext=(0, 7 * away), textcoords="offset points", ha="center", va="center", fontsize=5.5)
            if row["ratio"] == row["ratio"]:
                axes.annotate(f"{row['ratio']:.2f}", (x, row["ratio"]), **text)
    axes.set_xticks(range(len(groups)), [_tick(*group) for group in groups], fontsize=6.5)
    axes.set(ylabel=label, xlim=(-0.6, max(len(groups), 1) - 0.4))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.16)


def _tick(variant: str, over: str) -> str:
    """The lines under a group: what is done, and within which workspace."""
    *change, workspace = variant_label(variant).split(", ")[1:]
    plain = "loss alone" if over == "logits" else "mean"
    what = "".join(change) or plain
    return f"{_broken(what)}\n{workspace}"


def _broken(word: str) -> str:
    return word.replace("-", "-\n") if len(word) > 8 else word


def fig3_bars(frame: pd.DataFrame) -> Figure:
    """Time of `fused` over its floor by work, workspace and shape; and of each change over the same without it."""
    rows = bar_rows(frame)
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 4.8))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    _draw_bars(panels[0], [row for row in rows if row["over"] != "plain"], shapes, "time / floor")
    _draw_bars(panels[1], [row for row in rows if row["over"] == "plain"], shapes, "time / without the change")
    handles, labels = panels[0].get_legend_handles_labels()
    if rows:
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def fig4_training(frame: pd.DataFrame) -> Figure:
    """The small model's loss in training, and the loss on the held-out text that its hidden states are of."""
    figure, axes = subplots(2.2)
    rows = numeric(frame)
    rows = rows[(rows["phase"] == "train") & (rows["metric"] == "loss")]
    axes.plot(rows["step"].astype(float), rows["value"], color=SHADES[0], lw=0.8, label="training text")
    axes.axhline(median(frame, "held_out_loss", "train", "model"), label="held-out text, at the end", **FLOOR)
    axes.set(xlabel="training step", ylabel="loss (nats a token)")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


FIGURES = {f.__name__: f for f in (fig1_error_time_memory, fig2_sparsity, fig3_bars, fig4_training)}
