"""What an experiment's notebook calls: `Run` collects its records and saves its figures, tables and numbers. `redraw`
makes those of a finished run again from its samples, with the notebook's own cells."""

import io
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import matplotlib.pyplot as plt
import pandas as pd
import torch
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure

from t1lib import fingerprint, params, paths
from t1lib.errors import T1Error, require, shown
from t1lib.files import whole
from t1lib.kit.cells import Cells
from t1lib.kit.style import STYLE, make_table, to_latex
from t1lib.measure import manifest
from t1lib.measure.isolate import server
from t1lib.measure.records import Numbers, Records

_RUN = "_t1_run"  # the variable by which a kernel knows its run
# Cell magics, and line magics that run Python code, whether or not their result is kept.
_MAGIC = re.compile(r"^(\s*(?:[\w., ]+=\s*)?)(?:%%.*\n?|%(?:time|timeit|prun)\s+(?:-\w+(?:\s*\d+)?\s+)*)", re.M)
_NAMED = 240  # characters of an error about cells that are out of date


class Run:
    """One run of an experiment, from its parameters to its published folder.

    A cell that is run again replaces what it made; one that fails or is interrupted leaves no records. Records that no
    longer follow from the parameters and cells before them are left out of `frame`, and `finish` refuses to publish
    until all cells that are out of date have been run again. With the parameter `measure` false the records are those
    of the finished run, whatever GPU is here.

    Attributes: `params` (current values of the parameters), `records`, `outdir` (for files that the notebook itself
    writes), `device` (CUDA if there is a GPU, else the CPU; with `measure` false, that of the finished run).
    """

    saves_figures = True

    def __init__(self, experiment: str, namespace: dict[str, Any], folder: Path | None = None) -> None:
        """folder: receives the files, for the caller to publish; None: a temporary one, which `finish` publishes"""
        self.experiment = experiment
        self._cells = Cells(namespace, lambda: self.params.current())
        self.records = Records(self._cells.rows, self._cells.record, self._cells.read_records)
        self._driven, self._measures = folder is not None, None  # until the parameters are known
        self.params = params.Live(experiment, namespace, self._require_allowed)
        given = self.params.checked()
        self._measures, final = given.get("measure", True), paths.outputs(given["profile"], experiment)
        # Taken at the start: an edit during the run must make it stale, and a commit made meanwhile is not what ran.
        self._about = manifest.git_state() | {"experiment": experiment}
        self._made_of = {"notebook": fingerprint.notebook(experiment), "modules": fingerprint.everything()}
        self._numbers, self._saved = Numbers(), []
        self._ran: dict[str, str] = {}  # cell → its source when it ran last
        self._clock = time.perf_counter()
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="t1-", ignore_cleanup_errors=True)
        self.outdir = folder or Path(self._temporary.name) / experiment
        self.outdir.mkdir(parents=True, exist_ok=True)
        cuda = torch.cuda.is_available()
        if not self._measures:
            self._drawn_from = manifest.entry(final / "samples.csv")
            self.records = Records.load(final / "samples.csv")
            self.records.closed = True
            cuda = "gpu" in (manifest.read(final) or {})["environment"]
        self.device = torch.device("cuda" if cuda else "cpu")
        self._begin("")
        if shell := get_ipython():
            shell.events.register("pre_run_cell", lambda info: self._begin(str(info.cell_id or info.raw_cell)))
            shell.events.register("post_run_cell", self._end)

    def _begin(self, key: str) -> None:
        """A cell of this key begins to run. If the saved notebook cannot be read now, it is as last read."""
        with suppress(T1Error):
            cells = params.code_cells(paths.notebook(self.experiment))
            self._saved = [cell for cell in cells if cell["source"].strip()]
        self._cells.begin(key, [cell.get("id") for cell in self._saved], [cell["source"] for cell in self._saved])
        self.params.read_into = self._cells.running.parameters
        if self._measures:
            self.records.own = self._cells.running.rows

    def _end(self, result: Any) -> None:
        info = result.info
        source = _MAGIC.sub(r"\1", info.raw_cell)
        with suppress(SyntaxError):  # the cell fails
            source = get_ipython().transform_cell(source)
        key = str(info.cell_id or info.raw_cell)
        self._ran[key] = info.raw_cell
        self._cells.end(key, source, result.success, result.execution_count)
        for cell, why in self._cells.out_of_date():
            if cell is self._cells.running and result.success:
                print(f"what this cell made is out of date: {why}")
        if self._cells.running.rows:  # saved now, so that a run that is cut off later keeps them
            with whole(self.outdir / "samples.csv") as part:
                self.records.save(part)

    @classmethod
    def start(cls, experiment: str, namespace: dict[str, Any]) -> Self:
        """Begin a run, in a notebook's second code cell, which may be run again: `run = Run.start("t1m1", globals())`.
        Raises `T1Error` for a wrong parameter, for a profile that is not in params/ or needs a GPU where there is none,
        and if it would replace another kind of GPU's results; with `measure` false, without a finished run like this.
        """
        plt.style.use(["default", STYLE])  # published figures ignore a user's matplotlibrc, such as dark backgrounds
        run, driven = namespace.get(_RUN), os.environ.get("T1_STAGING")
        # A copied notebook whose `Run.start` still names the original would pass for a run of the original.
        named = run.experiment if isinstance(run, cls) else Path(driven).stem[1:] if driven else experiment
        told = f"Run.start names {experiment!r} in a run of {named!r}; name that, or restart the kernel"
        require(experiment == named, told)
        if isinstance(run, cls):
            run.params.checked()
            return run
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, with this machine's paths in it
        for limit in ("display.max_colwidth", "display.max_columns", "display.max_rows"):
            pd.set_option(limit, None)  # tables are shown whole
        run = namespace[_RUN] = cls(experiment, namespace, Path(driven) if driven else None)
        if run._measures:
            server("t1lib.measure.session")  # begins to import while the notebook does
        return run

    def _require_allowed(self, given: dict[str, Any]) -> None:
        measures, final = given.get("measure", True), paths.outputs(given["profile"], self.experiment)
        changed = "`measure` was changed within a run; restart the kernel, and run all cells"
        require(self._measures in (None, measures), changed)
        if not measures:
            manifest.require_finished(final, given)
            return
        manifest.require_gpu(given["profile"])
        if not self._driven:
            own = f"notebooks/{self.experiment}.ipynb"
            here = f"this kernel runs in {paths.shown(final)}, which finish() replaces; open {own} instead"
            require(not Path.cwd().is_relative_to(final), here)
            manifest.require_replaceable(final)

    def _require_whole(self) -> None:
        """Raise `T1Error` unless all cells of the saved notebook, from that of `start` to the running one, have run to
        their end: what is published replaces a whole run. Checks only if the frontend gives the file's cell ids."""
        first = next((at for at, cell in enumerate(self._saved) if "Run.start(" in cell["source"]), 0)
        required = self._saved[first + 1 : self._cells.order.get(self._cells.running_key, 0)]
        missing = [cell for cell in required if cell["id"] not in self._cells.finished]
        if missing:
            named = f"{len(missing)}, first `{params.first_line(missing[0]['source'])}`"
            told = f"cells of notebooks/{self.experiment}.ipynb that have not run to their end: {named}"
            raise T1Error(f"{told}; run them, or save it without them")

    def frame(self) -> pd.DataFrame:
        """The records that are up to date, one row each; prints which are left out. If the frontend gives cell ids,
        only those of the running cell and the ones above it are there, as in a run from top to bottom."""
        if self._measures:
            for cell, why in self._cells.out_of_date():
                if cell.rows:
                    print(f"out of date and left out, from the cell `{cell.title}`: {why}")
            self._tell_unsaved()
        return self.records.frame()

    def _tell_unsaved(self) -> None:
        for cell in self._cells.unsaved():
            print(f"left out, as long as the saved notebook does not have it: `{cell.title}`")

    def _new(self, folder: str, name: str, *suffixes: str) -> list[Path]:
        """The files of a figure or table that the running cell is about to make; what an earlier attempt left there is
        removed. Raises `T1Error` for a name that is not that of a file, or that another cell uses."""
        fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
        require(fits, f"the name {shown(name)} may hold letters, digits, '_' and '-' only")
        self._cells.draw(f"{folder}/{name}")
        (self.outdir / folder).mkdir(parents=True, exist_ok=True)
        files = [self.outdir / folder / f"{name}{suffix}" for suffix in suffixes]
        for file in files:
            file.unlink(missing_ok=True)
        return files

    def figure(self, name: str, figure: Figure) -> Figure:
        """Save a figure as PDF and PNG; return it, to be shown if this is its cell's last line. Raises as `table`."""
        pdf, png = self._new("figures", name, ".pdf", ".png")
        plt.close(figure)  # else the inline backend shows it again at the end of the cell
        if self.saves_figures:
            with whole(pdf) as pdf_part, whole(png) as png_part:
                # Without a date it is the same from run to run.
                figure.savefig(pdf_part, metadata={"CreationDate": None})
                figure.savefig(png_part)
        return figure

    def table(self, name: str, rows: Iterable[dict[str, object]], text_columns: int = 1) -> pd.DataFrame:
        """Save a table of rows, column → value, as LaTeX; returns it to be shown. The first `text_columns` are text.
        Raises `T1Error` for a name of other characters than letters, digits, _ and -, or that another cell uses."""
        (file,) = self._new("tables", name, ".tex")
        made = make_table(rows)
        file.write_text(to_latex(made, text_columns), encoding="utf-8", newline="\n")
        return made

    def number(self, key: str, value: Any, unit: str = "", fmt: str | None = None) -> None:
        """Record a number that texts quote by its key, such as `t1m1.own.slide.wall_ms`; `fmt` as `format` takes it.
        Raises as `Numbers.set`, and `T1Error` for a key that another cell uses."""
        self._cells.draw(key)
        self._numbers.set(key, value, unit, fmt)

    def finish(self) -> None:
        """Save records and numbers. Unless the command `run` drives the notebook, also publish: the whole folder (which
        `run` does not count as up to date, as it lacks executed.ipynb) or, with `measure` false, the finished run's new
        figures, tables and numbers. Raises `T1Error` if a cell has yet to run, or to run again."""
        late = [f"`{cell.title}`: {why}" for cell, why in self._cells.out_of_date()]
        named = shorten("; ".join(late), _NAMED, placeholder="…")
        require(not late, f"cells to run again before this one, in this order: {len(late)}. {named}")
        self._require_whole()
        self._tell_unsaved()
        given = self.params.checked()
        final = paths.outputs(given["profile"], self.experiment)
        newer = f"{paths.shown(final)} holds other samples than those drawn here; restart the kernel, run all cells"
        require(self._measures or manifest.entry(final / "samples.csv") == self._drawn_from, newer)
        if self._driven:
            self._complete(self.outdir, given)
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        # A copy is published: cells that are run again afterwards write to `outdir`, and change nothing published.
        with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=final.parent) as beside:
            copied = shutil.copytree(self.outdir, Path(beside) / self.experiment)
            self._complete(copied, given)
            if self._measures:
                manifest.publish(copied, final)
            else:
                same = {*self._ran.values()} <= {cell["source"] for cell in self._saved}  # else what drew is not in the
                drew = {"notebook": fingerprint.notebook(self.experiment) if same else ""}  # saved file: draw it again
                manifest.replace_drawn(copied, final, self._made_of | drew)

    def _complete(self, folder: Path, given: params.Values) -> None:
        """Write the numbers and, if they are this run's, the samples and manifest to `folder`. Drop figures, tables and
        numbers that none of the cells up to the running one made when it last ran."""
        drawn = self._cells.drawn()
        for path in [*folder.glob("figures/*.*"), *folder.glob("tables/*.*")]:
            if f"{path.parent.name}/{path.stem}" not in drawn:
                path.unlink()
        numbers = Numbers({key: number for key, number in self._numbers.items() if key in drawn})
        numbers.save_json(folder / "numbers.json")
        numbers.save_tex(folder / "numbers.tex")
        if self._measures:
            self.records.save(folder / "samples.csv")
            modules = {name: self._made_of["modules"].get(name) for name in fingerprint.loaded()}
            about = self._about | {"profile": given["profile"], "made_of": self._made_of | {"modules": modules}}
            manifest.write(folder, parameters=given, seconds=time.perf_counter() - self._clock, **about)


