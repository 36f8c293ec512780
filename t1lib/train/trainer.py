"""What all trainers share: a step, its loss, its checks, the interception of the layers, checkpoints."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import T1Error, choose, require
from t1lib.heads import DEFAULT_HEAD, HEADS, linear_cross_entropy, next_token_targets
from t1lib.measure.timing import NoTrace, PhaseTimer, Trace
from t1lib.train.models import split
from t1lib.train.optim import OptimizerSpec, Updater

LOSSES = ("cross_entropy", "mean_square")
TRAINABLE = ("all", "layers")


@dataclass(frozen=True)
class StepRecord:
    """One training step: its loss, wall time (ms) between two synchronised boundaries, and time of each phase (ms)."""

    step: int
    loss: float
    tokens: int
    wall_ms: float
    phases: dict[str, float]


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; on its way to a GPU from pinned memory, so that the host does not wait for the copy."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Trainer:
    """Trains a causal language model one batch at a time. Subclasses say where the layers live and how they run.

    model      from `build_model`; the trainer places it and owns it until `close`
    device     where the computing is done: a CUDA device, or the CPU
    head       name of an output layer in `t1lib.heads.HEADS`; `head_options` go with it
    optimizer  an `OptimizerSpec`, or its name
    loss       "cross_entropy" of the next token, or "mean_square" of the last layer's output before the norm: T1M1's
               setting, which has no output layer
    train      "all" parameters, or only the decoder "layers"
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
    ) -> None:
        self.head, self.loss = choose("head", head, HEADS), choose("loss", loss, LOSSES)
        self.train = choose("train", train, TRAINABLE)
        require(
            not (loss == "mean_square" and train == "all"),
            "loss 'mean_square' ends before the norm and the head: with train='all' they would get no gradient; "
            "allowed: train='layers'",
        )
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model, self.parts, self.head_options = model, split(model), head_options or {}
        self.spec = OptimizerSpec(optimizer) if isinstance(optimizer, str) else optimizer
        self.trace: Trace | NoTrace = NoTrace()
        self.steps, self._in_backward = 0, False
        self._mark_trainable()
        self._place()
        self._intercept()
        self._rest = Updater({n: p.data for n, p in self._resident_trainable().items()}, self.spec)

    # -- what subclasses define ------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Move what must be on the device there."""
        raise TypeError(f"{type(self).__name__} does not say where the model lives")

    def _run_layer(self, index: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run decoder layer `index`; by default, as the model itself would."""
        return self._compute(index, hidden, kwargs)

    def _resident_trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that stay on the device, by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, batch: dict[str, Tensor]) -> StepRecord:
        """Train on one batch: `input_ids` (B, S), and `labels` (B, S) where they are not the inputs themselves.

        Returns when the device is done with the step. Raises `T1Error` for a batch that does not fit the model, before
        anything is changed.
        """
        ids, targets = self._check(batch)
        timer = PhaseTimer(self.device)
        loss = self._forward(ids, targets, timer)
        self._in_backward = True
        try:
            loss.backward()
        finally:
            self._in_backward = False
        self.trace.end("compute", "backward", 0)
        timer.mark("backward")
        self._update()
        timer.mark("optimizer")
        wall_ms, phases = timer.stop()
        self.steps += 1
        return StepRecord(self.steps, loss.item(), ids.numel(), wall_ms, phases)

    def _check(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids = batch.get("input_ids")
        found = tuple(ids.shape) if isinstance(ids, Tensor) else ids
        whole = isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() > 0
        require(whole, f"a batch needs `input_ids` of shape (batch, sequence), with tokens; found {found}")
        vocabulary, positions = self.parts.embed.num_embeddings, self.model.config.max_position_embeddings
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            bad = low if low < 0 else high
            raise T1Error(f"input_ids hold {bad}; allowed: 0 to {vocabulary - 1}, the model's vocabulary")
        require(ids.shape[1] <= positions, f"sequence of {ids.shape[1]} tokens; the model has {positions} positions")
        labels = batch.get("labels", ids)
        require(isinstance(labels, Tensor), f"labels are {type(labels).__name__}; allowed: a tensor like input_ids")
        require(labels.shape == ids.shape, f"labels {tuple(labels.shape)} do not match input_ids {tuple(ids.shape)}")
        valid = labels[labels != -100]
        if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= vocabulary):
            bad = int(valid.min()) if int(valid.min()) < 0 else int(valid.max())
            raise T1Error(f"labels hold {bad}; allowed: 0 to {vocabulary - 1}, or -100 for a token to ignore")
        return ids, next_token_targets(labels)

    def _forward(self, ids: Tensor, targets: Tensor, timer: PhaseTimer) -> Tensor:
        embed = self.parts.embed
        embedded = _send(embed(_send(ids, embed.weight.device)), self.device)
        hidden = self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state
        timer.mark("forward")
        hidden.register_hook(lambda _: timer.mark("head_backward"))
        if self.loss == "mean_square":
            loss = hidden.float().pow(2).mean()
        else:
            head = self.parts.head
            loss = linear_cross_entropy(
                hidden, head.weight, _send(targets, self.device), head=self.head, linear_bias=head.bias,
                softcap=self.parts.softcap, **self.head_options,
            )  # fmt: skip
        timer.mark("head_forward")
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        """Update what stays on the device; in a traced step layer by layer, so that each layer's share is seen."""
        params = self._resident_trainable()
        if isinstance(self.trace, NoTrace):
            self._rest.step({n: p.grad for n, p in params.items()})
        else:
            for layer, names in self._by_layer(params).items():
                with self.trace.span("compute", "update", layer):
                    self._rest.step({n: params[n].grad for n in names})
        for param in params.values():
            param.grad = None

    def _by_layer(self, params: dict[str, nn.Parameter]) -> dict[int, list[str]]:
        """Names of parameters by decoder layer; -1 holds the rest."""
        layer_of = {id(p): i for i, layer in enumerate(self.parts.layers) for p in layer.parameters()}
        groups: dict[int, list[str]] = {}
        for name, param in params.items():
            groups.setdefault(layer_of.get(id(param), -1), []).append(name)
        return groups

    # -- the layers ------------------------------------------------------------------------------------------------

    def _mark_trainable(self) -> None:
        in_layers = {id(p) for p in self.parts.layers.parameters()}
        for param in self.model.parameters():
            param.requires_grad_(self.train == "all" or id(param) in in_layers)

    def _intercept(self) -> None:
        """Let the model's own forward run its layers through `_run_layer`: masks, rotations, scalings stay its own."""
        for index, layer in enumerate(self.parts.layers):
            layer.forward = partial(self._run_layer, index)
        if self.loss == "mean_square":
            self.parts.norm.forward = lambda hidden: hidden

    def close(self) -> None:
        """Give the model back: its layers run as before. Weights stay where they are."""
        for module in (*self.parts.layers, self.parts.norm):
            module.__dict__.pop("forward", None)

    def _compute(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The layer's own computation, traced: forward, or recomputation when it happens within the backward."""
        layer = self.parts.layers[index]
        again = self._in_backward
        with self.trace.span("compute", "recompute" if again else "forward", index):
            out = type(layer).forward(layer, hidden, **kwargs)
        if not isinstance(self.trace, NoTrace) and not again and out.requires_grad:
            out.register_hook(partial(self._trace_backward, index))
        return out

    def _trace_backward(self, index: int, _: Tensor) -> None:
        # Called when the gradient of this layer's output is ready: the layer above is done, this one begins.
        self.trace.end("compute", "backward", index + 1)
        self.trace.begin("compute", "backward", index)

    # -- accounting and checkpoints --------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        """Tensors held on the computing side between steps."""
        return [*self.model.parameters(), *self.model.buffers(), *self._rest.state_tensors()]

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on: weights and optimizer state by parameter name, and the step; CPU copies.

        The format is the same in every mode: a run can change its mode at a checkpoint.
        """
        weights = {n: p.detach().cpu().clone() for n, p in self.model.named_parameters()}
        optimizer = {prefix + n: s for prefix, u in self._named_updaters() for n, s in u.state_dict().items()}
        return {"step": self.steps, "model": weights, "optimizer": optimizer}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s result. Raises `T1Error`, before anything is changed, if it is of another model."""
        own = dict(self.model.named_parameters())
        for name, param in own.items():
            saved = state["model"].get(name)
            require(saved is not None, f"the checkpoint has no parameter {name!r}: it is of another model")
            require(
                saved.shape == param.shape,
                f"checkpoint's {name!r} has shape {tuple(saved.shape)}, the model's {tuple(param.shape)}",
            )
        for prefix, updater in self._named_updaters():
            updater.check_state(state["optimizer"], prefix)
        for name, param in own.items():
            param.copy_(state["model"][name])
        for prefix, updater in self._named_updaters():
            updater.load_state_dict(state["optimizer"], prefix)
        self.steps = state["step"]

    def _named_updaters(self) -> list[tuple[str, Updater]]:
        """All updaters, each with what its tensors' names lack of the parameters' names."""
        return [("", self._rest)]
