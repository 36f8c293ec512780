"""Training runs in a folder: metrics of every step, checkpoints to resume from, and a plot."""

import csv
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil
import torch

from t1lib import __version__
from t1lib.errors import T1Error, require
from t1lib.files import whole, write_json, writing
from t1lib.measure.memory import GIB
from t1lib.text.session import LanguageSession
from t1lib.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from t1lib.train.loop import StepRecord
from t1lib.train.ranks import ALONE, Ranks

SETTINGS, METRICS, PLOT, MODEL = "run.json", "metrics.csv", "metrics.png", "model"
COLUMNS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "wall_ms", "device_gib", "host_gib", "held_out_loss",
)  # fmt: skip
NEEDED = {"model", "mode", "seq", "batch", "steps", "schedule"}  # settings that every run has
FREE = {"steps", "device"}  # settings that may change when a run is resumed
PASSED_ON = 1.0  # seconds in which a launcher passes a signal on


class TrainRun:
    """A run in `folder`: run.json (its settings, the text's hash), metrics.csv, checkpoints/, metrics.png and model/.

    settings   arguments of `LanguageSession`, and `steps`
    resume     continue from the folder's last checkpoint; otherwise the folder must not hold a run
    ranks      the processes that train; rank 0 manages the folder, the others need it only to resume

    Raises `T1Error` if the folder holds a run but should not, or holds none but should; if that run has other settings
    or another text; and if settings or text differ between ranks.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool, ranks: Ranks = ALONE) -> None:
        self.folder, self.settings, self.ranks = folder, json.loads(json.dumps(dict(settings))), ranks
        ranks.agree(self.settings)
        before, begun = ranks.first(lambda: (read_settings(folder), self._begun()))
        held = before is not None and (resume or begun)
        require(resume or not held, f"{folder} holds a run; --resume goes on with it, or take another --out")
        require(not resume or before is not None, f"{folder} holds no run to go on with")
        require(before is not None or not begun, f"{folder} holds a run without its {SETTINGS}; take another --out")
        if held:
            self._compare(before["settings"])
        session = {k: v for k, v in self.settings.items() if k != "steps"}
        self.session = LanguageSession(**session)
        self.about = self.session.about()
        ranks.agree({"the text (its sha256)": self.about["sha256"]})
        if held:
            same = before["corpus"] == self.about["sha256"]
            require(same, f"the text is not the one that the run in {folder} was begun with")
            if ranks.first(self._has_checkpoints):  # otherwise it ended before the first one
                load_checkpoint(self.session.trainer, folder / "checkpoints")
        require(
            self.steps <= self.settings["steps"],
            f"the run in {folder} is at step {self.steps}; allowed: --steps {self.steps} or more, or none",
        )
        ranks.first(self._write_settings)

    @property
    def steps(self) -> int:
        """Steps done so far, including those before a resume."""
        return self.session.trainer.steps

    def _begun(self) -> bool:
        """Whether the folder's run completed a step: if it failed before that, it may be started over."""
        return bool(_read_metrics(self.folder / METRICS)) or self._has_checkpoints()

    def _has_checkpoints(self) -> bool:
        return bool(checkpoints(self.folder / "checkpoints"))

    def _compare(self, before: dict[str, Any]) -> None:
        for name in sorted((self.settings.keys() | before.keys()) - FREE):
            was, now = (_without_length(settings.get(name)) for settings in (before, self.settings))
            require(was == now, f"{name} is {now!r}; the run in {self.folder} has {was!r} and goes on with that alone")

    def _write_settings(self) -> None:
        content = {"t1lib": __version__, "torch": torch.__version__, "corpus": self.about["sha256"]}
        content |= {"settings": self.settings}
        write_json(self.folder / SETTINGS, content)

    # -- training --------------------------------------------------------------------------------------------------

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
        rows = _Metrics(self.folder / METRICS)
        self.ranks.first(lambda: rows.begin(self.steps))
        with _interruptible() as interrupted:
            with closing(rows):
                while self.steps < last and not self.ranks.any(interrupted() or rows.failure is not None):
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
        self.ranks.first(rows.check)
        return self.steps >= last

    def _save(self, out: TextIO) -> int:
        began = time.monotonic()
        path = save_checkpoint(self.session.trainer, self.folder / "checkpoints")
        print(f"checkpoint {path} in {time.monotonic() - began:.1f} s", file=out, flush=True)
        return self.steps

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
        """Plot the metrics so far. Raises `T1Error` if there are none or the plot cannot be written."""
        return self.ranks.first(self._draw)

    def _draw(self) -> Path:
        import pandas as pd

        from t1lib.report.training import draw_metrics

        frame = pd.read_csv(self.folder / METRICS)
        require(len(frame) > 0, f"{self.folder / METRICS} has no step to plot")
        with whole(self.folder / PLOT) as partial:
            draw_metrics(frame, partial)
        return self.folder / PLOT

    def export(self) -> Path:
        """Write the model and its tokenizer to model/, readable by Hugging Face's `from_pretrained` and by --model."""
        return self.session.export(self.folder / MODEL)

    def close(self) -> None:
        self.session.trainer.close()


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The content of the folder's run.json, None if there is none. Raises `T1Error` if the file is broken."""
    path = folder / SETTINGS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise T1Error(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise T1Error(f"{path} is broken: {error}") from None
    settings = found.get("settings") if isinstance(found, dict) and "corpus" in found else None
    lacking = sorted(NEEDED - settings.keys()) if isinstance(settings, dict) else ["corpus or settings"]
    require(not lacking, f"{path} is broken: no {', '.join(lacking)}")
    return found


class _Metrics:
    """metrics.csv, flushed after every row. Only the process that called `begin` writes.

    If a row cannot be written, the error is kept as `failure`, which ends the training, and is raised by `check`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self.last: dict[str, float | None] = {}
        self.failure: T1Error | None = None

    def begin(self, step: int) -> None:
        """Open the file; rows beyond `step`, whose steps will be repeated, and damaged rows are dropped."""
        kept = [row for row in _read_metrics(self._path) if int(row["step"]) <= step]
        with whole(self._path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        with writing(self._path):
            self._file = self._path.open("a", newline="", encoding="utf-8")

    def write(self, row: dict[str, float | None]) -> None:
        self.last = row
        if self._file is None:
            return
        try:
            with writing(self._path):
                csv.DictWriter(self._file, COLUMNS).writerow({k: "" if v is None else v for k, v in row.items()})
                self._file.flush()
        except T1Error as error:
            self.failure = error

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # from a row that could not be written: see `failure`
                self._file.close()


def _read_metrics(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv: one truncated by a full disk or a power cut is skipped."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].split("\n")
    return [row for row in csv.DictReader(lines, COLUMNS, quoting=csv.QUOTE_NONE) if _is_whole(row)]


def _is_whole(row: dict[str, str]) -> bool:
    try:
        numbers = [float(text) for text in row.values() if text != ""]
        return bool(numbers) and int(row["step"]) > 0
    except (TypeError, ValueError):  # the header, or too few or too many fields
        return False


def _without_length(setting: Any) -> Any:
    """A setting without the total number of steps, which may change on resume."""
    if not isinstance(setting, dict):
        return setting
    return {k: v for k, v in setting.items() if k != "total"}


def _line(row: dict[str, Any], last: int) -> str:
    memory = "" if row["device_gib"] is None else f"  device {row['device_gib']:.2f} GiB"
    held_out = "" if row["held_out_loss"] is None else f"  held out {row['held_out_loss']:.4f}"
    return (
        f"step {row['step']:>{len(str(last))}}/{last}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3g}  "
        f"{row['tokens_per_s']:,.0f} tokens/s{memory}  host {row['host_gib']:.2f} GiB{held_out}"
    )


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Yield a function that says whether Ctrl-C or SIGTERM was received. The second one interrupts at once, unless it
    is only the first one, passed on by a launcher whose processes were sent it, too."""
    asked: list[float] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if asked and time.monotonic() - asked[0] > PASSED_ON:
            raise KeyboardInterrupt
        asked.append(time.monotonic())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
