"""Time and memory of a training step over models, modes, heads and lengths, each next to its prediction."""

from dataclasses import dataclass, replace
from itertools import product
from math import inf
from time import monotonic
from typing import Any

from tqdm import tqdm

from t1lib.errors import T1Error
from t1lib.heads import parse_bytes
from t1lib.measure.isolate import Isolated, VariantFailed, VariantOutOfMemory
from t1lib.measure.memory import GIB
from t1lib.measure.progress import progress
from t1lib.measure.records import Records
from t1lib.measure.rows import add_memory
from t1lib.measure.session import TrainSession
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.cost import Choice
from t1lib.plan.predict import Prediction, Setting, predict_point
from t1lib.plan.rates import Machine

LEAN = Choice(slots=2, inputs="host", outer="host")  # slide's smallest plan, the same for every row length
NARROW = {"moments": "bfloat16", "split_master": True}
POSITIONS = "max_position_embeddings"
# Seconds. A step predicted to take longer than the first is measured only once. It gets no warm-up if it takes longer
# than the second and its process has run rows of this length (head fused, which may compile kernels for them, does), or
# longer than the third and the process has run any rows.
LONG = (1.0, 4.0, 15.0)


@dataclass(frozen=True)
class Frontier:
    """What is measured: every model in every mode with every head, with steps of one row of each length (ascending).

    session    settings common to all points: dtype, device, seed, optimizer (fields)
    workspace  of head `fused`
    vram       bytes of device memory; points predicted to need more than `beyond` times as much are skipped
    host       bytes of host memory; points predicted to need more are skipped
    longest    seconds; points whose step is predicted to take longer are skipped
    within     seconds for all points; those that would end later are skipped
    steps      measured at each point, after `warmup` others; fewer if a step is predicted to take long (`LONG`)
    host_share share of slide's layers that the CPU updates
    narrow     models with narrow optimizer state: 16-bit moments, masters stored as the bits that the weights lack
    """

    models: list[str]
    modes: list[str]
    heads: list[str]
    lengths: list[int]
    session: dict[str, Any]
    workspace: str
    vram: int
    host: int
    longest: float
    steps: int
    warmup: int
    beyond: float = 1.05
    host_share: float = 0.0
    narrow: tuple[str, ...] = ()
    within: float = inf

    def settings(self, model: str, mode: str) -> dict[str, Any]:
        """Arguments of a `TrainSession` for this model and mode."""
        session, own = self.session, {}
        if model in self.narrow:
            session = session | {"optimizer": session["optimizer"] | NARROW}
        if mode == "slide":  # without whole masters, a device update reads the weights in their slot
            lean = replace(LEAN, slots=LEAN.slots + (model in self.narrow), host_share=self.host_share)
            on_cpu = {"outer": "device", "host_share": 1.0}  # nothing travels to a device
            own["choice"] = replace(lean, **on_cpu) if session["device"] == "cpu" else lean
        changes = {POSITIONS: max(self.lengths)}
        return session | dict(model=model, mode=mode, batch=1, seq=self.lengths[0], changes=changes) | own

    def predict(self, model: str, mode: str, head: str, seq: int, machine: Machine) -> Prediction:
        given = self.settings(model, mode)
        spec, workspace = OptimizerSpec(**given["optimizer"]), parse_bytes(self.workspace)
        setting = Setting(model, 1, seq, None, given["dtype"], spec, workspace, False, given["changes"])
        setting = replace(setting, cuda=given["device"] == "cuda")
        return predict_point(setting, mode, head, machine, given.get("choice", LEAN))


def measure_frontier(records: Records, frontier: Frontier, machine: Machine) -> None:
    """Record each point's status, its prediction and, if it runs, its times and peaks; variant `model/mode/head`, phase
    `seq/<length>`.

    Each model and mode has a process of its own, replaced by a new one after an error in it; earlier results are kept.
    Once a length ran out of memory, was refused or failed, the head's longer ones are skipped.
    """
    end = monotonic() + frontier.within
    for model, mode in progress([*product(frontier.models, frontier.modes)], "models and modes"):
        worker, warm = None, set()
        for head in frontier.heads:
            worker = _lengths(records, frontier, machine, (model, mode, head), worker, warm, end)
        if worker is not None:
            worker.close()


