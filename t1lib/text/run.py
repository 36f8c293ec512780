"""Training runs in a folder: metrics of every step, checkpoints to resume from, and a plot."""

import re
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from t1lib import __version__
from t1lib.errors import T1Error, require, shown
from t1lib.files import held, read_signed, whole, write_signed, writing
from t1lib.memory import GIB
from t1lib.signals import noted
from t1lib.text.session import LanguageSession
from t1lib.text.settings import decided, session_of
from t1lib.text.texts import METRICS, RUN
from t1lib.train import StepRecord
from t1lib.train.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from t1lib.train.ranks import ALONE, Ranks

SITTING = {  # options that are given anew each time a run is resumed
    "out", "resume", "export", "checkpoint_every", "eval_every", "eval_rows", "report_every",
}  # fmt: skip
COLUMNS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "wall_ms", "device_gib", "host_gib", "held_out_loss",
)  # fmt: skip
_ROW = re.compile(rf"^[1-9][0-9]*(?:,[-+.0-9einfa]*){{{len(COLUMNS) - 1}}}\n", re.MULTILINE)


class TrainRun:
    """A run in `folder`, held until `close`: run.json (its options, the text's hash), metrics.csv, checkpoints/.

    given   options of the command `train` that are given, with whole paths; with "resume" the others are the run's
    usual   the others of a new run
    ranks   the processes that train; rank 0 manages the folder, the others need it only to resume

    Raises `T1Error`, having written nothing, if another process holds the folder; if it holds a run but should not, or
    none but should; if that run has other options or another text; and if options or text differ between ranks.
    """

    def __init__(self, folder: Path, given: dict[str, Any], usual: dict[str, Any], ranks: Ranks = ALONE) -> None:
        self.folder, self.ranks, self._checkpoints = folder, ranks, folder / "checkpoints"
        taken = f"another process trains in {folder}; wait for it, or take another --out"
        with ExitStack() as stack:
            ranks.first(lambda: stack.enter_context(held(folder, RUN, taken)))
            before = self._before("resume" in given)
            self.options = self._options(given, usual, before.get("options", {}))
            ranks.agree(self.options)
            self.session = LanguageSession(**session_of(self.options))
            self._begin(before.get("corpus"))
            self._holding = stack.pop_all()

    def _before(self, resume: bool) -> dict[str, Any]:
        """The content of run.json, if the run is resumed."""
        folder, kept = self.folder, self.folder / RUN
        before, begun = self.ranks.first(lambda: (read_signed(kept) if kept.exists() else {}, self._begun()))
        require(resume or not begun, f"{folder} holds a run; --resume goes on with it, or take another --out")
        require(not resume or bool(before), f"{folder} holds no run to go on with: no {RUN}")
        other = f"the run in {folder} was begun by another version of t1lib; finish it with that one"
        require(not resume or "options" in before, other)
        return before if resume else {}

    def _options(self, given: dict[str, Any], usual: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        for name in sorted((given.keys() & before.keys()) - {"steps", "device"}):
            was, now = before[name], given[name]
            only = f"{name} is {shown(now)}; the run in {self.folder} has {shown(was)} and goes on with that alone"
            require(was == now, only)
        options, size = decided(usual | before | given), self.ranks.size
        mode, rows, same = options["mode"], options["batch"], options["data"] == str(self.folder.resolve())
        require(not same, f"--out {self.folder} is the folder of --data; a run's files are no text: take another")
        one = f"mode {mode} trains in one process, and there are {size}; take --mode fsdp, or start one"
        require(size == 1 or mode == "fsdp", one)
        require(rows >= size, f"--batch {rows} for {size} processes; allowed: {size} rows or more")
        return options

    def _begin(self, before: str | None) -> None:
        """Go on from the last checkpoint, if there is one. before: hash of the text of the run that is resumed"""
        folder, ranks, text = self.folder, self.ranks, self.session.corpus.sha256
        ranks.agree({"the text (its sha256)": text})
        require(before in (None, text), f"the text is not the one that the run in {folder} was begun with")
        self._saved = -1  # step of the last checkpoint
        if ranks.first(lambda: has_checkpoint(self._checkpoints)):  # else the run is new, or ended before its first
            self._saved = load_checkpoint(self.session.trainer, self._checkpoints)
        most = f"the run in {folder} is at step {self.steps}; allowed: --steps {self.steps} or more, or none"
        require(self.steps <= self.options["steps"], most)
        own = {name: value for name, value in self.options.items() if name not in SITTING}
        made = {"t1lib": __version__, "torch": torch.__version__, "corpus": text, "options": own}
        ranks.first(lambda: write_signed(folder / RUN, made))

    @property
    def steps(self) -> int:
        """Steps done so far, including those before a resume."""
        return self.session.trainer.steps

    def about(self) -> str:
        """What is trained, on what, and how it is kept, in two lines."""
        found, options, spec = self.session.about(), self.options, self.session.trainer.spec
        texts = f"{found['train_tokens']:,} tokens of {found['files']} texts, {found['held_out_tokens']:,} held out"
        masters = " with float32 masters" if spec.master_weights else ""
        moments = f", moments in {spec.moments}" if spec.name == "adamw" else ""
        trained = f"{options['model']}: {found['params']:,} parameters; {texts}, sha256 {found['sha256'][:12]}"
        return f"{trained}; {self.folder}\n{spec.name}: weights in {options['dtype']}{masters}{moments}"

    def _begun(self) -> bool:
        """Whether the folder's run completed a step: if it failed before that, it may be started over."""
        return bool(_read_metrics(self.folder / METRICS)) or has_checkpoint(self._checkpoints)

    def train(self) -> bool:
        """Train up to the option `steps`; returns whether that was reached.

        Interrupting one process (Ctrl-C) stops all of them after the current step or checkpoint. However training ends,
        the metrics are in their file; after an interrupt or the last step there is also a checkpoint. An interval of 0
        turns that checkpoint, evaluation or report off.
        Raises `T1Error` if metrics cannot be written, after saving a checkpoint of that step.
        """
        last = self.options["steps"]
        with noted() as interrupted:
            self.ranks.first(self._begin_metrics)
            while self.steps < last and not any(self.ranks.share(interrupted)):
                record = self.session.step()
                ends = record.step == last
                wanted = self._due("eval_every", ends)
                row = self._row(record, self.session.evaluate(self.options["eval_rows"]) if wanted else None)
                try:
                    self.ranks.first(partial(self._add_metrics, row))
                except T1Error:
                    self._save()
                    raise
                if self._due("report_every", ends or interrupted()):
                    print(_line(row, last), flush=True)
                if self._due("checkpoint_every", False):
                    self._save()
            if self._saved != self.steps:
                self._save()
        return self.steps >= last

    def _due(self, interval: str, anyway: bool) -> bool:
        """Whether it is time for what is done at this interval, unless it is 0."""
        every = self.options[interval]
        return every > 0 and (anyway or self.steps % every == 0)

    def _save(self) -> None:
        began = time.monotonic()
        path = save_checkpoint(self.session.trainer, self._checkpoints)
        print(f"checkpoint {path} in {time.monotonic() - began:.1f} s", flush=True)
        self._saved = self.steps

    def _row(self, record: StepRecord, held_out: float | None) -> dict[str, float | None]:
        trainer = self.session.trainer
        lr = trainer.spec.lr * trainer.schedule(record.step - 1)
        peak = None if self.options["device"] == "cpu" else torch.cuda.max_memory_reserved() / GIB
        rate, host = record.tokens / record.wall_ms * 1e3, psutil.Process().memory_info().rss / GIB
        training = record.step, record.loss, record.grad_norm, lr, record.tokens
        return dict(zip(COLUMNS, (*training, rate, record.wall_ms, peak, host, held_out), strict=True))

    def _begin_metrics(self) -> None:
        """Drop the rows of steps that will be repeated, and damaged ones."""
        rows = [row for row in _read_metrics(self.folder / METRICS) if int(row.split(",")[0]) <= self.steps]
        with whole(self.folder / METRICS) as path:
            path.write_text("".join([",".join(COLUMNS), "\n", *rows]), encoding="utf-8", newline="\n")

    def _add_metrics(self, row: dict[str, float | None]) -> None:
        with writing(self.folder / METRICS), (self.folder / METRICS).open("a", newline="\n") as file:
            file.write(",".join("" if value is None else repr(value) for value in row.values()) + "\n")

    def close(self) -> None:
        with self._holding:
            self.session.trainer.close()


def _read_metrics(path: Path) -> list[str]:
    """The whole rows of a metrics.csv: one truncated by a full disk or a power cut is skipped, as is the header."""
    return _ROW.findall(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []


def _line(row: dict[str, Any], last: int) -> str:
    memory = "" if row["device_gib"] is None else f"  device {row['device_gib']:.2f} GiB"
    held_out = "" if row["held_out_loss"] is None else f"  held out {row['held_out_loss']:.4f}"
    return (
        f"step {row['step']:>{len(str(last))}}/{last}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3g}  "
        f"{row['tokens_per_s']:,.0f} tokens/s{memory}  host {row['host_gib']:.2f} GiB{held_out}"
    )
