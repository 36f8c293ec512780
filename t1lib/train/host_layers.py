"""Like layers in flat pinned buffers on the host, and what updates them there."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from t1lib.measure.memory import pinned_empty
from t1lib.train.narrow import Scratch
from t1lib.train.optim import OptimizerSpec, Updater, state_bytes
from t1lib.train.streams import Layout


class HostLayers:
    """Takes over the parameters of `layers` from the `first` on, which must be alike. The layers below stay where they
    are.

    names      of the layers in the model
    streamed   numbers of the layers held here; trained: of those that have something to train
    host_flat, host_views   by number of a layer: its buffer, and its parameters in there by name
    updaters   by number of a layer: what updates it here
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec
    ) -> None:
        self.layers, self.first, self.names, self.device, self.spec = layers, first, names, device, spec
        self.streamed = range(first, len(layers))
        self.trained = [i for i in self.streamed if self.trainable(i)]
        self.layout = Layout([layers[i] for i in self.streamed])
        self.grad_layout = Layout([layers[i] for i in self.trained], trained_only=True)
        self._take_over()
        scratch = Scratch()  # updates run one after the other
        views = {i: {n: self.host_views[i][n] for n, _ in self.trainable(i)} for i in self.streamed}
        self.updaters = {i: Updater(v, spec, scratch) for i, v in views.items()}

    def _take_over(self) -> None:
        self.host_flat: dict[int, Tensor] = {}
        self.host_views: dict[int, dict[str, Tensor]] = {}
        for index in self.streamed:
            layer = self.layers[index]
            flat = pinned_empty(self.layout.numel, self.layout.dtype, self.device).zero_()
            views = self.layout.views(flat)
            for name, param in layer.named_parameters():
                views[name].copy_(param.data)
                param.data = views[name]
            self.host_flat[index], self.host_views[index] = flat, views

    def trainable(self, index: int) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.layers[index].named_parameters() if p.requires_grad]

    def bytes_a_pass(self) -> int:
        """Bytes of one pass of all streamed layers' weights."""
        return sum(flat.nbytes for flat in self.host_flat.values())

    def bytes_to_update(self, layers: Iterable[int]) -> int:
        """Least that one update of these moves in the host's memory: gradients and state read, state and weights
        written, and weights read where they have no master."""
        trained = [p for i in layers for _, p in self.trainable(i)]
        wide = self.spec.master_weights and not self.spec.split_master
        weights = sum(p.nbytes * (1 if wide and p.dtype != torch.float32 else 2) for p in trained)
        return weights + sum(p.nbytes + 2 * state_bytes(p, self.spec) for p in trained)
