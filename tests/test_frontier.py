"""Measuring the frontier: what is skipped, what happens after memory runs out."""

import pytest

from t1lib.errors import T1Error, require
from t1lib.measure import frontier
from t1lib.measure.frontier import Frontier, measure_frontier
from t1lib.measure.isolate import VariantFailed, VariantOutOfMemory
from t1lib.measure.records import Records
from t1lib.plan.rates import H200

SESSION = {"dtype": "float32", "device": "cpu", "seed": 0, "optimizer": {"name": "adamw"}}


class Worker:
    """Stands in for a session's process; head full runs out of memory on rows of more than 100 tokens."""

    started = 0

    def __init__(self, factory, settings) -> None:
        Worker.started += 1
        self.settings, self.closed = settings, False

    def call(self, method, **kwargs):
        assert not self.closed
        if method == "set_point":
            self.seq, self.head = kwargs["seq"], kwargs["head"]
        elif self.head == "full" and self.seq > 100:
            raise VariantOutOfMemory("full")
        elif method == "step":
            return type("Record", (), {"wall_ms": float(self.seq)})()
        elif method == "memory":
            return {"allocated": 2**20, "reserved": 2**21, "host": 2**30, "pinned": 0}
        return []

    def close(self) -> None:
        self.closed = True


def measured(monkeypatch, **other):
    monkeypatch.setattr(frontier, "Isolated", Worker)
    Worker.started = 0
    settings = dict(models=["tiny"], modes=["gpu", "slide"], heads=["full", "fused"], lengths=[64, 128, 256])
    settings |= dict(session=SESSION, workspace="4MiB", vram=2**30, host=2**33, longest=60.0, steps=2, warmup=1)
    records = Records()
    measure_frontier(records, Frontier(**settings | other), H200)
    return records


def states(records):
    return {(r["variant"], r["phase"]): r["value"] for r in records.rows if r["metric"] == "status"}


def test_after_the_first_row_that_does_not_fit_longer_ones_are_skipped_and_a_new_process_goes_on(monkeypatch):
    found = states(measured(monkeypatch))
    assert [found["tiny/gpu/full", f"seq/{n}"] for n in (64, 128, 256)] == ["ok", "oom", "skipped"]
    assert [found["tiny/gpu/fused", f"seq/{n}"] for n in (64, 128, 256)] == ["ok"] * 3
    assert len(found) == 12 and Worker.started == 4


def test_each_point_has_its_prediction_and_what_ran_its_times_and_peaks(monkeypatch):
    records = measured(monkeypatch)
    rows = [r for r in records.rows if r["variant"] == "tiny/slide/fused" and r["phase"] == "seq/128"]
    assert [r["value"] for r in rows if r["metric"] == "wall_ms"] == [128.0, 128.0]
    metrics = {r["metric"] for r in rows}
    assert {"allocated_gib", "reserved_gib", "host_gib", "predicted_ms", "predicted_allocated_gib"} <= metrics
    full = [r["metric"] for r in records.rows if r["variant"] == "tiny/gpu/full" and r["phase"] == "seq/128"]
    assert "predicted_ms" in full and "wall_ms" not in full


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"vram": 2**10}, "on the device"), ({"host": 2**20}, "on the host"),
        ({"longest": 1e-6}, "0 s"), ({"within": 0.0}, "no time left"),
    ],
)  # fmt: skip
def test_what_is_predicted_to_be_too_much_is_skipped(monkeypatch, capsys, limit, why):
    assert set(states(measured(monkeypatch, **limit)).values()) == {"skipped"}
    assert Worker.started == 0 and why in capsys.readouterr().out


