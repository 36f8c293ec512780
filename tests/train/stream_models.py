"""Small models for the tests of `stream`, and their batches."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

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
        if labels is None:
            return SimpleNamespace(logits=logits)
        kept, following = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(kept, following))


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
