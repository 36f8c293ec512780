"""A streamed model's weights, gradients and state are complete whenever they are looked at."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import (
    adamw,
    assert_same_state,
    assert_same_weights,
    evaluated,
    grouped,
    loop,
    model_loss,
    own_clip,
    sgd,
    streaming,
    train,
    weights,
)
from stream_models import MODELS, blocks, data, llama, qwen3
from torch import nn
from transformers import AutoModelForCausalLM

from t1lib.plan.cost import Choice

pytestmark = pytest.mark.usefixtures("one_thread")

CLIPPED = loop(clip=own_clip)
PLACES = [
    pytest.param({}, id="streamed"),
    pytest.param({"choice": Choice(resident=1, keep=2, host_share=0.5)}, id="mixed"),
    pytest.param({"choice": Choice(slots=3, inputs="host", outer="host", host_share=1.0)}, id="host"),
    pytest.param({"choice": Choice(resident=4, outer="host"), "overlap": False}, id="resident"),
]
AT_ONCE = pytest.param({"update_in_backward": True}, id="at once")
FIRST, SECOND = data(10)[:5], data(10)[5:]


def reloaded(state: Any) -> Any:
    """Through a file, so that nothing is shared with what runs on."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def unbroken(build, optimizer=adamw) -> tuple[nn.Module, Any, list[float]]:
    """A plain model after ten steps, its optimizer, and the losses of the last five."""
    plain = build()
    usual = optimizer(plain)
    CLIPPED(plain, usual, FIRST)
    return plain, usual, CLIPPED(plain, usual, SECOND)


@pytest.mark.parametrize("optimizer", [sgd, grouped], ids=["sgd", "adamw"])
@pytest.mark.parametrize("options", PLACES)
def test_a_streamed_run_goes_on_in_plain_pytorch(options, optimizer):
    plain, usual, expected = unbroken(qwen3, optimizer)
    model = qwen3()
    with streaming(model, optimizer(model), **options) as (streamed, own):
        CLIPPED(streamed, own, FIRST)
        saved = reloaded({"model": streamed.state_dict(), "optimizer": own.state_dict()})
    other = qwen3()
    next_one = optimizer(other)
    other.load_state_dict(saved["model"])
    next_one.load_state_dict(saved["optimizer"])
    assert CLIPPED(other, next_one, SECOND) == expected
    assert_same_weights(other, plain)
    assert_same_state(next_one, usual)


