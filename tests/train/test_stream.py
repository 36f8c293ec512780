"""A streamed model under any loop computes what plain PyTorch does: bit for bit, in float32 on a CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import compare, in_pieces, streaming
from stream_loops import adamw, evaluated, grouped, loop, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, SHAPE, VOCABULARY, blocks, cross_entropy, data, gemma3, layers_of, llama, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, GraniteConfig

from t1lib.plan.cost import Choice

FOUR, EIGHT, PADDED = data(4), data(8), data(padded=True)
RATES = partial(LambdaLR, lr_lambda=lambda step: 0.7**step)
GROUPED_SGD = partial(grouped, make=torch.optim.SGD)


def pieces(rows: int) -> dict[str, Any]:
    """What the reference does, and the streamed model, to run `rows` rows at a time."""
    return {"reference": lambda model: in_pieces(layers_of(model), rows), "micro_batch": rows}


def shapes() -> list[dict[str, Tensor]]:
    sizes = [(4, 7), (1, 7), (4, 2), (2, 5), (1, 2), (4, 7)]
    cut = zip(data(6), sizes, strict=True)
    return [{key: value[:rows, :length] for key, value in batch.items()} for batch, (rows, length) in cut]


def made(config: Any) -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).train()


def projected() -> nn.Module:
    """The gradient of a narrow embedding is made of the projections' weights, after the backward of all layers."""
    model = blocks()
    model.embed = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
    return model


def begun() -> nn.Module:
    """Gradients from before are added to."""
    model = qwen3()
    model_loss(model, FOUR[0]).backward()
    return model


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


def inferred(model: nn.Module, *_: Any) -> Tensor:
    with torch.inference_mode():
        return model_loss(model, data(1)[0])


