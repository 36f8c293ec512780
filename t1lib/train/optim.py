"""Optimizers: PyTorch's fused AdamW and its SGD over named tensors, and what 16-bit parameters need beyond them.

A 16-bit parameter may have a float32 master, of which it is the rounded copy; its moments may be kept in 16 bits. Such
tensors are updated in pieces: each piece is widened, updated and rounded while it is in the processor's caches, so that
every value of the state is read from memory once and written once. On a GPU, a single kernel does this for AdamW
(`t1lib.train.fused_adamw`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from t1lib.errors import T1Error, require
from t1lib.train.fused_adamw import adamw_, has_kernel
from t1lib.train.narrow import Scratch, join, split
from t1lib.train.spec import MOMENTS, OptimizerSpec

DEVICE_PIECE = 1 << 25  # values that a device updates at a time: enough to keep it busy, few to hold in float32
PIECE = 1 << 17  # values that each core of the host updates at a time: their float32 state stays in its caches


def norms_of(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Euclidean norm of each gradient, in float32 (float64 if any gradient is float64), on the gradients' device."""
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads.values()) else torch.float32
    if all(g.device.type == "cpu" for g in grads.values()):
        return {name: host_norm(grad, dtype) for name, grad in grads.items()}
    return dict(zip(grads, torch._foreach_norm(list(grads.values()), 2, dtype=dtype), strict=True))


