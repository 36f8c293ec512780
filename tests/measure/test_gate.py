"""A run whose losses are others than the first's has no times."""

import math

import pytest

from t1lib.measure.records import Records, gate_losses, statuses

OWN = [(variant, "own", "own") for variant in ("gpu", "slide", "ckpt")]


def trained(**losses: list[float]) -> Records:
    records = Records()
    for variant, values in losses.items():
        for step, loss in enumerate(values):
            records.put(variant, "own", {"loss": loss, "wall_ms": 5.0, "forward_ms": 2.0}, step)
        records.put(variant, "own", {"host_gib": 1.0})
        records.put(variant, "other", {"wall_ms": 1.0})
        records.status(variant, "ok", "own")
    return records


def timed(records: Records) -> set[str]:
    return {r["variant"] for r in records.rows if r["phase"] == "own" and r["metric"].endswith("_ms")}


@pytest.mark.parametrize(("losses", "difference"), [([2.0, 1.25], 0.25), ([math.nan, 1.0], math.inf)], ids=str)
def test_a_variant_beyond_the_bound_loses_its_times_and_no_one_else_does(losses, difference):
    records = trained(gpu=[2.0, 1.0], slide=losses, ckpt=[2.0, 1.0])
    assert gate_losses(records, OWN, 0.2) == difference
    assert statuses(records.frame()) == {"gpu": "ok", "slide": "wrong", "ckpt": "ok"}
    assert timed(records) == {"gpu", "ckpt"}
    kept = {(r["phase"], r["metric"]) for r in records.rows if r["variant"] == "slide"}
    assert kept == {("own", "loss"), ("own", "host_gib"), ("other", "wall_ms"), ("own", "status")}


@pytest.mark.parametrize(
    ("losses", "bound", "difference", "left"),
    [
        ({"gpu": [2.0, 1.0], "slide": [2.0, 1.0]}, 0.0, 0.0, {"gpu", "slide"}),
        ({"gpu": [4.0], "slide": [4.5]}, 0.2, 0.125, {"gpu", "slide"}),
        ({"slide": [3.0], "ckpt": [2.0]}, 0.0, 1 / 3, {"slide"}),  # without the reference, the next one takes its place
        ({"gpu": [0.0], "slide": [1e-9], "ckpt": [0.0]}, 0.1, math.inf, {"gpu", "ckpt"}),
    ],
)
def test_the_difference_is_recorded(losses, bound, difference, left):
    records = trained(**losses)
    assert gate_losses(records, OWN, bound) == pytest.approx(difference) and timed(records) == left
    assert [r["value"] for r in records.rows if r["metric"] == "loss_difference"] == [pytest.approx(difference)]


def test_ranks_whose_losses_are_others_than_those_of_the_fewest_have_no_times():
    records = Records()
    for ranks, losses in {2: [2.0, 1.0], 1: [2.0, 1.0], 4: [2.0, 1.5]}.items():
        records.put("fsdp", f"step/{ranks}", {"wall_ms": 5.0}, 0)
        for step, loss in enumerate(losses):
            records.put("fsdp", f"losses/{ranks}", {"loss": loss}, step)
    assert gate_losses(records, [("fsdp", f"losses/{n}", f"step/{n}") for n in (1, 2, 4)], 0.1) == 0.5
    assert {r["phase"] for r in records.rows if r["metric"] == "wall_ms"} == {"step/1", "step/2"}
    assert gate_losses(records, [("gpu", "own", "own")], 0.0) == 0.0
