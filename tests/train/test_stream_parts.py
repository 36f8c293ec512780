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
from stream_models import MODELS, VOCABULARY, blocks, cross_entropy, data, layers_of, llama, qwen3
from torch import Tensor, nn

from t1lib.plan.cost import Choice

pytestmark = pytest.mark.usefixtures("one_thread")

FROZEN = {
    "embedding": lambda name: "embed" in name,
    "head": lambda name: "head" in name,
    "lower layers": lambda name: "embed" in name or ".0." in name or ".1." in name,
    "upper layers": lambda name: ".2." in name or ".3." in name,
    "norms inside layers": lambda name: "norm" in name and "layers" in name + "layers" * ("blocks" in name),
    "most of each layer": lambda name: any(str(i) in name for i in range(4)) and "up" not in name,
    "all but the layers": lambda name: not any(f".{i}." in name for i in range(4)),
    "all but the head": lambda name: "head" not in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", ["llama", "blocks"])
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

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.used(hidden).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.ModuleList(Partly() for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.body:
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden), labels)


def plain_stack() -> nn.Module:
    torch.manual_seed(6)
    return Stack()


def streamed_stack(optimizer, each=None) -> None:
    each = each or loop(loss=lambda model, batch: model(**batch))
    plain, model = plain_stack(), plain_stack()
    expected = each(plain, optimizer(plain))
    with streaming(model, optimizer(model), layers=model.body) as (streamed, own):
        assert each(streamed, own) == expected
        assert_same_weights(streamed, plain)


def test_parameters_without_a_gradient_do_not_decay():
    streamed_stack(partial(adamw, weight_decay=0.5))


def test_what_the_optimizer_leaves_out_stays():
    def without_layer(model: nn.Module) -> torch.optim.Optimizer:
        left = {"body.1.used.weight", "head.bias"}
        return torch.optim.AdamW([p for name, p in model.named_parameters() if name not in left], lr=0.01)

    streamed_stack(without_layer)


def test_a_gradient_that_the_loop_changes():
    """Scaled in place, replaced, taken away: the update takes what the loop left in `grad`."""

    def each(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for batch in data(5):
            value = model(**batch)
            value.backward()
            for layer in model.body:
                layer.used.weight.grad.mul_(0.5)
            model.body[0].used.bias.grad = torch.ones(8)
            model.body[1].used.bias.grad = None
            model.body[2].used.bias.grad += 1
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        return losses

    streamed_stack(partial(adamw, weight_decay=0.5), each)


def adapted(dtype: torch.dtype = torch.float32, dropout: float = 0.05, base=qwen3) -> nn.Module:
    """A model with adapters that are not zero, as after some training."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    torch.manual_seed(8)
    config = peft.LoraConfig(r=2, lora_alpha=8, lora_dropout=dropout, target_modules=targets)
    model = peft.get_peft_model(base(dtype), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)
    return model.train()


def adapters_of(model: nn.Module) -> nn.ModuleList:
    return layers_of(model.get_base_model())


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dropout", [0.0, 0.05, 0.5])
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
