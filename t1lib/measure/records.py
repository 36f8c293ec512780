"""The results of a run: tidy rows of raw samples, from which all else is made, and the few numbers that texts quote."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import pandas as pd

from t1lib.errors import choose, require, shown

COLUMNS = ("variant", "phase", "step", "metric", "unit", "value")
# shared: ran on ranks that shared a GPU; wrong: errors of loss or gradients exceed their bound. Neither gets a time.
STATUSES = ("ok", "shared", "oom", "unavailable", "skipped", "wrong", "failed")
UNITS = {"_ms": "ms", "_mib": "MiB", "_gib": "GiB", "_gb_s": "GB/s"}  # by how a metric's name ends
_WHOLE = re.compile(r"-?[0-9]+")  # a step that is read as a number
Row = dict[str, Any]


class Records:
    """Rows of `variant, phase, step, metric, unit, value`: one row per sample, none of them averaged.

    parts  returns the lists of valid rows; by default there is one, `own`, the list to which rows are added
    allow  called with rows that are to be added; raises `T1Error` if they must not be
    read   called before somebody is given the valid rows"""

    def __init__(
        self,
        parts: Callable[[], Iterable[list[Row]]] | None = None,
        allow: Callable[[list[Row]], None] = lambda rows: None,
        read: Callable[[], None] = lambda: None,
    ) -> None:
        self.own: list[Row] = []
        self._parts, self._allow, self._read = parts or (lambda: [self.own]), allow, read
        self.closed = False  # True: they are another run's, and nothing may be added

    @property
    def rows(self) -> list[Row]:
        """All valid rows, part by part."""
        self._read()
        return [row for part in self._parts() for row in part]

    def remove_times(self, variant: str, phase: str) -> None:
        """Remove a variant's rows in ms in a phase."""
        for part in self._parts():
            part[:] = [r for r in part if (r["variant"], r["phase"], r["unit"]) != (variant, phase, "ms")]

    def put(self, variant: str, phase: str, values: Mapping[str, float], step: int | str = "") -> None:
        """Append a sample of each metric, whose name tells the unit (`UNITS`); a value may be a one-element tensor."""
        for metric, value in values.items():
            unit = next((unit for end, unit in UNITS.items() if metric.endswith(end)), "")
            self.extend([dict(zip(COLUMNS, (variant, phase, step, metric, unit, float(value)), strict=True))])

    def status(self, variant: str, state: str, phase: str = "", why: str = "") -> None:
        """Append how a variant's measurement ended, one of `STATUSES`, and print the reason `why`. Each state is kept
        only once per variant and phase, and `ok` is not added after another state."""
        row = {"variant": variant, "phase": phase, "step": "", "metric": "status", "unit": "", "value": state}
        known = {own["value"] for own in self.own if own | {"value": state} == row}
        if choose("status", state, STATUSES) in known or (state == "ok" and known):
            return
        self.extend([row])
        if why:
            print(f"{phase}: {variant} is {state}: {why}")

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows, such as other records'. Raises `T1Error` for names that samples.csv would not give back, if
        `closed`, or by `allow`."""
        require(not self.closed, "nothing is recorded with `measure` False; begin measuring cells with `if p.measure:`")
        rows = list(rows)
        for column, name in ((column, row[column]) for row in rows for column in COLUMNS[:4]):
            fits, allowed = isinstance(name, str) and name.isprintable(), "printable text"
            if column == "step":
                whole = isinstance(name, Integral) and not isinstance(name, bool)  # NumPy's, too
                fits, allowed = whole or (fits and not _WHOLE.fullmatch(name)), "whole numbers, other printable text"
            require(fits, f"the {column} {shown(name)} of a sample; allowed: {allowed}")
        self._allow(rows)
        self.own += rows

    def frame(self) -> pd.DataFrame:
        """The valid rows as a table. `value` holds floats, or text in rows with metric `status`."""
        self._read()
        return self._table()

    def _table(self) -> pd.DataFrame:
        return pd.DataFrame([row for part in self._parts() for row in part], columns=list(COLUMNS))

    def save(self, path: Path) -> None:
        """Write the rows as CSV; floats in the shortest form that reads back exactly."""
        self._table().to_csv(path, index=False, na_rep="nan", lineterminator="\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. Raises `T1Error` if the columns are not `COLUMNS`."""
        records, frame = cls(), pd.read_csv(path, dtype=str, keep_default_na=False)
        require(tuple(frame) == COLUMNS, f"{path} has columns {', '.join(frame)}; allowed: {', '.join(COLUMNS)}")
        records.own = frame.to_dict("records")
        for row in records.own:
            row["step"] = int(row["step"]) if _WHOLE.fullmatch(row["step"]) else row["step"]
            row["value"] = row["value"] if row["metric"] == "status" else float(row["value"])
        return records


