"""One training loop for all modes: plain PyTorch on the device, with recomputed layers, streamed, or sharded.

    gpu         the model on the device, its own forward, `torch.optim`
    gpu-graph   the same step as a single CUDA graph (`t1lib.train.step_graph`)
    ckpt        as gpu, with each layer recomputed in the backward, as Hugging Face does it
    slide       `t1lib.train.stream`: layers on the host
    fsdp        PyTorch's FSDP2 (`t1lib.train.fsdp`)

The loss is a head of `t1lib.heads` on the last hidden states. In one process, all modes compute the same numbers: in
float32 on a CPU bit for bit, unless a batch is split into micro-batches.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from t1lib.errors import T1Error, choose, is_number, is_whole, require, shown
from t1lib.heads import DEFAULT_HEAD, HEADS, linear_cross_entropy
from t1lib.models import split
from t1lib.optimizers import OptimizerSpec, Schedule, spec_for
from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace, PhaseTimer, Trace
from t1lib.train.batch import Piece, check, loss_in_pieces, pieces_of
from t1lib.train.resident import ResidentOptimizer, make_optimizer, precision_of
from t1lib.train.state import Stateful
from t1lib.train.stream import stream, usable
from t1lib.train.update import norms_of

MODES = ("gpu", "gpu-graph", "ckpt", "slide", "fsdp")
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


class Trainer(Stateful):
    """Trains a causal language model one batch at a time; modes gpu and ckpt.

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
    compile_layers   compile the decoder layers with `torch.compile`, once for all layers alike
    nonfinite        what to do in a step with a gradient that is not finite: "raise" `T1Error`, or "skip" the update
                     and count the step
    """

    late = False  # whether updates begin before the host knows that all gradients are finite

    def __init__(
        self, model: PreTrainedModel, mode: str = "gpu", *, device: torch.device | str | None = None,
        head: str = DEFAULT_HEAD, head_options: dict[str, Any] | None = None, optimizer: OptimizerSpec | str = "sgd",
        loss: str = "cross_entropy", train: str = "all", schedule: Callable[[int], float] = Schedule(),  # noqa: B008
        micro_batch: int | None = None, max_grad_norm: float | None = None, compile_layers: bool = False,
        nonfinite: str = "raise",
    ) -> None:  # fmt: skip
        self.mode, self.head, self.loss = mode, choose("head", head, HEADS), choose("loss", loss, LOSSES)
        self.train, self.nonfinite = choose("train", train, TRAINABLE), choose("nonfinite", nonfinite, NONFINITE)
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
        spec = OptimizerSpec(optimizer) if isinstance(optimizer, str) else optimizer
        self.spec = spec_for(spec, model.parameters())
        self.precision = precision_of(self.spec)
        self.steps, self.skipped, self.closed, self._in_backward = 0, 0, False, False
        self.trace: Trace | NoTrace = NoTrace()  # assign a `Trace` to record the spans of the next step's work
        self._compiled = compile_layers
        self._mark_trainable()
        self._replace_forwards()
        self._place()

    def _mark_trainable(self) -> None:
        in_layers, parts = {id(p) for p in self.parts.layers.parameters()}, self.parts
        for param in self.model.parameters() if self.train != "marked" else ():
            param.requires_grad_(self.train == "all" or id(param) in in_layers)
        require(any(p.requires_grad for p in self.model.parameters()), "no parameter of the model is marked")
        behind = {*parts.norm.parameters(), *parts.head.parameters()} - {parts.embed.weight}
        lost = [n for n, p in self.model.named_parameters() if p.requires_grad and p in behind]
        require(
            self.loss != "mean_square" or not lost,
            f"loss 'mean_square' ends before norm and head: with train={self.train!r} {lost[:1]} would get no "
            "gradient; allowed: train='layers', or marks on layers and embedding alone",
        )

    def _replace_forwards(self) -> None:
        if self._compiled:  # per class, not per layer: like layers share the code, and weights are only its inputs
            compiled = cache(lambda kind: torch.compile(kind.forward))
            for layer in self.parts.layers:
                layer.forward = partial(compiled(type(layer)), layer)
        if self.loss == "mean_square":
            self.parts.norm.forward = lambda hidden: hidden

    # -- what modes define -----------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Put the model where the mode wants it, and make the optimizer of `_own`, the trained parameters by name."""
        self.model.to(self.device)
        self._wrap_layers(recompute=self.mode == "ckpt")
        self._own = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = self._resident_optimizer()

    def _wrap_layers(self, recompute: bool) -> None:
        """Trace the layers' calls, and recompute them in the backward."""
        for index, layer in enumerate(self.parts.layers):
            layer.forward = partial(self._run_layer, index, layer.forward)
            if recompute:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def _run_layer(self, index: int, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        again = self._in_backward
        with self.trace.span("compute", "recompute" if again else "forward", index):
            out = forward(*args, **kwargs)
        if isinstance(self.trace, Trace) and out.requires_grad and not again:
            out.register_hook(partial(self._trace_backward, index))
        return out

    def _trace_backward(self, index: int, _: Tensor) -> None:
        # Called when the gradient of this layer's output is ready: the layer above is done, this one begins.
        self.trace.end("compute", "backward", index + 1)
        self.trace.begin("compute", "backward", index)

    def _resident_optimizer(self, kit: bool = False, **options: Any) -> torch.optim.Optimizer:
        """PyTorch's own; the kit's if there are masters, or for parameters on the host beside a GPU (`kit`)."""
        kit = kit or self.precision.masters is not None
        fused = self.device.type == "cuda" and not kit
        plain = make_optimizer(self.spec, self._own.values(), fused, **options)
        return ResidentOptimizer(plain, self.precision, self.device) if kit else plain

    def _hidden(self, ids: Tensor) -> Tensor:
        """The model's output before the head: the last layer's output after the norm."""
        return self.parts.base(input_ids=ids, use_cache=False).last_hidden_state

    def _zero_grad(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def _norm(self) -> Tensor:
        """Clip the gradients; returns their norm before that, (), as `torch.nn.utils.clip_grad_norm_` computes it."""
        grads = [p.grad for p in self._own.values() if p.grad is not None]
        total = self._total(norms_of(grads, exact=self.device.type == "cpu"))
        if self.max_grad_norm is not None:
            torch._foreach_mul_(grads, (self.max_grad_norm / (total + 1e-6)).clamp(max=1.0).to(grads[0].device))
        return total

    def _total(self, norms: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(norms))

    def _update(self) -> None:
        """Update the parameters; in a traced step layer by layer, so that the trace shows each one's share."""
        if isinstance(self.trace, NoTrace):
            self.optimizer.step()
            return
        grads = {n: p.grad for n, p in self._own.items()}
        for param in self._own.values():
            param.grad = None
        for part, names in self.state_parts().items():
            own = [n for n in names if n in grads]
            for name in own:
                self._own[name].grad = grads[name]
            with self.trace.span("compute", "update", -1 if part == "rest" else int(part.removeprefix("layer-"))):
                self.optimizer.step()
            for name in own:
                self._own[name].grad = None

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, batch: dict[str, Tensor], upcoming: dict[str, Tensor] | None = None) -> StepRecord:
        """Train on one batch: `input_ids` (B, S), and `labels` (B, S) if they differ from the inputs.

        The loss is the mean over the whole batch, however many micro-batches it is computed in. Returns when the device
        has finished the step. Raises `T1Error` for a batch that does not fit the model, before anything is changed, and
        for gradients that are not finite (unless nonfinite="skip").
        """
        timer, pieces = PhaseTimer(self.device), self._pieces(batch)
        self._zero_grad()  # left over if a step was aborted
        self._set_rate(self.spec.lr * self.schedule(self.steps))
        loss, norm = self._run(pieces, timer)
        timer.mark("optimizer")
        wall_ms, phases = timer.stop()
        self._zero_grad()
        norm, lost = float(norm), not math.isfinite(float(norm))
        if lost and self.nonfinite == "raise":
            done = "updates had begun, some by it: go on from a checkpoint" if self.late else "nothing was updated"
            raise T1Error(f"step {self.steps + 1}: a gradient is not finite (norm {norm}); {done}")
        self.steps, self.skipped = self.steps + 1, self.skipped + lost
        return StepRecord(self.steps, float(loss), batch["input_ids"].numel(), wall_ms, phases, norm, lost)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _run(self, pieces: list[Piece], timer: PhaseTimer) -> tuple[Tensor, Tensor]:
        """Forward, backward and update; returns the loss and the gradients' norm."""
        loss = self._backward(pieces, timer)
        norm = self._norm()
        if self.late or math.isfinite(float(norm)):
            self._update()
        return loss, norm

    def _pieces(self, batch: dict[str, Tensor]) -> list[Piece]:
        ids, targets = self._checked(batch)
        return [piece.to(self.device) for piece in pieces_of(ids, targets, self._rows, self._width)]

    def _checked(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(input_ids, targets) of a batch, checked to fit the model."""
        require(not self.closed, "the trainer was closed: make another one")
        return check(batch, self.parts.embed.num_embeddings, self.model.config.max_position_embeddings)

    @property
    def _rows(self) -> int | None:
        """Rows per forward (None: all)."""
        return self.micro_batch

    @property
    def _width(self) -> int | None:
        return self.model.config.hidden_size if self.loss == "mean_square" else None

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        """Compute the gradients of the batch's loss, and return the loss."""
        total = torch.zeros((), device=self.device)
        for piece in pieces:
            total += self._back(self._piece_loss(piece, timer), timer)
        return total

    def _back(self, loss: Tensor, timer: PhaseTimer) -> Tensor:
        self._in_backward = True
        try:
            loss.backward()
        finally:
            self._in_backward = False
        self.trace.end("compute", "backward", 0)
        timer.mark("backward")
        return loss.detach()

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        """The piece's share of the batch's loss."""
        hidden, trace = self._hidden(piece.ids), self.trace
        timer.mark("forward")
        trace.begin("compute", "head", -1)
        if hidden.requires_grad:
            hidden.register_hook(partial(_head_done, timer, trace))
        reduction = "mean" if piece.total is None else "sum"
        if self.loss == "mean_square":
            squares = hidden.float().pow(2)
            loss = squares.mean() if piece.total is None else squares.sum()
        else:
            loss = self._head_loss(hidden, piece.targets, reduction)
        timer.mark("head_forward")
        return loss if piece.total is None else loss / (piece.total or math.nan)

    def _head_loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        head = self.parts.head
        return linear_cross_entropy(
            hidden, head.weight, targets, head=self.head, linear_bias=head.bias, softcap=self.parts.softcap,
            reduction=reduction, **self.head_options,
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> float:
        """The batch's loss, without training on it, and without dropout."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            timer = PhaseTimer(self.device)
            return float(sum(self._piece_loss(piece, timer) for piece in self._pieces(batch)))
        finally:
            for module in training:
                module.training = True

    # -- measuring, closing ----------------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        """Tensors held on the device between steps."""
        state = [v for own in self.optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def drain(self) -> None:
        """Wait for updates that are still running; `step` returns without waiting for them."""

    def forget_shapes(self) -> None:
        """Release memory that is kept for batches of earlier shapes, if there is any."""

    def close(self) -> None:
        """Release the model: its layers run as they did before the trainer. Weights stay where they are."""
        self.closed = True
        for module in (*self.parts.layers, self.parts.norm):
            module.__dict__.pop("forward", None)


def _head_done(timer: PhaseTimer, trace: Trace | NoTrace, _: Tensor) -> None:
    timer.mark("head_backward")
    trace.end("compute", "head", -1)


class SlideTrainer(Trainer):
    """Mode slide: `t1lib.train.stream` under this loop. Options beyond those of `Trainer`:

    gpu_memory           budget of device memory, in bytes or as "2GiB", for the batch `plan_for`: (rows, tokens per row)
    choice               what is kept where, instead of a budget: a `t1lib.plan.cost.Choice`
    overlap              False: copies and updates do not run beside the computation
    update_in_backward   update a layer as soon as its gradients are complete (default: unless gradients are clipped, or
                         steps skipped). A step that is aborted then leaves some layers updated and others not

    A whole batch crosses the link once, `micro_batch` rows being computed at a time within each layer.
    """

    def __init__(
        self, model: PreTrainedModel, mode: str = "slide", *, gpu_memory: str | int | None = None,
        plan_for: tuple[int, int] | None = None, choice: Choice | None = None, overlap: bool = True,
        update_in_backward: bool | None = None, **common: Any,
    ) -> None:  # fmt: skip
        planned = gpu_memory is None or plan_for is not None
        require(planned, "gpu_memory needs plan_for=(rows, tokens per row), the batch to plan for")
        self._wish = {"gpu_memory": gpu_memory, "plan_for": plan_for, "choice": choice, "overlap": overlap}
        self._in_backward_wish = update_in_backward
        super().__init__(model, mode, **common)

    def _place(self) -> None:
        together = self.max_grad_norm is not None or self.nonfinite == "skip"
        self.late = not together if self._in_backward_wish is None else self._in_backward_wish
        require(not (self.late and together), "update_in_backward=True with clipping or skipping; allowed: False")
        self._own = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        _, self.optimizer = stream(
            self.model, make_optimizer(self.spec, self._own.values(), fused=False),
            micro_batch=self.micro_batch, layers=self.parts.layers, device=self.device,
            master_weights=self.precision.masters, moments=self.precision.moments, update_in_backward=self.late,
            **self._wish,
        )  # fmt: skip
        self.engine = self.optimizer._engine
        for param in self._unused():
            param.data = param.data.cpu()

    def _unused(self) -> list[nn.Parameter]:
        """Parameters of a frozen embedding, norm and head that the device never computes with."""
        parts, headless = self.parts, self.loss == "mean_square"
        found = [*parts.head.parameters()] * headless
        found += [parts.embed.weight] * (headless or not parts.tied)
        return [p for p in found if not p.requires_grad]

    @property
    def chosen(self) -> Choice:
        """What is kept where."""
        return self.engine.choice

    @property
    def _rows(self) -> None:
        return None

    def _hidden(self, ids: Tensor) -> Tensor:
        embed = self.parts.embed
        embedded = embed(ids.to(embed.weight.device)).to(self.device)
        return self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def _head_loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        chunks = self.head not in ("full", "torch")  # by itself
        whole = self.micro_batch is None or self.micro_batch >= len(hidden) or not hidden.requires_grad
        if chunks or whole:
            return super()._head_loss(hidden, targets, reduction)
        return loss_in_pieces(partial(super()._head_loss, reduction="sum"), hidden, targets, self.micro_batch)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _norm(self) -> Tensor:
        if self.max_grad_norm is None:
            return self.optimizer.grad_norm()
        return self.optimizer.clip_grad_norm_(self.max_grad_norm)

    def _update(self) -> None:
        with self.trace.span("compute", "update", -1):
            self.optimizer.step()

    def step(self, batch: dict[str, Tensor], upcoming: dict[str, Tensor] | None = None) -> StepRecord:
        self.engine.trace = self.trace
        return super().step(batch, upcoming)

    def _weight(self, name: str) -> Tensor:
        return self.engine.weight_of(self.model.get_parameter(name))

    def state_part(self, part: str) -> dict[str, dict[str, Any]]:
        self.drain()
        return super().state_part(part)

    def load_part(self, part: str, state: dict[str, Any]) -> None:
        self.drain()
        super().load_part(part, state)

    def device_tensors(self) -> list[Tensor]:
        away = {*self.engine._homes, *map(id, self._unused())}
        there = [p for p in self.model.parameters() if id(p) not in away]
        state = [v for p in there for v in self.optimizer.state.get(p, {}).values()]
        return [*there, *self.model.buffers(), *state, *self.engine.schedule.device_tensors()]

    def drain(self) -> None:
        self.optimizer.drain()

    def close(self) -> None:
        if not self.closed:
            self.optimizer.close()
        super().close()


def make_trainer(model: PreTrainedModel, mode: str = "gpu", **options: Any) -> Trainer:
    """Make a trainer of `model` in one of `MODES`; `options` are keyword arguments of that trainer's class."""
    from t1lib.train.fsdp import FsdpTrainer
    from t1lib.train.step_graph import GraphTrainer

    own = {"gpu-graph": GraphTrainer, "slide": SlideTrainer, "fsdp": FsdpTrainer}
    kind = own.get(choose("mode", mode, MODES), Trainer)
    accepted = [p for c in (kind, Trainer) for p in inspect.signature(c.__init__).parameters.values()]
    for option in options:
        choose(f"option of mode {mode!r}:", option, dict.fromkeys(p.name for p in accepted if p.kind is p.KEYWORD_ONLY))
    return kind(model, mode, **options)
