"""The specification of an optimizer and of its state, and the learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import choose, is_number, is_whole, require, shown

OPTIMIZERS = ("sgd", "adamw")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("constant", "linear", "cosine")
MASTERS = ("whole", "split")

Rule = dict[str, Any]  # a parameter group without its parameters


@dataclass(frozen=True)
class Precision:
    """How the optimizer state of 16-bit parameters is kept; that of others has their dtype.

    masters   "whole": a float32 master of each parameter, moments in float32 (but see `moments`); "split": of the
              master, only those 16 bits that the bfloat16 parameter lacks; None: state in the parameter's dtype
    moments   "float32", or "bfloat16" for AdamW's moments beside a master, with stochastic rounding (rounding to
              nearest would lose changes of a thousandth: bfloat16 has only 8 significant bits)
    """

    masters: str | None = "whole"
    moments: str = "float32"

    def __post_init__(self) -> None:
        known = self.masters is None or self.masters in MASTERS
        require(known, f"master_weights={shown(self.masters)}; allowed: 'whole', 'split', or None")
        choose("moments", self.moments, MOMENTS)
        require(self.moments == "float32" or self.masters is not None, "moments='bfloat16' is for master_weights")

    def state_dtypes(self, param: Tensor, *rules: Rule) -> dict[str, torch.dtype]:
        """Keys and dtypes of the state, apart from "step", that a parameter needs for any of these rules."""
        wide, found = self.masters is not None and param.dtype.itemsize == 2, {}
        fits = not wide or self.masters == "whole" or param.dtype == torch.bfloat16
        require(fits, f"master_weights='split' with a parameter of {param.dtype}; allowed: torch.bfloat16")
        plain = torch.float32 if wide else param.dtype
        for rule in rules:
            if "betas" in rule:
                found |= dict.fromkeys(("exp_avg", "exp_avg_sq"), MOMENTS[self.moments] if wide else plain)
            elif rule.get("momentum"):
                require(self.moments == "float32", "moments='bfloat16' with momentum of SGD; allowed: with AdamW")
                found["momentum_buffer"] = plain
        master = {"low": torch.int16} if self.masters == "split" else {"master": torch.float32}
        return found | (master if wide else {})


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer, "sgd" or "adamw", with its hyperparameters: momentum is for sgd, betas and eps are for adamw.
    Defaults are PyTorch's, except for lr and for weight decay, which is off. `T1Error` for other names or values: betas
    are at least 0 and below 1, other numbers from 0 to 1e9.

    master_weights   `masters` of `Precision`: 16-bit parameters have float32 ones, also with sgd, unless it is None
    moments          `moments` of `Precision`; "bfloat16" is for adamw alone
    """

    name: str = "sgd"
    lr: float = 1e-4
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    master_weights: str | None = "whole"
    moments: str = "float32"

    def __post_init__(self) -> None:
        choose("optimizer", self.name, OPTIMIZERS)
        for name in ("lr", "weight_decay", "momentum", "eps"):
            value = getattr(self, name)
            fits = is_number(value) and 0 <= value <= 1e9  # products and quotients of them fit float32
            require(fits, f"{name} {value!r}; allowed: a number from 0 to 1e9")
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        betas = pair and all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        require(betas, f"betas {self.betas!r}; allowed: two, each from 0 to below 1")
        fits = self.precision.moments == "float32" or self.name == "adamw"
        require(fits, f"moments={self.moments!r} with name={self.name!r}; allowed: with name='adamw'")

    @property
    def precision(self) -> Precision:
        return Precision(self.master_weights, self.moments)

    def state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """Keys and dtypes of a parameter's state."""
        rule = {"betas": self.betas} if self.name == "adamw" else {"momentum": self.momentum}
        return self.precision.state_dtypes(param, rule)


def masters_for(dtype: str, split: bool) -> str | None:
    """`master_weights` for weights of this dtype. split: whether masters hold only the bits that the weights lack"""
    require(not split or dtype != "float32", "split masters of float32 weights; allowed: of bfloat16 weights")
    return None if dtype == "float32" else "split" if split else "whole"


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rate at each step: linear warmup over `warmup` steps, then, by `name`, "constant", or
    "linear" or "cosine" decay to 0 after `total` steps, which must be more than `warmup` (else `T1Error`)."""

    name: str = "constant"
    warmup: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        choose("schedule", self.name, SCHEDULES)
        for name in ("warmup", "total"):
            value = getattr(self, name)
            require(is_whole(value, 0), f"schedule of {name}={value!r} steps; allowed: 0 or more, whole numbers")
        fits = self.name == "constant" or self.total > self.warmup
        require(fits, f"schedule of total={self.total} steps, warmup={self.warmup}; allowed: total beyond warmup")

    def __call__(self, step: int) -> float:
        """The factor at step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.name == "constant":
            return 1.0
        done = min((step - self.warmup) / (self.total - self.warmup), 1.0)
        return 1.0 - done if self.name == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
