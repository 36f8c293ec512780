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
    `folder`. Raises as `redraw`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = manifest.require_finished(paths.outputs(profile, experiment), {})
    known = params.declared(experiment)
    require(
        "measure" in known, f"{experiment} has no parameter `measure: bool = True`, by which it draws without measuring"
    )
    given = {name: value for name, value in content["parameters"].items() if name in known} | {"measure": False}
    cells = params.code_cells(paths.notebook(experiment))
    after = next(i for i, cell in enumerate(cells) if params.holds_parameters(cell)) + 1
    sources = [params.source(cell) for cell in cells]
    values = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    namespace: dict[str, Any] = {"__name__": f"{experiment}.ipynb", "In": [""]}
    _execute([*sources[:after], f"{params.INJECTED}\n{values}"], namespace)
    run = namespace[_RUN] = Run(experiment, namespace, folder)
    run.saves_figures = figures
    _execute(sources[after:], namespace)


def _execute(sources: list[str], namespace: dict[str, Any]) -> None:
    """Run cells one by one; what they print is not shown."""
    for source in sources:
        namespace["In"].append(source)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, namespace["__name__"], "exec"), namespace)
        except T1Error:
            raise
        except Exception as error:
            first = next(filter(str.strip, source.splitlines()), "").strip()[:60]
            told = f"{namespace['__name__']}, cell `{first}`: {type(error).__name__}: {error}"[:280]
            raise T1Error(told) from error
