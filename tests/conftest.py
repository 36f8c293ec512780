"""A throw-away checkout with small notebooks, and smoke runs of the real ones in a copy of this checkout."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest
from copies import CHECKOUT, copy_kit, python
from filelock import FileLock
from interpreter import mend

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: products as small as these are slower on two
mend()

PARAMETERS = 'profile: str = "smoke"  # which machine\nsteps: int = 3  # measured steps\nrate: float = 0.5\n'
START = "from t1lib.kit.run import Run\nrun = Run.start({name!r}, globals())\n"
MEASURE = 'for step in range(steps):\n    run.records.put("slide", "", {"wall_ms": step * rate}, step)\n'
SAMPLES = "variant,phase,step,metric,unit,value\nslide,,0,wall,ms,1.5\n"  # of a run that is finished
EXPERIMENTS = ("cce", "chunks", "convergence", "frontier", "parallel", "t1m1", "t1m3")
FAST = "t1m3"  # the experiment whose run the fast tests read; it has a report


class Checkout:
    """A root with notebooks/ and params/smoke/."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "notebooks").mkdir()
        (root / "params" / "smoke").mkdir(parents=True)

    def add(self, name: str, *cells: str, parameters: str = PARAMETERS, yaml: str = "steps: 2\n") -> Path:
        """Write a notebook: parameters, start, `cells` (by default one that measures), finish; and what smoke sets."""
        self.params(name, yaml)
        sources = [parameters, START.format(name=name), *(cells or (MEASURE,)), "run.finish()"]
        return self.save(name, {f"cell{number}": source for number, source in enumerate(sources)})

    def save(self, name: str, cells: dict[str, str]) -> Path:
        """Write a notebook's file with these cells, by their ids, as JupyterLab does. The first one has parameters."""
        from nbformat import v4  # here: the tests of heads and training need no notebooks

        notebook = v4.new_notebook(cells=[v4.new_code_cell(source, id=key) for key, source in cells.items()])
        notebook.cells[0].metadata["tags"] = ["parameters"]
        notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        notebook.metadata |= {"language_info": {"name": "python"}, "t1": {"title": f"About {name}"}}
        path = self.root / "notebooks" / f"{name}.ipynb"
        path.write_text(json.dumps(notebook))
        return path

    def finish(self, folder: Path, name: str = "demo") -> None:
        """Leave in `folder` a finished run of a notebook under smoke, as if `python -m t1lib run` had made it."""
        from t1lib import fingerprint, params
        from t1lib.measure import manifest

        folder.mkdir(parents=True)
        (folder / "samples.csv").write_text(SAMPLES)
        (folder / "executed.ipynb").write_text("{}")
        made_of = {"notebook": fingerprint.notebook(name), "modules": fingerprint.everything()}
        keys = {"experiment": name, "profile": "smoke", "parameters": params.resolve(name, "smoke")}
        manifest.write(folder, **keys, **manifest.git_state(), made_of=made_of, seconds=1.23)

    def params(self, name: str, yaml: str, profile: str = "smoke") -> None:
        path = self.root / "params" / profile / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml)

    def outputs(self, name: str) -> Path:
        return self.root / "outputs" / "smoke" / name


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left():
    """Destroy a process group that a test module leaves behind: mode fsdp creates one."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def fork_server_of_the_module():
    """Each test module has its own, which imports what that module's processes need: one that another has left knows
    other modules, so that every process would import for seconds. (Python 3.11 does not hand `sys.path` to it.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield
    forkserver._forkserver._stop()


@pytest.fixture(scope="session")
def loaded_modules() -> Callable[[], list[str]]:
    """`fingerprint.loaded`, which parses every module that is loaded, asked once."""
    from t1lib import fingerprint

    return cache(fingerprint.loaded)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_modules: Callable[[], list[str]]) -> Checkout:
    monkeypatch.setenv("T1_ROOT", str(tmp_path))
    monkeypatch.delenv("T1_STAGING", raising=False)
    monkeypatch.setattr("t1lib.fingerprint.loaded", loaded_modules)
    return Checkout(tmp_path)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`command(*arguments)`: what `python -m t1lib` prints with these. code: that it must end with"""
    from t1lib.__main__ import main

    def run(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == code
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def bad_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`bad_command(message, *arguments)`: assert that it ends with one short error that holds `message`; returns it."""
    from t1lib.__main__ import main

    def run(message: str, *arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert "error: " in error and message in error and "Traceback" not in error, error
        assert error.count("\n") <= 2 and len(error) < 600, error
        return error

    return run


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`smoke_run(*experiments)`: a checkout, a value for T1_ROOT, with finished smoke runs of these, copied from the
    real one where they are up to date there. Other tests use it, too, and other workers: copy it before changing it."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smoke"

    def run(*experiments: str) -> Path:
        with FileLock(f"{root}.lock"):
            if not root.exists():
                copy_kit(root, "report")
            for name in experiments:
                folder, made = Path("outputs", "smoke", name), root / f"{name}.made"
                if (CHECKOUT / folder / "manifest.json").is_file() and not made.exists():
                    shutil.copytree(CHECKOUT / folder, root / folder)
                if not made.exists():
                    python("-m", "t1lib", "run", name, "--profile", "smoke", cwd=root, T1_ROOT=str(root))
                    made.touch()
        return root

    return run


EACH = [pytest.param(name, marks=[] if name == FAST else [pytest.mark.slow]) for name in EXPERIMENTS]


@pytest.fixture(scope="session", params=EACH)
def finished(request: pytest.FixtureRequest, smoke_run: Callable[..., Path]) -> Path:
    """The folder of each experiment's finished smoke run."""
    return smoke_run(request.param) / "outputs" / "smoke" / request.param
