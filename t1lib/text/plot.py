"""The plot of a training run's metrics."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from t1lib.errors import require
from t1lib.files import whole
from t1lib.kit.style import STYLE, VARIANTS, subplots


def plot_metrics(metrics: Path, path: Path) -> Path:
    """Draw a run's metrics.csv to `path`. Raises `T1Error` if it has no row, or the figure cannot be written."""
    frame = pd.read_csv(metrics)
    require(len(frame) > 0, f"{metrics} has no step to plot")
    with whole(path) as partial:
        draw_metrics(frame, partial)
    return path


def draw_metrics(frame: pd.DataFrame, path: Path) -> None:
    """Write to `path` a figure of loss, tokens/s and memory over steps, from the metrics of `t1lib.text.run`."""
    with plt.rc_context(STYLE):
        figure, (losses, rate) = subplots(2.4, 2)
        _losses(losses, frame)
        colours = VARIANTS["slide"].colour, VARIANTS["ckpt"].colour
        rate.plot(frame["step"], frame["tokens_per_s"], color=colours[0], lw=0.8, label="tokens/s")
        rate.set(xlabel="step", ylabel="tokens / s", ylim=(0, 1.1 * frame["tokens_per_s"].max()))
        for axes in (losses, rate):
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        memory = rate.twinx()
        where = "device_gib" if frame["device_gib"].notna().any() else "host_gib"
        label = f"memory of the {where.removesuffix('_gib')}"
        memory.plot(frame["step"], frame[where], color=colours[1], lw=1.2, label=label)
        memory.set(ylabel=f"{label} (GiB)", ylim=(0, 1.2 * frame[where].max()))
        memory.grid(False)
        memory.spines["right"].set_visible(True)
        handles = [*rate.get_lines(), *memory.get_lines()]
        rate.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        try:
            figure.savefig(path)
        finally:
            plt.close(figure)


def _losses(axes: Axes, frame: pd.DataFrame) -> None:
    window = max(len(frame) // 50, 1)
    axes.plot(frame["step"], frame["loss"], color="0.75", lw=0.8, label="each step")
    if window > 1:
        mean = frame["loss"].rolling(window, center=True, min_periods=1).mean()
        axes.plot(frame["step"], mean, color=VARIANTS["gpu"].colour, lw=1.2, label=f"mean of {window} steps")
    held_out = frame.dropna(subset=["held_out_loss"])
    if len(held_out):
        colour = VARIANTS["fsdp"].colour
        axes.plot(held_out["step"], held_out["held_out_loss"], "o", color=colour, ms=3, label="held out")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handlelength=1.2)
