"""What all trainers share: their settings, a step, its update."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import T1Error, choose, is_number, is_whole, require
from t1lib.heads import DEFAULT_HEAD, HEADS
from t1lib.measure.timing import NoTrace, PhaseTimer, Trace
from t1lib.train.layered import Layered
from t1lib.train.losses import Losses
from t1lib.train.models import split
from t1lib.train.optim import Updater, norms_of
from t1lib.train.spec import OptimizerSpec, Schedule, spec_for
from t1lib.train.state import Stateful

LOSSES = ("cross_entropy", "mean_square")
TRAINABLE = ("all", "layers", "marked")
NONFINITE = ("raise", "skip")
HEAD_OPTIONS = ("workspace", "chunks", "by", "chunked", "accumulate", "filter_eps", "label_smoothing", "z_loss")


@dataclass(frozen=True)
class StepRecord:
    """One training step: its loss, the wall time (ms) between two synchronised points, and the time of each phase (ms).

    grad_norm   Euclidean norm of all gradients, before clipping
    skipped     whether the update was skipped because a gradient was not finite
    """

    step: int
    loss: float
    tokens: int
    wall_ms: float
    phases: dict[str, float]
    grad_norm: float = math.nan
    skipped: bool = False


def default_device(device: torch.device | str | None) -> torch.device:
    """The device asked for; by default a GPU if there is one. Raises `T1Error` for a GPU if there is none."""
    there = torch.cuda.is_available()
    try:
        found = torch.device(device or ("cuda" if there else "cpu"))
    except (RuntimeError, TypeError):
        raise T1Error(f"device {device!r}; allowed: 'cpu', 'cuda', 'cuda:1', …") from None
    require(found.type != "cuda" or there, f"device {str(found)!r}; allowed here: 'cpu', as there is no CUDA device")
    return found


class Trainer(Layered, Losses, Stateful):
    """Trains a causal language model one batch at a time. Subclasses say where the layers live and how they run.

    model            from `build_model`; the trainer places it and owns it until `close`
    device           where the model computes: a CUDA device, or the CPU (default: a GPU if there is one)
    head             name of an output layer in `t1lib.heads.HEADS`
    head_options     options passed to the head; allowed: those in `HEAD_OPTIONS`
    optimizer        an `OptimizerSpec`, or its name
    loss             "cross_entropy" of the next token, or "mean_square" of the last layer's output before the norm:
                     T1M1's setting, which has no output layer
    train            what to train: "all" parameters, only the decoder "layers", or "marked": the parameters of `model`
                     that already require a gradient
    schedule         factor of the learning rate by step: a `Schedule`, or any function of the step number, from 0 on
    micro_batch      rows of a batch computed at a time, with gradients accumulated (default: the whole batch)
    max_grad_norm    clip gradients to this norm, taken over all parameters together (default: no clipping)
    compile_layers   compile the decoder layers with `torch.compile`, once for all layers alike, instead of running them
                     eagerly
    nonfinite        what to do in a step with a gradient that is not finite: "raise" `T1Error`, or "skip" the update
                     and count the step
    """

    mode = ""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device | str | None = None,
        head: str = DEFAULT_HEAD,
        head_options: dict[str, Any] | None = None,
        optimizer: OptimizerSpec | str = "sgd",
        loss: str = "cross_entropy",
        train: str = "all",
        schedule: Callable[[int], float] = Schedule(),  # noqa: B008 (it cannot change)
        micro_batch: int | None = None,
        max_grad_norm: float | None = None,
        compile_layers: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        self.head, self.loss = choose("head", head, HEADS), choose("loss", loss, LOSSES)
        self.train, self.nonfinite = choose("train", train, TRAINABLE), choose("nonfinite", nonfinite, NONFINITE)
        whole = micro_batch is None or is_whole(micro_batch, 1)
        require(whole, f"micro_batch={micro_batch!r}; allowed: 1 or more, whole numbers, or None")
        require(callable(schedule), f"schedule={schedule!r}; allowed: a `Schedule`, or another function of the step")
        spec = isinstance(optimizer, str | OptimizerSpec)
        require(spec, f"optimizer={optimizer!r}; allowed: an `OptimizerSpec`, or its name")
        positive = max_grad_norm is None or (is_number(max_grad_norm) and max_grad_norm > 0)
        require(positive, f"max_grad_norm={max_grad_norm!r}; allowed: more than 0, or None")
        self.schedule, self.micro_batch, self.max_grad_norm = schedule, micro_batch, max_grad_norm
        self.device = default_device(device)
        self.model, self.parts, self.head_options = model, split(model), head_options or {}
        for option in self.head_options:
            choose("option of the head", option, HEAD_OPTIONS)
        spec = OptimizerSpec(optimizer) if isinstance(optimizer, str) else optimizer
        self.spec = spec_for(spec, self.model.parameters())
        self.trace: Trace | NoTrace = NoTrace()
        self.steps, self.skipped, self._in_backward, self.closed = 0, 0, False, False
        self._scale: Tensor | float = 1.0  # factor of this step's gradients
        self._norms: dict[str, Tensor] = {}  # of gradients that are no longer on the device
        self._upcoming: dict[str, Tensor] | None = None  # batch of the next step
        # Compiled per class, not per layer: like layers share the compiled code, and weights are only its inputs.
        self._compiled = compile_layers
        self._layer_forward = cache(lambda kind: torch.compile(kind.forward) if compile_layers else kind.forward)
        self._mark_trainable()
        self._require_gradients()
        self._place()
        self._intercept()
        self._rest = Updater({n: self._local(p.data) for n, p in self._resident_trainable().items()}, self.spec)

    def _require_gradients(self) -> None:
        """Raise `T1Error` if a parameter to be trained lies behind the loss."""
        behind = {*self.parts.norm.parameters(), *self.parts.head.parameters()} - {self.parts.embed.weight}
        for name, param in self.model.named_parameters():
            lost = self.loss == "mean_square" and param.requires_grad and param in behind
            require(
                not lost,
                f"loss 'mean_square' ends before norm and head: with train={self.train!r} {name!r} would get no "
                "gradient; allowed: train='layers', or marks on layers and embedding alone",
            )

    # -- what subclasses define ------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Move to the device what must be there."""
        raise TypeError(f"{type(self).__name__} does not say where the model lives")

    def _resident_trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that are updated where they lie, by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, batch: dict[str, Tensor], upcoming: dict[str, Tensor] | None = None) -> StepRecord:
        """Train on one batch: `input_ids` (B, S), and `labels` (B, S) if they differ from the inputs.

        upcoming: the next step's batch, if it is known. The host then prepares for it while the device runs the
        backward pass. The next step may still get another batch.

        The loss is the mean over the whole batch, however many micro-batches it is computed in. Returns when the device
        has finished the step. Raises `T1Error` for a batch that does not fit the model, before anything is changed, and
        for gradients that are not finite (unless nonfinite="skip").
        """
        timer = PhaseTimer(self.device)
        pieces, self._upcoming = self._pieces(batch), upcoming
        self._norms = {}
        for param in self.model.parameters():
            param.grad = None  # left over if a step was aborted
        loss = self._backward(pieces, timer)
        norm = self._update()
        self._scale = 1.0
        timer.mark("optimizer")
        wall_ms, phases = timer.stop()
        norm, lost = float(norm), not math.isfinite(float(norm))
        self._settle(lost)
        if lost and self.nonfinite == "raise":
            raise T1Error(f"step {self.steps + 1}: a gradient is not finite (norm {norm}); {self._spoiled()}")
        self.steps, self.skipped = self.steps + 1, self.skipped + lost
        return StepRecord(self.steps, float(loss), batch["input_ids"].numel(), wall_ms, phases, norm, lost)

    def _settle(self, lost: bool) -> None:
        """Called once the host knows whether the gradients were finite; if not, the step is lost."""

    def _spoiled(self) -> str:
        """For an error message: what a step has changed when it fails because a gradient is not finite."""
        return "nothing was updated"

    @torch.no_grad()
    def _update(self) -> Tensor:
        """Update what stays on the device, and return the norm of all gradients.

        A traced step updates layer by layer, so that the trace shows each layer's share.
        """
        params = {n: p for n, p in self._resident_trainable().items() if p.grad is not None}
        grads = {n: self._local(p.grad) for n, p in params.items()}
        norm, self._scale = self._norm(norms_of(grads) | self._norms)
        self._norms = {}
        if params and self._may_update(norm):
            factor = self.schedule(self.steps)
            if isinstance(self.trace, NoTrace):
                self._rest.step(grads, factor, self._scale)
            else:
                for layer, names in self._by_layer(params).items():
                    with self.trace.span("compute", "update", layer):
                        self._rest.step({n: grads[n] for n in names}, factor, self._scale)
        for param in params.values():
            param.grad = None
        return norm

    def _norm(self, norms: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        """The norm of all gradients, from the norms of parameters or layers, and the factor that clips the gradients.

        Both are computed as in `torch.nn.utils.clip_grad_norm_`: in the order of the model's parameters, whatever the
        order of `norms`.
        """
        own = [n for n, _ in self.model.named_parameters() if n in norms]
        found = [norms[n] for n in dict.fromkeys([*own, *norms])]
        norm = torch.linalg.vector_norm(torch.stack(found))
        if self.max_grad_norm is None:
            return norm, 1.0
        return norm, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _may_update(self, norm: Tensor) -> bool:
        """Whether the gradients are finite. To find out, the host waits for the backward pass to finish."""
        return math.isfinite(float(norm))

    def _by_layer(self, params: dict[str, nn.Parameter]) -> dict[int, list[str]]:
        """Names of parameters by decoder layer; -1 holds the rest."""
        layer_of = {id(p): i for i, layer in enumerate(self.parts.layers) for p in layer.parameters()}
        groups: dict[int, list[str]] = {}
        for name, param in params.items():
            groups.setdefault(layer_of.get(id(param), -1), []).append(name)
        return groups

    def forget_shapes(self) -> None:
        """Release memory that is kept for batches of earlier shapes, if there is any."""

    def close(self) -> None:
        """Release the model: its layers run as they did before the trainer. Weights stay where they are."""
        self.closed = True
        for module in (*self.parts.layers, self.parts.norm):
            module.__dict__.pop("forward", None)

    # -- accounting ---------------------------------------------------------------------------------------------

    def flops(self, tokens: int) -> float:
        """FLOPs of a step's matrix products with the weights, forward and backward; no recomputation, no attention."""
        layers = sum(p.numel() for p in self.parts.layers.parameters())
        head = self.parts.head.weight.numel() if self.loss == "cross_entropy" else 0
        return 6.0 * tokens * (layers + head)

    def device_tensors(self) -> list[Tensor]:
        """Tensors held on the device between steps."""
        return [*self.model.parameters(), *self.model.buffers(), *self._rest.state_tensors()]

    def _named_updaters(self) -> list[tuple[str, Updater]]:
        """All updaters, each with the prefix that turns its tensors' names into parameter names."""
        return [("", self._rest)]
