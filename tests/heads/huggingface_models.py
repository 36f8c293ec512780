"""Tiny language models of many families in float32 on the CPU, and the comparison of a patched with a plain one."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from t1lib.heads.huggingface import patch_head

VOCAB = 98
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8},
    "Llama": {},
    "Mistral": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 0.3},
    "Gemma3Text": {"head_dim": 8, "final_logit_softcapping": None},
    "Phi": {},  # a bias in the output layer
    "GPT2": {"vocab_size": 50257, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},  # tied, rows not aligned
    "Cohere": {"logit_scale": 3.0},
    "Granite": {"logits_scaling": 0.3, "output_bias": True},
    "HyperCLOVAX": {"head_dim": 8, "logits_scaling": 3.0},
    "FalconH1": {
        "lm_head_multiplier": 0.3, "hidden_size": 32, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
        "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8, "output_bias": True,
    },
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "Mamba": {"state_size": 4, "conv_kernel": 2, "time_step_rank": 4, "use_mambapy": False},  # asks for the dtype
    "Bert": {"is_decoder": True},  # an output layer two modules deep
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "hidden_size": 16},
    "Bart": {"d_model": 16, "decoder_ffn_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 2},  # no shift
    "InklingText": {  # cuts padded columns off its logits
        "unpadded_vocab_size": 90, "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 2, "d_rel": 4,
        "swa_num_key_value_heads": 2, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "output_bias": True,
    },
}  # fmt: skip


def build(family: str, **changes: Any) -> nn.Module:
    """A tiny model with weights large enough for logits of order 1. output_bias: its output layer gets a bias."""
    settings = {**({} if family == "GPT2" else SIZES), **FAMILIES[family], **changes}
    biased = settings.pop("output_bias", False)
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # no dropout
    if biased:
        layer = model.get_output_embeddings()
        layer.bias = nn.Parameter(torch.randn(layer.out_features))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def pair(family: str, options: dict | None = None, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice: as it is, and patched."""
    model = build(family, **changes)
    return model, patch_head(copy.deepcopy(model), **(options or {}))


def batch(rows: int = 2, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids, and labels of which a part is ignored."""
    ids = torch.randint(3, VOCAB - 8, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : length // 3] = -100
    labels[0, -2] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor | None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, trained, allow_unused=True))


def assert_close(own: list[torch.Tensor | None], ours: list[torch.Tensor | None]) -> None:
    """The gradient within 1e-5 of its norm, that of each parameter within 3e-5 (some of which vanish by symmetry)."""
    assert [g is None for g in own] == [g is None for g in ours]
    pairs = [(a, b) for a, b in zip(own, ours, strict=True) if a is not None]
    total = torch.stack([a.norm() for a, _ in pairs]).norm()
    assert torch.stack([(a - b).norm() for a, b in pairs]).norm() <= 1e-5 * total
    for a, b in pairs:
        assert (a - b).norm() <= 3e-5 * max(a.norm(), 1e-3 * total), (a.shape, (a - b).norm() / a.norm())


def compare(own: nn.Module, ours: nn.Module, **inputs: Any) -> None:
    """Losses within 1e-6 and gradients within 1e-5, and no logits."""
    expected, got = own(**inputs), ours(**inputs)
    assert got.logits is None and got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0.0, equal_nan=True)
    assert_close(gradients(own, expected.loss), gradients(ours, got.loss))
