"""Head `fused` through Triton's interpreter beyond its values: workspace, refusals, autocast, torch.compile."""

import os
from functools import partial

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from head_cases import Problem, assert_close, least_of, problem, refusal, run
from torch._dynamo.backends.common import aot_autograd

from t1lib.heads import linear_cross_entropy, patch_head

assert os.environ.get("TRITON_INTERPRET") == "1"
slow = pytest.mark.slow
COMPILED = [("mean", "4MiB", False), ("mean", None, True), ("none", None, True), ("mean", "4MiB", True)]


def operands(p: Problem) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (p.e, p.w)]


def test_second_backward_and_second_derivative_are_refused():
    p = problem(5, 70, 16, dtype=torch.float32)
    e, w = operands(p)
    loss = linear_cross_entropy(e, w, p.target, head="fused", workspace="512MiB")
    torch.autograd.grad(loss, e, retain_graph=True)
    assert "second backward" in refusal(lambda: torch.autograd.grad(loss, e))
    for reduction in ("mean", "none"):
        again = linear_cross_entropy(e, w, p.target, head="fused", reduction=reduction).sum()
        assert "no second derivative" in refusal(partial(torch.autograd.grad, again, e, create_graph=True))


def test_the_least_workspace_makes_the_gradients_in_the_backward():
    p = problem(40, 70, 16, dtype=torch.float32)
    least = least_of(lambda: run("fused", p, workspace=1000))
    assert least_of(lambda: run("fused", p, workspace=least - 1)) == least
    assert_close(run("fused", p, workspace=least), run("full", p), 1e-5)
    e, w = operands(p)
    loss = linear_cross_entropy(e, w, p.target, head="fused", workspace=least)
    once, again = (torch.autograd.grad(loss, e, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_a_budget_holds_for_float32_sums_too():
    """All tokens are one chunk then, which needs more than several would."""
    p = problem(200, 30, 100, dtype=torch.float32, bias=False)
    sums = {"accumulate": "float32"}
    several, one = (least_of(lambda own=own: run("fused", p, workspace=1, **own)) for own in ({}, sums))
    assert one > several + 50_000
    assert_close(run("fused", p, workspace=one, **sums), run("full", p), 1e-5)
    assert least_of(lambda: run("fused", p, workspace=one - 1, **sums)) == one


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_copy_of_the_weight_counts(reduction):
    """Under autocast, or without unit stride, the kernels need a copy of the weight: 2 MiB in float16."""
    p = problem(20, 4096, 256, dtype=torch.float16, bias=False)
    least = partial(least_of, lambda: run("fused", p, workspace=1, reduction=reduction))
    usual, copy = least(), p.w.nbytes
    p.w = p.w.T.contiguous().T
    assert least() == usual + copy
    p = p.to(torch.float32)
    with torch.autocast("cpu", torch.float16):
        assert least() == usual + copy


@pytest.mark.parametrize("own", [{}, {"reduction": "none"}, {"workspace": "8MiB"}], ids=str)
def test_autocast_to_float16(own):
    p = problem(20, 70, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.float16):
        got = run("fused", p, **own)
    assert all(g.dtype == torch.float32 for g in got)
    reduction = {"reduction": own.get("reduction", "mean")}
    assert_close(got, run("full", p.to(torch.float16).to(torch.float64), **reduction), 2e-3)
    assert (got[2].half() != got[2]).any()  # dW is summed in float32, as the weight is


def test_what_is_not_there_is_refused_and_not_wrong():
    p = problem(20, 70, 16, dtype=torch.float32)
    call = partial(linear_cross_entropy, linear_weight=p.w, target=p.target, head="fused")
    assert "no forward-mode derivative" in refusal(lambda: torch.func.jvp(call, (p.e,), (p.e,)))
    for wrong in ({"ignore_index": True}, {"workspace": 1.5}, {"shards": 2}):
        assert next(iter(wrong)).replace("workspace", "bad size") in refusal(partial(call, p.e, **wrong))
    assert "chunks or workspace" in refusal(partial(call, p.e, chunks=2, workspace="1GiB"))


def test_the_backward_takes_the_forwards_precision():
    p, found = problem(20, 70, 16, dtype=torch.float32), []
    for autocast in (False, True):
        e, w = operands(p)
        losses = linear_cross_entropy(e, w, p.target, head="fused", reduction="none")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(torch.autograd.grad(losses.sum(), e)[0])
    assert torch.equal(*found)


def agree_when_compiled(call, p: Problem, calls: list[tuple], **kwargs) -> list:
    """Assert that each of `calls` gives the same loss and gradients when `call` is compiled as one graph.

    Returns the compiler's graphs: forward, backward.
    """
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    f = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep), **kwargs)
    for arguments in calls:
        results = []
        for each in (call, f):
            e, w = operands(p)
            loss = each(e, w, *arguments).sum()
            results.append([loss.detach(), *torch.autograd.grad(loss, (e, w), torch.tensor(0.3))])
        assert_close(results[1], results[0], 1e-6)
    return graphs


@pytest.mark.parametrize(
    "reduction, workspace, dynamic",
    [("mean", None, False), ("none", None, False), *(pytest.param(*c, marks=slow) for c in COMPILED)],
)
def test_the_compiler_sees_one_operator_and_copies_nothing(reduction, workspace, dynamic):
    p = problem(5, 70, 16, dtype=torch.float32)

    def call(e, w):
        return linear_cross_entropy(e * 1.0, w, p.target, head="fused", reduction=reduction, workspace=workspace)

    graphs = agree_when_compiled(call, p, [()], dynamic=dynamic)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert len(graphs) == 2 and sum("t1lib.linear_cross_entropy.default" in name for name in names) == 1
    assert not [name for name in names if any(word in name for word in ("functionalized", "clone", "copy", "scale_"))]


def test_a_workspace_that_changes_between_compiled_calls():
    p = problem(5, 70, 16, dtype=torch.float32)

    def call(e, w, workspace):
        return linear_cross_entropy(e * 1.0, w, p.target, head="fused", workspace=workspace)

    agree_when_compiled(call, p, [(size * 2**20,) for size in (256, 300, 4)])


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=slow)])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_an_unknown_number_of_tokens_compiles(reduction):
    p = problem(9, 70, 16, dtype=torch.float32)

    def call(e, w, target):
        mask = target != -100
        return linear_cross_entropy((e * 1.0)[mask], w, target[mask], head="fused", reduction=reduction)

    agree_when_compiled(call, p, [(p.target,), (p.target.roll(1).index_fill(0, torch.arange(3), -100),)])


@slow
def test_a_patched_model_compiles_whole():
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = patch_head(transformers.AutoModelForCausalLM.from_config(config))
    ids = torch.arange(24).view(2, 12)
    found = []
    for f in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss = f(input_ids=ids, labels=ids).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert_close(*found, 1e-5)
