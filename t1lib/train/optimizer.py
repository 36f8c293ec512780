"""The optimizer of a streamed model: a `torch.optim.Optimizer` whose updates may still run while the model goes on."""

from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from t1lib.errors import T1Error, is_number, require, shown
from t1lib.train.resident import ResidentOptimizer
from t1lib.train.update import check_state, norms_of, shown_state, take_state

if TYPE_CHECKING:
    from t1lib.train.engine import Engine

ALLOWED = {"amsgrad": False, "capturable": False, "differentiable": False, "decoupled_weight_decay": True}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise `T1Error` unless it is a `torch.optim.AdamW` or `SGD` over this model's parameters."""
    kind = type(optimizer)
    known = kind in (torch.optim.AdamW, torch.optim.SGD)
    require(known, f"optimizer of class {kind.__name__}; allowed: torch.optim.AdamW, torch.optim.SGD")
    _refuse_options(optimizer.param_groups)
    own = set(map(id, model.parameters()))
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            what = f"group {number} of the optimizer has a parameter of shape {tuple(param.shape)}"
            require(id(param) in own, f"{what} that is none of the model's: make the optimizer of model.parameters()")
        require(isinstance(group.get("betas", (0.0,))[0], float | int), "betas that are tensors; allowed: numbers")


def _refuse_options(groups: list[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for option, allowed in ALLOWED.items():
            fits = bool(group.get(option, allowed)) == allowed
            require(fits, f"group {number} of the optimizer has {option}={not allowed}; allowed: {allowed}")


def clear_gradients(params: Iterable[nn.Parameter], set_to_none: bool) -> None:
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            zero(param.grad)


def zero(grad: Tensor) -> None:
    """Zero a gradient in place, as somebody may hold it, and detach it from a graph that it may have."""
    grad.detach_() if grad.grad_fn is not None else grad.requires_grad_(False)
    grad.zero_()


class StreamOptimizer(ResidentOptimizer):
    """AdamW or SGD over a streamed model: what `t1lib.train.stream` returns.

    `step`, `zero_grad`, `param_groups`, `state_dict` and `load_state_dict` work as in `torch.optim`, with the same
    learning-rate schedules and saved states. `clip_grad_norm_` is exact and does not wait; PyTorch's own gives the same
    numbers, but waits for the gradients. `drain()` waits for updates; `close()` gives the model back.
    """

    def __init__(self, engine: "Engine", optimizer: torch.optim.Optimizer) -> None:
        self._engine = engine
        super().__init__(optimizer, engine.precision, engine.device)
        # Hooks that the user registered, on `step` say, stay, in the same dicts, so that their handles still work.
        vars(self).update({name: hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")})
        self._states = 0  # how many parameters had state at the last step
        self.state |= {p: dict(s) for p, s in optimizer.state.items()}  # as given, until `Engine.place` takes it over
        self._check(self.state)
        self._with_momentum = [bool(group.get("momentum")) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Begin an update of all parameters that have a gradient; streamed layers finish theirs in the next forward.
        Returns what `closure` returns. Raises `T1Error` if the groups or the state no longer fit."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_changes()
        self._engine.step()
        self._states = len(self.state) if self._engine.placed else 0
        return loss

    def _refuse_changes(self) -> None:
        """Raise `T1Error` if the groups or the state are no longer what was streamed."""
        _refuse_options(self.param_groups)
        for group, before in zip(self.param_groups, self._with_momentum, strict=False):
            now, then = group.get("momentum"), "more than 0" if before else "0"
            changed = f"momentum={now}, which was {then} when the model was streamed; allowed: {then}"
            require(bool(now) == before, changed)
        groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        require(groups == self.groups, "parameters taken from the optimizer's groups, or moved; use requires_grad_")
        emptied = "the optimizer's state was emptied; to begin anew, give load_state_dict an empty 'state'"
        require(len(self.state) >= self._states, emptied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        with self._engine.alone():
            if self._engine.schedule is not None:
                self._engine.schedule.forget_backward(failed=True)
            for layer in self._engine.host:
                if set_to_none:
                    layer.grads.forget()
                else:
                    for grad in layer.grads.complete().values():
                        zero(grad)
            clear_gradients(self._engine.others(), set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their Euclidean norm, taken together, is at most `max_norm`. Returns the earlier
        norm, () on the device, without waiting. As `torch.nn.utils.clip_grad_norm_`, but summed in float32. Raises
        `T1Error` for a `max_norm` below 0, and with `update_in_backward=True`."""
        fits = is_number(max_norm) and max_norm >= 0
        require(fits, f"max_norm={shown(max_norm)}; allowed: a number, 0 or more")
        require(not self._engine.in_backward, "clip_grad_norm_ with update_in_backward=True, which updates before it")
        with self._engine.alone():  # an evaluation may bring gradients to the host, and forget their norms
            total = self.grad_norm()
            coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
            for layer in self._engine.host:
                layer.grads.multiply(coefficient)
            grads = [p.grad for p in self._engine.unstreamed() if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, coefficient)
        return total

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The Euclidean norm of all gradients, (), in the order and with the sums of `clip_grad_norm_`."""
        engine, exact = self._engine, self._engine.device.type == "cpu"
        norms: dict[int, Tensor] = {}
        with engine.alone():
            for layer in engine.host:
                norms |= {id(layer.params[name]): norm for name, norm in layer.grads.norms_by_name().items()}
        others = [p for p in engine.unstreamed() if p.grad is not None]
        for dtype in {p.grad.dtype for p in others}:
            alike = [p for p in others if p.grad.dtype == dtype]
            found = norms_of([p.grad for p in alike], exact)
            norms |= {id(p): norm for p, norm in zip(alike, found, strict=True)}
        order = dict.fromkeys(map(id, [*engine.model.parameters(), *others]))
        ordered = [norms[key].to(engine.device) for key in order if key in norms]
        if not ordered:
            return torch.zeros((), device=engine.device)
        return torch.linalg.vector_norm(torch.stack(ordered))

    def state_dict(self) -> dict[str, Any]:
        """As in `torch.optim`, after all updates have ended; float32 masters of 16-bit parameters are under "master".
        Tensors are the optimizer's own, not copies."""
        with self._engine.alone():
            self._engine.drain()
            own, counts = self.state, self.counts
            try:
                if self._engine.placed:
                    self.state = {p: shown_state(p.detach(), self.state_of(p), counts[p]) for p in own if counts[p]}
                return super().state_dict()
            finally:
                self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state that this class or the plain optimizer saved. Raises `T1Error`, before any change,
        if they do not fit."""
        require(not self._engine.closed, "a state for an optimizer that was closed; make another one, or stream again")
        state_dict = copy(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        try:
            groups, states = state_dict["param_groups"], dict(state_dict["state"])
            sizes = [len(group["params"]) for group in groups]
            numbers = [number for group in groups for number in group["params"]]
            saved = [states.pop(number, {}) for number in numbers]
        except (KeyError, TypeError, AttributeError, ValueError):
            raise T1Error("the state is no optimizer's; allowed: what `state_dict` returned") from None
        own = [len(group["params"]) for group in self.param_groups]
        require(sizes == own, f"the state has groups of {sizes} parameters; allowed: {own}")
        require(not states, f"the state has parameter {next(iter(states), 0)!r}, which is in none of its groups")
        params = [p for group in self.param_groups for p in group["params"]]
        found = dict(zip(params, saved, strict=True))
        self._check(found)
        with self._engine.alone():
            if self._engine.placed:
                self._engine.schedule.forget_backward(failed=False)
                self.take_over(found)
            else:
                self.state = found
            for mine, given in zip(self.param_groups, deepcopy(groups), strict=True):  # copied: schedules write to them
                # Keys that the saved groups lack were added later, such as a schedule's initial_lr.
                for key in mine.keys() - given.keys() - self.defaults.keys() - {"params", "param_names"}:
                    del mine[key]
                mine.update({k: v for k, v in given.items() if k != "params"})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check(self, found: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Raise `T1Error` unless the states, by parameter, fit their parameters."""
        names, dtypes_of = {p: n for n, p in self._engine.model.named_parameters()}, self.precision.state_dtypes
        for group in self.param_groups:
            for param in (p for p in group["params"] if p in found):
                own = dtypes_of(param, group)
                spare = dtypes_of(param, *self.param_groups).keys() - own  # a layer has what any group needs
                saved = {key: value for key, value in found[param].items() if key not in spare}
                check_state(param, own, saved, repr(names.get(param, "none of the model's")))

    def take_over(self, found: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Copy states, by parameter, into those held here. A parameter whose state is empty starts anew."""
        self._engine.drain()
        for param, saved in found.items():
            self.counts[param] = take_state(param.detach(), self.state_of(param), saved)

    def device_tensors(self) -> list[Tensor]:
        """What lies on the device between steps: all that does not stream, with its state, and the streams' buffers."""
        engine, held = self._engine, self.state if self._engine.placed else {}
        there = engine.unstreamed()
        state = [v for p in there if id(p) not in engine.travelling for v in held.get(p, {}).values()]
        own = [] if engine.schedule is None else engine.schedule.device_tensors()
        return [*there, *engine.model.buffers(), *state, *own]

    def drain(self) -> None:
        """Wait until all updates and copies of weights have ended: the host has the weights, and nothing reads them."""
        self._engine.drain()

    def close(self) -> None:
        """Give the model back: an ordinary one, with all parameters on the CPU or the device where they lie now."""
        self._engine.close()

    def __getstate__(self) -> Any:  # `copy` and `pickle` come here
        raise T1Error("a copy of a streamed model's optimizer would update nothing: copy its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        require(not hasattr(self, "_states"), "a group added to a streamed model's optimizer; add it before `stream`")
        super().add_param_group(param_group)
