"""A fresh process for every variant, and ranks in processes of their own: how they take turns, what they bring back,
how each of them can end, and that none is left behind."""

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

from t1lib.errors import T1Error, UnavailableError
from t1lib.measure.isolate import VariantFailed, is_out_of_memory, measure_variants
from t1lib.measure.ranks import PATIENCE, measure_ranks
from t1lib.measure.records import Records, statuses

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
KILLED = pytest.param("killed", "the process was killed: host memory", marks=posix)
LIMIT = 3.0  # seconds for the rank that sleeps


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
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# A process for every variant


class Diary:
    """The session in each process: writes its name to a file shared with others whenever a method is called."""

    def __init__(self, name: str, path: str, end: str = "") -> None:
        self.name, self.path = name, Path(path)
        if end:
            self.end(end)
        self.write("+")

    def write(self, what: str = "") -> int:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self.name}{what} ")
        return os.getpid()

    def end(self, how: str) -> None:
        WAYS[how]()


@pytest.fixture
def diary(tmp_path):
    """Measures the variants given as name → protocol; returns statuses. `written` is what they wrote, `pids` are their
    processes, of which none is left. built: how a variant's process ends before it is built"""

    def measure(protocols, built=None, together=True):
        path, records, measure.pids = tmp_path / "diary", Records(), []

        def protocol(name, call):
            measure.pids.append(call("write", what="0"))
            yield
            yield from protocols[name](call)

        variants = {name: {"name": name, "path": str(path), "end": (built or {}).get(name, "")} for name in protocols}
        try:
            measure_variants(Diary, variants, protocol, records, together, phase="here")
        finally:
            measure.written = path.read_text().split()
            assert gone(measure.pids)
        assert {row["phase"] for row in records.rows} == {"here"}
        return statuses(records.frame())

    return measure


def twice(call):
    for what in "12":
        call("write", what=what)
        yield


def then(how):
    def protocol(call):
        call("end", how=how)
        yield

    return protocol


@pytest.mark.parametrize(("together", "written"), [(True, "A0 B0 A1 B1 A2 B2"), (False, "A0 A1 A2 B0 B1 B2")])
def test_variants_run_in_processes_of_their_own_in_turn_or_one_after_the_other(diary, together, written):
    assert diary({"A": twice, "B": twice}, together=together) == {"A": "ok", "B": "ok"}
    assert [what for what in diary.written if "+" not in what] == written.split()
    assert len({os.getpid(), *diary.pids}) == 3


@pytest.mark.parametrize(
    ("how", "status"), [("oom", "oom"), pytest.param("killed", "oom", marks=posix), ("is missing", "unavailable")]
)
def test_a_variant_that_cannot_run_or_be_built_is_a_status_and_the_others_run_on(diary, how, status):
    assert diary({"A": then(how), "B": twice}) == {"A": status, "B": "ok"}
    assert diary.written[-2:] == ["B1", "B2"]
    assert diary({"A": twice, "B": twice}, {"A": how}) == {"A": status, "B": "ok"}


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("refuses", T1Error, r"\Abad input\Z"),  # as it was
        ("raises", VariantFailed, r"(?s)Traceback.*in stumble.*ValueError: this is what it says"),
        ("exits", VariantFailed, "exit code 7"),
    ],
)
def test_any_other_end_of_a_variant_is_an_error_with_its_traceback_or_exit_code(diary, how, error, message):
    for protocol, built in ((then(how), {}), (twice, {"B": how})):
        with pytest.raises(error, match=message):
            diary({"A": twice, "B": protocol}, built)


@posix
def test_an_interrupt_ends_all_variants_even_in_a_call(diary):
    """As Ctrl-C does: the signal reaches the processes, too, but it is the notebook that ends them."""

    def interrupted(call):
        for pid in (*diary.pids, os.getpid()):
            Timer(0.5, os.kill, (pid, signal.SIGINT)).start()
        call("end", how="sleeps")
        yield

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell there is none
    try:
        with pytest.raises(KeyboardInterrupt):
            diary({"A": twice, "B": interrupted})
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_status_that_the_protocol_gave_stays(tmp_path):
    records = Records()

    def protocol(name, call):
        records.status(name, "wrong", phase="here")
        return
        yield

    variants = {"A": {"name": "A", "path": str(tmp_path / "diary")}}
    for _ in range(2):  # as when a notebook's cell is run again
        measure_variants(Diary, variants, protocol, records, phase="here")
        assert statuses(records.frame()) == {"A": "wrong"}


def test_what_says_that_memory_ran_out():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: invalid argument"))
    assert not is_out_of_memory(ValueError("out of memory"))


# Ranks


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


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture
def run(tmp_path):
    """Runs a task on two ranks, and returns the records; no rank is left then, however it ends."""

    def run(task, device="cpu", limit=60.0, **settings):
        records, settings = Records(), settings | {"pids": str(tmp_path)}
        try:
            measure_ranks(records, task, settings, 2, name="here", variants=["A", "B"], device=device, limit=limit)
        finally:
            assert len(noted(tmp_path)) == 2 and gone(noted(tmp_path), 0)
        return records

    return run


def test_what_rank_0_records_and_prints_comes_back(run, capfd):
    records = run(add_up)
    threads = max(1, torch.get_num_threads() // 2)  # the ranks share the cores
    found = [(row["phase"], row["metric"], row["value"]) for row in records.rows]
    assert found == [("here/2", "sum", 3.0), ("here/2", "threads", threads)]
    assert capfd.readouterr() == ("this is rank 0\n", "")


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


@pytest.mark.parametrize(("how", "why"), [("oom", "no memory"), KILLED])
def test_no_memory_on_a_rank_is_a_status(run, capfd, how, why):
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


@posix
@pytest.mark.parametrize("end", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_ranks_end_with_the_process_that_started_them(tmp_path, end):
    code = f"""import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_ends
task = test_ends.fail, {{"how": "sleeps", "pids": {str(tmp_path)!r}}}
test_ends.measure_ranks(test_ends.Records(), *task, 2, name="", variants=[], device="cpu", limit=600.0)"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(noted(tmp_path)) < 2:
            assert time.monotonic() < deadline, "the ranks did not begin"
            time.sleep(0.1)
        launcher.send_signal(getattr(signal, end))
        launcher.wait(20)
    finally:
        launcher.kill()
    assert gone(noted(tmp_path), 20)
