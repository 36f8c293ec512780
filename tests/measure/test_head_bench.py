"""Errors, workspaces and statuses of an output layer's cases; data; sparsity. Nothing here depends on timing."""

import math

import pytest
import torch

from t1lib.errors import UnavailableError
from t1lib.heads import linear_cross_entropy
from t1lib.measure import head_run
from t1lib.measure.head_bench import HeadBench
from t1lib.measure.head_cases import OPTIONS, Case, Shape, comparison, make_plan
from t1lib.measure.head_data import operands
from t1lib.measure.head_run import Gate, measure_times, measure_workspaces
from t1lib.measure.isolate import VariantOutOfMemory
from t1lib.measure.records import Records, statuses
from t1lib.measure.softmax import sparsity

SHAPE = Shape("A", 48, 300, 16)
CPU = torch.device("cpu")
FULL = Case("full", "full")


@pytest.fixture
def bench():
    return HeadBench(shape=SHAPE, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("case", "names"),
    [
        *((Case("x", "chunked", option=option), {"loss", "dE", "dW"}) for option in OPTIONS),
        (Case("x", "full", gradients=False), {"loss"}),
        (Case("x", "full", upstream=True), {"loss", "dE", "dW"}),
        (Case("x", "full", ignored=0.5), {"loss", "dE", "dW"}),
        (Case("x", "full", frozen=True), {"loss", "dE"}),
    ],
)
def test_every_kind_of_case_has_its_errors(bench, case, names):
    errors = bench.errors(case)
    assert set(errors) == names and max(errors.values()) < 1e-5
    times = bench.step(case)
    assert set(times) == ({"forward", "backward", "both", "host"} if case.gradients else {"loss"})


def test_a_wrong_gradient_is_seen(bench):
    errors = bench.errors(Case("x", "full", settings={"filter_eps": 0.1}))
    assert errors["loss"] < 1e-5 and errors["dE"] > 1e-3 and errors["dW"] > 1e-3
    status, _, reason = bench.prepare(Case("x", "full", settings={"filter_eps": 0.1}), bound=1e-3)
    assert status == "wrong" and "beyond 0.001" in reason
    bench.errors = lambda case: {"loss": math.nan}
    assert bench.prepare(FULL, bound=math.inf)[0] == "wrong"


@pytest.mark.parametrize(
    ("error", "method", "status"),
    [
        (UnavailableError("not here"), "full", "unavailable"),
        (torch.OutOfMemoryError("CUDA out of memory"), "full", "oom"),
        (torch.OutOfMemoryError("CUDA out of memory"), "liger", "oom"),
        (RuntimeError("its own way"), "liger", "unavailable"),
    ],
)
def test_what_cannot_be_measured_is_a_status(bench, error, method, status):
    def fail():
        raise error

    result, found, reason = bench.attempt(Case("x", method), fail)
    assert (result, found) == (None, status) and str(error) in reason
    with pytest.raises(ZeroDivisionError):
        bench.attempt(FULL, lambda: 1 / 0)


def test_the_workspace_of_full_is_its_logits_and_that_of_more_chunks_less(bench):
    logits = 48 * 300 * 4
    loss = bench.workspace(Case("full", "full", gradients=False))
    assert 2 * logits <= loss < 2.2 * logits
    full = bench.workspace(FULL)
    chunked = bench.workspace(Case("c", "chunked", settings={"chunks": 16}))
    assert chunked < logits < full
    assert bench.e.grad is None and bench.w.grad is None
    for case in (Case("x", "full", frozen=True), Case("x", "full", option="bias")):
        assert 0 < bench.workspace(case) < 5 * logits


def loss_of(data, shape):
    e, w, y = operands(data, shape, torch.float32, CPU)
    loss, stats = linear_cross_entropy(e, w, y, head="full", return_stats=True)
    return float(loss.detach()), stats.logprob.exp()


def test_flat_data_is_flat_and_peaked_data_peaked():
    shape = Shape("A", 200, 5000, 128)
    loss, p = loss_of("flat", shape)
    assert loss == pytest.approx(math.log(5000), rel=0.02) and float(p.max()) < 0.01
    loss, p = loss_of("peaked", shape)
    assert 1.5 < loss < 4 and float((p > 0.99).float().mean()) > 0.05 and float((p < 0.01).float().mean()) > 0.05


