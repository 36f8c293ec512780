"""What the report of `parallel` reads out of records."""

import matplotlib
import pandas as pd
import pytest
from matplotlib import pyplot

from t1lib.kit.style import style
from t1lib.measure.records import Numbers, Records
from t1lib.report import parallel, parallel_tables

matplotlib.use("Agg")
SHAPE = {"tokens": 1024, "vocabulary": 8192, "hidden": 512, "itemsize": 2, "workspace": 16 * 2**20}
TIMES = {1: 40.0, 2: 22.0, 4: 12.5}
pytestmark = pytest.mark.filterwarnings("error")


def made(skipped=(), wrong=()):
    """Heads take `TIMES` ms, `full` twice as long; a step takes 100 ms, and 10 ms more for each further rank."""
    records = Records()
    for name, value in SHAPE.items():
        records.add("all", name, value, phase="shape")
    for n, ms in TIMES.items():
        for head, factor in (("full", 2), ("fused", 1)):
            state = "skipped" if n in skipped else "wrong" if (head, n) in wrong else "ok"
            records.status(head, state, f"head/{n}")
            if state == "ok":
                _head(records, head, n, factor * ms)
        if n not in skipped:
            for product in parallel.PRODUCTS:
                records.add("floor", f"{product}_ms", 12.0 / n, "ms", f"head/{n}")
        records.status("fsdp", "skipped" if n in skipped else "ok", f"step/{n}")
        if n not in skipped:
            _step(records, n)
    return records.frame()


def on_one_gpu():
    """The same where 2 and 4 ranks share a GPU: they have no times."""
    frame = made()
    timed = frame["unit"] == "ms"
    frame.loc[(frame["metric"] == "status") & ~frame["phase"].str.endswith("/1"), "value"] = "shared"
    return frame[~timed | frame["phase"].str.endswith("/1")]


def _head(records, head, n, ms):
    for step in range(3):
        records.add(head, "both_ms", ms + step - 1, "ms", f"head/{n}", step)
    records.add(head, "held_mib", 16 / n + 2 + 16 + 0.5, "MiB", f"head/{n}")
    for part, mib in {"weight": 8 / n, "dW": 8 / n, "hidden": 1, "dE": 1, "workspace": 16.5}.items():
        records.add(head, f"{part}_mib", mib, "MiB", f"head/{n}")
    for error in parallel_tables.ERRORS:
        records.add(head, error, 1e-3, "", f"head/{n}")
    if n > 1:
        records.add(head, "collectives_ms", 2.0, "ms", f"head/{n}", 0)


def _step(records, n):
    records.add("fsdp", "wall_ms", 100.0 + 10 * (n - 1), "ms", f"step/{n}", 0)
    records.add("fsdp", "tokens", 1000 * n, "", f"step/{n}")
    for step in range(4):
        records.add("fsdp", "loss", (5.0 - step) * (1 + 1e-3 * (n - 1)), phase=f"losses/{n}", step=step)
    records.add("fsdp", "allocated_gib", 8 / n, "GiB", f"step/{n}")


def counted(frame):
    out = Numbers()
    parallel_tables.numbers(frame, out)
    assert all(entry["value"] is not None for entry in out.values())
    return {key.removeprefix("parallel."): entry["value"] for key, entry in out.items()}


def test_the_head_is_held_against_one_rank_its_products_and_the_arithmetic():
    found = counted(made())
    assert found["head.fused.4.speedup"] == pytest.approx(40 / 12.5)
    assert found["head.fused.4.of_ideal"] == pytest.approx(0.8)
    assert found["head.fused.2.over_products"] == pytest.approx(22 / 18)
    assert found["head.fused.2.must_mib"] == pytest.approx(8192 / 2 * 512 * 2 * 2 / 2**20 + 2)
    assert found["head.fused.2.held_over_arithmetic"] == pytest.approx(26.5 / (8 + 2 + 16))
    assert found["head.full.2.held_over_arithmetic"] == pytest.approx(26.5 / (8 + 2))  # `full` is given no workspace
    assert found["head.products.4.both_ms"] == pytest.approx(9.0)
    assert found["head.fused.2.collectives_ms"] == 2.0 and "head.fused.1.collectives_ms" not in found


