"""Lanes of a traced step: how long each is busy, counting what the step before left over."""

import pytest
from matplotlib import pyplot

from t1lib.measure.records import Records
from t1lib.report.lanes import REST, draw_lanes


@pytest.mark.parametrize(
    ("update", "share"), [([(5, 10)], "50% idle"), ([(5, 13)], "20% idle"), ([(5, 10), (10, 13)], "20% idle")]
)
def test_a_lane_is_busy_with_what_the_step_before_left(update, share):
    records = Records()
    for lane, phase, spans in (("compute", "forward", [(0, 10)]), ("update", "update", update)):
        for layer, (start, end) in enumerate(spans):
            for metric, value in (("start_ms", start), ("end_ms", end)):
                records.add("slide", metric, value, "ms", f"span/{lane}/{phase}/{layer}", 0)
    figure = draw_lanes(records.frame(), "slide", {"compute": "compute", "update": "updates"})
    assert [text.get_text() for text in figure.axes[0].texts] == ["0% idle", share]
    named = figure.axes[0].get_legend_handles_labels()[1]
    assert (REST in named) == (update[-1][1] > 10)
    pyplot.close(figure)
