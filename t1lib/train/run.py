"""Training that leaves something behind: metrics a step, checkpoints to go on from, and a plot."""

import csv
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil
import torch

from t1lib import __version__
from t1lib.errors import T1Error, require
from t1lib.measure.memory import GIB
from t1lib.train.checkpoint import load_checkpoint, save_checkpoint
from t1lib.train.language import LanguageSession
from t1lib.train.ranks import ALONE, Ranks
from t1lib.train.trainer import StepRecord

SETTINGS, METRICS, PLOT, MODEL = "run.json", "metrics.csv", "metrics.png", "model"
COLUMNS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "wall_ms", "device_gib", "host_gib", "held_out_loss",
)  # fmt: skip
FREE = {"steps", "device"}  # settings that may differ when a run goes on


class TrainRun:
    """A run in `folder`: run.json (its settings, the text's hash), metrics.csv, checkpoints/, metrics.png and model/.

    settings   of `LanguageSession`, and `steps`
    resume     go on from the folder's last checkpoint; else the folder must not hold a run
    ranks      the processes that train; rank 0 looks after the folder, which the others need only to resume

    Raises `T1Error` where a run is and none should be, or the other way round, for one with other settings, and where
    ranks have other settings or another text.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool, ranks: Ranks = ALONE) -> None:
        self.folder, self.settings, self.ranks = folder, json.loads(json.dumps(dict(settings))), ranks
        ranks.agree(self.settings)
        before, begun = ranks.first(lambda: (read_settings(folder), self._begun()))
        held = before is not None and (resume or begun)
        require(resume or not held, f"{folder} holds a run; --resume goes on with it, or take another --out")
        require(not resume or before is not None, f"{folder} holds no run to go on with")
        if held:
            self._compare(before["settings"])
        session = {k: v for k, v in self.settings.items() if k != "steps"}
        self.session = LanguageSession(**session)
        self.about = self.session.about()
        ranks.agree({"the text (its sha256)": self.about["sha256"]})
        if held:
            same = before["corpus"] == self.about["sha256"]
            require(same, f"the text is not the one that the run in {folder} was begun with")
            if ranks.first(self._has_checkpoints):  # else it ended before the first one
                load_checkpoint(self.session.trainer, folder / "checkpoints")
        ranks.first(self._write_settings)

    @property
    def steps(self) -> int:
        """Steps done, over all sittings."""
        return self.session.trainer.steps

    def _begun(self) -> bool:
        """Whether the folder's run came to a step: one that failed before may be begun anew."""
        metrics = self.folder / METRICS
        rows = len(metrics.read_text(encoding="utf-8").splitlines()) > 1 if metrics.is_file() else False
        return rows or self._has_checkpoints()

    def _has_checkpoints(self) -> bool:
        return (self.folder / "checkpoints").is_dir()

    def _compare(self, before: dict[str, Any]) -> None:
        for name in sorted((self.settings.keys() | before.keys()) - FREE):
            was, now = (_without_length(settings.get(name)) for settings in (before, self.settings))
            require(was == now, f"{name} is {now!r}; the run in {self.folder} has {was!r} and goes on with that alone")

    def _write_settings(self) -> None:
        content = {"t1lib": __version__, "torch": torch.__version__, "corpus": self.about["sha256"]}
        content |= {"settings": self.settings}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / SETTINGS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8", newline="\n")
        except OSError as error:
            raise T1Error(f"cannot write to {self.folder}: {error.strerror or error}") from None

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self, *, checkpoint_every: int, evaluate_every: int, evaluate_rows: int, report_every: int, out: TextIO
    ) -> bool:
        """Train up to `steps` of the settings; whether it came so far.

        An interrupt (Ctrl-C) of one process ends all after the step that runs. Whatever ends it, metrics are on the
        disk, and after an interrupt or the last step there is a checkpoint and a plot. A number of 0 switches that off.
        """
        last, saved = self.settings["steps"], self.steps if self.ranks.first(self._has_checkpoints) else -1
        with self._metrics() as rows, _interruptible() as interrupted:
            while self.steps < last and not self.ranks.any(interrupted()):
                record = self.session.step()
                done = record.step == last or interrupted()
                wanted = evaluate_every and (record.step % evaluate_every == 0 or record.step == last)
                held_out = self.session.evaluate(evaluate_rows) if wanted else None
                rows.write(self._row(record, held_out))
                if report_every and (record.step % report_every == 0 or done):
                    print(_line(rows.last, last), file=out, flush=True)
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

    def _metrics(self) -> "_Metrics":
        return _Metrics(self.folder / METRICS if self.ranks.rank == 0 else Path(os.devnull), self.steps)

    def _row(self, record: StepRecord, held_out: float | None) -> dict[str, float | None]:
        trainer, device = self.session.trainer, self.session.device
        peak = torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None
        return {
            "step": record.step, "loss": record.loss, "grad_norm": record.grad_norm,
            "lr": trainer.spec.lr * trainer.schedule(record.step - 1), "tokens": record.tokens,
            "tokens_per_s": record.tokens / record.wall_ms * 1e3, "wall_ms": record.wall_ms, "device_gib": peak,
            "host_gib": psutil.Process().memory_info().rss / GIB, "held_out_loss": held_out,
        }  # fmt: skip

    def plot(self) -> Path:
        """Draw the metrics so far."""
        return self.ranks.first(self._draw)

    def _draw(self) -> Path:
        import pandas as pd

        from t1lib.report.training import draw_metrics

        return draw_metrics(pd.read_csv(self.folder / METRICS), self.folder / PLOT)

    def export(self) -> Path:
        """Write the model and its tokenizer to model/, as Hugging Face's `from_pretrained` and --model read them."""
        return self.session.export(self.folder / MODEL)

    def close(self) -> None:
        self.session.trainer.close()


def read_settings(folder: Path) -> dict[str, Any] | None:
    """What a run's folder says of it, None where none is. Raises `T1Error` for a file that is broken."""
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise T1Error(f"{folder / SETTINGS} is broken: {error}") from None


class _Metrics:
    """metrics.csv, complete after every row. Rows beyond `step`, of steps that will be done again, are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.last: dict[str, float | None] = {}
        kept = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(kept)
        self._file.flush()

    def write(self, row: dict[str, float | None]) -> None:
        self.last = row
        self._writer.writerow({k: "" if v is None else v for k, v in row.items()})
        self._file.flush()

    def __enter__(self) -> "_Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _without_length(setting: Any) -> Any:
    """A setting without what follows from the number of steps, which may grow."""
    if not isinstance(setting, dict):
        return setting
    return {k: v for k, v in setting.items() if k not in ("warmup", "total")}


def _line(row: dict[str, Any], last: int) -> str:
    memory = "" if row["device_gib"] is None else f"  device {row['device_gib']:.2f} GiB"
    held_out = "" if row["held_out_loss"] is None else f"  held out {row['held_out_loss']:.4f}"
    return (
        f"step {row['step']:>{len(str(last))}}/{last}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3g}  "
        f"{row['tokens_per_s']:,.0f} tokens/s{memory}  host {row['host_gib']:.2f} GiB{held_out}"
    )


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Whether Ctrl-C (or SIGTERM) was pressed. The second time it interrupts at once."""
    asked: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
