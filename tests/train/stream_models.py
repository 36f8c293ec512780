"""Small models for the tests of `stream`, and their batches."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from t1lib.train import build_model

LAYERS = 4
ROWS, LENGTH, VOCABULARY = 4, 7, 61
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": LAYERS}
SHAPE |= {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2}


class Block(nn.Module):
    """A layer that is not from transformers: its mask comes by position, its scale by name; it may drop out, fail, or
    return something else."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("gain", torch.full((), 0.9))
        self.fault = Fault()
        self.result: Callable[[Tensor], Any] = lambda out: out

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        hidden = self.fault.watch(hidden)
        q, k, v = self.qkv(self.norm(hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale * q.shape[-1] ** -0.5)
        hidden = hidden + self.dropout(mixed.transpose(1, 2).flatten(2)) * self.gain
        return self.result(hidden + self.down(self.dropout(nn.functional.gelu(self.up(hidden)))))


class Blocks(nn.Module):
    """A language model of such layers, called as those of transformers are."""

    def __init__(self, dropout: float = 0.0, layers: int = LAYERS, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool() | torch.eye(length, device=mask.device).bool()
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, mask, scale=0.8)
        logits = self.head(self.norm(hidden))
        return SimpleNamespace(logits=logits, loss=None if labels is None else cross_entropy(logits, labels))


class Fault:
    """What a layer raises once: in its call number `call` from now, or (0) in the next backward through it."""

    error: BaseException | None = None
    calls = call = 0

    def arm(self, error: BaseException | None, call: int = 1) -> None:
        self.error, self.calls, self.call = error, 0, call

    def check(self, call: int) -> None:
        if call == self.call and self.error is not None:
            error, self.error = self.error, None
            raise error

    def watch(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.check(self.calls)
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.check(0))
        return hidden


def qwen3(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return build_model("tiny", dtype=dtype, **(SHAPE | changes))


def made(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, **options).to(dtype).train()


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return made(LlamaConfig(**SHAPE, **changes), dtype)


def gemma3(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two kinds of attention and of positions, so that the layers' arguments differ; tied."""
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    own = {"layer_types": kinds, "sliding_window": 3, "query_pre_attn_scalar": 8, "pad_token_id": None}
    return made(Gemma3TextConfig(**SHAPE, **own, bos_token_id=1, eos_token_id=2), dtype)


def blocks(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(5)
    return Blocks(**changes).to(dtype)


def changed(build: Callable[..., nn.Module], change: Callable[[nn.Module], object], *given: Any) -> nn.Module:
    """The model that `build` makes, once `change` was called with it."""
    model = build(*given)
    change(model)
    return model


def frozen(pattern: str, build: Callable[..., nn.Module] = blocks, **options: Any) -> nn.Module:
    """A model in which that is frozen in whose name the regular expression is found."""
    model = build(**options)
    for name, param in model.named_parameters():
        param.requires_grad_(re.search(pattern, name) is None)
    return model


def add_unused(model: nn.Module) -> None:
    """Parameters, between others, that the outputs do not depend on."""
    for block in model.blocks:
        block.qkv.unused = nn.Linear(8, 8, dtype=block.up.weight.dtype)


def write_masks(model: nn.Module) -> None:
    """Make each layer change its mask, for itself and those after it: all tokens but the last see the last, or none."""
    held: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, given: held.append(given[1][..., -1]))
        block.norm.register_forward_pre_hook(lambda *_: held.append(held[-1].logical_not_()))


partly_used = partial(changed, blocks, add_unused)
MODELS: dict[str, Callable[..., nn.Module]] = {"qwen3": qwen3, "llama": llama, "gemma3": gemma3, "blocks": blocks}


def layers_of(model: nn.Module) -> nn.ModuleList:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of adapters
    return inner.blocks if isinstance(inner, Blocks) else inner.base_model.get_submodule("layers")


def last_hidden(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the last layer returns for the batch."""
    found: list[Tensor] = []
    hook = layers_of(model)[-1].register_forward_hook(lambda module, args, out: found.append(out))
    model(**batch)
    hook.remove()
    return found[0]


def adapted(dtype: torch.dtype = torch.float32, dropout: float = 0.05, base: Any = qwen3, **options: Any) -> nn.Module:
    """A model with adapters that are not zero, as after some training."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    torch.manual_seed(8)
    config = peft.LoraConfig(r=2, lora_alpha=8, lora_dropout=dropout, **options)
    model = peft.get_peft_model(base(dtype), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)
    return model.train()


def data(count: int = 4, *, padded: bool = False, device: str = "cpu", rows: int = ROWS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if padded:
            mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (rows, 1), generator=generator)
            batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        found.append({name: value.to(device) for name, value in batch.items()})
    return found


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


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


class FlatMask(Block):
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


def two_adapters() -> nn.Module:
    """In float32, for 16-bit weights. The second ones are frozen."""
    model = adapted(torch.bfloat16, base=llama, dropout=0.0)
    model.add_adapter("other", model.peft_config["default"])
    for name, param in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(param, std=0.02)
    return model


def of_two_kinds() -> nn.Module:
    """Adapters to choose from: those of DoRA, the active ones, need the values of a layer's last product."""
    model = adapted(dropout=0.0, target_modules=["q_proj"])
    config = type(model.peft_config["default"])(r=2, use_dora=True, target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", config)
    model.set_adapter("other")
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name or "embed" in name)
    return model


def with_scale() -> nn.Module:
    """A parameter of the optimizer's that soon is none of the model's."""
    model = qwen3()
    model.t1_scale = nn.Parameter(torch.tensor(0.5))
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
    model = blocks()
    model.embed.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        block.__class__, block.number = Moody, number
    return model
