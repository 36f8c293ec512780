"""Ranks started by torchrun: what they bring back, how each of them can end, and that none is left behind."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import rank_tasks
import torch

from t1lib.errors import T1Error, UnavailableError
from t1lib.measure import ranks
from t1lib.measure.isolate import VariantFailed, VariantOutOfMemory
from t1lib.measure.records import Records, statuses

HERE = Path(__file__).parent
LIMIT = 20.0  # seconds for the rank that sleeps: enough for its imports on a busy machine
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


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How rank 1 ends → future of (exception, seconds, number of processes started, processes still alive)."""

    def run(how, pids):
        began = time.monotonic()
        settings, limit = {"how": how, "pids": str(pids)}, LIMIT if how == "sleeps" else 90.0
        try:
            ranks.run_ranks(rank_tasks.fail, settings, 2, "cpu", limit)
        except VariantFailed as error:
            return error, time.monotonic() - began, len(list(pids.iterdir())), alive(pids)

    with ThreadPoolExecutor(2) as pool:  # the first run mostly waits
        folders = {how: tmp_path_factory.mktemp(how) for how in ("sleeps", "raises")}  # not thread-safe
        yield {how: pool.submit(run, how, folder) for how, folder in folders.items()}


def ends_all(future, message, most):
    """Assert that the run ended in time with this message, and that torchrun and both ranks are gone."""
    error, seconds, begun, left = future.result()
    assert begun == 3 and left == []
    assert seconds < most
    with pytest.raises(VariantFailed, match=message):
        raise error


def test_a_rank_that_dies_ends_all_with_its_message(ended):
    ends_all(ended["raises"], r"\Arank 1 of 2: ValueError: this is what it says\nTraceback (?s:.*)in stumble", 60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how, message", [("exits", "rank 1 of 2 ended with exit code 7"), ("sleeps", "2 ranks took")])
def test_a_rank_that_dies_on_a_gpu_ends_all(tmp_path, how, message):
    with pytest.raises(VariantFailed, match=message):
        ranks.run_ranks(rank_tasks.fail, {"how": how, "pids": str(tmp_path)}, 2, "cuda", 2 * LIMIT)
    assert len(list(tmp_path.iterdir())) == 3 and alive(tmp_path) == []


def test_what_rank_0_records_and_prints_comes_back(tmp_path, capfd):
    records = Records()
    kept = {"name": "sum", "variants": ["all"], "device": "cpu", "limit": 60.0}
    ranks.measure_ranks(records, rank_tasks.add_up, {"pids": str(tmp_path)}, [2], **kept)
    assert [(row["phase"], row["metric"], row["value"]) for row in records.rows] == [("sum/2", "sum", 3.0)]
    assert capfd.readouterr() == ("this is rank 0\n", "")
    assert len(list(tmp_path.iterdir())) == 3 and alive(tmp_path) == []


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", FOREVER, str(HERE), str(tmp_path)], stdin=subprocess.DEVNULL)
    try:
        assert until(lambda: len(list(tmp_path.iterdir())) == 3, 60), "the ranks did not begin"
    finally:
        launcher.kill()
        launcher.wait()
    assert until(lambda: not alive(tmp_path), 20)


def left_behind(folder: Path, said: dict[int, tuple[float, str, str]], codes: dict[int, int]) -> Path:
    """What a run of two ranks leaves: errors as (time, kind, text), and torchrun's summary of exit codes."""
    for rank, (at, kind, text) in said.items():
        entry = {"at": at, "rank": rank, "kind": kind, "line": f"Error: {text}", "text": text}
        (folder / f"{rank}.error.json").write_text(json.dumps(entry))
    lines = [f"  rank      : {r} (local_rank: {r})\n  exitcode  : {c} (pid: 9)\n" for r, c in codes.items()]
    (folder / "err").write_text("torchrun says\n" + "".join(lines))
    return folder


@pytest.mark.parametrize(
    "said, codes, kind, message",
    [
        ({0: (2.0, "error", "lost"), 1: (1.0, "error", "first")}, {0: 1, 1: 1}, VariantFailed, "rank 1 of 2: Error: f"),
        ({0: (1.0, "error", "lost")}, {0: 1, 1: 7}, VariantFailed, r"\Arank 1 of 2 ended with exit code 7"),
        ({1: (1.0, "oom", "no memory")}, {1: 1}, VariantOutOfMemory, "no memory"),
        ({1: (1.0, "bad", "bad input")}, {1: 1}, T1Error, r"\Abad input\Z"),
        ({1: (1.0, "unavailable", "not here")}, {1: 1}, UnavailableError, r"\Anot here\Z"),
        ({}, {}, VariantFailed, r"torchrun of 2 ranks failed before they began\ntorchrun says"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_rank_that_failed_first_is_named(tmp_path, said, codes, kind, message):
    folder = left_behind(tmp_path, said, codes)
    with pytest.raises(kind, match=message):
        raise ranks._failure(folder, 2, ranks._exit_codes(folder), 10.0)


def test_no_memory_is_a_status_and_ranks_share_the_cores(monkeypatch):
    def none_left(task, settings, number, device, limit, threads):
        assert (settings, threads) == ({"a": 1, "phase": f"here/{number}"}, 6 // number)
        raise VariantOutOfMemory(f"no memory on rank 0 of {number}\nTraceback")

    monkeypatch.setattr(ranks, "run_ranks", none_left)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    records = Records()
    kept = {"name": "here", "variants": ["A", "B"], "device": "cpu", "limit": 1.0}
    ranks.measure_ranks(records, rank_tasks.add_up, {"a": 1}, [1, 2], **kept)
    frame = records.frame()
    assert [statuses(frame[frame["phase"] == f"here/{n}"]) for n in (1, 2)] == [{"A": "oom", "B": "oom"}] * 2


def test_a_rank_that_sleeps_ends_all_with_where_it_is(ended):
    """The last test here, so that the others run while the rank sleeps."""
    message = rf"\A2 ranks took longer than {LIMIT:g} s: rank 0 in \S+:\d+ all_reduce; rank 1 in \S+:\d+ oversleep\n"
    ends_all(ended["sleeps"], message, LIMIT + ranks.PATIENCE + 10)
