"""What a run needs to resume: weights and optimizer state by parameter name, in one format for all modes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import require, shown
from t1lib.train.models import Parts
from t1lib.train.optim import Updater
from t1lib.train.ranks import ALONE


class Stateful:
    """The part of a trainer that saves and restores its state. A part of the state is one layer, or all the rest."""

    model: PreTrainedModel
    parts: Parts
    steps: int
    skipped: int
    ranks = ALONE  # the processes that share the model
    # all updaters, each with the prefix that turns its tensors' names into parameter names
    _named_updaters: Callable[[], list[tuple[str, Updater]]]

    def _local(self, tensor: Tensor) -> Tensor:
        """This process's shard of a parameter or gradient."""
        return tensor

    def _whole(self, param: Tensor, part: Tensor) -> Tensor:
        """Gather a whole tensor (weights or optimizer state) from the processes' shards, cut in the way of `param`."""
        return part

    def _part(self, whole: Tensor) -> Tensor:
        """The inverse of `_whole`: the shard that this process holds."""
        return whole

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to resume: weights and optimizer state by parameter name, and the step; as CPU copies.

        The format is the same in every mode, so a run can change its mode at a checkpoint. If the host cannot hold a
        copy of the model, use `t1lib.train.checkpoint`, which writes the `state_parts` one by one. If several processes
        train the model, all of them must call this, and all get the whole state.
        """
        whole = {"step": self.steps, "skipped": self.skipped, "model": {}, "optimizer": {}}
        for part in self.state_parts():
            for kind, found in self.state_part(part).items():
                whole[kind] |= found
        return whole

    def state_parts(self) -> dict[str, list[str]]:
        """Names of the parameters that are saved together, by part: "layer-0000" and so on, and "rest"."""
        layers = {id(p): i for i, layer in enumerate(self.parts.layers) for p in layer.parameters()}
        parts: dict[str, list[str]] = {}
        for name, param in self.model.named_parameters():
            layer = layers.get(id(param))
            parts.setdefault("rest" if layer is None else f"layer-{layer:04d}", []).append(name)
        return parts

    def state_part(self, part: str) -> dict[str, dict[str, Any]]:
        """Weights (`model`) and optimizer state (`optimizer`) of a part's parameters; whole copies on every rank."""
        names, params = self.state_parts()[part], dict(self.model.named_parameters())
        weights = {n: self._whole(params[n], self._local(params[n].detach()).cpu().clone()) for n in names}
        owners, state = self._owners(), {}
        for name in (n for n in names if n in owners):
            updater, own = owners[name]
            state[name] = {k: self._whole(params[name], v) for k, v in updater.state_of(own).items()}
        return {"model": weights, "optimizer": state}

    def _owners(self) -> dict[str, tuple[Updater, str]]:
        """The updater of each parameter, and the parameter's name in that updater."""
        return {prefix + n: (updater, n) for prefix, updater in self._named_updaters() for n in updater.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises `T1Error`, before any change, if it is of another model."""
        lacking = sorted({"step", "skipped", "model", "optimizer"} - set(state))
        require(not lacking, f"the state lacks {', '.join(lacking)}; allowed: what `state_dict` returned")
        self.check_state(state["model"], state["optimizer"])
        for part in self.state_parts():
            self.load_part(part, state)
        self.steps, self.skipped = state["step"], state["skipped"]

    def check_state(self, model: dict[str, Tensor], optimizer: dict[str, dict[str, Any]]) -> None:
        """Raise `T1Error` unless weights and optimizer state, by parameter name, fit this trainer."""
        params = dict(self.model.named_parameters())
        check_tensors(model, optimizer, params)
        for prefix, updater in self._named_updaters():
            updater.check_state(optimizer, prefix)

    @torch.no_grad()
    def load_part(self, part: str, state: dict[str, Any]) -> None:
        """Restore one part of a saved state, which must have passed `check_state`."""
        params, owners = dict(self.model.named_parameters()), self._owners()
        for name in self.state_parts()[part]:
            self._local(params[name]).copy_(self._part(state["model"][name]))
            if name in owners:
                updater, own = owners[name]
                updater.load(own, {k: self._part(v) for k, v in state["optimizer"][name].items()})


def check_tensors(model: Any, optimizer: Any, params: dict[str, Tensor]) -> None:
    """Raise `T1Error` unless the saved weights are those of `params`, and optimizer state has the shapes of its
    parameter (or one number, for `step`). Floats of any width fit one another, other types only themselves."""
    by_name = isinstance(model, dict) and isinstance(optimizer, dict)
    whole = by_name and all(isinstance(own, dict) for own in optimizer.values())
    require(whole, "the state is not weights by name, and tensors of the optimizer by parameter and name")
    foreign = sorted(map(str, model.keys() - params.keys()))
    require(not foreign, f"the checkpoint has {foreign[:1]}, the model has not: it is of another model")
    for name, param in params.items():
        require(name in model, f"the checkpoint has no parameter {name!r}: it is of another model")
        _check_tensor(repr(name), model[name], param.shape, param.dtype)
        for key, value in optimizer.get(name, {}).items():
            _check_tensor(f"{key} of {name!r}", value, () if key == "step" else param.shape, torch.float32)


def _check_tensor(what: str, saved: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    require(isinstance(saved, Tensor), f"the checkpoint's {what} is {shown(saved)}; allowed: a tensor")
    found = tuple(saved.shape)
    require(found == tuple(shape), f"checkpoint's {what} has shape {found}, allowed: {tuple(shape)}, the model's")
    fits = saved.dtype == dtype or (saved.is_floating_point() and dtype.is_floating_point)
    wider = ", or another float" if dtype.is_floating_point else ""
    require(fits, f"the checkpoint's {what} is of {saved.dtype}, allowed: {dtype}{wider}")