def host_norm(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Euclidean norm computed on all cores: PyTorch's own uses one, and sums the squares sequentially."""
    pieces = grad.reshape(-1).split(PIECE * torch.get_num_threads())
    wide = (piece.to(dtype) for piece in pieces)
    return torch.stack([torch.dot(piece, piece) for piece in wide]).sum().sqrt()


class Updater:
    """Updates named tensors in place from their gradients.

    The tensors may be parameters or plain views. Several updaters over parts of a model do bit for bit what one does
    over the whole.

    scratch    buffers that several updaters may share if they run one at a time
    state      existing state, by the tensors' names; count: how many updates it has seen
    """

    def __init__(
        self, tensors: dict[str, Tensor], spec: OptimizerSpec, scratch: Scratch | None = None,
        state: dict[str, dict[str, Tensor]] | None = None, count: int | None = None,
    ) -> None:  # fmt: skip
        self.tensors, self.spec, self._count = tensors, spec, count
        self.state = {n: self._new_state(t) for n, t in tensors.items()} if state is None else state
        self._wide = {n for n, t in tensors.items() if spec.master_weights and t.dtype != torch.float32}
        for name in self._wide if spec.split_master else ():
            dtype = tensors[name].dtype
            require(dtype == torch.bfloat16, f"split_master with {name!r} of {dtype}; allowed: torch.bfloat16")
        self._scratch = scratch or Scratch()

    def _new_state(self, tensor: Tensor) -> dict[str, Tensor]:
        spec, state = self.spec, {}
        master = spec.master_weights and tensor.dtype != torch.float32
        if spec.name == "adamw":
            moments = MOMENTS[spec.moments] if master else tensor.dtype
            state["step"] = torch.zeros((), device=tensor.device)
            state |= {k: torch.zeros_like(tensor, dtype=moments) for k in ("exp_avg", "exp_avg_sq")}
        elif spec.momentum:
            state["momentum_buffer"] = torch.zeros_like(tensor, dtype=torch.float32 if master else tensor.dtype)
        if master and spec.split_master:
            state["low"] = torch.zeros_like(tensor, dtype=torch.int16)  # the parameter itself is the rounded master
        elif master:
            state["master"] = tensor.detach().float()
        return state

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor | None], factor: float = 1.0, scale: Tensor | float = 1.0) -> None:
        """One update, with the learning rate multiplied by `factor` and the gradients by `scale`.

        Tensors without a gradient (None or missing) stay as they are. Gradients may be overwritten.
        """
        found = {n: g for n, g in grads.items() if g is not None and n in self.tensors}
        for name in found:
            if "step" in self.state[name]:
                self.state[name]["step"] += 1
        self.apply(found, factor, scale)

    @torch.no_grad()
    def apply(self, found: dict[str, Tensor], factor: float, scale: Tensor | float, lost: Tensor | None = None) -> None:
        """An update that the step counts already include.

        lost: () float32, on a GPU; if not 0, nothing changes, without the host having to know
        """
        lr = self.spec.lr * factor
        plain = [n for n in found if n not in self._wide]
        if plain:
            if isinstance(scale, Tensor) or scale != 1.0:
                # A Python number would be rounded to the gradients' dtype.
                exact = scale if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
                torch._foreach_mul_([found[n] for n in plain], exact)
            states = [self.state[n] for n in plain]
            self._update([self.tensors[n] for n in plain], [found[n] for n in plain], states, lr, lost)
        for name in found.keys() & self._wide:
            self._step_wide(name, found[name], lr, scale, lost)

    @torch.no_grad()
    def peek(self, name: str, rows: Tensor, grad: Tensor, factor: float = 1.0, scale: float = 1.0) -> Tensor:
        """Rows of a tensor as `step` would leave them. Nothing is changed."""
        state = {k: v.clone() if k == "step" else v[rows] for k, v in self.state[name].items()}
        other = Updater({name: self.tensors[name][rows]}, self.spec, state={name: state})
        other.step({name: grad[rows]}, factor, scale)
        return other.tensors[name]

    def _step_wide(self, name: str, grad: Tensor, lr: float, scale: Tensor | float, lost: Tensor | None) -> None:
        """Update a 16-bit tensor that has a master: with one kernel, or piece by piece."""
        weight, state, scratch = self.tensors[name].view(-1), self.state[name], self._scratch
        flat = {k: v.view(-1) for k, v in state.items() if k != "step"}
        step = {k: v for k, v in state.items() if k == "step"}
        if self.spec.name == "adamw" and has_kernel(weight):
            adamw_(weight, grad.view(-1), flat | step, self.spec, lr, scale, lost)
            return
        size = PIECE * torch.get_num_threads() if weight.device.type == "cpu" else DEVICE_PIECE
        for start in range(0, weight.numel(), size):
            piece = slice(start, start + size)
            part = {k: v[piece] for k, v in flat.items()}
            g = scratch.widen("grad", grad.view(-1)[piece])
            if isinstance(scale, Tensor) or scale != 1.0:
                g.mul_(scale)
            low = part.pop("low", None)
            master = part.pop("master", None) if low is None else scratch.join(weight[piece], low)
            wide = {k: v if v.dtype == torch.float32 else scratch.widen(k, v) for k, v in part.items()}
            self._update([master], [g], [wide | step], lr, lost)
            for key, value in part.items():
                if value is not wide[key]:
                    done = int(step["step"]) if self._count is None else self._count + 1
                    scratch.round_by_chance(wide[key], value, done)
            if low is None:
                weight[piece].copy_(master)
            else:
                split(master, weight[piece], low)

    def _update(
        self, tensors: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], lr: float,
        lost: Tensor | None,
    ) -> None:  # fmt: skip
        spec = self.spec
        if spec.name == "adamw":
            moments = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq"))
            torch._fused_adamw_(
                tensors, grads, *moments, [], [s["step"] for s in states], lr=lr, beta1=spec.betas[0],
                beta2=spec.betas[1], weight_decay=spec.weight_decay, eps=spec.eps, amsgrad=False, maximize=False,
                found_inf=lost,
            )  # fmt: skip
            return
        # On the CPU, PyTorch's fused SGD (2.11, 2.13) leaves 16-bit tensors of 32 or more elements unchanged, and its
        # plain SGD first rounds lr to the tensors' dtype. For these, all modes round lr, so that they agree.
        narrow = any(t.dtype.itemsize == 2 for t in tensors)
        lr = torch.tensor(lr, dtype=tensors[0].dtype).item() if narrow else lr
        fused = not (narrow and tensors[0].device.type == "cpu")
        sgd(
            tensors, grads, [s.get("momentum_buffer") for s in states], fused=fused, foreach=False,
            weight_decay=spec.weight_decay, momentum=spec.momentum, lr=lr, dampening=0.0, nesterov=False,
            maximize=False, found_inf=lost,
        )  # fmt: skip

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        """Master weights and moments, for accounting."""
        return [t for state in self.state.values() for t in state.values()]

    def state_of(self, name: str) -> dict[str, Tensor]:
        """A tensor's moments, step count and master weight, independent of their layout here (copies on the CPU)."""
        state = self.state[name]
        saved = {k: v.detach().cpu().clone() for k, v in state.items() if k != "low"}
        if "low" in state:
            saved["master"] = join(self.tensors[name].detach().to(state["low"].device), state["low"]).cpu()
        return saved

    def check_state(self, state: dict[str, dict[str, Any]], prefix: str = "") -> None:
        """Raise `T1Error` if `load` could not take over `state`, whose keys are `prefix` + the tensors' names."""
        missing = [prefix + name for name in self.tensors if prefix + name not in state]
        if missing:
            raise T1Error(f"the checkpoint has no optimizer state for {missing[0]!r} ({len(missing)} missing)")
        for name in self.tensors:
            saved = state[prefix + name]
            foreign = saved.keys() - self.state[name].keys() - {"master"}
            require(
                not foreign,
                f"the checkpoint's {prefix + name!r} has state of another optimizer ({', '.join(sorted(foreign))}); "
                f"the trainer's is {self.spec.name!r}",
            )
            lacking = self.state[name].keys() - saved.keys() - {"low", "master"}
            require(not lacking, f"the checkpoint's {prefix + name!r} lacks {', '.join(sorted(lacking))}")
            theirs, own = "master" in saved, name in self._wide
            require(
                theirs == own,
                f"the checkpoint's {prefix + name!r} has master_weights={theirs}, the trainer's master_weights={own}",
            )

    @torch.no_grad()
    def load(self, name: str, saved: dict[str, Tensor]) -> None:
        """Take over what `state_of` returned for a tensor; call `check_state` first."""
        for key, value in self.state[name].items():
            if key == "low":
                split(saved["master"].to(value.device, copy=True), self.tensors[name], value)
            else:
                value.copy_(saved[key])