def redraw(profile: str, experiment: str) -> list[str]:
    """Make all figures, tables and numbers of a finished run again; returns the names of the files. If a cell fails,
    everything stays as it was. Raises `T1Error` without a finished run, or if its samples have changed since."""
    with tempfile.TemporaryDirectory() as fresh:
        run = run_cells(profile, experiment, Path(fresh))
        return manifest.replace_drawn(Path(fresh), paths.outputs(profile, experiment), run._made_of)


def run_cells(profile: str, experiment: str, folder: Path, figures: bool = True) -> Run:
    """Run a notebook's cells without measuring, on a finished run's samples, into `folder`. Raises as `redraw`."""
    content, known = manifest.require_finished(paths.outputs(profile, experiment), {}), params.declared(experiment)
    able = "measure" in known
    require(able, f"{experiment} has no parameter `measure: bool = True`, by which it draws without measuring")
    given = params.resolve(experiment, profile)  # for what the run did not have
    given |= {name: value for name, value in content["parameters"].items() if name in known} | {"measure": False}
    set_by_papermill = "\n".join([params.INJECTED, *(f"{name} = {value!r}" for name, value in given.items())])
    kernel = {"__name__": f"{experiment}.ipynb", "In": [set_by_papermill], "display": display}
    namespace: dict[str, Any] = kernel | given
    run = namespace[_RUN] = Run(experiment, namespace, folder)
    run.saves_figures = figures
    for cell in params.code_cells(paths.notebook(experiment)):
        source = "" if params.holds_parameters(cell) else cell["source"]
        run._begin(source)
        try:
            with redirect_stdout(io.StringIO()):
                exec(compile(source, namespace["__name__"], "exec"), namespace)
        except T1Error:
            raise
        except Exception as error:
            told = f"cell `{params.first_line(source)}`: {type(error).__name__}: {error}"
            raise T1Error(f"{namespace['__name__']}, {told}"[:280]) from error
    return run
