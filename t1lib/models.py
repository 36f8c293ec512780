"""Models, all through `transformers`: preset shapes with random weights, or real checkpoints; and their parts."""

import ast
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from t1lib.errors import T1Error, choose, is_number, is_whole, reason, require, shown
from t1lib.memory import grow_segments


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool = True, **other: object) -> dict[str, object]:
    shape = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
    shape |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp}
    return {"model_type": "qwen3"} | shape | {"num_attention_heads": heads, "tie_word_embeddings": tied} | other


# Shapes as published in the models' own configurations.
PRESETS: dict[str, dict[str, object]] = {
    "tiny": _qwen3(4, 64, 192, 4, vocab_size=512, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, tied=False),
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "vocab_size": 256000, "num_hidden_layers": 26, "hidden_size": 2304,
        "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
}  # fmt: skip

COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
MOST_LAYERS = 1024
MORE = "; allowed: no more, or a preset with another max_position_embeddings (option --change, argument changes)"


def parse_changes(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Changes to a preset from (field, text): Python literals that JSON can hold (numbers, lists, …), else the text."""
    changes: dict[str, Any] = {}
    for field, text in pairs:
        require(field not in changes, f"--change {field} is given twice: {shown(changes.get(field))}, {shown(text)}")
        try:
            changes[field] = json.loads(json.dumps(ast.literal_eval(text)))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            changes[field] = text
    return changes


def build_model(
    name: str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", seed: int = 0,
    **changes: object,
) -> PreTrainedModel:  # fmt: skip
    """A Hugging Face causal language model on `device`, in training mode. `name` is a preset of `PRESETS`, a local
    checkpoint directory, or a Hub name "owner/model". `changes` replace fields of a preset's configuration, such as
    `num_hidden_layers=2`. No remote code is ever run. A preset's random weights depend on `seed` and on the machine,
    not on `device`: they are drawn on the GPU if there is one, one module at a time, so that a model larger than the
    GPU can be built on the host. As this may be the first use of the GPU, it calls `grow_segments`. Raises `T1Error`
    for an unknown name, for changes that do not fit or are to a checkpoint, and for files that cannot be loaded, are
    quantised, or do not fit their configuration."""
    grow_segments()
    if name in PRESETS:
        return _random_model(shape_only(name, dtype, **changes), torch.device(device), seed)
    return _from_files(name, _config_of(name, changes), dtype).to(device).train()


def shape_only(name: str, dtype: torch.dtype = torch.float32, /, **changes: object) -> PreTrainedModel:
    """The model of a preset or checkpoint on PyTorch's device "meta": shapes without data."""
    config = _config_of(name, changes)
    with _loading(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn any exception of transformers, which raises many kinds, into a `T1Error`; without a warning for each attempt
    to connect."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        if name in PRESETS:
            last = ValueError(str(error).strip().splitlines()[-1])  # the lines before it only say where
            raise T1Error(f"{name} cannot be changed so: {reason(last)}") from error
        told = shorten(reason(error), 165 - len(shown(name)), placeholder=" …")
        presets = f"presets that need no files: {', '.join(PRESETS)}"
        raise T1Error(f"cannot load {shown(name)}: {told}\n{presets}") from error
    finally:
        hub.setLevel(level)


def _config_of(name: str, changes: dict[str, object]) -> PreTrainedConfig:
    """The configuration of a preset, with changes, or of a checkpoint: a directory or a hub name. Attention is computed
    by PyTorch, whatever implementation the configuration names: that may be code to download."""
    if name in PRESETS:
        fields = {**PRESETS[name], **changes}
        _check(fields)
        with _loading(name):
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        plain = AutoConfig.for_model(config.model_type)  # a field that it does not know would be kept without effect
        for field in changes.keys() - {"model_type"}:
            choose(f"field of {config.model_type}'s configuration", field, plain.to_dict())
        return config
    require(not changes, f"{shown(name)} is no preset: its configuration cannot be changed ({', '.join(changes)})")
    local = os.path.isdir(name)  # False for a name that is too long
    hub = name.count("/") == 1 and len(name) <= 255 and not name.startswith((".", "/", "~"))
    if not (local or hub):
        choose("model", name, [*PRESETS, "a checkpoint folder", "a hub name 'owner/model'"])
    with _loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=local)
    quantised = getattr(config, "quantization_config", None) is not None
    require(not quantised, f"{shown(name)} is quantised (quantization_config): allowed are weights of 16 or 32 bits")
    config._attn_implementation = "eager" if config._attn_implementation == "eager" else None  # transformers' default
    config._experts_implementation = None
    return config


def _from_files(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with a checkpoint's weights. Raises `T1Error` if any is missing, misshapen or of an extra layer."""
    with _loading(name):
        model, found = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, trust_remote_code=False, local_files_only=os.path.isdir(name),
            use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    missing, beyond = sorted(found["missing_keys"]), sorted(k for k in found["unexpected_keys"] if ".layers." in k)
    if wrong := sorted(found["mismatched_keys"]):
        key, there, meant = wrong[0]
        raise T1Error(f"{shown(name)}: {key} is {tuple(there)}; config.json means {tuple(meant)}")
    require(not missing, f"{shown(name)} lacks {len(missing)} of the weights that config.json means: {missing[:1]}")
    require(not beyond, f"{shown(name)} has {len(beyond)} weights of layers beyond those of config.json: {beyond[:1]}")
    return model


def _check(fields: dict[str, Any]) -> None:
    """Raise `T1Error` for fields that do not belong to a shape, or that no model can be built from."""
    own = f"dtype={fields.get('dtype')!r} is no change of the shape; allowed: by its own option --dtype, argument dtype"
    require("dtype" not in fields, own)
    calls = sorted(fields.keys() & {"output_attentions", "output_hidden_states", "return_dict"})
    require(not calls, f"{', '.join(calls)} is of a model's calls, no change of the shape; allowed: leave it out")
    choose("model_type", fields["model_type"], CONFIG_MAPPING)
    for name, value in fields.items():
        if name in COUNTS:
            most = MOST_LAYERS if name == "num_hidden_layers" else 2**31
            fits, allowed = is_whole(value, 1, most), f"1 or more, at most {most}"
        elif name.endswith(("dropout", "pdrop")):
            fits, allowed = is_number(value) and 0 <= value <= 1, "0 to 1"
        elif name in ("initializer_range", "rms_norm_eps"):
            fits, allowed = is_number(value) and value >= 0, "0 or more"
        else:
            continue
        require(fits, f"{name}={shown(value)}; allowed: {allowed}")
    width = fields["head_dim"]
    require(width % 2 == 0, f"head_dim={width}; allowed: even numbers, as positions rotate pairs")
    heads, shared = fields["num_attention_heads"], fields["num_key_value_heads"]
    require(heads % shared == 0, f"num_key_value_heads={shared}; allowed: divisors of num_attention_heads={heads}")


def _random_model(model: PreTrainedModel, device: torch.device, seed: int) -> PreTrainedModel:
    """Fill `model`, which has only shapes so far, with random weights on `device`; return it in training mode."""
    draw_on = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    with torch.random.fork_rng(devices=[draw_on] if draw_on.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for module in model.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if not own or module is tied:
                continue
            module.to_empty(device=draw_on, recurse=False)
            model._init_weights(module)  # the architecture's own rule for this kind of module
            module._apply(lambda t: t.to(device), recurse=False)
    model.tie_weights()
    return model.train()


@dataclass(frozen=True)
class Parts:
    """The parts of a causal language model: what runs before, in and after its stack of layers."""

    base: nn.Module  # runs embedding, layers and norm
    embed: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear
    softcap: float | None


def split(model: PreTrainedModel) -> Parts:
    """Split a decoder into parts. Raises `T1Error` unless it is embedding, stack of layers, norm and linear head."""
    allowed = "a decoder of transformers, such as `build_model` gives"
    require(isinstance(model, PreTrainedModel), f"model of type {type(model).__name__}; allowed: {allowed}")
    base, embed, head = model.base_model, model.get_input_embeddings(), model.get_output_embeddings()
    head = getattr(head, "layer", head)  # during a call, `patch_head` wraps the real layer
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    kind = model.config.model_type
    require(
        isinstance(layers, nn.ModuleList) and norm is not None and isinstance(head, nn.Linear),
        f"model type {kind!r} is not embedding, layers, norm, linear head (Qwen3, Llama, Gemma-2, Mistral are)",
    )
    return Parts(base, embed, layers, norm, head, getattr(model.config, "final_logit_softcapping", None))


def require_plain_loss(model: PreTrainedModel) -> None:
    """Raise `T1Error` if the configuration makes the loss more than the cross-entropy of the output layer's logits; a
    softcap is allowed."""
    config = model.config
    plain = {"logit_scale": 1, "logits_scaling": 1, "logits_mup_width_multiplier": 1}
    plain |= {"unpadded_vocab_size": config.vocab_size, "output_router_logits": False}
    for field, allowed in plain.items():
        value = getattr(config, field, None)
        found = f"model type {config.model_type!r} has {field}={value}, which its loss depends on"
        require(value in (None, allowed), f"{found}; allowed here: {allowed}")


def layer_arguments(parts: Parts, embedded: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model passes to its first layer, hidden states first (masks, rotations, …): recorded in a forward that
    ends there."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append((given, named))
        raise StopIteration  # ends the forward here

    with parts.layers[0].register_forward_pre_hook(note, with_kwargs=True), suppress(StopIteration):
        parts.base(inputs_embeds=embedded, use_cache=False)
    return seen[0]


def first_trained(layers: Iterable[nn.Module]) -> int:
    """The number of the first layer that has something to train; 0 if none has."""
    return next((i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())), 0)


def trial(
    parts: Parts, layer: nn.Module, dtype: torch.dtype, rows: int, tokens: int
) -> tuple[Tensor, Callable[[], Tensor]]:
    """An input, and the call that runs a layer's forward on that with what the model passes to its first layer."""
    layer = getattr(layer, "_orig_mod", layer)  # what `torch.compile` has wrapped: not compiled, all can be counted
    device, width = next(layer.parameters()).device, parts.base.config.hidden_size
    hidden = torch.zeros(rows, tokens, width, dtype=dtype, device=device, requires_grad=True)
    given, named = layer_arguments(parts, hidden)
    return hidden, partial(type(layer).forward, layer, *given, **named)


def sizes(name: str, **changes: object) -> dict[str, int]:
    """Counts of a preset or checkpoint, without building it: layers, layer_params, params, vocabulary, hidden."""
    model = shape_only(name, **changes)
    layers, config = split(model).layers, model.config
    params, layer_params = (sum(p.numel() for p in module.parameters()) for module in (model, layers[0]))
    return {
        "layers": len(layers), "layer_params": layer_params, "params": params,
        "vocabulary": config.vocab_size, "hidden": config.hidden_size,
    }  # fmt: skip
