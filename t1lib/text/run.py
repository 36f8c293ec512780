"""`python -m t1lib train`: a run in a folder, with metrics of every step and checkpoints to resume from."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from t1lib import __version__
from t1lib.errors import T1Error, choose, is_whole, reason, require, shown
from t1lib.files import held, read_signed, whole, write_signed, writing
from t1lib.memory import GIB, is_out_of_memory
from t1lib.models import PRESETS
from t1lib.signals import EXIT_INTERRUPTED, noted
from t1lib.text.corpus import LIBRARY, sha256
from t1lib.text.session import LanguageSession, decided, session_of
from t1lib.train import StepRecord
from t1lib.train.batch import launched
from t1lib.train.checkpoint import META, has_checkpoint, load_checkpoint, save_checkpoint, step_folders

RUN, METRICS = "run.json", "metrics.csv"  # in the folder of a run
LEAST = dict.fromkeys(("steps", "batch", "seq", "micro_batch", "vocabulary", "eval_rows"), 1)
LEAST |= dict.fromkeys(("warmup", "checkpoint_every", "eval_every", "report_every"), 0)
# Options that are given anew each time a run is resumed.
SITTING = {"out", "resume", "export", "checkpoint_every", "eval_every", "eval_rows", "report_every"}
HEADER = "step,loss,grad_norm,lr,tokens,tokens_per_s,wall_ms,device_gib,host_gib,held_out_loss"  # of metrics.csv


def train_command(arguments: argparse.Namespace) -> int:
    """Run the command; returns 0, or 130 if it was interrupted."""
    require(launched() == 1, f"the command trains in one process, and there are {launched()}; allowed: 1")
    given = _check(arguments)
    asked = {**arguments.defaults, **given}
    folder = Path(asked["out"] or f"runs/{Path(asked['model']).name}-{asked['mode']}-{asked['head']}")
    _named("out", str(folder))
    taken = f"another process trains in {folder}; wait for it, or take another --out"
    with _memory(), held(folder, RUN, taken):
        run = TrainRun(folder, given, arguments.defaults)
        with closing(run.session.trainer):
            print(run.about(), flush=True)
            if run.steps >= run.options["steps"]:
                print(f"{folder} is at step {run.steps} of {run.options['steps']}: nothing to train")
            finished = run.train()
            if not finished:
                also = "--resume --export goes on; no model was exported" if asked["export"] else "--resume goes on"
                print(f"interrupted after step {run.steps}; {also}", file=sys.stderr)
            elif asked["export"]:
                print(f"model {run.session.export(folder / 'model')}")
    return 0 if finished else EXIT_INTERRUPTED


@contextmanager
def _memory() -> Iterator[None]:
    """Raise `T1Error` if memory is exhausted, which may have ended a step halfway: there is nothing to save."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        less = "a smaller model, less at a time (--micro-batch, --batch, --seq), or --mode slide, in another --out"
        raise T1Error(f"{reason(error)}\nallowed: {less}; --resume goes on from the last checkpoint, if any") from error


