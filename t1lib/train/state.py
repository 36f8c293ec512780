"""What a run needs to resume: weights and optimizer state by parameter name, in one format for all modes."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import require, shown
from t1lib.models import Parts
from t1lib.train.ranks import ALONE
from t1lib.train.resident import restore_state, saved_state
from t1lib.train.update import Precision, State


class Stateful:
    """The part of a trainer that saves and restores its state. A part of the state is one layer, or all the rest."""

    model: PreTrainedModel
    parts: Parts
    steps: int
    skipped: int
    precision: Precision
    optimizer: torch.optim.Optimizer
    ranks = ALONE  # the processes that share the model
    _own: dict[str, nn.Parameter]  # what is trained, as the optimizer has it

    def _weight(self, name: str) -> Tensor:
        """This process's shard of a parameter, where it lies."""
        return self.model.get_parameter(name).data

    def _saved(self, name: str) -> State:
        """A parameter's optimizer state, this process's shard, independent of its layout."""
        return saved_state(self.optimizer, self._own[name], self.precision)

    def _restore(self, name: str, saved: State) -> None:
        """Take over what `_saved` returned."""
        restore_state(self.optimizer, self._own[name], saved, self.precision)

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """Gather a whole tensor (weights or optimizer state) from the processes' shards, cut as the parameter is."""
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
        names = self.state_parts()[part]
        weights = {n: self._whole(n, self._weight(n).cpu().clone()) for n in names}
        own = [n for n in names if n in self._own]
        state = {n: {k: self._whole(n, v.cpu().clone()) for k, v in self._saved(n).items()} for n in own}
        return {"model": weights, "optimizer": state}

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
        check_tensors(model, optimizer, dict(self.model.named_parameters()))
        rule = self.optimizer.param_groups[0]
        for name, own in self._own.items():
            needed = {*self.precision.kinds(own, rule), *(["step"] if "betas" in rule else [])}
            needed = {"master" if key == "low" else key for key in needed}
            found = set(optimizer.get(name, {}))
            require(bool(found) or not needed, f"the checkpoint has no optimizer state for {name!r}")
            wide = "master" in found, "master" in needed
            require(
                wide[0] == wide[1],
                f"the checkpoint's {name!r} has master_weights={wide[0]}, the trainer's master_weights={wide[1]}",
            )
            odd = sorted(found ^ needed)
            kind = "adamw" if "betas" in rule else "sgd"
            require(
                not odd,
                f"the checkpoint's {name!r} has state of another optimizer ({', '.join(odd)}); the trainer's is {kind}",
            )

    @torch.no_grad()
    def load_part(self, part: str, state: dict[str, Any]) -> None:
        """Restore one part of a saved state, which must have passed `check_state`."""
        params = dict(self.model.named_parameters())
        for name in self.state_parts()[part]:
            self._write(params[name], self._part(state["model"][name]))
            if name in self._own:
                saved = state["optimizer"].get(name, {})
                self._restore(name, {key: self._part(value) for key, value in saved.items()})

    def _write(self, param: nn.Parameter, part: Tensor) -> None:
        param.copy_(part)


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
