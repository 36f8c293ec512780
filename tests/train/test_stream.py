"""A streamed model under any loop computes what plain PyTorch does: bit for bit, in float32 on a CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import compare, in_pieces, streaming
from stream_loops import adamw, evaluated, grouped, loop, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, SHAPE, blocks, cross_entropy, data, gemma3, layers_of, llama, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import GraniteConfig, GraniteForCausalLM

from t1lib.plan.cost import Choice

PADDED = data(padded=True)
RATES = partial(LambdaLR, lr_lambda=lambda step: 0.7**step)
GROUPED_SGD = partial(grouped, make=torch.optim.SGD)


def pieces(rows: int) -> dict[str, Any]:
    """What the reference does, and the streamed model, to run `rows` rows at a time."""
    return {"reference": lambda model: in_pieces(layers_of(model), rows), "micro_batch": rows}


def shapes() -> list[dict[str, Tensor]]:
    sizes = [(4, 7), (1, 7), (4, 2), (2, 5), (1, 2), (4, 7)]
    cut = zip(data(6), sizes, strict=True)
    return [{key: value[:rows, :length] for key, value in batch.items()} for batch, (rows, length) in cut]


def hidden_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model.model(batch["input_ids"], output_hidden_states=False).last_hidden_state
    return (out.float() ** 2).mean() + out[:, -1].abs().sum()


def logits_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy with a penalty, from embeddings of her own."""
    embedded = model.get_input_embeddings()(batch["input_ids"]) * 1.1
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    return cross_entropy(logits, batch["labels"]) + 1e-3 * logits.logsumexp(-1).square().mean()


