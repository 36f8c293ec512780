"""Figures and tables of `frontier`: the cost of a step, what fits, and how well both were predicted."""

import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter

from t1lib.heads import parse_bytes
from t1lib.measure.memory import GIB
from t1lib.measure.records import format_number, numeric
from t1lib.report.select import pick
from t1lib.report.style import FLOOR, SHADES, VARIANTS, subplots
from t1lib.report.tables import MISSING, Table, make_table

MODES, HEADS = ("gpu", "ckpt", "slide"), ("full", "chunked", "fused")
MEASURED = ("wall_ms", "allocated_gib", "reserved_gib", "host_gib")
PREDICTED = ("predicted_ms", "predicted_allocated_gib", "predicted_reserved_gib", "predicted_host_gib")
LINES = {"full": ":", "chunked": "--", "fused": "-"}
WITHIN = (0.05, 0.10, 0.15, 0.20)  # bounds on the relative error of predictions


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per point: model, mode, head, seq, status, medians of what was measured, and predictions."""
    rows = frame[frame["phase"].str.startswith("seq/")]
    states = rows[rows["metric"] == "status"].set_index(["variant", "phase"])["value"]
    values = numeric(rows[rows["metric"].isin([*MEASURED, *PREDICTED])])
    table = values.pivot_table(index=["variant", "phase"], columns="metric", values="value", aggfunc="median")
    table = table.reindex(states.index).reindex(columns=[*MEASURED, *PREDICTED])
    table["status"] = states
    if table["reserved_gib"].isna().all():  # a CPU has no reserved memory
        table["reserved_gib"] = table["allocated_gib"]
    table = table.reset_index()
    names = table["variant"].str.split("/", expand=True)
    table[["model", "mode", "head"]] = names
    table["seq"] = table["phase"].str.removeprefix("seq/").astype(int)
    table["us_a_token"] = table["wall_ms"] * 1e3 / table["seq"]
    return table


def models_of(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["model"]))


def budgets(frame: pd.DataFrame) -> list[str]:
    """The budgets of the run, such as 16GiB, smallest first."""
    found = frame[(frame["metric"] == "budget") & (frame["phase"] == "facts")]["variant"]
    return sorted(dict.fromkeys(found), key=parse_bytes)


def room(frame: pd.DataFrame, budget: str) -> float:
    """GiB that CUDA itself leaves to the allocator on a device with this much memory."""
    taken = pick(frame, "context_gib", "facts", "all")
    return parse_bytes(budget) / GIB - (float(taken.iloc[0]) if len(taken) else 0.0)


def _by_length(frame: pd.DataFrame, column: str, what: str, lines: dict[str, float]) -> Figure:
    """One panel per model: a quantity over the row length, with a line for each mode and head."""
    table = points(frame)
    models = models_of(table)
    figure, panels = subplots(2.7, len(models), sharey=True, sharex=True, squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        own = table[(table["model"] == model) & (table["status"] == "ok")]
        for mode in MODES:
            for head in HEADS:
                found = own[(own["mode"] == mode) & (own["head"] == head)].sort_values("seq")
                style = VARIANTS[mode]
                axes.plot(found["seq"], found[column], LINES[head], color=style.colour, marker=style.marker, ms=3, lw=1)
        for label, value in lines.items():
            axes.axhline(value, **FLOOR)
            axes.annotate(label, (0.01, value), xycoords=("axes fraction", "data"), fontsize=6.5, va="bottom")
        axes.set(title=model, xlabel="tokens a row", xscale="log", yscale="log")
        _plain(axes.yaxis)
        _lengths(axes.xaxis, sorted(table["seq"].unique()))
    panels[0][0].set_ylabel(what)
    _legend(figure)
    return figure


def _plain(*axes: Axis) -> None:
    """Label logarithmic axes at 1, 2, 5, 10, … with plain numbers."""
    for axis in axes:
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=15))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _lengths(axis: Axis, lengths: list[int]) -> None:
    """Ticks at the lengths, labelled as 512, 4k, 128k."""
    names = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
    axis.set_major_locator(FixedLocator(lengths))
    axis.set_major_formatter(FixedFormatter(names))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure) -> None:
    modes = [Line2D([], [], color=VARIANTS[m].colour, marker=VARIANTS[m].marker, ms=4, lw=1, label=m) for m in MODES]
    heads = [Line2D([], [], color="0.3", linestyle=LINES[h], lw=1, label=f"head {h}") for h in HEADS]
    figure.legend(handles=[*modes, *heads], loc="outside upper center", ncols=6)


def fig1_memory(frame: pd.DataFrame) -> Figure:
    """Peak memory over row length, with the memories of some cards."""
    return _by_length(frame, "reserved_gib", "peak memory (GiB)", {b: room(frame, b) for b in budgets(frame)})


def fig2_time(frame: pd.DataFrame) -> Figure:
    """Time per token over row length."""
    return _by_length(frame, "us_a_token", "time a token (µs)", {})


def pareto(table: pd.DataFrame) -> pd.DataFrame:
    """Points that no other point beats in both memory and time, ordered by memory."""
    ordered = table.sort_values(["reserved_gib", "us_a_token"])
    return ordered[ordered["us_a_token"] < ordered["us_a_token"].cummin().shift(fill_value=np.inf)]


def fig3_pareto(frame: pd.DataFrame) -> Figure:
    """Time per token against peak memory at the shortest and the longest length, with each model's Pareto frontier."""
    table = points(frame)
    table = table[table["status"] == "ok"]
    lengths = sorted(table["seq"].unique())
    chosen = lengths[:: max(len(lengths) - 1, 1)]
    figure, panels = subplots(2.7, len(chosen), sharex=True, sharey=True, squeeze=False)
    for axes, seq in zip(panels[0], chosen, strict=True):
        for number, model in enumerate(models_of(table)):
            own, colour = table[(table["model"] == model) & (table["seq"] == seq)], SHADES[number % len(SHADES)]
            for mode in MODES:
                found = own[own["mode"] == mode]
                axes.plot(found["reserved_gib"], found["us_a_token"], VARIANTS[mode].marker, color=colour, ms=4)
            best = pareto(own)
            axes.step(best["reserved_gib"], best["us_a_token"], where="post", color=colour, lw=1)
        axes.set(title=f"{seq} tokens a row", xlabel="peak memory (GiB)", xscale="log", yscale="log")
        _plain(axes.xaxis, axes.yaxis)
    panels[0][0].set_ylabel("time a token (µs)")
    names = [Line2D([], [], color=SHADES[i % len(SHADES)], label=m) for i, m in enumerate(models_of(table))]
    modes = [Line2D([], [], color="0.3", marker=VARIANTS[m].marker, ls="", ms=4, label=m) for m in MODES]
    figure.legend(handles=[*names, *modes], loc="outside upper center", ncols=8)
    return figure