def _lengths(
    records: Records, frontier: Frontier, machine: Machine, names: tuple[str, str, str], worker: Isolated | None,
    warm: set[int], end: float,
) -> Isolated | None:  # fmt: skip
    """Measure all lengths of one head until the time `end`; returns the process if it can be reused, else None.

    warm    lengths that the process has run, with any head; updated
    """
    variant, stopped = "/".join(names), ""
    for seq in frontier.lengths:
        phase = f"seq/{seq}"
        try:
            predicted = frontier.predict(*names, seq, machine)
        except T1Error as error:  # such as a workspace too small for this many tokens
            stopped = _stopped(records, variant, phase, error)
            continue
        file_prediction(records, variant, phase, predicted)
        counts = _counts(frontier, predicted.ms, names[2] != "fused" and seq in warm, bool(warm))
        late = monotonic() + sum(counts) * predicted.ms / 1e3 > end
        why = stopped or _skipped(frontier, predicted) or "no time left" * late
        if why:
            records.status(variant, "skipped", phase)
            tqdm.write(f"{variant} {seq}: skipped, {why}")
            continue
        try:
            worker = worker or Isolated(TrainSession, frontier.settings(*names[:2]))
            for step, ms in enumerate(_measure(frontier, worker, names[2], seq, counts, records, variant, phase)):
                records.add(variant, "wall_ms", ms, "ms", phase, step)
            records.status(variant, "ok", phase)
            warm.add(seq)
        except (VariantOutOfMemory, VariantFailed, T1Error) as error:
            stopped = _stopped(records, variant, phase, error)
            if worker is not None:
                worker.close()
            worker = None
            warm.clear()
    return worker


def _counts(frontier: Frontier, ms: float, warm: bool, used: bool) -> tuple[int, int]:
    """Steps to warm up and to measure, if each is predicted to take `ms`. The process has run rows: of this length with
    kernels that do for this head (`warm`), or any (`used`)."""
    once, long, longer = (ms > 1e3 * seconds for seconds in LONG)
    return 0 if (long and warm) or (longer and used) else frontier.warmup, 1 if once else frontier.steps


def _stopped(records: Records, variant: str, phase: str, error: Exception) -> str:
    """Record why a point has no times; returns the reason to print for longer rows."""
    state = "oom" if isinstance(error, VariantOutOfMemory) else "skipped" if isinstance(error, T1Error) else "failed"
    records.status(variant, state, phase)
    tqdm.write(f"{variant} {phase.removeprefix('seq/')}: {state}, {str(error).strip()}")
    return "a shorter row " + {"oom": "did not fit", "skipped": "was refused", "failed": "failed"}[state]


def _measure(
    frontier: Frontier, worker: Isolated, head: str, seq: int, counts: tuple[int, int], records: Records, variant: str,
    phase: str,
) -> list[float]:  # fmt: skip
    options = {"workspace": frontier.workspace} if head == "fused" else {}
    worker.call("set_point", batch=1, seq=seq, head=head, head_options=options)
    warmup, steps = counts
    worker.call("warm_up", steps=warmup)
    times = [worker.call("step").wall_ms for _ in range(steps)]
    peaks = worker.call("memory")
    add_memory(records, variant, phase, {k: v for k, v in peaks.items() if k in ("allocated", "reserved", "host")})
    tqdm.write(f"{variant} {seq}: {min(times):,.0f} ms, {peaks['allocated'] / GIB:.2f} GiB")
    return times


def file_prediction(records: Records, variant: str, phase: str, p: Prediction) -> None:
    """Record a point's prediction beside what is measured there."""
    for name in ("allocated", "reserved", "host"):
        records.add(variant, f"predicted_{name}_gib", getattr(p, name) / GIB, "GiB", phase)
    records.add(variant, "predicted_ms", p.ms, "ms", phase)


def _skipped(frontier: Frontier, p: Prediction) -> str:
    if p.allocated > frontier.beyond * frontier.vram:
        return f"{p.allocated / GIB:.0f} GiB predicted on the device"
    if p.host > frontier.host:
        return f"{p.host / GIB:.0f} GiB predicted on the host"
    return f"{p.ms / 1e3:.0f} s predicted" if p.ms > 1e3 * frontier.longest else ""