def twice_weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A forward without gradients, a reference of the loss, before the one with them."""
    with torch.no_grad():
        weight = model_loss(model, batch)
    return model_loss(model, batch) * weight


def generated(model: nn.Module) -> float:
    """The tokens, as one number."""
    prompt = data(1)[0]["input_ids"][:2, :3]
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return float((out * torch.arange(1, 1 + out.numel()).view_as(out)).sum())


def inferred(model: nn.Module) -> float:
    with torch.inference_mode():
        return model_loss(model, data(1)[0]).item()


def zeroed_by_the_model(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for batch in data(6):
        model.zero_grad()
        losses.append(model_loss(model, batch))
        losses[-1].backward()
        optimizer.step()
    return [value.item() for value in losses]


def set_to_none(model: nn.Module, optimizer: Any) -> list[float]:
    """By hand, when the next forward has run."""
    batches = data(6)
    losses = [model_loss(model, batches[0])]
    for batch in batches[1:]:
        losses[-1].backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        losses.append(model_loss(model, batch))
    return [loss.item() for loss in losses]


def thrown_away(model: nn.Module, optimizer: Any) -> list[float]:
    """The gradients of some backwards."""
    found = []
    for number, batch in enumerate(data(8)):
        value = model_loss(model, batch)
        value.backward()
        if number % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


def without_backward(model: nn.Module, optimizer: Any) -> list[float]:
    """Forwards whose loss is dropped; they leave nothing behind."""
    found = []
    for batch in data(6):
        found.append(model_loss(model, batch).item())
        found += train(model, optimizer, [batch])
    return found


LOOPS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Any], Callable[..., list[float]], dict[str, Any]]] = {
    **{kind: (build, adamw, train, {}) for kind, build in MODELS.items()},
    **{f"{k}, padded, clipped": (build, sgd, loop(batches=PADDED, clip=own_clip), {}) for k, build in MODELS.items()},
    "clipped by PyTorch": (llama, adamw, loop(clip=torch_clip), {}),
    "groups under a schedule": (llama, grouped, loop(schedule=RATES), {}),
    "groups under a schedule, clipped": (llama, GROUPED_SGD, loop(schedule=RATES, clip=own_clip), {}),
    "groups under a schedule, clipped by PyTorch": (llama, grouped, loop(schedule=RATES, clip=torch_clip), {}),
    "a schedule that changes betas, too": (
        qwen3, adamw, loop(schedule=partial(OneCycleLR, max_lr=0.02, total_steps=11)), {},
    ),
    "maximize": (qwen3, partial(adamw, lr=1e-3, maximize=True), train, {}),
    "nesterov": (qwen3, partial(sgd, nesterov=True), train, {}),
    "dampening": (qwen3, partial(sgd, dampening=0.3), train, {}),
    "no momentum": (qwen3, partial(sgd, momentum=0.0), train, {}),
    "accumulated": (qwen3, sgd, loop(batches=data(8), accumulate=2), {}),
    "accumulated, clipped": (blocks, sgd, loop(batches=data(8), accumulate=2, clip=own_clip), {}),
    "accumulated, clipped by PyTorch": (qwen3, sgd, loop(batches=data(8), accumulate=2, clip=torch_clip), {}),
    "many accumulated": (llama, adamw, loop(batches=data(15), accumulate=5), {}),
    "row by row": (gemma3, adamw, train, pieces(1)),
    "micro-batches of padded rows": (qwen3, adamw, loop(batches=PADDED), pieces(2)),
    "micro-batches of padded rows, other masks": (gemma3, adamw, loop(batches=PADDED), pieces(2)),
    "a smaller last micro-batch": (blocks, adamw, train, pieces(3)),
    "one micro-batch": (blocks, adamw, train, pieces(9)),
    "batches of other shapes": (gemma3, adamw, loop(batches=shapes()), {}),
    "a loss of hidden states": (qwen3, adamw, loop(loss=hidden_loss, clip=own_clip), {}),
    "a loss of logits and embeddings": (qwen3, adamw, loop(loss=logits_loss, clip=own_clip), {}),
    "two forwards": (qwen3, adamw, loop(loss=two_forwards, clip=own_clip), {}),
    "a forward without gradients before": (llama, adamw, loop(loss=twice_weighted, clip=own_clip), {}),
    "evaluation in between": (qwen3, adamw, loop(between=evaluated), {}),
    "evaluation without dropout": (partial(blocks, dropout=0.2), sgd, loop(between=evaluated, clip=own_clip), {}),
    # though this model fills a cache of keys and values by default, piece by piece
    "evaluation in micro-batches": (gemma3, adamw, loop(batches=data(4), between=evaluated), pieces(1)),
    "generation": (qwen3, adamw, loop(batches=data(4), between=generated), {}),
    "generation, kept": (
        qwen3, adamw, loop(batches=data(4), between=generated), {"choice": Choice(resident=1, keep=4)},
    ),
    "inference mode": (llama, adamw, loop(between=inferred), {}),
    # then what has no gradient has one of zeros, and still decays
    "gradients set to zero": (qwen3, adamw, loop(zero=False), {}),
    "gradients set to zero, accumulated": (
        qwen3, sgd, loop(zero=False, clip=torch_clip, batches=data(8), accumulate=2), {},
    ),
    "gradients set to zero by the model": (qwen3, adamw, zeroed_by_the_model, {}),
    "gradients set to None by hand": (blocks, adamw, set_to_none, {}),
    "a backward thrown away": (qwen3, adamw, thrown_away, {}),
    "forwards without a backward": (blocks, adamw, without_backward, {}),
    "forwards without a backward, inputs on the host": (
        llama, adamw, without_backward, {"choice": Choice(inputs="host")},
    ),
    "moved to where it is": (qwen3, adamw, loop(between=lambda m: float(m.to("cpu").float().train().training)), {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", LOOPS)
def test_same_bits_as_plain_pytorch(name):
    build, optimizer, each, options = LOOPS[name]
    compare(build, optimizer, each, **options)


def test_a_schedule_made_before_streaming():
    """The groups are the same objects."""

    def with_schedule(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        made.append(LambdaLR(optimizer, lambda step: 0.5**step))
        return optimizer

    made: list[LambdaLR] = []
    compare(qwen3, with_schedule, loop(between=lambda model: made[-1].step() or 0.0))


def test_generation_with_micro_batches():
    """In a run that trains with them, they are set aside for it."""
    plain, model = qwen3(), qwen3()
    with streaming(model, micro_batch=1) as (streamed, _):
        assert generated(streamed) == generated(plain)


def test_a_budget_for_a_model_that_scales_its_logits():
    """Which `make_trainer` refuses; here the loss is the model's own."""

    def granite() -> nn.Module:
        torch.manual_seed(3)
        return GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.5)).train()

    compare(granite, gpu_memory="1GiB")


def test_a_first_forward_in_inference_mode():
    with streaming(llama(), gpu_memory="1GiB") as (streamed, own):
        batch = data(1)[0]
        with torch.inference_mode():
            first = streamed(**batch).loss.item()
        with torch.no_grad():
            assert streamed(**batch).loss.item() == first
        train(streamed, own, data(2))
