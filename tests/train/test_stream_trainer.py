"""`StreamTrainer` gives what `transformers.Trainer` gives, with the same arguments: losses, norms, weights, files."""

from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from refusals import refused
from stream_cases import assert_same_weights
from stream_models import LENGTH, adapted, data, llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from t1lib.heads.huggingface import patch_head
from t1lib.plan.cost import Choice
from t1lib.train import placing
from t1lib.train.huggingface import StreamTrainer

STEPS = 8
dropping = partial(llama, attention_dropout=0.1)  # draws random numbers in its forward
with_adapters = partial(adapted, dropout=0.3, base=dropping)
in_16_bits = partial(dropping, torch.bfloat16)


@cache
def rows() -> list[dict[str, Tensor]]:
    """40 rows, some of which are padded: at 4 rows per step an epoch ends within a run."""
    (batch,) = data(1, padded=True, rows=40)
    return [{name: value[row] for name, value in batch.items()} for row in range(40)]


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    plain = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1}
    quiet = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(str(folder), **{**plain, **quiet, **given})


def trainer(kind: type, folder: Path, model: nn.Module, stream: Any = None, parts: Any = None, **given: Any) -> Trainer:
    own = {"stream": stream} if kind is StreamTrainer else {}
    data = {"train_dataset": rows(), "eval_dataset": rows()[:8]}
    return kind(model=model, args=arguments(folder, **given), **data, **own, **(parts or {}))


def history(found: Trainer, norms: bool = True) -> list[dict[str, float]]:
    """What was logged at each step and evaluation, without times."""
    kept = ["step", "loss", "learning_rate", "eval_loss"] + ["grad_norm"] * norms
    entries = [{k: v for k, v in entry.items() if k in kept} for entry in found.state.log_history]
    entries = [entry for entry in entries if len(entry) > 1]  # not the summary at the end
    assert sum("loss" in entry for entry in entries) == found.state.global_step
    return entries


def assert_same(plain: Trainer, streamed: Trainer, norms: bool = True) -> None:
    """The same bits. norms: of gradients, too"""
    assert history(streamed, norms) == history(plain, norms)
    assert_same_weights(streamed.model, plain.model)


def train_both(folder: Path, build: Any = dropping, parts: Any = None, prepare: Any = None, **own: Any) -> list:
    """A run with Trainer, and one with StreamTrainer. prepare: is called with each trainer before it trains"""
    found = []
    for kind in (Trainer, StreamTrainer):
        model = build()
        found.append(trainer(kind, folder, model, parts=parts and parts(model), **own))
        if prepare:
            prepare(found[-1])
        found[-1].train()
    return found


def own_optimizer(model: nn.Module) -> dict[str, Any]:
    norms = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD([{"params": others}, {"params": norms, "lr": 0.02}], lr=0.1, momentum=0.9)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))}


