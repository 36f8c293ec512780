"""Mode `slide`: layer weights, gradients and optimizer state live on the host; the device holds a few layers at a time.

This module places everything; the schedule of a step is in `t1lib.train.slide_step`.
"""

from dataclasses import astuple
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from t1lib.errors import choose, is_number, is_whole, require
from t1lib.heads import DEFAULT_HEAD
from t1lib.measure.memory import GIB, host_available, pinned_zeros, trim_heap
from t1lib.train.activations_old import Activations
from t1lib.train.ahead import GATHERED, ROWS
from t1lib.train.graphs import LayerGraphs, can_capture
from t1lib.train.models import split
from t1lib.train.optim import Updater
from t1lib.train.outer_old import Outer
from t1lib.train.outer_travel import TravellingOuter
from t1lib.train.pipeline import Pipeline
from t1lib.train.placement import (
    PLANNED_WORKSPACE,
    choose_by_budget,
    host_bytes,
    not_in_pieces,
    place_of,
    refuse_dropout,
    spare_modules,
    trained_outside,
)
from t1lib.train.ranks import launched
from t1lib.train.recompute import Recomputation
from t1lib.train.slide_step import SlideStep
from t1lib.train.spec import has_master, has_no_state, spec_of, state_bytes
from t1lib.train.store import HostStore
from t1lib.train.vocabulary import StreamedHead

WHERE = ("host", "device")
UPDATES = ("auto", *WHERE, "both")


