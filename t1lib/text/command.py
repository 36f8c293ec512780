"""`python -m t1lib train`: train a model on text in any mode, with metrics, checkpoints and a plot."""

import argparse
import os
import sys
from collections.abc import Collection
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from t1lib.errors import T1Error, choose, is_whole, require, shown
from t1lib.models import PRESETS
from t1lib.signals import AT_ONCE, EXIT_INTERRUPTED
from t1lib.text.run import TrainRun
from t1lib.text.texts import LIBRARY, METRICS
from t1lib.train.ranks import together

LEAST = dict.fromkeys(("steps", "batch", "seq", "micro_batch", "vocabulary"), 1)
LEAST |= dict.fromkeys(("warmup", "checkpoint_every", "eval_every", "eval_rows", "report_every"), 0)


def train_command(arguments: argparse.Namespace) -> int:
    """Run the command, in every process that torchrun started; returns 0, or 130 if it was interrupted."""
    with together() as ranks:
        given = check(arguments)
        asked = {**arguments.defaults, **given}
        folder = Path(asked["out"] or f"runs/{Path(asked['model']).name}-{asked['mode']}-{asked['head']}")
        _whole("out", str(folder))
        with closing(TrainRun(folder, given, arguments.defaults, ranks)) as run:
            print(run.about(), flush=True)
            if run.steps >= run.options["steps"]:
                print(f"{folder} is at step {run.steps} of {run.options['steps']}: nothing to train")
            try:
                whole = run.train()
                if asked["export"]:
                    print(f"model {run.session.export(folder / 'model')}")
                print(ranks.first(partial(_plot, folder)))
            except KeyboardInterrupt:
                print(AT_ONCE, file=sys.stderr)
                return EXIT_INTERRUPTED
            if not whole:
                print(f"interrupted after step {run.steps}; --resume goes on", file=sys.stderr)
        return 0 if whole else EXIT_INTERRUPTED


def _plot(folder: Path) -> str:
    """Draw a run's metrics, if Matplotlib is there; returns what to print about it."""
    try:
        from t1lib.text.plot import plot_metrics
    except ModuleNotFoundError as error:
        return f"no plot: {error.name} is not installed, which the extra kit brings; {folder / METRICS} has the numbers"
    return f"plot {plot_metrics(folder / METRICS, folder / 'metrics.png')}"


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that are given, with whole paths of data and of a checkpoint. Raises `T1Error` for values that no run
    can have."""
    given = {name: getattr(arguments, name) for name in arguments.defaults if getattr(arguments, name) is not None}
    for name, value in given.items():
        said, least = f"--{name.replace('_', '-')} {shown(value)}", LEAST.get(name)
        require(least is None or is_whole(value, least, 2**31), f"{said}; allowed: {least} or more, up to 2^31")
        require(value != "" or name == "limit", f"{said}; allowed: leave it out, or give it a value")
    require(abs(given.get("seed", 0)) < 2**32, f"--seed {shown(given.get('seed'))}; allowed: less than 2^32")
    rows = given.get("eval_rows", 1) or given.get("eval_every") == 0
    require(bool(rows), "--eval-rows 0; allowed: 1 or more, or --eval-every 0")
    named = {"model", "out"} & given.keys()
    require("resume" in given or "model" in named, "--model is missing; --resume with --out goes on without it")
    require(bool(named), "--resume without --model needs --out, the folder of the run")
    for name, known in {"model": PRESETS, "data": (LIBRARY,)}.items():
        given |= {name: _whole(name, given[name], known)} if name in given else {}
    model = arguments.model
    if model is not None and model not in PRESETS and not os.path.isdir(model):
        get = f"hf download {model} --local-dir FOLDER, then --model FOLDER"
        require(model.count("/") != 1, f"--model {shown(model)} is no folder; of the hub's: {get}")
        choose("model", model, [*PRESETS, "a checkpoint folder"])
    return given


def _whole(option: str, path: str, names: Collection[str] = ()) -> str:
    """The whole path, unless it is one of `names`. Raises `T1Error` for what no file or folder can be called."""
    require(path.isprintable(), f"--{option} {shown(path)} holds characters that no file of settings can hold")
    try:
        Path(path).exists()
    except OSError as error:
        raise T1Error(f"--{option} {shown(path)}: {error.strerror}") from None
    return path if path in names else str(Path(path).resolve())
