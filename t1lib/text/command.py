"""`python -m t1lib train`: train a model on text in any mode, with metrics, checkpoints and a plot."""

import argparse
import ast
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from t1lib.errors import T1Error, choose, is_whole, require, shown
from t1lib.signals import AT_ONCE, EXIT_INTERRUPTED

VOCABULARY = 16384  # most for a preset by default: what a few megabytes of text support
LEAST = dict.fromkeys(("steps", "batch", "seq", "micro_batch", "vocabulary"), 1)
LEAST |= dict.fromkeys(("warmup", "checkpoint_every", "eval_every", "eval_rows", "report_every"), 0)
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
    add("--seq", type=int, default=512, help="tokens a row (default: 512)")
    add("--batch", type=int, default=16, help="rows a step (default: 16)")
    add("--micro-batch", type=int, help="rows computed at a time (default: all)")
    add("--mode", default="gpu", help="gpu, ckpt, slide, or, in many processes by torchrun, too: fsdp (default: gpu)")
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
    from t1lib.text.run import read_settings
    from t1lib.text.texts import RUN
    from t1lib.train.ranks import together

    with together() as ranks:
        goes_on = check(arguments)
        given = {} if goes_on else settings_of(arguments)
        folder = Path(arguments.out or f"runs/{Path(arguments.model).name}-{arguments.mode}-{arguments.head}")
        check_path("out", folder)
        run = ranks.first(lambda: read_settings(folder)) if arguments.resume else None
        require(run is not None or not goes_on, f"{folder} holds no run to go on with: no {RUN}")
        settings = with_length(given or run["settings"], arguments, run)
        mode, rows, _ = settings["mode"], settings["batch"], device_of(settings["device"])
        one = f"mode {mode} trains in one process, and there are {ranks.size}; take --mode fsdp, or start one"
        require(ranks.alone or mode == "fsdp", one)
        require(rows >= ranks.size, f"--batch {rows} for {ranks.size} processes; allowed: {ranks.size} rows or more")
        return run_in(folder, settings, arguments, ranks)


def check(arguments: argparse.Namespace) -> bool:
    """Fill in the defaults of what is not given; returns whether a run goes on with its own settings alone. Raises
    `T1Error` for values that no run can have, and for options that a resumed run does not take."""
    given = {name: getattr(arguments, name) for name in arguments.defaults if getattr(arguments, name) is not None}
    for name, value in given.items():
        fits = name not in LEAST or is_whole(value, LEAST[name], 2**31)
        require(fits, f"{_option(name)} {shown(value)}; allowed: {LEAST.get(name)} or more, up to 2^31")
        require(value != "" or name == "limit", f"{_option(name)} ''; allowed: leave it out, or give it a value")
    for name in arguments.defaults.keys() - given.keys():
        setattr(arguments, name, arguments.defaults[name])
    require(abs(arguments.seed) < 2**32, f"--seed {shown(arguments.seed)}; allowed: less than 2^32")
    rows = arguments.eval_rows or not arguments.eval_every
    require(bool(rows), "--eval-rows 0; allowed: 1 or more, or --eval-every 0")
    for name in given.keys() & {"data", "model", "out"}:
        check_path(name, given[name])
    goes_on = arguments.resume and arguments.model is None
    require(goes_on or arguments.model is not None, "--model is missing; --resume with --out goes on without it")
    require(not goes_on or arguments.out is not None, "--resume without --model needs --out, the folder of the run")
    own = ", ".join(sorted(map(_option, given.keys() - SITTING)))
    require(not goes_on or not own, f"--resume without --model goes on with the run's own settings; leave out {own}")
    return goes_on


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_path(name: str, path: str | Path) -> None:
    """Raise `T1Error` for what no file or folder can be called."""
    require(str(path).isprintable(), f"--{name} {shown(str(path))} holds characters that no file of settings can hold")
    try:
        Path(path).exists()
    except OSError as error:
        raise T1Error(f"--{name} {shown(str(path))}: {error.strerror}") from None


