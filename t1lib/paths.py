"""Where the kit's folders are, whatever the working directory is.

papermill runs a kernel in the caller's folder and JupyterLab in the notebook's, so every path
starts from the one root.
"""

import os
from pathlib import Path

from t1lib.errors import T1Error, require


def _is_root(folder: Path) -> bool:
    return (folder / "notebooks").is_dir() and (folder / "params").is_dir()


def root() -> Path:
    """Return the checkout: `T1_ROOT`, or the first folder upwards that holds notebooks/ and params/.

    The search starts at the working directory, then at this file (an editable install).
    Raises `T1Error` when there is none.
    """
    if named := os.environ.get("T1_ROOT"):
        folder = Path(named).expanduser().resolve()
        require(_is_root(folder), f"T1_ROOT is {str(folder)!r}, which holds no notebooks/ and params/ folders")
        return folder
    here, this = Path.cwd(), Path(__file__).resolve()
    found = next(filter(_is_root, (here, *here.parents, *this.parents)), None)
    if found is None:
        raise T1Error(
            f"no folder with notebooks/ and params/ at or above {str(here)!r};\n"
            "run from inside the checkout, or set T1_ROOT to it"
        )
    return found


def notebooks() -> Path:
    """Return the folder that holds one notebook per experiment."""
    return root() / "notebooks"


def notebook(experiment: str) -> Path:
    """Return the path of an experiment's notebook, whether or not it exists."""
    return notebooks() / f"{experiment}.ipynb"


def params_file(profile: str, experiment: str) -> Path:
    """Return the path of params/<profile>/<experiment>.yaml, whether or not it exists."""
    return root() / "params" / profile / f"{experiment}.yaml"


def outputs(profile: str, experiment: str) -> Path:
    """Return outputs/<profile>/<experiment>, whether or not it exists."""
    return root() / "outputs" / profile / experiment


def staging(profile: str, experiment: str) -> Path:
    """Return the folder that the driver fills before it is published as `outputs(profile, experiment)`.

    It lies beside the final folder, so that publishing is a rename within one file system.
    """
    return root() / "outputs" / profile / f".{experiment}.partial"


def shown(path: Path) -> str:
    """Return `path` relative to the root with forward slashes, for messages and manifests."""
    return (path.relative_to(root()) if path.is_relative_to(root()) else path).as_posix()
