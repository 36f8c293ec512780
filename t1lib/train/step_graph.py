"""Mode `gpu-graph`: forward, loss, backward and update as a single CUDA graph, for steps in which launches bind."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import require
from t1lib.timing import NoTrace, PhaseTimer
from t1lib.train.batch import Piece
from t1lib.train.loop import Trainer

WARM_UP = 3  # eager steps with batches of a shape, before one is captured
UNTIMED = SimpleNamespace(mark=lambda phase: None)  # in place of a `PhaseTimer`: a graph has no events of its own


class GraphTrainer(Trainer):
    """As mode gpu, captured: for batches of few shapes, of which each keeps its own memory.

    Whether gradients are finite is known only after the update. The learning rate is read from the device's memory.
    """

    late = True

    def _place(self) -> None:
        require(self.device.type == "cuda", f"mode 'gpu-graph' on a {self.device.type}; allowed: a CUDA device")
        whole = self.micro_batch is None
        require(whole, f"micro_batch={self.micro_batch} in mode 'gpu-graph'; allowed: None")
        plain = self.spec.precision.masters is None
        require(plain, "master_weights=True in mode 'gpu-graph'; allowed: False, or a model in float32")
        super()._place()
        # By shape: the graph, the piece from which it reads, and its results.
        self._graphs: dict[torch.Size, tuple[Any, Piece, tuple[Tensor, Tensor]]] = {}
        self._seen: dict[torch.Size, int] = {}  # eager steps by shape
        self._lr = torch.zeros((), dtype=torch.float32, device=self.device)
        options = {"capturable": True} if self.spec.name == "adamw" else {}
        self.optimizer = self._resident_optimizer(**options)
        self._side = torch.cuda.Stream(self.device)

    def _rate(self) -> Tensor:
        return self._lr.fill_(super()._rate())

    def _run(self, pieces: list[Piece], timer: PhaseTimer) -> tuple[Tensor, Tensor]:
        piece = pieces[0]
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
                results = super()._run([held], UNTIMED)
        finally:
            self.trace = trace
            self._zero_grad()
        return graph, held, results
