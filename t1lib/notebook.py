"""What an experiment's notebook calls: `Run` collects its records and saves its figures, tables and numbers.

`redraw` makes the same files again from samples.csv alone, on a machine without a GPU.
"""

import importlib
import json
import os
import shutil
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pandas as pd

from t1lib import paths
from t1lib.errors import T1Error, choose, require
from t1lib.files import write_json
from t1lib.measure import manifest
from t1lib.measure.environment import environment, git_state
from t1lib.measure.records import Numbers, Records
from t1lib.params import check_injected, declared, profiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _registered(kind: str, experiment: str) -> Any:
    """Return FIGURES, TABLES or NUMBERS of an experiment. Imported late, because it imports seaborn."""
    return getattr(importlib.import_module("t1lib.report"), kind, {}).get(experiment)


def _draw(folder: Path, experiment: str, name: str, frame: pd.DataFrame) -> "Figure":
    """Draw one figure and save it as PDF and PNG."""
    import matplotlib.pyplot as plt

    from t1lib.report.style import style

    known = _registered("FIGURES", experiment) or {}
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    with style():  # sizes and font types apply both when a figure is drawn and when it is saved
        figure = known[choose(f"figure of {experiment}:", name, known)](frame)
        # Without a creation date, the PDF is the same from run to run.
        try:
            figure.savefig(folder / "figures" / f"{name}.pdf", metadata={"CreationDate": None})
            figure.savefig(folder / "figures" / f"{name}.png", dpi=150)
        finally:
            plt.close(figure)  # else the inline backend shows it again at the end of the cell
    return figure


def _tabulate(folder: Path, experiment: str, name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Make one table, save its LaTeX, and return it."""
    known = _registered("TABLES", experiment) or {}
    table = known[choose(f"table of {experiment}:", name, known)](frame)
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    text = table.latex if table.latex.endswith("\n") else table.latex + "\n"
    (folder / "tables" / f"{name}.tex").write_text(text, encoding="utf-8", newline="\n")
    return table.frame


def _count(folder: Path, experiment: str, frame: pd.DataFrame, numbers: Numbers) -> None:
    """Compute an experiment's numbers and save them for programs and for LaTeX."""
    compute = _registered("NUMBERS", experiment)
    if compute is not None:
        compute(frame, numbers)
    numbers.save_json(folder / "numbers.json")
    numbers.save_tex(folder / "numbers.tex")


class Run:
    """One run of an experiment, from its parameters to its published folder.

    Attributes: `params` (the parameters as attributes), `records`, `numbers`, `outdir` (where the
    notebook's own files belong), `device` (CUDA if there is a GPU, else the CPU).
    """

    def __init__(self, experiment: str, parameters: dict[str, Any]) -> None:
        import torch

        self.experiment = experiment
        self.profile: str = parameters["profile"]
        self.params = SimpleNamespace(**parameters)
        self.records = Records()
        self.numbers = Numbers()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        git_state()  # raises its errors before anything is measured
        # Taken at the start: an edit made during the run must make the run stale.
        self._made_of = manifest.ingredients(experiment, parameters)
        self._started, self._clock = manifest.utc_now(), time.perf_counter()
        driven = os.environ.get("T1_STAGING")
        self._driven = driven is not None
        self.outdir = Path(driven) if driven else paths.staging(self.profile, experiment)

    @classmethod
    def start(cls, experiment: str, namespace: dict[str, Any]) -> Self:
        """Begin a run in a notebook's second code cell: `run = Run.start("t1m1", globals())`.

        Raises `T1Error` for an undeclared, missing or mistyped parameter, see
        `t1lib.params.check_injected`, and for a profile that params/ does not hold.
        """
        has_profile = "profile" in declared(experiment)
        require(has_profile, f"the notebook of {experiment} must declare the parameter `profile: str`")
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, with this machine's paths in it
        parameters = check_injected(experiment, namespace)
        choose("profile", parameters["profile"], profiles())
        run = cls(experiment, parameters)
        if not run._driven:  # the driver has made the folder, and papermill writes into it
            shutil.rmtree(run.outdir, ignore_errors=True)
        run.outdir.mkdir(parents=True, exist_ok=True)
        return run

    def used(self, name: str, sha256: str) -> None:
        """Note, for the manifest, the hash of something the run read beside its parameters, such as a corpus."""
        path = self.outdir / manifest.INPUTS
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_json(path, known | {name: sha256})

    def draw(self, name: str) -> "Figure":
        """Draw a figure of `t1lib.report.FIGURES` from the records so far, save it, and return it for display."""
        return _draw(self.outdir, self.experiment, name, self._kept())

    def table(self, name: str) -> pd.DataFrame:
        """Make a table of `t1lib.report.TABLES` from the records so far, save it, and return it for display."""
        return _tabulate(self.outdir, self.experiment, name, self._kept())

    def _kept(self) -> pd.DataFrame:
        """The records so far, saved to disk as well, so that a cell that fails later does not lose them."""
        self.records.save(self.outdir / "samples.csv")
        return self.records.frame()

    def finish(self) -> None:
        """Save records, numbers and environment. Without the driver, also publish the folder.

        A folder published this way lacks executed.ipynb, so the driver does not count it as done and would
        redo the run. Afterwards `outdir` is the published folder: a cell that is run again in
        JupyterLab redraws there.
        """
        self.outdir.mkdir(parents=True, exist_ok=True)
        self.records.save(self.outdir / "samples.csv")
        _count(self.outdir, self.experiment, self.records.frame(), self.numbers)
        write_json(self.outdir / "environment.json", environment())
        if not self._driven:
            self._publish()

    def _publish(self) -> None:
        manifest.write(
            self.outdir,
            experiment=self.experiment,
            profile=self.profile,
            parameters=vars(self.params),
            made_of=self._made_of,
            started=self._started,
            seconds=time.perf_counter() - self._clock,
        )
        final = paths.outputs(self.profile, self.experiment)
        if self.outdir != final:
            manifest.publish(self.outdir, final)
            self.outdir = final


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
        for name in _registered("FIGURES", experiment) or {}:
            _draw(fresh, experiment, name, frame)
        for name in _registered("TABLES", experiment) or {}:
            _tabulate(fresh, experiment, name, frame)
        _count(fresh, experiment, frame, Numbers())
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
