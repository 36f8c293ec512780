"""Modes of `t1lib.train.loop` that are more than plain PyTorch: slide, gpu-graph and fsdp."""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from t1lib.errors import choose, require
from t1lib.heads.parallel import require_backend
from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace, PhaseTimer, wrap_layers
from t1lib.train import stream
from t1lib.train.batch import Piece, Ranks, digest_of, join, take_gpu
from t1lib.train.loop import Trainer
from t1lib.train.resident import make_optimizer

MODES = ("gpu", "gpu-graph", "ckpt", "slide", "fsdp")
WORKSPACE = "512MiB"  # of head `fused` when gpu_memory is given, and neither a workspace nor a number of chunks
WARM_UP = 3  # eager steps with batches of a shape, before one is captured
ALIKE = ("loss", "micro_batch", "max_grad_norm", "head", "head_options", "spec")  # mode fsdp: equal on all ranks


class SlideTrainer(Trainer):
    """`t1lib.train.stream` under the loop. Options, which `stream` explains: gpu_memory with plan_for, choice, overlap.
    Without clipping, a layer is updated as soon as its gradients are complete, so that an aborted step may leave some
    layers updated and others not. Each layer computes `micro_batch` rows at a time; the head gets the whole batch, and
    `fused` or `chunked` bounds what that takes."""

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
            self.model, make_optimizer(self.spec, self._trained.values(), fused=False), micro_batch=self.micro_batch,
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
        self.engine.trace = self.trace
        embed = self.parts.embed
        embedded = embed(ids.to(embed.weight.device)).to(self.device)
        return self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def _clip(self) -> Tensor:
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
    """Mode gpu with the step, from forward to update, as one CUDA graph per shape of batch: for steps that wait for
    kernel launches. Each graph keeps its own memory, so there should be few shapes. The learning rate is read from
    device memory, so that it can change. On a GPU only, without micro-batches or master weights."""

    late = True  # whether gradients are finite is known only after the update

    def _place(self) -> None:
        require(self.device.type == "cuda", f"mode 'gpu-graph' on a {self.device.type}; allowed: a CUDA device")
        require(self.micro_batch is None, f"micro_batch={self.micro_batch} in mode 'gpu-graph'; allowed: None")
        masters = f"master_weights={self.spec.master_weights!r} in mode 'gpu-graph'"
        require(self.spec.master_weights is None, f"{masters}; allowed: None, or a model in float32")
        super()._place()
        # By shape: the graph, the piece from which it reads, and its results.
        self._graphs: dict[torch.Size, tuple[Any, Piece, tuple[Tensor, Tensor]]] = {}
        self._seen: Counter[torch.Size] = Counter()  # eager steps by shape
        self._lr = torch.zeros((), dtype=torch.float32, device=self.device)
        self._side = torch.cuda.Stream(self.device)

    def _run(self, pieces: list[Piece], timer: PhaseTimer) -> tuple[Tensor, Tensor]:
        piece, group = pieces[0], self.optimizer.param_groups[0]
        group["lr"] = self._lr.fill_(group["lr"])
        shape = piece.ids.shape
        if self._seen[shape] < WARM_UP:
            self._seen[shape] += 1
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


