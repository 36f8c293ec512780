"""Frozen parts, parameters without gradients, adapters and dropout: bit for bit as in plain PyTorch."""

from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import (
    CLIPS,
    adamw,
    assert_same_weights,
    compare,
    in_pieces,
    loop,
    own_clip,
    recomputed,
    streaming,
    two_forwards,
)
from stream_models import MODELS, VOCABULARY, adapted, adapters_of, blocks, cross_entropy, data, layers_of, llama, qwen3
from torch import Tensor, nn

from t1lib.errors import T1Error
from t1lib.plan.cost import Choice

pytestmark = pytest.mark.usefixtures("one_thread")

FROZEN = {
    "embedding": lambda name: "embed" in name,
    "head": lambda name: "head" in name,
    "lower layers": lambda name: "embed" in name or ".0." in name or ".1." in name,
    "upper layers": lambda name: ".2." in name or ".3." in name,
    "norms inside layers": lambda name: "norm" in name and "layers" in name + "layers" * ("blocks" in name),
    "all of a layer but its norms": lambda name: any(f".{i}." in name for i in range(4)) and "norm" not in name,
    "a norm of one layer": lambda name: ".1." in name and "norm" in name,
    "all but the layers": lambda name: not any(f".{i}." in name for i in range(4)),
    "all but the head": lambda name: "head" not in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "blocks"])
def test_frozen_parts(kind, frozen):
    def build() -> nn.Module:
        model = MODELS[kind]()
        for name, param in model.named_parameters():
            param.requires_grad_(not FROZEN[frozen](name))
        return model

    compare(build, adamw, loop(clip=own_clip if frozen != "all but the head" else None))


def test_a_tied_embedding_that_is_frozen():
    def build() -> nn.Module:
        model = qwen3()
        model.get_input_embeddings().weight.requires_grad_(False)
        return model

    compare(build)


class Partly(nn.Module):
    """A layer with a parameter that its output does not depend on."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8) if unused else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.used(hidden).tanh()


class Stack(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.ModuleList(Partly(unused) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.body:
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden), labels)


def stack(unused: bool) -> nn.Module:
    torch.manual_seed(6)
    return Stack(unused)


def streamed_stack(optimizer: Any, each: Any = None, unused: bool = True) -> None:
    each = each or loop(loss=lambda model, batch: model(**batch))
    plain, model = stack(unused), stack(unused)
    expected = each(plain, optimizer(plain))
    with streaming(model, optimizer(model), layers=model.body) as (streamed, own):
        assert each(streamed, own) == expected
        assert_same_weights(streamed, plain)


def test_parameters_without_a_gradient_do_not_decay():
    streamed_stack(partial(adamw, weight_decay=0.5))


def test_what_the_optimizer_leaves_out_stays():
    def without_layer(model: nn.Module) -> torch.optim.Optimizer:
        left = {"body.1.used.weight", "head.bias"}
        params = [p for name, p in model.named_parameters() if name not in left and "unused" not in name]
        return torch.optim.AdamW(params, lr=0.01)

    streamed_stack(without_layer)


def changed(model: nn.Module, optimizer: Any, *, one_away: bool) -> list[float]:
    """A loop that scales gradients in place, replaces one, and takes away those of a layer, or only one of them."""
    losses = []
    for batch in data(5):
        value = model(**batch)
        value.backward()
        for layer in model.body:
            layer.used.weight.grad.mul_(0.5)
        model.body[0].used.bias.grad = torch.ones(8)
        model.body[2].used.bias.grad += 1
        for param in model.body[1].parameters():
            if not one_away or param is model.body[1].used.bias:
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def test_a_gradient_that_the_loop_changes():
    """The update takes what the loop left in `grad`."""
    streamed_stack(adamw, partial(changed, one_away=False), unused=False)


def test_a_gradient_that_the_loop_takes_away():
    """Without the others of its layer: that may be refused, but its parameter is not updated in silence."""
    try:
        streamed_stack(adamw, partial(changed, one_away=True), unused=False)
    except T1Error as error:
        assert "grad" in str(error)


@pytest.mark.parametrize("dropout, clip", [(0.0, None), (0.05, "optimizer"), (0.5, "torch")])
def test_adapters(dropout, clip):
    """Dropout draws the same numbers again when a layer is recomputed."""
    reference = lambda model: recomputed(adapters_of(model))  # noqa: E731
    compare(partial(adapted, dropout=dropout), adamw, loop(clip=CLIPS[clip]), reference)


def test_adapters_of_padded_micro_batches():
    reference = lambda model: in_pieces(adapters_of(model), 2)  # noqa: E731
    compare(adapted, adamw, loop(batches=data(padded=True)), reference, micro_batch=2)


def test_float32_adapters_of_a_bfloat16_base():
    compare(partial(adapted, torch.bfloat16, base=llama))


@pytest.mark.parametrize("kind", ["blocks", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"choice": Choice(keep=2)}, {"choice": Choice(inputs="host")}], ids=str)
def test_dropout(kind, options):
    """In the layers, and in the attention of a model of transformers."""
    build = partial(blocks, dropout=0.3) if kind == "blocks" else partial(qwen3, attention_dropout=0.3)
    compare(build, adamw, loop(loss=two_forwards), lambda model: recomputed(layers_of(model)), **options)


def test_dropout_in_micro_batches():
    compare(partial(blocks, dropout=0.3), reference=lambda model: in_pieces(layers_of(model), 3), micro_batch=3)
