"""A trainer with its data and measurements, behind methods that take and return plain values.

The notebooks run what they measure in such a session, in a separate process (`t1lib.measure.isolate`).
"""

from dataclasses import asdict
from typing import Any

import torch

from t1lib.errors import choose
from t1lib.heads import HEADS
from t1lib.measure.floors import measure_copy, measure_link, measure_product
from t1lib.measure.memory import (
    AllocatorTimeline,
    HostPeak,
    grow_segments,
    mapped_bytes,
    pinned_bytes,
    read_peak,
    reset_peak,
    storage_bytes,
    unpinned_bytes,
)
from t1lib.measure.records import PLACES
from t1lib.models import build_model, split
from t1lib.optimizers import OptimizerSpec, Schedule
from t1lib.plan.cost import device_bytes
from t1lib.plan.duration import step_ms
from t1lib.plan.rates import this_machine
from t1lib.timing import NoTrace, Span, Trace, synchronize
from t1lib.train import wrap
from t1lib.train.loop import StepRecord, Trainer, make_trainer
from t1lib.train.placing import work_in
from t1lib.train.slide import SlideTrainer

TRAINED = ("all", "layers")
Timeline = list[tuple[float, int, int | None]]


def envelope(points: Timeline, bins: int) -> Timeline:
    """Thin a timeline to about `bins` points, keeping the highest point of each equal time span: no peak is lost."""
    if len(points) <= bins:
        return points
    end = points[-1][0] or 1.0
    best: dict[int, tuple[float, int, int | None]] = {}
    for point in points:
        key = min(int(point[0] / end * bins), bins - 1)
        if key not in best or point[1] > best[key][1]:
            best[key] = point
    return [points[0], *best.values(), points[-1]]


class TrainSession:
    """Trains a model on repeated batches of random tokens.

    model           a preset or checkpoint, as for `build_model`; `changes` modify a preset's configuration
    optimizer       fields of `OptimizerSpec`
    batches         number of different batches, used in turn
    train           what to train: "all" parameters, or those of the "layers"
    compile_layers  compile the decoder layers
    options         further arguments of `make_trainer`; `schedule` may also be a dict of `Schedule`'s fields
    """

    def __init__(
        self, *, model: str, mode: str, dtype: str, batch: int, seq: int, optimizer: dict[str, Any],
        device: str, seed: int = 0, changes: dict[str, Any] | None = None, batches: int = 1, train: str = "all",
        compile_layers: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        grow_segments()
        self.device, self.seed, self._count = torch.device(device), seed, batches
        self._host_setup = HostPeak()
        where = "cpu" if mode in ("slide", "fsdp") else device
        built = build_model(model, dtype=getattr(torch, dtype), device=where, seed=seed, **(changes or {}))
        layers, spec = split(built).layers, OptimizerSpec(**optimizer)
        if choose("train", train, TRAINED) == "layers":
            built.requires_grad_(False)
            layers.requires_grad_(True)
        if compile_layers:
            wrap.compile_layers(layers)
        if isinstance(options.get("schedule"), dict):
            options["schedule"] = Schedule(**options["schedule"])
        self.trainer = make_trainer(built, mode, device=device, optimizer=spec, **options)
        self.set_tokens(batch=batch, seq=seq)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # leftovers of building the model do not belong to the variant

    def set_tokens(self, batch: int, seq: int) -> None:
        """From now on, train on `batch` sequences of `seq` tokens."""
        vocabulary = self.trainer.parts.embed.num_embeddings
        generator = torch.Generator().manual_seed(self.seed + 1)
        self._batches = [torch.randint(vocabulary, (batch, seq), generator=generator) for _ in range(self._count)]

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """The next step's batch."""
        return {"input_ids": self._batches[self.trainer.steps % self._count]}

    def set_point(self, batch: int, seq: int, head: str, head_options: dict[str, Any]) -> None:
        """From now on, train on batches of this shape with this head; unused memory is released."""
        self.trainer.head, self.trainer.head_options = choose("head", head, HEADS), head_options
        self.set_tokens(batch, seq)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self, steps: int) -> list[float]:
        """Train without measuring, then reset the memory peaks. Returns the losses."""
        losses = [self.step().loss for _ in range(steps)]
        self._host_setup_peak = self._host_setup.read()
        self._host = HostPeak()
        self._baseline = reset_peak(self.device) if self.device.type == "cuda" else 0
        return losses

    def step(self) -> StepRecord:
        """One clean step."""
        return self.trainer.step(self.batch)

    def turn(self) -> StepRecord:
        """A clean step, for interleaving with other variants. An unmeasured step of this variant precedes it, whose
        updates may run on into it; this returns when all of its own pending work is done."""
        self.step()
        record = self.step()
        self._settle()
        return record

    def traced_step(self) -> tuple[StepRecord, list[Span]]:
        """A `turn` whose second step is instrumented; returns its record and the spans of its work on all lanes."""
        self.step()
        self.trainer.trace = Trace(self.device)
        record = self.step()
        trace, self.trainer.trace = self.trainer.trace, NoTrace()
        self._settle()
        return record, trace.spans()

    def timeline(self, bins: int = 400) -> Timeline:
        """One step's allocations on the compute device: (ms, allocated bytes, reserved bytes or None), thinned."""
        self._settle()
        baseline = storage_bytes(self.trainer.device_tensors())
        with AllocatorTimeline(self.device, baseline) as timeline:
            self.step()
        return envelope(timeline.points, bins)

    def memory(self) -> dict[str, int]:
        """Memory in bytes: device peaks since `warm_up`, exact host peaks during set-up and since `warm_up`, pinned
        memory, and mapped memory that other processes may share."""
        result = {"host_setup": self._host_setup_peak, "host": self._host.read(), "pinned": pinned_bytes()}
        result["unpinned"] = unpinned_bytes()
        result["host_base"] = self._host_setup.baseline
        result["mapped"] = mapped_bytes()
        if self.device.type == "cuda":
            peak = read_peak(self.device, self._baseline)
            return result | {"baseline": peak.baseline, "allocated": peak.allocated, "reserved": peak.reserved}
        baseline = storage_bytes(self.trainer.device_tensors())
        return result | {"baseline": baseline, "allocated": max(a for _, a, _ in self.timeline())}

    def link_floor(self) -> dict[str, float]:
        """Link rates (bytes/s) measured on the spot, and the least time (ms) that slide's copies need at them."""
        self._settle()
        link = measure_link(self.device, nbytes=2**28 if self.device.type == "cuda" else 2**22)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the measurement's buffers do not belong to the variant
        rates = {"h2d": link.host_to_device, "d2h": link.device_to_host}
        rates |= {"both_in": link.both_in, "both_out": link.both_out}
        if isinstance(self.trainer, SlideTrainer):
            rates["ms"] = link.step_ms(*link_bytes(self.trainer))
        return rates

    def floors(self) -> dict[str, float]:
        """Measured on the spot: rates of matrix products (FLOP/s) and of copies within host memory (bytes/s), and the
        least times (ms) that the step's products and slide's updates on the host need at these rates."""
        self._settle()
        cuda, dtype = self.device.type == "cuda", next(self.trainer.model.parameters()).dtype
        found = {"product": measure_product(self.device, dtype, 8192 if cuda else 256)}
        found["compute_ms"] = flops(self.trainer, self.batch["input_ids"].numel()) / found["product"] * 1e3
        if isinstance(self.trainer, SlideTrainer) and update_bytes(self.trainer):
            found["copy"] = measure_copy(2**29 if cuda else 2**24)
            found["update_ms"] = update_bytes(self.trainer) / found["copy"] * 1e3
        if cuda:
            torch.cuda.empty_cache()
        return found

    def choice(self) -> dict[str, float]:
        """What slide chose for its budget: a `Choice` in numbers (places by `PLACES`), predicted bytes and ms."""
        engine = self.trainer.engine
        choice, work = engine.choice, work_in(engine, None, *self._batches[0].shape)
        chosen = {k: PLACES.index(v) if isinstance(v, str) else v for k, v in asdict(choice).items()}
        ms = float(step_ms(work, choice, this_machine()))
        return chosen | {"predicted_bytes": int(device_bytes(work, choice)), "predicted_ms": ms}

    def _settle(self) -> None:
        """Let pending updates finish, so that a measurement starts with idle lanes."""
        self.trainer.drain()
        synchronize(self.device)


