"""A streamed model under any loop computes what plain PyTorch does: bit for bit, in float32 on a CPU."""

from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import case, compare, pieces, streaming
from stream_loops import adamw, evaluated, grouped, loop, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, SHAPE, VOCABULARY, blocks, cross_entropy, data, gemma3, llama, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, GraniteConfig

from t1lib.plan.cost import Choice

FOUR, PADDED = data(4), data(padded=True)
RATES = partial(LambdaLR, lr_lambda=lambda step: 0.7**step)


def shapes() -> list[dict[str, Tensor]]:
    sizes = [(4, 7), (1, 7), (4, 2), (2, 5), (1, 2), (4, 7)]
    cut = zip(data(6), sizes, strict=True)
    return [{key: value[:rows, :length] for key, value in batch.items()} for batch, (rows, length) in cut]


def made(config: Any) -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).train()


GRANITE = partial(made, GraniteConfig(**SHAPE, logits_scaling=0.5))


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


def generated(model: nn.Module) -> float:
    """The tokens, as one number."""
    prompt = data(1)[0]["input_ids"][:2, :3]
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return float((out * torch.arange(1, 1 + out.numel()).view_as(out)).sum())


def inferred(model: nn.Module, *_: Any) -> Tensor:
    with torch.inference_mode():
        return model_loss(model, data(1)[0])


def clip_between_writes(kept: list[tuple[Tensor, Tensor]], model: nn.Module, optimizer: Any) -> None:
    """Gradients that somebody keeps stay what they were, and clipping sees what is done to them."""
    assert all(torch.equal(grad, then) for grad, then in kept)
    grads = [param.grad for param in model.parameters()]
    own_clip(model, optimizer)
    for grad in grads:
        grad.mul_(3.0)
    own_clip(model, optimizer)
    kept += [(grad, grad.clone()) for grad in grads]


def change_gradients(model: nn.Module, optimizer: Any) -> Tensor:
    """They are changed, set, and taken away: of one parameter, and of a layer."""
    for layer in model.blocks[2:]:
        layer.up.weight.grad.mul_(0.5)
    model.blocks[0].up.bias.grad = torch.ones(64)
    model.blocks[2].up.bias.grad = None
    model.blocks[1].zero_grad()
    return own_clip(model, optimizer)


HOST, ON_DEVICE = Choice(outer="host"), Choice(grads="device")
CASES: dict[str, dict[str, Any]] = {
    **{kind: case(build) for kind, build in MODELS.items()},
    "groups under a schedule, clipped by PyTorch": case(llama, grouped, schedule=RATES, clip=torch_clip),
    "a schedule that changes betas, too": case(qwen3, schedule=partial(OneCycleLR, max_lr=0.02, total_steps=11)),
    "maximize": case(qwen3, partial(adamw, lr=1e-3, maximize=True)),
    "nesterov": case(qwen3, partial(sgd, nesterov=True)),
    "dampening": case(qwen3, partial(sgd, dampening=0.3)),
    "no momentum": case(qwen3, partial(sgd, momentum=0.0)),
    "micro-batches of padded rows": case(gemma3, batches=PADDED, **pieces(2)),
    "one micro-batch": case(blocks, **pieces(9)),
    "batches of other shapes": case(gemma3, batches=shapes()),
    "a loss of hidden states": case(qwen3, loss=hidden_loss, clip=own_clip),
    "a loss of logits and embeddings": case(qwen3, loss=logits_loss, clip=own_clip),
    "two forwards": case(qwen3, loss=two_forwards, clip=own_clip),
    # the first forward's output layer reads its weight when layers of the second have run their backward
    "two forwards, all on the host": case(qwen3, loss=two_forwards, choice=Choice(outer="host", inputs="host")),
    "evaluation without dropout": case(partial(blocks, dropout=0.2), sgd, after=evaluated, clip=own_clip),
    "evaluation while gradients wait on the device": case(qwen3, clip=inferred, choice=ON_DEVICE),
    "generation": case(qwen3, batches=FOUR, after=generated),
    "generation, kept": case(qwen3, batches=FOUR, after=generated, choice=Choice(resident=1, keep=4)),
    "inference mode": case(llama, after=lambda model: inferred(model).item()),
    "gradients that somebody keeps": case(qwen3, sgd, clip=partial(clip_between_writes, [])),
    "gradients changed before clipping": case(blocks, clip=change_gradients),
    "gradients from before": case(begun, batches=FOUR),
    "gradients from before, on the device": case(begun, batches=FOUR, choice=Choice(resident=2)),
    "moved to where it is": case(qwen3, after=lambda m: float(m.to("cpu").float().train().training)),
    "matrices before the layers": case(projected, batches=FOUR, choice=HOST),
    "matrices before the layers, accumulated": case(projected, sgd, batches=FOUR, accumulate=2, choice=HOST),
    "matrices before the layers, at once": case(projected, batches=FOUR, choice=HOST, update_in_backward=True),
    # which `make_trainer` refuses; here the loss is the model's own
    "a model that scales its logits, with a budget": case(GRANITE, gpu_memory="1GiB"),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_plain_pytorch(name):
    compare(**CASES[name])


def test_a_schedule_made_before_streaming():
    """The groups are the same objects."""

    def with_schedule(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        rates.append(LambdaLR(optimizer, lambda step: 0.5**step))
        return optimizer

    rates: list[LambdaLR] = []
    compare(qwen3, with_schedule, loop(after=lambda model: rates[-1].step() or 0.0))


def test_what_comes_before_the_first_step():
    """Generation in a model that trains with micro-batches, which are set aside for it; a forward in inference mode."""
    plain, model = qwen3(), qwen3()
    with streaming(model, micro_batch=1) as (streamed, _):
        assert generated(streamed) == generated(plain)
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
