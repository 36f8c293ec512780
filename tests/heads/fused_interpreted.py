"""Values of head `fused` through Triton's interpreter, which must be enabled on import: see test_fused.py."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from head_cases import OPTION_SETS, SOFTCAPS, Problem, assert_close, assert_no_worse, options, problem, run

from t1lib.heads import fused_launch, fused_plan, linear_cross_entropy

assert os.environ.get("TRITON_INTERPRET") == "1"
FAST = [("mean", "plain"), ("mean", "weighted smoothing"), ("sum", "all but smoothing"), ("none", "all")]
SLOW = [(r, name) for r in ("mean", "sum", "none") for name in OPTION_SETS if (r, name) not in FAST]


def slowly(cases: list) -> list:
    """Marked as slow: sets of arguments, tuples, or the values of one."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def agrees(p: Problem, tolerance: float = 3e-6, own: dict | None = None, **kwargs) -> None:
    """Assert that `fused` gives, finite, what `full` gives in float64."""
    got = run("fused", p, **kwargs, **(own or {}))
    assert all(t.isfinite().all() for t in got)
    assert_close(got, run("full", p.to(torch.float64), **kwargs), tolerance)


@pytest.mark.parametrize("reduction, name", [*FAST, *slowly(SLOW)])
def test_agrees_with_full(reduction, name):
    """40 tokens make two chunks; the vocabulary and the hidden size are no multiples of tiles. Under a softcap with
    label smoothing, and under "none", the backward makes the gradients."""
    p = problem(40, 140, 40, dtype=torch.float32)
    agrees(p, own={"chunks": 2}, reduction=reduction, **options(name, p))


@pytest.mark.parametrize("reduction, group", [("mean", 2), *slowly([("mean", 1), ("none", 2), ("none", 8)])])
def test_row_blocks_go_through_the_vocabulary_in_groups(reduction, group, monkeypatch):
    """There are three blocks of 32 rows, so the last group may be smaller."""
    monkeypatch.setattr(fused_launch, "CACHED", group * 32 * 16 * 4)
    agrees(problem(80, 140, 16, dtype=torch.float32), own={"chunks": 1}, reduction=reduction)


@pytest.mark.parametrize("units", slowly([1, 5, 40]))
def test_work_is_dealt_to_any_number_of_programs(units, monkeypatch):
    device = fused_plan.Device("interpreter", units)
    monkeypatch.setattr(fused_plan, "device_of", lambda _: device)
    p = problem(40, 140, 40, dtype=torch.float32)
    agrees(p, own={"chunks": 2}, **options("weighted smoothing", p))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(1, 7, 3), *slowly([((33, 129, 123),)])], ids=str)
