"""Training runs in a folder: metrics of every step, checkpoints to resume from, and a plot."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from t1lib import __version__
from t1lib.errors import T1Error, require, shown
from t1lib.files import held, read_signed, whole, write_signed, writing
from t1lib.signals import noted
from t1lib.text.session import LanguageSession
from t1lib.text.texts import METRICS, RUN
from t1lib.train import Schedule, StepRecord
from t1lib.train.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from t1lib.train.ranks import ALONE, Ranks

COLUMNS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "wall_ms", "device_gib", "host_gib", "held_out_loss",
)  # fmt: skip
FREE = {"steps", "device"}  # settings that may change when a run is resumed
GIB = 2**30


class TrainRun:
    """A run in `folder`, held until `close`: run.json (its settings, the text's hash), metrics.csv, checkpoints/.

    settings   arguments of `LanguageSession`, and `steps`
    resume     continue from the folder's last checkpoint; otherwise the folder must not hold a run
    ranks      the processes that train; rank 0 manages the folder, the others need it only to resume

    Raises `T1Error`, having written nothing, if another process holds the folder; if it holds a run but should not, or
    none but should; if that run has other settings or another text; and if settings or text differ between ranks.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool, ranks: Ranks = ALONE) -> None:
        self.folder, self.settings, self.ranks = folder, json.loads(json.dumps(dict(settings))), ranks
        ranks.agree(self.settings)
        taken = f"another process trains in {folder}; wait for it, or take another --out"
        with ExitStack() as stack:
            ranks.first(lambda: stack.enter_context(held(folder, RUN, taken)))
            self._begin(resume)
            self._holding = stack.pop_all()

    def _begin(self, resume: bool) -> None:
        folder, ranks = self.folder, self.ranks
        before, begun = ranks.first(lambda: (read_settings(folder), self._begun()))
        require(resume or not begun, f"{folder} holds a run; --resume goes on with it, or take another --out")
        require(not resume or before is not None, f"{folder} holds no run to go on with: no {RUN}")
        if resume:
            self._compare(before["settings"])
        self.session = LanguageSession(**{k: v for k, v in self.settings.items() if k != "steps"})
        self.about = self.session.about()
        ranks.agree({"the text (its sha256)": self.about["sha256"]})
        if resume:
            same = before["corpus"] == self.about["sha256"]
            require(same, f"the text is not the one that the run in {folder} was begun with")
            if ranks.first(self._has_checkpoints):  # otherwise it ended before the first one
                load_checkpoint(self.session.trainer, folder / "checkpoints")
        most = f"the run in {folder} is at step {self.steps}; allowed: --steps {self.steps} or more, or none"
        require(self.steps <= self.settings["steps"], most)
        made = {"t1lib": __version__, "torch": torch.__version__, "corpus": self.about["sha256"]}
        ranks.first(lambda: write_signed(folder / RUN, made | {"settings": self.settings}))

    @property
    def steps(self) -> int:
        """Steps done so far, including those before a resume."""
        return self.session.trainer.steps

    def _begun(self) -> bool:
        """Whether the folder's run completed a step: if it failed before that, it may be started over."""
        return bool(_read_metrics(self.folder / METRICS)) or self._has_checkpoints()

    def _has_checkpoints(self) -> bool:
        return has_checkpoint(self.folder / "checkpoints")

    def _compare(self, before: dict[str, Any]) -> None:
        for name in sorted((self.settings.keys() | before.keys()) - FREE):
            was, now = (settings.get(name) for settings in (before, self.settings))
            if name == "schedule":
                was, now = ({k: v for k, v in schedule.items() if k != "total"} for schedule in (was, now))
            only = f"{name} is {shown(now)}; the run in {self.folder} has {shown(was)} and goes on with that alone"
            require(was == now, only)

    def train(
        self, *, checkpoint_every: int, evaluate_every: int, evaluate_rows: int, report_every: int, out: TextIO
    ) -> bool:
        """Train up to `steps` of the settings; returns whether that was reached.

        Interrupting one process (Ctrl-C) stops all of them after the current step or checkpoint. However training ends,
        the metrics are in their file; after an interrupt or the last step there is also a checkpoint. An interval of 0
        turns that checkpoint, evaluation or report off.
        Raises `T1Error` if metrics cannot be written, after saving a checkpoint of that step.
        """
        last, saved = self.settings["steps"], self.steps if self.ranks.first(self._has_checkpoints) else -1
        with noted() as interrupted:
            self.ranks.first(self._begin_metrics)
            while self.steps < last and not any(self.ranks.share(interrupted)):
                record = self.session.step()
                wanted = evaluate_every and (record.step % evaluate_every == 0 or record.step == last)
                row = self._row(record, self.session.evaluate(evaluate_rows) if wanted else None)
                try:
                    self.ranks.first(partial(self._add_metrics, row))
                except T1Error:
                    self._save(out)
                    raise
                if report_every and (record.step % report_every == 0 or record.step == last or interrupted()):
                    print(_line(row, last), file=out, flush=True)
                if checkpoint_every and record.step % checkpoint_every == 0:
                    saved = self._save(out)
            if saved != self.steps:
                self._save(out)
        return self.steps >= last

    def _save(self, out: TextIO) -> int:
        began = time.monotonic()
        path = save_checkpoint(self.session.trainer, self.folder / "checkpoints")
        print(f"checkpoint {path} in {time.monotonic() - began:.1f} s", file=out, flush=True)
        return self.steps

    def _row(self, record: StepRecord, held_out: float | None) -> dict[str, float | None]:
        lr = self.settings["optimizer"]["lr"] * Schedule(**self.settings["schedule"])(record.step - 1)
        peak = None if self.settings["device"] == "cpu" else torch.cuda.max_memory_reserved() / GIB
        return {
            "step": record.step, "loss": record.loss, "grad_norm": record.grad_norm, "lr": lr, "tokens": record.tokens,
            "tokens_per_s": record.tokens / record.wall_ms * 1e3, "wall_ms": record.wall_ms, "device_gib": peak,
            "host_gib": psutil.Process().memory_info().rss / GIB, "held_out_loss": held_out,
        }  # fmt: skip

    def _begin_metrics(self) -> None:
        """Drop the rows of steps that will be repeated, and damaged ones."""
        rows = [COLUMNS, *(row for row in _read_metrics(self.folder / METRICS) if int(row[0]) <= self.steps)]
        with whole(self.folder / METRICS) as path:
            path.write_text("".join(f"{','.join(row)}\n" for row in rows), encoding="utf-8", newline="\n")

    def _add_metrics(self, row: dict[str, float | None]) -> None:
        with writing(self.folder / METRICS), (self.folder / METRICS).open("a", newline="\n") as file:
            file.write(",".join("" if row[name] is None else repr(row[name]) for name in COLUMNS) + "\n")

    def close(self) -> None:
        with self._holding:
            self.session.trainer.close()


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The content of the folder's run.json, None if there is none. Raises `T1Error` if the file is damaged."""
    return read_signed(folder / RUN) if (folder / RUN).exists() else None


def _read_metrics(path: Path) -> list[list[str]]:
    """The whole rows of a metrics.csv: one truncated by a full disk or a power cut is skipped, as is the header."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [row for row in (line.split(",") for line in text[: text.rfind("\n") + 1].split("\n")) if _is_whole(row)]


def _is_whole(row: list[str]) -> bool:
    try:
        return len([float(value or 0) for value in row]) == len(COLUMNS) and int(row[0]) > 0
    except ValueError:
        return False


def _line(row: dict[str, Any], last: int) -> str:
    memory = "" if row["device_gib"] is None else f"  device {row['device_gib']:.2f} GiB"
    held_out = "" if row["held_out_loss"] is None else f"  held out {row['held_out_loss']:.4f}"
    return (
        f"step {row['step']:>{len(str(last))}}/{last}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3g}  "
        f"{row['tokens_per_s']:,.0f} tokens/s{memory}  host {row['host_gib']:.2f} GiB{held_out}"
    )
