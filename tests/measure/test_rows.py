import math

import pytest

from t1lib.measure.memory import GIB
from t1lib.measure.records import Records, statuses
from t1lib.measure.rows import add_spans, add_step, add_timeline, gate_losses, gate_ranks
from t1lib.timing import Span
from t1lib.train import StepRecord


def rows(records: Records) -> list[tuple]:
    return [tuple(row.values()) for row in records.rows]


def test_spans_and_timelines_are_rows_in_phases_of_their_own():
    """Reserved memory is left out where there is none."""
    records = Records()
    add_spans(records, "slide", 1, [Span("in", "weights again", 3, 0.5, 0.75)])
    add_timeline(records, "gpu", [(0.0, GIB, None), (2.0, 2 * GIB, 3 * GIB)])
    assert rows(records) == [
        ("slide", "span/in/weights again/3", 1, "start_ms", "ms", 0.5),
        ("slide", "span/in/weights again/3", 1, "end_ms", "ms", 0.75),
        ("gpu", "timeline", 0, "at_ms", "ms", 0.0),
        ("gpu", "timeline", 0, "allocated_gib", "GiB", 1.0),
        ("gpu", "timeline", 1, "at_ms", "ms", 2.0),
        ("gpu", "timeline", 1, "allocated_gib", "GiB", 2.0),
        ("gpu", "timeline", 1, "reserved_gib", "GiB", 3.0),
    ]


def trained(**losses: list[float]) -> Records:
    records = Records()
    for variant, values in losses.items():
        for step, loss in enumerate(values):
            add_step(records, variant, "own", step, StepRecord(step, loss, 1, 5.0, {"forward": 2.0}))
        records.add(variant, "host_gib", 1.0, "GiB", "own")
        records.add(variant, "wall_ms", 1.0, "ms", "other")
        records.status(variant, "ok", "own")
    return records


def timed(records: Records) -> set[str]:
    return {r["variant"] for r in records.rows if r["phase"] == "own" and r["metric"].endswith("_ms")}


@pytest.mark.parametrize(
    ("losses", "difference"),
    [
        ([2.0, 1.25], 0.25),
        ([math.nan, 1.0], math.inf),
    ],
    ids=str,
)
def test_a_variant_beyond_the_bound_loses_its_times_and_no_one_else_does(losses, difference):
    records = trained(gpu=[2.0, 1.0], slide=losses, ckpt=[2.0, 1.0])
    assert gate_losses(records, "own", "gpu", 0.2) == difference
    assert statuses(records.frame()) == {"gpu": "ok", "slide": "wrong", "ckpt": "ok"}
    assert timed(records) == {"gpu", "ckpt"}
    kept = [(r["phase"], r["metric"]) for r in records.rows if r["variant"] == "slide"]
    expected = [("own", "loss"), ("own", "loss"), ("own", "host_gib"), ("other", "wall_ms"), ("own", "status")]
    assert kept == [*expected, ("own", "status")]


def test_the_difference_within_the_bound_is_recorded():
    same = trained(gpu=[2.0, 1.0], slide=[2.0, 1.0])
    assert gate_losses(same, "own", "gpu", 0.0) == 0.0 and timed(same) == {"gpu", "slide"}
    records = trained(gpu=[4.0], slide=[4.5])
    assert gate_losses(records, "own", "gpu", 0.2) == 0.125
    assert rows(records)[-1] == ("all", "own", "", "loss_difference", "", 0.125)
    without = trained(ckpt=[2.0], slide=[3.0])  # without the reference the first variant takes its place
    assert gate_losses(without, "own", "gpu", 0.0) == 0.5 and timed(without) == {"ckpt"}
    zero = trained(gpu=[0.0], ckpt=[0.0], slide=[1e-9])
    assert gate_losses(zero, "own", "gpu", 0.1) == math.inf and timed(zero) == {"gpu", "ckpt"}


def test_ranks_whose_losses_are_others_than_those_of_the_fewest_have_no_times():
    records = Records()
    for ranks, losses in {2: [2.0, 1.0], 1: [2.0, 1.0], 4: [2.0, 1.5]}.items():
        records.add("slide", "wall_ms", 5.0, "ms", f"step/{ranks}", 0)
        records.status("slide", "ok", f"step/{ranks}")
        for step, loss in enumerate(losses):
            records.add("slide", "loss", loss, phase=f"losses/{ranks}", step=step)
            records.add("fsdp", "loss", 9.0, phase=f"losses/{ranks}", step=step)
    assert gate_ranks(records, "slide", 0.1) == 0.5
    assert {r["phase"] for r in records.rows if r["metric"] == "wall_ms"} == {"step/1", "step/2"}
    frame = records.frame()
    assert [statuses(frame[frame["phase"] == f"step/{n}"])["slide"] for n in (1, 2, 4)] == ["ok", "ok", "wrong"]
    assert gate_ranks(records, "gpu", 0.0) == 0.0
