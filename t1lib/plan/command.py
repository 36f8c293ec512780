"""`python -m t1lib plan`: will it fit, and how long will a step take?"""

import argparse
import shlex
from math import isfinite
from pathlib import Path
from typing import Any

from t1lib.errors import T1Error, choose, require


def add_parser(commands: Any) -> None:
    """Add the command's arguments, without slow imports."""
    parser = commands.add_parser("plan", help="predict memory and time of a step for every mode and head")
    add = parser.add_argument
    add("--model", help="a preset, such as qwen3-8b, a checkpoint folder, or a hub name")
    add("--change", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"), help="of a preset's shape")
    add("--seq", type=int, default=1024, help="tokens a row (default: 1024)")
    add("--batch", type=int, default=1, help="rows a step (default: 1)")
    add("--micro-batch", type=int, help="rows computed at a time (default: all)")
    add("--vram", help="of the GPU, less what CUDA itself takes, such as 15GiB of 16 (default: what is free here)")
    add("--host", help="memory of the host, such as 64GiB (default: enough)")
    add("--optimizer", default="adamw", help="adamw or sgd (default: adamw)")
    add("--moments", default="float32", help="of adamw beside bfloat16 weights: float32 (default) or bfloat16")
    add("--split-master", action="store_true", help="of float32 masters keep the bits that bfloat16 weights lack")
    add("--dtype", default="bfloat16", help="of weights: float32, or bfloat16 with float32 masters (default)")
    add("--max-grad-norm", type=float, default=0.0, help="clip, updates wait (default: 0, no; train's: 1)")
    add("--workspace", default="256MiB", help="of head fused (default: 256MiB)")
    add("--calibrate", action="store_true", help="measure this machine's rates first and keep them")
    parser.set_defaults(command=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0, or raises `T1Error` after printing the table if nothing fits."""
    import torch

    from t1lib.heads import parse_bytes
    from t1lib.memory import in_words
    from t1lib.plan.predict import predict, recommended, would_fit
    from t1lib.plan.rates import calibrate, machine_file, this_machine

    if arguments.calibrate:
        found = calibrate(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        print(f"{found.name}: link {found.link_in / 1e9:.1f} GB/s in, {found.link_out / 1e9:.1f} GB/s out; updates on "
              f"the host {found.update / 1e9:.0f} GB/s; products {found.flops / 1e12:.3g} TFLOP/s; kept in "
              f"{machine_file()} (delete it, and plans take an H200's rates again)")  # fmt: skip
        if arguments.model is None:
            return 0
    require(arguments.max_grad_norm >= 0, f"--max-grad-norm {arguments.max_grad_norm}; allowed: 0 or more")
    require(arguments.model is not None, "--model is missing: a preset, a checkpoint folder, or a hub name")
    if arguments.vram is None:
        require(torch.cuda.is_available(), "--vram is missing, and there is no GPU here to ask; such as --vram 16GiB")
    vram = parse_bytes(arguments.vram) if arguments.vram is not None else torch.cuda.mem_get_info()[0]
    host = parse_bytes(arguments.host) if arguments.host is not None else None
    for name, size in (("vram", vram), ("host", host)):
        require(size is None or size >= 2**20, f"--{name} {getattr(arguments, name)} is less than 1MiB; such as 16GiB")
    machine, setting = this_machine(), setting_of(arguments)
    predictions = predict(setting, vram, host, machine)
    print(f"{arguments.model}, {arguments.batch} × {arguments.seq} tokens a step, {arguments.optimizer}; "
          f"{in_words(vram)} of GPU memory; times are estimates by the rates of: {machine.name}\n")  # fmt: skip
    print(f"{'mode':<6} {'head':<8} {'allocated':>10} {'reserved':>10} {'host':>10} {'step':>10} {'tokens/s':>10}")
    for p in predictions:
        print(_row(p, arguments.batch * arguments.seq))
    try:
        best = recommended(predictions)
    except T1Error as error:
        near = would_fit(setting, vram, host, machine)
        told = (f"{c} ({in_words(p.reserved)}, host {in_words(p.host)})" for c, p in near.items())
        raise T1Error(f"{error}\nwould fit: {', '.join(told) or 'nothing near it, either'}") from None
    print(f"\nrecommended: mode {best.mode}, head {best.head}" + (f" ({best.choice})" if best.choice else ""))
    _print_command(arguments, best, vram)
    return 0


def _row(p: Any, tokens: int) -> str:
    """The table's line for a prediction, with `tokens` per step; dashes if its head refuses."""
    from t1lib.memory import in_words

    values = ["-"] * 5
    if isfinite(p.ms):
        values = [*map(in_words, (p.allocated, p.reserved, p.host)), f"{_digits(p.ms / 1e3)} s"]
        values += [_digits(tokens / p.ms * 1e3)]
    return f"{p.mode:<6} {p.head:<8} {' '.join(f'{value:>10}' for value in values)}  {p.why or 'fits'}"


def _print_command(arguments: argparse.Namespace, best: Any, vram: int) -> None:
    from t1lib.models import PRESETS

    if arguments.model not in PRESETS and not Path(arguments.model).is_dir():
        print("  (train takes presets and checkpoint folders only, no names of the hub)")
        return
    print(f"  {command_of(arguments, best, vram)}")
    if arguments.model in PRESETS:
        print("  (predicted with the preset's vocabulary; train makes one from its text, --vocabulary entries)")


def _digits(value: float) -> str:
    """Format with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def setting_of(arguments: argparse.Namespace) -> Any:
    """The `t1lib.plan.predict.Setting` that the arguments describe."""
    from t1lib.heads import parse_bytes
    from t1lib.optimizers import OPTIMIZERS, OptimizerSpec
    from t1lib.plan.predict import Setting
    from t1lib.text.command import state_of, value_of

    choose("optimizer", arguments.optimizer, OPTIMIZERS)
    choose("dtype", arguments.dtype, ("bfloat16", "float32"))
    return Setting(
        arguments.model, arguments.batch, arguments.seq, arguments.micro_batch, arguments.dtype,
        OptimizerSpec(arguments.optimizer, **state_of(arguments, arguments.dtype)),
        parse_bytes(arguments.workspace), arguments.max_grad_norm > 0,
        {name: value_of(name, text) for name, text in arguments.change},
    )  # fmt: skip


def command_of(arguments: argparse.Namespace, best: Any, vram: int) -> str:
    """The training command for the recommendation `best`, quoted for a shell; mode slide within `vram` bytes."""
    parts = ["python", "-m", "t1lib", "train", "--model", arguments.model, "--mode", best.mode, "--head", best.head]
    parts += ["--seq", arguments.seq, "--batch", arguments.batch, "--optimizer", arguments.optimizer]
    parts += ["--dtype", arguments.dtype, "--max-grad-norm", f"{arguments.max_grad_norm:g}"]
    parts += ["--moments", arguments.moments] if arguments.moments != "float32" else []
    parts += ["--split-master"] if arguments.split_master else []
    parts += ["--micro-batch", arguments.micro_batch] if arguments.micro_batch else []
    parts += ["--workspace", arguments.workspace] if best.head == "fused" else []
    parts += ["--gpu-memory", arguments.vram or f"{vram // 2**20}MiB"] if best.mode == "slide" else []
    parts += [part for name, text in arguments.change for part in ("--change", name, text)]
    return shlex.join(map(str, parts))
