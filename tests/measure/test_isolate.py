"""A fresh process for every variant: how variants take turns, and how each of them can end."""

import os
import signal
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest

from t1lib.errors import T1Error, UnavailableError
from t1lib.measure.isolate import VariantFailed, is_out_of_memory, measure_variants
from t1lib.measure.records import Records, statuses

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
ERRORS = {"t1": T1Error, "unavailable": UnavailableError, "memory": MemoryError, "value": ValueError}


class Diary:
    """The session in each process: writes its name to a file shared with others whenever a method is called."""

    def __init__(self, name: str, path: str, refuse: str = "") -> None:
        if refuse:
            self.fail(refuse)
        self.name, self.path = name, Path(path)
        self.write("+")

    def write(self, what: str = "") -> int:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self.name}{what} ")
        return os.getpid()

    def fail(self, kind: str) -> None:
        raise ERRORS[kind](f"this is {kind}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)

    def sleep(self) -> None:
        time.sleep(600)


@pytest.fixture
def diary(tmp_path):
    """Measures the variants given as name → protocol; returns statuses. `written` is what they wrote, `pids` are their
    processes, of which none is left."""

    def measure(protocols, settings=None, together=True):
        path, records, measure.pids = tmp_path / "diary", Records(), []

        def protocol(name, call):
            measure.pids.append(call("write", what="0"))
            yield
            yield from protocols[name](call)

        variants = {name: {"name": name, "path": str(path), **(settings or {}).get(name, {})} for name in protocols}
        try:
            measure_variants(Diary, variants, protocol, records, together, phase="here")
        finally:
            measure.written = path.read_text().split()
            assert gone(measure.pids)
        assert {row["phase"] for row in records.rows} == {"here"}
        return statuses(records.frame())

    return measure


def gone(pids):
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def twice(call):
    for what in "12":
        call("write", what=what)
        yield


def then(method, **kwargs):
    def protocol(call):
        call(method, **kwargs)
        yield

    return protocol


@pytest.mark.parametrize(("together", "written"), [(True, "A0 B0 A1 B1 A2 B2"), (False, "A0 A1 A2 B0 B1 B2")])
def test_variants_run_in_processes_of_their_own_in_turn_or_one_after_the_other(diary, together, written):
    assert diary({"A": twice, "B": twice}, together=together) == {"A": "ok", "B": "ok"}
    assert [what for what in diary.written if "+" not in what] == written.split()
    assert len({os.getpid(), *diary.pids}) == 3


@pytest.mark.parametrize(
    ("end", "refuse", "status"),
    [
        (then("fail", kind="memory"), "", "oom"),
        (twice, "memory", "oom"),
        pytest.param(then("kill"), "", "oom", marks=posix),
        (then("fail", kind="unavailable"), "", "unavailable"),
    ],
)
def test_one_that_cannot_run_or_be_built_is_a_status_and_the_others_run_on(diary, end, refuse, status):
    assert diary({"A": end, "B": twice}, {"A": {"refuse": refuse}}) == {"A": status, "B": "ok"}
    assert diary.written[-2:] == ["B1", "B2"]


@pytest.mark.parametrize(
    ("end", "refuse", "error", "message"),
    [
        (twice, "t1", T1Error, r"^this is t1$"),  # bad input comes back as it was
        (then("fail", kind="t1"), "", T1Error, r"^this is t1$"),
        (then("fail", kind="value"), "", VariantFailed, r"(?s)Traceback.*in fail.*ValueError: this is value"),
        pytest.param(then("kill", number=15), "", VariantFailed, "exit code -15", marks=posix),
    ],
)
def test_any_other_end_is_an_error_with_its_traceback_or_exit_code(diary, end, refuse, error, message):
    with pytest.raises(error, match=message):
        diary({"A": twice, "B": end}, {"B": {"refuse": refuse}})


def test_what_says_that_memory_ran_out():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: invalid argument"))
    assert not is_out_of_memory(ValueError("out of memory"))


@posix
def test_an_interrupt_ends_all_even_in_a_call(diary):
    """As Ctrl-C does: the signal reaches the processes, too, but it is the notebook that ends them."""

    def interrupted(call):
        for pid in (*diary.pids, os.getpid()):
            Timer(0.5, os.kill, (pid, signal.SIGINT)).start()
        call("sleep")
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
