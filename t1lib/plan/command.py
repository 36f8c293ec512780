"""`python -m t1lib plan`: will it fit, and how long will a step take?"""

import argparse
import os
import shlex
from dataclasses import asdict
from math import inf, isfinite

import torch

from t1lib.errors import T1Error, choose, require
from t1lib.files import write_json
from t1lib.heads import parse_bytes
from t1lib.memory import in_words
from t1lib.models import PRESETS, parse_changes
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.predict import Prediction, Setting, predict, recommended, would_fit
from t1lib.plan.rates import device_name, machine_file, measure_machine, this_machine


def plan_command(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0, or raises `T1Error` after printing the table if nothing fits."""
    if arguments.calibrate:
        found = measure_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        write_json(machine_file(), asdict(found))
        print(f"{found.name}: link {found.link / 1e9:.1f} GB/s each way; updates on the host {found.update / 1e9:.0f} "
              f"GB/s; products {found.flops / 1e12:.3g} TFLOP/s; kept in {machine_file()} (without it, plans take an "
              "H200's rates)")  # fmt: skip
        if arguments.model is None:
            return 0
    require(arguments.model is not None, "--model is missing: a preset, a checkpoint folder, or a hub name")
    if arguments.vram is None:
        require(torch.cuda.is_available(), "--vram is missing, and there is no GPU here to ask; such as --vram 16GiB")
    vram = parse_bytes(arguments.vram) if arguments.vram is not None else torch.cuda.mem_get_info()[0]
    host = parse_bytes(arguments.host) if arguments.host is not None else None
    for name, size in (("vram", vram), ("host", host)):
        require(size is None or size >= 2**20, f"--{name} {getattr(arguments, name)} is less than 1MiB; such as 16GiB")
    machine, setting = this_machine(), _setting(arguments)
    predictions = predict(setting, vram, host, machine)
    own = device_name() in (machine.name, f"NVIDIA {machine.name}")
    whose = "this machine's rates" if own else "an H200's rates, not this machine's (--calibrate)"
    print(f"{arguments.model}, {arguments.batch} × {arguments.seq} tokens per step, {arguments.optimizer}; "
          f"{in_words(vram)} of GPU memory; times by {whose}\n")  # fmt: skip
    _print_row("mode", "head", "allocated", "reserved", "host", "step" if own else "H200 step", "tokens/s", "")
    for p in predictions:
        values = ["-"] * 5
        if isfinite(p.ms):
            values = [*map(in_words, (p.allocated, p.reserved, p.host)), f"{_digits(p.ms / 1e3)} s"]
            values += [_digits(setting.rows * setting.seq / p.ms * 1e3)]
        _print_row(p.mode, p.head, *values, p.why or "fits")
    try:
        best = recommended(predictions)
    except T1Error as error:
        near = would_fit(setting, vram, host, machine)
        told = (f"{c} ({in_words(p.reserved)}, host {in_words(p.host)})" for c, p in near.items())
        raise T1Error(f"{error}\nwould fit: {', '.join(told) or 'nothing near it, either'}") from None
    choice = ", ".join(f"{name} {value}" for name, value in asdict(best.choice).items()) if best.choice else ""
    print(f"\nrecommended: mode {best.mode}, head {best.head}{f' ({choice})' if choice else ''}")
    print(f"  {_command(arguments, best, vram)}")
    return 0


def _print_row(mode: str, head: str, *values: str) -> None:
    *numbers, why = values
    print(f"{mode:<6} {head:<8} {' '.join(f'{value:>10}' for value in numbers)}  {why}".rstrip())


def _digits(value: float) -> str:
    """Format with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _setting(given: argparse.Namespace) -> Setting:
    choose("dtype", given.dtype, ("bfloat16", "float32"))
    require(0 <= given.max_grad_norm < inf, f"--max-grad-norm {given.max_grad_norm}; allowed: 0 or more")
    state = {"moments": given.moments, "split_master": given.split_master, "master_weights": given.dtype != "float32"}
    return Setting(
        given.model, given.batch, given.seq, given.micro_batch, given.dtype, OptimizerSpec(given.optimizer, **state),
        parse_bytes(given.workspace), together=given.max_grad_norm > 0, changes=parse_changes(given.change),
    )  # fmt: skip


def _command(arguments: argparse.Namespace, best: Prediction, vram: int) -> str:
    """The training command for the recommendation `best`, quoted for a shell; mode slide within `vram` bytes."""
    if arguments.model not in PRESETS and not os.path.isdir(arguments.model):
        return "(train takes presets and checkpoint folders only, no names of the hub)"
    given = {"model": arguments.model, "mode": best.mode, "head": best.head}
    given |= {name: getattr(arguments, name) for name in ("seq", "batch", "micro_batch", "optimizer", "dtype")}
    given |= {"moments": arguments.moments, "max_grad_norm": f"{arguments.max_grad_norm:g}"}
    given |= {"workspace": arguments.workspace} if best.head == "fused" else {}
    given |= {"gpu_memory": arguments.vram or f"{vram // 2**20}MiB"} if best.mode == "slide" else {}
    parts = [part for name, value in given.items() if value for part in (f"--{name.replace('_', '-')}", str(value))]
    parts += ["--split-master"] * arguments.split_master
    parts += [part for change in arguments.change for part in ("--change", *change)]
    about = "\n  (predicted with the preset's vocabulary; train makes one from its text, --vocabulary entries)"
    return shlex.join(["python", "-m", "t1lib", "train", *parts]) + about * (arguments.model in PRESETS)
