import threading
import time

import pytest
import torch

from t1lib.measure.timing import median_ms, rounds
from t1lib.timing import PhaseTimer, Trace

CPU = torch.device("cpu")


def test_phases_of_one_name_are_summed_and_lie_within_the_wall_time():
    timer = PhaseTimer(CPU)
    for phase in ("a", "b", "a"):
        time.sleep(0.005)
        timer.mark(phase)
    time.sleep(0.005)  # after the last mark, so in the wall time alone
    wall, phases = timer.stop()
    assert list(phases) == ["a", "b"]
    assert phases["a"] >= 10 and phases["b"] >= 5
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
    outer, inner = trace.spans()
    assert (outer.lane, outer.phase, outer.layer) == ("compute", "backward", 1)
    assert (inner.lane, inner.phase, inner.layer) == ("in", "weights", 0)
    assert 0 <= outer.start <= inner.start <= inner.end - 2 <= outer.end - 2


@pytest.mark.parametrize("kind", ["span", "host_span"])
def test_a_span_left_by_an_exception_is_recorded(kind):
    trace = Trace(CPU)
    with pytest.raises(RuntimeError), getattr(trace, kind)("compute", "recompute", 2):
        raise RuntimeError
    assert [(s.phase, s.layer) for s in trace.spans()] == [("recompute", 2)]


def test_the_warm_up_is_dropped():
    pauses = iter([0.05, 0.05, 0.0, 0.0, 0.0])
    assert median_ms(lambda: time.sleep(next(pauses)), CPU, repeats=3, warmup=2) < 50
    assert next(pauses, None) is None


def test_rounds_hold_each_thing_once_in_orders_that_differ_and_are_the_same_every_time():
    orders = [tuple(turns) for turns in rounds("ABCDE", 20)]
    assert all(sorted(order) == list("ABCDE") for order in orders)
    assert len(set(orders)) > 10
    assert {order[0] for order in orders} == set("ABCDE")
    assert orders == [tuple(turns) for turns in rounds("ABCDE", 20)]