def test_ragged_shapes(shape, reduction):
    agrees(problem(*shape, dtype=torch.float32, bias=False), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_error_is_that_of_full(reduction):
    p = problem(40, 140, 40, dtype=torch.float16)
    one = torch.ones(40 if reduction == "none" else ())
    exact = run("full", p.to(torch.float64), one, reduction=reduction)
    plain, got = (run(head, p, one, reduction=reduction) for head in ("full", "fused"))
    assert_no_worse(got, plain, exact, dict.fromkeys(["loss", "de", "dw", "db"], 1.05))


@pytest.mark.parametrize("autocast", [False, True])
def test_chunked_computes_bfloat16(autocast):
    """The interpreter does not support bfloat16, so `chunked` computes in place of the kernels."""
    p = problem(20, 257, 16, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fused, chunked = (run(head, p) for head in ("fused", "chunked"))
    assert all(torch.equal(f, c) for f, c in zip(fused, chunked, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_operands(reduction):
    p = problem(9, 50, 16, dtype=torch.float32)
    for wanted in range(3):
        agrees(p, reduction=reduction, grad=tuple(i == wanted for i in range(3)))


def test_filter_drops_what_full_drops():
    agrees(problem(20, 140, 16, dtype=torch.float32), filter_eps=1e-3)


def test_many_tokens_with_one_target():
    p = problem(40, 50, 16, dtype=torch.float32, ignored=False)
    p.target[5:38] = 17
    agrees(p, own={"chunks": 2})


@pytest.mark.parametrize("reduction", ["mean", *slowly(["none"])])
def test_a_logit_far_above_the_targets(reduction):
    """The exponentials overflow with the first estimate of their offset, so those rows are recomputed."""
    p = problem(40, 70, 16, dtype=torch.float32)
    p.b[3] += 1000.0
    agrees(p, 1e-4, reduction=reduction)


@pytest.mark.parametrize("shift, reduction", [(-1e3, "mean"), *slowly([(1e3, "none")])])
def test_large_offsets(shift, reduction):
    p = problem(20, 140, 16, dtype=torch.float32)
    p.b += shift  # float32 resolves logits near 1000 to 6e-5
    agrees(p, 3e-4, reduction=reduction)


def test_a_certain_target():
    """p → 1: the loss is near 0, as in `torch.nn.functional.cross_entropy`, and the gradients are finite."""
    p = problem(20, 140, 16, dtype=torch.float32, bias=False, ignored=False)
    p.e *= 300
    p.target[:] = (p.e @ p.w.T).argmax(1)
    loss, *gradients = run("fused", p)
    want = torch.nn.functional.cross_entropy((p.e @ p.w.T).double(), p.target)
    assert want < 0.01 and (loss - want).abs() <= 1e-3  # logits are in the thousands
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(bad):
    """NaN and inf appear where they appear with `full`."""
    p = problem(20, 70, 16, dtype=torch.float32, bias=False, ignored=False)
    p.e[3, 2] = bad
    for got, want in zip(run("fused", p), run("full", p), strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())


def test_all_tokens_ignored():
    p = problem(5, 70, 16, dtype=torch.float32)
    p.target[:] = -100
    loss, *gradients = run("fused", p)
    assert loss.isnan() and all((g == 0).all() for g in gradients)
    assert run("fused", p, reduction="sum")[0] == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["weighted smoothing", *slowly(["plain", "all", "softcap"])])
def test_what_an_ignored_token_holds_reaches_no_result(reduction, name):
    p = problem(9, 50, 16, dtype=torch.float32)
    kwargs = options(name, p) | {"reduction": reduction}
    for own in ({}, {"accumulate": "float32"}):
        want = run("fused", p, **kwargs, **own)
        p.e[p.target == -100] = float("nan") if not own else float("inf")
        got = run("fused", p, **kwargs, **own)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert all(g.isfinite().all() for g in got) and (got[1][p.target == -100] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", *slowly(["sum", "none"])])
def test_an_infinite_weight_that_no_token_counts(reduction):
    p = problem(20, 70, 16, dtype=torch.float32)
    weight, token_weight = torch.rand(70) + 0.2, torch.rand(20)
    weight[0], token_weight[p.target < 0] = float("inf"), float("inf")
    p = Problem(p.e, p.w, p.b, p.target.where(p.target != 0, 1))
    for kwargs in ({"weight": weight}, {"token_weight": token_weight}):
        agrees(p, reduction=reduction, **kwargs)


@pytest.mark.parametrize("softcap", [0.01, *SOFTCAPS[::2], *slowly([0.5, *SOFTCAPS[1::2]])])
def test_a_softcap_of_any_size(softcap):
    """A tight one saturates: its tanh is within a few roundings of 1."""
    p = problem(9, 50, 16, dtype=torch.float32)
    agrees(p, 3e-5 if 0.001 < softcap < 1 else 3e-6, softcap=softcap)


def test_statistics():
    p = problem(37, 140, 16, dtype=torch.float32)
    kwargs = {"linear_bias": p.b, "return_stats": True}
    _, got = linear_cross_entropy(p.e, p.w, p.target, head="fused", **kwargs)
    _, want = linear_cross_entropy(p.e, p.w, p.target, head="full", **kwargs)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_strided_targets_and_class_weights(reduction):
    """The kernels read both with stride 1."""
    p = problem(20, 70, 16, dtype=torch.float32)
    target = torch.stack([p.target, torch.zeros_like(p.target)], 1)[:, 0]
    weight = torch.stack([torch.rand(70) + 0.2, torch.zeros(70)], 1)[:, 0]
    agrees(Problem(p.e, p.w, p.b, target), reduction=reduction, weight=weight, label_smoothing=0.3)


@pytest.mark.parametrize("reduction", ["mean", *slowly(["none"])])
def test_offsets_beyond_32_bits(reduction):
    """Rows that lie 2²⁶ elements apart: from the 32nd on beyond 2³¹. Memory that is not touched costs nothing."""
    p = problem(36, 36, 16, dtype=torch.float32, bias=False)
    high = torch.empty(36 * 2**26).as_strided((36, 16), (2**26, 1))
    want = run("fused", p, reduction=reduction)
    for e, w in ((p.e, high), (high, p.w)):
        high.copy_(p.w if w is high else p.e)
        got = run("fused", Problem(e, w, None, p.target), reduction=reduction)
        assert all(torch.equal(g, x) for g, x in zip(got, want, strict=True))


def test_several_threads_at_once():
    problems = [problem(4 + i, 30 + i, 8 + i, dtype=torch.float32, seed=i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: run("fused", p), problems))
    for p, got in zip(problems, found, strict=True):
        assert_close(got, run("full", p.to(torch.float64)), 3e-6)
