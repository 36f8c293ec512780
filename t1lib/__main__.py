"""The command line: `python -m t1lib run | list | report | check | plan | train`."""

import sys

from t1lib import signals

if __name__ == "__main__" and sys.argv[1:2] == ["train"]:
    signals.watch()  # before the slow imports, which take seconds

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from t1lib.errors import T1Error, UnavailableError, reason

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
MODULES = dict.fromkeys(("run", "list", "report"), "t1lib.driver")  # imported on demand: it takes seconds
MODULES |= {"check": "t1lib.claims", "plan": "t1lib.plan.choose", "train": "t1lib.text.run"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # without the usage, which for `train` fills a screen
        raise T1Error(f"{message}; {self.prog} --help lists what is allowed")


def _parser() -> argparse.ArgumentParser:
    what = "Run, report and check the experiments of the kit; plan and train models."
    parser = _Parser(prog="python -m t1lib", description=what)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    run = commands.add_parser("run", help="run the experiments whose outputs are not up to date")
    run.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="names, or all (default: all)")
    run.add_argument("--profile", default="auto", help="a folder of params/, or auto: by this machine's GPU (default)")
    run.add_argument("--force", action="store_true", help="run also what is up to date")
    pair = {"nargs": 2, "action": "append", "default": []}
    run.add_argument("-p", dest="parameters", **pair, metavar=("NAME", "VALUE"), help="set a parameter")

    commands.add_parser("list", help="show experiments and the state of their outputs")

    report = commands.add_parser("report", help="redraw from the samples what has changed, and build the reports")
    report.add_argument("--profile", default="auto", help="whose outputs (default: this machine's profile)")
    report.add_argument("--no-pdf", action="store_true", help="leave the reports' PDF files out")

    commands.add_parser("check", help="check claims.yaml against outputs/h200")
    _add_plan(commands.add_parser("plan", help="predict memory and time of a step for every mode and head"))
    _add_train(commands.add_parser("train", help="train a model on text: metrics, checkpoints"))
    return parser


def _add_step(parser: argparse.ArgumentParser, seq: int, batch: int) -> None:
    """Add the options that `plan` and `train` share; `seq` and `batch` are the defaults of --seq and --batch."""
    add = parser.add_argument
    add("--change", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"), help="change a preset's shape")
    add("--seq", type=int, default=seq, help=f"tokens per row (default: {seq})")
    add("--batch", type=int, default=batch, help=f"rows per step (default: {batch})")
    add("--micro-batch", type=int, help="rows computed at a time (default: all)")
    add("--optimizer", default="adamw", help="adamw or sgd (default: adamw)")
    add("--moments", default="float32", help="dtype of moments beside bfloat16 weights: float32 (default) or bfloat16")
    add("--split-master", action="store_true", help="keep of float32 masters only the bits that bfloat16 weights lack")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to this norm; 0: do not (default: 1)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a preset, such as qwen3-8b, a checkpoint folder, or a hub name")
    _add_step(parser, seq=1024, batch=1)
    add("--vram", help="GPU memory, less what CUDA takes, such as 15GiB of 16 (default: what is free here)")
    add("--host", help="host memory, such as 64GiB (default: enough)")
    add("--dtype", default="bfloat16", help="dtype of weights: float32, or bfloat16 with float32 masters (default)")
    add("--workspace", default="256MiB", help="memory of head fused (default: 256MiB)")
    add("--calibrate", action="store_true", help="measure this machine's rates first and keep them")


def _add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a preset, such as qwen3-0.6b, or a checkpoint folder with its tokenizer")
    add("--data", default="stdlib", help="a file or a folder of text, or stdlib (default)")
    add("--limit", default="", help="use at most so many bytes of text, such as 20MB (default: all)")
    add("--vocabulary", type=int, help="size of the text's own tokenizer (default: the preset's, at most 16384)")
    _add_step(parser, seq=512, batch=16)
    add("--mode", default="gpu", help="gpu, gpu-graph, ckpt, slide or fsdp (default: gpu)")
    add("--head", default="fused", help="full, chunked, fused or torch (default: fused)")
    add("--workspace", help="memory of the head, such as 256MiB")
    add("--gpu-memory", help="what mode slide may reserve on the GPU, such as 16GiB")
    add("--no-offload", action="store_true", help="in mode fsdp, keep weights, gradients and state on the GPU")
    add("--steps", type=int, help="steps of the whole run and its schedule (default: 1000, or what a run has)")
    add("--lr", type=float, default=3e-4, help="learning rate (default: 3e-4)")
    add("--weight-decay", type=float, default=0.0, help="decoupled weight decay (default: 0)")
    add("--schedule", default="cosine", help="of the learning rate: constant, linear or cosine (default: cosine)")
    add("--warmup", type=int, help="steps of warm-up (default: a twentieth of all, or what a run has)")
    add("--dtype", help="dtype of weights: float32 or bfloat16 (default: bfloat16 on a GPU, with float32 masters)")
    add("--device", help="cuda or cpu (default: a GPU where there is one)")
    add("--seed", type=int, default=0, help="seed of weights, split, order and dropout (default: 0)")
    add("--out", help="folder of the run (default: runs/MODEL-MODE-HEAD)")
    add("--resume", action="store_true", help="continue from the last checkpoint in --out, with the run's own options")
    add("--export", action="store_true", help="at the end, write the model with its tokenizer to the folder's model/")
    add("--checkpoint-every", type=int, default=500, help="steps between checkpoints; 0: only the last (default: 500)")
    add("--eval-every", type=int, default=100, help="steps between evaluations; 0: never (default: 100)")
    add("--eval-rows", type=int, default=64, help="held-out rows (default: 64)")
    add("--report-every", type=int, default=10, help="steps between printed lines; 0: never (default: 10)")
    usual = vars(parser.parse_args([]))
    parser.set_defaults(**dict.fromkeys(usual), defaults=usual)  # None: not given


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 (an experiment or claim failed), 2 (bad input), 130 (interrupted)."""
    try:
        arguments = _parser().parse_args(argv)
        if arguments.name == "train":  # read when PyTorch is imported: waiting threads spin less on cores others need
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        code = getattr(import_module(MODULES[arguments.name]), f"{arguments.name}_command")(arguments)
        print(end="", flush=True)
        return code
    except (T1Error, UnavailableError) as error:
        why = str(error)
    except ModuleNotFoundError as error:  # in the plain installation, which is for `plan` and `train` alone
        missing = (error.name or "t1lib").split(".")[0]
        if missing == "t1lib":
            raise
        why = f"`{arguments.name}` needs {missing}, which is not installed; the extra kit brings what notebooks need:"
        why += '\npip install -c constraints.txt -e ".[kit]" in the checkout'
    except KeyboardInterrupt:
        return signals.EXIT_INTERRUPTED
    except OSError as error:  # from a disk; or whoever reads the output closed the pipe
        if sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return EXIT_FAILED
        why = reason(error)
    print(f"error: {why}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    if sys.stdout:  # None if it was closed; its encoding may lack characters such as ≥
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
