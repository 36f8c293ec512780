"""Head `fused` through Triton's interpreter, which must be enabled on import: see test_interpreted.py."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import test_heads_contract as contract
import torch
from functorch.compile import make_boxed_func
from head_cases import ODD, Problem, assert_close, assert_compiles, least_of, options, problem
from head_cases import run as run_head
from huggingface_models import batch, compare, pair
from torch._dynamo.backends.common import aot_autograd

from t1lib.heads import fused_launch, fused_plan, linear_cross_entropy

assert os.environ.get("TRITON_INTERPRET") == "1"
run = partial(run_head, "fused")
slow = pytest.mark.slow
OPTIONS = [("mean", "weighted smoothing"), ("sum", "all but smoothing"), ("none", "all")]
COMPILED = [("none", None, False), ("mean", "4MiB", True)]


def slowly(cases: list) -> list:
    """Marked as slow: sets of arguments, tuples, or the values of one."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow) for case in cases]


def single(n: int, v: int, d: int, **kwargs) -> Problem:
    return problem(n, v, d, dtype=torch.float32, **kwargs)


def agrees(p: Problem, own: dict | None = None, **kwargs) -> None:
    """Assert that `fused` gives what `full` gives in float64."""
    assert_close(run(p, **kwargs, **(own or {})), run_head("full", p.to(torch.float64), **kwargs), 3e-6)


@pytest.mark.parametrize("reduction, name", OPTIONS)
def test_agrees_with_full(reduction, name):
    """Many tokens have one target; "none" makes gradients in the backward."""
    p = single(20, 70, 24)
    p.target[5:16] = p.target[5:16].where(p.target[5:16] < 0, 17)
    agrees(p, own={"chunks": 2}, reduction=reduction, **options(name, p))


def test_the_weights_gradient_is_no_view():
    """Autograd could not add the embedding's gradient to that of a tied weight in place, and would make a third."""
    p = single(20, 70, 24, bias=False)
    loss = linear_cross_entropy(p.e.requires_grad_(), p.w.requires_grad_(), p.target)
    (made,) = (tensor for tensor in loss.grad_fn.saved_tensors if tensor.shape == p.w.shape)
    assert not made._is_view()


@pytest.mark.parametrize("first", [0, *slowly([10, 20, 30])])
def test_calls_drawn_by_chance(first):
    contract.test_calls_drawn_by_chance(first, "fused", (24, 150, 40))


@pytest.mark.parametrize("units, group", [(5, 2), *slowly([(1, 1), (40, 8)])])
def test_work_is_dealt_to_any_number_of_programs_in_groups_of_blocks(units, group, monkeypatch):
    """Three blocks of 16 rows, and of columns three and half a one: the last group may be smaller."""
    monkeypatch.setattr(fused_plan, "device_of", lambda _: fused_plan.Device("interpreter", units))
    monkeypatch.setattr(fused_launch, "CACHED", group * 16 * 16 * 4)
    monkeypatch.setattr(fused_launch, "TOGETHER", (group, group))
    p = single(40, 70, 104)
    agrees(p, own={"chunks": 1}, **options("weighted smoothing", p))


QUICK = ["one token", "a logit far above", "nan in ignored tokens", "softcap 1e-30", "softcap 1000000.0"]


@pytest.mark.parametrize("name", [*QUICK, *slowly([name for name in ODD if name not in QUICK])])
def test_odd_operands_and_options(name):
    contract.test_odd_operands_and_options("fused", {}, name)


def test_what_holds_for_every_head():
    contract.test_certain_targets("fused", {}, atol=3e-7)
    contract.test_the_forwards_autocast_counts_in_the_backward_too({}, "fused")
    contract.test_all_tokens_ignored_or_none_at_all("fused", {}, "mean", torch.float32, vocabulary=40)
    contract.test_statistics("fused", {}, "plain", torch.float32)
    for reduction in ("mean", "none"):
        contract.test_second_backwards_are_right_or_refused_as_are_derivatives("fused", {}, reduction, torch.float32)


def test_numbers_that_are_none():
    """NaN and inf appear where they appear with `full`."""
    p = single(9, 70, 16)
    for bad in (float("nan"), float("inf")):
        p.e[3, 2] = bad
        for got, want in zip(run(p), run_head("full", p), strict=True):
            assert torch.equal(got.isfinite(), want.isfinite())


def test_the_least_workspace_makes_the_gradients_in_the_backward():
    p = single(20, 150, 16)  # five ranges of columns
    least = least_of(partial(run, p))
    e, w, b = (t.detach().requires_grad_() for t in (p.e, p.w, p.b))
    loss = linear_cross_entropy(e, w, p.target, head="fused", linear_bias=b, workspace=least)
    once, again = (torch.autograd.grad(loss, (e, w, b), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    assert_close([loss.detach(), *once], run_head("full", p, torch.ones(())), 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_copy_of_the_weight_counts(reduction):
    """Under autocast, or without unit stride, the kernels need a copy of the weight: 2 MiB in float16."""
    p = problem(20, 4096, 256, dtype=torch.float16, bias=False)
    least = partial(least_of, lambda **given: run(p, reduction=reduction, **given))
    usual, copy = least(), p.w.nbytes
    p.w = p.w.T.contiguous().T
    assert least() == usual + copy
    p = p.to(torch.float32)
    with torch.autocast("cpu", torch.float16):
        assert least() == usual + copy


@pytest.mark.parametrize("own", [{}, *slowly([{"reduction": "none"}, {"workspace": "8MiB"}])], ids=str)
def test_autocast_to_float16(own):
    p = single(20, 40, 16)
    with torch.autocast("cpu", torch.float16):
        got = run(p, **own)
    assert all(g.dtype == torch.float32 for g in got)
    reduction = {"reduction": own.get("reduction", "mean")}
    assert_close(got, run_head("full", p.to(torch.float16).to(torch.float64), **reduction), 2e-3)
    assert (got[2].half() != got[2]).any()  # dW is summed in float32, as the weight is


@pytest.mark.parametrize("reduction, workspace, dynamic", [("mean", None, False), *slowly(COMPILED)])
def test_the_compiler_sees_one_operator_and_copies_nothing(reduction, workspace, dynamic):
    p, graphs = single(5, 40, 16), []

    def call(e, w):
        return linear_cross_entropy(e * 1.0, w, p.target, head="fused", reduction=reduction, workspace=workspace)

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    assert_compiles(call, (p.e, p.w), fullgraph=True, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert len(graphs) == 2 and sum("t1lib.linear_cross_entropy.default" in name for name in names) == 1
    assert not [name for name in names if any(word in name for word in ("functionalized", "clone", "copy", "scale_"))]


def test_compiles_for_another_number_of_chunks():
    p = single(40, 70, 16)
    call = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for chunks in (2, 3):
        found, expected = (f(p.e, p.w, p.target, chunks=chunks) for f in (call, linear_cross_entropy))
        assert torch.equal(found, expected)


@slow
def test_a_patched_model_compiles_whole():
    own, ours = pair("Qwen3", num_hidden_layers=1, use_cache=False)
    compare(own, torch.compile(ours, backend="aot_eager", fullgraph=True), **batch())


def test_threads():
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tokens: agrees(single(tokens, 40, 16)), (3, 9, 20, 33)))
