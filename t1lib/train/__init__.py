"""Trainers of causal language models that differ in where the weights live, not in what they compute."""

from typing import Any

from transformers import PreTrainedModel

from t1lib.errors import choose
from t1lib.train.models import PRESETS, build_model, sizes, split
from t1lib.train.optim import OPTIMIZERS, OptimizerSpec
from t1lib.train.slide import SlideTrainer
from t1lib.train.trainer import CkptTrainer, GpuTrainer, StepRecord, Trainer

MODES: dict[str, type[Trainer]] = {"gpu": GpuTrainer, "ckpt": CkptTrainer, "slide": SlideTrainer}


def make_trainer(model: PreTrainedModel, mode: str = "gpu", **options: Any) -> Trainer:
    """A trainer of `model` in one of `MODES`; `options` as its class describes them.

    All modes compute the same losses, gradients and updated weights: bit for bit on a CPU in float32.
    """
    return MODES[choose("mode", mode, MODES)](model, **options)


__all__ = [
    "MODES",
    "OPTIMIZERS",
    "PRESETS",
    "CkptTrainer",
    "GpuTrainer",
    "OptimizerSpec",
    "SlideTrainer",
    "StepRecord",
    "Trainer",
    "build_model",
    "make_trainer",
    "sizes",
    "split",
]
