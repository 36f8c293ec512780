"""A trainer's optimizer state by parameter, and whether what was saved of a run fits a trainer."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.errors import require, shown
from t1lib.train.resident import ResidentOptimizer
from t1lib.train.update import Precision, State, check_state, new_state


def state_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> tuple[State, int]:
    """A parameter's state where it lies, made if there is none yet; and how many updates it has seen."""
    rule = optimizer.param_groups[0]
    if isinstance(optimizer, ResidentOptimizer):
        return optimizer.updates.state_of(param, rule), optimizer.updates.counts[param]
    state = optimizer.state[param]
    for key, value in new_state(param.data, rule, Precision(None)).items():
        if state.get(key) is None:
            state[key] = value
    if "betas" in rule:
        there = param.device if rule["fused"] or rule["capturable"] else "cpu"
        state.setdefault("step", torch.zeros((), device=there))
    return {k: v for k, v in state.items() if k != "step"}, int(state.get("step", 0))


def set_count(optimizer: torch.optim.Optimizer, param: nn.Parameter, count: int) -> None:
    """Say how many updates the parameter has seen, once `state_of` has made its state."""
    if isinstance(optimizer, ResidentOptimizer):
        optimizer.updates.counts[param] = count
    elif "step" in optimizer.state[param]:
        optimizer.state[param]["step"].fill_(count)


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
        check_state(params[name], dict.fromkeys(keys), states[name], repr(name))
