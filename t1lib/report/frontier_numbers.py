"""Numbers of `frontier`: points, accuracy of predictions, and the longest rows and largest models within budgets."""

from collections.abc import Iterable

import pandas as pd

from t1lib.kit.select import pick
from t1lib.measure.records import Numbers
from t1lib.report.frontier import WITHIN, budgets, device_room, errors, models_of, points, room

UNITS = {"wall_ms": "ms", "us_a_token": "µs", "allocated_gib": "GiB", "reserved_gib": "GiB"}


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """`frontier.<model>.<mode>.<head>.<tokens>.<metric>`; prediction accuracies; longest rows within each budget."""
    table = points(frame)
    for _, p in table.iterrows():
        key = f"frontier.{p['model']}.{p['mode']}.{p['head']}.{p['seq']}"
        out.set(f"{key}.status", p["status"])
        for metric, unit in UNITS.items():
            out.set(f"{key}.{metric}", p[metric], unit)
    for what, found in errors(frame).items():
        for bound in WITHIN:
            out.set(f"frontier.accuracy.{what}.within_{bound * 100:.0f}", float((found <= bound).mean()), "", ".2f")
        out.set(f"frontier.accuracy.{what}.largest", float(found.max()), "", ".3f")
    for budget in budgets(frame):
        fitting = table[(table["status"] == "ok") & (table["reserved_gib"] <= room(frame, budget))]
        for (model, mode, head), own in fitting.groupby(["model", "mode", "head"]):
            out.set(f"frontier.longest.{budget}.{model}.{mode}.{head}", int(own["seq"].max()), "tokens")
        key = f"frontier.within.{budgets(frame).index(budget) + 1}"
        _reach(fitting, key, budget, out)
        compared = {model: against_ckpt(table[table["model"] == model], fitting) for model in models_of(table)}
        for model, found in compared.items():
            for name, value in found.items():
                out.set(f"frontier.longest.{budget}.{model}.{name}", value, "", None if value == "none" else ".2f")
        first = next(filter(None, compared.values()), {}).get("time_over_ckpt", "none")
        out.set(f"{key}.slide-fused.time_over_ckpt", first, "", None if first == "none" else ".2f")
    for state, count in table["status"].value_counts().items():
        out.set(f"frontier.points.{state}", int(count))
    lost = table[(table["status"] == "oom") & (table["predicted_reserved_gib"] <= device_room(frame))]
    out.set("frontier.points.unforeseen", len(lost))
    for name, value in _facts(frame):
        out.set(f"frontier.{name}", value)


def against_ckpt(own: pd.DataFrame, fitting: pd.DataFrame) -> dict[str, float | str]:
    """For a model's points `own`: the longest row of slide with fused within a budget, over that of ckpt with full
    ("none" if that never fits); and its time per token over ckpt's least at this length with the whole device."""
    within = fitting[fitting["model"].isin(own["model"])]
    ways = ("slide", "fused"), ("ckpt", "full")
    slide, plain = (within[(within["mode"] == mode) & (within["head"] == head)] for mode, head in ways)
    if not len(slide):
        return {}
    last = slide.loc[slide["seq"].idxmax()]
    ckpt = own[(own["mode"] == "ckpt") & (own["seq"] == last["seq"]) & (own["status"] == "ok")]
    found: dict[str, float | str] = {"over_ckpt_full": last["seq"] / plain["seq"].max() if len(plain) else "none"}
    return found | ({"time_over_ckpt": last["us_a_token"] / ckpt["us_a_token"].min()} if len(ckpt) else {})


def _reach(fitting: pd.DataFrame, key: str, budget: str, out: Numbers) -> None:
    """The largest model, and the longest row of the smallest model, that gpu and ckpt with full, and slide with fused,
    train within a budget; "none" if nothing fits."""
    digits = budget.rstrip("KMGTiB")
    out.set(f"{key}.budget", f"{digits} {budget[len(digits) :]}")
    for mode, head in (("gpu", "full"), ("ckpt", "full"), ("slide", "fused")):
        own = fitting[(fitting["mode"] == mode) & (fitting["head"] == head)]
        first = own[own["model"] == own["model"].iloc[0]] if len(own) else own
        out.set(f"{key}.{mode}-{head}.largest", own["model"].iloc[-1] if len(own) else "none")
        out.set(f"{key}.{mode}-{head}.longest", int(first["seq"].max()) if len(own) else "none")


def _facts(frame: pd.DataFrame) -> Iterable[tuple[str, float]]:
    for name in ("vram_gib", "context_gib", "steps"):
        found = pick(frame, name, "facts", "all")
        if len(found):
            yield name, float(found.iloc[0])
