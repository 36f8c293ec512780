"""Layers of the same structure in flat pinned buffers on the host, and the updaters that update them there."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from t1lib.train.narrow import Scratch
from t1lib.train.optim import Updater
from t1lib.train.ranks import Ranks
from t1lib.train.shared import HostMemory
from t1lib.train.spec import OptimizerSpec, has_master, spec_of, state_bytes
from t1lib.train.streams import Layout


class HostLayers:
    """Moves the parameters of `layers` from the `first` on into host buffers; these layers must be alike. The layers
    below stay where they are.

    names      names of the layers in the model
    ranks      processes of this host that share the buffers and the state; each updates its part of every layer
    on_device  indices of the layers that are updated on the device
    streamed   indices of the layers held here; trained: of those with trainable parameters
    host_flat, host_views   by layer index: its flat buffer, and its parameters as views into it, by name
    updaters   by layer index: what holds the layer's state; own_updaters: what updates this rank's part of the layer
    part       this rank's slice of a layer's flat gradients; own_layout: where parameters lie in that slice
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec,
        ranks: Ranks, on_device: Collection[int],
    ) -> None:  # fmt: skip
        self.layers, self.first, self.names, self.device, self.spec = layers, first, names, device, spec
        self.on_device = on_device
        self.ranks, self.memory = ranks, HostMemory(ranks)
        self.streamed = range(first, len(layers))
        self.trained = [i for i in self.streamed if self.trainable(i)]
        self.layout = Layout({i: layers[i] for i in self.streamed}, parts=ranks.size)
        self.grad_layout = Layout({i: layers[i] for i in self.trained}, trained_only=True, parts=ranks.size)
        each = self.grad_layout.numel // ranks.size
        self.part = slice(ranks.rank * each, (ranks.rank + 1) * each)
        self.own_layout = self.grad_layout if ranks.alone else self.grad_layout.part(self.part)
        self._take_over()
        self._flat_state: dict[int, dict[str, Tensor]] = {}
        self._scratch = Scratch()  # shared, as updates run one at a time
        self.updaters = {i: self._updater(i) for i in self.streamed}
        self.own_updaters = self.updaters if ranks.alone else {i: self._own_updater(i) for i in self.trained}

    def _take_over(self) -> None:
        self.host_flat: dict[int, Tensor] = {}
        self.host_views: dict[int, dict[str, Tensor]] = {}
        for index in self.streamed:
            flat = self.memory.zeros(self.layout.numel, self.layout.dtype, self.device)
            views = self.layout.views(flat)
            for name, param in self.layers[index].named_parameters():
                if self.ranks.rank == 0:
                    views[name].copy_(param.data)
                param.data = views[name]
            self.host_flat[index], self.host_views[index] = flat, views

    def _updater(self, index: int) -> Updater:
        """The updater of the whole layer. Its state is in shared memory if there are several ranks."""
        views, spec = self.host_views[index], spec_of(self.spec, index, self.on_device)
        updater = Updater({n: views[n] for n, _ in self.trainable(index)}, spec, self._scratch)
        if not self.ranks.alone:
            self._flat_state[index] = self._flatten(updater)
        return updater

    def flat_state(self, index: int) -> dict[str, Tensor]:
        """A layer's optimizer state: one flat buffer per key, laid out like the layer's gradients."""
        if index not in self._flat_state:
            self._flat_state[index] = self._flatten(self.updaters[index])
        return self._flat_state[index]

    def _flatten(self, updater: Updater) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, like in next(iter(updater.state.values()), {}).items():
            if key == "step":
                continue
            flat = found[key] = self.memory.zeros(self.grad_layout.numel, like.dtype, self.device)
            for name, view in self.grad_layout.views(flat).items():
                if self.ranks.rank == 0:
                    view.copy_(updater.state[name][key])
                updater.state[name][key] = view
        return found

    def _own_updater(self, index: int) -> Updater:
        """The updater of this rank's part of the layer, in the same memory."""
        whole, tensors, state = self.updaters[index], {}, {}
        for name in self.own_layout.shapes:
            inside = self.grad_layout.inside(name, self.part)
            tensors[name] = whole.tensors[name].view(-1)[inside]
            state[name] = {k: v if k == "step" else v.view(-1)[inside] for k, v in whole.state[name].items()}
        return Updater(tensors, whole.spec, self._scratch, state)

    def update_own(self, index: int, grads: dict[str, Tensor], factor: float, scale: float) -> None:
        """Update this rank's part of the layer, and count the update for all of the layer's parameters."""
        self.own_updaters[index].step(grads, factor, scale)
        for name in self.updaters[index].state.keys() - grads.keys():
            if "step" in self.updaters[index].state[name]:
                self.updaters[index].state[name]["step"] += 1

    def trainable(self, index: int) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.layers[index].named_parameters() if p.requires_grad]

    def bytes_a_pass(self) -> int:
        """Bytes that one pass over the weights of all streamed layers transfers."""
        return sum(flat.nbytes for flat in self.host_flat.values())

    def bytes_to_update(self, layers: Iterable[int]) -> int:
        """Bytes that one update of these layers must move in host memory, over all ranks: gradients and state are read,
        state and weights are written, and weights without a whole master are read."""
        trained = [(p, self.updaters[i].spec) for i in layers for _, p in self.trainable(i)]
        read = sum(p.nbytes for p, spec in trained if not has_master(p, spec))
        return read + sum(2 * (p.nbytes + state_bytes(p, spec)) for p, spec in trained)
