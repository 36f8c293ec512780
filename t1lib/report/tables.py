"""Tables: a data frame to display and LaTeX to include, from one source."""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from t1lib.measure.records import escape_latex, format_number

MISSING = "–"


@dataclass(frozen=True)
class Table:
    frame: pd.DataFrame
    latex: str


def cell(value: object) -> str:
    """A table cell: a number with sensible digits, a dash for what was not measured, text unchanged."""
    if value is None or (isinstance(value, float) and value != value):
        return MISSING
    return value if isinstance(value, str) else format_number(value)


def make_table(rows: Iterable[dict[str, object]], text_columns: int = 1) -> Table:
    """A table from rows of column → value; the first `text_columns` are left-aligned text, the others numbers."""
    frame = pd.DataFrame([{k: cell(v) for k, v in row.items()} for row in rows])
    columns = list(frame.columns)
    align = "l" * text_columns + "r" * (len(columns) - text_columns)
    lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
    lines.append(" & ".join(_tex(c) for c in columns) + r" \\ \midrule")
    lines += [" & ".join(_tex(v) for v in row) + r" \\" for row in frame.itertuples(index=False)]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return Table(frame, "\n".join(lines))


def mean_std(values: pd.Series) -> str:
    """`mean ± std`, as in the reports."""
    return f"{cell(float(values.mean()))} ± {cell(float(values.std(ddof=1)) if len(values) > 1 else 0.0)}"


def median_iqr(values: pd.Series) -> str:
    """`median [quartile, quartile]`."""
    low, mid, high = (float(values.quantile(q)) for q in (0.25, 0.5, 0.75))
    return f"{cell(mid)} [{cell(low)}, {cell(high)}]"


def _tex(text: str) -> str:
    escaped = escape_latex(text)
    for character, command in (("±", r"\ensuremath{\pm}"), ("×", r"\ensuremath{\times}"), (MISSING, "--")):
        escaped = escaped.replace(character, command)
    return escaped
