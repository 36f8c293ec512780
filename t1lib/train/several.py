"""What trainers in several processes have in common: their group, and a batch split over its ranks."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.errors import require
from t1lib.train.batch import Piece, counted, dealt, pieces_of
from t1lib.train.ranks import join, own_device, world
from t1lib.train.trainer import Trainer


class Several(Trainer):
    """`step` and `evaluate` get the whole batch on every rank, and each rank takes its own rows. Their results are for
    the whole batch and equal on all ranks (except wall time and phases, which are each rank's own)."""

    _own_group = False

    def _meet(self) -> None:
        """Join the process group, creating it if there is none, and check that the ranks' facts agree (`_facts`)."""
        self._own_group = not dist.is_initialized()
        if self._own_group:
            join(self.device.type == "cuda")
        self.ranks, self.device = world(self.device), own_device(self.device)
        self.ranks.agree(self._facts())

    def _facts(self) -> dict[str, Any]:
        """Settings and weights that must be equal on all ranks."""
        facts = {name: getattr(self, name) for name in ("loss", "train", "micro_batch", "max_grad_norm", "nonfinite")}
        facts |= {"head": self.head, "head_options": self.head_options, "optimizer": self.spec}
        params = {n: (p.shape, p.dtype, p.requires_grad) for n, p in self.model.named_parameters()}
        values = [digest_of(p.cpu()) for p in self.model.parameters()]
        facts |= {"the model's parameters": _digest(params), "the model's weights": _digest(values)}
        return {"mode": self.mode, "device": self.device.type} | self._own_facts() | facts

    def _own_facts(self) -> dict[str, Any]:
        """The mode's own options that must be equal on all ranks."""
        return {}

    def _pieces(self, batch: dict[str, Tensor]) -> list[Piece]:
        if self.ranks.alone:
            return super()._pieces(batch)
        found: list[Tensor] = []

        def look() -> tuple[str, float]:
            found.extend(self._checked(batch))
            return repr([(t.shape, digest_of(t.cpu())) for t in found]), self.schedule(self.steps)

        batches, factors = zip(*self.ranks.share(look), strict=True)
        same = len(set(batches)) == 1
        require(same, "the ranks' batches differ; pass the whole batch on every rank: each takes its own rows")
        same = len(set(factors)) == 1
        require(same, f"the ranks' schedules differ in step {self.steps}: factors {', '.join(map(str, factors))}")
        rows, size = len(found[0]), self.ranks.size
        training = torch.is_grad_enabled()  # `evaluate` may leave ranks without a row
        require(rows >= size or not training, f"a batch of {rows} rows for {size} processes; allowed: {size} or more")
        even = rows % size == 0 or self.loss == "cross_entropy"
        require(even, f"a batch of {rows} rows for {size} processes; 'mean_square' allows a multiple of {size}")
        total = counted(found[1], self._width)
        return pieces_of(*dealt(*found, self.ranks.rank, size), self.micro_batch, total=total)

    def evaluate(self, batch: dict[str, Tensor]) -> float:
        """The batch's loss, without training on it."""
        mine = torch.tensor(super().evaluate(batch), dtype=torch.float64)
        return float(self.ranks.sum(mine, self.device))

    def close(self) -> None:
        super().close()
        if self._own_group:
            dist.destroy_process_group()
            self._own_group = False


def _digest(thing: Any) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]


def digest_of(tensor: Tensor) -> str:
    """Digest of a CPU tensor; equal for tensors of one dtype that hold bitwise the same values in the same order."""
    flat = tensor.detach().flatten().contiguous()
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:16]
