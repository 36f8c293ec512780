"""A streamed model under any loop computes what plain PyTorch does: bit for bit, in float32 on a CPU."""

from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import (
    CLIPS,
    adamw,
    compare,
    evaluated,
    grouped,
    in_pieces,
    loop,
    model_loss,
    own_clip,
    sgd,
    streaming,
    torch_clip,
    train,
    two_forwards,
)
from stream_models import MODELS, blocks, cross_entropy, data, gemma3, layers_of, llama, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from t1lib.errors import T1Error
from t1lib.plan.cost import Choice

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_any_decoder(kind, optimizer):
    compare(MODELS[kind], OPTIMIZERS[optimizer])


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_under_a_schedule(make, clip):
    """Updates may still be under way when the schedule changes the rate: they take that of their own step."""
    rates = partial(LambdaLR, lr_lambda=lambda step: 0.7**step)
    compare(llama, partial(grouped, make=make), loop(schedule=rates, clip=CLIPS[clip]))


@pytest.mark.parametrize(
    "schedule",
    [partial(CosineAnnealingLR, T_max=4), partial(OneCycleLR, max_lr=0.02, total_steps=11)],
    ids=["cosine", "one that changes betas, too"],
)
def test_schedules(schedule):
    compare(qwen3, adamw, loop(schedule=schedule))


def test_a_schedule_made_before_streaming():
    """The groups are the same objects."""

    def with_schedule(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        optimizer.rates = LambdaLR(optimizer, lambda step: 0.5**step)
        made.append(optimizer.rates)
        return optimizer

    made: list[LambdaLR] = []
    compare(qwen3, with_schedule, loop(between=lambda model: made[-1].step() or 0.0))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", ["maximize", "nesterov", "dampening", "no momentum"])
def test_variants_of_the_optimizers(name):
    own = {"nesterov": {"nesterov": True}, "dampening": {"dampening": 0.3}, "no momentum": {"momentum": 0.0}}
    optimizer = partial(sgd, **own[name]) if name in own else partial(adamw, lr=1e-3, **{name: True})
    compare(qwen3, optimizer)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", ["optimizer", "torch"])
def test_clipping(kind, clip):
    compare(MODELS[kind], adamw, loop(clip=CLIPS[clip]))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", ["qwen3", "blocks"])
def test_accumulation(kind, clip):
    compare(MODELS[kind], sgd, loop(batches=data(20), accumulate=2, clip=CLIPS[clip]))


def test_accumulation_over_many_backwards():
    compare(llama, adamw, loop(batches=data(20), accumulate=5))


@pytest.mark.parametrize("kind, rows", [*((kind, 1) for kind in MODELS), *(("blocks", rows) for rows in (2, 3, 4, 9))])
def test_micro_batches(kind, rows):
    """Their gradients are summed in the order of the rows; the last one may be smaller."""
    compare(MODELS[kind], reference=lambda model: in_pieces(layers_of(model), rows), micro_batch=rows)


@pytest.mark.parametrize("kind", MODELS)
def test_padding(kind):
    compare(MODELS[kind], adamw, loop(batches=data(padded=True), clip=own_clip))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "blocks"])
def test_micro_batches_of_padded_rows(kind):
    """Masks are split along the batch with their rows."""
    cut = lambda model: in_pieces(layers_of(model), 2)  # noqa: E731
    compare(MODELS[kind], adamw, loop(batches=data(padded=True)), cut, micro_batch=2)


def test_batches_of_other_shapes():
    sizes = [(4, 7), (1, 7), (4, 2), (2, 5), (1, 2), (4, 7)]
    cut = zip(data(6), sizes, strict=True)
    batches = [{key: value[:rows, :length] for key, value in batch.items()} for batch, (rows, length) in cut]
    compare(gemma3, adamw, loop(batches=batches))


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


@pytest.mark.parametrize("loss", [hidden_loss, logits_loss, two_forwards, twice_weighted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_loss_of_her_own(kind, loss):
    compare(MODELS[kind], adamw, loop(loss=loss, clip=own_clip))


@pytest.mark.parametrize("kind", ["qwen3", "blocks"])
def test_evaluation_in_between(kind):
    build = partial(blocks, dropout=0.2) if kind == "blocks" else qwen3
    compare(build, adamw, loop(between=evaluated))
    compare(build, sgd, loop(between=evaluated, clip=own_clip))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_evaluation_in_micro_batches(kind):
    """Though these models fill a cache of keys and values by default, piece by piece."""
    cut = lambda model: in_pieces(layers_of(model), 1)  # noqa: E731
    compare(MODELS[kind], adamw, loop(batches=data(4), between=evaluated), cut, micro_batch=1)


def generated(model: nn.Module) -> float:
    """The tokens, as one number."""
    prompt = data(1)[0]["input_ids"][:2, :3]
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return float((out * torch.arange(1, 1 + out.numel()).view_as(out)).sum())


@pytest.mark.parametrize("choice", [Choice(), Choice(resident=1, keep=4)], ids=["streamed", "kept"])
def test_generation_in_between(choice):
    compare(qwen3, adamw, loop(batches=data(4), between=generated), choice=choice)


def test_generation_with_micro_batches():
    """In a run that trains with them; they may be set aside for it, or it is refused, but it is not wrong."""
    plain, model = qwen3(), qwen3()
    with streaming(model, adamw(model), micro_batch=1) as (streamed, _):
        try:
            assert generated(streamed) == generated(plain)
        except T1Error as error:
            assert "micro_batch" in str(error)


def test_inference_mode_in_between():
    def inferred(model: nn.Module) -> float:
        with torch.inference_mode():
            return model_loss(model, data(1)[0]).item()

    compare(llama, adamw, loop(between=inferred))


def test_gradients_that_are_set_to_zero():
    """Then what has no gradient has one of zeros, and still decays."""
    compare(qwen3, adamw, loop(zero=False))
    compare(qwen3, sgd, loop(zero=False, clip=torch_clip, batches=data(20), accumulate=2))


def test_no_gradient_is_dropped_by_zero_grad_of_the_model():
    def each(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for batch in data(6):
            model.zero_grad()
            losses.append(model_loss(model, batch))
            losses[-1].backward()
            optimizer.step()
        return [value.item() for value in losses]

    compare(qwen3, adamw, each)


def test_a_backward_that_is_thrown_away():
    def each(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for number, batch in enumerate(data(8)):
            value = model_loss(model, batch)
            value.backward()
            if number % 3 != 1:
                optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        return found

    compare(qwen3, adamw, each)


def test_forwards_without_a_backward():
    """A loss that is dropped leaves nothing behind."""

    def each(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for batch in data(6):
            found.append(model_loss(model, batch).item())
            found += train(model, optimizer, [batch])
        return found

    compare(blocks, adamw, each)
