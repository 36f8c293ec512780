import errno
import gc
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from copies import wait_for
from jupyter_core.utils import ensure_event_loop

from t1lib.__main__ import main
from t1lib.files import locked, write_signed
from t1lib.measure import manifest

MEASURE = "for step in range(steps):\n    run.records.put('slide', '', {'wall_ms': step}, step)\n"
FULL = OSError(errno.ENOSPC, "No space left on device")
pytestmark = pytest.mark.filterwarnings("ignore")  # of papermill's and jupyter's own dependencies


@pytest.fixture
def run(command):
    yield lambda *arguments, **more: command("run", *arguments, "--profile", "smoke", **more)
    ensure_event_loop().close()  # else it is collected in some later test, where its warning is an error
    gc.collect()


def test_only_what_changed_or_is_forced_is_run_again(checkout, run, command, monkeypatch):
    monkeypatch.chdir(checkout.root / "notebooks")  # a kernel runs in the root
    monkeypatch.setenv("T1_ROOT", "..")
    # As of a command that begins in the root folder, and a package whose folder's name is not ASCII.
    monkeypatch.setattr(sys, "path", [*sys.path, os.sep, "/Läufe"])
    checkout.add("first", MEASURE, "import sys, yaml\nprint(sys.executable)\nprint(yaml.__file__, 'a://b', '/Läufe/x')")
    checkout.add("second")
    for name in ("first", "second"):
        checkout.finish(checkout.outputs(name), name)
    found = run("all")
    assert "first [smoke] up to date (measured 20" in found and "nothing to do: 2 up to date" in found

    folder = checkout.outputs("first")
    (folder / "samples.csv").write_text("made up")
    found = command("list")
    assert "smoke    stale    samples.csv is not as the run left it; measured 20" in found
    assert "smoke    done     measured 20" in found
    checkout.params("first", "steps: 1\n")
    (folder.with_name(".first.partial") / "figures").mkdir(parents=True)  # left by a run that was killed
    found = run()
    assert "first [smoke] to run: parameters changed" in found and "second [smoke] up to date" in found
    assert "1 run, 1 up to date, 0 failed" in found and "first [smoke]: started\n" in found
    content = manifest.read(folder)
    assert set(content["files"]) == {"executed.ipynb", "samples.csv", "numbers.json", "numbers.tex"}
    assert content["parameters"] == {"profile": "smoke", "steps": 1, "rate": 0.5}
    assert len((folder / "samples.csv").read_text().splitlines()) == 2
    assert sorted(os.listdir(folder.parent)) == [".first.lock", "first", "second"]
    assert not [name for name in content["files"] if str(checkout.root) in (folder / name).read_text()]
    # The kernel is this very Python, whatever kernels a user has registered elsewhere.
    cells = json.loads((folder / "executed.ipynb").read_text())["cells"]
    [[python, package]] = [output["text"] for cell in cells for output in cell["outputs"]]
    assert sys.executable.endswith(python.strip()) and package == "yaml/__init__.py a://b x\n"

    def fills_the_disk(notebook, executed, *more, **options):
        executed.write_text('{"cells": [')
        raise FULL

    monkeypatch.setattr("papermill.execute_notebook", fills_the_disk)
    assert "OSError: [Errno 28] No space left on device" in run("second", "--force", code=1)
    assert run("second").startswith("second [smoke] up to date")


def test_a_notebook_that_is_edited_while_its_kernel_starts_is_stale(checkout, run, command, monkeypatch):
    monkeypatch.chdir(checkout.root)
    path = checkout.add("demo")
    edit = "from pathlib import Path\nfile = Path('notebooks/demo.ipynb')\n"
    edit += "file.write_text(file.read_text().replace('step * rate', 'step'))\nfrom t1lib.kit.run"
    path.write_text(path.read_text().replace("from t1lib.kit.run", json.dumps(edit)[1:-1]))
    assert "1 run, 0 up to date" in run("demo")
    assert "stale    notebook changed" in command("list")


