"""Tables and numbers of experiment `parallel`, from its records alone."""

from collections.abc import Iterator

import pandas as pd

from t1lib.kit.select import median, pick
from t1lib.kit.tables import Table, make_table, median_iqr
from t1lib.measure.records import Numbers, statuses
from t1lib.report.parallel import (
    HEADS,
    MODES,
    arithmetic_mib,
    by_ranks,
    counts,
    losses,
    must_mib,
    products_ms,
    speedup,
    tokens_s,
)

ERRORS = ("error_loss", "error_dE", "error_dW")
MEMORY = ("allocated_gib", "reserved_gib", "host_gib", "host_all_gib", "host_setup_all_gib")
NAN = float("nan")


def head_facts(frame: pd.DataFrame, head: str, ranks: int) -> dict[str, float]:
    """All facts reported for a head on a number of ranks; NaN for what was not measured."""
    times, phase = by_ranks(frame, "both_ms", "head", head), f"head/{ranks}"
    gain, held = speedup(times).get(ranks, NAN), median(frame, "held_mib", phase, head)
    facts = {
        "both_ms": times.get(ranks, NAN),
        "speedup": gain,
        "of_ideal": gain / ranks,
        "over_products": times.get(ranks, NAN) / products_ms(frame).get(ranks, NAN),
        "collectives_ms": median(frame, "collectives_ms", phase, head),
        "must_mib": must_mib(frame, ranks),
        "held_mib": held,
        "held_over_arithmetic": held / arithmetic_mib(frame, head, ranks),
        "outside_mib": median(frame, "outside_mib", phase, head),
        "exchanged_mib": median(frame, "exchanged_mib", phase, head),
    }
    return facts | {name: median(frame, name, phase, head) for name in ERRORS}


def step_facts(frame: pd.DataFrame, mode: str, ranks: int) -> dict[str, float]:
    """All facts reported for training in a mode on a number of ranks; NaN for what was not measured."""
    rates, curves, phase = tokens_s(frame, mode), losses(frame, mode), f"step/{ranks}"
    gain = rates.get(ranks, NAN) / rates.get(1, NAN)
    facts = {
        "wall_ms": median(frame, "wall_ms", phase, mode),
        "tokens_s": rates.get(ranks, NAN),
        "speedup": gain,
        "of_ideal": gain / ranks,
        "last_loss": float(curves[ranks].iloc[-1]) if ranks in curves else NAN,
    }
    if ranks in curves and 1 in curves:
        facts["loss_difference"] = float((curves[ranks] / curves[1] - 1).abs().max())
    facts |= {name: median(frame, name, phase, mode) for name in MEMORY}
    return facts | {"host_over_one": facts["host_all_gib"] / median(frame, "host_all_gib", "step/1", mode)}


def _points(frame: pd.DataFrame, name: str, variants: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    """(variant, ranks, status) of every point with a status, whether it ran or not."""
    for variant in variants:
        for ranks in counts(frame, name):
            phase = f"{name}/{ranks}"
            state = statuses(frame[frame["phase"] == phase]).get(variant)
            if state:
                yield variant, ranks, state


def _ran(frame: pd.DataFrame, name: str, variants: tuple[str, ...]) -> list[tuple[str, int]]:
    """(variant, ranks) of the points that ran: status ok, shared or wrong."""
    return [(v, n) for v, n, state in _points(frame, name, variants) if state in ("ok", "shared", "wrong")]


def _begun(frame: pd.DataFrame, metric: str, name: str, what: str, point: tuple[str, int, str]) -> dict[str, object]:
    """The first columns of a point's row; `what` is the heading of the variant's column."""
    variant, ranks, state = point
    values = pick(frame, metric, f"{name}/{ranks}", variant)
    row = {what: variant, "ranks": str(ranks), "status": state, "n": len(values) or None}
    return row | {"median [IQR] (ms)": median_iqr(values)}


def table1_head(frame: pd.DataFrame) -> Table:
    """Time, memory and errors of the output layer, one row per head and number of ranks."""
    rows = []
    for point in _points(frame, "head", HEADS):
        facts = head_facts(frame, *point[:2])
        rows.append(_begun(frame, "both_ms", "head", "head", point) | {
            "speed-up": facts["speedup"],
            "of the ideal": facts["of_ideal"],
            "× its products": facts["over_products"],
            "collectives (ms)": facts["collectives_ms"],
            "must hold (MiB)": facts["must_mib"],
            "held (MiB)": facts["held_mib"],
            "held / arithmetic": facts["held_over_arithmetic"],
            "beside it (MiB)": facts["outside_mib"],
            "error loss": facts["error_loss"],
            "error dE": facts["error_dE"],
            "error dW": facts["error_dW"],
        })  # fmt: skip
    return make_table(rows, text_columns=3)


def table2_step(frame: pd.DataFrame) -> Table:
    """Time, tokens/s, memory and losses of training, one row per mode and number of ranks."""
    rows = []
    for point in _points(frame, "step", MODES):
        facts = step_facts(frame, *point[:2])
        rows.append(_begun(frame, "wall_ms", "step", "mode", point) | {
            "tokens a second": facts["tokens_s"],
            "speed-up": facts["speedup"],
            "of the ideal": facts["of_ideal"],
            "allocated (GiB)": facts["allocated_gib"],
            "reserved (GiB)": facts["reserved_gib"],
            "host (GiB)": facts["host_gib"],
            "host, all ranks (GiB)": facts["host_all_gib"],
            "over one rank's": facts["host_over_one"],
            "last loss": facts["last_loss"],
            "largest difference": facts.get("loss_difference", NAN),
        })  # fmt: skip
    return make_table(rows, text_columns=3)


UNITS = {"_ms": "ms", "_mib": "MiB", "_gib": "GiB"}


def _set(out: Numbers, key: str, facts: dict[str, float]) -> None:
    """Set the facts of a point that were measured; a CPU has no reserved memory, one rank no collectives."""
    for name, value in facts.items():
        if value == value:
            unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
            out.set(f"{key}.{name}", value, unit, ".2f" if name in ("speedup", "of_ideal") else None)


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """`parallel.head.<head>.<ranks>.<fact>`, `parallel.step.<mode>.<ranks>.<fact>`, sizes `parallel.<name>`."""
    for head, ranks in _ran(frame, "head", HEADS):
        _set(out, f"parallel.head.{head}.{ranks}", head_facts(frame, head, ranks))
    for ranks, value in products_ms(frame).items():
        out.set(f"parallel.head.products.{ranks}.both_ms", value, "ms")
    for mode, ranks in _ran(frame, "step", MODES):
        _set(out, f"parallel.step.{mode}.{ranks}", step_facts(frame, mode, ranks))
    for name in ("tokens", "vocabulary", "hidden"):
        out.set(f"parallel.{name}", median(frame, name, "shape", "all"), "", ".0f")


TABLES = {f.__name__: f for f in (table1_head, table2_step)}
