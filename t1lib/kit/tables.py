"""Tables: a data frame to display and LaTeX to include, from one source."""

from collections.abc import Iterable

import pandas as pd

from t1lib.measure.records import escape_latex, format_number

MISSING = "–"
EM = 0.54  # width of a character


def cell(value: object) -> str:
    """A table cell: a number with sensible digits, a dash for what was not measured, text unchanged."""
    return MISSING if value is None or value != value else format_number(value)


def make_table(rows: Iterable[dict[str, object]]) -> pd.DataFrame:
    """Rows of column → value as a table of texts; a column in GiB is shown in MiB if all of its values are small."""
    frame = pd.DataFrame(rows, dtype=object).rename(columns=str)
    for name in [name for name in frame if "(GiB)" in name]:
        values = pd.to_numeric(frame[name], errors="coerce")
        scale, unit = memory_unit(values.dropna())
        if values.notna().any() and unit != "GiB":
            frame[name] = (values * scale).where(values.notna(), frame[name])  # which may be a text, such as oom
            frame = frame.rename(columns={name: name.replace("(GiB)", f"({unit})")})
    return frame.map(cell)


def memory_unit(gib: Iterable[float]) -> tuple[float, str]:
    """(factor from GiB, unit) in which the values are easy to read: MiB if all are small, else GiB."""
    return (1024.0, "MiB") if max(gib, default=0.0) < 0.1 else (1.0, "GiB")


def to_latex(frame: pd.DataFrame, text_columns: int = 1) -> str:
    """LaTeX for any document that loads `array`, `booktabs` and `graphicx`: the first `text_columns` are left-aligned
    text, the others numbers; headers and text wrap, and what is still wider than the line is scaled down to it."""
    frame = frame if len(frame.columns) else pd.DataFrame({MISSING: [MISSING]})
    most = max(14, 90 // len(frame.columns))
    columns = [_column(name, frame[name], index < text_columns, most) for index, name in enumerate(frame.columns)]
    table = frame.map(_tex).rename(columns=_tex).style.hide(axis="index")
    body = table.to_latex(column_format="".join(columns), hrules=True).rstrip()
    fitted = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    return f"{{\\footnotesize\\setlength{{\\tabcolsep}}{{3pt}}%\n{fitted}\n{body}}}}}%\n"


def _column(name: str, cells: pd.Series, text: bool, most: int) -> str:
    """LaTeX for a column as wide as its longest cell (of text, at `most` so many characters) or word of its header."""
    longest = int(cells.str.len().max()) if len(cells) else 0
    width = max(min(longest, most) if text else longest, *map(len, name.split()), 1)
    ragged, kind = ("raggedright", "p") if text else ("raggedleft", "b")
    return rf">{{\{ragged}\arraybackslash}}{kind}{{{width * EM + 0.3:.2f}em}}"


def mean_std(values: pd.Series) -> str:
    """`mean ± std`, as in the reports; a dash without values, and for the deviation of a single one."""
    return f"{cell(values.mean())} ± {cell(values.std(ddof=1))}" if len(values) else MISSING


def median_iqr(values: pd.Series) -> str:
    """`median [quartile, quartile]`; a dash without values."""
    low, mid, high = (cell(values.quantile(q)) for q in (0.25, 0.5, 0.75))
    return f"{mid} [{low}, {high}]" if len(values) else MISSING


def _tex(text: str) -> str:
    commands = {"±": r"\ensuremath{\pm}", "×": r"\ensuremath{\times}", MISSING: "--"}
    commands |= {"≤": r"\ensuremath{\le}", "≥": r"\ensuremath{\ge}", "−": r"\ensuremath{-}"}
    guard = "{}" * text.startswith(("[", "*"))  # else LaTeX takes it for a part of the command that ended the last row
    return guard + escape_latex(text).translate(str.maketrans(commands))
