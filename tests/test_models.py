"""Presets, random weights drawn as by the architecture, checkpoints, and decoders split into parts."""

import json
import logging
from functools import partial

import pytest
import torch
from refusals import refused
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GPT2Config

from t1lib import models
from t1lib.models import build_model, require_plain_loss, shape_only, sizes, split

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {"qwen3": "tiny", "llama": "llama-3.2-1b", "gemma2": "gemma-2-2b"}


def built(family: str, **options):
    return build_model(FAMILIES[family], **{"dtype": torch.float32, **SMALL, **options})


def assert_same_weights(model, other) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_directory_round_trip(tmp_path):
    model = built("qwen3", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = build_model(str(tmp_path))
    assert again.training and again.dtype == torch.bfloat16 and again.lm_head.weight is again.model.embed_tokens.weight
    assert sizes(str(tmp_path)) == sizes("tiny", **SMALL)
    assert_same_weights(again, model)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model)


def test_random_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    model = built("qwen3", seed=3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert_same_weights(built("qwen3", seed=3), model)
    assert not torch.equal(built("qwen3", seed=4).lm_head.weight, model.lm_head.weight)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_drawn_as_the_architecture_draws_them(family):
    model = built(family)
    own = AutoModelForCausalLM.from_config(model.config)
    expected = {**own.state_dict(), **dict(own.named_buffers())}
    found = {**model.state_dict(), **dict(model.named_buffers())}
    assert list(found) == list(expected) and "model.rotary_emb.inv_freq" in found
    for name, tensor in found.items():
        if tensor.dim() < 2:  # norms: ones, or zeros where the norm adds one (Gemma); rotations
            assert torch.equal(tensor, expected[name]), name
        else:
            assert float(tensor.std()) == pytest.approx(float(expected[name].std()), rel=0.1), name
            assert abs(float(tensor.mean())) < 0.1 * float(tensor.std()), name


def test_sizes_are_those_of_the_model_and_of_presets_the_published_ones():
    model = built("gemma2")
    layer, params = (sum(p.numel() for p in each.parameters()) for each in (model.model.layers[1], model))
    expected = {"layers": 2, "layer_params": layer, "params": params, "vocabulary": 512, "hidden": 64}
    assert sizes("gemma-2-2b", **SMALL) == expected
    published = {"qwen3-0.6b": 0.5960, "qwen3-8b": 8.1907, "llama-3.2-1b": 1.2358, "gemma-2-2b": 2.6143}
    assert {preset: round(sizes(preset)["params"] / 1e9, 4) for preset in published} == published


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("tiny", {"num_key_value_heads": 3}, "num_key_value_heads=3; allowed: divisors of num_attention_heads=4"),
        ("tiny", {"hidden_size": -64}, "hidden_size=-64; allowed: 1 or more"),
        ("tiny", {"head_dim": 3}, "head_dim=3; allowed: even numbers"),
        ("tiny", {"output_hidden_states": "x"}, "output_hidden_states is of a model's calls, no change of the shape"),
        ("tiny", {"hidden_act": "foo"}, "tiny cannot be changed so: 'foo'"),
        ("tiny", {"model_type": "nope"}, "unknown model_type 'nope'; allowed: gpt.* more"),
        ("tiny", {"rope_parameters": 5}, "tiny cannot be changed so: TypeError: Field 'rope_parameters' with value 5"),
        ("tiny", {"attention_dropout": 2.0}, "attention_dropout=2.0; allowed: 0 to 1"),
        ("tiny", {"initializer_range": -1.0}, "initializer_range=-1.0; allowed: 0 or more"),
        *((name, {}, "unknown model") for name in ("a" * 300 + "/b", "a\0b", "")),
        ("qwen3-4bb", {}, "a checkpoint folder, a hub name 'owner/model'. Did you mean 'qwen3-4b'"),
        ("tiny", {"num_hidden_layers": 100_000}, "num_hidden_layers=100000; allowed: 1 or more, at most 1024"),
    ],
)
def test_changes_that_make_no_model_are_named(preset, changes, message):
    for call in (partial(shape_only, preset, torch.float32, **changes), partial(build_model, preset, **changes)):
        refused(call, match=message)


def test_a_hub_name_without_a_network_is_one_error_with_a_whole_sentence(monkeypatch):
    said = "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cache."

    def offline(*_, **__):
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)
        raise OSError(f"{said}\nCheck your internet connection or see how to run the library in offline mode.")

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", offline)
    refused(partial(shape_only, "owner/a-model-of-some-size"), f"'owner/a-model-of-some-size': {said}\npresets")
    refused(partial(shape_only, "owner/" + "m" * 90), "…\npresets")
    assert logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)  # others' warnings are theirs


def configured(folder, **fields) -> str:
    built("qwen3").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


def test_a_configuration_that_disagrees_with_the_weights_is_refused(tmp_path):
    for fields, message in (
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks 11 of the weights .*layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "has 11 weights of layers beyond those of config.json"),
        ({"intermediate_size": 48}, r"mlp.* is \(64, 96\); config.json means \(64, 48\)"),
        ({"quantization_config": {"quant_method": "nope"}}, "quantised"),
        ({"hidden_size": "wide"}, "cannot load"),
        ({"hidden_act": "foo"}, "cannot load .*: 'foo'"),
    ):
        refused(partial(build_model, configured(tmp_path, **fields)), match=message)


def test_no_other_implementation_of_attention_is_loaded(tmp_path):
    for asked, found in (("owner/kernel", "sdpa"), ("flash_attention_2", "sdpa"), ("eager", "eager")):
        folder = configured(tmp_path, _attn_implementation=asked, attn_implementation=asked)
        assert {build(folder).config._attn_implementation for build in (build_model, shape_only)} == {found}


def test_split_names_the_parts_and_refuses_what_is_no_stack_of_that_kind():
    for tied in (True, False):
        parts = split(built("qwen3", tie_word_embeddings=tied))
        assert (parts.head.weight is parts.embed.weight) is tied
    parts = split(built("gemma2"))
    assert (len(parts.layers), parts.softcap, split(built("qwen3")).softcap) == (2, 30.0, None)
    assert parts.head.weight.shape == (512, 64) and parts.norm.weight.shape == (64,)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    own = AutoModelForCausalLM.from_config(config)
    refused(lambda: split(own), "'gpt2' is not embedding, layers, norm, linear head")


def test_a_loss_that_is_more_than_a_cross_entropy_is_refused_by_name():
    """Such a model has parts, but a trainer would compute another loss from them than the model does."""
    for family, field, value, others in (
        ("granite", "logits_scaling", 8.0, {}),
        ("cohere", "logit_scale", 0.25, {}),
        ("inkling_text", "logits_mup_width_multiplier", 24.0, {}),
        ("inkling_text", "unpadded_vocab_size", 500, {"logits_mup_width_multiplier": 1.0}),
        ("mixtral", "output_router_logits", True, {}),
    ):
        if family not in CONFIG_MAPPING:  # Inkling is newer than the oldest transformers that the kit takes
            continue
        with torch.device("meta"):
            config = AutoConfig.for_model(family, **SMALL, **others, **{field: value})
            model = AutoModelForCausalLM.from_config(config)
        assert split(model).head.weight.shape == (512, 64)
        refused(partial(require_plain_loss, model), f"'{family}' has {field}={value}, which its loss depends on")
