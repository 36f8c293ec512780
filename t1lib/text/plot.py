"""The plot of a training run's metrics."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from t1lib.kit.style import STYLE, subplots


def draw_metrics(metrics: Path, path: Path) -> None:
    """Draw loss, tokens/s and memory over the steps of a run's metrics.csv."""
    frame = pd.read_csv(metrics, index_col="step").dropna(axis="columns", how="all")
    frame["running mean"] = frame["loss"].rolling(max(len(frame) // 50, 1), center=True, min_periods=1).mean()
    losses = frame.rename(columns={"held_out_loss": "held-out loss"})
    losses = losses.reindex(columns=["loss", "running mean", "held-out loss"]).dropna(axis="columns", how="all")
    memory = frame["device_gib" if "device_gib" in frame else "host_gib"]
    with plt.rc_context(STYLE):
        figure, axes = subplots(2.4, 3)
        losses.plot(ax=axes[0], style=["0.75", "-", "o"], ms=3, ylabel="loss")
        frame["tokens_per_s"].plot(ax=axes[1], ylim=(0, 1.1 * frame["tokens_per_s"].max()), ylabel="tokens / s")
        memory.plot(ax=axes[2], ylim=(0, 1.2 * memory.max()), ylabel=f"{memory.name.removesuffix('_gib')} memory (GiB)")
        figure.savefig(path)
        plt.close(figure)
