"""Every bad input is a `T1Error` of at most two lines that names the value and what is allowed; nothing is changed."""

from functools import partial
from pathlib import Path

import loop_cases
import pytest
import torch
from loop_cases import assert_same
from refusals import refused

from t1lib.models import build_model
from t1lib.optimizers import OptimizerSpec, Schedule
from t1lib.plan.cost import Choice
from t1lib.train import Trainer, make_trainer

HERE = str(Path(__file__).parent)  # a folder without a model
model = partial(loop_cases.model, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=16)

OPTIONS = [
    ({"mode": "slides"}, ["unknown mode 'slides'", "allowed: gpu, gpu-graph, ckpt, slide, fsdp", "'slide'?"]),
    ({"optimizer": "adam"}, ["unknown optimizer 'adam'", "allowed: sgd, adamw"]),
    ({"loss": "mse"}, ["unknown loss 'mse'", "allowed: cross_entropy, mean_square"]),
    ({"loss": "mean_square", "micro_batch": 1}, ["'mean_square' with micro_batch=1", "allowed: None"]),
    ({"loss": "mean_square"}, ["'mean_square' ends before ['model.norm.weight']", "freeze it"]),
    ({"mode": "gpu-graph", "device": "cpu"}, ["mode 'gpu-graph' on a cpu", "allowed: a CUDA device"]),
    ({"mode": "slide", "choice": Choice(), "gpu_memory": "1GiB", "plan_for": (1, 8)}, ["gpu_memory and choice"]),
    ({"mode": "slide", "gpu_memory": "1GiB"}, ["gpu_memory without plan_for", "(rows, tokens per row)"]),
    ({"mode": "slide", "update_in_backward": True}, ["option of mode 'slide': 'update_in_backward'", "overlap"]),
    ({"mode": "gpu", "slots": 3}, ["slots", "head_options"]),
    ({"micro_batch": 0}, ["micro_batch=0", "allowed: 1 or more"]),
    ({"max_grad_norm": 0.0}, ["max_grad_norm=0.0", "allowed: more than 0"]),
    ({"device": "gpu"}, ["device 'gpu'", "allowed: 'cpu', 'cuda'"]),
    ({"device": "cuda:99"}, ["device 'cuda:99'", "allowed here: "]),
    ({"schedule": "cosine"}, ["schedule='cosine'", "`Schedule`"]),
    ({"optimizer": {"name": "sgd"}}, ["optimizer={'name': 'sgd'}", "`OptimizerSpec`"]),
    ({"head_options": {"reduction": "sum"}}, ["option of the head 'reduction'", "allowed: workspace"]),
]
adamw, sgd, cosine = (partial(OptimizerSpec, "adamw"), partial(OptimizerSpec, "sgd"), partial(Schedule, "cosine"))
SETTINGS = [
    (partial(adamw, master_weights=None, moments="bfloat16"), ["moments='bfloat16'", "master_weights"]),
    (partial(adamw, moments="fp8"), ["moments 'fp8'", "allowed: float32, bfloat16"]),
    (partial(sgd, moments="bfloat16"), ["moments='bfloat16'", "name='adamw'"]),
    (partial(adamw, master_weights=True), ["master_weights=True", "or None"]),
    (partial(adamw, betas=(0.9,)), ["betas (0.9,)", "allowed: two"]),
    (partial(adamw, lr=1e38), ["lr 1e+38", "allowed: a number from 0 to 1e9"]),
    (partial(sgd, lr=-0.1), ["-0.1"]),
    (partial(Schedule, "linear", warmup=-3, total=5), ["warmup=-3", "0 or more"]),
    (partial(Schedule, "step"), ["schedule 'step'", "constant, linear, cosine"]),
    (partial(cosine, warmup=5, total=5), ["total=5", "warmup=5", "beyond warmup"]),
    (partial(build_model, "qwen3-1.7"), ["'qwen3-1.7'", "qwen3-1.7b", "checkpoint folder", "owner/model"]),
    (partial(build_model, "tiny", num_hidden_layer=2), ["num_hidden_layer", "num_hidden_layers"]),
    (partial(build_model, HERE), [HERE, "presets that need no files: tiny"]),
    (partial(build_model, HERE, num_hidden_layers=1), [HERE, "num_hidden_layers", "no preset"]),
]


CALLS = [(lambda given=given: make_trainer(model(), **given), parts) for given, parts in OPTIONS]
CALLS += [(lambda: Trainer(model(), "slide"), ["mode 'slide'", "allowed: 'gpu', 'ckpt'", "`make_trainer`"])]


@pytest.mark.parametrize("call, parts", CALLS + SETTINGS, ids=lambda part: part[0] if isinstance(part, list) else "")
def test_options_settings_and_models(call, parts):
    refused(call, *parts)


def ids(length=11, fourth=3):
    tensor = torch.arange(2 * length).reshape(2, length) % 97
    tensor[0, 3] = fourth
    return tensor


