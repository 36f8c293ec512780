"""Makes the figures, tables and numbers of a finished run again from its samples, by its notebook's own cells."""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

from t1lib import params, paths
from t1lib.errors import T1Error, require
from t1lib.kit.run import _RUN, Run
from t1lib.measure import manifest


def redraw(profile: str, experiment: str) -> list[str]:
    """Make all figures, tables and numbers of a finished run again; returns the names of the files.

    The manifest takes their new hashes and keeps the rest; if a cell fails, everything stays as it was.
    Raises `T1Error` if there is no finished run, or if its samples have changed since it finished.
    """
    with tempfile.TemporaryDirectory() as fresh:
        run_cells(profile, experiment, Path(fresh))
        return manifest.replace_drawn(Path(fresh), paths.outputs(profile, experiment))


def run_cells(profile: str, experiment: str, folder: Path, figures: bool = True) -> None:
    """Run a notebook's cells in this process, without measuring, on the samples of a finished run; its files go to
    `folder`. What the cells print is not shown. Raises as `redraw`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = manifest.require_finished(paths.outputs(profile, experiment), {})
    known = params.declared(experiment)
    able = "measure" in known
    require(able, f"{experiment} has no parameter `measure: bool = True`, by which it draws without measuring")
    given = {name: parameter.default for name, parameter in known.items()}
    given |= {name: value for name, value in content["parameters"].items() if name in known} | {"measure": False}
    set_by_papermill = "\n".join([params.INJECTED, *(f"{name} = {value!r}" for name, value in given.items())])
    namespace: dict[str, Any] = {"__name__": f"{experiment}.ipynb", "In": [set_by_papermill], **given}
    run = namespace[_RUN] = Run(experiment, namespace, folder)
    run.saves_figures = figures
    for cell in params.code_cells(paths.notebook(experiment)):
        source = "" if params.holds_parameters(cell) else params.source(cell)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, namespace["__name__"], "exec"), namespace)
        except T1Error:
            raise
        except Exception as error:
            first = source.strip().partition("\n")[0][:60]
            told = f"{namespace['__name__']}, cell `{first}`: {type(error).__name__}: {error}"[:280]
            raise T1Error(told) from error
