"""Models that are odd, and what users' loops do that streaming must notice: they look, write, freeze, drop, keep, save
and change things at odd moments, as a user of plain PyTorch writes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from stream_loops import RATES, adamw, evaluated, model_loss, own_clip, torch_clip, train
from stream_models import SHAPE, Block, adapted, blocks, changed, data, frozen, layers_of, llama, made, qwen3
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPTNeoXConfig, GraniteConfig

from t1lib.errors import T1Error

GRANITE = partial(made, GraniteConfig(**SHAPE, logits_scaling=0.5))
NEOX = partial(made, GPTNeoXConfig(**SHAPE))
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
GPT2 = partial(made, GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT))


class Placed(nn.Embedding):
    """Embeds tokens at their positions: looks up others than it is given."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__(7, tokens.embedding_dim)
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1])) + self.tokens(input=ids)


def flatten_masks(model: nn.Module) -> None:
    """Give each layer a mask of (rows · heads, tokens, tokens)."""

    def run(forward: Callable[..., Tensor], hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        return forward(hidden, mask.unflatten(0, (len(hidden), -1)), scale=scale)

    for block in model.blocks:
        block.forward = partial(run, block.forward)
        block.register_forward_pre_hook(lambda _, given: (given[0], given[1].repeat(len(given[0]) * 4, 1, 1)))


# Every forward changes buffers, on which the next one depends.
spectral = partial(changed, blocks, lambda m: [parametrizations.spectral_norm(block.up) for block in m.blocks])
placed = partial(changed, blocks, lambda m: setattr(m, "embed", Placed(m.embed)))
masked_by_head = partial(changed, blocks, flatten_masks)
sparse = partial(changed, blocks, lambda m: setattr(m.embed, "sparse", True))  # gradients of its embedding are
# A parameter of the optimizer's that soon is none of the model's.
with_scale = partial(changed, qwen3, lambda m: setattr(m, "t1_scale", nn.Parameter(torch.tensor(0.5))))


def two_adapters() -> nn.Module:
    """In float32, for 16-bit weights. The second ones are frozen."""
    model = adapted(torch.bfloat16, base=llama, dropout=0.0)
    model.add_adapter("other", model.peft_config["default"])
    for name, param in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(param, std=0.02)
    return model


def with_sparse_adapters() -> nn.Module:
    """Adapters of SHiRA add a sparse matrix to each weight, and a graph that is kept saves it."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(qwen3(), peft.ShiraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    return model.train()


def of_two_kinds() -> nn.Module:
    """Adapters to choose from: those of DoRA, the active ones, need the values of a layer's last product."""
    model = adapted(dropout=0.0, target_modules=["q_proj"])
    config = type(model.peft_config["default"])(r=2, use_dora=True, target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", config)
    model.set_adapter("other")
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name or "embed" in name)
    return model


class Moody(Block):
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
    model = frozen("embed")
    for number, block in enumerate(model.blocks):
        block.__class__, block.number = Moody, number
    return model


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


def hooked_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Before it is streamed: its groups stay the same objects, its hooks go on, and one of them is removed."""
    optimizer, trained = adamw(model), list(model.parameters())
    rates = RATES(optimizer)
    optimizer.register_step_pre_hook(lambda *_: torch._foreach_mul_([p.grad for p in trained], 0.5) and None)
    optimizer.register_step_post_hook(lambda *_: [p.detach().clamp_(-0.1, 0.1) for p in trained] and rates.step())
    handle = optimizer.register_step_post_hook(lambda *_: [p.detach().zero_() for p in trained] and None)
    model.register_forward_pre_hook(lambda *_: handle.remove())
    return optimizer


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


def perturbed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Gradients at other weights, which are taken back before the update, as in sharpness-aware minimisation."""
    params = list(model.parameters())
    own = [param.detach().clone() for param in params]
    with torch.no_grad():
        torch._foreach_mul_(params, 1.05)
    loss = model_loss(model, batch)
    loss.backward()
    with torch.no_grad():
        torch._foreach_copy_(params, own)
    return loss.detach().requires_grad_()  # its own backward changes nothing


def decoded_by_hand(model: nn.Module) -> float:
    """From a prompt that was run where gradients are possible."""
    model.eval()
    found = model(data()[0]["input_ids"], use_cache=True)
    with torch.no_grad():
        found = model(data()[1]["input_ids"][:, :1], past_key_values=found.past_key_values)
    model.train()
    return found.logits.norm().item()


def of_assigned(model: nn.Module) -> float:
    """Weights of embedding and head are assigned for good, in another layout, and then looked at in inference mode."""
    for param in (model.get_input_embeddings().weight, model.lm_head.weight):
        param.data = (param.data.t() * 0.9).contiguous().t()
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


def prune_once(model: nn.Module, optimizer: Any, batch: Any) -> None:
    if not prune.is_pruned(model):
        prune.l1_unstructured(layers_of(model)[1].mlp.up_proj, "weight", 0.3)


def replace_forwards(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Of a module each in two layers, after some steps: one's product is needed, the other's runs twice."""
    model.t1_steps = getattr(model, "t1_steps", 0) + 1
    if model.t1_steps == 3:
        squared, repeated = layers_of(model)[1].mlp, layers_of(model)[2].mlp
        squared.forward = lambda x: type(squared).forward(squared, x).square()
        repeated.forward = lambda x: type(repeated).forward(repeated, type(repeated).forward(repeated, x))


def keep_first(model: nn.Module, optimizer: Any) -> Tensor:
    return vars(model).setdefault("t1_kept", up_weight(model).grad).norm()


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


def write_outer(model: nn.Module, optimizer: Any) -> Tensor:
    torch._foreach_mul_(model.t1_held, 0.9)
    return model.embed.weight.norm()


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
    late = model_loss(model, batch)
    torch.no_grad()(model.get_parameter(name).mul_)(0.9)
    return late


def change_everything(forward: Callable[..., Tensor], model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    """By a step on another batch."""
    late = forward(model, batch)
    train(model, optimizer, data()[1:2])
    return late


CHANGES: dict[str, Callable[..., Tensor]] = {
    "a mask": change_mask,
    "hidden states": change_hidden,
    **{n: partial(change_weight, n) for n in ("head.weight", "blocks.0.up.weight", "blocks.3.qkv.weight")},
    "everything": partial(change_everything, model_loss),
    "the head": partial(change_everything, lambda m, _: m.head(torch.ones(4, 32, requires_grad=True)).square().sum()),
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


def keep_late(late: Callable[[nn.Module], Tensor], model: nn.Module, optimizer: Any) -> None:
    model.t1_late = late(model)


def step_again(late: Callable[[nn.Module], Tensor], model: nn.Module, optimizer: Any, batch: Any) -> None:
    """With gradients that are added while the last step's update waits for a forward through the last layer."""
    found = vars(model).pop("t1_late", None)
    (late(model) if found is None else found).square().sum().backward()
    optimizer.step()


def scaled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if not hasattr(model, "t1_taken"):
        model.t1_taken = [model._parameters.pop("t1_scale")]
    return model_loss(model, batch) * model.t1_taken[0].exp()


def clip_all_of_the_optimizer(model: nn.Module, optimizer: Any) -> Tensor:
    own = getattr(optimizer, "clip_grad_norm_", None)
    return own(0.05) if own else clip_grad_norm_([*model.parameters(), *model.t1_taken], 0.05)
