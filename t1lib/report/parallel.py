"""Figures of experiment `parallel`, as functions of its records alone; and quantities shared with its tables."""

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t1lib.kit.select import median, pick, present
from t1lib.kit.style import FLOOR, SHADES, VARIANTS, plain_numbers, subplots
from t1lib.measure.records import format_number, statuses

HEADS, MODES = ("full", "chunked", "fused"), ("fsdp", "slide")
PRODUCTS = ("logits", "dE", "dW")
PARTS = {
    "weight": "own rows of the weight", "dW": "their gradient dW", "hidden": "hidden states",
    "dE": "their gradient dE", "workspace": "workspace",
}  # fmt: skip
MIB = 2**20
IDEAL = {"color": "0.55", "linestyle": ":", "linewidth": 1.2}


def counts(frame: pd.DataFrame, name: str) -> list[int]:
    """Numbers of ranks of the phases `<name>/<ranks>`, in increasing order, including those that were skipped."""
    phases = frame["phase"][frame["phase"].str.startswith(f"{name}/")].unique()
    return sorted(int(phase.partition("/")[2]) for phase in phases)


def by_ranks(frame: pd.DataFrame, metric: str, name: str, variant: str) -> pd.Series:
    """Median of a variant's metric by number of ranks, without missing values."""
    values = {n: median(frame, metric, f"{name}/{n}", variant) for n in counts(frame, name)}
    return pd.Series(values, dtype="float64").dropna()


def products_ms(frame: pd.DataFrame) -> pd.Series:
    """Time of the three matrix products of a rank's own rows together (ms), by number of ranks."""
    return sum(by_ranks(frame, f"{product}_ms", "head", "floor") for product in PRODUCTS)


def speedup(values: pd.Series) -> pd.Series:
    """Speed-up over one rank, by number of ranks; NaN if one rank was not measured."""
    return values.get(1, float("nan")) / values


def tokens_s(frame: pd.DataFrame, mode: str) -> pd.Series:
    """Training throughput of all ranks together in tokens/s, by number of ranks."""
    return by_ranks(frame, "tokens", "step", mode) / by_ranks(frame, "wall_ms", "step", mode) * 1e3


def must_mib(frame: pd.DataFrame, ranks: int) -> float:
    """MiB that a rank must hold: weight / ranks and its gradient, hidden states and their gradient."""
    size = {name: median(frame, name, "shape", "all") for name in ("tokens", "vocabulary", "hidden", "itemsize")}
    rows = size["vocabulary"] / ranks + size["tokens"]
    return 2 * rows * size["hidden"] * size["itemsize"] / MIB


def arithmetic_mib(frame: pd.DataFrame, head: str, ranks: int) -> float:
    """The same plus the workspace that the head was given; `full` is given none."""
    given = 0.0 if head == "full" else median(frame, "workspace", "shape", "all") / MIB
    return must_mib(frame, ranks) + given


