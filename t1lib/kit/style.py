"""One style for all figures and tables. Figures: sizes for a LaTeX page, the colour, marker and label of each variant,
and the parts that both reports draw. Tables: a data frame to display and LaTeX to include, from one source."""

from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from t1lib import paths
from t1lib.measure.records import escape_latex, format_number, median, pick

MISSING = "–"
EM = 0.54  # width of a character, in em
WIDTH = 6.3  # inches: the text width of the reports; figures are included at their own size

_COLOURS = sns.color_palette("colorblind")


@dataclass(frozen=True)
class Variant:
    label: str
    colour: tuple[float, float, float]
    marker: str
    short: str = ""

    def tick(self) -> str:
        """The label under a narrow bar."""
        return self.short or self.label


VARIANTS: dict[str, Variant] = {
    "gpu": Variant("gpu", _COLOURS[0], "o"),
    "ckpt": Variant("ckpt", _COLOURS[1], "s"),
    "slide": Variant("slide", _COLOURS[2], "^"),
    "fsdp": Variant("fsdp", _COLOURS[3], "v"),
    "slide-serial": Variant("slide-serial", _COLOURS[2], "^"),
    "slide-device": Variant("slide-device", _COLOURS[2], "^"),
    "gpu-graph": Variant("gpu-graph", _COLOURS[0], "o"),
    "full": Variant("full", _COLOURS[0], "o"),
    "chunked": Variant("chunked, by sequence", _COLOURS[2], "^", "chunked,\nsequence"),
    "chunked-vocabulary": Variant("chunked, by vocabulary", _COLOURS[4], "D", "chunked,\nvocabulary"),
    "fused": Variant("fused", _COLOURS[1], "s"),
    "fused-filter": Variant("fused, filtered", _COLOURS[1], "d"),
    "fused-fp8": Variant("fused, FP8", _COLOURS[4], "D"),
    "compile": Variant("torch.compile of full", _COLOURS[9], "P"),
    "cce": Variant("CCE", (0.3, 0.3, 0.3), "X"),
    "cce-exact": Variant("CCE, no filter", _COLOURS[7], "p"),
    "liger": Variant("Liger", _COLOURS[5], "h"),
    "liger-sm90": Variant("Liger for Hopper", _COLOURS[5], ">"),
    "quack": Variant("QuACK, 4096 rows per chunk", _COLOURS[8], "<"),
    "quack-1024": Variant("QuACK, 1024 rows per chunk", _COLOURS[8], "*"),
    "trl": Variant("TRL", (0.35, 0.1, 0.45), "8"),
    "torch-1024": Variant("torch, 1024 rows per chunk", _COLOURS[6], ">"),
    "torch": Variant("torch (PyTorch's own)", _COLOURS[3], "v", "torch"),
}
_SOFT = sns.color_palette("Set2")  # phases are not variants: colours of their own
PHASE_COLOURS = {
    "forward": _SOFT[2],
    "head forward": _SOFT[3],
    "head backward": _SOFT[4],
    "backward": _SOFT[1],
    "optimizer": _SOFT[0],
    "recompute": _SOFT[5],
    "head": _SOFT[3],
    "graph": _SOFT[7],
}
SHADES = sns.color_palette("crest", 5)  # for shapes and kinds of data, which are not variants either
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # box behind a label, where lines cross it
FLOOR = {"color": "0.25", "linestyle": "--", "linewidth": 1.0}

STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "figure.dpi": 110,
}


def subplots(height: float, columns: int = 1, **kwargs: object) -> tuple[Figure, Axes]:
    """A figure of the text width and `height` inches. Call it where `STYLE` is in force."""
    return plt.subplots(1, columns, figsize=(WIDTH, height), **kwargs)


