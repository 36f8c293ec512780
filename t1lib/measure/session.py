"""A trainer with its data and measurements, behind methods that take and return plain values, so that it can run in a
process of its own (`t1lib.measure.isolate`). Measurements are metric → value, as `Records.put` takes them. Floors are
the least times that the hardware allows, measured in the same process."""

import math
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from t1lib.errors import choose
from t1lib.heads import HEADS
from t1lib.measure.peers import need
from t1lib.measure.probes import AllocatorTimeline, HostPeak, median_ms, pinned_bytes, storage_bytes
from t1lib.memory import GIB, pinned_zeros
from t1lib.models import build_model, split
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.cost import device_bytes
from t1lib.timing import NoTrace, PhaseTimer, Span, Trace, between_ms, mark_now, synchronize, wrap_layers
from t1lib.train.batch import Piece
from t1lib.train.loop import Trainer
from t1lib.train.modes import SlideTrainer, make_trainer
from t1lib.train.placing import work_in
from t1lib.train.resident import make_optimizer

LINK = ("h2d_gb_s", "d2h_gb_s", "both_in_gb_s", "both_out_gb_s")
PLACES = ("device", "host")  # where a plan puts things; `TrainSession.choice` gives their index
POINTS = 400  # groups of a timeline's neighbouring points; each group's highest are kept, so that no peak is lost