def _check(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that are given, with absolute paths. Raises `T1Error` for values that no run can have."""
    given = {name: getattr(arguments, name) for name in arguments.defaults if getattr(arguments, name) is not None}
    for name, value in given.items():
        said, least = f"--{name.replace('_', '-')} {shown(value)}", LEAST.get(name)
        require(least is None or is_whole(value, least, 2**31), f"{said}; allowed: {least} or more, up to 2^31")
        require(value != "" or name == "limit", f"{said}; allowed: leave it out, or give it a value")
    require(abs(given.get("seed", 0)) < 2**32, f"--seed {shown(given.get('seed'))}; allowed: less than 2^32")
    model = given.get("model")
    require(bool(model or "resume" in given), "--model is missing; --resume with --out goes on without it")
    require(bool(model or "out" in given), "--resume without --model needs --out, the folder of the run")
    for name, known in (("model", PRESETS), ("data", (LIBRARY,))):
        if name in given and _named(name, given[name]) not in known:
            given[name] = _named(name, os.path.realpath(given[name]))
    if model and model not in PRESETS and not os.path.isdir(model):
        get = f"hf download {model} --local-dir FOLDER, then --model FOLDER"
        require(model.count("/") != 1, f"--model {shown(model)} is no folder; of the hub's: {get}")
        choose("model", model, [*PRESETS, "a checkpoint folder"])
    return given


def _named(option: str, path: str) -> str:
    """The path. Raises `T1Error` for what no file or folder can be called."""
    require(path.isprintable(), f"--{option} {shown(path)} holds characters that no file of settings can hold")
    return path


class TrainRun:
    """A run in `folder`, which is `held`: run.json (its options, hashes of its text and of its model's form),
    metrics.csv, checkpoints/.

    given   the options given to the command `train`, with absolute paths; with "resume", the others are as in the run
    usual   defaults of the other options, for a new run

    Raises `T1Error`, having written nothing, unless the folder, its run, text and model are as they should be.
    """

    def __init__(self, folder: Path, given: dict[str, Any], usual: dict[str, Any]) -> None:
        self.folder, self._checkpoints = folder, folder / "checkpoints"
        before = self._before(usual, "resume" in given)
        self.options = self._options(given, usual, before.get("options", {}))
        self.session = LanguageSession(**session_of(self.options))
        self._begin(before)

    def _before(self, usual: dict[str, Any], resume: bool) -> dict[str, Any]:
        """The content of run.json, if the run is resumed. One that failed before its first step may be begun anew."""
        folder, kept = self.folder, self.folder / RUN
        before = read_signed(kept) if kept.exists() else {}
        begun = bool(_read_metrics(folder / METRICS)) or has_checkpoint(self._checkpoints)
        require(resume or not begun, f"{folder} holds a run; --resume goes on with it, or take another --out")
        there = f"{folder / 'model'} is there already, which --export would replace; take another --out"
        require(resume or not (folder / "model").exists(), there)
        require(not resume or bool(before), f"{folder} holds no run to go on with: no {RUN}")
        left = [path.name for path in step_folders(self._checkpoints) if not path.name.startswith(".")]
        lost = f"{self._checkpoints} holds {left}, but no {META}; put that back, or remove them to begin again"
        require(not resume or not left or has_checkpoint(self._checkpoints), lost)
        other = f"the run in {folder} was begun by another version of t1lib; finish it with that one"
        require(not resume or usual.keys() - SITTING == before.get("options", {}).keys(), other)
        return before if resume else {}

    def _options(self, given: dict[str, Any], usual: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        for name in sorted((given.keys() & before.keys()) - {"steps", "device"}):
            was, now = before[name], given[name]
            only = f"{name} is {shown(now)}; the run in {self.folder} has {shown(was)} and goes on with that alone"
            require(was == now, only)
        options = decided(usual | before | given)
        within = self.folder.resolve().is_relative_to(options["data"])
        require(not within, f"--out {self.folder} is in the folder of --data; a run's files are no text: take another")
        return options

    def _begin(self, before: dict[str, Any]) -> None:
        """Go on from the last checkpoint, if there is one. before: content of run.json of the run that is resumed"""
        folder, text, model = self.folder, self.session.corpus.sha256, self.options["model"]
        if model in PRESETS:  # what the model is, but for its weights and what the options say
            tokens, what = self.session.corpus.tokenizer.get_vocab(), "the tokenizer (another version's, maybe)"
            form = sha256(*sorted(tokens, key=tokens.__getitem__))
        else:
            files, what = ("config.json", "tokenizer.json"), f"config.json or tokenizer.json in {model}"
            form = sha256(*(Path(model, name).read_text(encoding="utf-8") for name in files))
        other = f"not the one that the run in {folder} was begun with"
        require(before.get("corpus", text) == text, f"the text is {other}")
        require(before.get("form", form) == form, f"{what} is {other}")
        saved = has_checkpoint(self._checkpoints)  # not if the run is new, or ended before that
        self._saved = load_checkpoint(self.session.trainer, self._checkpoints) if saved else None  # its step
        most = f"the run in {folder} is at step {self.steps}; allowed: --steps {self.steps} or more, or none"
        require(self.steps <= self.options["steps"], most)
        own = {name: value for name, value in self.options.items() if name not in SITTING}
        made = {"t1lib": __version__, "torch": torch.__version__, "corpus": text, "form": form, "options": own}
        write_signed(folder / RUN, made)

    @property
    def steps(self) -> int:
        return self.session.trainer.steps

    def about(self) -> str:
        """What is trained, on what, and how it is kept, in two lines."""
        found, options, spec = self.session.about(), self.options, self.session.trainer.spec
        texts = f"{found['files']} texts" + (f" (copies left out: {found['copies']})" if found["copies"] else "")
        texts = f"{found['train_tokens']:,} tokens of {texts}, {found['held_out_tokens']:,} held out"
        masters = " with float32 masters" if spec.master_weights else ""
        moments = f", moments in {spec.moments}" if spec.name == "adamw" else ""
        trained = f"{options['model']}: {found['params']:,} parameters; {texts}, sha256 {found['sha256'][:12]}"
        return f"{trained}; {self.folder}\n{spec.name}: weights in {options['dtype']}{masters}{moments}"

    def train(self) -> bool:
        """Train up to the option `steps`; returns whether that was reached. An interrupt (Ctrl-C) stops it after the
        current step, with a checkpoint. So do metrics that cannot be written: `T1Error`."""
        last, rows = self.options["steps"], self.options["eval_rows"]
        with noted() as interrupted:
            self._begin_metrics()
            while self.steps < last and not interrupted():
                torch.manual_seed(self.options["seed"] * 1_000_003 + self.steps)  # dropout draws as if never resumed
                record = self.session.step()
                ends = record.step == last
                evaluated, saved = self._due("eval_every", ends), self._due("checkpoint_every", False)
                record = self._settled(record) if evaluated or saved or ends else record
                row = self._row(record, self.session.evaluate(rows) if evaluated else None)
                told = self._due("report_every", ends or interrupted())
                try:
                    self._add_metrics(row, told)
                except T1Error:
                    self._save()
                    raise
                if saved:
                    self._save()
            if self._saved != self.steps:
                self._save()
        return self.steps >= last

    def _due(self, interval: str, anyway: bool) -> bool:
        """Whether it is time for what is done at this interval; never if it is 0."""
        return self.options[interval] > 0 and (anyway or self.steps % self.options[interval] == 0)

    def _save(self) -> None:
        began = time.monotonic()
        path = save_checkpoint(self.session.trainer, self._checkpoints)
        print(f"checkpoint {path} in {time.monotonic() - began:.1f} s", flush=True)
        self._saved = self.steps

    def _settled(self, record: StepRecord) -> StepRecord:
        """The record, with the time of updates that were still pending: what follows would take them off the clock."""
        began = time.perf_counter()
        self.session.trainer.drain()
        return replace(record, wall_ms=record.wall_ms + (time.perf_counter() - began) * 1e3)

    def _row(self, record: StepRecord, held_out: float | None) -> dict[str, float | None]:
        trainer = self.session.trainer
        lr = trainer.spec.lr * trainer.schedule(record.step - 1)
        rate, host = record.tokens / record.wall_ms * 1e3, psutil.Process().memory_info().rss / GIB
        peak = None if trainer.device.type == "cpu" else torch.cuda.max_memory_reserved(trainer.device) / GIB
        training = record.step, record.loss, record.grad_norm, lr, record.tokens, rate, record.wall_ms
        return dict(zip(HEADER.split(","), (*training, peak, host, held_out), strict=True))

    def _begin_metrics(self) -> None:
        """Drop the rows of steps that will be repeated, and one that a full disk or a power cut truncated."""
        rows = [row for row in _read_metrics(self.folder / METRICS) if int(row.split(",")[0]) <= self.steps]
        with whole(self.folder / METRICS) as path:
            path.write_text("".join([HEADER, "\n", *rows]), encoding="utf-8", newline="\n")

    def _add_metrics(self, row: dict[str, float | None], told: bool) -> None:
        """Append a step's row, then print it if `told`. In this order: Ctrl-C may have ended a `tee` that reads it."""
        with writing(self.folder / METRICS), (self.folder / METRICS).open("a", newline="\n") as file:
            file.write(",".join("" if value is None else repr(value) for value in row.values()) + "\n")
        with writing(Path("to the standard output")):
            if told:
                print(_line(row, self.options["steps"]), flush=True)


def _read_metrics(path: Path) -> list[str]:
    """The whole rows of a metrics.csv, without its header. Raises `T1Error` for a file with another one."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    require(text.startswith(HEADER) or not text, f"{path} is no file of this command's; take another --out")
    lines = text.splitlines(keepends=True)
    return [line for line in lines if line.partition(",")[0].isdecimal() and line.endswith("\n")]


def _line(row: dict[str, Any], last: int) -> str:
    memory = "" if row["device_gib"] is None else f"  device {row['device_gib']:.2f} GiB"
    held_out = "" if row["held_out_loss"] is None else f"  held out {row['held_out_loss']:.4f}"
    return (
        f"step {row['step']:>{len(str(last))}}/{last}  loss {row['loss']:.4f}  norm {row['grad_norm']:#.3g}  "
        f"{row['tokens_per_s']:,.0f} tokens/s{memory}  host {row['host_gib']:.2f} GiB{held_out}"
    )