@pytest.mark.parametrize(("error", "state"), [(VariantFailed("no kernel"), "failed"), (T1Error("no host"), "skipped")])
def test_what_fails_is_a_row_and_the_others_go_on(monkeypatch, capsys, error, state):
    plain = Worker.call

    def call(self, method, **kwargs):
        if method == "step" and self.seq == 128 and self.settings["mode"] == "gpu":
            raise error
        return plain(self, method, **kwargs)

    monkeypatch.setattr(Worker, "call", call)
    found = states(measured(monkeypatch, heads=["fused"]))
    assert [found["tiny/gpu/fused", f"seq/{n}"] for n in (64, 128, 256)] == ["ok", state, "skipped"]
    assert {found["tiny/slide/fused", f"seq/{n}"] for n in (64, 128, 256)} == {"ok"}
    assert f"tiny/gpu/fused 128: {state}, {error}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("long", "heads", "warm"),
    [
        ((0, 1e9, 1e9), ["fused", "chunked"], [1, 1, 1, 1, 1, 1]),
        ((0, 0, 1e9), ["fused", "chunked"], [1, 1, 1, 0, 0, 0]),
        ((0, 0, 1e9), ["chunked", "fused"], [1, 1, 1, 1, 1, 1]),  # fused compiles kernels of its own
        ((0, 0, 0), ["chunked", "fused"], [1, 0, 0, 0, 0, 0]),
    ],
)
def test_long_steps_are_measured_once_and_without_warm_up_where_other_rows_warmed_up(long, heads, warm, monkeypatch):
    counts, plain = [], Worker.call

    def call(self, method, **kwargs):
        if method == "warm_up":
            counts.append(kwargs["steps"])
        return plain(self, method, **kwargs)

    monkeypatch.setattr(frontier, "LONG", long)
    monkeypatch.setattr(Worker, "call", call)
    records = measured(monkeypatch, heads=heads, modes=["gpu"])
    times = [r["phase"] for r in records.rows if r["metric"] == "wall_ms"]
    assert times == 2 * [f"seq/{n}" for n in (64, 128, 256)] and counts == warm


def test_what_cannot_be_predicted_is_a_row_and_longer_ones_are_skipped(monkeypatch, capsys):
    plain = Frontier.predict

    def predict(self, model, mode, head, seq, machine):
        require(seq < 128, "workspace too small")
        return plain(self, model, mode, head, seq, machine)

    monkeypatch.setattr(Frontier, "predict", predict)
    found = states(measured(monkeypatch, heads=["fused"], modes=["gpu"]))
    assert [found["tiny/gpu/fused", f"seq/{n}"] for n in (64, 128, 256)] == ["ok", "skipped", "skipped"]
    assert "128: skipped, workspace too small" in capsys.readouterr().out


def test_narrow_state_is_what_is_predicted_and_measured(monkeypatch):
    session = SESSION | {"dtype": "bfloat16", "optimizer": {"name": "adamw", "master_weights": True}}
    wide, narrow = (
        Frontier(["tiny"], ["slide"], ["fused"], [64], session, "4MiB", 2**30, 2**33, 60.0, 1, 0, narrow=names)
        for names in ((), ("tiny",))
    )
    assert narrow.settings("tiny", "slide")["optimizer"] == session["optimizer"] | frontier.NARROW
    assert narrow.settings("tiny", "slide")["choice"].slots == 3 and "choice" not in narrow.settings("tiny", "gpu")
    hosts = [f.predict("tiny", "slide", "fused", 64, H200).host for f in (wide, narrow)]
    assert hosts[1] < hosts[0]


def test_the_real_thing_measures_tiny_rows():
    records = Records()
    few = Frontier(["tiny"], ["slide"], ["chunked"], [16, 128], SESSION, "8MiB", 2**30, 2**34, 60.0, 1, 0)
    measure_frontier(records, few, H200)
    assert set(states(records).values()) == {"ok"}
    values = {(r["phase"], r["metric"]): r["value"] for r in records.rows}
    assert 0 < values["seq/16", "allocated_gib"] < values["seq/128", "allocated_gib"]
    ratio = values["seq/128", "predicted_allocated_gib"] / values["seq/128", "allocated_gib"]
    assert 0.5 < ratio < 2