class TrainSession:
    """Trains a model on repeated batches of random tokens.

    model, changes  as for `build_model`; mode: one of `MODES`, or "trainstream"; optimizer: fields of `OptimizerSpec`
    batches         number of different batches, used in turn
    train           what to train: "all" parameters, or those of the "layers"
    options         further arguments of `make_trainer`"""

    def __init__(
        self, *, model: str, mode: str, dtype: str, batch: int, seq: int, optimizer: dict[str, Any],
        device: str, seed: int = 0, changes: dict[str, Any] | None = None, batches: int = 1, train: str = "all",
        **options: Any,
    ) -> None:  # fmt: skip
        self.device, self.seed, self._count = torch.device(device), seed, batches
        self._host = HostPeak()
        where = "cpu" if mode in ("slide", "fsdp", "trainstream") else device
        built = build_model(model, dtype=getattr(torch, dtype), device=where, seed=seed, **(changes or {}))
        layers, spec = split(built).layers, OptimizerSpec(**optimizer)
        if choose("train", train, ("all", "layers")) == "layers":
            built.requires_grad_(False)
            layers.requires_grad_(True)
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
        torch.cuda.empty_cache()  # else what came before would count as reserved by what comes next

    def warm_up(self, steps: int) -> list[float]:
        """Train without measuring, then reset the memory peaks. Returns the losses."""
        losses = [self.step()["loss"] for _ in range(steps)]
        self._setup_peak, self._host = self._host.read(), HostPeak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return losses

    def step(self) -> dict[str, float]:
        """One clean step: its loss, its time and those of its phases (ms)."""
        record = self.trainer.step({"input_ids": self._batches[self.trainer.steps % self._count]})
        phases = {f"{name}_ms": ms for name, ms in record.phases.items()}
        return {"loss": record.loss, "wall_ms": record.wall_ms} | phases

    def turn(self) -> dict[str, float]:
        """A clean step, for interleaving with other variants. An unmeasured one runs before it, since a step's updates
        may overlap with the next step. Returns when all pending work is done."""
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
        """One step's allocations on the compute device: ms since its start, GiB allocated and, on a GPU, reserved."""
        self._settle()
        baseline = storage_bytes(self.trainer.device_tensors())
        with AllocatorTimeline(self.device, baseline) as timeline:
            self.step()
        frame = pd.DataFrame(timeline.points, columns=["at_ms", "allocated_gib", "reserved_gib"]).dropna(axis="columns")
        held = [*frame.columns[1:]]
        highest = frame[held].groupby(frame.index // math.ceil(len(frame) / POINTS)).idxmax()
        frame[held] = frame[held] / GIB
        return frame.loc[sorted({0, len(frame) - 1, *highest.to_numpy().flat})].to_dict("records")

    def memory(self) -> dict[str, float]:
        """Memory in GiB, once `warm_up` has run: peaks of device and host since then, the host's in set-up, pinned."""
        found = {"host_setup_gib": self._setup_peak / GIB, "host_gib": self._host.read() / GIB}
        found |= {"pinned_gib": pinned_bytes() / GIB}
        if self.device.type != "cuda":
            return found | {"allocated_gib": max(point["allocated_gib"] for point in self.timeline())}
        found["allocated_gib"] = torch.cuda.max_memory_allocated(self.device) / GIB
        return found | {"reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB}

    def floors(self) -> dict[str, float]:
        """A step's floors (ms), at rates measured on the spot: of its matrix products with the weights, without
        recomputation and attention; in slide also of its copies over the link, with the link's rates (GB/s), and of its
        updates on the host."""
        self._settle()
        cuda, dtype = self.device.type == "cuda", next(self.trainer.model.parameters()).dtype
        parts, tokens = self.trainer.parts, self._batches[0].numel()
        head = parts.head.weight.numel() if self.trainer.loss == "cross_entropy" else 0
        flops = 6.0 * tokens * (sum(p.numel() for p in parts.layers.parameters()) + head)
        found = {"compute_floor_ms": flops / measure_product(self.device, dtype, 8192 if cuda else 256) * 1e3}
        if isinstance(self.trainer, SlideTrainer):
            moved, link = step_bytes(self.trainer), measure_link(self.device, nbytes=2**28 if cuda else 2**22)
            found |= link | {"link_ms": link_ms(link, moved[:2], moved[2:4])}
            if moved.updates:
                found["update_floor_ms"] = moved.updates / measure_copy(2**29 if cuda else 2**24) * 1e3
        torch.cuda.empty_cache()
        return found

    def choice(self) -> dict[str, float]:
        """What slide keeps where within its budget (places by `PLACES`), and the device memory predicted (GiB)."""
        engine = self.trainer.engine
        choice, work = engine.choice, work_in(engine, None, *self._batches[0].shape)
        places = {name: PLACES.index(getattr(choice, name)) for name in ("inputs", "outer")}
        predicted = float(device_bytes(work, choice)) / GIB
        return {"resident": choice.resident, "keep": choice.keep, "predicted_gib": predicted} | places

    def _settle(self) -> None:
        """Let pending updates finish: the next measurement starts with idle lanes."""
        self.trainer.drain()
        synchronize(self.device)


class Moved(NamedTuple):
    """Bytes that a step of slide, or one of its layers in a step, has to move."""

    forward_in: int  # over the link to the device, while the forward runs
    forward_out: int  # to the host, meanwhile
    backward_in: int  # likewise, while the backward runs
    backward_out: int
    updates: int = 0  # read and written in the host's memory by its updates


def step_bytes(trainer: SlideTrainer) -> Moved:
    """The fewest bytes that a step has to move for its layers."""
    schedule, moved = trainer.engine.schedule, [Moved(0, 0, 0, 0)]
    count, slots = len(schedule.layers), len(schedule.weights)
    for place, layer in enumerate(schedule.layers.values()):
        weights, state = layer.flat.nbytes, sum(flat.nbytes for flat in layer.state.values())
        read = weights * ("master" not in layer.state)  # by an update that has no master to read instead
        again = weights * (place < count - slots)  # in the backward; the last layers are still in their slots
        if not layer.travels:  # frozen, or updated by the CPU, to which its gradients go
            updates = (2 * state + 2 * weights + read) * layer.trained
            moved.append(Moved(weights, 0, again, weights * layer.trained, updates))
        elif trainer.late:  # updated on the device in the backward, at whose end the first layers are in their slots
            moved.append(Moved(weights * (place >= slots), 0, again + state, state + weights))
        else:  # updated on the device in the next forward; gradients may have to wait for it on the host
            gradients = weights * (trainer.engine.choice.grads == "host")
            moved.append(Moved(state + gradients + read, state + weights, again, gradients))
    return Moved(*map(sum, zip(*moved, strict=True)))


def link_ms(rates: dict[str, float], *phases: tuple[int, int]) -> float:
    """Least time in ms of a step's copies: by phase, the bytes to the device and those to the host. Both directions run
    at once as long as both have something to copy, and what a phase has not sent to the host leaves in the next."""
    h2d, d2h, both_in, both_out = (rates[name] * 1e6 for name in LINK)  # bytes/ms
    ms, left = 0.0, 0.0
    for inward, outward in phases:
        together = min(inward / both_in, (outward + left) / both_out)
        left += outward - together * both_out
        ms += together + (inward - together * both_in) / h2d
    return ms + left / d2h


def measure_link(device: torch.device, nbytes: int = 2**28) -> dict[str, float]:
    """Rates in GB/s of copies of `nbytes` between pinned host memory and the device, by `LINK`: in, out, and in and out
    at the same time. On a CPU, where there is no link, those of plain copies of memory."""
    if device.type != "cuda":
        return dict.fromkeys(LINK, measure_copy(nbytes) / 2 / 1e9)
    host_in, host_out = (pinned_zeros(nbytes, torch.uint8, device).fill_(1) for _ in range(2))
    dev_in, dev_out = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    inward, outward = (torch.cuda.Stream(device), dev_in, host_in), (torch.cuda.Stream(device), host_out, dev_out)

    def rates(copies: int, *ways: tuple[torch.cuda.Stream, Tensor, Tensor]) -> list[float]:
        """Rates of copies in all directions `ways` (stream, target, source) at once."""
        synchronize(device)
        marks = []
        for stream, target, source in ways:
            with torch.cuda.stream(stream):
                start = mark_now(device)
                for _ in range(copies):
                    target.copy_(source, non_blocking=True)
                marks.append((start, mark_now(device)))
        synchronize(device)
        return [nbytes * copies / between_ms(*ends) / 1e6 for ends in marks]

    def best(copies: int, *ways: tuple[torch.cuda.Stream, Tensor, Tensor]) -> list[float]:
        return [max(rate) for rate in zip(*(rates(copies, *ways) for _ in range(3)), strict=True)]

    rates(2, inward, outward)
    return dict(zip(LINK, best(4, inward) + best(4, outward) + best(8, inward, outward), strict=True))


def measure_copy(nbytes: int) -> float:
    """Rate in bytes/s at which all cores copy within host memory, counting bytes read plus bytes written."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return 2 * nbytes / median_ms(lambda: target.copy_(source), torch.device("cpu")) * 1e3


def measure_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of random (size, size) matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / median_ms(lambda: torch.mm(a, a), device) * 1e3


class TrainStreamTrainer(Trainer):
    """TrainStream as in its README: float32 weights under bfloat16 autocast, AdamW on the CPU during the backward, and
    its own chunked loss. All layers' weights are on the host, and layers are recomputed: otherwise it would send all
    that they save across the link (29 s per step of 16,384 tokens). It has to see the call of the whole model:
    otherwise layers run with the weights of the step before. Whole batches only, without `micro_batch`."""

    def _place(self) -> None:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):  # it prints where on this machine it builds
            trainstream = need("trainstream")
        self._loss = trainstream.chunked_cross_entropy
        wrap_layers(self.parts.layers, lambda: self.trace, recompute=True)
        self.parts.head.forward = lambda hidden: hidden  # so that the model returns what goes into the loss
        plain = make_optimizer(self.spec, self.model.float().parameters(), fused=False)
        options = {"device": self.device, "offload": True, "param_offload": True, "activation_offload": False}
        options |= {"max_grad_norm": self.max_grad_norm}
        self.model, self.optimizer = trainstream.wrap(self.model, plain, **options)

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model(input_ids=piece.ids.to(self.device), use_cache=False).logits
            timer.mark("forward")
            return self._loss(hidden, self.parts.head.weight, piece.targets)

    def _clip(self) -> Tensor:
        return torch.zeros(())  # the gradients are on the host by now; the optimizer clips them

    def _update(self) -> None:
        self.optimizer.step()

    def drain(self) -> None:
        self.optimizer.synchronize()
