"""Ranks in processes of their own: what they bring back, how each of them can end, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from t1lib.errors import T1Error
from t1lib.measure.isolate import VariantFailed
from t1lib.measure.ranks import PATIENCE, measure_ranks
from t1lib.measure.records import Records, statuses

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
LIMIT = 3.0  # seconds for the rank that sleeps
FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import test_ranks
task = test_ranks.fail, {"how": "sleeps", "pids": sys.argv[2]}
test_ranks.measure_ranks(test_ranks.Records(), *task, 2, name="", variants=[], device="cpu", limit=600.0)
"""


def add_up(records, device, phase, pids):
    """A task: sum the rank numbers, counted from 1."""
    (Path(pids) / str(os.getpid())).touch()
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    records.add("all", "sum", total, phase=phase)
    records.add("all", "threads", torch.get_num_threads(), phase=phase)
    print(f"this is rank {dist.get_rank()}")


def fail(records, device, phase, how, pids):
    """A task: the last rank ends in one of `WAYS`; the others wait for it in a collective."""
    (Path(pids) / str(os.getpid())).touch()
    dist.all_reduce(torch.ones(1, device=device))  # all have left their note before one of them ends
    if dist.get_rank() == dist.get_world_size() - 1:
        WAYS[how]()
    dist.all_reduce(torch.ones(1, device=device))


def stumble(error):
    raise error


WAYS = {
    "raises": lambda: stumble(ValueError("this is what it says\nin two lines")),
    "refuses": lambda: stumble(T1Error("bad input")),
    "oom": lambda: stumble(MemoryError("no memory")),
    "exits": lambda: os._exit(7),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": lambda: time.sleep(600),
}


def alive(folder: Path) -> list[int]:
    """The processes that left a file in `folder` and are still running."""
    pids = [int(path.name) for path in folder.iterdir()]
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture
def run(tmp_path):
    """Runs a task on two ranks, and returns the records; no rank is left then, however it ends."""

    def run(task, device="cpu", limit=60.0, **settings):
        records, settings = Records(), settings | {"pids": str(tmp_path)}
        try:
            measure_ranks(records, task, settings, 2, name="here", variants=["A", "B"], device=device, limit=limit)
        finally:
            assert len(list(tmp_path.iterdir())) == 2 and alive(tmp_path) == []
        return records

    return run


SLEEPS = rf"\Arank 0, 1 of 2 took longer than {LIMIT:g} s\n(?s:rank 0:.* in all_reduce\n.*rank 1:.* in fail)"


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raises", VariantFailed, r"\Arank 1 of 2: ValueError: this is what it says\nTraceback (?s:.*)in stumble"),
        ("refuses", T1Error, r"\Abad input\Z"),
        ("exits", VariantFailed, r"\Arank 1 of 2: the process ended with exit code 7\Z"),
        ("sleeps", VariantFailed, SLEEPS),
    ],
)
def test_a_rank_that_fails_or_sleeps_ends_all_with_its_message(run, how, kind, message):
    began = time.monotonic()
    with pytest.raises(kind, match=message):
        run(fail, how=how, limit=LIMIT if how == "sleeps" else 60.0)
    assert how != "sleeps" or time.monotonic() - began < LIMIT + PATIENCE + 20


@pytest.mark.parametrize(
    ("how", "why"), [("oom", "no memory"), pytest.param("killed", "the process was killed: host memory", marks=posix)]
)
def test_no_memory_is_a_status(run, capfd, how, why):
    frame = run(fail, how=how).frame()
    assert statuses(frame) == {"A": "oom", "B": "oom"} and set(frame["phase"]) == {"here/2"}
    assert capfd.readouterr() == ("".join(f"here/2: {name} is oom: rank 1 of 2: {why}\n" for name in "AB"), "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("how", "message"), [("exits", "rank 1 of 2: the process ended"), ("sleeps", r"\Arank (0, )?1 of 2 took")]
)
def test_a_rank_that_dies_on_a_gpu_ends_all(run, how, message):
    with pytest.raises(VariantFailed, match=message):
        run(fail, how=how, device="cuda", limit=40.0)


def test_what_rank_0_records_and_prints_comes_back(run, capfd):
    records = run(add_up)
    threads = max(1, torch.get_num_threads() // 2)  # the ranks share the cores
    found = [(row["phase"], row["metric"], row["value"]) for row in records.rows]
    assert found == [("here/2", "sum", 3.0), ("here/2", "threads", threads)]
    assert capfd.readouterr() == ("this is rank 0\n", "")


@posix
@pytest.mark.parametrize("end", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_ranks_end_with_the_process_that_started_them(tmp_path, end):
    command = [sys.executable, "-c", FOREVER, str(Path(__file__).parent), str(tmp_path)]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert until(lambda: len(list(tmp_path.iterdir())) == 2, 60), "the ranks did not begin"
        launcher.send_signal(getattr(signal, end))
        launcher.wait(20)
    finally:
        launcher.kill()
    assert until(lambda: not alive(tmp_path), 20)
