"""How gradients of host-resident layers leave the device: slots, the lane that empties them, and sums over ranks."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from t1lib.measure.memory import pinned_zeros
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.inward import Inward
from t1lib.train.narrow import wide
from t1lib.train.optim import Updater, norms_of
from t1lib.train.ranks import Ranks
from t1lib.train.spec import OptimizerSpec, has_no_state
from t1lib.train.streams import HostPool, Lane, Mark, Slots

# the older name is deprecated in PyTorch 2.13 but the only one in earlier versions
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Outward(Inward):
    """The half of a `Pipeline` that moves gradients, or weights updated with them, to the host. Arguments as there."""

    _travel: Callable[..., tuple[Mark, Mark, Mark]]  # updates a layer on the device
    _submit: Callable[..., None]  # has a layer updated on the host

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: list[str], device: torch.device, spec: OptimizerSpec,
        ranks: Ranks, slots: int, grad_slots: int, host_grads: int, together: bool, on_device: Collection[int],
        overlap_in: bool, overlap_out: bool, trace: Callable[[], Trace | NoTrace],
    ) -> None:  # fmt: skip
        super().__init__(layers, first, names, device, spec, ranks, on_device, slots, overlap_in, trace)
        self.together = together
        self.grads = Slots(grad_slots, self.grad_layout, device)
        on_host = set(self.trained) - set(on_device)
        waiting = len(self.trained) if together else min(host_grads, len(on_host))
        self._host_grads = HostPool(waiting, self.own_layout, device)
        self._host_norms = pinned_zeros(len(layers), wide(self.layout.dtype), device)
        self.outward = Lane(device, own_stream=overlap_out)
        self._norms = torch.zeros(0 if ranks.alone else len(layers), dtype=wide(self.layout.dtype), device=device)
        self._summed: Mark = None  # marks when the last layer is summed and its norm taken
        self._waiting: list[tuple[int, int]] = []  # (layer, its gradient buffer), until all gradients are known
        self._stays = has_no_state(spec) and not together and ranks.alone  # updates need nothing from the host
        self._slot_updaters = [Updater(v, spec) for v in self.weights.views] if self._stays and on_device else []

    def place(self, index: int, gradients: bool = False) -> tuple[Any, ...]:
        """Where the layer's weights and gradients lie on the device; equal for layers that share the slots in turn."""
        names = tuple(n for n, _ in self.trainable(index)) if gradients else ()
        return self.weights.of(index), names, self.grads.of(index) if names else None

    def want_gradients(self, index: int) -> None:
        """Give the layer a zeroed slot to accumulate its gradients in."""
        if index not in self.trained:
            return
        slot = self.grads.of(index)
        self.compute.after(self.grads.freed[slot])
        self.grads.flat[slot].zero_()
        for name, param in self.trainable(index):
            param.grad = self.grads.views[slot][name]

    def gradients_done(self, index: int, factor: float) -> dict[str, Tensor]:
        """Called when the layer's gradients are complete; returns their norms, empty if ranks have yet to sum them.

        With `together` there is one norm per parameter, by its name in the model; otherwise a single one by the layer's
        name, which takes fewer launches: they dominate a step of few tokens. factor: multiplies the learning rate
        """
        if index not in self.trained:
            return {}
        slot, name = self.grads.of(index), self.names[index]
        if self.landings is not None:  # not yet summed over ranks
            self.grads.filled[slot] = self.compute.mark()
            return {}
        if self.together:
            norms = {f"{name}.{n}": norm for n, norm in norms_of(self.grads.views[slot]).items()}
            self._norm = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        else:
            self._norm = torch.linalg.vector_norm(self.grads.flat[slot], dtype=wide(self.layout.dtype))
            norms = {name: self._norm}
        if index in self.on_device and self._slot_updaters:
            self._descend(index, factor)
        self.grads.filled[slot] = self.compute.mark()
        return norms

    def _descend(self, index: int, factor: float) -> None:
        """Update the weights in their slot and copy them over the gradients. If the gradients are not finite they count
        as 0, so that at most weight decay changes the weights."""
        slot, held = self.grads.of(index), self.weights.of(index)
        with self._trace().span("compute", "update", index):
            self.grads.flat[slot].masked_fill_(self._norm.isfinite().logical_not(), 0)
            self._slot_updaters[held].step(self.grads.views[slot], factor)
            self.grads.flat[slot].copy_(self.weights.flat[held])

    def send(self, index: int, factor: float) -> None:
        """Queue the copy of the gradients to the host and the update that follows it (with `together`, `update_all`
        queues the updates). For a layer updated on the device, queue the copy of its new weights, or its update.

        factor: multiplies the learning rate
        """
        if index not in self.trained:
            return
        there = index in self.on_device
        if there and self._slot_updaters:
            self._send_weights(index)
            return
        slot, known = self.grads.of(index), self.compute
        own, held_in = self.grads.flat[slot][self.part], self.weights.of(index)
        if self.landings is not None:
            known = self.outward
            self._sum(index)
        if self.weights.holds[held_in] == index and not (there and self.landings is None):
            self.weights.holds[held_in] = None  # stale from here on
        if there and not self.together:
            with known.active():
                lost = self._norm.isfinite().logical_not().float()
            self.grads.freed[slot], _, _ = self._travel(index, own, known.mark(), factor, 1.0, lost)
        else:
            self._send_gradients(index, own, factor)
        self._norm = None

    def _send_gradients(self, index: int, own: Tensor, factor: float) -> None:
        held, lane, slot = self._host_grads.take(), self.outward, self.grads.of(index)
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "gradients", index, lane.stream):
            self._host_grads.buffers[held].copy_(own, non_blocking=True)
            self._host_norms[index].copy_(lane.uses(self._norm), non_blocking=True)
        self.grads.freed[slot] = arrived = lane.mark()
        if self.together:
            self._waiting.append((index, held))
        else:
            self._submit(index, held, arrived, self._host_norms[index], None, factor)

    def _sum(self, index: int) -> None:
        """Reduce-scatter the layer's gradients: sum this rank's part over all ranks, in place, and take its norm."""
        slot, lane = self.grads.of(index), self.outward
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "sum over ranks", index, lane.stream):
            flat = self.grads.flat[slot]
            own = torch.empty_like(flat[self.part])
            reduce_scatter(own, flat, group=self.ranks.group)
            flat[self.part].copy_(own)
            self._norm = self._norms[index]
            torch.linalg.vector_norm(own, dtype=self._norms.dtype, out=self._norm)
        self.grads.filled[slot] = self._summed = lane.mark()

    def norms(self) -> dict[str, Tensor]:
        """Norms of each layer's gradients once they are summed over several ranks; empty for one process."""
        if self.landings is None:
            return {}
        self.compute.after(self._summed)
        whole = self.ranks.sum(self._norms.square(), self.device).sqrt()
        return {self.names[index]: whole[index] for index in self.trained}

    def _send_weights(self, index: int) -> None:
        lane, slot = self.outward, self.grads.of(index)
        lane.after(self.grads.filled[slot])
        with lane.active(), self._trace().span("out", "weights", index, lane.stream):
            self.host_flat[index].copy_(self.grads.flat[slot], non_blocking=True)
        self._norm = None
        self.grads.freed[slot] = self._left[index] = lane.mark()
