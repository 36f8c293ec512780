"""`python -m t1lib plan`: will it fit, and how long will a step take?"""

import argparse
import os
import shlex
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

from t1lib.errors import T1Error, choose, require


def add_training(parser: argparse.ArgumentParser, seq: int, batch: int) -> None:
    """Add what the commands `plan` and `train` are both told; the defaults of --seq and --batch are given."""
    add = parser.add_argument
    add("--change", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"), help="of a preset's shape")
    add("--seq", type=int, default=seq, help=f"tokens a row (default: {seq})")
    add("--batch", type=int, default=batch, help=f"rows a step (default: {batch})")
    add("--micro-batch", type=int, help="rows computed at a time (default: all)")
    add("--optimizer", default="adamw", help="adamw or sgd (default: adamw)")
    add("--moments", default="float32", help="of adamw beside bfloat16 weights: float32 (default) or bfloat16")
    add("--split-master", action="store_true", help="of float32 masters keep the bits that bfloat16 weights lack")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to it; 0: do not (default: 1)")


def add_parser(commands: Any) -> None:
    """Add the command's arguments, without slow imports."""
    parser = commands.add_parser("plan", help="predict memory and time of a step for every mode and head")
    add = parser.add_argument
    add("--model", help="a preset, such as qwen3-8b, a checkpoint folder, or a hub name")
    add_training(parser, seq=1024, batch=1)
    add("--vram", help="of the GPU, less what CUDA itself takes, such as 15GiB of 16 (default: what is free here)")
    add("--host", help="memory of the host, such as 64GiB (default: enough)")
    add("--dtype", default="bfloat16", help="of weights: float32, or bfloat16 with float32 masters (default)")
    add("--workspace", default="256MiB", help="of head fused (default: 256MiB)")
    add("--calibrate", action="store_true", help="measure this machine's rates first and keep them")
    parser.set_defaults(command=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0, or raises `T1Error` after printing the table if nothing fits."""
    import torch

    from t1lib.heads import parse_bytes
    from t1lib.memory import in_words
    from t1lib.plan.predict import predict, recommended, would_fit
    from t1lib.plan.rates import calibrate, machine_file, measured_here, this_machine

    if arguments.calibrate:
        found = calibrate(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
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
    machine, setting = this_machine(), setting_of(arguments)
    predictions, own = predict(setting, vram, host, machine), measured_here(machine)
    whose = "this machine's rates" if own else "an H200's rates, not this machine's (--calibrate)"
    print(f"{arguments.model}, {arguments.batch} × {arguments.seq} tokens per step, {arguments.optimizer}; "
          f"{in_words(vram)} of GPU memory; times by {whose}\n")  # fmt: skip
    rows = [["mode", "head", "allocated", "reserved", "host", "step" if own else "H200 step", "tokens/s", ""]]
    for p in predictions:
        values = ["-"] * 5
        if isfinite(p.ms):
            values = [*map(in_words, (p.allocated, p.reserved, p.host)), f"{_digits(p.ms / 1e3)} s"]
            values += [_digits(arguments.batch * arguments.seq / p.ms * 1e3)]
        rows.append([p.mode, p.head, *values, p.why or "fits"])
    for mode, head, *values, why in rows:
        print(f"{mode:<6} {head:<8} {' '.join(f'{value:>10}' for value in values)}  {why}".rstrip())
    try:
        best = recommended(predictions)
    except T1Error as error:
        near = would_fit(setting, vram, host, machine)
        told = (f"{c} ({in_words(p.reserved)}, host {in_words(p.host)})" for c, p in near.items())
        raise T1Error(f"{error}\nwould fit: {', '.join(told) or 'nothing near it, either'}") from None
    choice = ", ".join(f"{name} {value}" for name, value in asdict(best.choice).items()) if best.choice else ""
    print(f"\nrecommended: mode {best.mode}, head {best.head}{f' ({choice})' if choice else ''}")
    print(f"  {command_of(arguments, best, vram)}")
    return 0


def _digits(value: float) -> str:
    """Format with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def setting_of(arguments: argparse.Namespace) -> Any:
    """The `t1lib.plan.predict.Setting` that the arguments describe."""
    from t1lib.heads import parse_bytes
    from t1lib.models import parse_changes
    from t1lib.optimizers import OptimizerSpec
    from t1lib.plan.predict import Setting

    given = arguments
    choose("dtype", given.dtype, ("bfloat16", "float32"))
    require(0 <= given.max_grad_norm < inf, f"--max-grad-norm {given.max_grad_norm}; allowed: 0 or more")
    state = {"moments": given.moments, "split_master": given.split_master, "master_weights": given.dtype != "float32"}
    return Setting(
        given.model, given.batch, given.seq, given.micro_batch, given.dtype, OptimizerSpec(given.optimizer, **state),
        parse_bytes(given.workspace), together=given.max_grad_norm > 0, changes=parse_changes(given.change),
    )  # fmt: skip


def command_of(arguments: argparse.Namespace, best: Any, vram: int) -> str:
    """The training command for the recommendation `best`, quoted for a shell; mode slide within `vram` bytes."""
    from t1lib.models import PRESETS

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
