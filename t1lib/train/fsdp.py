"""Mode `fsdp`: PyTorch's FSDP2 with CPU offload, in one process: what one would otherwise take on one GPU.

Parameters, gradients and optimizer state lie on the host. FSDP copies a layer's weights to the device before it
computes and drops them after, in forward and backward, and sends gradients back as they come; when all have come, the
host updates. Layers are computed again in the backward, as in mode `ckpt`.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.measure.timing import PhaseTimer
from t1lib.train.batch import Piece
from t1lib.train.resident import CkptTrainer


class FsdpTrainer(CkptTrainer):
    """FSDP2 for one process. Beyond `Trainer`'s arguments:

    offload    keep parameters, gradients and optimizer state on the host (else on the device)
    """

    mode = "fsdp"

    def __init__(self, model: PreTrainedModel, *, offload: bool = True, **common: Any) -> None:
        self._offload, self._own_group = offload, not dist.is_initialized()
        super().__init__(model, **common)

    def _place(self) -> None:
        if self._own_group:
            _join_a_group_of_one(self.device)
        require(dist.get_world_size() == 1, f"mode fsdp runs in one process; found {dist.get_world_size()}")
        if not self._offload:
            self.model.to(self.device)
        mesh = init_device_mesh(self.device.type, (1,))
        on_host = self._offload and self.device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=True) if on_host else OffloadPolicy()
        for layer in self.parts.layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        for module in self.model.modules():  # buffers are no parameters: FSDP leaves them where they are
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

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
        for piece in pieces:
            total += self._back(self.model(piece, timer))
            timer.mark("backward")
        self.trace.end("compute", "backward", 0)
        return total

    def device_tensors(self) -> list[Tensor]:
        return [self._local(t) for t in super().device_tensors()]

    def close(self) -> None:
        self.model.__dict__.pop("forward", None)
        super().close()
        if self._own_group:
            dist.destroy_process_group()


def _join_a_group_of_one(device: torch.device) -> None:
    """A process group of this process alone, by a file instead of a network."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group(backend, init_method=store.as_uri(), rank=0, world_size=1)