def thrown_away(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> None:
    model_loss(model, batch).backward()
    optimizer.zero_grad()


def halve_weights(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def scale_gradients(factor: float, model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.mul_(factor)


def drop_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def clip_between_writes(kept: list[tuple[Tensor, Tensor]], model: nn.Module, optimizer: Any) -> None:
    """Gradients that somebody keeps stay what they were, and clipping sees what is done to them."""
    assert all(torch.equal(grad, then) for grad, then in kept)
    grads = [param.grad for param in model.parameters()]
    own_clip(model, optimizer)
    for grad in grads:
        grad.mul_(3.0)
    own_clip(model, optimizer)
    kept += [(grad, grad.clone()) for grad in grads]


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
    "accumulated": (qwen3, sgd, loop(batches=EIGHT, accumulate=2), {}),
    "accumulated, clipped": (blocks, sgd, loop(batches=EIGHT, accumulate=2, clip=own_clip), {}),
    "accumulated, clipped by PyTorch": (qwen3, sgd, loop(batches=EIGHT, accumulate=2, clip=torch_clip), {}),
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
    # the first forward's output layer reads its weight when layers of the second have run their backward
    "two forwards, all on the host": (
        qwen3, adamw, loop(loss=two_forwards), {"choice": Choice(outer="host", inputs="host")},
    ),
    "a forward without gradients before": (llama, adamw, loop(loss=twice_weighted, clip=own_clip), {}),
    "evaluation in between": (qwen3, adamw, loop(after=evaluated), {}),
    "evaluation without dropout": (partial(blocks, dropout=0.2), sgd, loop(after=evaluated, clip=own_clip), {}),
    # though this model fills a cache of keys and values by default, piece by piece
    "evaluation in micro-batches": (gemma3, adamw, loop(batches=FOUR, after=evaluated), pieces(1)),
    "evaluation while gradients wait on the device": (
        qwen3, adamw, loop(clip=inferred), {"choice": Choice(grads="device")},
    ),
    "generation": (qwen3, adamw, loop(batches=FOUR, after=generated), {}),
    "generation, kept": (qwen3, adamw, loop(batches=FOUR, after=generated), {"choice": Choice(resident=1, keep=4)}),
    "inference mode": (llama, adamw, loop(after=lambda model: inferred(model).item()), {}),
    # then what has no gradient has one of zeros, and still decays
    "gradients set to zero": (qwen3, adamw, loop(zero=False), {}),
    "gradients set to zero, accumulated": (
        qwen3, sgd, loop(zero=False, clip=torch_clip, batches=EIGHT, accumulate=2), {},
    ),
    "gradients set to None by the model": (qwen3, adamw, loop(zero=nn.Module.zero_grad), {}),
    "gradients set to None by hand": (blocks, adamw, loop(zero=drop_gradients), {}),
    "gradients that somebody keeps": (qwen3, sgd, loop(clip=partial(clip_between_writes, [])), {}),
    "gradients from before": (begun, adamw, loop(batches=FOUR), {}),
    "gradients from before, on the device": (begun, adamw, loop(batches=FOUR), {"choice": Choice(resident=2)}),
    "a backward thrown away": (qwen3, adamw, loop(before=thrown_away), {}),
    "forwards without a backward": (blocks, adamw, loop(before=lambda model, _, batch: model_loss(model, batch)), {}),
    "forwards without a backward, inputs on the host": (
        llama, adamw, loop(before=lambda model, _, batch: model_loss(model, batch)), {"choice": Choice(inputs="host")},
    ),
    **{
        f"{name}, {outer}": (qwen3, adamw, loop(batches=FOUR[:3], **own), {"choice": Choice(outer=outer)})
        for outer in ("device", "host")
        for name, own in {
            "weights written before a step": {"clip": halve_weights},
            "gradients written after it": {"zero": partial(scale_gradients, 0.5)},
            "gradients set to zero after it": {"zero": partial(scale_gradients, 0.0)},
            "evaluated before it": {"clip": inferred},
        }.items()
    },
    "moved to where it is": (qwen3, adamw, loop(after=lambda m: float(m.to("cpu").float().train().training)), {}),
    "matrices before the layers": (projected, adamw, loop(batches=FOUR), {"choice": Choice(outer="host")}),
    "matrices before the layers, accumulated": (
        projected, sgd, loop(batches=FOUR, accumulate=2), {"choice": Choice(outer="host")},
    ),
    "matrices before the layers, updated in the backward": (
        projected, adamw, loop(batches=FOUR), {"choice": Choice(outer="host"), "update_in_backward": True},
    ),
    # which `make_trainer` refuses; here the loss is the model's own
    "a model that scales its logits, with a budget": (
        partial(made, GraniteConfig(**SHAPE, logits_scaling=0.5)), adamw, train, {"gpu_memory": "1GiB"},
    ),
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
        rates.append(LambdaLR(optimizer, lambda step: 0.5**step))
        return optimizer

    rates: list[LambdaLR] = []
    compare(qwen3, with_schedule, loop(after=lambda model: rates[-1].step() or 0.0))


def test_generation_with_micro_batches():
    """In a run that trains with them, they are set aside for it."""
    plain, model = qwen3(), qwen3()
    with streaming(model, micro_batch=1) as (streamed, _):
        assert generated(streamed) == generated(plain)


def test_a_first_forward_in_inference_mode():
    with streaming(llama(), gpu_memory="1GiB") as (streamed, own):
        first = inferred(streamed)
        with torch.no_grad():
            assert model_loss(streamed, data(1)[0]) == first
        train(streamed, own, data(2))


GPT2 = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


@pytest.mark.parametrize("choice", [Choice(), Choice(keep=2)], ids=["recomputed", "kept"])
@pytest.mark.parametrize("config", [GPT2, GPTNeoXConfig(**SHAPE)], ids=["by position", "by another name"])
def test_a_cache_is_left_out_however_it_comes(config, choice):
    """A recomputation would attend to what the forward has left there."""
    compare(partial(made, config), choice=choice)
    plain, model = made(config).eval(), made(config).eval()
    with streaming(model, micro_batch=1) as (streamed, _):
        assert inferred(streamed) == inferred(plain)


def test_a_hook_that_comes_later_sees_what_its_module_computes():
    """Also in the recomputation, which leaves out a layer's last product if nobody looks at it."""
    model, seen = llama(), []
    with streaming(model) as (streamed, own):
        train(streamed, own, data(1))
        layer = layers_of(model)[1]
        layer.mlp.down_proj.register_forward_hook(lambda module, given, out: seen.append(out.detach().clone()))
        train(streamed, own, data(1))
    assert len(seen) == 2 and torch.equal(*seen)
