"""The numbers of `cce` that prose quotes, from its records alone."""

import pandas as pd

from t1lib.kit import published
from t1lib.kit.select import median, pick
from t1lib.measure.records import Numbers
from t1lib.report.cce_select import (
    DATA,
    METHODS,
    bar_rows,
    beside,
    filter_pairs,
    mean_variants,
    measured,
    phases,
    three,
    workspace,
)

TIMES = ("loss_ms", "forward_ms", "backward_ms", "both_ms")
_UNITS = {"ms": "ms", "mb": "MB"}
ERRORS = ("error_loss", "error_dE", "error_dW")


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """`cce.<data>.<shape>.<variant>.<metric>`, `cce.bar.<shape>.<variant>.<metric>`, and what is derived from them.

    Each of `METHODS` that was tried has all keys for `TIMES[1:]` and `ERRORS`, without a value if it was not measured.
    """
    for phase in measured(frame):
        _phase_numbers(frame, phase, out)
    for shape in (phase.split("/")[1] for phase in phases(frame, "flat")):
        _workspace_numbers(frame, shape, out)
    _bar_numbers(frame, out)
    _model_numbers(frame, out)
    for theirs, (_, values) in published.CCE.items():
        for metric, value in values.items():
            name = theirs.replace(", ", "-").replace(" ", "-")
            out.set(f"cce.published.{name}.{metric}", value, _UNITS.get(metric[-2:], ""), "g")


def _phase_numbers(frame: pd.DataFrame, phase: str, out: Numbers) -> None:
    key = f"cce.{phase.replace('/', '.')}"
    for metric in ("tokens", "vocabulary", "hidden"):
        out.set(f"{key}.{metric}", median(frame, metric, phase, "all"), "", ".0f")
    logits, products = median(frame, "logits_ms", phase, "floor"), three(frame, phase)
    out.set(f"{key}.floor.logits_ms", logits, "ms")
    out.set(f"{key}.floor.three_ms", products, "ms")
    tried = [method for method in METHODS if (frame["variant"] == method).any()]
    for name in [*tried, *(v for v in mean_variants(frame, phase) if v not in METHODS)]:
        out.set(f"{key}.{name}.n", len(pick(frame, "both_ms", phase, name)))
        loss_alone, both = (len(pick(frame, metric, phase, name)) > 0 for metric in ("loss_ms", "both_ms"))
        for metric in (*TIMES[1:], *ERRORS) if both or not loss_alone or name in tried else ():
            value = median(frame, metric, phase, name)
            out.set(f"{key}.{name}.{metric}", value, "ms" if metric.endswith("_ms") else "")
        if loss_alone:
            out.set(f"{key}.{name}.loss_ms", median(frame, "loss_ms", phase, name), "ms")
            out.set(f"{key}.{name}.loss_over_logits", median(frame, "loss_ms", phase, name) / logits, "", ".3f")
        if both:
            out.set(f"{key}.{name}.over_three", median(frame, "both_ms", phase, name) / products, "", ".3f")
            for metric in ERRORS:
                full = median(frame, metric, phase, "full")
                if full > 0:
                    out.set(f"{key}.{name}.{metric}_over_full", median(frame, metric, phase, name) / full, "", ".3f")
    for name, exact in filter_pairs(frame, phase):
        ratio = median(frame, "both_ms", phase, name) / median(frame, "both_ms", phase, exact)
        out.set(f"{key}.{name}.time_over_exact", ratio, "", ".3f")


def _workspace_numbers(frame: pd.DataFrame, shape: str, out: Numbers) -> None:
    phase = f"flat/{shape}"
    for name in [*METHODS, *(v for v in mean_variants(frame, phase) if v not in METHODS)]:
        for metric in ("workspace_mib", "loss_workspace_mib"):
            value = workspace(frame, shape, name, metric)
            if value == value:
                out.set(f"cce.flat.{shape}.{name}.{metric}", value, "MiB")
    for peer in METHODS:
        own, ms = beside(frame, shape, peer), median(frame, "both_ms", phase, peer)
        if own and ms > 0:
            ratio = median(frame, "both_ms", phase, own) / ms
            out.set(f"cce.flat.{shape}.{peer}.fused_time_ratio", ratio, "", ".3f")


def _bar_numbers(frame: pd.DataFrame, out: Numbers) -> None:
    rows = bar_rows(frame)
    for row in rows:
        key = f"cce.bar.{row['shape']}.{row['variant']}"
        out.set(f"{key}.ratio", row["ratio"], "", ".3f")
        out.set(f"{key}.ms", row["ms"], "ms")
        out.set(f"{key}.workspace_mib", row["mib"], "MiB")
        out.set(f"{key}.met", bool(row["met"]))
    out.set("cce.bars.count", len(rows))
    out.set("cce.bars.met", sum(bool(row["met"]) for row in rows))


def _model_numbers(frame: pd.DataFrame, out: Numbers) -> None:
    for metric in ("params", "files", "bytes", "train_tokens", "held_out_tokens", "steps"):
        out.set(f"cce.model.{metric}", median(frame, metric, "train", "model"), "", ".0f")
    losses = pick(frame, "loss", "train", "model")
    out.set("cce.model.last_losses", float(losses.tail(50).mean()), "nats", ".2f")
    out.set("cce.model.held_out_loss", median(frame, "held_out_loss", "train", "model"), "nats", ".2f")
    # 48 bits of the text's hash, which a float64 represents exactly.
    out.set("cce.model.corpus", f"{int(median(frame, 'corpus', 'train', 'model')):012x}")
    for data in DATA:
        for metric in ("mass_below", "entries_below", "tiles", "tiles_sorted"):
            value = median(frame, metric, "sparsity", data)
            if value == value:
                out.set(f"cce.sparsity.{data}.{metric}", value)
    for metric in sorted(set(frame[frame["phase"] == "expected"]["metric"])):
        out.set(f"cce.expected.{metric}", median(frame, metric, "expected", "head"))
