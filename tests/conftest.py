"""A throw-away checkout with small notebooks, for the tests of parameters, manifests and the driver."""

import json
import sys
from pathlib import Path

import pytest

PARAMETERS = 'profile: str = "smoke"  # which machine\nsteps: int = 3  # measured steps\nrate: float = 0.5\n'
START = "from t1lib.kit.run import Run\nrun = Run.start({name!r}, globals())\n"
MEASURE = 'for step in range(steps):\n    run.records.add("slide", "wall", step * rate, "ms", step=step)\n'


SMOKE = ("tests/report/test_report.py", "tests/test_latex.py", "tests/test_notebooks.py")
"""Tests that read runs of all experiments, which one process makes for them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under `-n` without `--dist`, run the tests of a file in one process, and those of all SMOKE files in one."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "smoke" if file in SMOKE else file

    return ByFile(config, log)


class Checkout:
    """A root with notebooks/ and params/smoke/."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "notebooks").mkdir()
        (root / "params" / "smoke").mkdir(parents=True)

    def add(self, name: str, *cells: str, parameters: str = PARAMETERS, yaml: str = "steps: 2\n") -> Path:
        """Write a notebook: parameters, start, `cells` (by default one that measures), finish."""
        sources = [parameters, START.format(name=name), *(cells or (MEASURE,)), "run.finish()"]
        path = self.root / "notebooks" / f"{name}.ipynb"
        kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
        metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "t1": {"title": f"About {name}"}}
        content = {"cells": [_cell(i, text) for i, text in enumerate(sources)], "metadata": metadata}
        path.write_text(json.dumps({**content, "nbformat": 4, "nbformat_minor": 5}))
        self.params(name, yaml)
        return path

    def params(self, name: str, yaml: str, profile: str = "smoke") -> None:
        path = self.root / "params" / profile / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml)

    def outputs(self, name: str) -> Path:
        return self.root / "outputs" / "smoke" / name


def _cell(index: int, text: str) -> dict:
    metadata = {"tags": ["parameters"]} if index == 0 else {}
    cell = {"cell_type": "code", "id": f"cell-{index}", "metadata": metadata}
    return {**cell, "source": text, "outputs": [], "execution_count": None}


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left():
    """Destroy a process group that a test module leaves behind: mode fsdp creates one, which only `close` destroys."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.setenv("T1_ROOT", str(tmp_path))
    monkeypatch.delenv("T1_STAGING", raising=False)
    return Checkout(tmp_path)
