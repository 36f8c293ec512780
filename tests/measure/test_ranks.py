"""Ranks in processes of their own: what they bring back, how each of them can end, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import rank_tasks
import torch

from t1lib.errors import T1Error
from t1lib.measure.isolate import VariantFailed, VariantOutOfMemory
from t1lib.measure.ranks import PATIENCE, measure_ranks, run_ranks
from t1lib.measure.records import Records, statuses

LIMIT = 3.0  # seconds for the rank that sleeps
FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import rank_tasks
from t1lib.measure.ranks import run_ranks
run_ranks(rank_tasks.fail, {"how": "sleeps", "pids": sys.argv[2]}, 2, "cpu", 600.0)
"""


def alive(folder: Path) -> list[int]:
    """The processes that left a file in `folder` and are still running."""
    pids = [int(path.name) for path in folder.iterdir()]
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def fails(folder: Path, how: str, kind: type, message: str, device: str = "cpu", limit: float = 60.0) -> None:
    """Assert that a run whose last rank ends like this raises this, and that no rank is left."""
    with pytest.raises(kind, match=message):
        run_ranks(rank_tasks.fail, {"how": how, "pids": str(folder)}, 2, device, limit)
    assert len(list(folder.iterdir())) == 2 and alive(folder) == []


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raises", VariantFailed, r"\Arank 1 of 2: ValueError: this is what it says\nTraceback (?s:.*)in stumble"),
        ("refuses", T1Error, r"\Abad input\Z"),
        ("oom", VariantOutOfMemory, r"\Arank 1 of 2: no memory\Z"),
        ("exits", VariantFailed, r"\Arank 1 of 2: the process ended with exit code 7\Z"),
        pytest.param(
            "killed", VariantOutOfMemory, r"\Arank 1 of 2: the process was killed: host memory\Z",
            marks=pytest.mark.skipif(os.name != "posix", reason="signals of POSIX"),
        ),
    ],
)  # fmt: skip
def test_a_rank_that_fails_ends_all_with_its_message(tmp_path, how, kind, message):
    fails(tmp_path, how, kind, message)


def test_a_rank_that_sleeps_ends_all_with_where_they_are(tmp_path):
    began = time.monotonic()
    message = rf"\Arank 0, 1 of 2 took longer than {LIMIT:g} s\n(?s:rank 0:.* in all_reduce\n.*rank 1:.* in oversleep)"
    fails(tmp_path, "sleeps", VariantFailed, message, limit=LIMIT)
    assert time.monotonic() - began < LIMIT + PATIENCE + 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how, message", [("exits", "rank 1 of 2: the process ended"), ("sleeps", "rank 0, 1 of 2 ")])
def test_a_rank_that_dies_on_a_gpu_ends_all(tmp_path, how, message):
    fails(tmp_path, how, VariantFailed, message, device="cuda", limit=40.0)


def test_what_rank_0_records_and_prints_comes_back_and_ranks_share_the_cores(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    records = Records()
    where = {"name": "sum", "variants": ["all"], "device": "cpu", "limit": 60.0}
    measure_ranks(records, rank_tasks.add_up, {"pids": str(tmp_path)}, 2, **where)
    assert [(row["phase"], row["metric"], row["value"]) for row in records.rows] == [
        ("sum/2", "sum", 3.0),
        ("sum/2", "threads", 3.0),
    ]
    assert capfd.readouterr() == ("this is rank 0\n", "")
    assert len(list(tmp_path.iterdir())) == 2 and alive(tmp_path) == []


def test_no_memory_is_a_status(monkeypatch, capsys):
    def none_left(*arguments):
        raise VariantOutOfMemory("rank 0 of 2: no memory\nTraceback")

    monkeypatch.setattr("t1lib.measure.ranks.run_ranks", none_left)
    records = Records()
    measure_ranks(records, rank_tasks.add_up, {}, 2, name="sum", variants=["A", "B"], device="cpu", limit=1.0)
    frame = records.frame()
    assert statuses(frame) == {"A": "oom", "B": "oom"} and set(frame["phase"]) == {"sum/2"}
    assert capsys.readouterr().out == "sum/2: oom, rank 0 of 2: no memory\n"


@pytest.mark.parametrize("end", ["SIGKILL", "SIGINT"])
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
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
