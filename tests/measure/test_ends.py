"""A process for every variant, and ranks: turns, what they bring back, how each can end, and that none is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch
import torch.distributed as dist
from copies import wait_for

from t1lib.errors import T1Error, UnavailableError
from t1lib.measure.isolate import VariantFailed, measure_variants
from t1lib.measure.parallel import measure_ranks
from t1lib.measure.records import Records, statuses
from t1lib.memory import is_out_of_memory

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def stumble(error):
    raise error


WAYS = {  # to end, in the process of a variant or rank
    "raises": lambda: stumble(ValueError("this is what it says\nin two lines")),
    "refuses": lambda: stumble(T1Error("bad input")),
    "is missing": lambda: stumble(UnavailableError("not here")),
    "oom": lambda: stumble(MemoryError("no memory")),
    "exits": lambda: os._exit(7),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": lambda: time.sleep(600),
}


def gone(pids, seconds: float = 5) -> bool:
    def ended(pid):
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    return wait_for(lambda: all(map(ended, pids)), seconds)


# A process for every variant


class Session:
    def __init__(self, end: str = "") -> None:
        if end:
            self.end(end)

    def pid(self) -> int:
        return os.getpid()

    def end(self, how: str) -> None:
        WAYS[how]()


def measure(variants, built=None, together=True):
    """Statuses of variants of three turns, given as name → what else happens in the second; the turns that were taken,
    and the processes, of which none is left. built: how a process ends before it is built"""
    records, turns, pids = Records(), [], []

    def protocol(name, call):
        for turn in "012":
            turns.append(name + turn)
            pids.append(call("pid"))
            if turn == "1" and variants[name]:
                variants[name](call, records, pids)
            yield

    settings = {name: {"end": (built or {}).get(name, "")} for name in variants}
    try:
        measure_variants(Session, settings, protocol, records, together, phase="here")
    finally:
        assert gone(pids)
    assert {row["phase"] for row in records.rows} == {"here"}
    return statuses(records.frame()), turns, pids


def ends(how):
    return lambda call, *_: call("end", how=how)


def test_variants_run_in_processes_of_their_own_in_turn_or_one_after_the_other():
    for together, order in ((True, "A0 B0 A1 B1 A2 B2"), (False, "A0 A1 A2 B0 B1 B2")):
        found, turns, pids = measure({"A": None, "B": None}, together=together)
        assert found == {"A": "ok", "B": "ok"} and turns == order.split() and len({os.getpid(), *pids}) == 3
    wrong = {"A": lambda call, records, pids: records.status("A", "wrong", phase="here")}
    assert measure(wrong)[0] == {"A": "wrong"}  # a status that the protocol gave stays


@pytest.mark.parametrize(
    ("how", "status"), [("oom", "oom"), pytest.param("killed", "oom", marks=posix), ("is missing", "unavailable")]
)
def test_a_variant_that_cannot_run_or_be_built_is_a_status_and_the_others_run_on(how, status):
    found, turns, _ = measure({"A": ends(how), "B": None, "C": None}, built={"B": how})
    assert found == {"A": status, "B": status, "C": "ok"} and turns[-2:] == ["C1", "C2"]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("refuses", T1Error, r"\Abad input\Z"),  # as it was
        ("raises", VariantFailed, r"(?s)Traceback.*in stumble.*ValueError: this is what it says"),
        ("exits", VariantFailed, "exit code 7"),
    ],
)
def test_any_other_end_of_a_variant_is_an_error_with_its_traceback_or_exit_code(how, error, message):
    for second, built in ((ends(how), {}), (None, {"B": how})):
        with pytest.raises(error, match=message):
            measure({"A": None, "B": second}, built)


@posix
def test_an_interrupt_ends_all_variants_even_in_a_call():
    """As Ctrl-C does: the signal reaches the processes, too, but it is the notebook that ends them."""

    def interrupted(call, records, pids):
        for place, pid in enumerate((*pids, os.getpid())):
            Timer(0.5 + place / 10, os.kill, (pid, signal.SIGINT)).start()
        call("end", how="sleeps")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell there is none
    try:
        with pytest.raises(KeyboardInterrupt):
            measure({"A": None, "B": interrupted})
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_says_that_memory_ran_out():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: invalid argument"))
    assert not is_out_of_memory(ValueError("out of memory"))


# Ranks


def task(records, device, phase, pids, how=""):
    """Sum the ranks, counted from 1. Then the last one ends in one of `WAYS`, if named, and the others wait for it."""
    (Path(pids) / str(os.getpid())).touch()
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    records.put("all", phase, {"sum": total})
    records.put("all", phase, {"threads": torch.get_num_threads()})
    print(f"this is rank {dist.get_rank()}")
    if how and dist.get_rank() == dist.get_world_size() - 1:
        WAYS[how]()
    dist.all_reduce(total)


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def run(folder, device="cpu", limit=60.0, **settings):
    """The records of the task on two ranks, of which none is left, however it ends."""
    records, settings = Records(), settings | {"pids": str(folder)}
    try:
        measure_ranks(records, task, settings, 2, name="here", variants=["A", "B"], device=device, limit=limit)
    finally:
        assert len(noted(folder)) == 2 and gone(noted(folder), 0)
    return records


def test_what_rank_0_records_and_prints_comes_back(tmp_path, capfd):
    threads = max(1, torch.get_num_threads() // 2)  # the ranks share the cores
    found = [(row["phase"], row["metric"], row["value"]) for row in run(tmp_path).rows]
    assert found == [("here/2", "sum", 3.0), ("here/2", "threads", threads)]
    assert capfd.readouterr() == ("this is rank 0\n", "")


ON_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("how", "message", "device"),
    [
        ("raises", r"\Arank 1 of 2: ValueError: this is what it says\nTraceback (?s:.*)in stumble", "cpu"),
        ("refuses", r"\Abad input\Z", "cpu"),
        ("exits", r"\Arank 1 of 2: the process ended with exit code 7\Z", "cpu"),
        ("sleeps", r"\Arank 0, 1 of 2 took longer than 3 s\Z", "cpu"),
        pytest.param("exits", "rank 1 of 2: the process ended", "cuda", marks=ON_GPU),
        pytest.param("sleeps", r"\Arank (0, )?1 of 2 took", "cuda", marks=ON_GPU),
    ],
)
def test_a_rank_that_fails_or_sleeps_ends_all_with_its_message(tmp_path, how, message, device):
    limit = 3.0 if (how, device) == ("sleeps", "cpu") else 40.0
    with pytest.raises(T1Error if how == "refuses" else VariantFailed, match=message):
        run(tmp_path, device, limit, how=how)


@pytest.mark.parametrize(
    ("how", "why"), [("oom", "no memory"), pytest.param("killed", "the process was killed: host memory", marks=posix)]
)
def test_no_memory_on_a_rank_is_a_status(tmp_path, capfd, how, why):
    frame = run(tmp_path, how=how).frame()
    assert statuses(frame) == {"A": "oom", "B": "oom"} and set(frame["phase"]) == {"here/2"}
    assert capfd.readouterr() == ("".join(f"here/2: {name} is oom: rank 1 of 2: {why}\n" for name in "AB"), "")


@posix
@pytest.mark.parametrize("end", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_ranks_end_with_the_process_that_started_them(tmp_path, end):
    # In a background job, Ctrl-C is ignored until somebody asks for it.
    code = f"""import signal, test_ends
signal.signal(signal.SIGINT, signal.default_int_handler)
task = test_ends.task, {{"how": "sleeps", "pids": {str(tmp_path)!r}}}
test_ends.measure_ranks(test_ends.Records(), *task, 2, name="", variants=[], device="cpu", limit=600.0)"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert wait_for(lambda: len(noted(tmp_path)) == 2, 60), "the ranks did not begin"
        launcher.send_signal(getattr(signal, end))
        launcher.wait(20)
    finally:
        launcher.kill()
    assert gone(noted(tmp_path), 20)
