"""Mode `fsdp`: PyTorch's FSDP2 in any number of processes, with or without CPU offload.

Every process holds its shard of parameters, gradients and optimizer state, on the host or on its device. In forward and
backward, FSDP all-gathers a layer's weights on the device before the layer runs and frees them afterwards; gradients
are summed over all processes as they become available, and at the end each process updates its shard. Layers are
recomputed in the backward, as in mode `ckpt`. In one process with offload, this is the usual alternative on one GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from t1lib.errors import choose
from t1lib.measure.timing import PhaseTimer
from t1lib.train.batch import Piece
from t1lib.train.resident import CkptTrainer
from t1lib.train.several import Several

COMPUTE = ("float32", "bfloat16")


class FsdpTrainer(Several, CkptTrainer):
    """FSDP2 over all processes of `torch.distributed`'s group. If there is none, it is created: of the processes that
    torchrun started, else of this one alone. Arguments beyond `Trainer`'s, the same on every rank:

    offload        keep parameters, gradients and optimizer state on the host (else on the device)
    compute_dtype  FSDP2's mixed precision: gather and compute in this dtype; keep and update in the model's own

    The model must be the same on every rank, and so must the batch that is passed to `step` and `evaluate`: the whole
    batch, of which each rank takes its rows in order, `micro_batch` at a time. The loss is the mean over all tokens
    that count, whichever rank has them. In several processes 16-bit gradients are summed in float32. Without offload
    they are reduced only after the last micro-batch; until then each device holds them unsharded.
    """

    mode = "fsdp"

    def __init__(
        self, model: PreTrainedModel, *, offload: bool = True, compute_dtype: str | None = None, **common: Any
    ) -> None:
        self._offload = offload
        self._compute_dtype = None if compute_dtype is None else choose("compute_dtype", compute_dtype, COMPUTE)
        super().__init__(model, **common)

    def _place(self) -> None:
        self._meet()
        mesh = init_device_mesh(self.device.type, (self.ranks.size,))
        on_host = self._offload and self.device.type == "cuda"
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=True) if on_host else OffloadPolicy()}
        policy["mp_policy"] = self._precision()
        for layer in self.parts.layers:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(self.model, mesh=mesh, **policy)
        self._defers = not self._offload and not self.ranks.alone
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and not self.ranks.alone:  # a sum: each loss is a share of the batch's
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            for name, buffer in module.named_buffers(recurse=False):  # FSDP moves parameters only
                setattr(module, name, buffer.to(self.device))

    def _precision(self) -> MixedPrecisionPolicy:
        compute = None if self._compute_dtype is None else getattr(torch, self._compute_dtype)
        narrow = (compute or next(self.model.parameters()).dtype).itemsize == 2
        adds = torch.float32 if narrow and not self.ranks.alone else None
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=adds)

    def _own_facts(self) -> dict[str, Any]:
        return {"offload": self._offload, "compute_dtype": self._compute_dtype}

    # -- sharded weights, gradients and state ----------------------------------------------------------------------

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _whole(self, param: Tensor, part: Tensor) -> Tensor:
        if self.ranks.alone or part.dim() == 0:
            return part
        like = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        dealt_out = DTensor.from_local(part.to(self.device), param.device_mesh, param.placements, **like)
        return dealt_out.full_tensor().cpu()

    def _part(self, whole: Tensor) -> Tensor:
        if self.ranks.alone or whole.dim() == 0:
            return whole
        parts = whole.chunk(self.ranks.size)  # fewer than ranks if there are too few rows
        return parts[self.ranks.rank] if self.ranks.rank < len(parts) else whole[:0]

    def device_tensors(self) -> list[Tensor]:
        return [self._local(t) for t in super().device_tensors()]

    # -- a step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> float:
        found = super().evaluate(batch)
        self.model.reshard()  # by itself, FSDP would do it only in a backward
        return found

    def _intercept(self) -> None:
        super()._intercept()
        self.model.forward = self._piece_loss  # FSDP gathers embedding, norm and head when the model is called

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        hidden = self._hidden(self._embed(piece))
        timer.mark("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: timer.mark("head_backward"))
        return self._loss(hidden, piece, timer)

    def _losses(self, pieces: list[Piece], timer: PhaseTimer) -> Any:
        return (self.model(piece, timer) for piece in pieces)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, piece in enumerate(pieces, 1):
            self.model.set_requires_gradient_sync(number == len(pieces) or not self._defers)
            total += self._back(self.model(piece, timer))
            timer.mark("backward")
        self.trace.end("compute", "backward", 0)
        return self.ranks.sum(total, self.device)

    def _norm(self, norms: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        if not self.ranks.alone:  # so far these are norms of the local shards
            here = torch.stack(list(norms.values()))
            whole = self.ranks.sum(here.double().square(), self.device).sqrt().to(here.dtype)
            norms = dict(zip(norms, whole.unbind(), strict=True))
        return super()._norm(norms)

    def close(self) -> None:
        self.model.__dict__.pop("forward", None)
        super().close()
