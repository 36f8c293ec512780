"""Tasks for the ranks of test_several_gpu.py, importable by name in their processes."""

from typing import Any

import torch

from t1lib.measure.records import Records
from t1lib.train import OptimizerSpec, build_model, make_trainer

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}


def train_all(records: Records, device: torch.device, cases: dict[str, dict[str, Any]]) -> None:
    """Run `train` for each case. cases: its arguments by the name of the case, which is recorded as the phase"""
    for phase, settings in cases.items():
        train(records, device, phase, **settings)


def train(
    records: Records, device: torch.device, phase: str, *, mode: str, dtype: str, steps: int,
    optimizer: dict[str, Any], shared: dict[str, Any], **own: Any,
) -> None:  # fmt: skip
    """Record the losses of a batch of six rows, `alone` in mode gpu on each rank's device and on all ranks `together`,
    and how far apart the two end up in their weights, relative to how far these have moved."""
    options = shared | {"optimizer": OptimizerSpec(**optimizer), "device": str(device)}
    models = [build_model("tiny", dtype=getattr(torch, dtype), **SHAPE) for _ in range(2)]
    before = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    trainers = {"alone": make_trainer(models[0], "gpu", **options)}
    trainers["together"] = make_trainer(models[1], mode, **options, **own)
    ids = torch.randint(512, (6, 128), generator=torch.Generator().manual_seed(3))
    for name, trainer in trainers.items():
        for step in range(steps):
            records.add(name, "loss", trainer.step({"input_ids": ids}).loss, phase=phase, step=step)
    found, wanted = (trainers[name].state_dict()["model"] for name in ("together", "alone"))
    apart = max(float((found[n] - w).norm() / (w - before[n]).norm()) for n, w in wanted.items())
    records.add("together", "apart", apart, phase=phase)
    trainers["together"].close()
