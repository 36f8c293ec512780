"""Figures and tables of `frontier`: the cost of a step, what fits, and how well both were predicted."""

import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from t1lib.heads import parse_bytes
from t1lib.kit.select import pick
from t1lib.kit.style import SHADES, VARIANTS, subplots
from t1lib.kit.tables import MISSING, Table, make_table
from t1lib.measure.memory import GIB
from t1lib.measure.records import format_number, numeric

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
    return parse_bytes(budget) / GIB - _context(frame)


def device_room(frame: pd.DataFrame) -> float:
    """GiB that CUDA itself leaves to the allocator on the device of the run."""
    return float(pick(frame, "vram_gib", "facts", "all").iloc[0]) - _context(frame)


def _context(frame: pd.DataFrame) -> float:
    taken = pick(frame, "context_gib", "facts", "all")
    return float(taken.iloc[0]) if len(taken) else 0.0


def _by_length(frame: pd.DataFrame, column: str, what: str, lines: dict[str, float]) -> Figure:
    """One panel per model: a quantity over the row length, with a curve for each mode and head; horizontal `lines`,
    named in the last panel."""
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
        for value in lines.values():
            axes.axhline(value, color="0.45", lw=0.8, zorder=1)
        axes.set(title=model, xlabel="tokens a row", xscale="log", yscale="log")
        _plain(axes.yaxis)
        _lengths(axes.xaxis, sorted(table["seq"].unique()))
    for label, value in lines.items():
        place = dict(xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=6.5)
        panels[0][-1].annotate(label, (0.99, value), **place)
    panels[0][0].set_ylabel(what)
    _legend(figure)
    return figure


def _plain(*axes: Axis, subs: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Label logarithmic axes at 1, 2, 5, 10, …, or at powers of ten times other `subs`, with plain numbers."""
    for axis in axes:
        axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=15))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _lengths(axis: Axis, lengths: list[int]) -> None:
    """Ticks at the lengths; those four times as long as the last one that is labelled are labelled as 512, 4k, 64k."""
    names, last = [], 0
    for n in lengths:
        names.append((f"{n // 1024}k" if n % 1024 == 0 else str(n)) if n >= 4 * last else "")
        last = n if names[-1] else last
    axis.set_major_locator(FixedLocator(lengths))
    axis.set_major_formatter(FixedFormatter(names))
    axis.set_minor_locator(NullLocator())


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
    """Time per token against peak memory at the shortest, a middle and the longest length, with each model's Pareto
    frontier."""
    table = points(frame)
    table = table[table["status"] == "ok"]
    lengths = sorted(table["seq"].unique())
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    figure, panels = subplots(3.0, len(chosen), sharex=True, sharey=True, squeeze=False)
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
    figure.legend(handles=names, loc="outside upper center", ncols=len(names))
    panels[0][-1].legend(handles=modes, loc="upper right")
    return figure


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """The points that ran, with their predictions over what was measured as columns allocated, reserved, host and time.

    A prediction of more reserved memory than the device has counts as all of it: the allocator then gives back what is
    not in use.
    """
    table = points(frame)
    ok = table[table["status"] == "ok"].copy()
    ok["predicted_reserved_gib"] = ok["predicted_reserved_gib"].clip(upper=device_room(frame))
    for name in ("allocated", "reserved", "host"):
        ok[name] = ok[f"predicted_{name}_gib"] / ok[f"{name}_gib"]
    return ok.assign(time=ok["predicted_ms"] / ok["wall_ms"])


def errors(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Absolute values of the predictions' relative errors, for points that ran."""
    found = ratios(frame)
    return {name: (found[name] - 1).abs() for name in ("allocated", "reserved", "host", "time")}


def fig4_predicted(frame: pd.DataFrame) -> Figure:
    """Predictions over what was measured: allocated and reserved memory, and time, each with the band that it should be
    in."""
    found = ratios(frame)
    figure, panels = subplots(2.7, 3)
    bands = {"allocated": 0.05, "reserved": 0.1, "time": 0.2}
    for axes, (name, band) in zip(panels, bands.items(), strict=True):
        measured, unit = ("wall_ms", "ms") if name == "time" else (f"{name}_gib", "GiB")
        for mode in MODES:
            own, style = found[found["mode"] == mode], VARIANTS[mode]
            axes.plot(own[measured], own[name], style.marker, color=style.colour, ms=3, label=mode)
        axes.axhspan(1 - band, 1 + band, color="0.88", zorder=0)
        axes.axhline(1.0, color="0.25", lw=0.8, zorder=1)
        axes.set(xlabel=f"measured ({unit})", ylabel="predicted / measured", xscale="log")
        axes.set_title(f"{name}, band ±{band:.0%}")
        _plain(axes.xaxis, subs=(1.0,))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def table1_fits(frame: pd.DataFrame) -> Table:
    """By model and length: the fastest measured mode and head within each budget, and its time per token in µs."""
    table, rows = points(frame), []
    for model in models_of(table):
        for seq, own in table[(table["model"] == model) & (table["status"] == "ok")].groupby("seq"):
            row: dict[str, object] = {"model": model, "tokens": f"{seq}"}
            row |= {f"in {budget}": _best(own, room(frame, budget)) for budget in budgets(frame)}
            rows.append(row | {"in all": _best(own, np.inf)})
    return make_table(rows, text_columns=len(rows[0]))


def _best(own: pd.DataFrame, gib: float) -> str:
    fitting = own[own["reserved_gib"] <= gib]
    if not len(fitting):
        return MISSING
    best = fitting.loc[fitting["us_a_token"].idxmin()]
    return f"{best['mode']}, {best['head']}: {format_number(float(best['us_a_token']))}"


def table2_points(frame: pd.DataFrame) -> Table:
    """Every point: its status, and its measured and predicted memory and time."""
    rows = []
    for _, p in points(frame).iterrows():
        rows.append({
            "model": p["model"], "mode": p["mode"], "head": p["head"], "tokens": f"{p['seq']}", "status": p["status"],
            "allocated (GiB)": p["allocated_gib"], "allocated, predicted (GiB)": p["predicted_allocated_gib"],
            "reserved (GiB)": p["reserved_gib"], "reserved, predicted (GiB)": p["predicted_reserved_gib"],
            "step (ms)": p["wall_ms"], "step, predicted (ms)": p["predicted_ms"],
        })  # fmt: skip
    return make_table(rows, text_columns=5)


def table3_accuracy(frame: pd.DataFrame) -> Table:
    """Shares of the points whose prediction error is within each of `WITHIN`, and the largest error."""
    rows = []
    for what, found in errors(frame).items():
        row: dict[str, object] = {"predicted": what, "points": len(found)}
        row |= {f"within {bound:.0%}": f"{(found <= bound).mean():.0%}" for bound in WITHIN}
        rows.append(row | {"largest error": f"{found.max():.0%}"})
    return make_table(rows)


FIGURES = {f.__name__: f for f in (fig1_memory, fig2_time, fig3_pareto, fig4_predicted)}
TABLES = {f.__name__: f for f in (table1_fits, table2_points, table3_accuracy)}
