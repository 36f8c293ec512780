"""What a run needs to go on: weights and optimizer state by parameter name, in one format for all modes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.train.models import Parts
from t1lib.train.optim import Updater
from t1lib.train.ranks import ALONE


class Stateful:
    """The part of a trainer that saves and restores. A part of the state is a layer, or the rest."""

    model: PreTrainedModel
    parts: Parts
    steps: int
    skipped: int
    ranks = ALONE  # the processes that share the model
    # all updaters, each with what its tensors' names lack of the parameters' names
    _named_updaters: Callable[[], list[tuple[str, Updater]]]

    def _local(self, tensor: Tensor) -> Tensor:
        """The tensor that this process holds of a parameter or gradient."""
        return tensor

    def _whole(self, param: Tensor, part: Tensor) -> Tensor:
        """All of what every process holds its part of as it does of `param`: weights or optimizer state."""
        return part

    def _part(self, whole: Tensor) -> Tensor:
        """The opposite: what this process is to hold."""
        return whole

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on: weights and optimizer state by parameter name, and the step; CPU copies.

        The format is the same in every mode: a run can change its mode at a checkpoint. For models whose copy the
        host cannot hold: `t1lib.train.checkpoint`, which writes `state_parts` one by one. Where the model is dealt to
        several processes, all of them must call it, and all get the whole.
        """
        whole = {"step": self.steps, "skipped": self.skipped, "model": {}, "optimizer": {}}
        for part in self.state_parts():
            for kind, found in self.state_part(part).items():
                whole[kind] |= found
        return whole

    def state_parts(self) -> dict[str, list[str]]:
        """Names of parameters that are saved together: those of a layer, and the rest, by a name of the part."""
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
        """Who updates a parameter, and under which name."""
        return {prefix + n: (updater, n) for prefix, updater in self._named_updaters() for n in updater.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s result. Raises `T1Error`, before anything is changed, if it is of another model."""
        lacking = sorted({"step", "skipped", "model", "optimizer"} - state.keys())
        require(not lacking, f"the state lacks {', '.join(lacking)}; allowed: what `state_dict` returned")
        self.check_state(state["model"], state["optimizer"])
        for part in self.state_parts():
            self.load_part(part, state)
        self.steps, self.skipped = state["step"], state["skipped"]

    def check_state(self, model: dict[str, Tensor], optimizer: dict[str, dict[str, Any]]) -> None:
        """Raise `T1Error` unless weights and optimizer state, by parameter name, fit this trainer."""
        own = dict(self.model.named_parameters())
        foreign = sorted(model.keys() - own.keys())
        require(not foreign, f"the checkpoint has {foreign[:1]}, the model has not: it is of another model")
        for name, param in own.items():
            saved = model.get(name)
            require(saved is not None, f"the checkpoint has no parameter {name!r}: it is of another model")
            require(
                saved.shape == param.shape,
                f"checkpoint's {name!r} has shape {tuple(saved.shape)}, the model's {tuple(param.shape)}",
            )
        for prefix, updater in self._named_updaters():
            updater.check_state(optimizer, prefix)
        for name in self._owners():
            for key, value in optimizer[name].items():
                found, shape = tuple(value.shape), () if key == "step" else tuple(own[name].shape)
                require(found == shape, f"the checkpoint's {key} of {name!r} has shape {found}, allowed: {shape}")

    @torch.no_grad()
    def load_part(self, part: str, state: dict[str, Any]) -> None:
        """Take over a part of what was saved; to be checked before."""
        params, owners = dict(self.model.named_parameters()), self._owners()
        for name in self.state_parts()[part]:
            self._local(params[name]).copy_(self._part(state["model"][name]))
            if name in owners:
                updater, own = owners[name]
                updater.load(own, {k: self._part(v) for k, v in state["optimizer"][name].items()})
