"""One training loop for all modes; the loss is a head of `t1lib.heads` on the last hidden states.

    gpu         plain PyTorch: the model on the device, its own forward, `torch.optim`
    gpu-graph   the same step as a single CUDA graph (`t1lib.train.modes`)
    ckpt        as gpu, with each layer recomputed in the backward, as Hugging Face does it
    slide       `t1lib.train.stream`: layers on the host
    fsdp        PyTorch's FSDP2 (`t1lib.train.modes`, too)

`Trainer` is this loop, in plain PyTorch: modes gpu and ckpt. `step` calls `_run`, and that `_backward`, `_clip` and
`_update`; the classes of the other modes replace some of these.

In one process, all modes compute the same numbers: in float32 on a CPU bit for bit, unless a batch is split.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import T1Error, choose, is_number, is_whole, require, shown
from t1lib.heads import DEFAULT_HEAD, HEADS, linear_cross_entropy
from t1lib.models import require_plain_loss, split
from t1lib.optimizers import OptimizerSpec, Schedule
from t1lib.timing import NoTrace, PhaseTimer, Trace, wrap_layers
from t1lib.train import usable
from t1lib.train.batch import Piece, Ranks, check, pieces_of
from t1lib.train.engine import engine_of
from t1lib.train.resident import ResidentOptimizer, check_saved, make_optimizer, state_in
from t1lib.train.update import norms_of, shown_state, take_state

LOSSES = ("cross_entropy", "mean_square")
HEAD_OPTIONS = ("workspace", "chunks", "by", "filter_eps", "label_smoothing", "z_loss", "tail")


@dataclass(frozen=True)
class StepRecord:
    """One training step: its number, from 1; the mean loss and the tokens of its batch; in ms, the wall time until the
    device had computed it, and the phases "forward", "head_forward", "head_backward" and "backward" (or "graph"), and
    "optimizer"; the Euclidean norm of all gradients before clipping."""

    step: int
    loss: float
    tokens: int
    wall_ms: float
    phases: dict[str, float]
    grad_norm: float = math.nan


class Trainer:
    """Trains those parameters of a causal language model that require a gradient; modes gpu and ckpt.

    model            from `build_model`; the trainer places it and owns it until `close`, or until another one is made
                     (after one of mode fsdp, a new model is needed)
    device           where the model computes: a CUDA device, or the CPU (default: a GPU if there is one)
    head             one of `t1lib.heads.HEADS`, with `head_options`, of `HEAD_OPTIONS`
    optimizer        an `OptimizerSpec`, or "sgd" or "adamw" for one with default values
    loss             "cross_entropy" of the next token, or "mean_square" of the last layer's output before the norm:
                     T1M1's setting, which has no output layer, and no micro-batches
    schedule         factor on the learning rate: a `Schedule`, or any function of the step number, which begins at 0
    micro_batch      rows of a batch computed at a time, with gradients accumulated (default: the whole batch)
    max_grad_norm    clip the gradients of all parameters together to this norm (default: no clipping)
    own              options of the mode, which its `_place` takes
    """

    late = False  # whether updates begin before the host knows that all gradients are finite
    ranks = Ranks()  # the processes that share the model

    def __init__(
        self, model: PreTrainedModel, mode: str = "gpu", *, device: torch.device | str | None = None,
        head: str = DEFAULT_HEAD, head_options: dict[str, Any] | None = None, optimizer: OptimizerSpec | str = "sgd",
        loss: str = "cross_entropy", schedule: Callable[[int], float] = Schedule(),  # noqa: B008
        micro_batch: int | None = None, max_grad_norm: float | None = None, **own: Any,
    ) -> None:  # fmt: skip
        own_modes = type(self) is not Trainer or mode in ("gpu", "ckpt")
        require(own_modes, f"mode {shown(mode)} of `Trainer`; allowed: 'gpu', 'ckpt'; `make_trainer` takes all modes")
        self.mode, self.head, self.loss = mode, choose("head", head, HEADS), choose("loss", loss, LOSSES)
        whole = micro_batch is None or is_whole(micro_batch, 1)
        require(whole, f"micro_batch={shown(micro_batch)}; allowed: 1 or more, whole numbers, or None")
        require(callable(schedule), f"schedule={shown(schedule)}; allowed: a `Schedule`, or a function of the step")
        known = isinstance(optimizer, str | OptimizerSpec)
        require(known, f"optimizer={shown(optimizer)}; allowed: an `OptimizerSpec`, or its name")
        positive = max_grad_norm is None or (is_number(max_grad_norm) and max_grad_norm > 0)
        require(positive, f"max_grad_norm={shown(max_grad_norm)}; allowed: more than 0, or None")
        self.schedule, self.micro_batch, self.max_grad_norm = schedule, micro_batch, max_grad_norm
        self.device, self.model, self.parts = usable(device), model, split(model)
        self.head_options = head_options or {}
        for option in self.head_options:
            choose("option of the head", option, HEAD_OPTIONS)
        self.spec = OptimizerSpec(optimizer) if isinstance(optimizer, str) else optimizer
        if not any(param.dtype.itemsize == 2 for param in model.parameters()):  # only those have masters
            self.spec = replace(self.spec, master_weights=None, moments="float32")
        self.steps, self.closed = 0, False
        self.trace: Trace | NoTrace = NoTrace()  # assign a `Trace` to record the spans of the next step's work
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}  # by name
        require(bool(self._trained), "no parameter of the model requires a gradient")
        if loss == "mean_square":
            require(micro_batch is None, f"loss 'mean_square' with micro_batch={micro_batch}; allowed: None")
            behind = {*self.parts.norm.parameters(), *self.parts.head.parameters()} - {self.parts.embed.weight}
            lost = [n for n, p in self._trained.items() if p in behind]
            require(not lost, f"loss 'mean_square' ends before {lost[:1]}: it would get no gradient; freeze it")
        else:
            require_plain_loss(model)
        # Earlier trainers of this model may not have been closed. (`stream` closes what streams.)
        if mode != "slide" and (former := engine_of(model)) is not None:
            former.close()
        if vars(self.parts.norm).get("forward") is _unchanged:
            del self.parts.norm.forward
        self._place(**own)
        if loss == "mean_square":
            self.parts.norm.forward = _unchanged

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, batch: dict[str, Tensor]) -> StepRecord:
        """Train on one batch: integers `input_ids` (B, S) and, if they differ, `labels` (B, S), not shifted; −100 is
        ignored. The loss is the mean over the whole batch, however many micro-batches it is computed in. Returns when
        the device has computed the step; in mode slide, updates may still be pending (`drain`). Raises `T1Error` for a
        batch that does not fit the model, before anything is changed, and for gradients that are not finite; these
        update nothing, except in mode gpu-graph and, without clipping, in slide."""
        timer, pieces = PhaseTimer(self.device), self._pieces(batch)
        self.optimizer.zero_grad()  # left over if a step was aborted
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr * self.schedule(self.steps)
        loss, norm = self._run(pieces, timer)
        timer.mark("optimizer")
        wall_ms, phases = timer.stop()
        self.optimizer.zero_grad()
        norm = float(norm)
        if not math.isfinite(norm):
            done = "updates had begun, some by it: go on from a checkpoint" if self.late else "nothing was updated"
            raise T1Error(f"step {self.steps + 1}: a gradient is not finite (norm {norm}); {done}")
        self.steps += 1
        return StepRecord(self.steps, float(loss), batch["input_ids"].numel(), wall_ms, phases, norm)

    def _run(self, pieces: list[Piece], timer: PhaseTimer) -> tuple[Tensor, Tensor]:
        """Forward, backward and update; returns the loss and the gradients' norm."""
        loss = self._backward(pieces, timer)
        norm = self._clip()
        if self.late or math.isfinite(float(norm)):
            self._update()
        return loss, norm

    def _pieces(self, batch: dict[str, Tensor]) -> list[Piece]:
        """This process's share of a batch, which is checked to fit the model, as micro-batches."""
        require(not self.closed, "the trainer was closed: make another one")
        whole = check(batch, self.parts.embed.num_embeddings, self.model.config.max_position_embeddings)
        rows = None if self.mode == "slide" else self.micro_batch  # slide splits within each layer
        return pieces_of(*whole, rows, self.device, self.ranks)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        """Compute the gradients of the batch's loss, and return the loss."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for piece in pieces:
            loss = self._piece_loss(piece, timer)
            loss.backward()
            self.trace.end("compute", "backward", 0)
            timer.mark("backward")
            total += loss.detach()
        return total

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        """The piece's share of the batch's loss."""
        hidden, trace, head = self._hidden(piece.ids), self.trace, self.parts.head

        def head_done(_: Tensor) -> None:
            timer.mark("head_backward")
            trace.end("compute", "head", -1)

        timer.mark("forward")
        trace.begin("compute", "head", -1)
        if hidden.requires_grad:
            hidden.register_hook(head_done)
        if self.loss == "mean_square":
            loss = hidden.float().pow(2).mean()
        else:
            loss = linear_cross_entropy(
                hidden, head.weight, piece.targets, head=self.head, linear_bias=head.bias, softcap=self.parts.softcap,
                reduction="mean" if piece.total is None else "sum", **self.head_options,
            )  # fmt: skip
        timer.mark("head_forward")
        return loss if piece.total is None else loss / piece.total

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> float:
        """The mean loss of a batch such as `step` takes, without training or dropout; `T1Error` if it does not fit."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            timer = PhaseTimer(self.device)
            loss = float(sum(self._piece_loss(piece, timer) for piece in self._pieces(batch)))
            return float(self.ranks.sum(torch.tensor(loss, dtype=torch.float64), self.device))
        finally:
            for module in training:
                module.training = True

    # -- what modes define ---------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Put the model where the mode wants it, and make the optimizer."""
        self.model.to(self.device)
        wrap_layers(self.parts.layers, lambda: self.trace, recompute=self.mode == "ckpt")
        self.optimizer = self._resident_optimizer()

    def _resident_optimizer(self, on_host: bool = False) -> torch.optim.Optimizer:
        """PyTorch's own optimizer; the kit's if there are masters, or for parameters on the host beside a GPU."""
        kit = on_host or self.spec.master_weights is not None
        fused, graphed = self.device.type == "cuda" and not kit, self.mode == "gpu-graph"
        plain = make_optimizer(self.spec, self._trained.values(), fused, capturable=graphed)
        return ResidentOptimizer(plain, self.spec.precision, self.device) if kit else plain

    def _hidden(self, ids: Tensor) -> Tensor:
        """The last layer's output after the norm."""
        return self.parts.base(input_ids=ids, use_cache=False).last_hidden_state

    def _clip(self) -> Tensor:
        """Clip the gradients, if asked to; returns their norm before that, (), as `torch.nn.utils` computes it."""
        grads = [p.grad for p in self._trained.values() if p.grad is not None]
        norms = torch.stack(norms_of(grads, exact=self.device.type == "cpu"))
        if not self.ranks.alone:  # so far these are norms of the local shards
            norms = self.ranks.sum(norms.double().square(), self.device).sqrt().to(norms.dtype)
        total = torch.linalg.vector_norm(norms)
        if self.max_grad_norm is not None:
            torch._foreach_mul_(grads, (self.max_grad_norm / (total + 1e-6)).clamp(max=1.0).to(grads[0].device))
        return total

    def _update(self) -> None:
        """Update the parameters; in a traced step layer by layer, so that the trace shows each one's share."""
        if isinstance(self.trace, NoTrace):
            self.optimizer.step()
            return
        grads = {n: p.grad for n, p in self._trained.items()}
        for part, names in self.state_parts().items():
            for name, param in self._trained.items():
                param.grad = grads[name] if name in names else None
            with self.trace.span("compute", "update", -1 if part == "rest" else int(part.removeprefix("layer-"))):
                self.optimizer.step()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to resume, in any mode, but the random numbers' state: "step"; and by parameter name, as CPU
        copies, "model" (weights) and "optimizer" (state). `t1lib.train.checkpoint` writes the `state_parts` one by one.
        Raises `T1Error` if several processes train the model."""
        return {"step": self.steps, **self.state_of([name for name, _ in self.model.named_parameters()])}

    def state_parts(self) -> dict[str, list[str]]:
        """Names of the parameters that are saved together, by part: "layer-0000" and so on, and "rest"."""
        layers = {id(p): i for i, layer in enumerate(self.parts.layers) for p in layer.parameters()}
        parts: dict[str, list[str]] = {}
        for name, param in self.model.named_parameters():
            layer = layers.get(id(param))
            parts.setdefault("rest" if layer is None else f"layer-{layer:04d}", []).append(name)
        return parts

    def state_of(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Weights (`model`) and optimizer state (`optimizer`) of parameters, as CPU copies."""
        self.require_one_process()
        self.drain()
        weights, states = {}, {}
        for name in names:
            weight = self._weight(name)
            weights[name] = weight.to("cpu", copy=True)
            if name in self._trained:
                state, counts = state_in(self.optimizer, self._trained[name])
                found = shown_state(weight, state, counts.get(self._trained[name], 0))
                states[name] = {key: value.to("cpu", copy=True) for key, value in found.items()}
        return {"model": weights, "optimizer": states}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises `T1Error`, before any change, if it is of another model or
        optimizer, and if several processes train the model."""
        self.require_one_process()
        params = dict(self.model.named_parameters())
        check_saved(state, params, {name: self.spec.state_dtypes(param) for name, param in self._trained.items()})
        self.drain()
        for name in params:
            weight = self._weight(name)
            weight.copy_(state["model"][name])
            if name in self._trained:
                kept, counts = state_in(self.optimizer, self._trained[name])
                counts[self._trained[name]] = take_state(weight, kept, state["optimizer"][name])
        self.steps = state["step"]

    def require_one_process(self) -> None:
        several = f"the state of a model in {self.ranks.size} processes; allowed: one process"
        require(self.ranks.alone, f"{several}, or `torch.distributed.checkpoint.state_dict` of `trainer.model`")

    def _weight(self, name: str) -> Tensor:
        """This process's shard of a parameter, where it lies."""
        return self.model.get_parameter(name).detach()

    def device_tensors(self) -> list[Tensor]:
        """Tensors held on the device between steps."""
        state = [v for own in self.optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
        return [*(self._weight(n) for n, _ in self.model.named_parameters()), *self.model.buffers(), *state]

    def drain(self) -> None:
        """Wait for updates that are pending or running: in mode slide, `step` returns before they end."""

    def close(self) -> None:
        """Release the model: layers and last norm run their class's `forward` again. Weights stay where they are."""
        self.closed = True
        for module in (*self.parts.layers, self.parts.norm) if engine_of(self.model) is None else ():
            module.__dict__.pop("forward", None)


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden
