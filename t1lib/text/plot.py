"""The plot of a training run's metrics."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
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
    steps, window = frame["step"], max(len(frame) // 50, 1)
    where = "device" if frame["device_gib"].notna().any() else "host"
    with plt.rc_context(STYLE):
        figure, (losses, rate, memory) = subplots(2.4, 3)
        losses.plot(steps, frame["loss"], color="0.75", lw=0.8, label="each step")
        if window > 1:
            mean = frame["loss"].rolling(window, center=True, min_periods=1).mean()
            losses.plot(steps, mean, color=VARIANTS["gpu"].colour, lw=1.2, label=f"mean of {window} steps")
        if frame["held_out_loss"].notna().any():
            losses.plot(steps, frame["held_out_loss"], "o", color=VARIANTS["fsdp"].colour, ms=3, label="held out")
        losses.set(ylabel="loss")
        losses.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
        rate.plot(steps, frame["tokens_per_s"], color=VARIANTS["slide"].colour, lw=0.8)
        rate.set(ylabel="tokens / s", ylim=(0, 1.1 * frame["tokens_per_s"].max()))
        memory.plot(steps, frame[f"{where}_gib"], color=VARIANTS["ckpt"].colour, lw=1.2)
        memory.set(ylabel=f"{where} memory (GiB)", ylim=(0, 1.2 * frame[f"{where}_gib"].max()))
        for axes in (losses, rate, memory):
            axes.set(xlabel="step")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        try:
            figure.savefig(path)
        finally:
            plt.close(figure)