CASES: dict[str, dict[str, Any]] = {
    "default arguments": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "autocast": {"bf16": True},
    # norms are summed in float32, where Trainer sums in bfloat16
    "weights in 16 bits": {"build": in_16_bits, "max_grad_norm": 0.0, "stream": {"master_weights": None}},
    "evaluation between steps": {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True},
    "updates in the backward": {"max_grad_norm": 0.0, "stream": {"update_in_backward": True}},
    "adapters with dropout": {"build": with_adapters},
    "an optimizer of her own": {"parts": own_optimizer},
    "after another trainer of the same model": {
        "prepare": lambda found: trainer(type(found), Path(found.args.output_dir), found.model, max_steps=2).train()
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "another head, before": {"parts": lambda model: patch_head(model, head="full") and {}},
    "another head, after, autocast": {"prepare": lambda found: patch_head(found.model, head="full"), "bf16": True},
    "evaluation first": {"prepare": lambda found: found.evaluate()},
    "a budget, accumulation": {
        "build": partial(dropping, pad_token_id=50), "stream": {"gpu_memory": "1GiB"}, "gradient_accumulation_steps": 2,
    },
    "the best checkpoint, loaded at the end": {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,  # the first
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_same_bits_as_trainer(name, tmp_path):
    assert_same(*train_both(tmp_path, **(CASES | SLOW)[name]), norms=name != "weights in 16 bits")


def test_plan_for_and_the_first_batch_plan_the_same(monkeypatch, tmp_path):
    """Also under autocast, which Trainer enters later."""
    seen = []
    monkeypatch.setattr(placing, "choose_plan", lambda work, *rest: seen.append(work) or Choice())
    for given in ({}, {"plan_for": (4, LENGTH)}):
        trainer(StreamTrainer, tmp_path, llama(), {"gpu_memory": "1GiB", **given}, bf16=True, max_steps=1).train()
    first_batch, planned = seen
    assert planned == first_batch


def interrupted(found: Trainer, step: int, event: str, **given: Any) -> Trainer:
    def check(args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            raise InterruptedError

    callback = TrainerCallback()
    setattr(callback, event, check)
    found.add_callback(callback)
    with pytest.raises(InterruptedError):
        found.train(**given)
    found.remove_callback(callback)
    return found


SAVING = {"save_strategy": "steps", "save_steps": 2}
SUMMED = {"gradient_accumulation_steps": 2}
RESUMED: dict[str, dict[str, Any]] = {
    "adapters": {"build": with_adapters},
    "a budget, accumulation": {"stream": {"gpu_memory": "1GiB"}, **SUMMED},
    "split masters": {"build": in_16_bits, "stream": {"master_weights": "split", "moments": "bfloat16"}},
    "begun by Trainer": {"kinds": (Trainer, StreamTrainer)},
    "by Trainer": {"kinds": (StreamTrainer, Trainer)},
    **{
        f"by the same one, {event}": {"kinds": (StreamTrainer, None), "event": event, **SUMMED}
        for event in ("on_substep_end", "on_step_end", "on_pre_optimizer_step")
    },
}
FAST = "split masters"


@pytest.mark.parametrize("name", [FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in RESUMED if n != FAST)])
def test_resumed_run_is_the_unbroken_one(name, tmp_path):
    """kinds: of trainer, which begins and goes on (None: the one that began)"""
    given = {"build": dropping, "kinds": (StreamTrainer, StreamTrainer), "event": "on_step_end", **RESUMED[name]}
    build, (first, then), event = given.pop("build"), given.pop("kinds"), given.pop("event")
    unbroken = trainer(StreamTrainer if given.get("stream") else Trainer, tmp_path / "whole", build(), **given)
    unbroken.train()
    begun = interrupted(trainer(first, tmp_path, build(), **given, **SAVING), 5, event)
    resumed = begun if then is None else trainer(then, tmp_path, build(), **given, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_same(unbroken, resumed)


def test_an_unfinished_checkpoint_is_passed_over_and_a_closed_trainer_goes_on(tmp_path):
    first = trainer(StreamTrainer, tmp_path, dropping(), **SAVING)
    refused(lambda: first.train(resume_from_checkpoint=True), "no complete checkpoint")
    first.train()
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text('{"epoch": ')
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    resumed = trainer(StreamTrainer, tmp_path, dropping(), **SAVING)
    interrupted(resumed, 4, "on_train_begin", resume_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=True)
    assert_same(first, resumed)
    resumed.save_model(str(tmp_path / "saved"))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(saved, first.model)
    resumed.close()
    plain = trainer(Trainer, tmp_path, saved)
    for again in (plain, resumed):  # after `close`, with an ordinary model and a new optimizer
        torch.manual_seed(2)
        again.train()
    assert_same(plain, resumed)


def test_a_checkpoint_that_another_run_was_replacing_is_passed_over(tmp_path, monkeypatch):
    """Its weights would go on with the optimizer's state of the run before."""
    trainer(StreamTrainer, tmp_path, dropping(), **SAVING, max_steps=2).train()
    second = trainer(StreamTrainer, tmp_path, dropping(), **SAVING, max_steps=2)
    monkeypatch.setattr(second, "_save_optimizer_and_scheduler", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        second.train()
    refused(lambda: second.train(resume_from_checkpoint=True), "no complete checkpoint")


def test_weights_that_are_saved_alone_do_not_go_on_with_an_earlier_run_s_state(tmp_path):
    for folder, own in (("", {}), ("", {"save_only_model": True}), ("empty", {"save_only_model": True})):
        trainer(StreamTrainer, tmp_path / folder, dropping(), **SAVING, max_steps=2, **own).train()
    resumed = [trainer(StreamTrainer, tmp_path / folder, dropping(), **SAVING) for folder in ("", "empty")]
    for each in resumed:
        torch.manual_seed(2)
        each.train(resume_from_checkpoint=True)
    assert_same(*resumed)


def test_what_a_callback_puts_beside_a_checkpoint_stays(tmp_path):
    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            (tmp_path / f"checkpoint-{state.global_step}").mkdir(exist_ok=True)
            (tmp_path / f"checkpoint-{state.global_step}" / "notes.txt").write_text("mine")

    for _ in range(2):
        trainer(StreamTrainer, tmp_path, dropping(), **SAVING, max_steps=2, parts={"callbacks": [Noting()]}).train()
    assert (tmp_path / "checkpoint-2" / "notes.txt").read_text() == "mine"


def test_nothing_but_stream_moves_model_and_state(tmp_path, monkeypatch):
    moved, model = [], dropping()
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda self, *_: moved.append("model") or self)
    monkeypatch.setattr("accelerate.optimizer.move_to_device", lambda state, _: moved.append("state") or state)
    found = trainer(StreamTrainer, tmp_path, model)
    found.train()
    found.evaluate()
    assert moved == []


def test_a_trainer_whose_second_argument_is_another(tmp_path):
    """As those of TRL have a model of reference, or functions of reward."""

    class Other(Trainer):
        def __init__(self, model: Any = None, functions: Any = None, args: Any = None, **named: Any) -> None:
            super().__init__(model=model, args=args, **named)
            self.functions = functions

    class Both(StreamTrainer, Other):
        pass

    found = Both(model=dropping(), functions="others", args=arguments(tmp_path), train_dataset=rows(), stream={})
    found.train()
    assert found.functions == "others" and found.streamed and len(history(found)) == STEPS


REFUSED: dict[str, dict[str, Any]] = {
    "activation_checkpointing|gradient_checkpointing": {"gradient_checkpointing": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "torch_compile": {"torch_compile": True},
    "max_grad_norm": {"stream": {"update_in_backward": True}},
    "gradient_accumulation_steps": {"stream": {"update_in_backward": True}, "max_grad_norm": 0.0, **SUMMED},
    "micro_batches": {"stream": {"micro_batches": 1}},
    "device": {"stream": {"device": "cpu"}},
    "15GiB": {"stream": "15GiB"},
    "Adafactor": {"optim": "adafactor"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    model = dropping()
    refused(lambda: trainer(StreamTrainer, tmp_path, model, **REFUSED[name]).train(), match=name)
    assert all(type(p) is nn.Parameter for p in model.parameters())  # nothing was changed
    assert model(input_ids=rows()[0]["input_ids"][None]).logits.isfinite().all()


def test_refused_models_and_arguments(tmp_path):
    recomputing = dropping()
    recomputing.gradient_checkpointing_enable()
    refused(trainer(StreamTrainer, tmp_path, recomputing).train, "checkpointing")
    refused(trainer(StreamTrainer, tmp_path, dropping(), {"accumulate": False}, **SUMMED).train, "accumulate=False")
    for name, value in (("deepspeed", {"zero_optimization": {}}), ("fsdp", "full_shard"), ("fp16", True)):
        given = arguments(tmp_path)
        setattr(given, name, value)  # not earlier, as TrainingArguments asks for what is not here
        refused(partial(StreamTrainer, dropping(), given), name)
    refused(partial(StreamTrainer, "a name", arguments(tmp_path)), "model of type str")
    refused(partial(StreamTrainer, dropping(), str(tmp_path)), "args of type str")
