"""Executes one notebook with papermill, in a kernel that ends when this process is interrupted."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from t1lib import params, paths
from t1lib.measure import manifest


class NotebookError(RuntimeError):
    """A notebook did not reach its end. The message names the cell and the exception, in one line."""


def execute(experiment: str, parameters: Mapping[str, Any], staging: Path) -> None:
    """Execute an experiment's notebook into `staging`/executed.ipynb.

    Raises `NotebookError` for a cell that fails, a kernel that dies, and a notebook that ends
    without `run.finish()`; `KeyboardInterrupt` after the kernel has been shut down.
    """
    executed = staging / "executed.ipynb"
    # The kernel inherits its staging folder, and that this Python's kernels come before the user's own.
    with patch.dict(os.environ, {"T1_STAGING": str(staging), "JUPYTER_PREFER_ENV_PATH": "1"}):
        try:
            _papermill(experiment, parameters, executed)
        except KeyboardInterrupt:
            # Nobody awaits the task of the interrupted cell any more; it may notice that its kernel has ended.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            _stop_kernel()
            raise
        except Exception as error:
            raise NotebookError(_explain(error, executed)) from None
    if not (staging / manifest.NOTES).is_file():
        raise NotebookError("the notebook ended without run.finish()")
    _forget_root(executed)


def _papermill(experiment: str, parameters: Mapping[str, Any], executed: Path) -> None:
    import papermill

    papermill.execute_notebook(
        paths.notebook(experiment),
        executed,
        dict(parameters),
        kernel_name="python3",
        cwd=paths.root(),
        progress_bar=False,
        log_output=False,
        # Else ipykernel warns about TCP without encryption at every start, and of the interrupt that ends it.
        extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
        coalesce_streams=True,  # saves a notebook's progress bar as a single line of output
    )


def _explain(error: Exception, executed: Path) -> str:
    """Return a line that names the cell and the exception."""
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        line = next((text for text in error.source.splitlines() if text.strip()), "").strip()
        told = (error.evalue or "").strip().splitlines()
        what = f"{error.ename}: {told[0][:300]}" if told else error.ename
        return f"cell In [{error.exec_count}] (`{line[:60]}`): {what}"
    # The kernel died: papermill marks every cell as completed, but only cells that it reached have a start time.
    cells = params.code_cells(executed) if executed.is_file() else []
    begun = [cell for cell in cells if cell["metadata"].get("papermill", {}).get("start_time")]
    first = params.source(begun[-1]).strip().partition("\n")[0][:60] if begun else "before the first"
    told = str(error).strip().splitlines()
    return f"cell `{first}`: {type(error).__name__}: {told[0] if told else ''}"


def _stop_kernel() -> None:
    """Kill the kernel and what it started: it runs in a session of its own, which no Ctrl-C at the terminal reaches."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _forget_root(executed: Path) -> None:
    """Make paths into the checkout relative in an executed notebook, because absolute ones name a user's folders."""
    text = executed.read_text(encoding="utf-8")
    escaped = json.dumps(str(paths.root()) + os.sep)[1:-1]
    executed.write_text(text.replace(escaped, ""), encoding="utf-8", newline="\n")
