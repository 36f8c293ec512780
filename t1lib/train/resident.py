"""Optimizers of parameters that stay where they are: PyTorch's own, or the kit's for 16-bit ones with masters and for
those on the host beside a GPU. Also their state, and the check that a saved state fits."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from t1lib.errors import T1Error, reason, require, shown
from t1lib.optimizers import OptimizerSpec, Precision, Rule
from t1lib.train.update import State, check_state, follow, new_state, step_tensor, update


def make_optimizer(
    spec: OptimizerSpec, params: Iterable[nn.Parameter], fused: bool, capturable: bool = False
) -> torch.optim.Optimizer:
    """`torch.optim.AdamW` or `SGD` by the spec. capturable: whether it must run in a CUDA graph"""
    common = {"lr": spec.lr, "weight_decay": spec.weight_decay, "fused": fused or None}
    if spec.name == "adamw":
        return torch.optim.AdamW(params, betas=spec.betas, eps=spec.eps, capturable=capturable, **common)
    return torch.optim.SGD(params, momentum=spec.momentum, **common)


class ResidentOptimizer(torch.optim.Optimizer):
    """Works as the AdamW or SGD that it is made from, but keeps state as `precision` says, such as float32 masters.

    device   where the model computes; the parameters, with their state, may be on the CPU
    groups   number of each parameter's group, by the parameter's id
    counts   updates so far, by parameter; a parameter that is missing has no state yet
    """

    def __init__(self, optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.precision, self._device = precision, device
        self.groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self.counts: dict[nn.Parameter, int] = {}
        self._known: dict[nn.Parameter, tuple[int, int]] = {}  # `version_of` each, when its master last fit

    def rules(self) -> list[Rule]:
        """The groups' hyperparameters as they are now. If the CPU computes, PyTorch's choice of implementation is kept,
        for bitwise equal results; with a GPU, it is the fused one, which moves the least memory."""
        cuda = self._device.type == "cuda"
        own, rate = ({"foreach": False, "fused": True}, float) if cuda else ({}, deepcopy)  # schedules write to tensors
        plain = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return [rule | {"lr": rate(rule["lr"])} | own for rule in plain]

    def state_of(self, param: nn.Parameter) -> State:
        """The parameter's state; its master follows values that were written to it since the last update."""
        if param not in self.counts:
            self.counts[param], self._known[param] = 0, version_of(param)
            state = new_state(param, self.param_groups[self.groups[id(param)]], self.precision)
            if state:
                self.state[param] = state
        state = self.state.get(param, {})
        if "master" in state and self._known.get(param, version_of(param)) != version_of(param):
            follow(state["master"], param.data)
        return state

    @torch.no_grad()
    def step(self) -> None:
        self.update()

    def update(self, elsewhere: Collection[int] = ()) -> None:
        """Update every parameter that has a gradient. elsewhere: ids of those that are updated in another way"""
        for group, rule in zip(self.param_groups, self.rules(), strict=True):
            alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if id(param) not in elsewhere and param.grad is not None:
                    self.state_of(param)
                    self.counts[param] += 1
                    alike[self.counts[param], param.dtype, param.device].append(param)
            for (count, *_), params in alike.items():
                weights, grads = [p.data for p in params], [p.grad for p in params]
                update(weights, grads, [self.state.get(p, {}) for p in params], rule, count)
                torch.autograd.graph.increment_version(params)  # PyTorch refuses a backward of an earlier forward
                self._known |= {p: version_of(p) for p in params}


def version_of(param: Tensor) -> tuple[int, int]:
    """It changes if somebody writes to the parameter, or assigns `p.data`; not if an update writes through `p.data`."""
    return param._version, param.data_ptr()


def state_in(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> tuple[State, dict[nn.Parameter, int]]:
    """A parameter's state in an optimizer, made if there is none yet. With it, the counts of updates by parameter that
    the kit's optimizers keep; a new dict for PyTorch's, whose counts are part of the state."""
    if isinstance(optimizer, ResidentOptimizer):
        return optimizer.state_of(param), optimizer.counts
    rule, state, plain = optimizer.param_groups[0], optimizer.state[param], Precision(masters=None)
    if any(state.get(key) is None for key in plain.state_dtypes(param, rule)):
        state.update(new_state(param.data, rule, plain))
    if "betas" in rule:
        there = param.device if rule["fused"] or rule["capturable"] else "cpu"
        state.setdefault("step", step_tensor(0, there))
    return {key: value for key, value in state.items() if value is not None}, {}


def check_saved(state: Mapping[str, Any], params: dict[str, Tensor], trained: dict[str, Collection[str]]) -> None:
    """Raise `T1Error` unless `state` has the step, weights that fit `params` by name and, for each name in `trained`,
    optimizer state with these keys. Floats of any width fit one another, other dtypes only themselves."""
    try:
        weights, states, _ = (state[key] for key in ("model", "optimizer", "step"))
        found, own = ({name: _form(tensor) for name, tensor in each.items()} for each in (weights, params))
        odd = next((name for name in own | found if own.get(name) != found.get(name)), None)
        there = f"{shown(odd)} is {found.get(odd, 'missing')}; allowed: {own.get(odd, 'none of that name')}"
        require(odd is None, f"the checkpoint is of another model: {there}")
        for name, keys in trained.items():
            there = name in states and bool(states[name] or not keys)
            require(there, f"the checkpoint has no optimizer state for {name!r}")
            check_state(params[name], keys, states[name], repr(name))
    except (LookupError, TypeError, AttributeError) as error:
        raise T1Error(f"the state is not what `state_dict` returned: {type(error).__name__}, {reason(error)}") from None


def _form(tensor: Tensor) -> str:
    kind = "floats" if tensor.is_floating_point() else tensor.dtype
    return f"{kind} of shape {tuple(tensor.shape)}"