def losses(frame: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Losses on the same batches by step, one column per number of ranks."""
    found = {n: pick(frame, "loss", f"losses/{n}", mode).reset_index(drop=True) for n in counts(frame, "losses")}
    return pd.DataFrame({n: values for n, values in found.items() if len(values)})


def _measured(frame: pd.DataFrame, metric: str, name: str, variants: Iterable[str]) -> list[str]:
    phases = [f"{name}/{n}" for n in counts(frame, name)]
    return [v for v in variants if any(present(frame, metric, phase, [v]) for phase in phases)]


def _ticks(frame: pd.DataFrame, name: str, ranks: Iterable[int]) -> list[str]:
    """The numbers of ranks as labels, marked where the ranks shared a GPU and so have no times."""
    shared = {n for n in ranks if "shared" in statuses(frame[frame["phase"] == f"{name}/{n}"]).values()}
    return [f"{n}\nshared" if n in shared else str(n) for n in ranks]


def _over_ranks(axes: Axes, frame: pd.DataFrame, name: str, what: str) -> None:
    ranks = counts(frame, name)
    axes.set_xticks(ranks, _ticks(frame, name, ranks))
    axes.set_xlim(min(ranks, default=1) - 0.4, max(ranks, default=1) + 0.4)
    axes.set(xlabel="ranks", ylabel=what)


def _line(axes: Axes, values: pd.Series, name: str, **more: object) -> None:
    style = VARIANTS[name]
    axes.plot(values.index, values, **({"color": style.colour, "marker": style.marker, "ms": 4, "lw": 1.1} | more))


def fig1_head(frame: pd.DataFrame) -> Figure:
    """Time of loss and gradients over ranks, with the ideal, the products and the collectives; and the speed-up."""
    figure, (time, gain) = subplots(3.0, 2)
    ranks, floor = counts(frame, "head"), products_ms(frame)
    for head in _measured(frame, "both_ms", "head", HEADS):
        values, alone = (by_ranks(frame, metric, "head", head) for metric in ("both_ms", "collectives_ms"))
        _line(time, values, head, label=VARIANTS[head].label)
        if 1 in values:
            time.plot(ranks, [values[1] / n for n in ranks], **IDEAL)
        if len(alone):
            _line(time, alone, head, ls="", mfc="none")
        _line(gain, speedup(values), head)
    time.plot(floor.index, floor, **FLOOR, marker=".", label="three products of a rank's rows")
    gain.plot(floor.index, speedup(floor), **FLOOR)
    gain.plot(ranks, ranks, **IDEAL)
    time.plot([], [], **IDEAL, label="ideal: one rank / ranks")
    if _measured(frame, "collectives_ms", "head", HEADS):
        time.plot([], [], ls="", marker="o", mfc="none", mec="0.3", ms=4, label="a head's collectives alone")
    time.set_yscale("log")
    plain_numbers(time)
    _over_ranks(time, frame, "head", "median time, slowest rank (ms)")
    _over_ranks(gain, frame, "head", "speed-up over one rank")
    gain.set_ylim(0, None)
    figure.legend(*time.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def fig2_memory(frame: pd.DataFrame) -> Figure:
    """What a rank holds at a head's peak, by parts, against the arithmetic; one panel per head."""
    heads = _measured(frame, "held_mib", "head", HEADS) or ["fused"]
    figure, panels = subplots(2.8, len(heads), squeeze=False)
    for axes, head in zip(panels[0], heads, strict=True):
        held = by_ranks(frame, "held_mib", "head", head)
        base, places = pd.Series(0.0, index=held.index), range(len(held))
        for (part, label), colour in zip(PARTS.items(), SHADES, strict=True):
            values = by_ranks(frame, f"{part}_mib", "head", head)
            axes.bar(places, values, 0.6, bottom=base, color=colour, label=label)
            base = base + values
        for place, (n, total) in zip(places, held.items(), strict=True):
            arithmetic = arithmetic_mib(frame, head, n)
            axes.hlines(arithmetic, place - 0.4, place + 0.4, **FLOOR)
            above = {"textcoords": "offset points", "ha": "center", "fontsize": 6.5}
            axes.annotate(format_number(total), (place, max(total, arithmetic)), (0, 3), **above)
        axes.plot([], [], **FLOOR, label="weight / ranks arithmetic")
        axes.set_xticks(places, [str(n) for n in held.index])
        axes.set(title=VARIANTS[head].label, xlabel="ranks", ylabel="held by a rank (MiB)")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.14)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def fig3_step(frame: pd.DataFrame) -> Figure:
    """Training throughput over ranks, with the ideal; and the losses on the same batches, one panel per mode."""
    modes = _measured(frame, "wall_ms", "step", MODES) or ["fsdp"]
    figure, (rate, *panels) = subplots(2.9, 1 + len(modes))
    ranks = counts(frame, "step")
    for mode, curve in zip(modes, panels, strict=True):
        values = tokens_s(frame, mode)
        _line(rate, values, mode, label=mode)
        if 1 in values:
            rate.plot(ranks, [values[1] * n for n in ranks], **IDEAL)
        for index, (n, column) in enumerate(losses(frame, mode).items()):  # thin over thick lines: they should coincide
            look = {"color": SHADES[2 * index % len(SHADES)], "lw": 3.6 / (index + 1)}
            curve.plot(column.index + 1, column, **look, label=f"{n} rank{'s' if n > 1 else ''}")
        curve.set(xlabel="training step", ylabel="loss (nats a token)", title=f"{mode}: losses")
        if curve.lines:
            curve.legend(loc="upper right")
    rate.plot([], [], **IDEAL, label="one rank × ranks")
    _over_ranks(rate, frame, "step", "tokens a second")
    rate.set(title="all ranks together")
    rate.margins(y=0.5)  # room for the legend
    rate.set_ylim(0, None)
    rate.legend(loc="upper left")
    return figure


FIGURES = {f.__name__: f for f in (fig1_head, fig2_memory, fig3_step)}
