"""Training loops that set, drop or keep gradients and methods themselves, and models that are no usual decoders."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_cases import adamw, compare, loop, own_clip, refused, sgd, streaming, train
from stream_models import VOCABULARY, Blocks, blocks, cross_entropy, data, layers_of, qwen3
from torch import Tensor, nn

from t1lib.plan.cost import Choice
from t1lib.train import stream

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = data(4)
OUTSIDE = Choice(outer="host")


def meddling(change):
    """A loop that clips, in which `change` gets the parameters of the second layer after each backward."""

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        events = []
        for batch in FEW:
            loss = model(**batch).loss
            loss.backward()
            change(list(layers_of(model)[1].parameters()))
            events += [loss.item(), own_clip(model, optimizer).item()]
            optimizer.step()
            optimizer.zero_grad()
        return events

    return run


def drop_one(params: list[nn.Parameter]) -> None:
    params[0].grad = None


def keep_one(params: list[nn.Parameter]) -> None:
    for param in params[1:]:
        param.grad = None
    params[0].grad = torch.ones_like(params[0])


@pytest.mark.parametrize("change", [drop_one, keep_one])
def test_a_dropped_gradient_counts_in_no_norm(change):
    compare(qwen3, loop=meddling(change))


class Projected(Blocks):
    """A narrow embedding, whose gradient is made of the projections' weights, after the backward of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.inner(self.embed(input_ids))
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(loss=cross_entropy(self.head(self.norm(hidden)), labels))


def projected() -> nn.Module:
    torch.manual_seed(5)
    return Projected()


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}], ids=["", "at once"])
def test_matrices_before_the_layers_are_there_for_their_backward(options):
    compare(projected, loop=loop(batches=FEW), choice=OUTSIDE, **options)
    compare(projected, sgd, loop(batches=FEW, accumulate=1 if options else 2), choice=OUTSIDE, **options)


def test_gradients_from_before_are_added_to():
    def begun() -> nn.Module:
        model = qwen3()
        model(**FEW[0]).loss.backward()
        return model

    compare(begun, loop=loop(batches=FEW))
    compare(begun, loop=loop(batches=FEW), choice=Choice(resident=2))


def test_a_layer_is_not_unfrozen_while_it_streams():
    model = qwen3()
    layers_of(model)[0].requires_grad_(False)
    with streaming(model, torch.optim.AdamW(model.parameters())) as (streamed, own):
        train(streamed, own, FEW[:1])
        layers_of(model)[0].requires_grad_(True)
        refused(lambda: train(streamed, own, FEW[1:]), "layer 0", "unfrozen")


def test_no_gradient_is_set_if_none_are_kept():
    model = qwen3()
    with streaming(model, sgd(model), update_in_backward=True) as (streamed, own):
        train(streamed, own, FEW[:1])
        param = next(layers_of(model)[0].parameters())
        refused(lambda: setattr(param, "grad", torch.zeros_like(param)), "update_in_backward")
        param.grad = None


def test_a_state_that_does_not_fit_is_refused_before_the_first_batch():
    usual, model = blocks(), blocks()
    other = sgd(usual)
    train(usual, other, FEW[:1])
    with streaming(model, adamw(model), gpu_memory="1GiB") as (_, own):
        refused(lambda: own.load_state_dict(other.state_dict()), "momentum_buffer")


def test_close_gives_back_replaced_methods():
    model = qwen3()
    modules = [*layers_of(model), model.model.embed_tokens]
    for module in modules:
        module.forward = module.forward  # in the module's own dictionary
    before = [vars(module)["forward"] for module in modules]
    with streaming(model, adamw(model), choice=OUTSIDE) as (streamed, own):
        train(streamed, own, FEW[:1])
    assert [vars(module)["forward"] for module in modules] == before


def test_a_closed_optimizer_holds_no_buffers():
    model = blocks()
    streamed, own = stream(model, adamw(model), layers=model.blocks, choice=Choice(resident=1, outer="host"))
    train(streamed, own, FEW[:2])
    buffers = [weakref.ref(tensor) for tensor in own._engine.schedule.device_tensors()]
    own.close()
    gc.collect()
    assert buffers and not any(buffer() is not None for buffer in buffers)
