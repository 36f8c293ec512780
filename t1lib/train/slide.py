"""Mode `slide`: `t1lib.train.stream` under the loop of `t1lib.train.loop`."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.plan.cost import Choice
from t1lib.train.batch import loss_in_pieces
from t1lib.train.loop import StepRecord, Trainer
from t1lib.train.resident import make_optimizer
from t1lib.train.stream import stream


class SlideTrainer(Trainer):
    """Options beyond those of `Trainer`:

    gpu_memory           budget of device memory, in bytes or as "2GiB", for the batch `plan_for`: (rows, tokens of one)
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
