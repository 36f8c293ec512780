"""Two modes of `t1lib.train.loop`: `slide`, which is `t1lib.train.stream` under its loop, and `gpu-graph`, where
forward, loss, backward and update are a single CUDA graph, for steps in which launches bind."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace, PhaseTimer
from t1lib.train.batch import Piece
from t1lib.train.loop import Trainer
from t1lib.train.resident import make_optimizer
from t1lib.train.stream import stream

WORKSPACE = "512MiB"  # of head fused under a budget of device memory, unless it is given one
WARM_UP = 3  # eager steps with batches of a shape, before one is captured


class SlideTrainer(Trainer):
    """`gpu_memory` (with `plan_for`), `choice` and `overlap` are options of `t1lib.train.stream`, which explains them.

    Without clipping, a layer is updated as soon as its gradients are complete, so that an aborted step may leave some
    layers updated and others not. Each layer computes `micro_batch` rows at a time; the head gets the whole batch, and
    `fused` or `chunked` bounds what that takes.
    """

    def __init__(self, model: PreTrainedModel, mode: str = "slide", **options: Any) -> None:
        super().__init__(model, mode, **options)

    def _place(
        self, *, gpu_memory: str | int | None = None, plan_for: tuple[int, int] | None = None,
        choice: Choice | None = None, overlap: bool = True,
    ) -> None:  # fmt: skip
        planned = gpu_memory is None or plan_for is not None
        require(planned, "gpu_memory without plan_for; allowed: plan_for=(rows, tokens per row) beside it")
        self.late = self.max_grad_norm is None
        if gpu_memory is not None and self.head == "fused" and "chunks" not in self.head_options:
            self.head_options = {"workspace": WORKSPACE, **self.head_options}
        _, self.optimizer = stream(
            self.model, make_optimizer(self.spec, self._own.values(), fused=False), micro_batch=self.micro_batch,
            layers=self.parts.layers, device=self.device, master_weights=self.spec.master_weights,
            moments=self.spec.moments, update_in_backward=self.late, accumulate=False, gpu_memory=gpu_memory,
            plan_for=plan_for, choice=choice, overlap=overlap, head={"head": self.head, **self.head_options},
        )  # fmt: skip
        self.engine = self.optimizer._engine
        ends = [self.parts.embed.weight, self.parts.head.weight] if self.loss == "mean_square" else []
        self._unused = [p for p in ends if not p.requires_grad]  # the device never computes with them
        for param in self._unused:
            param.data = param.data.cpu()

    def _hidden(self, ids: Tensor) -> Tensor:
        embed, self.engine.trace = self.parts.embed, self.trace
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

    def device_tensors(self) -> list[Tensor]:
        return [t for t in self.optimizer.device_tensors() if not any(t is param for param in self._unused)]

    def drain(self) -> None:
        self.optimizer.drain()

    def close(self) -> None:
        self.optimizer.close()
        super().close()


class GraphTrainer(Trainer):
    """As mode gpu, captured: for batches of few shapes, of which each keeps its own memory. The learning rate is read
    from the device's memory."""

    late = True  # whether gradients are finite is known only after the update

    def _place(self) -> None:
        require(self.device.type == "cuda", f"mode 'gpu-graph' on a {self.device.type}; allowed: a CUDA device")
        require(self.micro_batch is None, f"micro_batch={self.micro_batch} in mode 'gpu-graph'; allowed: None")
        masters = f"master_weights={self.spec.master_weights!r} in mode 'gpu-graph'"
        require(self.spec.master_weights is None, f"{masters}; allowed: None, or a model in float32")
        super()._place()
        # By shape: the graph, the piece from which it reads, and its results.
        self._graphs: dict[torch.Size, tuple[Any, Piece, tuple[Tensor, Tensor]]] = {}
        self._seen: dict[torch.Size, int] = {}  # eager steps by shape
        self._lr = torch.zeros((), dtype=torch.float32, device=self.device)
        self._side = torch.cuda.Stream(self.device)

    def _run(self, pieces: list[Piece], timer: PhaseTimer) -> tuple[Tensor, Tensor]:
        piece, group = pieces[0], self.optimizer.param_groups[0]
        group["lr"] = self._lr.fill_(group["lr"])
        shape = piece.ids.shape
        if (seen := self._seen.get(shape, 0)) < WARM_UP:
            self._seen[shape] = seen + 1
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                found = super()._run(pieces, timer)
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            return found
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(piece)
        graph, held, results = self._graphs[shape]
        held.ids.copy_(piece.ids)
        held.targets.copy_(piece.targets)
        graph.replay()
        timer.mark("graph")
        return results

    def _captured(self, piece: Piece) -> tuple[Any, Piece, tuple[Tensor, Tensor]]:
        held, graph = Piece(piece.ids.clone(), piece.targets.clone()), torch.cuda.CUDAGraph()
        trace, self.trace = self.trace, NoTrace()
        try:
            with torch.cuda.graph(graph):
                results = super()._run([held], PhaseTimer("cpu"))  # a graph has no events of its own
        finally:
            self.trace = trace
            self.optimizer.zero_grad()
        return graph, held, results