def with_length(settings: dict[str, Any], arguments: argparse.Namespace, run: dict[str, Any] | None) -> dict[str, Any]:
    """The settings with what a run keeps of its length, unless given: its steps, and, however long it gets, the warmup
    of its schedule. run: what is read of it; None if there is none"""
    from t1lib.train import Schedule

    if run is not None:
        steps, schedule = arguments.steps or run["settings"]["steps"], settings["schedule"] | {}
        if arguments.warmup is None:
            schedule["warmup"] = run["settings"]["schedule"]["warmup"]
        settings = settings | {"steps": steps, "schedule": schedule | {"total": steps}}
    Schedule(**settings["schedule"])
    return settings


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that `t1lib.text.run.TrainRun` takes."""
    from t1lib.heads import HEADS, parse_bytes
    from t1lib.text.texts import LIBRARY
    from t1lib.train import MODES, OptimizerSpec

    device, steps = device_of(arguments.device), arguments.steps or 1000
    dtype = arguments.dtype or ("float32" if device == "cpu" else "bfloat16")
    choose("mode", arguments.mode, MODES)
    choose("head", arguments.head, HEADS)
    choose("dtype", dtype, ("float32", "bfloat16"))
    warmup = steps // 20 if arguments.warmup is None else arguments.warmup
    settings = {
        "data": LIBRARY if arguments.data == LIBRARY else str(Path(arguments.data).resolve()),
        "limit": arguments.limit, "mode": arguments.mode, "head": arguments.head, "seq": arguments.seq,
        "batch": arguments.batch, "micro_batch": arguments.micro_batch, "dtype": dtype, "device": device,
        "seed": arguments.seed, "steps": steps, "max_grad_norm": arguments.max_grad_norm or None,
        "optimizer": {
            "name": arguments.optimizer, "lr": arguments.lr, "weight_decay": arguments.weight_decay,
            "betas": [0.9, 0.95], **state_of(arguments, dtype),
        },
        "schedule": {"name": arguments.schedule, "warmup": warmup, "total": steps},
    }  # fmt: skip
    OptimizerSpec(**settings["optimizer"])  # errors are raised before a tokenizer is trained
    for size in filter(None, (arguments.workspace, arguments.gpu_memory, arguments.limit)):
        parse_bytes(size)
    same = arguments.out is not None and settings["data"] == str(Path(arguments.out).resolve())
    require(not same, f"--out {arguments.out} is the folder of --data; a run's files are no text: take another")
    return settings | model_of(arguments) | options_of(arguments)


def device_of(device: str | None) -> str:
    """The device asked for; by default a GPU, if there is one."""
    import torch

    allowed = [*(f"cuda:{number}" for number in range(torch.cuda.device_count())), "cpu"]
    allowed = ["cuda", *allowed] if len(allowed) > 1 else allowed
    require(device is None or device in allowed, f"--device {shown(device)}; allowed here: {', '.join(allowed)}")
    return device or allowed[0]


def state_of(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The fields of an `OptimizerSpec` that say which state is kept per parameter: 16-bit weights have masters."""
    narrow = arguments.moments != "float32" or arguments.split_master
    fits = not narrow or (arguments.optimizer == "adamw" and dtype != "float32")
    require(fits, f"--moments and --split-master are for adamw and bfloat16, not {arguments.optimizer} and {dtype}")
    state = {"moments": arguments.moments, "split_master": arguments.split_master} if narrow else {}
    return {"master_weights": dtype != "float32"} | state


def model_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a preset, with changes and vocabulary, or of a checkpoint folder."""
    from t1lib.train import PRESETS

    if arguments.model in PRESETS:
        changes = {field: value_of(text) for field, text in arguments.change}
        size = changes.get("vocab_size", PRESETS[arguments.model]["vocab_size"])
        most = min(VOCABULARY, size) if is_whole(size, 1) else VOCABULARY
        return {"model": arguments.model, "changes": changes, "vocabulary": arguments.vocabulary or most}
    folder = Path(arguments.model)
    choose("model", "a checkpoint folder" if folder.is_dir() else str(folder), [*PRESETS, "a checkpoint folder"])
    plain = not arguments.change and not arguments.vocabulary
    require(plain, "--change and --vocabulary are of presets: a checkpoint has its own shape and tokenizer")
    return {"model": str(folder.resolve())}


def value_of(text: str) -> Any:
    """The value of a Python literal that JSON can hold (number, list, …); else the text itself."""
    try:
        return json.loads(json.dumps(ast.literal_eval(text)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that not every run has: of the head, and of a mode."""
    found = {"head_options": {"workspace": arguments.workspace}} if arguments.workspace else {}
    own = {
        "gpu_memory": ("slide", {"gpu_memory": arguments.gpu_memory, "plan_for": [arguments.batch, arguments.seq]}),
        "no_offload": ("fsdp", {"offload": False}),
        "compute_dtype": ("fsdp", {"compute_dtype": arguments.compute_dtype}),
    }
    for name, (mode, settings) in own.items():
        given = bool(getattr(arguments, name))
        require(not given or arguments.mode == mode, f"{_option(name)} is of mode {mode}, the mode is {arguments.mode}")
        found |= settings if given else {}
    return found


def run_in(folder: Path, settings: dict[str, Any], arguments: argparse.Namespace, ranks: Any) -> int:
    """Train in `folder`, and report how it went; returns the command's exit code."""
    from t1lib.report.training import plot_metrics
    from t1lib.text.run import METRICS, TrainRun

    with closing(TrainRun(folder, settings, arguments.resume, ranks)) as run:
        about, last = run.about, settings["steps"]
        tokens = f"{about['train_tokens']:,} tokens of {about['files']} texts, {about['held_out_tokens']:,} held out"
        print(f"{settings['model']}: {about['params']:,} parameters; {tokens}, sha256 {about['sha256'][:12]}; {folder}")
        spec, dtype = settings["optimizer"], settings["dtype"]
        masters = " with float32 masters" if spec["master_weights"] else ""
        moments = f", moments in {spec.get('moments', 'float32')}" if spec["name"] == "adamw" else ""
        print(f"{spec['name']}: weights in {dtype}{masters}{moments}", flush=True)
        if run.steps >= last:
            print(f"{folder} is at step {run.steps} of {last}: nothing to train")
        try:
            whole = run.train(
                checkpoint_every=arguments.checkpoint_every, evaluate_every=arguments.eval_every,
                evaluate_rows=arguments.eval_rows, report_every=arguments.report_every, out=sys.stdout,
            )  # fmt: skip
            if arguments.export:
                print(f"model {run.session.export(folder / 'model')}")
            print(f"plot {ranks.first(lambda: plot_metrics(folder / METRICS, folder / 'metrics.png'))}")
        except KeyboardInterrupt:
            print(AT_ONCE, file=sys.stderr)
            return EXIT_INTERRUPTED
        if not whole:
            print(f"interrupted after step {run.steps}; --resume goes on", file=sys.stderr)
    return 0 if whole else EXIT_INTERRUPTED
