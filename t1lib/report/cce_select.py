"""Selections from the records of `cce` for its figures, tables and numbers; `head_run` defines their phases."""

import pandas as pd

from t1lib.kit.select import median
from t1lib.kit.style import VARIANTS, Variant

METHODS = (
    "full", "compile", "cce", "cce-exact", "liger", "liger-sm90", "quack", "quack-1024", "trl", "torch", "torch-1024",
    "chunked",
)  # fmt: skip
DATA = {"flat": "random", "peaked": "peaked", "real": "trained model"}


def variants(frame: pd.DataFrame, phase: str) -> list[str]:
    """Variants of a phase: methods in their fixed order, then those of `fused` in the order measured, filtered last."""
    rows = frame[(frame["phase"] == phase) & ~frame["variant"].isin(["all", "floor"])]
    found = list(dict.fromkeys(rows["variant"]))
    own = sorted((v for v in found if v not in METHODS), key=is_filtered)
    return [m for m in METHODS if m in found] + own


def phases(frame: pd.DataFrame, kind: str) -> list[str]:
    """Phases `<kind>/<shape>`, in the order in which they were measured."""
    return [p for p in dict.fromkeys(frame["phase"]) if p.startswith(f"{kind}/")]


def variant_style(variant: str) -> Variant:
    """Colour and marker of a variant; those of `fused` are the same in all workspaces."""
    if is_filtered(variant):
        return VARIANTS["fused-filter"]
    return VARIANTS[variant if variant in VARIANTS else "fused"]


def is_filtered(variant: str) -> bool:
    """Whether the variant is `fused` with gradient filtering."""
    return variant.startswith("fused-filter-")


def variant_label(variant: str) -> str:
    """A readable label: `fused-none-512MiB` becomes "fused, none, 512 MiB"."""
    if variant in VARIANTS:
        return VARIANTS[variant].label
    head, *change, workspace = variant.split("-")
    digits = workspace.rstrip("KMGTiB")
    return ", ".join([head, *(["-".join(change)] if change else []), f"{digits} {workspace[len(digits) :]}"])


def three(frame: pd.DataFrame, phase: str) -> float:
    """Sum of the medians of the three products (ms)."""
    return sum(median(frame, f"{name}_ms", phase, "floor") for name in ("logits", "dE", "dW"))


def workspace(frame: pd.DataFrame, shape: str, variant: str, metric: str = "workspace_mib") -> float:
    """Peak workspace in MiB; it does not depend on the data, so one measurement serves all phases of a shape."""
    return median(frame, metric, f"workspace/{shape}", variant)


def describe(frame: pd.DataFrame, phase: str) -> str:
    """A phase's shape as "N × V × D"."""
    counts = [median(frame, name, phase, "all") for name in ("tokens", "vocabulary", "hidden")]
    return " × ".join(f"{count:.0f}" for count in counts) if all(c == c for c in counts) else ""


def own_shape(frame: pd.DataFrame) -> str:
    """The first shape: that of the paper's Table 1."""
    return next(iter(phases(frame, "flat")), "flat/").split("/")[1]


def mean_variants(frame: pd.DataFrame, phase: str) -> list[str]:
    """The methods, and `fused` in every workspace, exact and filtered, but without changes."""
    return [v for v in variants(frame, phase) if v in METHODS or is_filtered(v) or v == plain_variant(v)]


def beside(frame: pd.DataFrame, shape: str, peer: str) -> str | None:
    """The fastest `fused` with gradients that fits in the peer's workspace; if none does, the one that takes least."""
    phase = f"flat/{shape}"
    if not workspace(frame, shape, peer) >= 0:
        return None
    own = [v for v in mean_variants(frame, phase) if v not in METHODS and not is_filtered(v)]
    own = [v for v in own if median(frame, "both_ms", phase, v) > 0 and workspace(frame, shape, v) >= 0]
    fits = [v for v in own if workspace(frame, shape, v) <= workspace(frame, shape, peer)]
    if fits:
        return min(fits, key=lambda v: median(frame, "both_ms", phase, v))
    return min(own, key=lambda v: workspace(frame, shape, v), default=None)


def filter_pairs(frame: pd.DataFrame, phase: str) -> list[tuple[str, str]]:
    """(filtered, exact) pairs in a phase, of cut-cross-entropy and `fused`; none without a filtered `fused`."""
    found = variants(frame, phase)
    own = [(v, plain_variant(v)) for v in found if is_filtered(v)]
    return [pair for pair in [("cce", "cce-exact"), *own] if own and set(pair) <= set(found)]


def bar_rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Every bar: shape, variant, over, limit, most workspace; measured time and workspace, ratio, whether it is met.

    A bar is met if ratio and workspace are both within it. `plain` compares with the same head and workspace without
    the change.
    """
    rows = []
    for phase in phases(frame, "bar"):
        _, shape, over = phase.split("/")
        prefix = "loss_" if over == "logits" else ""
        for variant in dict.fromkeys(frame[frame["phase"] == phase]["variant"]):
            limit, most = median(frame, "limit", phase, variant), median(frame, "limit_mib", phase, variant)
            ms = median(frame, "loss_ms" if prefix else "both_ms", f"flat/{shape}", variant)
            ratio = ms / _base_ms(frame, f"flat/{shape}", variant, over)
            mib = workspace(frame, shape, variant, f"{prefix}workspace_mib")
            rows.append({"shape": shape, "variant": variant, "over": over, "limit": limit, "most_mib": most, "ms": ms,
                         "mib": mib, "ratio": ratio, "met": ratio <= limit and mib <= most})  # fmt: skip
    return rows


def _base_ms(frame: pd.DataFrame, phase: str, variant: str, over: str) -> float:
    if over == "plain":
        return median(frame, "both_ms", phase, plain_variant(variant))
    return median(frame, "logits_ms", phase, "floor") if over == "logits" else three(frame, phase)


def plain_variant(variant: str) -> str:
    """The variant without the change: `fused-softcap-512MiB` → `fused-512MiB`."""
    parts = variant.split("-")
    return f"{parts[0]}-{parts[-1]}"


def measured(frame: pd.DataFrame) -> list[str]:
    """Phases with errors: all shapes on random data, then on peaked data, then on the trained model's."""
    return [phase for data in DATA for phase in phases(frame, data)]
