"""Will it fit, and how long will it take? Predicted memory and time of a step, for every mode and head.

Memory follows from shapes, and from what each phase of a step keeps alive. Time follows from a few rates of the machine
(`t1lib.plan.rates`). Nothing is trained, and no weights are created.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

import torch

from t1lib.errors import T1Error, require
from t1lib.memory import GIB, in_words
from t1lib.models import MORE, PRESETS, shape_only
from t1lib.optimizers import OptimizerSpec, spec_for
from t1lib.plan.choose import choose_plan, least_choice
from t1lib.plan.cost import Choice, device_bytes, host_bytes, reserved_bytes, resident_bytes
from t1lib.plan.duration import device_update_ms, eager_ms, head_ms, step_ms
from t1lib.plan.rates import Machine
from t1lib.plan.work import HEADS, Work, with_head, work_of

MODES = ("gpu", "ckpt", "slide")
ALIKE = 1.1  # predicted times within this ratio count as equal: they are no better than that
PROCESS = int(1.5 * GIB)  # host memory that Python, torch and CUDA take
AT_A_TIME = 2**27  # tokens, more than any device holds; beyond that, the search for head `fused`'s plan takes long


@dataclass(frozen=True)
class Setting:
    """What is to be trained: `rows` × `seq` tokens per step, `micro_batch` rows at a time, all parameters.

    changes      to a preset's configuration
    optimizer    with float32 master weights, unless dtype is float32
    workspace    of head `fused`, bytes
    together     whether slide's updates wait for the last gradient
    cuda         whether on a GPU; on a CPU there is no slack, no CUDA graph, and no state that travels
    """

    model: str
    rows: int
    seq: int
    micro_batch: int | None = None
    dtype: str = "bfloat16"
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("adamw", master_weights=True))
    workspace: int = 2**28
    together: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)
    cuda: bool = True


@dataclass(frozen=True)
class Prediction:
    """One mode with one head: peak bytes on the device, allocated and reserved, and on the host; ms per step; what mode
    slide keeps where (`choice`); and `why` it does not fit, if it does not. All numbers are infinite if the head
    refuses the setting."""

    mode: str
    head: str
    allocated: float
    reserved: float
    host: float
    ms: float
    choice: str = ""
    why: str = ""

    @property
    def fits(self) -> bool:
        return not self.why


def predict(setting: Setting, vram: int, host: int | None, machine: Machine) -> list[Prediction]:
    """Predict every mode with every head, on a device of `vram` bytes, with `host` bytes beside it (None: no limit).

    Raises `T1Error` for a setting that no mode can train: positions, sizes.
    """
    work = _work(setting)
    found = [p for head in HEADS for p in _with_modes(work, head, vram, host, machine)]
    return sorted(found, key=lambda p: MODES.index(p.mode))


def _with_modes(work: Work, head: str, vram: int, host: int | None, machine: Machine) -> list[Prediction]:
    """Predict every mode with one head. If the head refuses the setting, its error is why no mode fits."""
    try:
        one = with_head(work, head)
    except T1Error as error:
        return [Prediction(mode, head, inf, inf, inf, inf, why=str(error)) for mode in MODES]
    free = None if host is None else host * 9 // 10 - PROCESS
    try:
        choice = choose_plan(one, vram, machine, free)
    except T1Error:
        choice = least_choice(one)  # to say how much it needs
    return [_judged(_predict_one(one, mode, head, machine, choice), vram, host) for mode in MODES]


def predict_point(
    setting: Setting,
    mode: str,
    head: str,
    machine: Machine,
    choice: Choice = Choice(),  # noqa: B008 (it cannot change)
) -> Prediction:
    """Predict one mode with one head; slide with this choice. Does not judge whether it fits.

    Raises `T1Error` as `predict` does, and for a workspace that is too small for the head.
    """
    return _predict_one(with_head(_work(setting), head), mode, head, machine, choice)


def _work(setting: Setting) -> Work:
    for name, allowed in (("rows", 1), ("seq", 2)):
        require(getattr(setting, name) >= allowed, f"{name}={getattr(setting, name)}; allowed: {allowed} or more")
    require(setting.micro_batch is None or setting.micro_batch >= 1, f"micro_batch={setting.micro_batch}; allowed: ≥ 1")
    piece = min(setting.micro_batch or setting.rows, setting.rows) * setting.seq
    few = f"{piece} tokens at a time of rows={setting.rows}, seq={setting.seq}; allowed: {AT_A_TIME}, by a micro_batch"
    require(piece <= AT_A_TIME, few)
    model = shape_only(setting.model, getattr(torch, setting.dtype), **setting.changes)
    positions = model.config.max_position_embeddings
    require(setting.seq <= positions, f"seq {setting.seq}; {setting.model} has {positions} positions{MORE}")
    return work_of(
        model, spec_for(setting.optimizer, model.parameters()), rows=setting.rows, seq=setting.seq,
        micro_batch=setting.micro_batch, workspace=setting.workspace, together=setting.together, cuda=setting.cuda,
    )  # fmt: skip


def _predict_one(work: Work, mode: str, head: str, machine: Machine, choice: Choice) -> Prediction:
    if mode == "slide":
        peak, ms = device_bytes(work, choice), step_ms(work, choice, machine)
        places = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in asdict(choice).items())
        reserved, host = reserved_bytes(work, peak, choice), PROCESS + host_bytes(work, choice)
        return Prediction(mode, head, int(peak), int(reserved), int(host), float(ms), places)
    peak = resident_bytes(work, recomputed=mode == "ckpt")
    layers = work.layers * sum(eager_ms(work, machine, recomputed=mode == "ckpt"))
    ms = layers + head_ms(work, machine) + device_update_ms(work, machine, work.layers, work.outer)
    return Prediction(mode, head, peak, int(reserved_bytes(work, peak)), PROCESS, float(ms))


def _judged(p: Prediction, vram: int, host: int | None) -> Prediction:
    if p.reserved > vram:
        return replace(p, why=f"needs {in_words(p.reserved)} of {in_words(vram)} on the device")
    if host is not None and p.host > host:
        return replace(p, why=f"needs {in_words(p.host)} of {in_words(host)} on the host")
    return p


def recommended(predictions: Iterable[Prediction]) -> Prediction:
    """The fastest prediction that fits; among those about as fast (`ALIKE`), the plainest mode, then the fastest head.

    Raises `T1Error` if nothing fits; the message says what needs the least.
    """
    everything = list(predictions)
    fitting = [p for p in everything if p.fits]
    if not fitting:
        on_device = [p for p in everything if p.why.endswith("on the host")]
        least = min(on_device, key=lambda p: p.host) if on_device else min(everything, key=lambda p: p.reserved)
        need = f"{in_words(least.reserved)} on the device and {in_words(least.host)} on the host"
        raise T1Error(f"nothing fits; the least is mode {least.mode} with head {least.head}, which needs {need}")
    fastest = min(p.ms for p in fitting)
    close = [p for p in fitting if p.ms <= ALIKE * fastest]
    return min(close, key=lambda p: (MODES.index(p.mode), HEADS[p.head], p.ms))


def would_fit(setting: Setting, vram: int, host: int | None, machine: Machine) -> dict[str, Prediction]:
    """Similar settings that fit, by their change (as options of the command `plan`): fewer rows at a time, fewer rows,
    shorter rows, narrower optimizer state, SGD for AdamW, a smaller preset of the family. Each makes one change, the
    smallest of its kind that fits."""
    near = _near(setting)
    changes = {change: other for kind in near for change, other in kind.items()}

    @cache
    def fit(change: str) -> Prediction | None:
        try:
            return recommended(predict(replace(setting, **changes[change]), vram, host, machine))
        except T1Error:
            return None

    found = {}
    for kind in map(list, near):
        if kind and fit(kind[-1]):  # else smaller changes of this kind do not help, either
            least = kind[bisect_left(kind, True, key=lambda change: fit(change) is not None)]
            found[least] = fit(least)
    return found


def _near(setting: Setting) -> list[dict[str, dict[str, Any]]]:
    """Kinds of changes, each from the smallest change to the largest."""
    spec, adamw = setting.optimizer, setting.optimizer.name == "adamw"
    masters = setting.dtype != "float32"
    narrow = {"moments": "bfloat16", "split_master": True}
    state = replace(spec, master_weights=True, **narrow) if adamw and masters else spec
    lean = " without --moments, --split-master" if spec.split_master or spec.moments != "float32" else ""
    family = [name for name in PRESETS if name.split("-")[0] == setting.model.split("-")[0]]  # the smallest first
    smaller = family[: family.index(setting.model)] if setting.model in family else []
    fewer = [setting.rows >> n for n in range(1, setting.rows.bit_length())]
    shorter = [setting.seq // 2**n for n in range(1, 8) if setting.seq // 2**n >= 128]
    return [
        {"--micro-batch 1": {"micro_batch": 1}} if (setting.micro_batch or setting.rows) > 1 else {},
        {f"--batch {rows}": {"rows": rows} for rows in fewer},
        {f"--seq {seq}": {"seq": seq} for seq in shorter},
        {"--moments bfloat16 --split-master": {"optimizer": state}} if state != spec else {},
        {f"--optimizer sgd{lean}": {"optimizer": OptimizerSpec("sgd", master_weights=masters)}} if adamw else {},
        {f"--model {name}": {"model": name} for name in reversed(smaller)},
    ]
