"""Models, batches and comparisons that the tests of the training loop share."""

from functools import partial
from typing import Any

import torch
from stream_models import data, frozen

from t1lib.models import build_model
from t1lib.optimizers import OptimizerSpec, Schedule
from t1lib.train.loop import Trainer

SMALL = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 5, "vocab_size": 97, "head_dim": 8}
assert_same = partial(torch.testing.assert_close, rtol=0.0, atol=0.0)  # bits, unless bounds are given
OPTIMIZERS = {
    "sgd": OptimizerSpec("sgd", lr=0.1),
    "momentum": OptimizerSpec("sgd", lr=0.1, momentum=0.9),
    "adamw": OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1),
}
CLIPPED = {"max_grad_norm": 0.5, "schedule": Schedule("cosine", warmup=2, total=10)}


def model(preset: str = "tiny", dtype: torch.dtype = torch.float32, **more: Any):
    return build_model(preset, dtype=dtype, **(SMALL | more))


of_layers = partial(frozen, r"^(?!model\.layers)", model)  # only the layers are trained: T1M1's setting


def ragged(count: int = 3) -> list[dict]:
    """Batches of five rows, each row with a number of ignored tokens of its own."""
    return [{name: batch[name] for name in ("input_ids", "labels")} for batch in data(count, padded=True, rows=5)]


def even(count: int = 3, rows: int = 6) -> list[dict]:
    return [{"input_ids": batch["input_ids"]} for batch in data(count, rows=rows)]


def run(trainer: Trainer, data: list[dict] | None = None) -> tuple[list[tuple[float, float]], dict]:
    """Losses and gradient norms, and the state at the end."""
    records = [trainer.step(batch) for batch in data or ragged()]
    state = trainer.state_dict()
    trainer.close()
    return [(record.loss, record.grad_norm) for record in records], state