def flops(trainer: Trainer, tokens: int) -> float:
    """FLOPs of a step's matrix products with the weights, forward and backward; no recomputation, no attention."""
    layers = sum(p.numel() for p in trainer.parts.layers.parameters())
    head = trainer.parts.head.weight.numel() if trainer.loss == "cross_entropy" else 0
    return 6.0 * tokens * (layers + head)


def link_bytes(trainer: SlideTrainer) -> tuple[int, int, int]:
    """Fewest bytes that the layers of a step of slide copy: in during the forward, in during the backward, out."""
    schedule, together = trainer.engine.schedule, not trainer.late
    forward, backward, out = 0, 0, 0
    held = len(schedule.weights.flat)
    for place, layer in enumerate(schedule.layers.values()):
        weights, state = layer.flat.nbytes, sum(flat.nbytes for flat in layer.state.values())
        travels = layer.travels and not schedule.stateless
        # The last layers are still in their slots when the backward starts; the first ones when it ends, up to date if
        # the device has updated them meanwhile.
        backward += weights * (place < len(schedule.layers) - held)
        if travels and together:
            forward += state + weights * (1 + ("master" not in layer.state))  # its gradient, and its weights
        elif not (layer.travels and place < held):
            forward += weights
        backward += state * (travels and not together)
        out += weights * layer.trained * (not travels or together) + (state + weights) * travels
    return forward, backward, out


def update_bytes(trainer: SlideTrainer) -> int:
    """Fewest bytes that the updates of a step on the host move in its memory: state both ways, gradients in, weights
    out, and in as well if there are no masters."""
    total = 0
    for layer in (layer for layer in trainer.engine.schedule.layers.values() if layer.trained and not layer.travels):
        state = sum(flat.nbytes for flat in layer.state.values())
        total += 2 * state + layer.flat.nbytes * (2 + ("master" not in layer.state))
    return total
