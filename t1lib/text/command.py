"""`python -m t1lib train`: train a model on text in any mode, with metrics, checkpoints and a plot."""

import argparse
import ast
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t1lib.errors import T1Error, choose, is_whole, require

if TYPE_CHECKING:
    from t1lib.train.ranks import Ranks

VOCABULARY = 16384  # most for a preset by default: what a few megabytes of text support
EXIT_OK, EXIT_INTERRUPTED = 0, 130
SITTING = {  # options that may be given anew each time a run is resumed
    "out", "resume", "export", "steps", "checkpoint_every", "eval_every", "eval_rows", "report_every",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    """Add the command's arguments, without slow imports."""
    parser = commands.add_parser("train", help="train a model on text: metrics, checkpoints, a plot")
    add = parser.add_argument
    add("--model", help="a preset, such as qwen3-0.6b, or a checkpoint folder with its tokenizer")
    add("--change", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"), help="of a preset's shape")
    add("--data", default="stdlib", help="a file, a folder of text or of a dataset's shards, or stdlib (default)")
    add("--limit", default="", help="most bytes of it, such as 20MB (default: all)")
    add("--vocabulary", type=int, help=f"tokens, trained on the text (default: the preset's, at most {VOCABULARY})")
    add("--unpacked", action="store_true", help="every text in rows of its own, padded")
    add("--seq", type=int, default=512, help="tokens a row (default: 512)")
    add("--batch", type=int, default=16, help="rows a step (default: 16)")
    add("--micro-batch", type=int, help="rows computed at a time (default: all)")
    add(
        "--mode",
        default="gpu",
        help="gpu, gpu-graph, ckpt, slide or, in many processes by torchrun, too, fsdp (default: gpu)",
    )
    add("--head", default="fused", help="full, chunked, fused or torch (default: fused)")
    add("--workspace", help="of the head, such as 256MiB")
    add("--gpu-memory", help="of mode slide, such as 16GiB: what it keeps on the device follows")
    add("--no-offload", action="store_true", help="of mode fsdp: weights, gradients and state stay on the device")
    add("--compute-dtype", help="of mode fsdp: bfloat16 computes in it what is kept in --dtype float32")
    add("--steps", type=int, help="in all, to which the schedule stretches (default: 1000, or what a run has)")
    add("--optimizer", default="adamw", help="adamw or sgd (default: adamw)")
    add("--moments", default="float32", help="of adamw beside bfloat16 weights: float32 (default) or bfloat16")
    add("--split-master", action="store_true", help="of float32 masters keep the bits that bfloat16 weights lack")
    add("--lr", type=float, default=3e-4, help="learning rate (default: 3e-4)")
    add("--weight-decay", type=float, default=0.0, help="(default: 0)")
    add("--schedule", default="cosine", help="constant, linear or cosine (default: cosine)")
    add("--warmup", type=int, help="steps (default: a twentieth of all, or what a run has)")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to it; 0: do not (default: 1)")
    add("--dtype", help="of weights: float32, bfloat16 (default: bfloat16 on a GPU, with float32 masters)")
    add("--device", help="cuda or cpu (default: a GPU where there is one)")
    add("--compile", action="store_true", help="compile the decoder layers")
    add("--seed", type=int, default=0, help="of weights, split and order (default: 0)")
    add("--out", help="folder of the run (default: runs/MODEL-MODE-HEAD)")
    add("--resume", action="store_true", help="go on from the folder's last checkpoint; --out and --steps are enough")
    add("--export", action="store_true", help="at the end, write the model with its tokenizer to the folder's model/")
    add("--checkpoint-every", type=int, default=500, help="steps; 0: at the end alone (default: 500)")
    add("--eval-every", type=int, default=100, help="steps; 0: never (default: 100)")
    add("--eval-rows", type=int, default=64, help="held-out rows (default: 64)")
    add("--report-every", type=int, default=10, help="steps; 0: never (default: 10)")
    usual = vars(parser.parse_args([]))
    parser.set_defaults(**dict.fromkeys(usual), command=train, defaults=usual)  # None: not given, see `check`


def train(arguments: argparse.Namespace) -> int:
    """Run the command, in every process that torchrun started; returns 0, or 130 if it was interrupted."""
    from t1lib.measure.memory import grow_segments
    from t1lib.optimizers import outlasts_warmup
    from t1lib.text.run import read_settings
    from t1lib.train.ranks import together

    grow_segments()
    with together() as ranks:
        check(arguments)
        goes_on = arguments.resume and arguments.model is None
        folder = Path(arguments.out or f"runs/{Path(arguments.model).name}-{arguments.mode}-{arguments.head}")
        settings = ranks.first(lambda: goes_on_with(folder, arguments.steps)) if goes_on else settings_of(arguments)
        if arguments.resume and not goes_on:
            settings = with_length(settings, arguments, ranks.first(lambda: read_settings(folder)))
        mode, rows, schedule = settings["mode"], settings["batch"], settings["schedule"]
        short = f"--steps {settings['steps']} with a warmup of {schedule.get('warmup')} steps"
        require(outlasts_warmup(**schedule), f"{short}; allowed: more steps than that")
        one = f"mode {mode} trains in one process, and there are {ranks.size}; take --mode fsdp, or start one"
        require(ranks.alone or mode == "fsdp", one)
        require(rows >= ranks.size, f"--batch {rows} for {ranks.size} processes; allowed: {ranks.size} rows or more")
        return run_in(folder, settings, arguments, ranks)


def check(arguments: argparse.Namespace) -> None:
    """Fill in the defaults of what is not given. Raises `T1Error` for numbers out of range, and for options that a
    resumed run does not take."""
    given = {name for name in arguments.defaults if getattr(arguments, name) is not None}
    for name in arguments.defaults.keys() - given:
        setattr(arguments, name, arguments.defaults[name])
    for name in ("steps", "batch", "seq", "micro_batch", "vocabulary"):
        value = getattr(arguments, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')} {value}; allowed: 1 or more")
    for name in ("checkpoint_every", "eval_every", "eval_rows", "report_every"):
        value = getattr(arguments, name)
        require(value >= 0, f"--{name.replace('_', '-')} {value}; allowed: 0 or more")
    require(abs(arguments.seed) < 2**32, f"--seed {arguments.seed}; allowed: less than 2^32")
    require(arguments.out != "", "--out ''; allowed: a folder")
    rows = arguments.eval_rows or not arguments.eval_every
    require(bool(rows), "--eval-rows 0; allowed: 1 or more, or --eval-every 0")
    goes_on = arguments.resume and arguments.model is None
    require(goes_on or arguments.model is not None, "--model is missing; --resume with --out goes on without it")
    require(not goes_on or arguments.out is not None, "--resume without --model needs --out, the folder of the run")
    if goes_on:
        own = sorted("--" + name.replace("_", "-") for name in given - SITTING)
        require(not own, f"--resume without --model goes on with the run's own settings; leave out {', '.join(own)}")


def run_in(folder: Path, settings: dict[str, Any], arguments: argparse.Namespace, ranks: "Ranks") -> int:
    """Train in `folder`, and report how it went; returns the command's exit code."""
    from t1lib.files import locked
    from t1lib.text.run import TrainRun

    run = TrainRun(folder, settings, arguments.resume, ranks)
    about = run.about
    text = f"{about['train_tokens']:,} tokens of {about['files']} texts (sha256 {about['sha256'][:12]})"
    text = f"{text}, {about['held_out_tokens']:,} held out"
    print(f"{settings['model']}: {about['params']:,} parameters; {text}; {folder}")
    if run.steps >= settings["steps"]:
        print(f"{folder} is at step {run.steps} of {settings['steps']}: nothing to train")
    taken = f"another process trains in {folder}; wait for it, or take another --out"
    try:
        with locked(folder / ".lock", taken) if ranks.rank == 0 else nullcontext():
            whole = run.train(
                checkpoint_every=arguments.checkpoint_every, evaluate_every=arguments.eval_every,
                evaluate_rows=arguments.eval_rows, report_every=arguments.report_every, out=sys.stdout,
            )  # fmt: skip
        if arguments.export:
            print(f"model {run.export()}")
        print(f"plot {run.plot()}")
    except KeyboardInterrupt:
        print(f"interrupted at once; --resume goes on from the last checkpoint in {folder}, if any", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        run.close()
    if not whole:
        print(f"interrupted after step {run.steps}; --resume goes on", file=sys.stderr)
    return EXIT_OK if whole else EXIT_INTERRUPTED


def goes_on_with(folder: Path, steps: int | None) -> dict[str, Any]:
    """The settings of the run in `folder`, with `steps` as its new total if given. Raises `T1Error` without a run."""
    from t1lib.text.run import read_settings

    found = read_settings(folder)
    require(found is not None, f"{folder} holds no run to go on with")
    settings = found["settings"]
    if steps is not None:
        settings |= {"steps": steps, "schedule": settings["schedule"] | {"total": steps}}
    return settings


def with_length(settings: dict[str, Any], arguments: argparse.Namespace, run: dict[str, Any] | None) -> dict[str, Any]:
    """The settings with what a run keeps of its length, unless given: its steps, and, however long it gets, the warmup
    of its schedule. run: what is read of it; None if there is none"""
    if run is None:
        return settings
    before, schedule = run["settings"], dict(settings["schedule"])
    steps = settings["steps"] if arguments.steps else before["steps"]
    schedule["total"] = steps
    if arguments.warmup is None:
        schedule["warmup"] = before["schedule"].get("warmup", 0)
    return settings | {"steps": steps, "schedule": schedule}


def state_of(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The fields of an `OptimizerSpec` that say which state is kept per parameter."""
    narrow = arguments.moments != "float32" or arguments.split_master
    fits = not narrow or (arguments.optimizer == "adamw" and dtype != "float32")
    require(fits, f"--moments and --split-master are for adamw and bfloat16, not {arguments.optimizer} and {dtype}")
    state = {"moments": arguments.moments, "split_master": arguments.split_master} if narrow else {}
    return {"master_weights": dtype != "float32"} | state


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that `t1lib.train.run.TrainRun` takes."""
    import torch

    from t1lib.heads import HEADS, parse_bytes
    from t1lib.models import PRESETS
    from t1lib.optimizers import OPTIMIZERS, SCHEDULES, OptimizerSpec, Schedule
    from t1lib.text.texts import LIBRARY
    from t1lib.train.loop import MODES

    known = {"mode": MODES, "head": HEADS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
    for name, allowed in known.items():
        choose(name, getattr(arguments, name), allowed)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = arguments.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    known = device == "cpu" or (device.startswith("cuda") and torch.cuda.is_available())
    require(known, f"--device {device}; allowed here: cpu{', cuda' * torch.cuda.is_available()}")
    choose("dtype", dtype, ("float32", "bfloat16"))
    preset = PRESETS.get(arguments.model)
    steps = arguments.steps or 1000
    warmup = steps // 20 if arguments.warmup is None else arguments.warmup
    settings = {
        "model": arguments.model if preset else str(Path(arguments.model).resolve()),
        "data": arguments.data if arguments.data == LIBRARY else str(Path(arguments.data).resolve()),
        "mode": arguments.mode, "head": arguments.head, "limit": arguments.limit,
        "packed": not arguments.unpacked, "seq": arguments.seq, "batch": arguments.batch,
        "micro_batch": arguments.micro_batch, "dtype": dtype, "device": device, "seed": arguments.seed,
        "steps": steps, "max_grad_norm": arguments.max_grad_norm or None, "compile_layers": arguments.compile,
        "optimizer": {
            "name": arguments.optimizer, "lr": arguments.lr, "weight_decay": arguments.weight_decay,
            "betas": [0.9, 0.95], **state_of(arguments, dtype),
        },
        "schedule": {"name": arguments.schedule, "warmup": warmup, "total": steps},
    }  # fmt: skip
    for name in ("data", "model", "out"):
        text = str(getattr(arguments, name) or "")
        require(text.isprintable(), f"--{name} {text!r} holds characters that no file of settings can hold")
    same = arguments.out is not None and settings["data"] == str(Path(arguments.out).resolve())
    require(not same, f"--out {arguments.out} is the folder of --data; a run's files are no text: take another")
    OptimizerSpec(**settings["optimizer"])  # errors are raised before a tokenizer is trained
    Schedule(**settings["schedule"])
    for size in filter(None, (arguments.workspace, arguments.gpu_memory)):
        parse_bytes(size)
    if preset is not None:
        changes = settings["changes"] = {field: value_of(text) for field, text in arguments.change}
        size = changes.get("vocab_size", preset["vocab_size"])
        settings["vocabulary"] = arguments.vocabulary or (min(VOCABULARY, size) if is_whole(size, 1) else VOCABULARY)
    else:
        folder = Path(arguments.model).is_dir()
        choose("model", "a checkpoint folder" if folder else arguments.model, [*PRESETS, "a checkpoint folder"])
        plain = not arguments.change and not arguments.vocabulary
        require(plain, "--change and --vocabulary are of presets: a checkpoint has its own shape and tokenizer")
    if arguments.workspace:
        settings["head_options"] = {"workspace": arguments.workspace}
    if arguments.gpu_memory:
        if arguments.mode != "slide":
            raise T1Error(f"--gpu-memory is of mode slide, the mode is {arguments.mode}")
        settings |= {"gpu_memory": arguments.gpu_memory, "plan_for": [arguments.batch, arguments.seq]}
    own = {"offload": False} if arguments.no_offload else {}
    own |= {"compute_dtype": arguments.compute_dtype} if arguments.compute_dtype else {}
    given = " and ".join("--no-offload" if name == "offload" else "--compute-dtype" for name in own)
    require(not own or arguments.mode == "fsdp", f"{given}: of mode fsdp, the mode is {arguments.mode}")
    return settings | own


def value_of(text: str) -> Any:
    """The value of a Python literal (number, list, …); else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
