"""Mode `slide`: `t1lib.train.stream` under the loop of `t1lib.train.loop`."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.plan.cost import Choice
from t1lib.train.loop import StepRecord, Trainer
from t1lib.train.resident import make_optimizer
from t1lib.train.stream import stream

WORKSPACE = "512MiB"  # of head fused under a budget of device memory, unless it is given one


class SlideTrainer(Trainer):
    """`gpu_memory` (with `plan_for`), `choice` and `overlap` are options of `t1lib.train.stream`, which explains them.

    Without clipping, a layer is updated as soon as its gradients are complete, so that an aborted step may leave some
    layers updated and others not. Each layer computes `micro_batch` rows at a time; the head gets the whole batch, and
    `fused` or `chunked` bounds what that takes.
    """

    def __init__(
        self, model: PreTrainedModel, mode: str = "slide", *, gpu_memory: str | int | None = None,
        plan_for: tuple[int, int] | None = None, choice: Choice | None = None, overlap: bool = True, **common: Any,
    ) -> None:  # fmt: skip
        planned = gpu_memory is None or plan_for is not None
        require(planned, "gpu_memory without plan_for; allowed: plan_for=(rows, tokens per row) beside it")
        self._options = {"gpu_memory": gpu_memory, "plan_for": plan_for, "choice": choice, "overlap": overlap}
        super().__init__(model, mode, **common)

    def _place(self) -> None:
        self.late, options = self.max_grad_norm is None, self._options
        if options["gpu_memory"] is not None and self.head == "fused" and "chunks" not in self.head_options:
            self.head_options = {"workspace": WORKSPACE, **self.head_options}
        _, self.optimizer = stream(
            self.model, make_optimizer(self.spec, self._own.values(), fused=False), micro_batch=self.micro_batch,
            layers=self.parts.layers, device=self.device, master_weights=self.spec.precision.masters,
            moments=self.spec.moments, update_in_backward=self.late, accumulate=False,
            head={"head": self.head, **self.head_options}, **options,
        )  # fmt: skip
        self.engine = self.optimizer._engine
        ends = [self.parts.embed.weight, self.parts.head.weight] if self.loss == "mean_square" else []
        self._unused = [p for p in ends if not p.requires_grad]  # the device never computes with them
        for param in self._unused:
            param.data = param.data.cpu()

    def _hidden(self, ids: Tensor) -> Tensor:
        embed = self.parts.embed
        embedded = embed(ids.to(embed.weight.device)).to(self.device)
        return self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def _norm(self) -> Tensor:
        if self.max_grad_norm is None:
            return self.optimizer.grad_norm()
        return self.optimizer.clip_grad_norm_(self.max_grad_norm)

    def _update(self) -> None:
        resident = any(p.grad is not None for p in self.engine.others())
        with self.trace.span("compute", "update", -1) if resident else nullcontext():
            self.optimizer.step()

    def step(self, batch: dict[str, Tensor]) -> StepRecord:
        self.engine.trace = self.trace
        return super().step(batch)

    def device_tensors(self) -> list[Tensor]:
        unused = set(map(id, self._unused))
        return [t for t in self.optimizer.device_tensors() if id(t) not in unused]

    def drain(self) -> None:
        self.optimizer.drain()

    def close(self) -> None:
        if not self.closed:
            self.optimizer.close()
        super().close()
