"""One style for all figures: sizes for a LaTeX page, and the colour, marker and label of each variant."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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
    "quack": Variant("QuACK, 4096 rows a chunk", _COLOURS[8], "<"),
    "quack-1024": Variant("QuACK, 1024 rows a chunk", _COLOURS[8], "*"),
    "trl": Variant("TRL", (0.6, 0.6, 0.6), "8"),
    "torch-1024": Variant("torch, 1024 rows a chunk", _COLOURS[6], ">"),
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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