def plain_numbers(axes: Axes) -> None:
    """Label a logarithmic y axis at 1, 2, 5, 10, … with plain numbers, not powers of ten."""
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_grouped(
    axes: Axes, frame: pd.DataFrame, phase: str, names: list[str], kinds: dict[str, tuple[str, str]], what: str
) -> None:
    """Memory as grouped bars, one group per variant; `kinds`: metric in GiB → (label, colour), one bar each."""
    scale, unit = memory_unit([median(frame, k, phase, n) for k in kinds for n in names])
    made = {label: [median(frame, k, phase, n) * scale for n in names] for k, (label, _) in kinds.items()}
    table = pd.DataFrame(made, index=[VARIANTS[name].tick() for name in names])
    if table.size:
        table.plot.bar(ax=axes, width=0.8, rot=0, color=[colour for _, colour in kinds.values()])
        axes.margins(y=0.12)
    size = 6.5 if len(names) < 4 else 5.5
    for bars in axes.containers:
        axes.bar_label(bars, fmt=lambda v: format_number(float(v)) if v else "", fontsize=size, padding=1.5)
    axes.set_ylabel(f"{what} ({unit})")
    axes.grid(axis="x", visible=False)
    if names and kinds:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def draw_phases(axes: Axes, frame: pd.DataFrame, setting: str, names: list[str]) -> None:
    """One stacked bar per variant, the first on top: its median step, split in proportion to its phases' medians."""
    metrics = {phase: phase.replace(" ", "_") + "_ms" for phase in PHASE_COLOURS}
    parts = pd.DataFrame({p: {n: median(frame, m, setting, n) for n in names} for p, m in metrics.items()}).fillna(0.0)
    wall = pd.Series({name: median(frame, "wall_ms", setting, name) for name in names}, dtype=float)
    parts = parts.mul(wall / parts.sum(axis=1), axis=0)  # medians of phases do not add up to that of the step
    parts = parts.loc[:, parts.sum() > 0].rename(index=lambda name: VARIANTS[name].label)
    if parts.size:
        parts.plot.barh(ax=axes, stacked=True, width=0.5, color=PHASE_COLOURS, legend=False)
    for row, name in enumerate(names):
        at, text = (wall[name], row), format_number(float(wall[name]))
        axes.annotate(text, at, (3, 0), textcoords="offset points", va="center", fontsize=7, bbox=BEHIND)
    axes.set(xlabel="median time of a step, by phase (ms)", xlim=(0, 1.1 * max(wall, default=1.0)))
    axes.invert_yaxis()


def draw_timeline(frame: pd.DataFrame, names: list[str]) -> Figure:
    """Allocated memory over one step, from the allocator's history; reserved memory dotted if the device has it."""
    figure, axes = subplots(2.7)
    scale, unit = memory_unit([float(pick(frame, "allocated_gib", "timeline", n).max()) for n in names])
    for name in names:
        style = VARIANTS[name]
        ms = pick(frame, "at_ms", "timeline", name).to_numpy()
        progress = ms / ms[-1] if len(ms) and ms[-1] > 0 else ms
        axes.plot(progress, pick(frame, "allocated_gib", "timeline", name) * scale, color=style.colour, lw=1.1,
                  label=style.label, drawstyle="steps-post")  # fmt: skip
        reserved = pick(frame, "reserved_gib", "timeline", name)
        if len(reserved):
            axes.plot(progress, reserved * scale, color=style.colour, lw=0.9, ls=":")
    axes.set(xlabel="progress within one step", ylabel=f"memory on the device ({unit})", ylim=(0, None), xlim=(0, 1))
    if len(pick(frame, "reserved_gib", "timeline")):
        axes.plot([], [], color="0.4", lw=0.9, ls=":", label="the same, reserved")  # one legend entry for all variants
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


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
    """LaTeX for a column as wide as its longest cell (of text at most `most` characters: it wraps) or header word."""
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
    guard = "{}" * text.startswith(("[", "*"))  # else LaTeX reads it as part of the \\ that ended the row above
    return guard + escape_latex(text).translate(str.maketrans(commands))


def differences(report: str) -> list[dict[str, object]]:
    """Rows of a table: where a report ("T1M1" or "T1M3") and its own data differ, and what the kit does instead."""
    page = (paths.root() / "docs" / "differences.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| D")]
    names = "", "the report", "its data or code", "this kit"
    return [dict(zip(names, (key, *told), strict=True)) for key, where, *told in lines if where in (report, "both")]


def digits(metric: str, value: float) -> str:
    """Format specification that prints a published value with the digits with which it was published."""
    return ".2f" if metric.endswith("_gib") else ".0f" if value == int(value) else ".1f"
