"""The fastest choice of what streaming keeps on the device within a budget; memory and time of a step in every mode
but gpu-graph with every head; and the command `python -m t1lib plan`."""

import argparse
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

import numpy as np
import torch

from t1lib.errors import T1Error, choose, require
from t1lib.files import write_signed
from t1lib.heads import DEFAULT_HEAD, HEADS, parse_bytes
from t1lib.memory import GIB, in_words
from t1lib.models import MORE, PRESETS, parse_changes, shape_only
from t1lib.optimizers import OptimizerSpec, masters_for
from t1lib.plan.cost import Choice, choice_of, device_bytes, fsdp_ms, host_bytes, reserved_bytes, step_ms
from t1lib.plan.rates import H200, Machine, device_name, machine_file, measure_machine, this_machine
from t1lib.plan.work import MODES, Work, in_mode, work_of

# Shares of the streamed layers that the CPU may update. With more than a quarter, runs were up to a fifth slower than
# predicted, as the CPU and the link share the host's memory (H200).
SHARES = 0.0, 1 / 4
ALIKE = 1.1  # predicted times within this ratio count as equal: they are no more exact than that
PROCESS = int(1.5 * GIB)  # host memory that Python, torch and CUDA take
_ROW = "{:<6} {:<8} {:>10} {:>10} {:>10} {:>10} {:>10}  {}"  # of the command's table
AT_A_TIME = 2**27  # tokens, more than any device holds; beyond that, the search for head `fused`'s plan takes long


def alternatives(work: Work) -> Iterator[Choice]:
    """All choices, each as a table of how many layers are resident (rows), and how many keep activations (columns).
    More slots help where updates run in the backward, or read the weights."""
    layers = np.arange(work.layers + 1)
    outers = ("device", "host") if work.outer else ("device",)
    shares = SHARES if work.cuda and work.frozen < work.layers else (float(work.frozen < work.layers),)
    # Not with graphs: nothing else can use their memory, and gradients on the device reserved more than expected.
    waiting = ("host", "device") if work.together and work.cuda and not work.graphed else ("host",)
    for outer, inputs, slots, share, grads in product(outers, ("device", "host"), (2, 4), shares, waiting):
        yield Choice(slots, layers[:, None], layers[None, :], inputs, outer, share, grads)


def choose_plan(
    work: Work, budget: int, machine: Machine = H200, host: int | None = None, or_least: bool = False
) -> Choice:
    """The fastest choice that reserves no more than `budget` bytes; among equally fast ones, the smallest. A larger
    budget gives a slower one only if the host is short. Raises `T1Error` if none fits, and names the least that works.

    host       bytes that the host should hold at most; if every choice needs more, one that needs the least is taken
    or_least   if no choice fits, take the best one that fits into the least budget that works
    """
    grids, smallest, found = [], defaultdict(lambda: np.inf), []
    for choices in alternatives(work):
        allocated = device_bytes(work, choices)
        expected, most = (reserved_bytes(work, allocated, choices, most) for most in (False, True))
        grids.append((choices, expected, most))
        smallest[choices.host_share] = min(smallest[choices.host_share], expected.min())
    least = int(min(smallest.values())) + 1
    require(
        or_least or budget >= least,
        f"gpu_memory of {in_words(budget)} is too small for one layer at a time; the least that works for "
        f"{work.tokens} tokens per step, {work.micro_tokens} at a time, is {least // 2**20 + 1}MiB "
        f"({in_words(work.workspace)} of it are the output layer's workspace)",
    )
    for choices, expected, most in grids:
        # A choice must fit with the most that it may reserve; the smallest of each share, with the expected bytes only.
        fits = (most <= budget) | ((expected <= max(budget, least)) & (expected == smallest[choices.host_share]))
        if fits.any():
            beyond = np.maximum(host_bytes(work, choices) - (np.inf if host is None else host), 0)
            ms = np.round(step_ms(work, choices, machine), 3)
            keys = np.stack(np.broadcast_arrays(beyond, ms, expected))[:, fits]
            best = np.lexsort(keys[::-1])[0]
            resident, keep = np.argwhere(fits)[best].tolist()
            found.append((tuple(keys[:, best]), replace(choices, resident=resident, keep=keep)))
    return min(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Setting:
    """What is to be trained: all parameters, with `rows` × `seq` tokens per step, `micro_batch` rows at a time."""

    model: str
    rows: int
    seq: int
    micro_batch: int | None = None
    dtype: str = "bfloat16"
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("adamw"))
    workspace: int = 2**28  # bytes, of head `fused`
    together: bool = True  # whether slide's updates wait for the last gradient
    changes: Mapping[str, Any] = field(default_factory=dict)  # to a preset's configuration
    cuda: bool = True  # whether on a GPU


