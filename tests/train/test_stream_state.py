"""A streamed model's weights, gradients and state are complete whenever they are looked at."""

import copy
import gc
import io
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import assert_same_state, assert_same_weights, six_steps, streaming, weights
from stream_loops import adamw, grouped, loop, own_clip, sgd, train
from stream_models import blocks, data, llama, qwen3
from torch import nn

from t1lib.plan.cost import Choice
from t1lib.train import stream

CLIPPED = loop(clip=own_clip)
PLACES = [
    pytest.param({}, id="streamed"),
    pytest.param({"choice": Choice(resident=1, keep=2, host_share=0.5, grads="device")}, id="mixed"),
    pytest.param({"choice": Choice(slots=3, inputs="host", outer="host", host_share=1.0)}, id="host"),
    pytest.param({"choice": Choice(resident=4, outer="host"), "overlap": False}, id="resident"),
]
AT_ONCE = pytest.param({"update_in_backward": True}, id="at once")
FIRST, SECOND = data(6)[:3], data(6)[3:]


def placed(place: dict[str, Any] | None, model: nn.Module, optimizer: Any) -> Any:
    """The model and its optimizer, streamed or, for None, as they are."""
    return nullcontext((model, optimizer)) if place is None else streaming(model, optimizer, **place)


def saved_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Through a file, so that nothing is shared with what runs on."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


KINDS = {"plain": None, **{place.id: place.values[0] for place in PLACES}}
WAYS = ["plain mixed", "mixed plain", "plain host", "host plain", "streamed mixed", "plain resident", "host streamed"]


@pytest.mark.parametrize("optimizer", [sgd, grouped], ids=["sgd", "adamw"])
@pytest.mark.parametrize("source, target", [way.split() for way in WAYS])
def test_a_run_goes_on_elsewhere(source, target, optimizer):
    """From files in a fresh model or (AdamW) in one that was trained on something else; or with its own optimizer."""
    plain, usual, expected = six_steps(llama, optimizer)
    first, second = llama(), llama()
    used, other = optimizer(first), optimizer(second)
    with placed(KINDS[source], first, used) as (model, own):
        CLIPPED(model, own, FIRST)
        saved = saved_of(model, own)
    for each, begun in [(second, other), (first, used)][: 2 if source == "plain" else 1]:
        with placed(KINDS[target], each, begun) as (model, own):
            if each is second:
                train(model, own, SECOND[:2] if optimizer is grouped else [])
                load(model, own, saved)
            assert CLIPPED(model, own, SECOND) == expected[6:]
            assert_same_weights(model, plain)
            assert_same_state(own, usual)


@pytest.mark.parametrize("layout", [{}, {"master_weights": "split"}, {"master_weights": None}], ids=str)
def test_a_run_in_bfloat16_goes_on(layout):
    build = partial(qwen3, torch.bfloat16)
    first, second, last = build(), build(), build()
    with streaming(first, grouped(first), **layout) as (streamed, own):
        train(streamed, own, FIRST)
        saved = saved_of(streamed, own)
        expected = train(streamed, own, SECOND)
    with streaming(second, grouped(second), choice=Choice(host_share=0.0), **layout) as (streamed, own):
        train(streamed, own, SECOND[:2])
        load(streamed, own, saved)
        assert train(streamed, own, SECOND) == expected
        assert_same_weights(streamed, first)
    widened = grouped(last)
    widened.load_state_dict(saved["optimizer"])  # which casts to the parameters' dtype, as PyTorch does
    assert widened.state[last.model.norm.weight]["exp_avg"].dtype == torch.bfloat16


def test_a_closed_model_its_copy_and_the_model_streamed_again_train_on():
    """After `close()` nothing is left of the streaming: not in the model, not in a copy of it, not on the device."""
    plain, _, expected = six_steps(qwen3)
    model = qwen3()
    embedding = model.model.embed_tokens
    embedding.forward = own_forward = embedding.forward  # in the module's own dictionary
    kind, names, start = type(model), [set(vars(m)) for m in model.modules()], weights(model)
    with streaming(model) as (_, own):
        own.close()  # unused; and again at the end
    assert_same_weights(model, start)
    with streaming(model, choice=Choice(resident=1, outer="host")) as (streamed, own):
        assert streamed is model
        CLIPPED(streamed, own, FIRST)
        saved = copy.deepcopy(own.state_dict())
        buffers = [weakref.ref(tensor) for tensor in own._engine.schedule.device_tensors()]
    gc.collect()
    assert buffers and not any(buffer() is not None for buffer in buffers)
    assert type(model) is kind and embedding.forward is own_forward
    assert [set(vars(m)) for m in model.modules()] == names
    for one, place in ((copy.deepcopy(model), None), (copy.deepcopy(model), KINDS["mixed"]), (model, None)):
        with placed(place, one, adamw(one)) as (found, optimizer):
            optimizer.load_state_dict(copy.deepcopy(saved))
            assert CLIPPED(found, optimizer, SECOND) == expected[6:]
            assert_same_weights(found, plain)


def test_gradients_that_an_update_still_reads_are_not_taken_for_somebodys():
    """`zero_grad` right after `step` waits for no update, and makes no new buffer."""
    with streaming(blocks(), choice=Choice(host_share=1.0)) as (streamed, own):
        train(streamed, own, FIRST[:2])
        layer = own._engine.host[0]
        buffer, read = layer.grads, layer.grads[:4]
        own.zero_grad()
        assert layer.grads is buffer and read.data_ptr() == buffer.data_ptr()


def test_accelerate_saves_all_weights(tmp_path):
    """It takes tensors of one storage for tied ones."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(*stream(model, adamw(model)))
    train(model, optimizer, data(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path)
    train(model, optimizer, data(2))
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0.0, atol=0.0)
