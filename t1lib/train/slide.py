"""Mode `slide`: `t1lib.train.stream` under the loop of `t1lib.train.loop`."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import is_whole, require, shown
from t1lib.heads import parse_bytes
from t1lib.memory import host_available
from t1lib.plan.choose import choose_plan
from t1lib.plan.cost import Choice
from t1lib.plan.rates import this_machine
from t1lib.plan.work import Work, with_head, work_of
from t1lib.train.batch import loss_in_pieces
from t1lib.train.loop import StepRecord, Trainer
from t1lib.train.resident import make_optimizer
from t1lib.train.stream import stream
from t1lib.train.update import State

BY_ROWS = ("full", "torch")  # heads that take a micro-batch at a time; the others make chunks of the batch themselves
WORKSPACE = "512MiB"  # of head fused under a budget of device memory, unless it is given one


class SlideTrainer(Trainer):
    """Options beyond those of `Trainer`:

    gpu_memory           budget of device memory, in bytes or as "2GiB", for the batch `plan_for`: (rows, tokens of one)
    choice               what is kept where, instead of a budget: a `t1lib.plan.cost.Choice`
    overlap              False: copies and updates do not run beside the computation
    update_in_backward   update a layer as soon as its gradients are complete (default: unless gradients are clipped, or
                         steps skipped). A step that is aborted then leaves some layers updated and others not

    A whole batch crosses the link once, `micro_batch` rows being computed at a time within each layer.
    """

    in_pieces = False

    def __init__(
        self, model: PreTrainedModel, mode: str = "slide", *, gpu_memory: str | int | None = None,
        plan_for: tuple[int, int] | None = None, choice: Choice | None = None, overlap: bool = True,
        update_in_backward: bool | None = None, **common: Any,
    ) -> None:  # fmt: skip
        pair = isinstance(plan_for, tuple | list) and len(plan_for) == 2 and all(is_whole(n, 1) for n in plan_for)
        require(gpu_memory is None or pair, f"gpu_memory needs plan_for=(rows, tokens per row), not {shown(plan_for)}")
        require(gpu_memory is None or choice is None, "gpu_memory and choice: give one of them")
        self._budget, self._wish = (gpu_memory, plan_for), (choice, overlap, update_in_backward)
        super().__init__(model, mode, **common)

    def _place(self) -> None:
        (gpu_memory, plan_for), (choice, overlap, in_backward) = self._budget, self._wish
        together = self.max_grad_norm is not None or self.nonfinite == "skip"
        self.late = not together if in_backward is None else in_backward
        require(not (self.late and together), "update_in_backward=True with clipping or skipping; allowed: False")
        if gpu_memory is not None:
            if self.head == "fused" and "chunks" not in self.head_options:
                self.head_options = {"workspace": WORKSPACE, **self.head_options}
            held = sum(p.nbytes for p in self.model.parameters() if not p.is_cuda)  # is on the host already
            host = host_available() * 9 // 10 + held
            choice = choose_plan(self.work(*plan_for), parse_bytes(gpu_memory), this_machine(), host)
        self._own = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        _, self.optimizer = stream(
            self.model, make_optimizer(self.spec, self._own.values(), fused=False),
            micro_batch=self.micro_batch, layers=self.parts.layers, device=self.device,
            master_weights=self.precision.masters, moments=self.precision.moments, update_in_backward=self.late,
            choice=choice, overlap=overlap,
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

    def work(self, rows: int, seq: int) -> Work:
        """What a step of `rows` × `seq` tokens needs, for `t1lib.plan`."""
        workspace = parse_bytes(self.head_options.get("workspace", WORKSPACE))
        work = work_of(
            self.model, self.spec, rows=rows, seq=seq, micro_batch=self.micro_batch, workspace=workspace,
            together=not self.late, loss_head=self.loss == "cross_entropy", cuda=self.device.type == "cuda",
        )  # fmt: skip
        return with_head(replace(work, head_tokens=work.micro_tokens) if self.head in BY_ROWS else work, self.head)

    @property
    def chosen(self) -> Choice:
        """What is kept where."""
        return self.engine.choice

    def _hidden(self, ids: Tensor) -> Tensor:
        embed = self.parts.embed
        embedded = embed(ids.to(embed.weight.device)).to(self.device)
        return self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def _head_loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        whole = self.micro_batch is None or self.micro_batch >= len(hidden) or not hidden.requires_grad
        if whole or self.head not in BY_ROWS:
            return super()._head_loss(hidden, targets, reduction)
        return loss_in_pieces(partial(super()._head_loss, reduction="sum"), hidden, targets, self.micro_batch)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()

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

    def _weight(self, name: str) -> Tensor:
        return self.engine.weight_of(self.model.get_parameter(name))

    def _saved(self, name: str) -> State:
        return self.optimizer.shown(self._own[name])

    def _restore(self, name: str, saved: State) -> None:
        self.optimizer.restore(self._own[name], saved)

    def state_part(self, part: str) -> dict[str, dict[str, Any]]:
        self.drain()
        return super().state_part(part)

    def load_part(self, part: str, state: dict[str, Any]) -> None:
        self.drain()
        super().load_part(part, state)
        if part == "rest":
            self.engine.changed()

    def device_tensors(self) -> list[Tensor]:
        engine = self.engine
        away = {*engine.streamed, *map(id, self._unused())}
        there = [p for p in self.model.parameters() if id(p) not in away]
        state = [v for p in there if id(p) not in engine.travelling for v in self.optimizer.state.get(p, {}).values()]
        return [*there, *self.model.buffers(), *state, *engine.schedule.device_tensors()]

    def drain(self) -> None:
        self.optimizer.drain()

    def close(self) -> None:
        if not self.closed:
            self.optimizer.close()
        super().close()
