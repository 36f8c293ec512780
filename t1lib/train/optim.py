"""Optimizers: PyTorch's own fused SGD and AdamW over named tensors, with float32 master weights when asked."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import T1Error, choose, require

OPTIMIZERS = ("sgd", "adamw")
STATE = {"sgd": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}  # what PyTorch keeps a parameter


@dataclass(frozen=True)
class OptimizerSpec:
    """What to update with. Defaults are PyTorch's, except that nothing decays unless asked.

    `master_weights` keeps a float32 copy of each 16-bit parameter, and the moments in float32 beside it; the
    parameter is then the rounded copy of its master.
    """

    name: str = "sgd"
    lr: float = 1e-4
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    master_weights: bool = False

    def __post_init__(self) -> None:
        choose("optimizer", self.name, OPTIMIZERS)
        require(self.lr >= 0, f"lr {self.lr} is negative; allowed: lr >= 0")

    def build(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        if self.name == "sgd":
            # PyTorch's fused SGD on the CPU (2.11, 2.13) leaves 16-bit tensors of 32 elements and more unchanged. Its
            # plain one rounds lr to the tensors' dtype first: all modes do, so that they agree.
            narrow = any(t.dtype.itemsize == 2 for t in tensors)
            lr = torch.tensor(self.lr, dtype=tensors[0].dtype).item() if narrow else self.lr
            fused = not (narrow and tensors[0].device.type == "cpu")
            return torch.optim.SGD(
                tensors, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=fused
            )
        return torch.optim.AdamW(
            tensors, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )


class Updater:
    """Updates named tensors in place from their gradients.

    The tensors may be parameters or plain views; several updaters over parts of a model do bit for bit what one does
    over the whole. `scratch` is a flat float32 buffer for widened gradients that updaters run in turn may share;
    without it each step allocates its own.
    """

    def __init__(self, tensors: dict[str, Tensor], spec: OptimizerSpec, scratch: Tensor | None = None) -> None:
        self.tensors, self.spec, self.scratch = tensors, spec, scratch
        self.masters: dict[str, Tensor] = {}
        if spec.master_weights:
            self.masters = {n: t.detach().float() for n, t in tensors.items() if t.dtype != torch.float32}
        self._targets = {n: self.masters.get(n, t) for n, t in tensors.items()}
        self.optimizer = spec.build(list(self._targets.values())) if tensors else None

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor | None]) -> None:
        """Apply one update. Tensors without a gradient (None or missing) stay as they are."""
        offset = 0
        for name, target in self._targets.items():
            grad = grads.get(name)
            if grad is not None and grad.dtype != target.dtype:
                wide = None if self.scratch is None else self.scratch[offset : offset + grad.numel()].view(grad.shape)
                grad = grad.to(target.dtype) if wide is None else wide.copy_(grad)
                offset += grad.numel()
            target.grad = grad
        if self.optimizer is not None:
            self.optimizer.step()
        for name, target in self._targets.items():
            if name in self.masters and target.grad is not None:
                self.tensors[name].copy_(target)
            target.grad = None

    def state_tensors(self) -> list[Tensor]:
        """Master weights and moments, for accounting."""
        state = [] if self.optimizer is None else self.optimizer.state.values()
        return [*self.masters.values(), *(t for s in state for t in s.values() if isinstance(t, Tensor))]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State by parameter name: moments, step counts, master weights (copies on the CPU)."""
        result: dict[str, dict[str, Any]] = {}
        for name, target in self._targets.items():
            state = dict(self.optimizer.state.get(target, {}))
            if name in self.masters:
                state["master"] = self.masters[name]
            result[name] = {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        return result

    def check_state(self, state: dict[str, dict[str, Any]], prefix: str = "") -> None:
        """Raise `T1Error` if `load_state_dict` could not take over `state`."""
        missing = [prefix + name for name in self._targets if prefix + name not in state]
        if missing:
            raise T1Error(f"the checkpoint has no optimizer state for {missing[0]!r} ({len(missing)} missing)")
        for name in self._targets:
            foreign = state[prefix + name].keys() - STATE[self.spec.name] - {"master"}
            require(
                not foreign,
                f"the checkpoint's {prefix + name!r} has state of another optimizer ({', '.join(sorted(foreign))}); "
                f"the trainer's is {self.spec.name!r}",
            )
            saved, own = ("master" in state[prefix + name]), (name in self.masters)
            require(
                saved == own,
                f"the checkpoint's {prefix + name!r} has master_weights={saved}, the trainer's master_weights={own}",
            )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, dict[str, Any]], prefix: str = "") -> None:
        """Take over state by parameter name, which is `prefix` and the tensor's name. To be checked before."""
        for name, target in self._targets.items():
            saved = dict(state[prefix + name])
            master = saved.pop("master", None)
            if master is not None:
                self.masters[name].copy_(master)
            self.optimizer.state[target] = {
                k: _placed(k, v, target) if isinstance(v, Tensor) else v for k, v in saved.items()
            }


def _placed(key: str, value: Tensor, target: Tensor) -> Tensor:
    # Fused optimizers keep the step count, a float32 scalar, beside the parameter; moments have its dtype.
    dtype = torch.float32 if key == "step" else target.dtype
    return value.detach().to(device=target.device, dtype=dtype, copy=True)
