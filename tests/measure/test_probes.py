"""Clocks and memory: spans, warm-up and turns, the link's floor; the allocator's timeline, the host's peak."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from t1lib.measure import probes
from t1lib.measure.probes import AllocatorTimeline, HostPeak, median_ms, rounds, storage_bytes
from t1lib.measure.session import LINK, TrainSession, link_ms, measure_link, step_bytes
from t1lib.memory import host_available, pinned_zeros
from t1lib.models import sizes
from t1lib.plan.cost import Choice
from t1lib.timing import Trace

CPU = torch.device("cpu")
MIB = 2**20
RATES = {"h2d_gb_s": 100e-9, "d2h_gb_s": 50e-9, "both_in_gb_s": 80e-9, "both_out_gb_s": 40e-9}


def test_spans_are_ordered_by_start_whatever_ends_first_and_whoever_adds_them():
    trace = Trace(CPU)

    def copy():
        with trace.span("in", "weights", 0, host=True):
            time.sleep(0.002)

    trace.begin("compute", "backward", 1)
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    trace.end("compute", "backward", 1)
    for host in (False, True):  # recorded though an exception left it
        with pytest.raises(RuntimeError), trace.span("compute", "recompute", 2, host=host):
            raise RuntimeError
    outer, inner, *left = trace.spans()
    assert [span.phase for span in left] == ["recompute"] * 2
    assert (outer.lane, outer.phase, outer.layer) == ("compute", "backward", 1)
    assert (inner.lane, inner.phase, inner.layer) == ("in", "weights", 0)
    assert 0 <= outer.start <= inner.start <= inner.end - 2 <= outer.end - 2


def test_the_warm_up_is_dropped_and_rounds_hold_each_thing_once_in_orders_that_differ():
    pauses = iter([0.05, 0.05, 0.0, 0.0, 0.0])
    assert median_ms(lambda: time.sleep(next(pauses)), CPU, repeats=3, warmup=2) < 50
    assert next(pauses, None) is None
    orders = [tuple(turns) for turns in rounds("ABCDE", 20)]
    assert all(sorted(order) == list("ABCDE") for order in orders) and len(set(orders)) > 10
    assert orders == [tuple(turns) for turns in rounds("ABCDE", 20)]  # the same every time


def test_a_lead_in_queues_as_many_products_as_fill_its_time(monkeypatch):
    monkeypatch.setattr(probes, "torch", device := Mock(type="cuda"))
    monkeypatch.setattr(probes, "median_ms", lambda *_: 2.0)  # of a product
    probes.lead_in(device)()
    assert device.mm.call_count == 50


def test_least_time_of_a_step():
    for copies, seconds in (
        (((200, 0), (0, 0)), 2.0),  # the forward has the link to itself
        (((0, 0), (0, 100)), 2.0),
        (((100, 0), (80, 40)), 1.0 + 1.0),  # both directions end together
        (((100, 0), (80, 140)), 1.0 + 1.0 + 2.0),  # 100 bytes of gradients are left, alone at 50 bytes/s
        (((100, 0), (180, 40)), 1.0 + 1.0 + 1.0),  # 100 bytes of weights are left, alone at 100 bytes/s
        (((80, 40), (80, 40)), 1.0 + 1.0),  # updates in the forward: state in beside state out
        (((80, 60), (80, 40)), 1.0 + 1.0 + 0.4),  # 20 bytes of state are left, and are the last to leave
    ):
        assert link_ms(RATES, *copies) == pytest.approx(seconds * 1e3), copies
    link = measure_link(CPU, nbytes=2**20)
    assert tuple(link) == LINK and min(link.values()) > 0


def test_state_leaves_while_it_is_updated_in_the_backward_or_if_clipped_in_the_next_forward():
    """Each byte once: weights, their gradients, and moments of 4 bytes; the last two layers' weights stay. Layers that
    all stay on the device move nothing; those that the CPU updates send it their gradients."""
    setting = dict(model="tiny", mode="slide", dtype="float32", batch=1, seq=8, optimizer={"name": "adamw"})
    choices = [{"choice": choice} for choice in (Choice(resident=sizes("tiny")["layers"]), Choice(host_share=1.0))]
    changes = {"max_grad_norm": None}, {"max_grad_norm": 1.0}, *choices
    unclipped, clipped, resident, by_host = (TrainSession(**setting, device="cpu", **more).trainer for more in changes)
    layers = [*clipped.engine.schedule.layers.values()]
    whole, one = sum(layer.flat.nbytes for layer in layers), layers[0].flat.nbytes
    again, state = whole - 2 * one, 2 * whole
    assert step_bytes(unclipped) == (again, 0, again + state, whole + state, 0)
    assert step_bytes(clipped) == (2 * whole + state, whole + state, again, whole, 0)
    assert step_bytes(resident) == (0, 0, 0, 0, 0)
    assert step_bytes(by_host) == (whole, 0, again, whole, 2 * (state + whole) + whole)  # read: no master


def test_a_timeline_keeps_the_peaks_of_both_kinds_of_memory(monkeypatch):
    points = [(float(ms), 5, 6) for ms in range(4000)]
    points[1234], points[2345] = (1234.0, 9, 9), (2345.0, 1, 30)
    points[-2:] = [(3999.0, 8, 6), (3999.0, 2, 6)]  # within the same microsecond, of which the last ends the step

    @contextmanager
    def recorded(*_):
        yield SimpleNamespace(points=points)

    monkeypatch.setattr("t1lib.measure.session.AllocatorTimeline", recorded)
    trainer = SimpleNamespace(device_tensors=list)
    own = SimpleNamespace(_settle=lambda: None, trainer=trainer, device=CPU, step=lambda: None)
    found = TrainSession.timeline(own)
    assert len(found) < 1000 and [p["at_ms"] for p in found] == sorted(p["at_ms"] for p in found)
    assert [max(p[f"{kind}_gib"] for p in found) * 2**30 for kind in ("allocated", "reserved")] == [9, 30]
    assert [p["allocated_gib"] * 2**30 for p in found[-2:]] == [8, 2]


def test_timeline_sees_every_allocation_in_order_and_exactly():
    with AllocatorTimeline(CPU, baseline=1000) as timeline:
        a = torch.empty(4096, dtype=torch.uint8)
        b = torch.empty(512, dtype=torch.float32)
        del a
        c = torch.ones(64, dtype=torch.int64)
        del b
        c = (c + c) * c  # the sum in between counts
        del c
    times, allocated, reserved = zip(*timeline.points, strict=True)
    assert allocated == (1000, 5096, 7144, 3048, 3560, 1512, 2024, 2536, 2024, 1512, 1000)
    assert list(times) == sorted(times) and times[0] == 0.0 and set(reserved) == {None} and timeline.peak == 7144


def test_views_and_tied_weights_count_once():
    base, layer = torch.zeros(100), torch.nn.Linear(4, 4, bias=False)
    assert storage_bytes([layer.weight, torch.nn.Parameter(layer.weight.data), base[3:], base.view(10, 10)]) == 64 + 400


@pytest.mark.skipif(not HostPeak().exact, reason="the system does not reset the peak of resident memory")
def test_host_peak_sees_a_buffer_that_is_freed_again():
    torch.ones(128 * MIB, dtype=torch.uint8)  # before it: not its peak
    host = HostPeak()
    before = host.read()
    assert before < psutil.Process().memory_info().rss + 8 * MIB
    torch.ones(64 * MIB, dtype=torch.uint8)  # touched, and freed at once
    assert host.read() - before == pytest.approx(64 * MIB, abs=6 * MIB)


def test_memory_that_may_not_be_pinned_is_plain(monkeypatch):
    assert not pinned_zeros(10, torch.bfloat16, CPU).is_pinned()
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.warns(UserWarning, match="refused to pin memory .CUDA error 2"):
        buffer = pinned_zeros(MIB, torch.float32, torch.device("cuda"))
    assert buffer.nbytes == 4 * MIB and not buffer.any()


@pytest.mark.parametrize("folder, names", [("", "max current"), ("memory", "limit_in_bytes usage_in_bytes")])
def test_a_control_groups_limit_counts(folder, names, tmp_path, monkeypatch):
    files = [f"{folder}/memory.{name}".strip("/") for name in names.split()]
    monkeypatch.setattr("t1lib.memory.CONTROL_GROUP", tmp_path)
    whole = host_available()
    for name, value in zip(files, (5 * MIB, 2 * MIB), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert host_available() == 3 * MIB < whole
    (tmp_path / files[0]).write_text("max\n")
    assert host_available() > 3 * MIB
