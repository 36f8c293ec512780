"""A trainer with its data and measurements, behind methods that take and return plain values, so that it can run in a
process of its own (`t1lib.measure.isolate`). Measurements are metric → value, as `Records.put` takes them."""

from operator import itemgetter
from typing import Any

import psutil
import torch

from t1lib.errors import choose
from t1lib.heads import HEADS
from t1lib.measure.floors import link_ms, measure_copy, measure_link, measure_product
from t1lib.measure.memory import AllocatorTimeline, HostPeak, pinned_bytes, storage_bytes
from t1lib.measure.trainstream import TrainStreamTrainer
from t1lib.memory import GIB, grow_segments
from t1lib.models import build_model, split
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.cost import device_bytes
from t1lib.timing import NoTrace, Span, Trace, synchronize
from t1lib.train import wrap
from t1lib.train.layers import HostLayer
from t1lib.train.loop import make_trainer
from t1lib.train.placing import work_in
from t1lib.train.slide import SlideTrainer

PLACES = ("device", "host")  # where a plan puts things; `TrainSession.choice` gives their index
POINTS = 400  # of a timeline, and its ends: each is the highest of as many neighbours, so no peak is lost


class TrainSession:
    """Trains a model on repeated batches of random tokens.

    model, changes  as for `build_model`; mode: one of `MODES`, or "trainstream"; optimizer: fields of `OptimizerSpec`
    batches         number of different batches, used in turn
    train           what to train: "all" parameters, or those of the "layers"
    options         further arguments of `make_trainer`
    """

    def __init__(
        self, *, model: str, mode: str, dtype: str, batch: int, seq: int, optimizer: dict[str, Any],
        device: str, seed: int = 0, changes: dict[str, Any] | None = None, batches: int = 1, train: str = "all",
        compile_layers: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        grow_segments()
        self.device, self.seed, self._count = torch.device(device), seed, batches
        self._host_setup = HostPeak()
        where = "cpu" if mode in ("slide", "fsdp", "trainstream") else device
        built = build_model(model, dtype=getattr(torch, dtype), device=where, seed=seed, **(changes or {}))
        layers, spec = split(built).layers, OptimizerSpec(**optimizer)
        if choose("train", train, ("all", "layers")) == "layers":
            built.requires_grad_(False)
            layers.requires_grad_(True)
        if compile_layers:
            wrap.compile_layers(layers)
        make = TrainStreamTrainer if mode == "trainstream" else make_trainer
        self.trainer = make(built, mode, device=device, optimizer=spec, **options)
        self.set_point(batch, seq)

    def set_point(
        self, batch: int, seq: int, head: str | None = None, head_options: dict[str, Any] | None = None
    ) -> None:
        """From now on, train on `batch` sequences of `seq` tokens, with this head if one is named."""
        if head is not None:
            self.trainer.head, self.trainer.head_options = choose("head", head, HEADS), head_options or {}
        vocabulary = self.trainer.parts.embed.num_embeddings
        generator = torch.Generator().manual_seed(self.seed + 1)
        self._batches = [torch.randint(vocabulary, (batch, seq), generator=generator) for _ in range(self._count)]
        torch.cuda.empty_cache()  # what comes after does not own leftovers of what came before

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """The next step's batch."""
        return {"input_ids": self._batches[self.trainer.steps % self._count]}

    def warm_up(self, steps: int) -> list[float]:
        """Train without measuring, then reset the memory peaks. Returns the losses."""
        losses = [self.step()["loss"] for _ in range(steps)]
        self._host_setup_peak = self._host_setup.read()
        self._host = HostPeak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return losses

    def step(self) -> dict[str, float]:
        """One clean step: its loss, its time and those of its phases (ms)."""
        record = self.trainer.step(self.batch)
        phases = {f"{name}_ms": ms for name, ms in record.phases.items()}
        return {"loss": record.loss, "wall_ms": record.wall_ms} | phases

    def turn(self) -> dict[str, float]:
        """A clean step, for interleaving with other variants, after an unmeasured one, whose updates may run on into
        it. Returns when all of its own pending work is done."""
        self.step()
        found = self.step()
        self._settle()
        return found

    def traced_step(self) -> tuple[float, list[Span]]:
        """A `turn` whose second step is instrumented: its time (ms) and the spans of its work on all lanes."""
        self.step()
        self.trainer.trace = Trace(self.device)
        ms = self.step()["wall_ms"]
        trace, self.trainer.trace = self.trainer.trace, NoTrace()
        self._settle()
        return ms, trace.spans()

    def timeline(self) -> list[dict[str, float]]:
        """One step's allocations on the compute device: time, and GiB allocated and, on a GPU, reserved."""
        self._settle()
        baseline = storage_bytes(self.trainer.device_tensors())
        with AllocatorTimeline(self.device, baseline) as timeline:
            self.step()
        points = timeline.points
        size = -(-len(points) // POINTS)
        if size > 1:
            highest = [max(points[at : at + size], key=itemgetter(1)) for at in range(0, len(points), size)]
            points = [points[0], *highest, points[-1]]
        return [
            {"at_ms": ms, "allocated_gib": live / GIB} | ({} if held is None else {"reserved_gib": held / GIB})
            for ms, live, held in points
        ]

    def memory(self) -> dict[str, float]:
        """Memory in GiB: device peaks since `warm_up`, host peaks during set-up and since `warm_up`, pinned memory, and
        mapped memory that other processes may share (libraries and shared memory)."""
        mapped = getattr(psutil.Process().memory_info(), "shared", 0)  # elsewhere than on Linux it is not told
        found = {"host_setup_gib": self._host_setup_peak / GIB, "host_gib": self._host.read() / GIB}
        found |= {"pinned_gib": pinned_bytes() / GIB, "mapped_gib": mapped / GIB}
        if self.device.type != "cuda":
            return found | {"allocated_gib": max(point["allocated_gib"] for point in self.timeline())}
        found["allocated_gib"] = torch.cuda.max_memory_allocated(self.device) / GIB
        return found | {"reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB}

    def floors(self) -> dict[str, float]:
        """The least times (ms) that a step needs for its matrix products with the weights, without recomputation and
        attention, and in slide for its copies on the link and its updates on the host, at rates measured on the spot;
        the link's rates (GB/s) as well."""
        self._settle()
        cuda, dtype = self.device.type == "cuda", next(self.trainer.model.parameters()).dtype
        parts, tokens = self.trainer.parts, self.batch["input_ids"].numel()
        head = parts.head.weight.numel() if self.trainer.loss == "cross_entropy" else 0
        flops = 6.0 * tokens * (sum(p.numel() for p in parts.layers.parameters()) + head)
        found = {"compute_floor_ms": flops / measure_product(self.device, dtype, 8192 if cuda else 256) * 1e3}
        if isinstance(self.trainer, SlideTrainer):
            link = measure_link(self.device, nbytes=2**28 if cuda else 2**22)
            found |= link | {"link_ms": link_ms(link, *link_bytes(self.trainer))}
            if moved := update_bytes(self.trainer):
                found["update_floor_ms"] = moved / measure_copy(2**29 if cuda else 2**24) * 1e3
        torch.cuda.empty_cache()
        return found

    def choice(self) -> dict[str, float]:
        """What slide keeps where within its budget (places by `PLACES`), and the device memory predicted for it."""
        engine = self.trainer.engine
        choice, work = engine.choice, work_in(engine, None, *self._batches[0].shape)
        places = {name: PLACES.index(getattr(choice, name)) for name in ("inputs", "outer")}
        predicted = float(device_bytes(work, choice)) / GIB
        return {"resident": choice.resident, "keep": choice.keep, "predicted_gib": predicted} | places

    def _settle(self) -> None:
        """Let pending updates finish: the next measurement starts with idle lanes."""
        self.trainer.drain()
        synchronize(self.device)


def link_bytes(trainer: SlideTrainer) -> tuple[int, int, int]:
    """Fewest bytes that the layers of a step of slide copy: in during the forward, in during the backward, out."""
    schedule, together = trainer.engine.schedule, not trainer.late
    forward, backward, out = 0, 0, 0
    held, leave = len(schedule.weights), trainer.engine.choice.grads == "host"  # for the host, if they wait
    for place, layer in enumerate(schedule.layers.values()):
        weights, state = layer.flat.nbytes, _state_bytes(layer)
        travels = layer.travels and not schedule.stateless
        # The last layers are still in their slots when the backward starts; the first ones when it ends, up to date if
        # the device has updated them meanwhile.
        backward += weights * (place < len(schedule.layers) - held)
        if travels and together:
            forward += state + weights * (leave + ("master" not in layer.state))  # its gradient, and its weights
        elif not (layer.travels and place < held):
            forward += weights
        backward += state * (travels and not together)
        out += weights * layer.trained * (not travels or (together and leave)) + (state + weights) * travels
    return forward, backward, out


def update_bytes(trainer: SlideTrainer) -> int:
    """Fewest bytes that the updates of a step on the host move in its memory: state both ways, gradients in, weights
    out, and in as well if there are no masters."""
    updated = [layer for layer in trainer.engine.schedule.layers.values() if layer.trained and not layer.travels]
    return sum(2 * _state_bytes(layer) + layer.flat.nbytes * (2 + ("master" not in layer.state)) for layer in updated)


def _state_bytes(layer: HostLayer) -> int:
    return sum(flat.nbytes for flat in layer.state.values())
