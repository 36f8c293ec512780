"""The two trainers that keep the whole model on the device: `gpu` and `ckpt`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from t1lib.train.trainer import Trainer


class GpuTrainer(Trainer):
    """Mode `gpu`: weights, gradients, optimizer state and activations all on the device. The plain reference."""

    mode = "gpu"

    def _place(self) -> None:
        self.model.to(self.device)


class CkptTrainer(GpuTrainer):
    """Mode `ckpt`: as `gpu`, but each layer keeps only its input and is recomputed in the backward."""

    mode = "ckpt"

    def _run_layer(self, index: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        run: Callable[[Tensor], Tensor] = lambda x: self._compute(index, x, kwargs)  # noqa: E731
        return checkpoint(run, hidden, use_reentrant=False)