def test_a_failing_cell_stops_only_its_own_notebook_and_keeps_what_was_measured(checkout, run, monkeypatch):
    checkout.add("bad", MEASURE, 'run.table("any", [])', "x = 1\nraise ValueError('boom')")
    checkout.add("dead", MEASURE, "import os\nos._exit(1)")
    checkout.add("twice", MEASURE, f"# again\n{MEASURE}")
    told = run(code=1)
    assert "0 run, 0 up to date, 3 failed: bad, dead, twice" in told
    assert "error: bad [smoke] cell In [6] (`x = 1`): ValueError: boom\n" in told
    assert "outputs/smoke/.bad.partial/executed.ipynb" in told
    assert "error: dead [smoke] DeadKernelError: Kernel died\n" in told
    assert "T1Error: 'slide/wall_ms' is recorded by another cell, too, `[4] for step in range(steps):`" in told
    left = checkout.root / "outputs/smoke/.bad.partial"
    assert (left / "executed.ipynb").is_file() and not checkout.outputs("bad").exists()
    for folder in (left, left.with_name(".dead.partial")):
        rows = (folder / "samples.csv").read_text().splitlines()
        assert len(rows) == 1 + 2 and rows[1].startswith("slide,")
    with locked(left.with_suffix(".lock"), "the other's"):
        told = run("bad", code=1)  # names no folder, which is the other process's
    assert "error: bad [smoke] is being run by another process" in told and ".partial" not in told
    assert (left / "executed.ipynb").is_file()

    def ends(notebook, executed, *more, **options):
        executed.write_bytes(b"{}")
        write_signed(executed.with_name("manifest.json"), {"files": {}})

    monkeypatch.setattr("papermill.execute_notebook", ends)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=FULL))
        assert run(code=1).count("/executed.ipynb: No space left on device\n") == 3
    monkeypatch.setattr("papermill.execute_notebook", lambda *_, **__: None)
    assert "error: bad [smoke] the notebook ended without run.finish()" in run("bad", code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "deno", "--profile", "smoke"], "unknown experiment 'deno'; allowed: demo, other, twice. Did"),
        (["run", "--profile", "laptop"], "unknown profile 'laptop'; allowed: h200, smoke, auto."),
        (["run", "other", "--profile", "smoke", "-p", "steps", "1"], "unknown parameter 'steps'; allowed: profile."),
        (["run", "demo", "--profile", "h200"], "profile 'h200' is for a GPU, and there is no CUDA device here"),
        (["run", "--profile", "smoke", "-p", "profile", "9" * 999], "-p: 'profile' is '999"),
        (["report", "--profile", "smoke"], "no finished run in outputs/smoke"),
        (["run", "-p", "steps"], "argument -p: expected 2 arguments"),
        (["run", "demo", "-p", "steps", "1", "-p", "steps", "2"], "-p steps is given twice"),
        (["run", "twice", "--profile", "smoke"], "has two cells that are the same (`run.number("),
    ],
)
def test_bad_input_is_one_error_before_anything_runs(checkout, bad_command, monkeypatch, arguments, message):
    monkeypatch.setattr("t1lib.measure.manifest._gpu", dict)
    checkout.add("demo")
    checkout.add("other", parameters='profile: str = "smoke"', yaml="")
    checkout.add("twice", *["run.number('twice.n', 1)"] * 2)  # headless, the second would replace what the first made
    checkout.params("demo", "profile: h200\n", "h200")
    before = dict(os.environ)
    bad_command(message, *arguments)
    assert os.environ == before  # kernels of later runs inherit it
    assert not list(checkout.root.glob("outputs/*/*"))


def test_list_shows_states_and_a_file_in_the_way_is_told(checkout, command, bad_command):
    checkout.add("demo")
    (checkout.root / "params" / "h200").mkdir()
    told = command("list")
    assert "demo  About demo" in told and "smoke    missing" in told and "h200     no parameters" in told
    (checkout.root / "outputs").touch()
    bad_command(f"cannot write {checkout.root}/outputs/smoke: ", "run", "--profile", "smoke")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's")
def test_an_output_of_few_characters_on_a_full_disk_or_closed_is_no_traceback(checkout, monkeypatch, capsys):
    """Nor one whose reader has had enough."""
    checkout.add("≥ demo")
    monkeypatch.setattr(sys, "argv", ["t1lib", "list"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("t1lib", run_name="__main__")
    monkeypatch.setattr(sys, "stdout", None)
    assert (main(["list"]), capsys.readouterr().err) == (0, "")
    with monkeypatch.context() as patch:
        patch.setattr("t1lib.params.experiments", lambda: os.stat("nowhere"))
        assert main(["list"]) == 2 and capsys.readouterr().err.startswith("error: [Errno 2] No such file")
    read, write = os.pipe()
    os.close(read)
    told = "error: [Errno 28] No space left on device\n"
    for target, code, error in (("/dev/full", 2, told), (write, 1, "")):
        with open(target, "w") as output:  # what is left to write when it is closed is no error, either
            monkeypatch.setattr(sys, "stdout", output)
            assert (main(["list"]), capsys.readouterr().err) == (code, error)


SLEEP = "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(60)\n"
SIGNALS = ["SIGINT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGKILL", "SIGTERM"))]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("name", SIGNALS)
def test_ended_half_way_publishes_nothing_and_can_be_run_again(checkout, run, name):
    path = checkout.add("demo", SLEEP)
    command = [sys.executable, "-m", "t1lib", "run", "--profile", "smoke"]
    # Where the tests run in the background of a shell, which ignores SIGINT, the driver must not.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=checkout.root, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert wait_for((checkout.root / "started").exists, 180), "the notebook did not start"
    kernels = psutil.Process(process.pid).children(recursive=True)
    assert kernels
    process.send_signal(getattr(signal, name))
    if name != "SIGKILL":
        _, told = process.communicate(timeout=30)
        assert process.returncode == 130 and "interrupted" in told and "Traceback" not in told
        # Where nobody reaps orphans, as in a container, an ended kernel stays a zombie.
        _, alive = psutil.wait_procs(kernels, timeout=2)
        assert all(kernel.status() == psutil.STATUS_ZOMBIE for kernel in alive)
    process.wait()
    assert not checkout.outputs("demo").exists()
    assert manifest.read(checkout.root / "outputs/smoke/.demo.partial") is None
    if name == "SIGKILL":
        path.write_text(path.read_text().replace("sleep(60)", "sleep(0)"))
        run()
        assert "executed.ipynb" in manifest.read(checkout.outputs("demo"))["files"]
        assert sorted(os.listdir(checkout.root / "outputs/smoke")) == [".demo.lock", "demo"]
