"""What the report of `convergence` reads out of records."""

import json

import pytest
from matplotlib import pyplot

from t1lib.measure.records import Numbers, Records
from t1lib.report import convergence

STEPS = 100
OFFSETS = {"full-gpu": 0.0, "chunked-gpu": 1e-4, "fused-slide": -2e-4, "filter-gpu": 0.5, "order": 0.01}


@pytest.fixture
def frame():
    records = Records()
    for name, offset in OFFSETS.items():
        for step in range(1, STEPS + 1):
            records.add(name, "loss", 5 - step / STEPS + offset * step / STEPS, phase="train", step=step)
            records.add(name, "grad_norm", 2.0 + offset, phase="train", step=step)
            records.add(name, "wall_ms", 3.0, "ms", "train", step)
        records.add(name, "held_out_loss", 4.5 + offset, phase="train", step=STEPS)
    records.add("all", "steps", STEPS, phase="facts")
    return records.frame()


def test_distances_are_from_the_reference_and_the_largest_counts(frame):
    found = convergence.differences(frame, "loss")
    assert found.to_dict() == pytest.approx({name: abs(offset) for name, offset in OFFSETS.items()})
    assert convergence.exact(list(OFFSETS)) == ["chunked-gpu", "fused-slide"]


def test_numbers_hold_the_worst_exact_variant_against_another_order(frame, tmp_path):
    out = Numbers()
    convergence.numbers(frame, out)
    out.save_json(tmp_path / "numbers.json")
    found = {k: v["value"] for k, v in json.loads((tmp_path / "numbers.json").read_text()).items()}
    assert found["convergence.exact.largest_difference"] == pytest.approx(2e-4)
    assert found["convergence.exact.over_order"] == pytest.approx(0.02)
    assert found["convergence.order.tenth"] == pytest.approx(0.001)
    assert found["convergence.fused-slide.norm_difference"] == pytest.approx(1e-4)
    assert found["convergence.full-gpu.final_loss"] == pytest.approx(5 - 0.98)
    assert found["convergence.filter-gpu.final_difference"] == pytest.approx(0.5 * 0.98)
    assert found["convergence.fused-slide.final_difference"] == pytest.approx(-2e-4 * 0.98)
    assert found["convergence.exact.smooth_difference"] == pytest.approx(2e-4 * 0.995)
    assert found["convergence.exact.held_out_spread"] == pytest.approx(3e-4)
    assert found["convergence.filter-gpu.held_out_loss"] == pytest.approx(5.0)
    assert found["convergence.steps"] == STEPS


def test_the_table_has_a_row_a_variant_in_the_order_of_training(frame):
    table = convergence.table1(frame).frame
    assert list(table["head; mode"]) == [convergence.label(name) for name in OFFSETS]
    assert table["largest difference of loss"][0] == "0"


def test_figures_draw_all_curves_and_leave_out_distances_of_0(frame):
    figure = convergence.fig1_loss(frame)
    pyplot.close(figure)
    left, right = figure.axes
    assert len(left.get_lines()) == len(OFFSETS)
    assert len(right.get_lines()) == len(OFFSETS) - 1 + 1  # no curve for the reference; plus the line at a tenth