@dataclass(frozen=True)
class Prediction:
    """Prediction for one mode with one head: bytes at the peak, ms per step, what slide keeps where (`choice`), and if
    it does not fit, `why`. `lacks` says where memory is missing: on the "device" (perhaps on the host, too), or on the
    "host" alone. All numbers are infinite if the head refuses the setting."""

    mode: str
    head: str
    allocated: float = inf
    reserved: float = inf
    host: float = inf
    ms: float = inf
    choice: Choice | None = None
    why: str = ""
    lacks: str = ""


def predict(setting: Setting, vram: int, host: int | None, machine: Machine) -> list[Prediction]:
    """Predict all of `MODES` with all heads, on a device of `vram` bytes, with `host` bytes beside it (None: no limit).
    Raises `T1Error` for a setting that no mode can train, such as rows longer than the model has positions."""
    work, found = work_for(setting), []
    free = None if host is None else host * 9 // 10 - PROCESS
    for mode, head in product(MODES, HEADS):
        try:
            p = _predicted(work, mode, head, machine, lambda w: choose_plan(w, vram, machine, free, or_least=True))
        except T1Error as error:
            p = Prediction(mode, head, why=str(error))
        for need, there, where in (p.reserved, vram, "device"), (p.host, inf if host is None else host, "host"):
            if not p.why and need > there:
                p = replace(p, why=f"needs {in_words(need)}, and the {where} has {in_words(there)}", lacks=where)
        found.append(p)
    return found


def predict_point(setting: Setting, mode: str, head: str, machine: Machine, choice: Choice | None = None) -> Prediction:
    """Predict one mode with one head, slide with this choice, fitting or not. Raises as `predict` and the head do."""
    return _predicted(work_for(setting), mode, head, machine, lambda _: choice or Choice())


def _predicted(work: Work, mode: str, head: str, machine: Machine, slide: Callable[[Work], Choice]) -> Prediction:
    work = in_mode(work, mode, head)
    choice = slide(work) if mode == "slide" else choice_of(mode, work)
    allocated, host = device_bytes(work, choice), PROCESS + host_bytes(work, choice)
    ms = fsdp_ms(work, machine) if mode == "fsdp" else step_ms(work, choice, machine)
    reserved = int(reserved_bytes(work, allocated, choice))
    return Prediction(mode, head, int(allocated), reserved, int(host), float(ms), choice if mode == "slide" else None)


def work_for(setting: Setting) -> Work:
    """What a step needs in mode slide. Raises `T1Error` as `predict` does."""
    rows, seq = setting.rows, setting.seq
    for name, value, least in (("rows", rows, 1), ("seq", seq, 2), ("micro_batch", setting.micro_batch, 1)):
        require(value is None or value >= least, f"{name}={value}; allowed: {least} or more")
    require(rows * seq <= AT_A_TIME, f"{rows * seq} tokens per step of rows={rows}, seq={seq}; allowed: {AT_A_TIME}")
    model = shape_only(setting.model, getattr(torch, setting.dtype), **setting.changes)
    positions = model.config.max_position_embeddings
    require(seq <= positions, f"seq {seq}; {setting.model} has {positions} positions{MORE}")
    return work_of(
        model, setting.optimizer.state_dtypes, rows=rows, seq=seq, micro_batch=setting.micro_batch,
        workspace=setting.workspace, together=setting.together, cuda=setting.cuda,
    )  # fmt: skip


def recommended(predictions: Collection[Prediction]) -> Prediction:
    """The fastest prediction that fits; among those about as fast (`ALIKE`), the plainest mode, then the fastest head.
    Raises `T1Error` if nothing fits, and names what needs the least."""
    fitting = [p for p in predictions if not p.why]
    if not fitting:
        on_device = [p for p in predictions if p.lacks == "host"]
        least = min(on_device, key=lambda p: p.host) if on_device else min(predictions, key=lambda p: p.reserved)
        device = "" if on_device else f"{in_words(least.reserved)} on the device and "
        need = f"mode {least.mode} with head {least.head}, which needs {device}{in_words(least.host)} on the host"
        raise T1Error(f"nothing fits; the least is {need}")
    fastest = min(p.ms for p in fitting)
    near = [p for p in fitting if p.ms <= ALIKE * fastest]
    return min(near, key=lambda p: (MODES.index(p.mode), p.ms, p.head != DEFAULT_HEAD))  # heads may tie in ms


