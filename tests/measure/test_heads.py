"""Output layers' errors, memory and statuses, and who gets a time; peers; a sharded layer in a group of one process."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from refusals import refused

from t1lib.errors import UnavailableError
from t1lib.heads import linear_cross_entropy
from t1lib.measure import parallel
from t1lib.measure.heads import Case, HeadBench, attempt
from t1lib.measure.parallel import Share, measure_head, ran
from t1lib.measure.peers import PEERS, loss_function
from t1lib.measure.records import Records, statuses

TOKENS, VOCABULARY, HIDDEN = 48, 300, 16
SIZES = dict(tokens=TOKENS, vocabulary=VOCABULARY, hidden=HIDDEN)
FULL, ALONE = Case("full"), Case("full", gradients=False)
OPTIONS = [
    {"linear_bias": "vocabulary"}, {"weight": "vocabulary"}, {"token_weight": "tokens"}, {"softcap": 30.0},
    {"return_stats": True}, {"reduction": "none"},
]  # fmt: skip


@pytest.fixture
def bench():
    return HeadBench(**SIZES, dtype="float32", device="cpu")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_an_option_has_its_own_reference_errors_and_times(bench, options):
    case = Case("chunked", options=options)
    errors = bench.errors(case)
    assert list(errors) == ["error_loss", "error_dE", "error_dW"] and max(errors.values()) < 1e-5
    assert set(bench.times(case)) == {"forward", "backward", "both", "host"}
    plain = bench.reference(FULL)["dE"]
    apart = float((bench.reference(case)["dE"] - plain).norm() / plain.norm())
    assert (apart > 1e-6) is ("return_stats" not in options)


def test_cases_without_gradients_of_ignored_tokens_and_of_a_frozen_weight(bench):
    kept = bench.reference(FULL)["dE"]
    assert bench.reference(Case("chunked", {"chunks": 2}))["dE"] is kept and kept.dtype == torch.float64
    assert list(bench.errors(ALONE)) == ["error_loss"] and list(bench.times(ALONE)) == ["loss"]
    assert list(bench.errors(Case("full", frozen=True))) == ["error_loss", "error_dE"]
    ignored = Case("full", ignored=0.5)
    assert max(bench.errors(ignored).values()) < 1e-5
    assert float((bench.reference(ignored)["dE"] - kept).norm() / kept.norm()) > 1e-6
    other = partial(HeadBench, **SIZES, dtype="float32", device="cpu", reference="float16")
    refused(other, match="unknown reference 'float16'.*float64")


def test_memory_is_the_peak_beyond_inputs_and_gradients(bench):
    logits = TOKENS * VOCABULARY * 4
    whole = bench.memory(FULL)
    assert 2 * logits < whole["workspace"] < 4 * logits and whole["kept"] >= logits and whole["beside"] == 0
    assert 2 * logits <= bench.memory(ALONE)["workspace"] < 2.2 * logits
    parts = bench.memory(Case("chunked", {"chunks": 16}))
    assert parts["workspace"] < logits
    assert parts["kept"] >= bench.e.nbytes + bench.w.nbytes  # gradients made in the forward
    for case in (Case("full", frozen=True), Case("full", options={"linear_bias": "vocabulary"})):
        assert 0 < bench.memory(case)["workspace"] < 5 * logits


@pytest.mark.parametrize(
    ("measure", "status"),
    [
        (lambda: {"error_loss": 0.0, "error_dW": 0.1}, "ok"),
        (lambda: {"error_loss": 0.0, "error_dW": 0.2}, "wrong"),
        (lambda: {"error_loss": 0.0, "error_dW": math.nan}, "wrong"),
        (Mock(side_effect=torch.OutOfMemoryError("full")), "oom"),
        (Mock(side_effect=UnavailableError("not here")), "unavailable"),
    ],
)
def test_only_what_is_right_is_timed(bench, measure, status, capsys):
    records = Records()
    for _ in range(2):  # two cases of one variant: the reason is given once
        assert bench.admit(records, "full", "mean", FULL, 0.1, measure) is (status == "ok")
        assert statuses(records.frame()) == {"full": status}
    assert capsys.readouterr().out.count("mean: full is ") == (status != "ok")
    bench.admit(records, "full", "mean", ALONE, 0.1)  # another case of it, which is right
    assert statuses(records.frame()) == {"full": status}
    assert "loss_error_loss" in {row["metric"] for row in records.rows}
    own_way = Mock(side_effect=RuntimeError("its own way"))
    assert attempt(own_way, foreign=True) == (None, "unavailable", "RuntimeError: its own way")
    with pytest.raises(RuntimeError):
        attempt(own_way)


def test_variants_take_turns_and_one_without_memory_leaves_the_others(bench):
    records, order = Records(), []

    def run(name, queued, fails_at=None):
        order.append(name)
        if order.count(name) == fails_at:
            raise torch.OutOfMemoryError("full")
        return {"both": 1.0}

    runners = {("a", "x"): partial(run, "a"), ("b", "x"): partial(run, "b", fails_at=3)}
    bench.take_turns(records, runners, repeats=3, warmup=1)
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [["a", "b"]] * 3 and order[6:] == ["a"]
    steps = [(row["variant"], row["step"]) for row in records.rows if row["metric"] == "both_ms"]
    assert sorted(steps) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert statuses(records.frame()) == {"b": "oom"}

    # What is timed more often has more samples, and two cases of a variant are kept apart.
    records, runners = Records(), {("floor", "x"): bench.products, ("full", "x"): partial(bench.times, FULL)}
    runners["full", "x", "loss"] = partial(bench.times, ALONE)
    bench.take_turns(records, runners, repeats=2, warmup=0, often=[("floor", "x")] * 2)
    steps = {metric: [r["step"] for r in records.rows if r["metric"] == metric] for metric in ("both_ms", "loss_ms")}
    assert steps == {"both_ms": [0, 1], "loss_ms": [0, 1]}
    assert [r["step"] for r in records.rows if r["variant"] == "floor" and r["metric"] == "dW_ms"] == list(range(6))


def test_samples_have_the_lead_in_and_warm_ups_do_not(bench):
    bench.lead = Mock()
    bench.take_turns(Records(), {("full", "x"): partial(bench.times, FULL), ("floor", "x"): bench.products}, 2, 3)
    assert bench.lead.call_count == 4


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_the_mean_loss_and_its_gradients_or_says_why_not(name):
    refused(lambda: loss_function("ligre"), match="unknown method 'ligre'.*liger")
    function, status, why_not = attempt(partial(loss_function, name))
    if status == "unavailable":
        assert why_not and "\n" not in why_not
    elif not torch.cuda.is_available():
        torch.manual_seed(0)
        e, w, y = torch.randn(12, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True), torch.arange(12)
        found, wanted = function(e, w, y), linear_cross_entropy(e, w, y, head="full")
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, (e, w)), torch.autograd.grad(wanted, (e, w)))


SHARED = dict(tokens=24, vocabulary=50, hidden=8, dtype="float32", seed=0, reference="float64", iters=3, warmup=1)
SHARED |= dict(phase="head/1", heads=["full", "chunked"], workspace="1MiB", error_bound=1e-5)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measured(**changes):
    records = Records()
    measure_head(records, torch.device("cpu"), **SHARED | changes)
    frame = records.frame()
    return frame.groupby(["variant", "metric"])["value"].apply(list).to_dict(), statuses(frame)


def test_heads_are_checked_then_their_memory_taken_then_timed_in_turn_with_the_products(group):
    found, states = measured()
    assert states == {"full": "ok", "chunked": "ok"}
    for head in SHARED["heads"]:
        assert 0 < found[head, "error_dW"][0] < 1e-6 and len(found[head, "both_ms"]) == 3
        parts = [found[head, f"{part}_mib"][0] for part in ("weight", "dW", "hidden", "dE", "workspace")]
        assert parts[:4] == [x / 2**20 for x in (50 * 8 * 4, 50 * 8 * 4, 24 * 8 * 4, 24 * 8 * 4)]
        assert found[head, "held_mib"] == [sum(parts)]
    assert len(found["floor", "dW_ms"]) == 3


def test_what_is_wrong_or_shares_a_gpu_gets_no_time_and_what_cannot_run_is_a_status(group, monkeypatch):
    found, states = measured(error_bound=1e-12)
    assert states == {"full": "wrong", "chunked": "wrong"} and ("full", "error_dE") in found
    assert not any("both" in metric for _, metric in found)
    for gpus, status in ((1, "ok"), (0, "shared")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert ran(torch.device("cuda")) == status
    monkeypatch.setattr(parallel, "ran", lambda device: "shared")
    found, states = measured()
    assert states == {"full": "shared", "chunked": "shared"} and ("full", "held_mib") in found
    assert not any("ms" in metric for _, metric in found)

    monkeypatch.undo()
    results = [torch.OutOfMemoryError("too large"), {"error_dW": 0.0}]
    monkeypatch.setattr(Share, "errors", Mock(side_effect=results))
    found, states = measured(heads=["full", "fused", "chunked"])
    assert states == {"full": "oom", "fused": "unavailable", "chunked": "ok"} and ("chunked", "both_ms") in found
