"""Optimizers of parameters that stay where they are: PyTorch's own, or the kit's for 16-bit ones with masters; their
state, and whether what was saved of a run fits."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.errors import require, shown
from t1lib.optimizers import OptimizerSpec
from t1lib.train.optimizer import ResidentUpdates, StreamOptimizer, rules_of
from t1lib.train.update import Precision, State, check_state, new_state, shown_state, take_state


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


def updates_of(optimizer: torch.optim.Optimizer) -> ResidentUpdates | None:
    """What keeps the optimizer's state; None: it is one of PyTorch's own."""
    if isinstance(optimizer, StreamOptimizer):
        return optimizer._engine.resident
    return optimizer.updates if isinstance(optimizer, ResidentOptimizer) else None


def saved_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, weight: Tensor) -> State:
    """A parameter's state, however it is kept; before the first update, what it starts from. weight: its values"""
    updates = updates_of(optimizer)
    if updates is None:
        return _plain_state(optimizer, param)
    state = updates.state_of(param, optimizer.param_groups[0])
    return shown_state(weight, state, updates.counts[param])


def restore_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, weight: Tensor, saved: State) -> None:
    """Take over what `saved_state` returned."""
    updates = updates_of(optimizer)
    if updates is not None:
        updates.counts[param] = take_state(weight, updates.state_of(param, optimizer.param_groups[0]), saved)
        return
    state = _plain_state(optimizer, param)
    count = take_state(weight, {key: value for key, value in state.items() if key != "step"}, saved)
    if "step" in state:
        state["step"].fill_(count)


def _plain_state(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> State:
    """The state in one of PyTorch's own optimizers, made if there is none yet."""
    rule, state, plain = optimizer.param_groups[0], optimizer.state[param], Precision(masters=None)
    if any(state.get(key) is None for key in plain.kinds(param, rule)):
        state.update(new_state(param.data, rule, plain))
    if "betas" in rule:
        there = param.device if rule["fused"] or rule["capturable"] else "cpu"
        state.setdefault("step", torch.zeros((), device=there))
    return {key: value for key, value in state.items() if value is not None}


def check_saved(state: Mapping[str, Any], params: dict[str, Tensor], trained: dict[str, Collection[str]]) -> None:
    """Raise `T1Error` unless it has the step, weights by name, and the optimizer's tensors by name and key. Floats of
    any width fit one another, other types only themselves.

    params    the model's, by name
    trained   keys of the optimizer's state of those that are trained, by name
    """
    lacking = sorted({"step", "model", "optimizer"} - set(state))
    require(not lacking, f"the state lacks {', '.join(lacking)}; allowed: what `state_dict` returned")
    weights, states = state["model"], state["optimizer"]
    by_name = isinstance(weights, dict) and isinstance(states, dict)
    whole = by_name and all(isinstance(own, dict) for own in states.values())
    require(whole, "the state is not weights by name, and tensors of the optimizer by parameter and key")
    odd = sorted(map(str, weights.keys() ^ params.keys()))
    require(not odd, f"the checkpoint is of another model: only one of them has {odd[:1]}")
    for name, param in params.items():
        saved = weights[name]
        require(isinstance(saved, Tensor), f"the checkpoint's {name!r} is {shown(saved)}; allowed: a tensor")
        alike = saved.dtype == param.dtype or (saved.is_floating_point() and param.is_floating_point())
        require(
            alike and saved.shape == param.shape,
            f"the checkpoint's {name!r} is {saved.dtype} of shape {tuple(saved.shape)}; allowed: {param.dtype} of "
            f"shape {tuple(param.shape)}, the model's",
        )
    for name, keys in trained.items():
        found = name in states and bool(states[name] or not keys)
        require(found, f"the checkpoint has no optimizer state for {name!r}")
        check_state(params[name], keys, states[name], repr(name))
