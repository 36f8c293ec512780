"""The specification of an optimizer, and the learning-rate schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from t1lib.errors import choose, is_number, is_whole, require

OPTIMIZERS = ("sgd", "adamw")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer and its hyperparameters. Defaults are PyTorch's, except for lr and for weight decay, which is off.

    master_weights  keep a float32 master of each 16-bit parameter, and moments in float32 (but see `moments`); by
                    default for adamw, whose updates of 16-bit parameters would mostly round to nothing
    split_master    store only those 16 bits of the master that the parameter lacks: saves 2 bytes per parameter (not
                    for layers that the host updates while a GPU updates others)
    moments         "float32", or "bfloat16" for AdamW's moments beside a master, with stochastic rounding (rounding
                    to nearest would lose changes of a thousandth, which 8 bits cannot represent)
    """

    name: str = "sgd"
    lr: float = 1e-4
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    master_weights: bool | None = None
    split_master: bool = False
    moments: str = "float32"

    def __post_init__(self) -> None:
        choose("optimizer", self.name, OPTIMIZERS)
        if self.master_weights is None:
            object.__setattr__(self, "master_weights", self.name == "adamw")
        choose("moments", self.moments, MOMENTS)
        for name in ("lr", "weight_decay", "momentum", "eps"):
            value = getattr(self, name)
            fits = is_number(value) and 0 <= value < math.inf
            require(fits, f"{name} {value!r}; allowed: a finite number, 0 or more")
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        betas = pair and all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        require(betas, f"betas {self.betas!r}; allowed: two, each from 0 to below 1")
        needs = self.split_master or self.moments != "float32"
        require(
            not needs or (self.master_weights and self.name == "adamw"),
            "split_master and moments='bfloat16' are for name='adamw' with master_weights=True",
        )


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate by step: linear warmup from 0 over `warmup` steps, then constant, or decay to
    `least` at the end of `total` steps, linearly or along a cosine."""

    name: str = "constant"
    warmup: int = 0
    total: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        choose("schedule", self.name, SCHEDULES)
        for name in ("warmup", "total"):
            value = getattr(self, name)
            require(is_whole(value, 0), f"schedule of {name}={value!r} steps; allowed: 0 or more, whole numbers")
        fits = is_number(self.least) and 0 <= self.least <= 1
        require(fits, f"schedule of least={self.least!r}; allowed: a factor from 0 to 1")
        fits = self.name == "constant" or self.total > self.warmup
        require(fits, f"schedule of total={self.total} steps, warmup={self.warmup}; allowed: total beyond warmup")

    def __call__(self, step: int) -> float:
        """The factor at step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.name == "constant":
            return 1.0
        done = min((step - self.warmup) / (self.total - self.warmup), 1.0)
        down = 1.0 - done if self.name == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
        return self.least + (1.0 - self.least) * down


def spec_for(spec: OptimizerSpec, params: Iterable[Tensor]) -> OptimizerSpec:
    """The spec for a model with these parameters: without masters if none of them has 16 bits."""
    if any(param.dtype.itemsize == 2 for param in params):
        return spec
    return replace(spec, master_weights=False, split_master=False, moments="float32")


def state_bytes(param: Tensor, spec: OptimizerSpec) -> int:
    """Bytes of a parameter's optimizer state: moments, and the whole or split master."""
    wide = spec.master_weights and param.dtype != torch.float32
    moment = MOMENTS[spec.moments].itemsize if wide else param.dtype.itemsize
    count = 2 if spec.name == "adamw" else int(spec.momentum > 0)
    return param.numel() * (count * moment + (2 if spec.split_master else 4) * wide)


def has_master(param: Tensor, spec: OptimizerSpec) -> bool:
    """Whether a whole master is kept beside the parameter, from which the parameter can be restored."""
    return spec.master_weights and not spec.split_master and param.dtype != torch.float32
