"""Figures of experiment `chunks`, as functions of its records alone; and the law and the floor that they show."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t1lib.kit.select import median, present
from t1lib.kit.style import BEHIND, FLOOR, PHASE_COLOURS, VARIANTS, plain_numbers, subplots
from t1lib.measure.records import format_number

COUNTED = ("chunked", "fused")  # heads run with given numbers of chunks
HEADS = ("full", "chunked", "chunked-vocabulary", "fused")
REDUCTIONS = ("mean", "sum", "none")
PRODUCTS = ("logits", "dE", "dW")
MIB = 2**20


def shape(frame: pd.DataFrame, name: str) -> float:
    """A size of the run: tokens, vocabulary, hidden, itemsize (bytes) or workspace (bytes)."""
    return median(frame, name, "shape", "all")


def counts(frame: pd.DataFrame) -> list[int]:
    """The numbers of chunks tried, in increasing order."""
    phases = frame["phase"][frame["phase"].str.startswith("chunks/")].unique()
    return sorted(int(phase.removeprefix("chunks/")) for phase in phases)


def by_tokens(frame: pd.DataFrame, metric: str, head: str) -> pd.Series:
    """Median of a head's metric by tokens per chunk, in increasing order, without missing values.

    Once a chunk is a single tile, asking for more chunks makes no more: such points coincide, and the first is kept.
    """
    phases = [f"chunks/{n}" for n in counts(frame)]
    pairs = [(median(frame, "chunk_tokens", phase, head), median(frame, metric, phase, head)) for phase in phases]
    points = pd.Series(dict(reversed(pairs)), dtype="float64").dropna()
    return points[points.index.notna()].sort_index()


def by_count(frame: pd.DataFrame, metric: str, head: str) -> pd.Series:
    """The same by the number of chunks that were actually made."""
    points = by_tokens(frame, metric, head)
    points.index = np.ceil(shape(frame, "tokens") / points.index)
    return points


class Law(NamedTuple):
    """workspace = fixed + whole / chunks, in MiB; `deviation`: largest relative deviation of a point from it."""

    fixed: float
    whole: float
    deviation: float

    def at(self, chunks: np.ndarray) -> np.ndarray:
        return self.fixed + self.whole / chunks


def law(frame: pd.DataFrame, head: str) -> Law | None:
    """The law fitted to a head's points by relative least squares, from two chunks on: `chunked` holds the logits'
    gradients of two chunks at a time, which a single chunk does not need."""
    points = by_count(frame, "workspace_mib", head)
    points = points[(points.index > 1) & (points > 0)]
    if len(points) < 2:
        return None
    chunks, mib = points.index.to_numpy(float), points.to_numpy()
    terms = np.stack([1 / mib, 1 / (chunks * mib)], axis=1)
    fixed, whole = np.linalg.lstsq(terms, np.ones(len(mib)), rcond=None)[0]
    return Law(fixed, whole, float(np.abs((fixed + whole / chunks) / mib - 1).max()))


def floor_ms(frame: pd.DataFrame, phase: str) -> float:
    """Time of the three matrix products together (ms), interleaved with the variants of this phase."""
    return sum(median(frame, f"{name}_ms", phase, "floor") for name in PRODUCTS)


def rates(frame: pd.DataFrame) -> tuple[float, float]:
    """FLOP/s of the products and bytes/s of a copy, measured in the same rounds as the numbers of chunks."""
    weight = shape(frame, "vocabulary") * shape(frame, "hidden")
    products = 6 * shape(frame, "tokens") * weight / floor_ms(frame, "chunks") * 1e3
    copy = 2 * weight * shape(frame, "itemsize") / median(frame, "copy_ms", "chunks", "floor") * 1e3
    return products, copy


def traffic_ms(frame: pd.DataFrame) -> float:
    """Least time in ms to read and write the weight's gradient once: a copy of the weight moves as many bytes."""
    return median(frame, "copy_ms", "chunks", "floor")


def balance_tokens(frame: pd.DataFrame) -> float:
    """Chunk size C in tokens at which 6 C V D operations take as long as reading and writing the weight's gradient."""
    products, copy = rates(frame)
    return 2 * shape(frame, "itemsize") * products / (6 * copy)


def gradients_mib(frame: pd.DataFrame) -> float:
    """Size of both gradients in MiB, in the operands' dtype."""
    rows = shape(frame, "tokens") + shape(frame, "vocabulary")
    return rows * shape(frame, "hidden") * shape(frame, "itemsize") / MIB


def _against_counts(frame: pd.DataFrame, axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts(frame), [str(n) for n in counts(frame)])
    axes.minorticks_off()


def _points(axes: Axes, values: pd.Series, head: str, **more: object) -> None:
    """Draw a head's points; those of `chunked` larger and hollow, because on a CPU those of `fused` lie on them."""
    style = VARIANTS[head]
    size = {"ms": 7, "mfc": "none"} if head == "chunked" else {"ms": 4}
    axes.plot(values.index, values, color=style.colour, marker=style.marker, **(size | {"lw": 1.1} | more))


