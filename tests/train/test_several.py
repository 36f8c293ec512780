"""Mode `fsdp` on two and three processes, which run this file as a script, against mode `gpu` in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp_cases import cases
from fsdp_command import ENDS, SMALL, commands, ended, losses
from processes import SIZES, Outcomes, work

from t1lib.__main__ import main
from t1lib.train.ranks import EXIT_LOST

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the worker forks, and gloo listens on lo"),
]

NAMES = [(size, name) for size in SIZES for name in {**cases(size, Path()), **commands(size, Path())}]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), tmp_path_factory.mktemp("several"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_a_run_in_two_processes_then_three_then_one(outcomes, tmp_path):
    """It has the losses of a run in mode gpu that was never stopped."""
    outcomes.of(3)
    run = outcomes.folder / "run"
    assert main(["train", "--resume", "--out", str(run), "--steps", "8", "--eval-every", "0"]) == 0
    assert main([*SMALL, "--steps", "8", "--eval-every", "0", "--out", str(tmp_path / "gpu")]) == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "gpu"), rel=1e-5)


@pytest.mark.parametrize("name", ENDS)
def test_one_process_ends_the_other(outcomes, name):
    outcomes.of(2)
    found = json.loads((outcomes.folder / name / "ended.json").read_text(encoding="utf-8"))
    first, last = found["outputs"]
    assert found["seconds"] < 30 and "Traceback" not in first + last
    if name == "fails":
        assert found["codes"] == [EXIT_LOST, 2]
        assert "error" not in first and last == "error: rank 1 has had enough\n"
    else:
        assert found["codes"] == [EXIT_LOST, -9]
        assert first.count("error: a process of the run was lost: ") == 1 and last == ""


@pytest.mark.parametrize("command, code, processes", [("list chunks", 0, 2), ("list chunks", 0, 1), ("-x", 2, 2)])
def test_ranks_end_without_shutting_the_interpreter_down(command, code, processes):
    """A thread of gloo's may still use it, and would abort the process: two runs of twenty ended so."""
    script = f"import atexit, runpy, sys; atexit.register(print, 'shut down'); sys.argv[1:] = {command.split()}"
    script = f"{script}; runpy.run_module('t1lib', run_name='__main__')"
    environment = os.environ | {"WORLD_SIZE": str(processes)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (run.returncode, "shut down" in run.stdout) == (code, processes == 1)


if __name__ == "__main__":
    for name in ENDS:
        ended(name, Path(sys.argv[1]) / name)
    work(Path(sys.argv[1]), cases, commands)