def fig4_predicted(frame: pd.DataFrame) -> Figure:
    """Predicted against measured: memory, and time."""
    table = points(frame)
    table = table[table["status"] == "ok"]
    figure, panels = subplots(2.9, 2)
    pairs = (("allocated_gib", "allocated (GiB)", 0.05), ("ms", "step (ms)", 0.20))
    for axes, (name, what, band) in zip(panels, pairs, strict=True):
        measured = "wall_ms" if name == "ms" else name
        for mode in MODES:
            own, style = table[table["mode"] == mode], VARIANTS[mode]
            x, y = own[measured], own[f"predicted_{name}"]
            axes.plot(x, y, style.marker, color=style.colour, ms=3.5, label=mode)
        ends = np.array([table[measured].min() * 0.8, table[measured].max() * 1.25])
        axes.plot(ends, ends, color="0.25", lw=1)
        axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color="0.85", label=f"within {band:.0%}")
        axes.set(xlabel=f"measured: {what}", ylabel=f"predicted: {what}", xscale="log", yscale="log")
        axes.legend(loc="upper left")
        _plain(axes.xaxis, axes.yaxis)
    return figure


def errors(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Absolute values of the predictions' relative errors, for points that ran."""
    ok = table[table["status"] == "ok"]
    found = {k: (ok[f"predicted_{k}_gib"] / ok[f"{k}_gib"] - 1).abs() for k in ("allocated", "reserved", "host")}
    return found | {"time": (ok["predicted_ms"] / ok["wall_ms"] - 1).abs()}


def table1_fits(frame: pd.DataFrame) -> Table:
    """By model and length: the fastest measured mode and head within each budget."""
    table, rows = points(frame), []
    for model in models_of(table):
        for seq, own in table[table["model"] == model].groupby("seq"):
            row: dict[str, object] = {"model": model, "tokens": f"{seq}"}
            row |= {f"in {budget}": _best(own, room(frame, budget)) for budget in budgets(frame)}
            rows.append(row | {"in all": _best(own, np.inf)})
    return make_table(rows, text_columns=len(rows[0]))


def _best(own: pd.DataFrame, gib: float) -> str:
    fitting = own[(own["status"] == "ok") & (own["reserved_gib"] <= gib)]
    if not len(fitting):
        return MISSING
    best = fitting.loc[fitting["us_a_token"].idxmin()]
    return f"{best['mode']}, {best['head']}: {format_number(float(best['us_a_token']))} µs"


def table2_points(frame: pd.DataFrame) -> Table:
    """Every point: its status, and its measured and predicted memory and time."""
    rows = []
    for _, p in points(frame).iterrows():
        rows.append({
            "model": p["model"], "mode": p["mode"], "head": p["head"], "tokens": f"{p['seq']}", "status": p["status"],
            "allocated (GiB)": p["allocated_gib"], "allocated, predicted": p["predicted_allocated_gib"],
            "reserved (GiB)": p["reserved_gib"], "reserved, predicted": p["predicted_reserved_gib"],
            "step (ms)": p["wall_ms"], "step, predicted": p["predicted_ms"],
        })  # fmt: skip
    return make_table(rows, text_columns=5)


def table3_accuracy(frame: pd.DataFrame) -> Table:
    """Shares of the points whose prediction error is within each of `WITHIN`, and the largest error."""
    rows = []
    for what, found in errors(points(frame)).items():
        row: dict[str, object] = {"predicted": what, "points": len(found)}
        row |= {f"within {bound:.0%}": f"{(found <= bound).mean():.0%}" for bound in WITHIN}
        rows.append(row | {"largest error": f"{found.max():.0%}"})
    return make_table(rows)


FIGURES = {f.__name__: f for f in (fig1_memory, fig2_time, fig3_pareto, fig4_predicted)}
TABLES = {f.__name__: f for f in (table1_fits, table2_points, table3_accuracy)}