def numeric(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows other than statuses, with `value` as float64."""
    rows = frame[frame["metric"] != "status"]
    return rows.assign(value=rows["value"].astype("float64"), step=rows["step"].infer_objects())


def pick(frame: pd.DataFrame, metric: str, phase: str = "", variant: str | None = None) -> pd.Series:
    """Values of a metric in a phase (of one variant if given), in the order in which they were measured; none for
    `status`, which is text."""
    wanted = (frame["metric"] == metric) & (frame["phase"] == phase) & (metric != "status")
    if variant is not None:
        wanted &= frame["variant"] == variant
    return frame.loc[wanted, "value"].astype("float64")


def present(frame: pd.DataFrame, metric: str, phase: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that have a value of this metric."""
    return [n for n in names if len(pick(frame, metric, phase, n))]


def median(frame: pd.DataFrame, metric: str, phase: str, variant: str) -> float:
    """Median of a variant's samples; NaN where there are none."""
    return float(pick(frame, metric, phase, variant).median())


def statuses(frame: pd.DataFrame) -> dict[str, str]:
    """Variant → status, the last one if several were recorded."""
    rows = frame[frame["metric"] == "status"]
    return dict(zip(rows["variant"], rows["value"], strict=True))


def gate_losses(records: Records, runs: Sequence[tuple[str, str, str]], bound: float) -> float:
    """Compare the losses of runs with those of the first that has any, step by step; record and return the largest
    relative difference. A run that differs by more than `bound`, or has no step in common, gets status `wrong`, and its
    times are removed: a wrong result has no speed.

    runs    variant, phase of its losses, phase of its times"""
    rows = numeric(records._table())
    rows = rows[rows["metric"] == "loss"].drop_duplicates(["variant", "phase", "step"], keep="last")
    losses = {run: own.set_index("step")["value"] for run, own in rows.groupby(["variant", "phase"])}
    trained = [run for run in runs if run[:2] in losses]
    worst = 0.0
    for variant, of_losses, of_times in trained:
        found, expected = losses[variant, of_losses].align(losses[trained[0][:2]], join="inner")
        apart = ((found - expected) / expected).abs().mask(found == expected, 0.0).fillna(math.inf)  # NaN never agrees
        apart = float(apart.max()) if len(apart) else math.inf  # no step in common
        worst = max(worst, apart)
        if apart > bound:
            records.remove_times(variant, of_times)
            records.status(variant, "wrong", of_times)
    if trained:
        records.put("all", trained[0][2], {"loss_difference": worst})
    return worst


def format_number(value: Any) -> str:
    """A value formatted for readers: three significant digits, whole numbers in full."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "n/a"
    rounded = abs(float(f"{value:.3g}"))  # decides the form: 999.6 becomes 1000, not 1.00e+03
    if isinstance(value, int) or rounded == 0 or 1000 <= rounded < 1e7:
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"  # four digits are readable as they are
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= rounded < 1000 else f"{value:.2e}"


_NUMBER = re.compile(r"(-?[\d,]+(?:\.\d+)?)(?:e([+-]?\d+))?")
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {character: "\\" + character for character in "&%$#_{}"}
_LATEX |= {character: rf"\ensuremath{{{character}}}" for character in "<>|"}  # in LaTeX's default font they are others
# Lets any paper \input the file: a missing key stops the build instead of printing nothing.
_TEX_HEAD = r"""% Written by a run; do not edit. \result{key} prints a number, \resultunit{key} its unit.
\providecommand{\setresult}[3]{\expandafter\gdef\csname result:#1\endcsname{#2}%
  \expandafter\gdef\csname result-unit:#1\endcsname{#3}}
\providecommand{\result}[1]{\ifcsname result:#1\endcsname\csname result:#1\endcsname\else
  \errmessage{no result with the key #1}\fi}
\providecommand{\resultunit}[1]{\ifcsname result-unit:#1\endcsname\csname result-unit:#1\endcsname\else
  \errmessage{no result with the key #1}\fi}
"""


def escape_latex(text: str) -> str:
    """`text` escaped for LaTeX; negative and scientific numbers in math mode."""
    number = _NUMBER.fullmatch(text)
    if number and (text.startswith("-") or number[2]):
        power = rf"\times10^{{{int(number[2])}}}" if number[2] else ""
        return rf"\ensuremath{{{number[1].replace(',', '{,}')}{power}}}"
    return "".join(_LATEX.get(character, character) for character in text)


class Numbers(dict[str, dict[str, Any]]):
    """The numbers that prose quotes: key -> {value, unit, text}; keys like `t1m1.slide.wall_ms`."""

    def set(self, key: str, value: Any, unit: str = "", fmt: str | None = None) -> None:
        """Set a number; `fmt` is a format specification such as ".1f", by default `format_number` formats it. Raises
        `T1Error` for a key that LaTeX could not take, or a value that JSON could not; an earlier one is then gone."""
        known = isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", key) is not None
        require(known, f"the key {shown(key)} may hold letters, digits, '_', '-' and '.' only")
        self.pop(key, None)
        with suppress(ValueError, RuntimeError):  # an array or tensor of several
            value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        plain = isinstance(value, bool | int | float | str | None) and isinstance(unit, str)
        require(plain, f"the number {key!r} is {shown(value)} in {shown(unit)}; allowed: a number or a text, in a text")
        finite = not isinstance(value, float) or math.isfinite(value)
        text = format(value, fmt) if fmt and finite else format_number(value)
        self[key] = {"value": value if finite else None, "unit": unit, "text": text}

    def save_json(self, path: Path) -> None:
        """Write all numbers as JSON, sorted by key; a number that is not finite is null."""
        text = json.dumps(self, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8", newline="\n")

    def save_tex(self, path: Path) -> None:
        r"""Write a line `\setresult{key}{text}{unit}` per number, after the commands that look numbers up."""
        text = _TEX_HEAD
        for key, entry in sorted(self.items()):
            text += rf"\setresult{{{key}}}{{{escape_latex(entry['text'])}}}{{{escape_latex(entry['unit'])}}}" + "\n"
        path.write_text(text, encoding="utf-8", newline="\n")
