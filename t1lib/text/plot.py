"""The plot of a training run's metrics."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import MaxNLocator

from t1lib.kit.style import STYLE, VARIANTS, subplots


def draw_metrics(metrics: Path, path: Path) -> None:
    """Draw loss, tokens/s and memory over the steps of a run's metrics.csv."""
    frame = pd.read_csv(metrics)
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
        losses.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
        rate.plot(steps, frame["tokens_per_s"], color=VARIANTS["slide"].colour, lw=0.8)
        rate.set_ylim(0, 1.1 * frame["tokens_per_s"].max())
        memory.plot(steps, frame[f"{where}_gib"], color=VARIANTS["ckpt"].colour, lw=1.2)
        memory.set_ylim(0, 1.2 * frame[f"{where}_gib"].max())
        for axes, label in ((losses, "loss"), (rate, "tokens / s"), (memory, f"{where} memory (GiB)")):
            axes.set(xlabel="step", ylabel=label)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        figure.savefig(path)
        plt.close(figure)
