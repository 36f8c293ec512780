"""Phases and spans, warm-up and turns; what the link to the device costs a step at least."""

import threading
import time

import pytest
import torch

from t1lib.measure.floors import Link, measure_link
from t1lib.measure.timing import median_ms, rounds
from t1lib.timing import PhaseTimer, Trace

CPU = torch.device("cpu")
LINK = Link(host_to_device=100.0, device_to_host=50.0, both_in=80.0, both_out=40.0)  # bytes/s


def test_phases_of_one_name_are_summed_and_lie_within_the_wall_time():
    timer = PhaseTimer(CPU)
    for phase in ("a", "b", "a"):
        time.sleep(0.005)
        timer.mark(phase)
    time.sleep(0.005)  # after the last mark, so in the wall time alone
    wall, phases = timer.stop()
    assert list(phases) == ["a", "b"] and phases["a"] >= 10 and phases["b"] >= 5
    assert wall >= sum(phases.values()) + 5


def test_spans_are_ordered_by_start_whatever_ends_first_and_whoever_adds_them():
    trace = Trace(CPU)

    def copy():
        with trace.host_span("in", "weights", 0):
            time.sleep(0.002)

    trace.begin("compute", "backward", 1)
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    trace.end("compute", "backward", 1)
    for span in (trace.span, trace.host_span):  # recorded though an exception left it
        with pytest.raises(RuntimeError), span("compute", "recompute", 2):
            raise RuntimeError
    outer, inner, *left = trace.spans()
    assert [span.phase for span in left] == ["recompute"] * 2
    assert (outer.lane, outer.phase, outer.layer) == ("compute", "backward", 1)
    assert (inner.lane, inner.phase, inner.layer) == ("in", "weights", 0)
    assert 0 <= outer.start <= inner.start <= inner.end - 2 <= outer.end - 2


def test_the_warm_up_is_dropped():
    pauses = iter([0.05, 0.05, 0.0, 0.0, 0.0])
    assert median_ms(lambda: time.sleep(next(pauses)), CPU, repeats=3, warmup=2) < 50
    assert next(pauses, None) is None


def test_rounds_hold_each_thing_once_in_orders_that_differ_and_are_the_same_every_time():
    orders = [tuple(turns) for turns in rounds("ABCDE", 20)]
    assert all(sorted(order) == list("ABCDE") for order in orders) and len(set(orders)) > 10
    assert orders == [tuple(turns) for turns in rounds("ABCDE", 20)]


@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        ((0, 0, 0), 0.0),
        ((200, 0, 0), 2.0),  # the forward has the link to itself
        ((0, 200, 0), 2.0),  # so does the backward if no gradients leave
        ((0, 0, 100), 2.0),
        ((100, 80, 40), 1.0 + 1.0),  # both directions end together
        ((100, 80, 140), 1.0 + 1.0 + 2.0),  # 100 bytes of gradients are left, alone at 50 bytes/s
        ((100, 180, 40), 1.0 + 1.0 + 1.0),  # 100 bytes of weights are left, alone at 100 bytes/s
    ],
)
def test_least_time_of_a_step(copies, seconds):
    assert LINK.step_ms(*copies) == pytest.approx(seconds * 1e3)
    link = measure_link(CPU, nbytes=2**20)
    assert min(link.host_to_device, link.device_to_host, link.both_in, link.both_out) > 0