class SlideTrainer(SlideStep):
    """Trains with decoder layers in pinned host memory, streaming them through a few buffers on the device.

    Options beyond those of `Trainer`:

    slots            device buffers for layer weights. 2 suffice to copy one layer in while another computes; a third
                     helps if updates on the device read the weights in their slot (optimizer state without whole
                     masters). 1 requires overlap_in=False
    grad_slots       device buffers for layer gradients
    host_grads       pinned host buffers for gradients that wait for their update. With `max_grad_norm` or
                     nonfinite="skip" there is one per layer, because no update may start before the last gradient
    resident         this many first layers stay on the device, with their gradients and optimizer state
    keep             this many last layers keep their activations; the others are recomputed in the backward pass
    inputs           where the inputs of recomputed layers wait for the backward pass: "device" or "host"
    overlap_in       prefetch the next layer's weights while a layer computes (False: copy them just before use)
    overlap_out      copy a layer's gradients out while the next layer computes (False: before it computes)
    overlap_update   let the CPU update a layer while the device goes on (False: the step waits for the update)
    update           where streamed layers are updated:
                     "host"    by the CPU
                     "device"  on the device; the optimizer state, if any, is copied there and back in pieces
                               (`t1lib.train.travel`). All parameters of the streamed layers must be trained
                     "both"    a share of the layers on the host, the others as with "device"
                     "auto"    on the device if the optimizer has no state and updates need not wait for the last
                               gradient, or if it has state and the link to a GPU is faster than the host's updates
                               (`t1lib.plan.rates`). On the host otherwise, or with frozen parameters in the layers, or
                               with overlap_update=False
    host_share       share of the layers that update="both" leaves to the host, between 0 and 1
    embedding        where an embedding that train="layers" freezes is looked up: "host" or "device". Any other, or one
                     that shares its weight with a head in use, is on the device (but see outer="streamed")
    outer            where embedding, norm and head are, if they are trained:
                     "device"    weights, gradients and optimizer state on the device
                     "host"      weights and gradients on the device, optimizer state on the host. The CPU updates them
                                 (`t1lib.train.outer`), but if the layers' state travels to the device, so does theirs,
                                 and they are updated there (`t1lib.train.outer_travel`)
                     "parked"    as "host", but if the state travels, the weights are on the host, too, and leave the
                                 device during the layers' backward pass (with "host" they do so only if whole masters
                                 can restore them)
                     "streamed"  optimizer state on the host, updated by the CPU; and embedding and head, even if they
                                 are frozen, entirely on the host: the device receives only the rows looked up, and
                                 pieces of the vocabulary (`t1lib.train.vocabulary`)
    graph_tokens     run streamed layers as CUDA graphs for micro-batches of at most this many tokens: one launch per
                     layer forward, one for its recomputation and backward (`t1lib.train.graphs`). 0: never. None: where
                     launches would take longer than the layers (1024 to 4096 tokens, by the layers' size)
    gpu_memory       memory budget on the device, in bytes or as "2GiB". Chooses slots, resident, keep, inputs, outer
                     and grad_slots for the fastest step that fits into it and into nine tenths of the host's free
                     memory (`t1lib.plan`); the attribute `chosen` holds the result
    plan_for         the batch that `gpu_memory` plans for: (rows, tokens per row)

    Raises `T1Error` for options out of range or in conflict, a model with dropout, layers that are not alike, and a
    host without enough free memory.

    Without `max_grad_norm` and nonfinite="skip", a layer is updated as soon as its gradients are complete. A step that
    is aborted (by an error or Ctrl-C) then leaves some layers updated and others not: resume from a checkpoint.

    Several processes on one host (Linux), each with its own GPU, can train together: started by torchrun, or in an
    existing process group. The host then holds a single copy of the streamed layers and their state. `step` takes the
    whole batch on every rank, and each rank trains on its own rows. Gradients are summed on the GPUs, in their own
    dtype, and each rank updates its part of every layer. Whatever stays on the device is replicated on every GPU. This
    requires outer="device", and excludes `gpu_memory`.
    """

    mode = "slide"

    def __init__(
        self, model: PreTrainedModel, *, slots: int = 2, grad_slots: int = 2, host_grads: int = 4, resident: int = 0,
        keep: int = 0, inputs: str = "device", overlap_in: bool = True, overlap_out: bool = True,
        overlap_update: bool = True, update: str = "auto", host_share: float = 1 / 3, embedding: str = "host",
        outer: str = "device", graph_tokens: int | None = None, gpu_memory: str | int | None = None,
        plan_for: tuple[int, int] | None = None, **common: Any,
    ) -> None:  # fmt: skip
        self.chosen, self.predicted, self._budget = None, {}, (gpu_memory, plan_for)
        own = (slots, resident, keep, inputs, outer, grad_slots) == (2, 0, 0, "device", "device", 2)
        free = gpu_memory is None or own
        require(free, "gpu_memory chooses slots, resident, keep, inputs, outer and grad_slots: give it or them")
        for name, value in (("slots", slots), ("grad_slots", grad_slots), ("host_grads", host_grads)):
            require(is_whole(value, 1), f"{name}={value!r}; allowed: 1 or more, whole numbers")
        tokens = graph_tokens is None or is_whole(graph_tokens, 0)
        require(tokens, f"graph_tokens={graph_tokens!r}; allowed: 0 or more, whole numbers, or None")
        shared = is_number(host_share) and 0 < host_share < 1
        require(shared, f"host_share={host_share!r}; allowed: between 0 and 1")
        self._host_share, layers = host_share, split(model).layers
        self._graph_tokens = launch_bound(layers[0]) if graph_tokens is None else graph_tokens
        for name, value in (("resident", resident), ("keep", keep)):
            fits = is_whole(value, 0, len(layers))
            require(fits, f"{name}={value!r}; allowed: 0 to {len(layers)}, the model's layers")
        self._update_place = choose("update", update, UPDATES)
        self._embedding, self._inputs = choose("embedding", embedding, WHERE), choose("inputs", inputs, WHERE)
        self._outer_place = choose("outer", outer, (*WHERE, "parked", "streamed"))
        if outer == "streamed":
            with_head = common.get("loss", "cross_entropy") == "cross_entropy"
            require(with_head, "outer='streamed' is for a loss with a head")
            odd = not_in_pieces(model, common.get("head", DEFAULT_HEAD), common.get("head_options"))
            require(not odd, f"outer='streamed' makes the head in pieces of the vocabulary, without {odd}")
        enough = slots >= 2 or overlap_in is False
        require(enough, f"slots={slots} cannot overlap; allowed: 2 or more, or overlap_in=False")
        self.slots, self.resident, self.keep = slots, resident, keep
        self._pipeline_options = {
            "slots": slots, "grad_slots": grad_slots, "host_grads": host_grads, "overlap_in": overlap_in,
            "overlap_out": overlap_out, "overlap_update": overlap_update,
        }  # fmt: skip
        super().__init__(model, **common)
        trim_heap()  # gives back the memory that the layers occupied before they moved

    # -- where things live -----------------------------------------------------------------------------------------

    def _place(self) -> None:
        if launched() > 1 or dist.is_initialized():
            self._meet()
        refuse_dropout(self.model)
        self._refuse_for_several()
        self._together = self.max_grad_norm is not None or self.nonfinite == "skip"
        self._choose()
        layers = self.parts.layers
        names = {id(layer): name for name, layer in self.model.named_modules()}
        self._on_device = self._updated_there()
        if not self.ranks.alone:  # the choice may depend on each process's machine
            self.ranks.agree({"layers that are updated on the device": self._on_device})
        self.ranks.first(self._require_host_memory)
        self.pipeline = Pipeline(
            layers, self.resident, [names[id(layer)] for layer in layers], self.device, self.spec,
            together=self._together, on_device=self._on_device, ranks=self.ranks, trace=lambda: self.trace,
            **self._pipeline_options,
        )  # fmt: skip
        for module in self._resident_modules():
            module._apply(lambda t: t.to(self.device), recurse=False)
        for module in layers.modules():  # of streamed layers, only buffers stay on the device
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        outer, self._outer = trained_outside(self.model, layers), None
        if self._outer_place != "device" and outer:
            self._outer = self._outer_of(outer)
        self._head = self._streamed_head() if self._outer_place == "streamed" else None
        frozen = not self.parts.embed.weight.requires_grad
        trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        self._lowest = min(trained, default=len(layers)) if frozen else 0  # the backward stops here
        self.ranks.meet()  # rank 0 has filled the shared memory: all ranks find the weights there
        lanes = self.pipeline.compute, self.pipeline.inward, self.pipeline.outward
        store = HostStore(self.device, *lanes, lambda: self.trace) if self._inputs == "host" else None
        self._activations = Activations(len(layers), self.keep, store)
        self._recomputation = Recomputation(whole=self._compiled)
        self._known = {}
        self.forget_shapes()

    def _choose(self) -> None:
        """Take the options that the budget, if there is one, comes to."""
        gpu_memory, plan_for = self._budget
        if gpu_memory is None:
            return
        cuda, tokens = self.device.type == "cuda", self._graph_tokens if can_capture(self.device) else 0
        if cuda and self.head == "fused" and "chunks" not in self.head_options:  # which is what is planned for
            self.head_options = {"workspace": PLANNED_WORKSPACE, **self.head_options}
        self.chosen, self.predicted = choose_by_budget(
            self.model, self.spec, gpu_memory, plan_for, head=self.head, head_options=self.head_options,
            micro_batch=self.micro_batch, together=self._together, loss=self.loss, graph_tokens=tokens, cuda=cuda,
        )  # fmt: skip
        self.slots, self.resident, self.keep, self._inputs, self._outer_place, places, share = astuple(self.chosen)
        if self._outer_place == "host" and not (self.spec.master_weights and not self.spec.split_master):
            self._outer_place = "parked"
        whole = all(p.requires_grad for p in self.parts.layers.parameters())
        if self._update_place == "auto" and whole and self._pipeline_options["overlap_update"]:
            self._update_place = {0.0: "device", 1.0: "host"}.get(share, "both")
            self._host_share = share
        self._pipeline_options |= {"slots": self.slots, "grad_slots": places}

    def forget_shapes(self) -> None:
        self._graphs = None
        if self._graph_tokens and can_capture(self.device):
            self._graphs = LayerGraphs(self.parts.layers)

    def _outer_of(self, params: dict[str, nn.Parameter]) -> Outer:
        common = params, self.parts.embed, self.spec, self.pipeline, lambda: self.trace
        if self._outer_travels:
            return TravellingOuter(*common, parked=self._outer_place == "parked")
        return Outer(*common, {n for n, p in params.items() if self._streamed(p)})

    @property
    def _outer_travels(self) -> bool:
        """Whether embedding, norm and head, with state on the host, are updated on the device like the layers."""
        if self._outer_place not in ("host", "parked") or not self._on_device or has_no_state(self.spec):
            return False
        dtypes = {p.dtype for p in self.model.parameters() if p.requires_grad}
        return len(dtypes) == 1

    def _own_facts(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("slots", "resident", "keep")} | self._pipeline_options
        return facts | {"update": self._update_place, "outer": self._outer_place, "embedding": self._embedding}

    def _refuse_for_several(self) -> None:
        if not self.ranks.alone:
            place, size = self._outer_place, self.ranks.size
            require(self._budget[0] is None, f"gpu_memory is for one process, and there are {size}; leave it out")
            require(place == "device", f"outer={place!r} in {size} processes; allowed: 'device'")

    def _require_host_memory(self) -> None:
        need, free = self._host_bytes(), host_available()
        require(need <= free, f"the host has {free / GIB:.1f} GiB to give; slide needs {need / GIB:.1f} GiB of it more")

    def _updated_there(self) -> list[int]:
        """Indices of the streamed layers that are updated on the device."""
        streamed, place = range(self.resident, len(self.parts.layers)), self._update_place
        trained = all(p.requires_grad for i in streamed for p in self.parts.layers[i].parameters())
        whole = trained and self._pipeline_options["overlap_update"]
        place = place_of(place, self.spec, self._together, self.device.type == "cuda", whole)
        require(trained or place == "host", f"update={place!r} is for layers that are trained as a whole; take 'host'")
        share = {"host": 1.0, "device": 0.0, "both": self._host_share}[place]
        return [i for i in streamed if int((i + 1) * share + 1e-9) == int(i * share + 1e-9)]

    def _streamed(self, param: Tensor) -> bool:
        return self._outer_place == "streamed" and (param is self.parts.embed.weight or param is self.parts.head.weight)

    def _streamed_head(self) -> StreamedHead:
        weight, grad = self.parts.head.weight, None
        if weight.requires_grad:
            self._head_name = next(n for n, p in self._outer.params.items() if p is weight)
            grad = self._outer.grads[self._head_name]
        else:
            weight.data = pinned_zeros(weight.numel(), weight.dtype, self.device).view(weight.shape).copy_(weight.data)
        options = {"head": self.head, "softcap": self.parts.softcap, **self.head_options}
        return StreamedHead(weight.data, grad, self.pipeline, options, lambda: self.trace)

    def _host_bytes(self) -> int:
        layers = self.parts.layers[self.resident :]
        on_host = len(layers) - len(self._on_device)
        waiting = len(layers) if self._together else min(self._pipeline_options["host_grads"], on_host)
        outer = trained_outside(self.model, self.parts.layers) if self._outer_place != "device" else {}
        embed = [p for p in outer.values() if p is self.parts.embed.weight and self._outer_travels]
        ahead = [p[:ROWS] for p in embed for _ in range(GATHERED)]
        specs = [spec_of(self.spec, i, self._on_device) for i in range(self.resident, len(self.parts.layers))]
        copies = 0 if self._outer_travels else 2  # of each parameter on the host: weights and gradients
        beside = sum(state_bytes(p, self.spec) + copies * p.nbytes for p in outer.values())
        parked = [*outer.values(), *ahead] if self._outer_place == "parked" else []
        beside += sum(p.nbytes for p in parked if not has_master(p, self.spec))
        return sum(state_bytes(p, self.spec) for p in ahead) + beside + host_bytes(layers, specs, waiting)

    def _resident_modules(self) -> list[nn.Module]:
        """Modules whose own tensors are on the device: all except streamed layers, a frozen embedding or head that it
        never uses, and embedding and head with outer="streamed"."""
        spare = spare_modules(self.parts, self.train, self.loss, self._embedding)
        spare |= {self.parts.embed, self.parts.head} if self._outer_place == "streamed" else set()
        streamed = {m for layer in self.parts.layers[self.resident :] for m in layer.modules()}
        return [m for m in self.model.modules() if m not in streamed | spare]

    def _resident_trainable(self) -> dict[str, nn.Parameter]:
        elsewhere = self._outer.params if self._outer else {}
        found = trained_outside(self.model, self.parts.layers[self.resident :])
        return {n: p for n, p in found.items() if n not in elsewhere}

    # -- accounting and checkpoints --------------------------------------------------------------------------------

    def device_tensors(self) -> list[Tensor]:
        rest = [t for m in self._resident_modules() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        head = [] if self._head is None else self._head.device_tensors()
        return [*rest, *head, *self.pipeline.device_tensors(), *self._rest.state_tensors()]

    def drain(self) -> None:
        """Wait, on all ranks, for updates that are still running; `step` returns without waiting for them."""
        if self._outer is not None:
            self._outer.drain()
        self.pipeline.drain()
        self.ranks.meet()

    def state_part(self, part: str) -> dict[str, dict[str, Any]]:
        self.drain()
        return super().state_part(part)

    def load_part(self, part: str, state: dict[str, Any]) -> None:
        self.drain()
        super().load_part(part, state)
        self.ranks.meet()
        self.pipeline.forget()
        if self._outer is not None:
            self._outer.refresh()

    def _named_updaters(self) -> list[tuple[str, Updater]]:
        layers = [(self.pipeline.names[i], updater) for i, updater in self.pipeline.updaters.items()]
        outer = [("", self._outer.updater)] if self._outer is not None else []
        return [*super()._named_updaters(), *outer, *((name + ".", updater) for name, updater in layers)]

    def close(self) -> None:
        if not self.closed:
            self.drain()
            self.pipeline.close()
            if self._outer is not None:
                self._outer.close()
        super().close()
