"""Where the kit's folders are: papermill runs a kernel in the caller's folder, JupyterLab in the notebook's."""

import os
from pathlib import Path

from t1lib.errors import T1Error, require


def _is_root(folder: Path) -> bool:
    return (folder / "notebooks").is_dir() and (folder / "params").is_dir()


def root() -> Path:
    """The checkout: `T1_ROOT`, or the first folder that holds notebooks/ and params/, upwards from the working folder
    or from this file (an editable install). Raises `T1Error` if there is none, or if it has a t1lib/ that is not
    the code that runs, as when a copy of a checkout uses the environment of the original."""
    here, own = Path.cwd(), Path(__file__).resolve().parent
    if named := os.environ.get("T1_ROOT"):
        folder = Path(named).expanduser().resolve()
        require(_is_root(folder), f"T1_ROOT is {str(folder)!r}; allowed: a folder with notebooks/ and params/")
    else:
        folder = next(filter(_is_root, (here, *here.parents, *own.parents)), None)
    if folder is None:
        raise T1Error(
            f"no folder with notebooks/ and params/ at or above {str(here)!r};\n"
            "run from inside the checkout, or set T1_ROOT to it"
        )
    its = folder / "t1lib"
    told = f"the code that runs is {str(own)!r}, but results would be said to be of {str(its)!r};\n"
    require(not its.is_dir() or its.samefile(own), f"{told}to run the latter, `pip install -e .` in its folder")
    return folder


# The paths of an experiment, whether or not they exist.


def notebook(experiment: str) -> Path:
    return root() / "notebooks" / f"{experiment}.ipynb"


def params_file(profile: str, experiment: str) -> Path:
    return root() / "params" / profile / f"{experiment}.yaml"


def outputs(profile: str, experiment: str) -> Path:
    return root() / "outputs" / profile / experiment


def staging(profile: str, experiment: str) -> Path:
    """The folder that a run fills: beside that of `outputs`, so that publishing is a rename in one file system."""
    return root() / "outputs" / profile / f".{experiment}.partial"


def shown(path: Path) -> str:
    """`path` relative to the root with forward slashes, for messages and manifests."""
    return (path.relative_to(root()) if path.is_relative_to(root()) else path).as_posix()
