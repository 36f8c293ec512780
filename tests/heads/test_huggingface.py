"""`patch_head`: the model's own loss and gradients, in every family, wrapper and trainer, and no logits."""

import copy
import functools
import inspect
import pickle
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType

import pytest
import torch
import transformers
from head_cases import Recorder, least_of
from huggingface_models import FAMILIES, VOCAB, assert_close, batch, build, compare, gradients, pair
from refusals import refused
from torch import nn

from t1lib.heads import next_token_targets, patch_head, unpatch_head

CHUNKED = {"head": "chunked"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_its_loss_and_gradients(family):
    own, ours = pair(family, CHUNKED)
    inputs = batch()
    compare(own, ours, **inputs)
    if family == "Bart":  # takes no further arguments, and does not shift its labels
        return
    compare(own, ours, **inputs, num_items_in_batch=31)
    compare(own, ours, **inputs, num_items_in_batch=torch.tensor(31))
    compare(own, ours, **inputs, shift_labels=next_token_targets(inputs["labels"]))
    inputs.pop("labels")
    torch.testing.assert_close(ours(**inputs).logits, own(**inputs).logits, rtol=0.0, atol=0.0)


def test_labels_and_other_arguments():
    """Labels alone that are shifted already, another number that is ignored, and what reaches the model."""
    own, ours = pair("Qwen3")
    ours.model.draft = nn.Sequential(ours.lm_head)  # a part of the model may hold its output layer, too
    inputs = batch()
    loss = ours(input_ids=inputs["input_ids"], shift_labels=next_token_targets(inputs["labels"])).loss
    torch.testing.assert_close(loss, own(**inputs).loss, rtol=1e-6, atol=0.0)
    none = {**inputs, "labels": torch.full_like(inputs["labels"], -100), "num_items_in_batch": torch.tensor(0)}
    compare(own, ours, **none)  # a loss of nan, and gradients of 0
    other = inputs | {"labels": inputs["labels"].masked_fill(inputs["labels"] == -100, 5)}
    compare(own, ours, **other, ignore_index=5)
    extra = {"attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]), "logits_to_keep": 12}
    compare(own, ours, **inputs, **extra, position_ids=torch.arange(12).repeat(2, 1) % 6)
    extra = {"use_cache": True, "output_hidden_states": True}
    expected, got = own(**inputs, **extra), ours(**inputs, **extra)
    assert set(got) == set(expected) - {"logits"}
    assert ours(**inputs, fused_lm_head=True).logits is not None  # so TRL's trainers ask for log-probabilities
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=0.0, atol=0.0)


def test_embeddings_caches_positions_and_tuples():
    own, ours = pair("Llama")
    ids, labels = batch().values()
    compare(own, ours, inputs_embeds=own.get_input_embeddings()(ids).detach(), labels=labels)
    found = []
    for model in (own, ours):
        cache = model(input_ids=ids[:, :6]).past_key_values
        cached = model(input_ids=ids[:, 6:], labels=labels[:, 6:], past_key_values=cache).loss
        found.append([cached, *model(input_ids=ids, labels=labels, return_dict=False, use_cache=False)])
    (expected, loss, *others), (got, own_loss, logits, *rest) = found
    torch.testing.assert_close([got, own_loss], [expected, loss], rtol=1e-6, atol=0.0)
    assert logits is None and len(others) == 1 + len(rest)
    for given in ({}, {"shift_labels": next_token_targets(labels)}):
        place = None if given else labels
        got = ours(ids, None, None, None, None, place, **given).loss
        torch.testing.assert_close(got, loss, rtol=1e-6, atol=0.0)


def test_logits_are_made_only_if_asked_for():
    """GPT2's vocabulary is so large that nothing else is of the logits' size."""
    own, ours = pair("Gemma2", {"return_logits": True})
    expected, got = own(**batch()), ours(**batch())
    torch.testing.assert_close(got.logits, expected.logits)
    objective = [output.loss + output.logits.square().mean() for output in (expected, got)]
    assert_close(gradients(own, objective[0]), gradients(ours, objective[1]))
    own, ours = pair("Mamba", {"return_logits": True, "tail": "fp8"})  # casts its logits to float32
    assert ours.bfloat16()(**batch()).logits.dtype == own.bfloat16()(**batch()).logits.dtype == torch.float32
    model, inputs = patch_head(build("GPT2"), **CHUNKED), batch(rows=4)
    with Recorder() as seen:
        gradients(model, model(**inputs).loss)
    assert max(elements for elements, _ in seen.made) <= inputs["input_ids"].numel() * model.config.vocab_size / 2


def test_a_sum_is_divided_before_gradients_are_rounded():
    """1024 / 1022 is so near 1 that no finished bfloat16 gradient would change by it."""
    model, given = patch_head(build("Llama").bfloat16(), head="chunked"), batch()
    weight = model.get_output_embeddings().weight
    found = []
    for items in (1024, torch.tensor(1022)):
        loss = model(**given, num_items_in_batch=items).loss
        assert loss.dtype == torch.float32
        found.append(torch.autograd.grad(loss, weight)[0].double())
    assert abs((found[1] * found[0]).sum() / found[0].square().sum() - 1024 / 1022) < 1e-3  # 2e-3 otherwise


def test_generation_and_a_loss_of_ones_own_are_left_alone():
    own, ours = pair("Gemma2", tie_word_embeddings=False)
    ids = batch()["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(own.generate(ids, **settings), ours.generate(ids, **settings))
    ours.loss_function = lambda logits, labels, *_, **__: logits.softmax(-1).square().sum()
    assert ours(**batch()).loss.item() == pytest.approx(own(**batch()).logits.softmax(-1).square().sum().item())


def test_the_patch_leaves_no_trace():
    """Nor does a call that fails."""
    own = build("Llama")
    ours = copy.deepcopy(own)
    before = set(ours.__dict__)
    assert patch_head(ours) is ours
    replica = ours._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica and ours.forward.__self__ is ours
    assert inspect.signature(ours.forward) == inspect.signature(own.forward)
    assert list(ours.state_dict()) == list(own.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in own.named_modules()]
    inputs = batch()
    refused(lambda: ours(input_ids=inputs["input_ids"], labels=inputs["labels"] + VOCAB))
    with pytest.raises(Exception):  # noqa: B017 - whatever the model raises
        ours(input_ids=inputs["input_ids"].float(), labels=inputs["labels"])
    compare(own, ours, **inputs)
    assert not {"lm_head", "_loss_function"} & set(ours.__dict__) and "forward" not in ours.lm_head.__dict__
    assert unpatch_head(ours) is ours
    assert set(ours.__dict__) == before and ours.forward.__func__ is type(own).forward
    assert ours(**batch()).logits is not None
    compare(own, patch_head(ours, head="chunked"), **batch())


def test_copies():
    own, ours = pair("Qwen3")
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(**batch()).loss.item() == pytest.approx(torch.tensor(VOCAB).log().item())  # its own weight
    unpatch_head(twin)
    compare(own, ours, **batch())
    loaded = pickle.loads(pickle.dumps(ours))  # comes back as a plain model
    assert loaded(**batch()).logits is not None
    compare(own, patch_head(loaded), **batch())


def test_what_wraps_the_patched_forward_stays():
    """Also if it takes over the function's attributes, as `torch.compile` and accelerate's hooks do."""
    own, ours = pair("Llama", CHUNKED)
    calls, patched = [], ours.forward
    ours.forward = functools.wraps(patched)(lambda *args, **kwargs: calls.append(1) or patched(*args, **kwargs))
    assert unpatch_head(ours)(**batch()).logits is not None and calls
    compare(own, patch_head(ours, **CHUNKED), **batch())


def test_accelerates_hook_is_let_be_and_it_takes_its_own_wrapper_off_alone():
    accelerate = pytest.importorskip("accelerate")
    ours = build("Llama")
    hook = accelerate.hooks.AlignDevicesHook("cpu")  # only moves tensors
    accelerate.hooks.add_hook_to_module(ours.lm_head, hook)
    patch_head(ours, **CHUNKED)
    ours._original_forward = ours.forward  # as in `Accelerator.prepare`
    ours.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(ours.forward.__func__), ours)
    accelerate.utils.extract_model_from_parallel(ours, keep_fp32_wrapper=False)
    assert ours(**batch()).logits is None


def test_compiled_code_of_a_plain_call_is_not_taken_for_a_patched_one():
    model, found = build("Llama", num_hidden_layers=1), []
    compiled = torch.compile(model, backend="eager")
    for change in (lambda _: None, partial(patch_head, **CHUNKED), unpatch_head):
        change(model)
        found.append(compiled(**batch()))
    assert [outputs.logits is None for outputs in found] == [False, True, False]
    torch.testing.assert_close([outputs.loss for outputs in found], 3 * [found[0].loss], rtol=1e-6, atol=0.0)


def test_threads():
    """Calls take turns, so that those without labels get their logits, also those of models that share a layer."""
    model, other, given = patch_head(build("Llama")), patch_head(build("Llama")), batch()
    other.lm_head = model.lm_head
    calls = [lambda: model(**given).loss, lambda: model(input_ids=given["input_ids"]).logits]
    calls += [lambda: other(**given).loss, lambda: other(input_ids=given["input_ids"]).logits]
    expected = [call() for call in calls]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: torch.equal(calls[number % 4](), expected[number % 4]), range(80)))