def test_training_is_held_against_one_rank_in_tokens_a_second_and_losses():
    found = counted(made())
    assert found["step.fsdp.1.tokens_s"] == pytest.approx(10_000)
    assert found["step.fsdp.4.speedup"] == pytest.approx(4 * 100 / 130)
    assert found["step.fsdp.4.loss_difference"] == pytest.approx(3e-3)
    assert found["step.fsdp.2.last_loss"] == pytest.approx(2 * 1.001)


def test_what_was_skipped_or_wrong_is_a_row_without_numbers():
    frame = made(skipped=[4], wrong=[("full", 2)])
    head, step = parallel_tables.table1_head(frame).frame, parallel_tables.table2_step(frame).frame
    states = dict(zip(zip(head["head"], head["ranks"], strict=True), head["status"], strict=True))
    expected = {("full", "1"): "ok", ("full", "2"): "wrong", ("full", "4"): "skipped"}
    assert states == expected | {("fused", "1"): "ok", ("fused", "2"): "ok", ("fused", "4"): "skipped"}
    assert list(head[head["status"] != "ok"]["speed-up"]) == ["–"] * 3
    assert list(step["status"]) == ["ok", "ok", "skipped"] and step["tokens a second"][2] == "–"
    assert not [key for key in counted(frame) if ".4." in key]


def test_ranks_that_share_a_gpu_have_everything_but_times():
    frame = on_one_gpu()
    head, found = parallel_tables.table1_head(frame).frame, counted(frame)
    assert list(head["status"]) == ["ok", "shared", "shared"] * 2
    assert list(head["speed-up"][1:3]) == ["–"] * 2 and head["held / arithmetic"][2] != "–"
    head_facts = {"must_mib", "held_mib", "held_over_arithmetic", *parallel_tables.ERRORS}
    step_facts = {"last_loss", "loss_difference", "allocated_gib"}
    for point, facts in (("head.fused.4.", head_facts), ("step.fsdp.4.", step_facts)):
        assert {key.removeprefix(point) for key in found if key.startswith(point)} == facts
    labels = [label.get_text() for label in drawn("fig1_head", frame)[1].get_xticklabels()]
    assert labels == ["1", "2\nshared", "4\nshared"]


def drawn(name, frame):
    with style():
        figure = parallel.FIGURES[name](frame)
        figure.canvas.draw()
    pyplot.close(figure)
    return figure.axes


def test_figures_draw_each_head_and_its_ideal():
    time, gain = drawn("fig1_head", made())
    lines = [list(line.get_ydata()) for line in time.get_lines()]
    assert [40.0, 22.0, 12.5] in lines and [40.0, 20.0, 10.0] in lines and [36.0, 18.0, 9.0] in lines
    assert [1.0, 40 / 22, 40 / 12.5] in [list(line.get_ydata()) for line in gain.get_lines()]


def test_bars_of_memory_add_up_to_what_was_held():
    for axes in drawn("fig2_memory", made()):
        tops = pd.Series({bar.get_x(): bar.get_y() + bar.get_height() for bar in axes.patches})
        assert sorted(tops) == pytest.approx(sorted(16 / n + 18.5 for n in TIMES))


def test_tokens_a_second_are_drawn_beside_the_ideal():
    rate, losses = drawn("fig3_step", made())
    lines = [list(line.get_ydata()) for line in rate.get_lines()]
    assert lines[:2] == [pytest.approx([10_000, 2000 / 0.11, 4000 / 0.13]), [10_000, 20_000, 40_000]]
    assert len(losses.get_lines()) == 3


@pytest.mark.parametrize("name", parallel.FIGURES)
def test_figures_without_times_of_more_ranks_are_no_traceback(name):
    drawn(name, made(skipped=[2, 4]))
    drawn(name, made(skipped=TIMES))
    drawn(name, on_one_gpu())
