"""A streamed model under any loop, whatever of it is frozen, left out, dropped out or kept in 16 bits, and whatever a
loop looks at or changes in between, has the bits of a plain PyTorch model, in float32 on a CPU."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import stream_models
import torch
from stream_cases import PLACES, Masters, case, compare, masters, pieces, streaming
from stream_loops import adamw, evaluated, grouped, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, SHAPE, adapted, blocks, changed, data, frozen, layers_of, llama, made, qwen3
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPTNeoXConfig, GraniteConfig

from t1lib.errors import T1Error
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


def penalised_before(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Computed before the forward, of the two matrices whose memory the backward of the layers may take."""
    before = 0.01 * sum(m.weight.square().sum() for m in (model.get_input_embeddings(), model.lm_head))
    return model_loss(model, batch) + before


def embedding_again(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    embedded = checkpoint(model.get_input_embeddings(), batch["input_ids"], use_reentrant=False)
    return model(inputs_embeds=embedded, labels=batch["labels"]).loss


def of_inputs_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Nothing of the model is trained. The embedding is given its input by name."""
    model.requires_grad_(False)
    model.t1_given = model.get_input_embeddings()(input=batch["input_ids"]).requires_grad_()
    return model(inputs_embeds=model.t1_given, labels=batch["labels"]).loss


def freezing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A weight is frozen between forward and backward."""
    up_weight(model, -1).requires_grad_(True)
    loss = model_loss(model, batch)
    up_weight(model, -1).requires_grad_(False)
    return loss


def up_weight(model: nn.Module, layer: int = 0) -> nn.Parameter:
    return layers_of(model)[layer].mlp.up_proj.weight


def of_two_kinds() -> nn.Module:
    """Adapters to choose from: those of DoRA, the active ones, need the values of a layer's last product."""
    model = adapted(dropout=0.0, target_modules=["q_proj"])
    config = type(model.peft_config["default"])(r=2, use_dora=True, target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", config)
    model.set_adapter("other")
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name or "embed" in name)
    return model


def drop_between(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A layer's gradients, which may wait on the device, are dropped unseen; then a forward sends later ones to the
    host."""
    first, second = (model_loss(model, each) for each in (data()[3], batch))
    first.backward()
    for param in model.blocks[2].parameters():
        param.grad = None
    with torch.no_grad():
        model.blocks[0](torch.zeros(1, 4, 32))
    return second


def of_average(model: nn.Module) -> float:
    """What is found with other weights, which are swapped in and out."""
    params = list(layers_of(model).parameters())
    trained = [param.detach().clone() for param in params]
    with torch.no_grad():
        torch._foreach_mul_(params, 0.5)
    found = evaluated(model)
    with torch.no_grad():
        torch._foreach_copy_(params, trained)
    return found


def decoded_by_hand(model: nn.Module) -> float:
    """From a prompt that was run where gradients are possible."""
    model.eval()
    found = model(data()[0]["input_ids"], use_cache=True)
    with torch.no_grad():
        found = model(data()[1]["input_ids"][:, :1], past_key_values=found.past_key_values)
    model.train()
    return found.logits.norm().item()


def of_assigned(model: nn.Module) -> float:
    """Weights of embedding and head are assigned for good, and then looked at in inference mode."""
    for param in (model.get_input_embeddings().weight, model.lm_head.weight):
        param.data = param.data * 0.9
    with torch.inference_mode():
        return evaluated(model)


def clip_often(model: nn.Module, optimizer: Any) -> Tensor:
    """Its gradients have another norm every time: without one, clipped already, changed through what is held."""
    layers_of(model)[2].mlp.up_proj.weight.grad = None
    norms, held = [own_clip(model, optimizer, most) for most in (0.3, 0.2)], up_weight(model).grad
    if hasattr(optimizer, "grad_norm"):
        optimizer.grad_norm()
    held.mul_(3)
    return torch.stack([*norms, own_clip(model, optimizer, most=0.1)]).sum()


def prune_later(model: nn.Module, optimizer: Any, batch: Any) -> None:
    if not hasattr(model, "t1_pruned"):
        model.t1_pruned = prune.l1_unstructured(layers_of(model)[1].mlp.up_proj, "weight", 0.3)


def replace_forwards(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Of a module each in two layers, after some steps: one's product is needed, the other's runs twice."""
    model.t1_steps = getattr(model, "t1_steps", 0) + 1
    if model.t1_steps == 3:
        squared, repeated = layers_of(model)[1].mlp, layers_of(model)[2].mlp
        squared.forward = lambda x: type(squared).forward(squared, x).square()
        repeated.forward = lambda x: type(repeated).forward(repeated, type(repeated).forward(repeated, x))


def keep_first(model: nn.Module, optimizer: Any) -> Tensor:
    return vars(model).setdefault("t1_kept", up_weight(model).grad).norm()


def give_other_data(model: nn.Module, optimizer: Any) -> Tensor:
    """What is held from the step before has them, too, as it is the same tensor."""
    weight, kept = up_weight(model), vars(model).setdefault("t1_kept", up_weight(model).grad)
    weight.grad.data = weight.grad.data * 2
    assert weight.grad is weight.grad
    return kept.norm()


def hold_once(model: nn.Module, optimizer: Any) -> Tensor:
    """What is held from the first step on has the later gradients, too."""
    held = vars(model).setdefault("t1_held", [param.grad for param in model.parameters()])
    torch._foreach_mul_(held, 2.0)
    return own_clip(model, optimizer) + sum(grad.norm() for grad in held)


def write_layers(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Through aliases that were taken once, after each `drain()`."""
    if not hasattr(model, "t1_held"):
        model.t1_held = [param.detach() for param in layers_of(model).parameters()]
    getattr(optimizer, "drain", lambda: None)()
    torch._foreach_mul_(model.t1_held, 0.9)


def hold_outer(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """While somebody holds an alias, the memory is not released, and what is there counts."""
    if not hasattr(model, "t1_held"):
        model.t1_held = [model.embed.weight.detach(), model.head.weight.detach()]


def write_outer(model: nn.Module, optimizer: Any) -> None:
    torch._foreach_mul_(model.t1_held, 0.9)


def save_within(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Within a layer's call, as a hook or a signal's handler may."""
    model.blocks[1].up.register_forward_hook(lambda *_: optimizer.state_dict() and None)


def change_mask(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    """It is filled anew for a second forward."""
    mask, hidden = torch.zeros(7, 7), model.embed(batch["input_ids"])
    first = model.blocks[0](hidden, mask)
    second = model.blocks[0](hidden * 2, mask.fill_(1.0).tril_())
    return (first * second).sum()


def change_hidden(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden = model.embed(batch["input_ids"]) * 1.0
    out = model.blocks[0](hidden)
    hidden.mul_(2.0)
    return out.square().sum()


def change_weight(name: str, model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = model_loss(model, batch)
    with torch.no_grad():
        model.get_parameter(name).mul_(0.9)
    return loss


def change_everything(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    """By a step on another batch."""
    late = model_loss(model, batch)
    train(model, optimizer, data()[1:2])
    return late


CHANGED = ("head.weight", "blocks.0.up.weight", "blocks.3.qkv.weight")
CHANGES: dict[str, Callable[..., Tensor]] = {
    "a mask": change_mask,
    "hidden states": change_hidden,
    **{name: partial(change_weight, name) for name in CHANGED},
    "everything": change_everything,
}


def refused_late(change: Callable[..., Tensor], model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> None:
    """A backward of what was changed since its forward, as plain PyTorch refuses it."""
    late = change(model, optimizer, batch)
    with pytest.raises((T1Error, RuntimeError), match=r"changed in place|updated since|modified by an inplace"):
        late.backward()
    optimizer.zero_grad()


LATE: dict[str, Callable[[nn.Module], Tensor]] = {
    "the embedding": lambda model: model.embed(data()[3]["input_ids"]),
    "a layer": lambda model: model.blocks[0](model.embed(data()[3]["input_ids"])),
    "the head": lambda model: model.head(torch.ones(4, 32)),
}


def step_again(late: Callable[[nn.Module], Tensor], model: nn.Module, optimizer: Any, batch: Any) -> None:
    """With gradients that are added while the last step's update waits for a forward through the last layer."""
    found = vars(model).pop("t1_late", None)
    (late(model) if found is None else found).square().sum().backward()
    optimizer.step()


def late_gradients() -> dict[str, dict[str, Any]]:
    """That come after a step count in the next one, as do those of a forward before the step."""
    found = {}
    for what, late in LATE.items():
        own = {"before": partial(step_again, late), "zero": lambda model: None}
        found[f"gradients of {what} after a step"] = case(blocks, **own)
        if what != "a layer":  # refused, as in plain PyTorch
            keep = lambda model, optimizer, late=late: vars(model).update(t1_late=late(model))  # noqa: E731
            found[f"gradients of {what} after a step, of a forward before it"] = case(blocks, clip=keep, **own)
    return found


def with_scale() -> nn.Module:
    """A parameter of the optimizer's that soon is none of the model's."""
    model = qwen3()
    model.t1_scale = nn.Parameter(torch.tensor(0.5))
    return model


def scaled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if not hasattr(model, "t1_taken"):
        model.t1_taken = [model._parameters.pop("t1_scale")]
    return model_loss(model, batch) * model.t1_taken[0].exp()


def clip_all_of_the_optimizer(model: nn.Module, optimizer: Any) -> Tensor:
    own = getattr(optimizer, "clip_grad_norm_", None)
    return own(0.05) if own else clip_grad_norm_([*model.parameters(), *model.t1_taken], 0.05)


class Moody(stream_models.Block):
    """By chance or by its number it is skipped, or leaves its rest out; looks at its output, and keeps it."""

    number = 0

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        if self.number == 0 and torch.rand(()) < 0.5:
            return hidden
        out = super().forward(hidden, mask, scale=scale)
        if self.number == 1 or (self.number == 2 and torch.rand(()) < 0.5):
            return hidden + 0.1 * (out - hidden).square()
        self.last = out.detach()
        return out if out.detach().abs().max() < 1e3 else out.clamp(-1e3, 1e3)


def moody() -> nn.Module:
    """Nothing below the layer that is skipped trains."""
    model = blocks()
    model.embed.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        block.__class__, block.number = Moody, number
    return model


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
    "batches of other shapes": case(MODELS["gemma3"], batches=shapes(), choice=ON_HOST),
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
    "buffers that a forward changes, with a budget that keeps activations": case(spectral, gpu_memory="1GiB"),
    "a layer that writes to an argument, kept": case(
        partial(changed, blocks, stream_models.write_masks), choice=Choice(keep=4)
    ),
    "masters, inference before the first update": masters(blocks, after=inferred_once, choice=OUTER),
    "16 bits without masters": case(partial(qwen3, torch.bfloat16), sgd, master_weights=None),
    "16 bits, clipped": case(partial(qwen3, torch.bfloat16), clip=torch_clip, master_weights=None),
    **{f"frozen: {what}": case(partial(frozen, names), clip=own_clip) for what, names in FROZEN.items()},
    "frozen: a tied embedding": case(partial(frozen, "embed", qwen3)),
    # parameters without a gradient do not decay
    "without a gradient": case(stream_models.partly_used, half_decay),
    "without a gradient, masters": masters(stream_models.partly_used, half_decay),
    "adapters": case(partial(adapted, dropout=0.0), **pieces(None)),
    # dropout draws the same numbers again
    "adapters, dropout": case(adapted, clip=own_clip, **pieces(None)),
    "adapters, much dropout": case(partial(adapted, dropout=0.5), clip=torch_clip, **pieces(None)),
    "adapters, padded rows": case(adapted, batches=padded, **pieces(2)),
    "adapters in float32, others for reference": case(two_adapters, loss=beside_reference),
    "adapters in float32": case(partial(adapted, torch.bfloat16, base=llama)),
    "dropout in attention": case(partial(qwen3, attention_dropout=0.3), loss=two_forwards, **pieces(None)),
    "dropout, some rows at a time": case(dropping, **pieces(3)),
}
EVERYWHERE: dict[str, dict[str, Any]] = {  # wherever layers, state, gradients and inputs lie
    "a loss on the weights of embedding and head, computed before": case(llama, loss=penalised_before),
    "masters": masters(qwen3),
    "masters, momentum": masters(blocks, sgd),
    "masters, clipped": masters(llama, clip=own_clip),
    "dropout": case(dropping, loss=two_forwards, **pieces(None)),
    "a cache by another name": case(NEOX),
    # the first forward's output layer reads its weight when layers of the second have run their backward
    "two forwards": case(qwen3, loss=two_forwards, clip=own_clip),
    # one backward may add up gradients
    "two forwards, without accumulation": case(qwen3, sgd, loss=two_forwards) | {"accumulate": False},
    "layers that do not do the same every time": case(moody),
    "a checkpoint around the embedding": case(qwen3, loss=embedding_again),
    "gradients of inputs alone": case(qwen3, loss=of_inputs_alone, clip=lambda m, o: m.t1_given.grad.norm()),
    "a weight that is frozen before the backward": case(qwen3, loss=freezing),
    "adapters of two kinds, in turns": case(
        of_two_kinds, before=lambda m, o, b: m.set_adapter("default" if m.active_adapter == "other" else "other")
    ),
    # updates of which the weights, in 16 bits, see none for a while
    "weights swapped for an average": masters(qwen3, partial(adamw, lr=1e-5), after=of_average),
    "weights that are assigned": case(llama, after=of_assigned),
    "decoding by hand": case(qwen3, after=decoded_by_hand),
    "decoding by hand, by rows": case(qwen3, after=decoded_by_hand, micro_batch=1, rel=1e-5),
    "modules whose forward is replaced": case(qwen3, before=replace_forwards),
    "weights that are pruned": case(qwen3, before=prune_later),
    "gradients clipped again and again": case(qwen3, clip=clip_often),
    "gradients dropped unseen": case(blocks, loss=drop_between),
    "gradients zeroed through what is held": case(qwen3, clip=hold_once, zero=lambda m: [g.zero_() for g in m.t1_held]),
    "gradients held once, while more accumulate": case(qwen3, sgd, accumulate=2, clip=hold_once, zero=False),
    "weights of layers written through aliases": case(blocks, before=write_layers),
    "weights of embedding and head written through aliases": case(blocks, before=hold_outer, clip=write_outer),
    "a look at the state within a layer": case(blocks, before=save_within),
    **late_gradients(),
    **{f"changed in between: {what}": case(blocks, before=partial(refused_late, CHANGES[what])) for what in CHANGES},
    "a parameter that is the optimizer's alone": case(with_scale, loss=scaled, clip=clip_all_of_the_optimizer),
    "gradients whose data is assigned": case(qwen3, clip=give_other_data, zero=False),
    "a gradient that is kept": case(qwen3, clip=keep_first),
    "a gradient that is kept, dropped by layers": case(qwen3, clip=keep_first, zero=lambda m: m.model.zero_grad()),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", [*CASES, *EVERYWHERE])
def test_same_bits_as_plain_pytorch(name, monkeypatch):
    """Memory that nobody has written to holds nan."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        if name in CASES:
            compare(**CASES[name])
        else:
            compare(**EVERYWHERE[name], places=PLACES.values())
    finally:
        torch.use_deterministic_algorithms(False)


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


def test_another_thread_evaluates_meanwhile():
    plain, model, stop = qwen3(), qwen3(), threading.Event()

    def evaluate() -> None:
        while not stop.is_set():
            with torch.no_grad():
                model_loss(model, data()[0])

    with streaming(model) as both, ThreadPoolExecutor(1) as pool:
        evaluating = pool.submit(evaluate)
        try:
            assert train(*both) == train(plain, adamw(plain))
        finally:
            stop.set()
        evaluating.result()