BATCHES = {
    "too large an id": ({"input_ids": ids(fourth=97)}, ["input_ids hold [97]", "allowed: 0 to 96"]),
    "a tensor alone": (ids(), ["a batch of type Tensor"]),
    "no ids": ({"labels": ids()}, ["input_ids: None", "(batch, sequence)"]),
    "no tokens": ({"input_ids": ids()[:, :0]}, ["input_ids: torch.int64 of shape (2, 0)"]),
    "too long": ({"input_ids": ids(length=17)}, ["17 tokens", "16 positions"]),
    "too large a label": ({"input_ids": ids(), "labels": ids(fourth=97)}, ["labels hold [97]", "or -100"]),
    "a key nobody reads": ({"input_ids": ids(), "lables": ids()}, ["'lables'", "allowed: input_ids, and labels"]),
    "labels shifted": ({"input_ids": ids(), "labels": ids()[:, 1:]}, ["labels: torch.int64 of shape (2, 10)"]),
    "no label that counts": ({"input_ids": ids(), "labels": torch.full((2, 11), -100)}, ["no label counts"]),
    "ids of floats": ({"input_ids": ids().float()}, ["input_ids: torch.float32", "allowed: integers"]),
}


@pytest.fixture(scope="module", params=["gpu", "slide"])
def trainer(request):
    """After a step. Tests may train it further."""
    found = make_trainer(model(), request.param, optimizer=OptimizerSpec("adamw", lr=0.1))
    found.step({"input_ids": ids()})
    yield found
    found.close()


LAST = "model.layers.1.mlp.down_proj.weight"  # so that everything before it has already been checked
STATES = {
    "without a weight": (lambda state: state["model"].pop(LAST), ["another model", LAST]),
    "of another shape": (lambda state: state["model"].update({LAST: torch.zeros(32, 49)}), [LAST, "(32, 49)"]),
    "with a name that is none": (lambda state: state["model"].update({1: torch.zeros(1)}), ["another model: 1 is"]),
    "without a parameter's state": (lambda state: state["optimizer"].pop(LAST), [f"no optimizer state for '{LAST}'"]),
    "with an empty one": (lambda state: state["optimizer"].update({LAST: {}}), [f"no optimizer state for '{LAST}'"]),
    "without the states' names": (lambda state: state.update(optimizer=[*state["optimizer"]]), ["is not what"]),
    "of another moment": (
        lambda state: state["optimizer"][LAST].update(exp_avg=torch.zeros(3, 3)),
        [f"exp_avg of '{LAST}'", "(3, 3)", "(32, 48)"],
    ),
    "without an optimizer": (lambda state: state.pop("optimizer"), ["is not what", "KeyError, 'optimizer'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_a_refused_batch_changes_nothing(trainer, name):
    batch, parts = BATCHES[name]
    before = trainer.state_dict()
    refused(lambda: trainer.step(batch), *parts)
    assert_same(trainer.state_dict(), before)


@pytest.mark.parametrize("name", STATES)
def test_a_refused_checkpoint_changes_nothing(trainer, name):
    spoil, parts = STATES[name]
    other = trainer.state_dict()
    trainer.step({"input_ids": ids()})
    before = trainer.state_dict()
    spoil(other)
    refused(lambda: trainer.load_state_dict(other), *parts)
    assert_same(trainer.state_dict(), before)


def test_a_parameter_without_a_state_is_named_even_if_none_is_needed():
    plain = make_trainer(model(), "gpu", optimizer="sgd")
    state = plain.state_dict()
    del state["optimizer"][LAST]
    refused(partial(plain.load_state_dict, state), f"no optimizer state for '{LAST}'")


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_masters_that_a_checkpoint_lacks_are_made_of_its_weights(mode):
    """And those that a trainer has no use for are left out."""
    batch, specs = {"input_ids": ids()}, (adamw(lr=0.1, master_weights=masters) for masters in (None, "whole"))
    plain, wide = (make_trainer(model(dtype=torch.bfloat16), mode, optimizer=spec) for spec in specs)
    plain.step(batch)
    wide.load_state_dict(plain.state_dict())
    for name, weight in plain.state_dict()["model"].items():
        assert torch.equal(wide.state_dict()["optimizer"][name]["master"], weight.float())
    wide.step(batch)
    plain.load_state_dict(wide.state_dict())
    assert plain.evaluate(batch) == wide.evaluate(batch) and plain.steps == 2


def test_models_that_cannot_be_trained():
    for mode in ("gpu", "slide"):
        refused(partial(make_trainer, torch.nn.Linear(2, 2), mode), "model of type Linear", "allowed: a decoder")
    frozen, own = model().requires_grad_(False), model(tie_word_embeddings=False)
    refused(lambda: make_trainer(frozen, "gpu"), "no parameter of the model requires a gradient")
    for name, param in own.named_parameters():
        param.requires_grad_("lm_head" in name or "layers" in name)
    refused(lambda: make_trainer(own, "slide", loss="mean_square"), "before ['lm_head.weight']", "no gradient")
    scaled = model()
    scaled.config.logits_scaling = 8.0
    refused(lambda: make_trainer(scaled, "gpu"), "'qwen3' has logits_scaling=8.0", "allowed here: 1")
