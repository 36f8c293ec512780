"""What an experiment's notebook calls: `Run` collects its records and saves its figures, tables and numbers.

`redraw` makes the same files again from samples.csv alone, on a machine without a GPU.
"""

import atexit
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd

from t1lib import fingerprint, paths, report
from t1lib.cells import Cells
from t1lib.errors import T1Error, choose, require
from t1lib.files import write_json
from t1lib.measure import manifest
from t1lib.measure.environment import environment, git_state, require_gpu
from t1lib.measure.records import Numbers, Records
from t1lib.params import Live

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RUN = "_t1_run"  # the variable by which a kernel knows its run
_TIMED = re.compile(r"^(\s*)%(?:time|timeit|prun)\s+(?:-\w+(?:\s*\d+)?\s+)*", re.M)  # magics that run Python code
_NAMED = 240  # characters of an error about cells that are out of date


def _draw(folder: Path, experiment: str, name: str, frame: pd.DataFrame) -> "Figure":
    """Draw one figure and save it as PDF and PNG."""
    import matplotlib.pyplot as plt

    from t1lib.report.style import style

    (folder / "figures").mkdir(parents=True, exist_ok=True)
    with style():  # sizes and font types apply both when a figure is drawn and when it is saved
        figure = report.figures_of(experiment)[name](frame)
        # Without a creation date, the PDF is the same from run to run.
        try:
            figure.savefig(folder / "figures" / f"{name}.pdf", metadata={"CreationDate": None})
            figure.savefig(folder / "figures" / f"{name}.png", dpi=150)
        finally:
            plt.close(figure)  # else the inline backend shows it again at the end of the cell
    return figure


