"""A streamed model under any loop, whatever of it is frozen, left out, dropped out or kept in 16 bits, has the bits of
a plain PyTorch model, in float32 on a CPU."""

import math
from functools import partial
from typing import Any

import pytest
import stream_models
import torch
from stream_cases import Masters, case, compare, masters, pieces, streaming
from stream_loops import adamw, evaluated, grouped, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, SHAPE, adapted, blocks, changed, data, frozen, gemma3, llama, made, partly_used, qwen3
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import GPT2Config, GPTNeoXConfig, GraniteConfig

from t1lib.plan.cost import Choice

ON_HOST, OUTER = Choice(outer="host", inputs="host"), Choice(outer="host")
RATES = partial(LambdaLR, lr_lambda=lambda step: 0.7**step)


def shapes() -> list[dict[str, Tensor]]:
    sizes = [(4, 7), (1, 7), (4, 2), (2, 5), (1, 2), (4, 7)]
    cut = zip(data(6), sizes, strict=True)
    return [{key: value[:rows, :length] for key, value in batch.items()} for batch, (rows, length) in cut]


GRANITE = partial(made, GraniteConfig(**SHAPE, logits_scaling=0.5))
NEOX = partial(made, GPTNeoXConfig(**SHAPE))
GPT2 = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


class Placed(nn.Embedding):
    """Embeds tokens at their positions: looks up others than it is given."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__(7, tokens.embedding_dim)
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1])) + self.tokens(input=ids)


class FlatMask(stream_models.Block):
    """Its mask is (rows · heads, tokens, tokens)."""

    def forward(self, hidden: Tensor, mask: Tensor, *, scale: float) -> Tensor:
        return super().forward(hidden, mask.view(len(hidden), -1, *mask.shape[1:]), scale=scale)


def flatten_masks(model: nn.Module) -> None:
    for block in model.blocks:
        block.__class__ = FlatMask
        block.register_forward_pre_hook(lambda _, given: (given[0], given[1].repeat(len(given[0]) * 4, 1, 1)))


# Every forward changes buffers, on which the next one depends.
spectral = partial(changed, blocks, lambda m: [parametrizations.spectral_norm(block.up) for block in m.blocks])
placed = partial(changed, blocks, lambda m: setattr(m, "embed", Placed(m.embed)))
masked_by_head = partial(changed, blocks, flatten_masks)
sparse = partial(changed, blocks, lambda m: setattr(m.embed, "sparse", True))  # gradients of its embedding are


def two_forwards_of_a_view(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Each with an output layer that reads its weight without training it."""
    weight = model.lm_head.weight.detach()
    first, second = (model.model(ids).last_hidden_state @ weight.t() for ids in batch["input_ids"].split(2))
    return first.logsumexp(-1).mean() + nn.functional.softplus(second.logsumexp(-1).mean())


def generated(model: nn.Module) -> float:
    """The tokens, as one number."""
    prompt = data(1)[0]["input_ids"][:2, :3]
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return float((out * torch.arange(1, 1 + out.numel()).view_as(out)).sum())


def inferred(model: nn.Module, *_: Any) -> Tensor:
    with torch.inference_mode():
        return model_loss(model, data(1)[0])


def inferred_once(model: nn.Module) -> float:
    """After the first step, whose update needs buffers that later ones use, too."""
    if not hasattr(model, "t1_inferred"):
        model.t1_inferred = inferred(model).item()
    return model.t1_inferred


def looked_at_in_inference(model: nn.Module, optimizer: Any) -> Tensor:
    """The gradients, which are changed only afterwards."""
    with torch.inference_mode():
        [param.grad for param in model.parameters()]
    return torch_clip(model, optimizer)


