"""Turns what a session returns into rows of records; and the gate that losses must pass before times count."""

import math
from collections.abc import Iterable

from t1lib.measure.memory import GIB
from t1lib.measure.records import Records
from t1lib.timing import Span


def add_step(records: Records, variant: str, phase: str, step: int, record: object) -> None:
    """A `StepRecord`: its loss, wall time and phases (ms)."""
    records.add(variant, "loss", record.loss, phase=phase, step=step)
    records.add(variant, "wall_ms", record.wall_ms, "ms", phase, step)
    for name, ms in record.phases.items():
        records.add(variant, f"{name}_ms", ms, "ms", phase, step)


def add_memory(records: Records, variant: str, phase: str, peaks: dict[str, int]) -> None:
    """Peaks in bytes, by name, as rows in GiB."""
    for name, value in peaks.items():
        records.add(variant, f"{name}_gib", value / GIB, "GiB", phase)


def add_link(records: Records, variant: str, phase: str, link: dict[str, float]) -> None:
    """Rates of the link in bytes/s as rows in GB/s, and the link floor (ms) if the mode uses the link."""
    for name, value in link.items():
        if name == "ms":
            records.add(variant, "link_ms", value, "ms", phase)
        else:
            records.add(variant, f"{name}_gb_s", value / 1e9, "GB/s", phase)


def add_floors(records: Records, variant: str, phase: str, floors: dict[str, float]) -> None:
    """Rates and least times, as returned by a session's `floors`."""
    units = {"product": ("product_tflop_s", 1e12, "TFLOP/s"), "copy": ("copy_gb_s", 1e9, "GB/s")}
    for name, value in floors.items():
        metric, divisor, unit = units.get(name, (f"{name.removesuffix('_ms')}_floor_ms", 1.0, "ms"))
        records.add(variant, metric, value / divisor, unit, phase)


def add_choice(records: Records, variant: str, phase: str, choice: dict[str, float]) -> None:
    """The plan chosen for a budget and its prediction, as returned by a session's `choice`."""
    for name, value in choice.items():
        if name == "predicted_bytes":
            records.add(variant, "predicted_gib", value / GIB, "GiB", phase)
        else:
            records.add(variant, name, value, "ms" if name == "predicted_ms" else "", phase)


def add_spans(records: Records, variant: str, step: int, spans: Iterable[Span]) -> None:
    """Spans of a traced step: two rows each, in the phase `span/<lane>/<phase>/<layer>`."""
    for span in spans:
        phase = f"span/{span.lane}/{span.phase}/{span.layer}"
        records.add(variant, "start_ms", span.start, "ms", phase, step)
        records.add(variant, "end_ms", span.end, "ms", phase, step)


def add_timeline(records: Records, variant: str, points: Iterable[tuple[float, int, int | None]]) -> None:
    """An allocator timeline: three rows per point (two if there is no reserved memory), numbered by `step`."""
    for index, (ms, allocated, reserved) in enumerate(points):
        records.add(variant, "at_ms", ms, "ms", "timeline", index)
        records.add(variant, "allocated_gib", allocated / GIB, "GiB", "timeline", index)
        if reserved is not None:
            records.add(variant, "reserved_gib", reserved / GIB, "GiB", "timeline", index)


def gate_losses(records: Records, phase: str, reference: str, bound: float) -> float:
    """Compare each variant's losses in a phase with those of `reference`; return the largest relative difference.

    A variant that differs by more than `bound` gets status `wrong`, and its times are removed from the records: a
    wrong result has no speed.
    """
    losses: dict[str, dict[int, float]] = {}
    for row in records.rows:
        if row["phase"] == phase and row["metric"] == "loss":
            losses.setdefault(row["variant"], {})[row["step"]] = row["value"]
    expected = losses.get(reference) or next(iter(losses.values()), {})
    worst = 0.0
    for variant, found in losses.items():
        difference = _largest_difference(found, expected)
        worst = max(worst, difference)
        if difference > bound:
            _is_wrong(records, variant, phase)
    records.add("all", "loss_difference", worst, "", phase)
    return worst


def gate_ranks(records: Records, mode: str, bound: float) -> float:
    """The same for a mode's losses on each number of ranks (phases `losses/<ranks>`), against those on the fewest; the
    times removed are those of `step/<ranks>`."""
    losses: dict[int, dict[int, float]] = {}
    for row in records.rows:
        name, _, ranks = row["phase"].partition("/")
        if name == "losses" and row["variant"] == mode and row["metric"] == "loss":
            losses.setdefault(int(ranks), {})[row["step"]] = row["value"]
    worst = 0.0
    for ranks, found in losses.items():
        difference = _largest_difference(found, losses[min(losses)])
        worst = max(worst, difference)
        if difference > bound:
            _is_wrong(records, mode, f"step/{ranks}")
    return worst


def _is_wrong(records: Records, variant: str, phase: str) -> None:
    for rows in records.parts.values():
        rows[:] = [r for r in rows if (r["variant"], r["phase"]) != (variant, phase) or not r["metric"].endswith("_ms")]
    records.status(variant, "wrong", phase=phase)


def _largest_difference(found: dict[int, float], expected: dict[int, float]) -> float:
    shared = expected.keys() & found.keys()
    return max((_relative_difference(found[k], expected[k]) for k in shared), default=0.0)


def _relative_difference(found: float, expected: float) -> float:
    """Relative difference; infinite instead of NaN, because `max` would lose a NaN that does not come first."""
    if found == expected:
        return 0.0
    relative = abs(found - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(relative) else relative