def test_trainer(tmp_path):
    own, ours = pair("Gemma2", CHUNKED)
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(*batch(64, seed=7).values(), strict=True)]
    given = {"save_strategy": "no", "disable_tqdm": True, "report_to": [], "use_cpu": True, "logging_steps": 1}
    given |= {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": 3}
    given |= {"gradient_accumulation_steps": 3, "bf16": True}
    found = []
    for model in (own, ours):
        arguments = transformers.TrainingArguments(str(tmp_path), **given)
        run = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
        run.train()
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        found.append([*losses, run.evaluate()["eval_loss"]])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    # accelerate has wrapped the patched forward
    refused(lambda: patch_head(ours), "already patched")
    assert unpatch_head(ours)(**batch()).logits is not None
    assert patch_head(ours)(**batch()).logits is None


def test_the_first_call_names_the_least_workspace():
    least = least_of(lambda workspace: patch_head(build("Llama"), workspace=workspace)(**batch()))
    patch_head(build("Llama"), workspace=least)(**batch()).loss.backward()


def with_adapters(model: nn.Module, **changes) -> nn.Module:
    """In PEFT, whenever it is called with the same adapters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


@pytest.mark.parametrize("patched_first", [True, False])
def test_lora(patched_first):
    patch, own = partial(patch_head, **CHUNKED), with_adapters(build("Llama"))
    ours = with_adapters(patch(build("Llama"))) if patched_first else patch(with_adapters(build("Llama")))
    compare(own, ours, **batch())
    assert unpatch_head(ours)(**batch()).logits is not None


@pytest.mark.parametrize(
    "family, config, place",
    [
        ("Llama", {"modules_to_save": ["lm_head"]}, "get_output_embeddings"),
        ("Mistral", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "get_input_embeddings"),
    ],
)
def test_an_output_layer_that_peft_copies_is_followed(family, config, place):
    """Its own, or that of tied embeddings; with adapters off, the original."""
    own, ours = (with_adapters(model, **config) for model in pair(family, CHUNKED))
    with torch.no_grad():
        for model in (own, ours):
            getattr(model, place)().modules_to_save["default"].weight.mul_(1.5)
    compare(own, ours, **batch())
    with own.disable_adapter(), ours.disable_adapter():
        torch.testing.assert_close(ours(**batch()).loss, own(**batch()).loss, rtol=1e-6, atol=0.0)


def test_an_adapter_on_the_output_layer_is_refused():
    adapted = partial(with_adapters, target_modules=["lm_head"])
    refused(lambda: patch_head(adapted(build("Llama"))), "lora", "Linear")
    for part in ("", "original_module"):
        copied = with_adapters(build("Llama"), modules_to_save=["lm_head"])
        copied.get_output_embeddings().get_submodule(part).register_forward_hook(lambda *_: None)
        refused(partial(patch_head, copied), "a hook")
    late = adapted(patch_head(build("Llama")))
    refused(lambda: late(**batch()), "lora", "Linear")
    assert late(input_ids=batch()["input_ids"]).logits is not None


def odd(change, own_loss=None, finish=lambda outputs: outputs) -> nn.Module:
    """A model that does `change` to its logits (None: it does without its output layer) and `finish` to its outputs;
    that layer has a bias."""

    class Odd(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids)[0]
            logits = change(self.lm_head(hidden)) if change else hidden @ self.lm_head.weight.T
            loss = (own_loss or self.loss_function)(logits, labels, VOCAB, **kwargs)
            return finish(transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits))

    model = build("Llama", output_bias=True)
    model.__class__ = Odd
    return model


def called(change, family="Llama") -> None:
    """Call a patched model of which `change` has changed the output layer."""
    change(model := patch_head(build(family)))
    model(**batch())


def with_a_hook_on_every_module(kind: str) -> None:
    model = patch_head(build("Llama"))
    with getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None):
        model(**batch())


class Own(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def scaled(logits):
    """In place, under another name."""
    other = logits
    other *= 2.0
    other /= 0.5
    return logits


def with_a_loss_of(shift) -> nn.Module:
    """A model whose loss is written out in it, as in the code that many models bring along."""
    return odd(lambda z: z.float(), lambda z, labels, *_: nn.CrossEntropyLoss()(shift(z), labels[..., 1:].reshape(-1)))


SHIFTS = {
    "view": lambda z: z[..., :-1, :].contiguous().view(-1, VOCAB),
    "reshape": lambda z: z[:, :-1].reshape(-1, VOCAB),
    "from the end": lambda z: z[:, -z.size(1) : -1, :].reshape(-1, z.size(-1)),
    "by a mask": lambda z: z[torch.arange(z.size()[1]).expand(z.shape[:2]) < z.shape[1] - 1],
}
FOLLOWED = {
    "itself scaled in place": partial(odd, lambda z: (z / 3.0, scaled(z))[1]),
    "new ones scaled in place": partial(odd, lambda z: scaled(0.3 * z)),
    "old ones scaled in place": partial(odd, lambda z: (z / 3.0, scaled(z))[0]),
    **{name: partial(with_a_loss_of, shift) for name, shift in SHIFTS.items()},
}
T5 = transformers.T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=VOCAB)
OUTPUT_LAYERS = {
    ".Own that": lambda lm: setattr(lm, "lm_head", Own(16, VOCAB, bias=False)),
    "a hook": lambda lm: lm.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output),
    "hook, which": lambda lm: lm.lm_head.register_full_backward_pre_hook(lambda module, outer: None),
    "(batch, length": lambda lm: lm.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, -3:],)),
    ".Linear that": lambda lm: setattr(lm.lm_head, "forward", lambda hidden: hidden),
    ".Linear that may": lambda lm: lm.lm_head.__dict__.update(forward=lambda hidden: hidden, _hf_hook=object()),
    "on meta": lambda lm: lm.lm_head.to("meta"),
    "has no output layer": lambda lm: setattr(lm, "get_output_embeddings", lambda: nn.Linear(16, VOCAB)),
}
LOGITS = {
    "mean": lambda z: z - z.mean(),
    "cat": lambda z: torch.cat([z, z]),
    "mul": lambda z: torch.mul(other=z, input=torch.ones(1)),
    "arithmetic": lambda z: 1.0 / z,
    "arithmetic, comparison": lambda z: z % 2,
    "scaling": lambda z: z * torch.ones(VOCAB),
    "division": lambda z: z / 0.0,
    "tanh": lambda z: z.tanh().tanh(),
    "indexing": lambda z: z[..., 3:],
    "comparison": lambda z: z * (z == 0),
    "assignment": lambda z: z[: len(z)],
    "in place": lambda z: (z, scaled(z.contiguous()))[0],
    "a change in place": lambda z: (z.contiguous(), scaled(z))[0],
    "Odd asks for no cross-entropy of what its output layer": None,
}
REFUSED = {
    "Linear": lambda: patch_head(nn.Linear(2, 2)),
    "NoneType": lambda: patch_head(None),
    "output layer": lambda: patch_head(build("Qwen3").model),
    "ForMaskedLMLoss": lambda: patch_head(transformers.BertForMaskedLM(build("Bert").config)),
    "encoder": lambda: patch_head(transformers.T5ForConditionalGeneration(T5)),
    "BertLMHeadModel's output layer has a hook": partial(
        called, lambda lm: lm.cls.register_full_backward_hook(print), "Bert"
    ),
    "98 rows on meta": lambda: patch_head(build("Llama")).to("meta")(**{k: v.to("meta") for k, v in batch().items()}),
    "not patched": lambda: unpatch_head(build("Qwen3")),
    "unknown head 'fast'": lambda: patch_head(build("Llama"), head="fast"),
    "softcap": lambda: patch_head(build("Llama"), softcap=30.0),
    "layer has a hook": partial(with_a_hook_on_every_module, "forward"),
    "a hook, which would see": partial(with_a_hook_on_every_module, "forward_pre"),
    "layer has a hook, which": partial(with_a_hook_on_every_module, "full_backward"),
    "has a hook, which would": partial(with_a_hook_on_every_module, "full_backward_pre"),
    **{message: partial(called, change) for message, change in OUTPUT_LAYERS.items()},
    **{what: lambda change=change: patch_head(odd(change))(**batch()) for what, change in LOGITS.items()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_named(message):
    refused(REFUSED[message], message)


@pytest.mark.parametrize("what", FOLLOWED)
def test_what_is_done_to_logits_is_followed(what):
    own = FOLLOWED[what]()
    compare(own, patch_head(copy.deepcopy(own)), **batch())


def test_the_output_layer_is_called_under_what_was_in_force_there():
    """Gradient mode and autocast; hidden states that have changed since are refused."""

    class Odd(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, within=None, late=None, **kwargs):
            hidden = self.model(input_ids)[0] * 1.0
            with within:
                logits = self.lm_head(hidden)
            assert self.lm_head.bias is None and not hasattr(self.lm_head, "nothing")
            if late:
                hidden.mul_(2.0)
            with torch.set_grad_enabled(torch.is_grad_enabled() and late is None):
                return (self.loss_function(logits, labels, VOCAB), logits)

    own = build("Llama")
    own.__class__ = Odd
    ours = patch_head(copy.deepcopy(own), **CHUNKED)
    assert not ours(**batch(), within=torch.no_grad())[0].requires_grad
    assert not ours(**batch(), within=torch.enable_grad(), late=False)[0].requires_grad
    within = torch.autocast("cpu", torch.bfloat16)
    torch.testing.assert_close(ours(**batch(), within=within)[0], own(**batch(), within=within)[0], rtol=1e-2, atol=0.0)
    with torch.inference_mode():
        assert ours(**batch(), within=torch.inference_mode())[0].isfinite()
    patch_head(unpatch_head(ours), return_logits=True)
    assert ours(**batch(), within=within)[1].dtype == torch.bfloat16
    refused(lambda: ours(**batch(), within=torch.enable_grad(), late=True), "Odd", "hidden states")


def test_outputs_keep_what_is_no_field_and_an_ordered_dict_its_keys():
    def noted(outputs):
        outputs.metric = outputs["further"] = 3.0
        outputs["part"] = type(outputs)(logits=outputs.logits)
        return outputs

    got = patch_head(odd(lambda z: z, finish=noted))(**batch())
    assert got.metric == got["further"] == 3.0 and got.logits is None and "logits" not in got
    assert got["part"].logits is None and "logits" not in got["part"]
    assert got.to_tuple()[0] is got.loss
    assert patch_head(odd(lambda z: z, finish=OrderedDict))(**batch())["logits"] is None
