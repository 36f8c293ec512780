"""Mode `fsdp`, and the training command, on two and three processes, which run this file, against mode `gpu` in one."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from copies import wait_for
from fsdp_cases import cases
from processes import SIZES, Cases, Outcomes, as_torchrun_does, forked, free_ports, next_port, work
from transformers import AutoModelForCausalLM

from t1lib.__main__ import main
from t1lib.errors import require
from t1lib.text.session import LanguageSession
from t1lib.train.checkpoint import META
from t1lib.train.ranks import EXIT_LOST

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the worker forks, and gloo listens on lo")
pytestmark = [pytest.mark.slow, LINUX]

SMALL = ["train", "--model", "tiny", "--change", "num_hidden_layers", "2", "--limit", "300KB", "--vocabulary", "300",
         "--seq", "16", "--batch", "5", "--device", "cpu", "--head", "chunked", "--schedule", "constant"]  # fmt: skip


def commands(size: int, folder: Path) -> Cases:
    if size == 3:
        more = "the command goes on with one more process"
        return {more: partial(goes_on, folder / "run")}
    return {
        "the command trains as one process does": partial(trains, folder / "run"),
        "the command, an interrupt of one process": partial(interrupted, folder / "interrupted"),
        "the command, other modes": partial(one_message, folder, ["--mode", "ckpt"], "trains in one process"),
        "the command, too few rows": partial(one_message, folder, ["--mode", "fsdp", "--batch", "1"], "2 rows or more"),
    }


def call(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
    if dist.is_initialized():  # meant to end with the process
        dist.destroy_process_group()
    next_port()
    return code, out.getvalue(), err.getvalue()


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def trains(folder: Path) -> None:
    own = ["--mode", "fsdp", "--steps", "4", "--eval-rows", "3", "--export"]
    code, out, err = call(*SMALL, *own, "--out", str(folder))
    assert code == 0, err
    first = os.environ["RANK"] == "0"
    assert ("parameters" in out and out.count("\ncheckpoint") == 1) if first else out == err == "", out + err
    assert len(losses(folder)) == 4
    AutoModelForCausalLM.from_pretrained(folder / "model")


def goes_on(folder: Path) -> None:
    code, _, err = call("train", "--resume", "--out", str(folder), "--steps", "6", "--eval-every", "0")
    assert code == 0, err
    assert len(losses(folder)) == 6


def interrupted(folder: Path) -> None:
    """Only the last rank is interrupted: all ranks stop after the same step, with a checkpoint."""
    with patch.object(LanguageSession, "step", in_step(2, lambda: os.kill(os.getpid(), signal.SIGINT))):
        code, _, err = call(*SMALL, "--mode", "fsdp", "--steps", "50", "--eval-every", "0", "--out", str(folder))
    assert code == 130
    assert err == ("interrupted after step 2; --resume goes on\n" if os.environ["RANK"] == "0" else ""), err
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [META, "step-00000002"]


def in_step(number: int, happens: Callable[[], None]) -> Callable:
    """A step that, on the last rank only, calls `happens` at the start of step `number`."""
    plain, last = LanguageSession.step, int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def step(self: LanguageSession):
        if last and self.trainer.steps == number - 1:
            happens()
        return plain(self)

    return step


def one_message(folder: Path, arguments: list[str], message: str) -> None:
    """Only the first process to see the error reports it; a launcher would end the others if they still ran."""
    code, out, err = call(*SMALL, *arguments, "--out", str(folder / "refused"))
    told = folder / arguments[-1]
    if err:
        told.touch(exist_ok=False)  # no other one has
        assert err.startswith("error: ") and message in err and err.count("\n") == 1, err
    assert (code, out) == (2 if err else 1, "") and wait_for(told.exists, 20)
    assert not (folder / "refused").exists()


ENDS: dict[str, Callable[[], None]] = {
    "fails": partial(require, False, "rank 1 has had enough"),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def ended(name: str, folder: Path) -> None:
    """Run two processes, of which the second ends in its second step as `name` says; write down how both ended."""
    folder.mkdir()
    codes = forked(2, partial(_ends, ENDS[name], folder, free_ports(2)))
    (folder / "codes.json").write_text(json.dumps(codes))


def _ends(how: Callable[[], None], folder: Path, ports: list[int], rank: int) -> None:
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    as_torchrun_does(rank, 2, ports)
    arguments = ["--mode", "fsdp", "--steps", "50", "--eval-every", "0", "--out", str(folder / "run")]
    with patch.object(LanguageSession, "step", in_step(2, how)):
        sys.exit(main([*SMALL, *arguments]))


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
    """By itself: `forked` would kill it."""
    outcomes.of(2)
    found = outcomes.folder / name
    first, last = ((found / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(2))
    assert json.loads((found / "codes.json").read_text()) == [EXIT_LOST, 2 if name == "fails" else -9]
    assert "Traceback" not in first + last
    if name == "fails":
        assert "error" not in first and last == "error: rank 1 has had enough\n"
    else:
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