def _tabulate(folder: Path, experiment: str, name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Make one table, save its LaTeX, and return it."""
    table = report.tables_of(experiment)[name](frame)
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    text = table.latex if table.latex.endswith("\n") else table.latex + "\n"
    (folder / "tables" / f"{name}.tex").write_text(text, encoding="utf-8", newline="\n")
    return table.frame


def _count(folder: Path, experiment: str, frame: pd.DataFrame) -> None:
    """Compute an experiment's numbers and save them for programs and for LaTeX."""
    numbers = Numbers()
    report.numbers_of(experiment)(frame, numbers)
    numbers.save_json(folder / "numbers.json")
    numbers.save_tex(folder / "numbers.tex")


class Run:
    """One run of an experiment, from its parameters to its published folder.

    A cell that is run again replaces the records that it made; one that fails or is interrupted leaves none. Records
    that no longer follow from the parameters and cells before them are left out of tables and figures, and `finish`
    refuses to publish until their cells have been run again.

    Attributes: `params` (the parameters as attributes, as their cells say at that moment), `records`, `outdir` (where
    the notebook's own files belong), `device` (CUDA if there is a GPU, else the CPU).
    """

    def __init__(self, experiment: str, namespace: dict[str, Any]) -> None:
        import torch

        self.experiment, self.records = experiment, Records(self._left_out)
        driven = os.environ.get("T1_STAGING")
        self._driven = driven is not None
        self.params = Live(experiment, namespace, self._note, self._require_allowed)
        given = self.params.values()
        git_state()  # raises its errors before anything is measured
        # Taken at the start: an edit made during the run must make the run stale.
        self._made_of = {"notebook": fingerprint.notebook(experiment), "modules": fingerprint.everything()}
        self._inputs: dict[str, str] = {}
        self._drawn: dict[str, dict[str, int]] = {}  # figure or table → the runs of the cells that it was made from
        self._started, self._clock = manifest.utc_now(), time.perf_counter()
        self.outdir = Path(driven) if driven else paths.staging(given["profile"], experiment, os.getpid())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._cells = Cells(namespace, self._parameters)
        self._watch()

    @classmethod
    def start(cls, experiment: str, namespace: dict[str, Any]) -> Self:
        """Begin a run in a notebook's second code cell: `run = Run.start("t1m1", globals())`. When that cell is run
        again, the run goes on.

        Raises `T1Error` for an undeclared, missing or mistyped parameter, for a profile that params/ does not hold or
        that needs a GPU that is not there, and if results that another GPU has measured would be replaced.
        """
        run = namespace.get(_RUN)
        if isinstance(run, cls) and run.experiment == experiment:
            run.params.values()
            return run
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, with this machine's paths in it
        for limit in ("display.max_colwidth", "display.max_columns", "display.max_rows"):
            pd.set_option(limit, None)  # tables are shown whole
        run = namespace[_RUN] = cls(experiment, namespace)
        if not run._driven:  # the driver has made the folder, and papermill writes into it
            shutil.rmtree(run.outdir, ignore_errors=True)
        run.outdir.mkdir(parents=True, exist_ok=True)
        return run

    def _require_allowed(self, given: dict[str, Any]) -> None:
        require_gpu(given["profile"])
        if not self._driven:
            manifest.require_replaceable(paths.outputs(given["profile"], self.experiment))

    # -- cells -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Be told by IPython, where there is one, when a cell begins and ends."""
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            return

        def source(info: Any) -> str:
            first, _, rest = info.raw_cell.partition("\n")
            text = _TIMED.sub(r"\1", rest if first.startswith("%%") else info.raw_cell)  # without magics
            with suppress(SyntaxError):  # the cell fails
                return shell.transform_cell(text)
            return ""

        def begin(info: Any) -> None:
            key = str(info.cell_id or info.raw_cell)
            self._cells.begin(key)
            self.records.begin(key)

        def end(result: Any) -> None:
            key = str(result.info.cell_id or result.info.raw_cell)
            self._end(key, source(result.info), result.success, result.execution_count)

        shell.events.register("pre_run_cell", begin)
        shell.events.register("post_run_cell", end)

    def _end(self, key: str, source: str, done: bool, number: int | None) -> None:
        had = self.records.end(key, keep=done)
        self._cells.end(key, source, done, had, number)
        for other in self.records.replaced(key):
            self._cells.forget(other)

    def _parameters(self) -> dict[str, Any]:
        try:
            return self.params.values()
        except T1Error:  # raised again by the next cell that reads one
            return self.params.unchecked()

    def _note(self, name: str, value: Any) -> None:
        self._cells.running_cell.parameters[name] = value

    def _left_out(self, shown: bool) -> list[str]:
        """The cells whose records do not hold any more. Says so if the others are about to be shown."""
        out = {part: why for part in self.records.parts if (why := self._cells.why_out_of_date(part))}
        for part, why in out.items():
            if shown and self.records.parts[part]:
                print(f"out of date and left out, from the cell `{self._cells.title(part)}`: {why}")
        return list(out)

    def _frame(self) -> pd.DataFrame:
        """The records that hold, saved to disk as well, so that a cell that fails later does not lose them."""
        self.records.save(self.outdir / "samples.csv")
        return self.records.frame()

    # -- results -----------------------------------------------------------------------------------------------------

    def used(self, name: str, sha256: str) -> None:
        """Note, for the manifest, the hash of something the run read beside its parameters, such as a corpus."""
        self._inputs[name] = sha256

    def draw(self, name: str) -> "Figure":
        """Draw one of the experiment's figures (`t1lib.report`) from the records that hold, save and return it."""
        choose(f"figure of {self.experiment}:", name, report.figures_of(self.experiment))
        return self._shown(_draw, name)

    def table(self, name: str) -> pd.DataFrame:
        """Make one of the experiment's tables (`t1lib.report`) from the records that hold, save and return it."""
        choose(f"table of {self.experiment}:", name, report.tables_of(self.experiment))
        return self._shown(_tabulate, name)

    def _shown(self, make: Callable[..., Any], name: str) -> Any:
        self._drawn[name] = {"": 0}  # not whole, until it is
        made = make(self.outdir, self.experiment, name, self._frame())
        self._drawn[name] = self._cells.runs()
        return made

    def _to_run_again(self) -> list[str]:
        """What is not as in a notebook that was run from top to bottom: cells, or else figures and tables."""
        whys = {key: self._cells.why_out_of_date(key) for key in self._cells.measured}
        late = [f"`{self._cells.title(key)}`: {why}" for key, why in whys.items() if why]
        now = self._cells.runs().items()
        drawn = [f"`{name}`: drawn before its records" for name, runs in self._drawn.items() if runs.items() - now]
        return late or drawn

    def finish(self) -> None:
        """Save records, numbers and environment. Without the driver, also publish the folder.

        A folder published this way lacks executed.ipynb, so the driver does not count it as done and would
        redo the run. Raises `T1Error` if a cell has to be run again first.
        """
        late = self._to_run_again()
        named = "; ".join(late)
        named = named if len(named) <= _NAMED else f"{named[:_NAMED]}…"
        require(not late, f"cells to run again before this one: {len(late)}. {named}")
        frame = self._frame()
        _count(self.outdir, self.experiment, frame)
        write_json(self.outdir / "environment.json", environment())
        modules = {name: self._made_of["modules"].get(name, fingerprint.MISSING) for name in fingerprint.loaded()}
        notes = {"made_of": self._made_of | {"modules": modules}, "inputs": self._inputs}
        write_json(self.outdir / manifest.NOTES, notes)
        if not self._driven:
            self._publish()

    def _publish(self) -> None:
        """Publish a copy: cells that are run again afterwards work on in `outdir`, and change nothing published."""
        given = self.params.values()
        final = paths.outputs(given["profile"], self.experiment)
        whole = self.outdir.with_suffix(".whole.partial")
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(self.outdir, whole)
        manifest.write(
            whole,
            experiment=self.experiment,
            profile=given["profile"],
            parameters=given,
            started=self._started,
            seconds=time.perf_counter() - self._clock,
        )
        manifest.publish(whole, final)
        atexit.register(shutil.rmtree, self.outdir, ignore_errors=True)


def redraw(profile: str, experiment: str) -> list[str]:
    """Make all figures, tables and numbers of a finished run again, from its samples.csv alone.

    Returns the names of the files written. The manifest takes their new hashes and keeps the rest.
    Raises `T1Error` if there is no finished run, or if its samples have changed since it finished.
    """
    final = paths.outputs(profile, experiment)
    require(manifest.read(final) is not None, f"{paths.shown(final)} holds no finished run")
    if manifest.changed(final, "samples.csv"):
        raise T1Error(f"{paths.shown(final)}/samples.csv is not the one that the run was finished with")
    frame = Records.load(final / "samples.csv").frame()
    # Everything is drawn before anything is replaced: a figure that fails leaves the old ones.
    fresh = final.with_name(f".{experiment}.redraw")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        for name in report.figures_of(experiment):
            _draw(fresh, experiment, name, frame)
        for name in report.tables_of(experiment):
            _tabulate(fresh, experiment, name, frame)
        _count(fresh, experiment, frame)
        written = sorted(path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file())
        for folder in ("figures", "tables"):
            shutil.rmtree(final / folder, ignore_errors=True)
        for name in written:
            (final / name).parent.mkdir(exist_ok=True)
            os.replace(fresh / name, final / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    manifest.refresh(final, ("figures/", "tables/", "numbers."))
    return written