def beside_inferred(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Before the first step, too."""
    known = inferred(model).item() * torch.no_grad()(model_loss)(model, batch)
    return known * model_loss(model, batch)


FROZEN = {
    "embedding": "embed", "lower layers": r"embed|\.0\.|\.1\.", "upper layers": r"\.2\.|\.3\.",
    "norms inside layers": "blocks.*norm", "all of a layer but its norms": r"blocks\.\d\.(?!norm)",
    "all but the layers": "^(?!blocks)", "all but the head": "^(?!head)",
}  # fmt: skip


def hooked_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Before it is streamed: its groups stay the same objects, its hooks go on, and one of them is removed."""
    optimizer, trained = adamw(model), list(model.parameters())
    rates = RATES(optimizer)
    optimizer.register_step_pre_hook(lambda *_: torch._foreach_mul_([p.grad for p in trained], 0.5) and None)
    optimizer.register_step_post_hook(lambda *_: [p.detach().clamp_(-0.1, 0.1) for p in trained] and rates.step())
    handle = optimizer.register_step_post_hook(lambda *_: [p.detach().zero_() for p in trained] and None)
    model.register_forward_pre_hook(lambda *_: handle.remove())
    return optimizer


def two_adapters() -> nn.Module:
    """In float32, for 16-bit weights. The second ones are frozen."""
    model = adapted(torch.bfloat16, base=llama, dropout=0.0)
    model.add_adapter("other", model.peft_config["default"])
    for name, param in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(param, std=0.02)
    return model


def beside_reference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in a loss of preferences: others' adapters in between, and none."""
    loss = model_loss(model, batch)
    model.set_adapter("other")
    with torch.no_grad():
        known = model_loss(model, batch)
    model.set_adapter("default")
    with model.disable_adapter(), torch.no_grad():
        known *= model_loss(model, batch)
    return loss * known


square = [{name: value[:, :4] for name, value in batch.items()} for batch in data(padded=True)]
half_decay = partial(adamw, weight_decay=0.5)
dropping, padded = partial(blocks, dropout=0.3), data(padded=True)
CASES: dict[str, dict[str, Any]] = {
    **{kind: case(build) for kind, build in MODELS.items()},
    "groups under a schedule, clipped by PyTorch": case(llama, grouped, schedule=RATES, clip=torch_clip),
    "a schedule and hooks from before": case(qwen3, hooked_optimizer),
    "a schedule that changes betas, too": case(qwen3, schedule=partial(OneCycleLR, max_lr=0.02, total_steps=11)),
    "a rate that is a tensor": case(qwen3, lambda model: adamw(model, lr=torch.tensor(0.01)), schedule=RATES),
    "maximize": case(qwen3, partial(adamw, lr=1e-3, maximize=True)),
    "nesterov": case(qwen3, partial(sgd, nesterov=True)),
    "dampening": case(qwen3, partial(sgd, dampening=0.3)),
    "no momentum": case(qwen3, partial(sgd, momentum=0.0)),
    "one micro-batch": case(blocks, **pieces(9)),
    "as many rows as tokens": case(blocks, batches=square, **pieces(2)),
    "batches of other shapes": case(gemma3, batches=shapes(), choice=ON_HOST),
    "two forwards": case(qwen3, loss=two_forwards, clip=own_clip),
    # the first forward's output layer reads its weight when layers of the second have run their backward
    "two forwards, all on the host": case(qwen3, loss=two_forwards, choice=ON_HOST),
    "two forwards of a view, all on the host": case(qwen3, loss=two_forwards_of_a_view, choice=ON_HOST),
    "sparse gradients, all on the host": case(sparse, partial(sgd, momentum=0.0, weight_decay=0.0), choice=OUTER),
    "no tokens before others, all on the host": case(
        qwen3, before=lambda m, o, batch: m.get_input_embeddings()(batch["input_ids"][:0]), choice=OUTER
    ),
    "positions before tokens, all on the host": case(placed, choice=OUTER),
    "evaluation without dropout": case(partial(blocks, dropout=0.2), sgd, after=evaluated, clip=own_clip),
    "evaluation while gradients wait on the device": case(qwen3, clip=inferred, choice=Choice(grads="device")),
    "generation, kept": case(qwen3, after=generated, choice=Choice(resident=1, keep=4)),
    "inference mode": case(llama, after=lambda model: inferred(model).item()),
    "gradients seen in inference mode": case(llama, clip=looked_at_in_inference),
    "inference mode first, with a budget": case(llama, loss=beside_inferred, gpu_memory="1GiB"),
    "moved to where it is": case(qwen3, after=lambda m: float(m.to("cpu").float().train().training)),
    # which `make_trainer` refuses; here the loss is the model's own
    "a model that scales its logits, with a budget": case(GRANITE, gpu_memory="1GiB"),
    "other names of a model's parts, with a budget": case(NEOX, gpu_memory="1GiB"),
    "a mask that is not cut by rows, with a budget": case(masked_by_head, gpu_memory="1GiB"),
    "adapters of the output layer, with a budget": case(
        partial(adapted, dropout=0.0, base=llama, target_modules=["q_proj", "lm_head"]), gpu_memory="1GiB"
    ),
    # a recomputation would attend to what the forward has left in a cache, however it comes
    # the biases' gradients are zero but for rounding
    "a cache by position, by rows": case(
        partial(frozen, "attn.bias", made, config=GPT2), after=lambda m: inferred(m).item(), micro_batch=1, rel=1e-5
    ),
    "a cache by position, kept": case(partial(made, GPT2), choice=Choice(keep=2)),
    "a cache by another name": case(NEOX),
    "a cache by another name, kept": case(NEOX, choice=Choice(keep=2)),
    "buffers that a forward changes, with a budget that keeps activations": case(spectral, gpu_memory="1GiB"),
    "a layer that writes to an argument, kept": case(
        partial(changed, blocks, stream_models.write_masks), choice=Choice(keep=4)
    ),
    "masters": masters(qwen3, choice=Choice(host_share=0.5, outer="host")),
    "masters, on the device": masters(blocks, sgd, choice=Choice(host_share=0.0, outer="host")),
    "masters, by the CPU": masters(blocks, choice=Choice(host_share=1.0, outer="host")),
    "masters, inference before the first update": masters(blocks, after=inferred_once, choice=OUTER),
    "masters, clipped": masters(llama, clip=own_clip),
    "masters, clipped, resident": masters(llama, clip=own_clip, choice=Choice(resident=2, keep=1, grads="device")),
    "masters, clipped, half by the CPU": masters(llama, clip=own_clip, choice=Choice(outer="host", host_share=0.5)),
    "16 bits without masters": case(partial(qwen3, torch.bfloat16), sgd, master_weights=None),
    "16 bits, clipped": case(partial(qwen3, torch.bfloat16), clip=torch_clip, master_weights=None),
    **{f"frozen: {what}": case(partial(frozen, names), clip=own_clip) for what, names in FROZEN.items()},
    "frozen: a tied embedding": case(partial(frozen, "embed", qwen3)),
    # parameters without a gradient do not decay
    "without a gradient": case(partly_used, half_decay),
    "without a gradient, masters": masters(partly_used, half_decay),
    "adapters": case(partial(adapted, dropout=0.0), **pieces(None)),
    # dropout draws the same numbers again
    "adapters, dropout": case(adapted, clip=own_clip, **pieces(None)),
    "adapters, much dropout": case(partial(adapted, dropout=0.5), clip=torch_clip, **pieces(None)),
    "adapters, padded rows": case(adapted, batches=padded, **pieces(2)),
    "adapters in float32, others for reference": case(two_adapters, loss=beside_reference),
    "adapters in float32": case(partial(adapted, torch.bfloat16, base=llama)),
    "dropout in attention": case(partial(qwen3, attention_dropout=0.3), loss=two_forwards, **pieces(None)),
    "dropout, kept": case(dropping, loss=two_forwards, choice=Choice(keep=2), **pieces(None)),
    "dropout, from the host": case(dropping, loss=two_forwards, choice=Choice(inputs="host"), **pieces(None)),
    "dropout, some rows at a time": case(dropping, **pieces(3)),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_plain_pytorch(name):
    compare(**CASES[name])


@pytest.mark.parametrize("layout", [{"master_weights": "split"}, {"moments": "bfloat16"}], ids=str)
def test_smaller_state_is_close(layout):
    """Split masters are rounded with ties away from zero, 16-bit moments with noise."""
    model, plain = (llama(torch.bfloat16) for _ in range(2))
    reference = Masters(grouped(plain))
    expected = train(plain, reference, data(10))
    with streaming(model, grouped(model), **layout) as (streamed, own):
        assert train(streamed, own, data(10)) == pytest.approx(expected, rel=1e-2)
        state = own.state_dict()["state"]
    for index, slots in reference.state_dict()["state"].items():
        master, first, moved = slots["master"], slots["exp_avg"], 10 * 0.003 * math.sqrt(slots["master"].numel())
        assert state[index]["master"].dtype == torch.float32
        assert (state[index]["master"] - master).norm() < 0.05 * moved, index
        assert (state[index]["exp_avg"].float() - first).norm() < 0.25 * first.norm(), index
