"""Streaming of a model's layers under any training loop, and one loop that compares it with plain PyTorch."""

from importlib import import_module
from typing import Any

from t1lib.train.optimizer import StreamOptimizer
from t1lib.train.stream import stream

_LATER = {  # imported when they are first asked for: transformers takes seconds
    "t1lib.train.loop": ("MODES", "StepRecord", "Trainer", "make_trainer"),
    "t1lib.train.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "t1lib.optimizers": ("OPTIMIZERS", "OptimizerSpec", "Schedule"),
    "t1lib.models": ("PRESETS", "build_model", "sizes"),
}
_HOMES = {name: module for module, names in _LATER.items() for name in names}
__all__ = [*_HOMES, "StreamOptimizer", "stream"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