@pytest.mark.parametrize("optimizer", [sgd, grouped], ids=["sgd", "adamw"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after other steps"])
@pytest.mark.parametrize("options", PLACES)
def test_a_plain_run_goes_on_streamed(options, used, optimizer):
    """In a fresh model, or in one that has been trained on something else."""
    plain, last, expected = unbroken(llama, optimizer)
    source = llama()
    usual = optimizer(source)
    CLIPPED(source, usual, FIRST)
    saved = reloaded({"model": source.state_dict(), "optimizer": usual.state_dict()})
    model = llama()
    with streaming(model, optimizer(model), **options) as (streamed, own):
        if used:
            train(streamed, own, SECOND[:3])
        streamed.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        assert CLIPPED(streamed, own, SECOND) == expected
        assert_same_weights(streamed, plain)
        assert_same_state(own, last)


@pytest.mark.parametrize("source", PLACES[:2])
@pytest.mark.parametrize("target", PLACES[1:])
def test_a_run_goes_on_in_another_placement(source, target):
    plain, usual, expected = unbroken(blocks)
    first, second = blocks(), blocks()
    with streaming(first, adamw(first), **source) as (streamed, own):
        CLIPPED(streamed, own, FIRST)
        saved = reloaded({"model": streamed.state_dict(), "optimizer": own.state_dict()})
    with streaming(second, adamw(second), **target) as (streamed, own):
        streamed.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        assert CLIPPED(streamed, own, SECOND) == expected
        assert_same_weights(streamed, plain)
        assert_same_state(own, usual)


@pytest.mark.parametrize("layout", [{}, {"master_weights": "split"}, {"master_weights": None}], ids=str)
def test_a_run_in_bfloat16_goes_on(layout):
    build = partial(qwen3, torch.bfloat16)
    first, second, last = build(), build(), build()
    with streaming(first, grouped(first), **layout) as (streamed, own):
        train(streamed, own, FIRST)
        saved = reloaded({"model": streamed.state_dict(), "optimizer": own.state_dict()})
        expected = train(streamed, own, SECOND)
    with streaming(second, grouped(second), choice=Choice(host_share=0.0), **layout) as (streamed, own):
        train(streamed, own, SECOND[:2])
        streamed.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        assert train(streamed, own, SECOND) == expected
        assert_same_weights(streamed, first)
    widened = grouped(last)
    widened.load_state_dict(saved["optimizer"])  # which casts to the parameters' dtype, as PyTorch does
    assert widened.state[last.model.norm.weight]["exp_avg"].dtype == torch.bfloat16


def test_loading_weights_changes_their_masters():
    """A master that its 16-bit weight is not the rounding of is replaced: else the loaded weights would be lost."""
    start = weights(qwen3(torch.bfloat16))
    losses = {}
    for name in ("fresh", "loaded", "not loaded"):
        model = qwen3(torch.bfloat16)
        with streaming(model, sgd(model, momentum=0.0)) as (streamed, own):
            train(streamed, own, FIRST if name != "fresh" else [])
            streamed.load_state_dict(start if name != "not loaded" else weights(streamed))
            losses[name] = train(streamed, own, SECOND)
    assert losses["loaded"] == pytest.approx(losses["fresh"], rel=1e-3)
    assert losses["not loaded"] != pytest.approx(losses["fresh"], rel=1e-3)


@pytest.mark.parametrize("options", PLACES[:3])
def test_the_state_of_a_fresh_optimizer_starts_anew(options):
    """Its state is empty: nothing of the steps before is left."""
    plain, model = qwen3(), qwen3()
    start = weights(plain)
    expected = CLIPPED(plain, adamw(plain), FIRST)
    with streaming(model, adamw(model), **options) as (streamed, own):
        empty = copy.deepcopy(own.state_dict())
        CLIPPED(streamed, own, SECOND)
        streamed.load_state_dict(start)
        own.load_state_dict(empty)
        assert CLIPPED(streamed, own, FIRST) == expected
        assert_same_weights(streamed, plain)


@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("optimizer", [adamw, sgd], ids=lambda f: f.__name__)
def test_state_that_the_optimizer_has_is_taken_over(optimizer, options):
    plain, usual, expected = unbroken(qwen3, optimizer)
    model = qwen3()
    used = optimizer(model)
    CLIPPED(model, used, FIRST)
    with streaming(model, used, **options) as (streamed, own):
        assert_same_state(own, copy.copy(used))
        assert CLIPPED(streamed, own, SECOND) == expected
        assert_same_weights(streamed, plain)
        assert_same_state(own, usual)


@pytest.mark.parametrize("options", [*PLACES, AT_ONCE])
def test_weights_and_state_are_current_after_every_step(options):
    plain, model = qwen3(), qwen3()
    usual = adamw(plain)
    with streaming(model, adamw(model), **options) as (streamed, own):
        for number, batch in enumerate(FIRST):
            train(plain, usual, [batch])
            train(streamed, own, [batch])
            if number % 2:
                assert_same_weights(streamed, plain)
                assert_same_state(own, usual)
            else:
                assert_same_state(own, usual)
                assert_same_weights(streamed, plain)


@pytest.mark.parametrize("options", PLACES)
def test_weights_are_current_parameter_by_parameter(options):
    """Without asking the model or the optimizer: an average of the weights that her own loop keeps."""
    plain, model = llama(), llama()
    usual = sgd(plain)
    averages: list[list[torch.Tensor]] = []
    with streaming(model, sgd(model), **options) as (streamed, own):
        for one, optimizer in ((plain, usual), (streamed, own)):
            mean = [p.detach().clone() for p in one.parameters()]
            for batch in FIRST:
                train(one, optimizer, [batch])
                getattr(optimizer, "drain", lambda: None)()
                for held, param in zip(mean, one.parameters(), strict=True):
                    held.lerp_(param.detach(), 0.1)
            averages.append(mean)
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))