class FsdpTrainer(Trainer):
    """FSDP2 over all processes of `torch.distributed`'s group, with layers recomputed as in mode ckpt. If there is no
    group, one is created, of the processes that torchrun started or else of this one alone, and outlives the trainer.
    Arguments beyond `Trainer`'s:

    offload   keep and update each process's shard of parameters and optimizer state on the host (default), else on its
              device. In one process this is what one would use on one GPU instead of `stream`

    Arguments and model must be the same on every rank, and so must the whole batch that is passed to `step` and
    `evaluate`, of which each rank takes its rows in order. The loss is the mean over all tokens that count, whichever
    rank has them. In several processes 16-bit gradients are summed in float32, and `state_dict` is refused. Without
    offload, gradients are reduced only after the last micro-batch; until then each device holds them unsharded. If a
    step or an evaluation was aborted, the next one and `load_state_dict` raise `T1Error`.
    """

    _aborted = False

    def __init__(self, model: PreTrainedModel, mode: str, **options: Any) -> None:
        if str(options.get("device")) != "cpu" and not dist.is_initialized():  # else a device has been chosen
            take_gpu()
        super().__init__(model, mode, **options)

    def _place(self, *, offload: bool = True) -> None:
        self._offload = offload
        self._meet()
        mesh = init_device_mesh(self.device.type, (self.ranks.size,))
        on_host = offload and self.device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=True) if on_host else OffloadPolicy()
        narrow = next(self.model.parameters()).dtype.itemsize == 2
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow and not self.ranks.alone else None)
        wrap_layers(self.parts.layers, lambda: self.trace, recompute=True)
        for module in (*self.parts.layers, self.model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy)
            if not self.ranks.alone:  # sum gradients, not average: each rank's loss is a share of the batch's
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.model.forward = super()._piece_loss  # FSDP gathers embedding, norm and head when the model is called
        self._trained = {n: nn.Parameter(self._weight(n)) for n in self._trained}
        self.optimizer = self._resident_optimizer(on_host)

    def _meet(self) -> None:
        """Join the process group, creating it if there is none. `T1Error` if the ranks' arguments or models differ."""
        if not dist.is_initialized():
            join()
        require_backend(dist.group.WORLD, self.device.type)
        self.ranks = Ranks(dist.get_rank(), dist.get_world_size())
        if not self.ranks.alone:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            several = f"loss {self.loss!r} in {self.ranks.size} processes; allowed: one process"
            require(self.loss == "cross_entropy", several)
            facts = {name: getattr(self, name) for name in ALIKE}
            facts |= {"device": self.device.type, "offload": self._offload}
            self.ranks.agree(facts | {"the model's weights": digest_of(dict(self.model.named_parameters()))})

    def _weight(self, name: str) -> Tensor:
        return _local(self.model.get_parameter(name).data)

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        with self._intact():
            return self.model(piece, timer)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        with self._intact():
            self.model.set_requires_gradient_sync(self._offload or self.ranks.alone)
            total = super()._backward(pieces[:-1], timer)
            self.model.set_requires_gradient_sync(True)
            total += super()._backward(pieces[-1:], timer)
            for name, shard in self._trained.items():
                param = self.model.get_parameter(name)
                shard.grad, param.grad = None if param.grad is None else _local(param.grad), None
            return self.ranks.sum(total, self.device)

    @contextmanager
    def _intact(self) -> Iterator[None]:
        self._require_intact()
        try:
            yield
        except BaseException:
            self._aborted = True
            raise

    def evaluate(self, batch: dict[str, Tensor]) -> float:
        loss = super().evaluate(batch)
        self.model.reshard()  # by itself, FSDP would do it only in a backward
        return loss

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_intact()
        super().load_state_dict(state)

    def _require_intact(self) -> None:
        """FSDP2 may hold sums, which would count in the next step, or gathered weights, in which loaded ones would be
        lost."""
        told = "a step or an evaluation was aborted, of which FSDP2 may hold parts: make a new trainer"
        require(not self._aborted, told)

    def close(self) -> None:
        self.model.__dict__.pop("forward", None)
        super().close()


def make_trainer(model: PreTrainedModel, mode: str = "gpu", **options: Any) -> Trainer:
    """A trainer of `model` in one of `MODES`. `options` are keyword arguments of `Trainer` and, in modes slide and
    fsdp, those that `SlideTrainer` and `FsdpTrainer` explain. Raises `T1Error` for an unknown mode, an option that the
    mode does not take, or a value that does not fit; in mode slide also as `t1lib.train.stream` does."""
    own = {"gpu-graph": GraphTrainer, "slide": SlideTrainer, "fsdp": FsdpTrainer}
    kind = own.get(choose("mode", mode, MODES), Trainer)
    accepted = [p for f in (kind._place, Trainer.__init__) for p in inspect.signature(f).parameters.values()]
    for option in options:
        choose(f"option of mode {mode!r}:", option, dict.fromkeys(p.name for p in accepted if p.kind is p.KEYWORD_ONLY))
    return kind(model, mode, **options)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
