"""A process that measures an output layer: which errors it detects, and which status a variant gets."""

import pytest
import torch

from t1lib.errors import UnavailableError
from t1lib.measure.chunk_bench import Call, OutputLayer, admit, take_turns
from t1lib.measure.records import Records, statuses

TOKENS, VOCABULARY, HIDDEN = 24, 50, 8


@pytest.fixture
def layer():
    shape = dict(tokens=TOKENS, vocabulary=VOCABULARY, hidden=HIDDEN)
    return OutputLayer(**shape, dtype="float32", device="cpu")


@pytest.mark.parametrize("head, reduction", [("full", "mean"), ("chunked", "sum"), ("fused", "none")])
def test_ignored_tokens_get_no_gradient_and_the_others_theirs(layer, head, reduction):
    valid = layer.padding(sequences=2)
    assert int(valid.sum()) == TOKENS // 2
    assert valid.tolist()[:12] == [False] * 3 + [True] * 6 + [False] * 3
    exact = layer.exact(reduction, valid)
    assert exact.dE.shape == (TOKENS // 2, HIDDEN) and exact.dE.dtype == torch.float64
    found = layer.padding_errors(Call(head, reduction), valid, exact)
    assert found["leaks"] == 0
    assert max(found.values()) < 1e-5


def test_a_head_that_multiplies_padding_in_is_found(layer, monkeypatch):
    """Such as a head that treats an ignored token as having target 0."""
    valid = layer.padding(2)
    exact = layer.exact("sum", valid)
    monkeypatch.setattr(layer, "masked", lambda valid: layer.y * valid)
    found = layer.padding_errors(Call("full", "sum"), valid, exact)
    assert found["leaks"] >= TOKENS // 2 and found["padded_dW"] > 0.1 and found["weighted_dW"] < 1e-5


def test_memory_counts_beyond_inputs_and_gradients(layer):
    logit = TOKENS * VOCABULARY * 4
    whole = layer.memory(Call("full"))
    assert whole["workspace"] > 2 * logit and whole["kept"] >= logit
    parts = layer.memory(Call("chunked", options={"chunks": 8}))
    assert parts["workspace"] < whole["workspace"] / 2
    assert parts["kept"] >= layer.e.nbytes + layer.w.nbytes  # gradients made in the forward


def test_times_are_of_both_phases_and_of_the_loss_alone(layer):
    times = layer.times(Call("chunked", "none"), alone=True)
    assert set(times) == {"forward", "backward", "both", "host", "eval"} and all(ms > 0 for ms in times.values())
    assert times["both"] == pytest.approx(times["forward"] + times["backward"])
    assert set(layer.floor_times()) == {"logits", "dE", "dW", "copy"}


def refuse(error):
    raise error


@pytest.mark.parametrize(
    ("measure", "status"),
    [
        (lambda: {"error_loss": 0.0, "error_dW": 0.1}, "ok"),
        (lambda: {"error_loss": 0.0, "error_dW": 0.2}, "wrong"),
        (lambda: {"error_loss": float("nan"), "error_dW": 0.0}, "wrong"),
        (lambda: refuse(torch.OutOfMemoryError("full")), "oom"),
        (lambda: refuse(UnavailableError("not here")), "unavailable"),
    ],
)
def test_only_what_is_right_is_timed(measure, status):
    records = Records()
    assert admit(records, "head", "mean", measure, 0.1) is (status == "ok")
    assert statuses(records.frame()) == {"head": status}


def test_variants_take_turns_and_one_without_memory_leaves_the_others():
    records, order = Records(), []

    def run(name, fails_at=None):
        order.append(name)
        if order.count(name) == fails_at:
            raise torch.OutOfMemoryError("full")
        return {"both": 1.0}

    runners = {("a", "x"): lambda: run("a"), ("b", "x"): lambda: run("b", fails_at=3)}
    take_turns(records, runners, repeats=3, warmup=1)
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [["a", "b"]] * 3
    assert order[6:] == ["a"]
    steps = [(row["variant"], row["step"]) for row in records.rows if row["metric"] == "both_ms"]
    assert sorted(steps) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert statuses(records.frame()) == {"b": "oom"}