@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("kind", ["qwen3", "blocks"])
def test_a_gradient_that_is_seen_is_complete(kind, options):
    plain, model = MODELS[kind](), MODELS[kind]()
    usual = adamw(plain)
    with streaming(model, adamw(model), **options) as (streamed, own):
        assert all(p.grad is None for p in streamed.parameters())
        for batches in (FIRST[:1], FIRST[1:3]):
            for batch in batches:
                for one in (plain, streamed):
                    model_loss(one, batch).backward()
                names = [name for name, _ in plain.named_parameters()]
                pairs = zip(names, plain.parameters(), streamed.parameters(), strict=True)
                assert not [name for name, p, q in pairs if not torch.equal(p.grad, q.grad)]
            for optimizer in (usual, own):
                optimizer.step()
                optimizer.zero_grad()
            assert all(p.grad is None for p in streamed.parameters())


def test_gradients_set_to_none_by_hand():
    plain, model = blocks(), blocks()
    with streaming(model, adamw(model)) as (streamed, own):
        for one, optimizer in ((plain, adamw(plain)), (streamed, own)):
            for batch in FIRST:
                model_loss(one, batch).backward()
                optimizer.step()
                for param in one.parameters():
                    param.grad = None
        assert_same_weights(streamed, plain)


def test_the_model_may_be_moved_to_where_it_is():
    plain, model = qwen3(), qwen3()
    expected = train(plain, adamw(plain), FIRST)
    with streaming(model, adamw(model)) as (streamed, own):
        found = []
        for batch in FIRST:
            found += train(streamed, own, [batch])
            streamed.to("cpu").to(torch.float32).train()
        assert found == expected
        assert_same_weights(streamed, plain)


@pytest.mark.parametrize("write", ["fill", "copy", "data", "initialise"])
@pytest.mark.parametrize("options", PLACES[:4])
def test_weights_that_the_loop_writes_are_used(options, write):
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for block in model.blocks:
                weight = block.up.weight
                if write == "fill":
                    weight[0].fill_(0.5)
                elif write == "copy":
                    weight.copy_(weight * 0.5)
                elif write == "data":
                    weight.data = weight.data * 0.5
                else:
                    nn.init.constant_(weight, 0.01)

    plain, model = blocks(), blocks()
    with streaming(model, adamw(model), **options) as (streamed, own):
        for one, optimizer in ((plain, adamw(plain)), (streamed, own)):
            train(one, optimizer, FIRST)
            getattr(optimizer, "drain", lambda: None)()
            change(one)
            train(one, optimizer, SECOND)
        assert evaluated(streamed) == evaluated(plain)
        assert_same_weights(streamed, plain)


def test_a_streamed_model_is_saved_by_transformers(tmp_path):
    plain, model = llama(), llama()
    with streaming(model, adamw(model)) as (streamed, own):
        train(streamed, own, FIRST)
        streamed.save_pretrained(tmp_path)
    train(plain, adamw(plain), FIRST)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), plain)


def test_a_copy_of_a_closed_model_trains():
    """After `close()` nothing is left of the streaming: not in the model, not in a copy of it."""
    plain, _, expected = unbroken(qwen3)
    model = qwen3()
    kind, names = type(model), [set(vars(m)) for m in model.modules()]
    with streaming(model, adamw(model)) as (streamed, own):
        assert streamed is model
        CLIPPED(streamed, own, FIRST)
        saved = copy.deepcopy(own.state_dict())
    assert type(model) is kind
    assert [set(vars(m)) for m in model.modules()] == names
    for one in (copy.deepcopy(model), model):
        optimizer = adamw(one)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert CLIPPED(one, optimizer, SECOND) == expected
        assert_same_weights(one, plain)


@pytest.mark.parametrize("options", PLACES[:3])
def test_a_closed_model_is_streamed_again(options):
    plain, _, expected = unbroken(blocks)
    model = blocks()
    with streaming(model, adamw(model)) as (streamed, own):
        CLIPPED(streamed, own, FIRST)
        saved = copy.deepcopy(own.state_dict())
    with streaming(model, adamw(model), **options) as (streamed, own):
        own.load_state_dict(saved)
        assert CLIPPED(streamed, own, SECOND) == expected
        assert_same_weights(streamed, plain)


def test_closing_twice_and_unused():
    model = qwen3()
    start = weights(model)
    with streaming(model, adamw(model)) as (_, own):
        own.close()
    assert_same_weights(model, start)
    assert len(set(train(model, adamw(model), FIRST))) == 5