def _full(axes: Axes, frame: pd.DataFrame, metric: str) -> None:
    """Draw a horizontal line for `full`, which has no chunks."""
    value = median(frame, metric, "whole", "full")
    if value == value:
        axes.axhline(value, color=VARIANTS["full"].colour, lw=1.1, label=VARIANTS["full"].label)


def fig1_memory(frame: pd.DataFrame) -> Figure:
    """Peak workspace against the number of chunks, with the fitted law."""
    figure, axes = subplots(3.0)
    for head in COUNTED:
        points, fitted = by_count(frame, "workspace_mib", head), law(frame, head)
        label = VARIANTS[head].label
        if fitted:
            fine = np.geomspace(1, max(counts(frame)), 200)
            axes.plot(fine, fitted.at(fine), color=VARIANTS[head].colour, lw=1.1)
            label += f": {format_number(fitted.fixed)} + {format_number(fitted.whole)} / chunks (MiB)"
        if len(points):
            _points(axes, points, head, lw=0, label=label)
    _full(axes, frame, "workspace_mib")
    axes.axhline(gradients_mib(frame), label="the two gradients", **FLOOR)
    _against_counts(frame, axes)
    plain_numbers(axes)
    axes.set(xlabel="number of chunks", ylabel="peak workspace (MiB)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def fig2_latency(frame: pd.DataFrame) -> Figure:
    """Time of loss and gradients against the tokens per chunk; and its split into forward and backward."""
    figure, (both, parts) = subplots(3.0, 2)
    tokens, floor = shape(frame, "tokens"), floor_ms(frame, "chunks")
    for head in COUNTED:
        for metric, axes, line in (("both_ms", both, "-"), ("forward_ms", parts, "-"), ("backward_ms", parts, ":")):
            values = by_tokens(frame, metric, head)
            if len(values):
                _points(axes, values, head, ls=line, label=VARIANTS[head].label)
    _full(both, frame, "both_ms")
    fine = np.geomspace(max(1.0, tokens / max(counts(frame), default=1)), tokens, 200)
    both.axhline(floor, label="three matrix products", **FLOOR)
    both.plot(fine, floor + tokens / fine * traffic_ms(frame), color="0.6", lw=1.0, ls="-.",
              label="and dW's traffic, once a chunk")  # fmt: skip
    both.axvline(balance_tokens(frame), color="0.4", lw=1.0, ls=":", label="traffic = arithmetic")
    both.set(ylabel="median time (ms)", ylim=(0, None), title="loss and both gradients")
    parts.set(yscale="log", ylabel="median time (ms)", title="forward (solid), backward (dotted)")
    plain_numbers(parts)
    sizes = sorted({int(np.ceil(tokens / n)) for n in counts(frame)})
    for axes in (both, parts):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("tokens of a chunk")
    figure.legend(*both.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def fig3_accuracy(frame: pd.DataFrame) -> Figure:
    """Relative errors of both gradients against the number of chunks."""
    figure, panels = subplots(2.6, 2, sharey=True)
    for axes, which in zip(panels, ("dE", "dW"), strict=True):
        for head in COUNTED:
            values = by_count(frame, f"error_{which}", head)
            if len(values):
                _points(axes, values, head, label=VARIANTS[head].label)
        _full(axes, frame, f"error_{which}")
        _against_counts(frame, axes)
        axes.set(xlabel="number of chunks", title=f"gradient {which}")
    plain_numbers(panels[0])
    panels[0].set_ylabel("relative error")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def fig4_reductions(frame: pd.DataFrame) -> Figure:
    """Forward and backward of every head under every reduction, next to three and four matrix products."""
    figure, axes = subplots(2.8)
    names = [n for n in HEADS if any(present(frame, "both_ms", r, [n]) for r in REDUCTIONS)]
    ticks = []
    for group, name in enumerate(names):
        for place, reduction in enumerate(REDUCTIONS):
            where = group + 0.27 * (place - 1)
            forward, backward = (median(frame, f"{k}_ms", reduction, name) for k in ("forward", "backward"))
            first = not ticks
            axes.bar(where, forward, 0.24, color=PHASE_COLOURS["head forward"], label="forward" if first else None)
            colour = PHASE_COLOURS["head backward"]
            bar = axes.bar(where, backward, 0.24, bottom=forward, color=colour, label="backward" if first else None)
            if forward == forward:
                axes.bar_label(bar, [format_number(forward + backward)], fontsize=6.5, padding=1.5, bbox=BEHIND)
            ticks.append((where, f"{reduction}\n{VARIANTS[name].tick()}" if place == 1 else reduction))
    floor = floor_ms(frame, "reductions")
    axes.axhline(floor, label="three matrix products", **FLOOR)
    axes.axhline(floor * 4 / 3, label="four of them", **(FLOOR | {"linestyle": ":"}))
    axes.set_xticks([x for x, _ in ticks], [text for _, text in ticks])
    axes.set_ylabel("median time (ms)")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


FIGURES = {f.__name__: f for f in (fig1_memory, fig2_latency, fig3_accuracy, fig4_reductions)}
