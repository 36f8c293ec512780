"""Figures, tables and numbers of `convergence`: the same training with every head and in every mode."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t1lib.kit.select import median, pick
from t1lib.kit.style import FLOOR, VARIANTS, subplots
from t1lib.kit.tables import Table, make_table
from t1lib.measure.records import Numbers, numeric

REFERENCE, ORDER = "full-gpu", "order"
STYLES = {"gpu": "-", "slide": "--"}
LABELS = {"filter-gpu": "fused, filtered; gpu", ORDER: "another order of the text"}


def curves(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A metric's values by step, one column per variant, in the order in which they were trained."""
    rows = numeric(frame)
    rows = rows[(rows["metric"] == metric) & (rows["phase"] == "train")]
    table = rows.pivot_table(index="step", columns="variant", values="value")
    return table[list(dict.fromkeys(rows["variant"]))]


def exact(names: list[str]) -> list[str]:
    """The variants that claim to compute what the reference does."""
    return [n for n in names if n not in (REFERENCE, ORDER, "filter-gpu")]


def label(name: str) -> str:
    if name in LABELS:
        return LABELS[name]
    head, mode = name.rsplit("-", 1)
    return f"{VARIANTS[head].label}; {mode}"


def _look(name: str) -> dict[str, object]:
    if name == ORDER:
        return {"color": "0.6", "linestyle": ":"}
    if name == "filter-gpu":
        return {"color": VARIANTS["fsdp"].colour, "linestyle": "-"}
    head, mode = name.rsplit("-", 1)
    return {"color": VARIANTS[head].colour, "linestyle": STYLES[mode]}


def smooth(values: pd.DataFrame) -> pd.DataFrame:
    return values.rolling(max(len(values) // 50, 1), center=True, min_periods=1).mean()


def _draw(frame: pd.DataFrame, metric: str, what: str) -> Figure:
    """Curves, and their distances from the reference, which are 0 where the arithmetic is identical."""
    figure, (left, right) = subplots(2.8, 2)
    values = curves(frame, metric)
    for name, column in smooth(values).items():
        left.plot(column.index, column, lw=1.0, label=label(name), **_look(name))
    left.set(xlabel="training step", ylabel=what)
    _distances(right, values, what)
    handles = [*left.get_lines(), *(line for line in right.get_lines() if not line.get_label().startswith("_"))]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _distances(axes: Axes, values: pd.DataFrame, what: str) -> None:
    window = max(len(values) // 50, 1)
    found = values.sub(values[REFERENCE], axis=0).abs().drop(columns=REFERENCE)
    for name, column in found.rolling(window, center=True, min_periods=1).max().items():
        if column.max() > 0:
            axes.plot(column.index, column.where(column > 0), lw=1.0, marker=".", ms=2, **_look(name))
    if ORDER in found:
        axes.axhline(found[ORDER].max() / 10, label="another order's largest / 10", **FLOOR)
    axes.set(xlabel="training step", ylabel=f"distance: {what}", yscale="log")


def fig1_loss(frame: pd.DataFrame) -> Figure:
    """Losses over steps, and their distances from the reference's losses."""
    return _draw(frame, "loss", "loss (nats a token)")


def fig2_grad_norm(frame: pd.DataFrame) -> Figure:
    """The same for the norm of all gradients."""
    return _draw(frame, "grad_norm", "gradient norm")


def differences(frame: pd.DataFrame, metric: str) -> pd.Series:
    """Each variant's largest distance from the reference, over all steps."""
    values = curves(frame, metric)
    return values.sub(values[REFERENCE], axis=0).abs().max()


def last_twentieth(frame: pd.DataFrame) -> pd.Series:
    """Each variant's mean loss over the last twentieth of its steps."""
    losses = curves(frame, "loss")
    return losses.tail(max(len(losses) // 20, 1)).mean()


def _facts(frame: pd.DataFrame, name: str) -> dict[str, float]:
    losses, ends = curves(frame, "loss"), last_twentieth(frame)
    held_out = pick(frame, "held_out_loss", "train", name)
    norms = curves(frame, "grad_norm")
    relative = (norms[name] / norms[REFERENCE] - 1).abs().max()
    return {
        "final_loss": float(ends[name]),
        "held_out_loss": float(held_out.iloc[-1]) if len(held_out) else np.nan,
        "largest_difference": float(differences(frame, "loss")[name]),
        "smooth_difference": float(smooth(losses).sub(smooth(losses)[REFERENCE], axis=0)[name].abs().max()),
        "final_difference": float(ends[name] - ends[REFERENCE]),
        "norm_difference": float(relative),
        "wall_ms": median(frame, "wall_ms", "train", name),
    }


def table1(frame: pd.DataFrame) -> Table:
    """One row per variant: its final losses, and its largest differences from the reference."""
    rows = []
    for name in curves(frame, "loss").columns:
        facts = _facts(frame, name)
        rows.append({
            "head; mode": label(name),
            "loss, last twentieth": facts["final_loss"],
            "held-out loss": facts["held_out_loss"],
            "largest difference of loss": facts["largest_difference"],
            "of running means": facts["smooth_difference"],
            "of the norm, relative": facts["norm_difference"],
            "step, beside others (ms)": facts["wall_ms"],
        })  # fmt: skip
    return make_table(rows)


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """`convergence.<variant>.<fact>`, and the largest difference of exact variants over that of another text order."""
    names = list(curves(frame, "loss").columns)
    for name in names:
        for fact, value in _facts(frame, name).items():
            out.set(f"convergence.{name}.{fact}", value, "ms" if fact == "wall_ms" else "")
    alike = [_facts(frame, name) for name in exact(names)]
    out.set("convergence.exact.smooth_difference", max(facts["smooth_difference"] for facts in alike))
    held_out = [facts["held_out_loss"] for facts in (*alike, _facts(frame, REFERENCE))]
    out.set("convergence.exact.held_out_spread", max(held_out) - min(held_out))
    largest = differences(frame, "loss")
    worst = float(largest[exact(names)].max())
    out.set("convergence.exact.largest_difference", worst)
    out.set("convergence.exact.over_order", worst / float(largest[ORDER]))
    out.set("convergence.order.tenth", float(largest[ORDER]) / 10)
    for fact in ("steps", "tokens", "params", "vocabulary", "train_tokens", "held_out_tokens", "bytes"):
        out.set(f"convergence.{fact}", median(frame, fact, "facts", "all"), "", ",.0f")


FIGURES = {f.__name__: f for f in (fig1_loss, fig2_grad_norm)}
TABLES = {"table1": table1}
