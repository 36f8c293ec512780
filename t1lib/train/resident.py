"""Optimizers of parameters that stay where they are: PyTorch's own, or the kit's for 16-bit ones with masters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from t1lib.optimizers import OptimizerSpec
from t1lib.train.optimizer import ResidentUpdates, rules_of
from t1lib.train.update import Precision


def precision_of(spec: OptimizerSpec) -> Precision:
    """How a spec wants state to be kept."""
    masters = ("split" if spec.split_master else "whole") if spec.master_weights else None
    return Precision(masters, spec.moments)


def make_optimizer(
    spec: OptimizerSpec, params: Iterable[nn.Parameter], fused: bool, **options: Any
) -> torch.optim.Optimizer:
    """`torch.optim.AdamW` or `SGD` by the spec. options: further arguments of its class"""
    common = {"lr": spec.lr, "weight_decay": spec.weight_decay, "fused": fused or None, **options}
    if spec.name == "adamw":
        return torch.optim.AdamW(params, betas=spec.betas, eps=spec.eps, **common)
    return torch.optim.SGD(params, momentum=spec.momentum, **common)


class ResidentOptimizer(torch.optim.Optimizer):
    """As the optimizer that it is made of, with state kept as `precision` says: float32 masters of 16-bit parameters.

    device   where the model computes; the parameters may be on the CPU
    """

    def __init__(self, optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._device, self.updates = device, ResidentUpdates(precision, self.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.updates.step(self.param_groups, rules_of(self.param_groups, self._device), lambda _: True)
