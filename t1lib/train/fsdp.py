"""Mode `fsdp`: PyTorch's FSDP2 in any number of processes, with or without CPU offload.

Every process holds and updates its shard of parameters, gradients and optimizer state, on the host or on its device.
Layers are recomputed in the backward, as in mode `ckpt`. In one process with offload, this is the usual alternative on
one GPU.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.heads.parallel import require_backend
from t1lib.timing import PhaseTimer
from t1lib.train.batch import Piece
from t1lib.train.loop import Trainer
from t1lib.train.ranks import Ranks, join, take_gpu
from t1lib.train.wrap import wrap_layers

ALIKE = ("loss", "micro_batch", "max_grad_norm", "head", "head_options", "spec")


class FsdpTrainer(Trainer):
    """FSDP2 over all processes of `torch.distributed`'s group. If there is none, it is created: of the processes that
    torchrun started, else of this one alone; it stays when the trainer is closed. Arguments beyond `Trainer`'s:

    offload   keep parameters, gradients and optimizer state on the host (else on the device)

    Arguments and model must be the same on every rank, and so must the whole batch that is passed to `step` and
    `evaluate`, of which each rank takes its rows in order. The loss is the mean over all tokens that count, whichever
    rank has them. In several processes 16-bit gradients are summed in float32, and there is no `state_dict`. Without
    offload they are reduced only after the last micro-batch; until then each device holds them unsharded.
    """

    def __init__(self, model: PreTrainedModel, mode: str = "fsdp", **options: Any) -> None:
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
            if not self.ranks.alone:  # a sum: each loss is a share of the batch's
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.model.forward = super()._piece_loss  # FSDP gathers embedding, norm and head when the model is called
        self._own = {n: nn.Parameter(self._weight(n)) for n in self._own}
        self.optimizer = self._resident_optimizer(on_host)

    def _meet(self) -> None:
        """Join the process group, creating it if there is none, and check that all ranks have the same model."""
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

    def _checked(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids, targets = super()._checked(batch)
        if not self.ranks.alone:  # each takes its own rows
            self.ranks.agree({"the whole batch": digest_of({"input_ids": ids, "labels": targets})})
        return ids, targets

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        return self.model(piece, timer)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        self.model.zero_grad()  # left over if a step was aborted
        self.model.set_requires_gradient_sync(self._offload or self.ranks.alone)
        total = super()._backward(pieces[:-1], timer)
        self.model.set_requires_gradient_sync(True)
        total += super()._backward(pieces[-1:], timer)
        for name, shard in self._own.items():
            param = self.model.get_parameter(name)
            shard.grad, param.grad = None if param.grad is None else _local(param.grad), None
        return self.ranks.sum(total, self.device)

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> float:
        mine = torch.tensor(super().evaluate(batch), dtype=torch.float64)
        self.model.reshard()  # by itself, FSDP would do it only in a backward
        return float(self.ranks.sum(mine, self.device))

    def close(self) -> None:
        self.model.__dict__.pop("forward", None)
        super().close()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Digest of names, dtypes, shapes, marks as trained, and values bit by bit."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]
