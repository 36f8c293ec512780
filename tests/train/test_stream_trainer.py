"""`StreamTrainer` gives what `transformers.Trainer` gives, with the same arguments: losses, norms, weights, files."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from t1lib.errors import T1Error
from t1lib.heads.huggingface import patch_head
from t1lib.train.huggingface import StreamTrainer

STEPS = 12
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 61}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}


def make_model(dtype: torch.dtype = torch.float32, adapters: bool = False) -> nn.Module:
    """A small model that draws random numbers in its forward, the same at each call."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)
    if not adapters:
        return model
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"]))


@cache
def rows() -> list[dict[str, Tensor]]:
    """40 rows of 9 tokens, some of which are padding: at 4 rows per step an epoch ends within a run."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for tokens in torch.randint(0, SHAPE["vocab_size"], (40, 9), generator=generator):
        length = int(torch.randint(4, 10, (), generator=generator))
        mask = (torch.arange(9) < length).long()
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)})
    return found


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    plain = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1}
    quiet = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(str(folder), **{**plain, **quiet, **given})


def trainer(kind: type, folder: Path, model: nn.Module, stream: Any = None, parts: Any = None, **given: Any) -> Trainer:
    own = {"stream": stream} if kind is StreamTrainer else {}
    data = {"train_dataset": rows(), "eval_dataset": rows()[:8]}
    return kind(model=model, args=arguments(folder, **given), **data, **own, **(parts or {}))


def history(found: Trainer) -> list[dict[str, float]]:
    """What was logged, without times."""
    entries = [{k: v for k, v in e.items() if "runtime" not in k and "per_second" not in k} for e in found.state.log_history]
    assert sum("loss" in entry for entry in entries) == STEPS
    return entries


def assert_same(plain: Trainer, streamed: Trainer, tolerance: float = 0.0) -> None:
    for one, other in zip(history(plain), history(streamed), strict=True):
        assert one == (other if tolerance == 0 else pytest.approx(other, rel=tolerance))
    weights = streamed.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def own_optimizer(model: nn.Module) -> dict[str, Any]:
    norms = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD([{"params": others}, {"params": norms, "lr": 0.02}], lr=0.1, momentum=0.9)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))}


CASES: dict[str, dict[str, Any]] = {
    "default arguments": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "autocast": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "cosine schedule with warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "evaluation between steps": {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True},
    "unclipped": {"max_grad_norm": 0.0},
    "updates in the backward": {"max_grad_norm": 0.0, "stream": {"update_in_backward": True}},
    "bfloat16 weights": {"dtype": torch.bfloat16, "stream": {"master_weights": None}},
    "adapters with dropout": {"adapters": True},
    "adapters, autocast": {"adapters": True, "bf16": True},
    "a loss of her own": {"parts": lambda model: {"compute_loss_func": own_loss}},
    "an optimizer of her own": {"parts": own_optimizer},
}


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_trainer(name, tmp_path):
    case = dict(CASES[name])
    parts, stream = case.pop("parts", lambda model: {}), case.pop("stream", None)
    built = {key: case.pop(key) for key in ("dtype", "adapters") if key in case}
    found = []
    for kind in (Trainer, StreamTrainer):
        model = make_model(**built)
        found.append(trainer(kind, tmp_path, model, stream, parts(model), **case))
        found[-1].train()
    assert_same(*found)
