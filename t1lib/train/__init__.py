"""Trainers of causal language models that differ in where the weights live, not in what they compute."""

import inspect
from typing import Any

from transformers import PreTrainedModel

from t1lib.errors import choose
from t1lib.train.fsdp import FsdpTrainer
from t1lib.train.models import PRESETS, build_model, sizes, split
from t1lib.train.resident import CkptTrainer, GpuTrainer
from t1lib.train.slide import SlideTrainer
from t1lib.train.optimizer import StreamOptimizer
from t1lib.train.spec import OPTIMIZERS, OptimizerSpec, Schedule
from t1lib.train.stream import stream
from t1lib.train.trainer import StepRecord, Trainer

MODES: dict[str, type[Trainer]] = {
    "gpu": GpuTrainer,
    "ckpt": CkptTrainer,
    "slide": SlideTrainer,
    "fsdp": FsdpTrainer,
}


def make_trainer(model: PreTrainedModel, mode: str = "gpu", **options: Any) -> Trainer:
    """Make a trainer of `model` in one of `MODES`; `options` are keyword arguments of that trainer's class.

    All modes compute the same losses, gradients and updated weights: bit for bit on a CPU in float32, in one process.
    """
    trainer = MODES[choose("mode", mode, MODES)]
    for option in options:
        choose(f"option of mode {mode!r}:", option, _options_of(trainer))
    return trainer(model, **options)


def _options_of(trainer: type[Trainer]) -> list[str]:
    """Names of the keyword arguments of a trainer's class: its own, and those that all trainers share."""
    accepted = [p for c in (trainer, Trainer) for p in inspect.signature(c.__init__).parameters.values()]
    return list(dict.fromkeys(p.name for p in accepted if p.kind is p.KEYWORD_ONLY))


__all__ = [
    "MODES",
    "OPTIMIZERS",
    "PRESETS",
    "CkptTrainer",
    "FsdpTrainer",
    "GpuTrainer",
    "OptimizerSpec",
    "Schedule",
    "SlideTrainer",
    "StepRecord",
    "StreamOptimizer",
    "Trainer",
    "build_model",
    "make_trainer",
    "sizes",
    "split",
    "stream",
]
