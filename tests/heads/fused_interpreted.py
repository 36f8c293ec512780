"""Head `fused` through Triton's interpreter, which must be enabled before Triton is imported: see test_fused.py."""

import os
import re

import pytest
import torch
from head_cases import OPTION_SETS, Problem, assert_close, options, problem, run

from t1lib.errors import T1Error
from t1lib.heads import fused_launch, fused_plan, fused_search, linear_cross_entropy

assert os.environ.get("TRITON_INTERPRET") == "1"


CASES = [("mean", {"chunks": 3}, name) for name in OPTION_SETS] + [("none", {"chunks": 2}, n) for n in OPTION_SETS]


@pytest.mark.parametrize("reduction, own, name", [*CASES, ("sum", {}, "plain"), ("sum", {}, "all")], ids=str)
def test_agrees_with_full(reduction, own, name):
    p = problem(70, 300, 40, dtype=torch.float32)
    kwargs = options(name, p) | {"reduction": reduction}
    assert_close(run("fused", p, **kwargs, **own), run("full", p.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize(("tokens", "name"), [(20, "plain"), (20, "all")] + [(90, name) for name in OPTION_SETS])
def test_first_chunk_in_the_memory_of_the_weight_gradient(tokens, name, monkeypatch):
    lent = fused_plan.Lent(32, 128, fused_plan.Work(2, 2))  # three panels, the last of them not full
    rest = fused_plan.Early(32, 2, 0, *2 * (fused_plan.Work(2, 1),)) if tokens > 32 else fused_plan.NO_CHUNKS
    monkeypatch.setattr(fused_search, "plan_early", lambda *_: rest._replace(lent=lent))
    p = problem(tokens, 380, 40, dtype=torch.float32)
    kwargs = options(name, p) | {"reduction": "mean"}
    assert_close(run("fused", p, **kwargs), run("full", p.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize(("reduction", "group"), [("mean", 1), ("none", 2), ("mean", 3), ("none", 8)])
def test_row_blocks_go_through_the_vocabulary_in_groups(reduction, group, monkeypatch):
    """There are four blocks of 32 rows, so the last group may be smaller."""
    monkeypatch.setattr(fused_launch, "CACHED", group * 32 * 40 * 4)
    p = problem(110, 300, 40, dtype=torch.float32)
    kwargs = {"reduction": reduction}
    assert_close(run("fused", p, chunks=1, **kwargs), run("full", p.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize("shape", [(1, 7, 3), (5, 257, 16), (33, 129, 123)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ragged_shapes(shape, reduction):
    p = problem(*shape, dtype=torch.float32, bias=False)
    assert_close(run("fused", p, reduction=reduction), run("full", p.to(torch.float64), reduction=reduction), 3e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_error_is_that_of_full(reduction):
    p = problem(40, 300, 40, dtype=torch.float16)
    up = None if reduction == "mean" else torch.ones(40)
    exact = run("full", p.to(torch.float64), torch.tensor(1.0) if up is None else up, reduction=reduction)
    one = torch.tensor(1.0) if up is None else up
    plain, got = (run(head, p, one, reduction=reduction) for head in ("full", "fused"))
    for g, f, x in zip(got, plain, exact, strict=True):
        assert g.dtype == f.dtype
        assert (g.double() - x).norm() <= 1.05 * (f.double() - x).norm() + 1e-6 * x.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_chunked_computes_bfloat16(autocast):
    """The interpreter does not support bfloat16, so `chunked` computes in place of the kernels."""
    p = problem(20, 257, 16, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fused, chunked = (run(head, p) for head in ("fused", "chunked"))
    assert all(torch.equal(f, c) for f, c in zip(fused, chunked, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("grad", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_frozen_operands(reduction, grad):
    p = problem(37, 257, 16, dtype=torch.float32)
    kwargs = {"reduction": reduction, "grad": grad}
    assert_close(run("fused", p, **kwargs), run("full", p.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize("units", [1, 5, 40])
def test_columns_are_dealt_to_any_number_of_programs(units, monkeypatch):
    """dBias is computed alongside dW: each program does its share after a different one of its tiles."""
    monkeypatch.setattr(fused_plan, "device_of", lambda _: fused_plan.Device("interpreter", units))
    p = problem(70, 300, 150, dtype=torch.float32)
    kwargs = options("weighted smoothing", p)
    assert_close(run("fused", p, chunks=2, **kwargs), run("full", p.to(torch.float64), **kwargs), 3e-6)


def test_filter_drops_what_full_drops():
    p = problem(37, 257, 16, dtype=torch.float32)
    assert_close(run("fused", p, filter_eps=1e-3), run("full", p.to(torch.float64), filter_eps=1e-3), 3e-6)


def test_many_tokens_with_one_target():
    p = problem(70, 300, 40, dtype=torch.float32, ignored=False)
    p.target[5:60] = 17
    assert_close(run("fused", p, chunks=2), run("full", p.to(torch.float64)), 3e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_logit_far_above_the_targets(reduction):
    """The exponentials overflow with the first estimate of their offset, so those rows are recomputed."""
    p = problem(40, 257, 16, dtype=torch.float32, bias=True)
    p.b[3] += 1000.0
    assert_close(run("fused", p, reduction=reduction), run("full", p.to(torch.float64), reduction=reduction), 1e-4)


@pytest.mark.parametrize("shift", [1e3, -1e3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_large_offsets(shift, reduction):
    p = problem(20, 257, 16, dtype=torch.float32)
    p.b += shift  # float32 resolves logits near 1000 to 6e-5
    assert_close(run("fused", p, reduction=reduction), run("full", p.to(torch.float64), reduction=reduction), 3e-4)


def test_a_certain_target():
    """p → 1: the loss is near 0, as in `torch.nn.functional.cross_entropy`, and the gradients are finite."""
    p = problem(20, 257, 16, dtype=torch.float32, bias=False, ignored=False)
    p.e *= 300
    p.target[:] = (p.e @ p.w.T).argmax(1)
    loss, *gradients = run("fused", p)
    want = torch.nn.functional.cross_entropy((p.e @ p.w.T).double(), p.target)
    assert want < 0.01 and (loss - want).abs() <= 1e-3  # logits are in the thousands
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(bad):
    """NaN and inf appear where they appear with `full`."""
    p = problem(20, 257, 16, dtype=torch.float32, bias=False, ignored=False)
    p.e[3, 2] = bad
    for got, want in zip(run("fused", p), run("full", p), strict=True):
        assert got is None or torch.equal(got.isfinite(), want.isfinite())


def test_all_tokens_ignored():
    p = problem(5, 257, 16, dtype=torch.float32)
    p.target[:] = -100
    loss, *gradients = run("fused", p)
    assert loss.isnan() and all((g == 0).all() for g in gradients)
    assert run("fused", p, reduction="sum")[0] == 0


def test_statistics():
    p = problem(37, 257, 16, dtype=torch.float32)
    kwargs = {"linear_bias": p.b, "return_stats": True}
    _, got = linear_cross_entropy(p.e, p.w, p.target, head="fused", **kwargs)
    _, want = linear_cross_entropy(p.e, p.w, p.target, head="full", **kwargs)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_second_backward_and_second_derivative_are_refused():
    p = problem(5, 257, 16, dtype=torch.float32)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target, head="fused")
    torch.autograd.grad(loss, e, retain_graph=True)
    with pytest.raises(T1Error, match="second backward"):
        torch.autograd.grad(loss, e)
    with pytest.raises(T1Error, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(e, p.w, p.target, head="fused"), e, create_graph=True)


def least_workspace(p):
    with pytest.raises(T1Error, match="the least that works is") as e:
        linear_cross_entropy(p.e.requires_grad_(), p.w.requires_grad_(), p.target, head="fused", workspace=1000)
    return int(str(e.value).split("works is ")[1].split()[0])


def test_the_least_workspace_makes_the_gradients_in_the_backward():
    p = problem(66, 130, 16, dtype=torch.float32)
    least = least_workspace(p)
    with pytest.raises(T1Error, match=f"the least that works is {least} bytes"):
        run("fused", p, workspace=least - 1)
    assert_close(run("fused", p, workspace=least), run("full", p), 1e-5)
    e = p.e.requires_grad_()
    loss = linear_cross_entropy(e, p.w, p.target, head="fused", workspace=least)
    once, again = (torch.autograd.grad(loss, e, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_more_workspace_makes_them_in_the_forward():
    p = problem(66, 130, 16, dtype=torch.float32)
    e, w = p.e.requires_grad_(), p.w.requires_grad_()
    loss = linear_cross_entropy(e, w, p.target, head="fused", workspace="512MiB")
    torch.autograd.grad(loss, e, retain_graph=True)
    with pytest.raises(T1Error, match="second backward"):
        torch.autograd.grad(loss, e)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("reduction", "workspace"), [("mean", None), ("none", None), ("mean", "4MiB")])
def test_the_compiler_sees_one_operator(reduction, workspace, dynamic):
    p = problem(5, 257, 16, dtype=torch.float32)

    def loss_of(e, w):
        return linear_cross_entropy(e * 1.0, w, p.target, head="fused", reduction=reduction, workspace=workspace).sum()

    results = []
    for f in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        e, w = p.e.clone().requires_grad_(), p.w.clone().requires_grad_()
        loss = f(e, w)
        results.append([loss.detach(), *torch.autograd.grad(loss, (e, w))])
    assert_close(results[1], results[0], 1e-6)


def test_strided_targets_and_class_weights():
    """The kernels read both with stride 1."""
    p = problem(40, 70, 16, dtype=torch.float32)
    target = torch.stack([p.target, torch.zeros_like(p.target)], 1)[:, 0]
    weight = torch.stack([torch.rand(70) + 0.2, torch.zeros(70)], 1)[:, 0]
    p = Problem(p.e, p.w, p.b, target)
    for kwargs in ({}, {"reduction": "none"}, {"weight": weight, "label_smoothing": 0.3}):
        assert_close(run("fused", p, **kwargs), run("full", p.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_infinite_weight_that_no_token_counts(reduction):
    p = problem(40, 70, 16, dtype=torch.float32)
    weight, token_weight = torch.rand(70) + 0.2, torch.rand(40)
    weight[0], token_weight[p.target < 0] = float("inf"), float("inf")
    p = Problem(p.e, p.w, p.b, p.target.where(p.target != 0, 1))
    for kwargs in ({"weight": weight}, {"token_weight": token_weight}):
        found = run("fused", p, reduction=reduction, **kwargs)
        assert all(t.isfinite().all() for t in found)
        assert_close(found, run("full", p.to(torch.float64), reduction=reduction, **kwargs), 3e-6)


def test_a_budget_holds_for_float32_sums_too():
    """All tokens are one chunk then, which needs more than several would."""
    p = problem(512, 64, 512, dtype=torch.float32, bias=False)
    operands = p.e.requires_grad_(), p.w.requires_grad_(), p.target
    with pytest.raises(T1Error, match="the least that works") as raised:
        linear_cross_entropy(*operands, head="fused", accumulate="float32", workspace="3700KB")
    least = int(re.search(r"works is ([0-9]+) bytes", str(raised.value))[1])
    linear_cross_entropy(*operands, head="fused", accumulate="float32", workspace=least).backward()
    with pytest.raises(T1Error):
        linear_cross_entropy(*operands, head="fused", accumulate="float32", workspace=least - 1)


def test_what_is_not_there_is_refused_and_not_wrong():
    p = problem(20, 70, 16, dtype=torch.float32)
    with pytest.raises(T1Error, match="no forward-mode derivative"):
        torch.func.jvp(lambda e: linear_cross_entropy(e, p.w, p.target, head="fused"), (p.e,), (p.e,))
    for wrong in ({"ignore_index": "x"}, {"ignore_index": True}, {"workspace": 1.5}, {"shards": 2}):
        with pytest.raises(T1Error, match=next(iter(wrong)).replace("workspace", "bad size")):
            linear_cross_entropy(p.e, p.w, p.target, head="fused", **wrong)


def test_losses_of_tokens_can_be_changed_in_place():
    p, found = problem(20, 70, 16, dtype=torch.float32), []
    for double in (lambda x: x.mul_(2.0), lambda x: x * 2.0):
        e = p.e.clone().requires_grad_()
        losses = double(linear_cross_entropy(e, p.w, p.target, head="fused", reduction="none"))
        found.append(torch.autograd.grad(losses.sum(), e)[0])
    assert torch.equal(*found)


def test_the_backward_takes_the_forwards_precision():
    p, found = problem(40, 70, 16, dtype=torch.float32), []
    for autocast in (False, True):
        e = p.e.clone().requires_grad_()
        losses = linear_cross_entropy(e, p.w, p.target, head="fused", reduction="none")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(torch.autograd.grad(losses.sum(), e)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("softcap", [0.5, 0.01])
def test_a_tight_softcap(softcap):
    p = problem(20, 50, 16, dtype=torch.float32)
    kwargs = {"softcap": softcap, "reduction": "sum"}
    assert_close(run("fused", p, **kwargs), run("full", p.to(torch.float64), **kwargs), 3e-5)