def test_sparsity_counts_what_it_says():
    # Two tokens, 512 columns: one is sure of column 3, the other nearly even but for its target, column 400.
    w = torch.zeros(512, 2)
    w[3, 0] = 50.0
    e, y = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([3, 400])
    facts = sparsity(e, w, y, eps=0.01)
    assert facts["ranks"][0] == 1 and facts["ranks"][-1] == 512
    assert facts["probability"][0] == pytest.approx((1 + 1 / 512) / 2)
    assert facts["mass_below"] == pytest.approx(0.5, abs=1e-3)
    assert facts["entries_below"] == pytest.approx(1023 / 1024)
    assert facts["tiles"] == 0.5 and facts["tiles_sorted"] == 0.5  # only the tile with column 400 has an entry


def test_a_run_files_workspaces_times_errors_and_statuses():
    records, settings = Records(), {"dtype": "float32", "device": "cpu", "seed": 0}
    plan = make_plan(["A 32 200 8"], ["full", "cce"], ["A both 64MiB 1.1", "A half 64MiB 0.6"])
    measure_workspaces(records, {plan.shapes[0]: plan.cases("A")}, settings)
    gate = Gate(1e-4, 0.5)
    measure_times(records, "flat/A", plan.shapes[0], plan.cases("A"), settings, gate, 2, 0, turns=3, softmax="flat")
    frame = records.frame()
    has = {(r.phase, r.variant, r.metric): r.value for r in frame.itertuples()}
    for metric in ("loss_ms", "both_ms", "forward_ms", "backward_ms", "error_dE", "loss_error_loss"):
        assert has["flat/A", "full", metric] >= 0
    assert has["workspace/A", "full", "workspace_mib"] > 0 and has["workspace/A", "full", "loss_workspace_mib"] > 0
    assert 0 <= has["sparsity", "flat", "mass_below"] <= 1
    assert {"logits_ms", "dE_ms", "dW_ms"} <= {metric for _, variant, metric in has if variant == "floor"}
    for variant, metric, samples in (("full", "both_ms", 2), ("fused-64MiB", "both_ms", 6), ("floor", "dW_ms", 6)):
        found = frame[(frame["variant"] == variant) & (frame["metric"] == metric)]
        assert sorted(found["step"]) == list(range(samples))
    state = statuses(frame[frame["phase"] == "flat/A"])
    assert state["full"] == state["fused-64MiB"] == "ok"
    assert torch.cuda.is_available() or state["cce"] == "unavailable"


def test_after_a_shape_that_does_not_fit_the_next_one_is_measured(monkeypatch):
    """Each method's process that ran out of memory is replaced, and every one is closed."""
    closed = []

    class Small:
        def __init__(self, factory, settings):
            self.dead = False

        def call(self, name, shape, cases):
            assert not self.dead
            self.dead = shape.name == "A"
            if self.dead:
                raise VariantOutOfMemory("no memory")
            return {case.key: 2**20 for case in cases}

        def close(self):
            closed.append(self)

    monkeypatch.setattr(head_run, "Isolated", Small)
    records, plan = Records(), make_plan(["A 64 200 8", "B 32 200 8"], ["full", "chunked"], [])
    measure_workspaces(records, {shape: plan.cases(shape.name) for shape in plan.shapes}, {})
    frame = records.frame()
    assert set(statuses(frame[frame["phase"] == "workspace/A"]).values()) == {"oom"}
    assert set(frame[frame["phase"] == "workspace/B"]["value"]) == {1.0}
    assert len(closed) == 4


def test_a_case_beyond_its_bound_gets_no_time():
    records = Records()
    cases = comparison(["full"], ["64MiB"])
    settings = {"dtype": "float32", "device": "cpu", "seed": 0}
    measure_times(records, "flat/A", Shape("A", 32, 5000, 8), cases, settings, Gate(1e-4, 1e-9), 1, 0)
    frame = records.frame()
    state = statuses(frame)
    assert state == {"full": "ok", "fused-64MiB": "ok", "fused-filter-64MiB": "wrong"}
    timed = set(frame[frame["metric"] == "both_ms"]["variant"])
    assert timed == {"full", "fused-64MiB"}