def plan_command(given: argparse.Namespace) -> int:
    """Run the command; returns 0, or raises `T1Error` after printing the table if nothing fits."""
    gpu = torch.cuda.is_available()
    if given.calibrate:
        found = measure_machine(torch.device("cuda" if gpu else "cpu"))
        write_signed(machine_file(), asdict(found))
        print(f"{found.name}: link {found.link / 1e9:.1f} GB/s each way; updates on the host {found.update / 1e9:.0f} "
              f"GB/s; products {found.flops / 1e12:.3g} TFLOP/s; kept in {machine_file()} (without it, plans take an "
              "H200's rates)")  # fmt: skip
        if given.model is None:
            return 0
    require(given.model is not None, "--model is missing: a preset, a checkpoint folder, or a hub name")
    require(gpu or given.vram is not None, "--vram is missing, and there is no GPU here to ask; such as --vram 16GiB")
    vram = torch.cuda.mem_get_info()[0] if given.vram is None else parse_bytes(given.vram, least=2**20)
    host = None if given.host is None else parse_bytes(given.host, least=2**20)
    machine, setting = this_machine(), _setting(given)
    predictions = predict(setting, vram, host, machine)
    own = device_name() in (machine.name, f"NVIDIA {machine.name}")
    whose = "this machine's rates" if own else "an H200's rates, not this machine's (--calibrate)"
    print(f"{given.model}, {given.batch} × {given.seq} tokens per step, {given.optimizer}; "
          f"{in_words(vram)} of GPU memory; times by {whose}\n")  # fmt: skip
    step = "step" if own else "H200 step"
    print(_ROW.format("mode", "head", "allocated", "reserved", "host", step, "tokens/s", "").rstrip())
    for p in predictions:
        sizes = map(in_words, (p.allocated, p.reserved, p.host))
        times = f"{_digits(p.ms / 1e3)} s", _digits(setting.rows * setting.seq / p.ms * 1e3)
        values = [*sizes, *times] if p.ms < inf else ["-"] * 5
        print(_ROW.format(p.mode, p.head, *values, p.why or "fits"))
    best = recommended(predictions)
    choice = ", ".join(f"{name} {value}" for name, value in asdict(best.choice).items()) if best.choice else ""
    print(f"\nrecommended: mode {best.mode}, head {best.head}{f' ({choice})' if choice else ''}")
    print(f"  {_command(given, best, vram)}")
    return 0


def _digits(value: float) -> str:
    """Format with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _setting(given: argparse.Namespace) -> Setting:
    choose("dtype", given.dtype, ("bfloat16", "float32"))
    require(0 <= given.max_grad_norm < inf, f"--max-grad-norm {given.max_grad_norm}; allowed: 0 or more")
    state = {"moments": given.moments, "master_weights": masters_for(given.dtype, given.split_master)}
    return Setting(
        given.model, given.batch, given.seq, given.micro_batch, given.dtype, OptimizerSpec(given.optimizer, **state),
        parse_bytes(given.workspace), together=given.max_grad_norm > 0, changes=parse_changes(given.change),
    )  # fmt: skip


def _command(arguments: argparse.Namespace, best: Prediction, vram: int) -> str:
    """The training command for the recommendation `best`, quoted for a shell; mode slide within `vram` bytes."""
    if arguments.model not in PRESETS and not os.path.isdir(arguments.model):
        return "(train takes presets and checkpoint folders only, no names of the hub)"
    given = {"model": arguments.model, "mode": best.mode, "head": best.head}
    given |= {name: vars(arguments)[name] for name in ("seq", "batch", "micro_batch", "optimizer", "dtype", "moments")}
    given["max_grad_norm"] = f"{arguments.max_grad_norm:g}"
    given["workspace"] = arguments.workspace if best.head == "fused" else None
    given["gpu_memory"] = (arguments.vram or f"{vram // 2**20}MiB") if best.mode == "slide" else None
    parts = [part for name, value in given.items() if value for part in (f"--{name.replace('_', '-')}", str(value))]
    parts += ["--split-master"] * arguments.split_master
    parts += [part for change in arguments.change for part in ("--change", *change)]
    about = "\n  (predicted with the preset's vocabulary; `train` makes a tokenizer, of --vocabulary entries)"
    return shlex.join(["python", "-m", "t1lib", "train", *parts]) + about * (arguments.model in PRESETS)
