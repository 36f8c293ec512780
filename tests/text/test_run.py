"""The training command: what it leaves on disk, how it resumes, how it stops, and what it refuses."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from copies import CHECKOUT, largest_file, names, python
from transformers import AutoModelForCausalLM, AutoTokenizer

from t1lib import signals
from t1lib.__main__ import main
from t1lib.files import locked, read_signed, write_signed
from t1lib.text import corpus
from t1lib.text.corpus import load_corpus
from t1lib.text.run import TrainRun
from t1lib.text.session import LanguageSession
from t1lib.train import OptimizerSpec, StepRecord, Trainer, checkpoint
from t1lib.train.checkpoint import META

TEXT = Path(argparse.__file__)  # 100 kB
SHAPE = ["--change", "num_hidden_layers", "1", "--change", "hidden_size", "16", "--change", "intermediate_size", "32",
         "--change", "attention_dropout", "0.1"]  # fmt: skip
SMALL = ["train", "--model", "tiny", *SHAPE, "--data", str(TEXT), "--vocabulary", "300", "--seq", "16", "--batch", "4",
         "--device", "cpu", "--head", "chunked", "--eval-rows", "6"]  # fmt: skip
AGAIN = ["train", "--resume"]


def train(folder, *more):
    return main([*SMALL, "--out", str(folder), *more])


def metrics(folder):
    return pd.read_csv(folder / "metrics.csv", index_col="step")


def before_step(monkeypatch, number, happens):
    """Call `happens` at the beginning of step `number`."""
    plain = LanguageSession.step

    def step(self):
        if self.trainer.steps == number - 1:
            happens()
        return plain(self)

    monkeypatch.setattr(LanguageSession, "step", step)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refused(bad_command):
    """Assert that the command, by default that of a new run, ends with one error that holds `message`; returns it."""
    return lambda message, folder, *more, command=SMALL: bad_command(message, *command, "--out", folder, *more)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A run of two steps, to be copied."""
    folder = tmp_path_factory.mktemp("run") / "a"
    assert train(folder, "--steps", "2", "--schedule", "constant") == 0
    return folder


@pytest.fixture
def a_run(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / "a"))


def test_it_leaves_metrics_and_a_checkpoint(tmp_path, command):
    more = ["--steps", "12", "--eval-every", "5", "--report-every", "4", "--lr", "1e-2", "--dtype", "bfloat16"]
    assert "step  4/12  loss" in command(*SMALL, "--out", tmp_path / "a", *more)
    rows = metrics(tmp_path / "a")
    held_out = rows["held_out_loss"].dropna()
    assert [*rows.index] == [*range(1, 13)] and [*held_out.index] == [5, 10, 12] and held_out[12] < held_out[5]
    assert (rows[["tokens_per_s", "host_gib"]] > 0).all(axis=None) and rows["lr"][1] > rows["lr"][12] > 0
    assert names(tmp_path / "a") == [".lock", "checkpoints", "metrics.csv", "run.json"]
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000012"]
    part = torch.load(tmp_path / "a" / "checkpoints" / "step-00000012" / "rest.pt", weights_only=True)
    assert all(own["master"].dtype == own["exp_avg"].dtype == torch.float32 for own in part["optimizer"].values())


def test_a_step_before_an_evaluation_or_a_checkpoint_counts_its_update(tmp_path, monkeypatch):
    """Which may be pending when the step returns. Memory is that of the device which trains."""
    monkeypatch.setattr(Trainer, "drain", lambda _: time.sleep(0.1))
    assert train(tmp_path / "a", "--steps", "4", "--eval-every", "3", "--checkpoint-every", "2") == 0
    assert (metrics(tmp_path / "a")["wall_ms"][[2, 3, 4]] > 100).all()
    trainer = SimpleNamespace(spec=OptimizerSpec("sgd"), schedule=float, device=torch.device("cuda:1"))
    run = SimpleNamespace(session=SimpleNamespace(trainer=trainer))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {torch.device("cuda:1"): 2**31}.get)
    assert TrainRun._row(run, StepRecord(1, 1.0, 8, 1.0, {}), None)["device_gib"] == 2


def test_a_run_that_goes_on_has_the_losses_of_an_unbroken_one(tmp_path, two_steps):
    """As it was begun, or told its folder alone."""
    often = ["--schedule", "constant", "--steps", "5"]
    assert train(tmp_path / "whole", *often) == 0
    for name, again in (("a", [*SMALL, *often]), ("b", ["train", "--steps", "5"])):
        folder = Path(shutil.copytree(two_steps, tmp_path / name))
        with (folder / "metrics.csv").open("a") as file:
            file.write("3" + ",1.0" * 8 + ",\n")  # a step after the checkpoint, logged before a power failure
        assert main([*again, "--out", str(folder), "--resume"]) == 0
        assert metrics(folder)["loss"].equals(metrics(tmp_path / "whole")["loss"])


def test_a_run_keeps_its_length_and_warmup_unless_told(tmp_path, command, refused, bad_command):
    assert train(tmp_path / "a", "--steps", "4", "--warmup", "1") == 0
    before = content(tmp_path / "a")
    assert "is at step 4 of 4: nothing to train" in command(*SMALL, "--out", tmp_path / "a", "--resume")
    for more, message in {
        ("--steps", "2"): "is at step 4; allowed: --steps 4 or more",
        ("--steps", "60", "--warmup", "5"): "warmup is 5; the run in",
        ("--steps", "1"): "allowed: total beyond warmup",
        ("--batch", "16"): "batch is 16; the run in",  # even if it is the default
        ("--data", str(CHECKOUT)): "data is ",
    }.items():
        refused(message, tmp_path / "a", "--resume", *more)
    bad_command("needs --out", *AGAIN)
    bad_command("--model is missing", "train", "--out", tmp_path / "a")
    assert content(tmp_path / "a") == before
    assert train(tmp_path / "a", "--steps", "8", "--resume") == 0
    options = read_signed(tmp_path / "a" / "run.json")["options"]
    assert (options["steps"], options["warmup"], options["schedule"]) == (8, 1, "cosine")


@pytest.mark.parametrize("given, there", [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_waiting_threads_are_told_to_spin_less_before_pytorch_is_imported(tmp_path, monkeypatch, given, there):
    """Later would be too late. A busy CPU slowed it fifteenfold."""
    # Found before the other, and says what it finds.
    (tmp_path / "torch.py").write_text("import os, sys\nsys.exit(os.environ['GOMP_SPINCOUNT'])")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # other tests may have set it
    assert python("-m", "t1lib", *SMALL, cwd=tmp_path, code=1, **given) == f"{there}\n"


def test_interrupted_while_starting_it_ends_with_one_line(tmp_path):
    """Also in a library that catches everything."""
    slow = "import time\nprint('now', flush=True)\ntry: time.sleep(60)\nexcept BaseException: time.sleep(60)"
    (tmp_path / "torch.py").write_text(slow)  # found before the other
    command = [sys.executable, "-m", "t1lib", *SMALL, "--out", "a"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted while starting; nothing was trained\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_trains_is_noted_whatever_the_step_does(tmp_path, monkeypatch, capsys, number):
    """In the middle: a checkpoint of the last step, all metrics, one line, exit code 130."""

    def swallows():
        try:
            os.kill(os.getpid(), number)
        except BaseException:
            pytest.fail("a step was interrupted")

    before_step(monkeypatch, 1, swallows)
    assert train(tmp_path / "a", "--steps", "5", "--export") == 130
    told = "interrupted after step 1; --resume --export goes on; no model was exported\n"
    assert capsys.readouterr().err == told and not (tmp_path / "a" / "model").exists()
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000001"] and len(metrics(tmp_path / "a")) == 1


def test_a_reader_of_its_lines_that_is_gone_costs_no_step(tmp_path, monkeypatch):
    """Ctrl-C ends the `tee` behind it as well."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as lines:
        before_step(monkeypatch, 1, lambda: monkeypatch.setattr(sys, "stdout", lines))
        assert train(tmp_path / "a", "--steps", "5", "--report-every", "1") == 1
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000001"] and len(metrics(tmp_path / "a")) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), RuntimeError("can't allocate memory")])
def test_memory_that_runs_out_is_one_error(tmp_path, monkeypatch, refused, error):
    before_step(monkeypatch, 3, Mock(side_effect=error))
    refused("--resume goes on from the last checkpoint", tmp_path / "a", "--steps", "4", "--checkpoint-every", "2")
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000002"]


@pytest.mark.parametrize("times, passed_on, code", [(1, 0.0, 0), (2, 0.0, 130), (2, 60.0, 0)])
def test_interrupted_in_its_last_checkpoint_it_finishes_unless_twice(tmp_path, monkeypatch, times, passed_on, code):
    monkeypatch.setattr(signals, "PASSED_ON", passed_on)
    write, sent = checkpoint._write, []

    def interrupted(path, content):
        if "00000003" in str(path) and len(sent) < times:
            sent.append(path)
            os.kill(os.getpid(), signal.SIGINT)
        return write(path, content)

    monkeypatch.setattr(checkpoint, "_write", interrupted)
    assert train(tmp_path / "a", "--steps", "3", "--checkpoint-every", "2") == code
    assert len(sent) == times
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000003" if code == 0 else "step-00000002"]


def test_a_checkpoint_or_metrics_that_cannot_be_written_are_no_dead_end(tmp_path, monkeypatch, refused):
    """Metrics cost no step: its checkpoint is written, and the run goes on from it."""
    file, often = tmp_path / "a" / "metrics.csv", ["--steps", "6", "--checkpoint-every", "2"]
    with largest_file(4000):
        refused("step-00000002: File too large", tmp_path / "a", *often)
    assert names(tmp_path / "a" / "checkpoints") == []
    before = content(tmp_path / "a")
    refused("holds a run; --resume goes on with it", tmp_path / "a", *often)
    assert content(tmp_path / "a") == before

    def blocks():
        file.unlink()
        file.mkdir()

    with monkeypatch.context() as patch:
        before_step(patch, 3, blocks)
        refused(f"error: cannot write {file}: Is a directory\n", tmp_path / "a", *often, "--resume")
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000003"]
    file.rmdir()
    assert train(tmp_path / "a", *often, "--resume") == 0
    assert list(metrics(tmp_path / "a").index) == [4, 5, 6]
    file.unlink()
    (tmp_path / "a" / "checkpoints" / META).unlink()  # as if it was killed in its first checkpoint, before any row
    assert train(tmp_path / "a", "--steps", "1") == 0
    assert names(tmp_path / "a" / "checkpoints") == [META, "step-00000001"]


def test_a_model_or_settings_that_cannot_be_written_leave_what_was(a_run, refused):
    """And rows of metrics that are none are dropped."""
    rows = (a_run / "metrics.csv").read_bytes()
    for damage in (b",,\n", b"2,1.0,2", b"\xff\xfe\n", b"\n"):
        (a_run / "metrics.csv").write_bytes(rows + damage)
        assert main([*AGAIN, "--out", str(a_run)]) == 0
        assert (a_run / "metrics.csv").read_bytes() == rows
    before = content(a_run)
    for name, size, more in (("model", 8000, ["--export"]), ("run.json", 500, [])):
        with largest_file(size):
            said = refused(f"error: cannot write {a_run / name}: ", a_run, *more, command=AGAIN)
        assert "File too large" in said
        assert content(a_run) == before


def test_a_run_that_cannot_go_on_is_one_error(a_run, monkeypatch, refused):
    """Another process trains in it, its settings are spoilt, of another version, or gone, or its device or its text's
    tokenizer is."""
    file, before = a_run / "run.json", content(a_run)
    whole = read_signed(file)
    with locked(a_run / ".lock", ""):
        refused("another process trains in", a_run, "--steps", "40", "--schedule", "constant", "--resume")
    assert content(a_run) == before
    file.write_text(file.read_text().replace('"lr": ', '"lr": 1'))
    for more in ([], ["--schedule", "constant", "--steps", "2"]):
        refused(f"{file} is damaged", a_run, *more, command=AGAIN)
    other = "begun by another version"
    for more, message in (({"device": "cuda:99"}, "cuda:99"), ({"option": 1}, other), (None, other)):
        options = {"options": whole["options"] | more} if more else {}
        write_signed(file, {"t1lib": "0", "corpus": whole["corpus"], **options})
        refused(message, a_run, command=AGAIN)
    write_signed(file, whole)
    plain = corpus.byte_pairs
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "byte_pairs", lambda texts, size: plain({"a": texts[TEXT.name][::-1]}, size))
        refused("the tokenizer (another version's, maybe) is not the one", a_run, command=AGAIN)
    (a_run / "checkpoints" / META).unlink()
    before = content(a_run)
    refused("holds ['step-00000002'], but no checkpoint.json", a_run, command=AGAIN)
    assert content(a_run) == before
    file.unlink()
    refused("holds no run to go on with", a_run, command=AGAIN)
    assert train(a_run, "--steps", "2") == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "0"], "--steps 0; allowed: 1 or more"),
        (["--seq", "9" * 400], "--seq 999"),
        (["--eval-rows", "0"], "--eval-rows 0; allowed: 1 or more"),
        (["--device", "tpu"], "--device 'tpu'; allowed here: "),
        (["--data", ""], "--data ''; allowed: leave it out"),
        (["--out", "a\udcff"], "--out 'a\\udcff' holds characters"),
        (["--data", "x" * 256], "no corpus at '"),
        (["--gpu-memory", "1GiB"], "--gpu-memory is of mode slide, the mode is gpu"),
        (["--seed", "99999999999999"], "--seed 99999999999999; allowed: less than 2^32"),
        (["--seq", "4096"], "seq 4096; the model has 2048 positions"),
        (["--change", "hidden_size", "32"], "--change hidden_size is given twice: 16, '32'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_error_and_nothing_is_left(tmp_path, monkeypatch, refused, more, message):
    monkeypatch.chdir(tmp_path)
    refused(message, "a/b", *more)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    refused("the command trains in one process, and there are 2", "a/b", "--mode", "fsdp")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text, and links need rights")
def test_paths_of_other_bytes_or_that_link_to_themselves_are_one_error(tmp_path, monkeypatch, refused):
    (tmp_path / "loop").symlink_to("loop")
    for option in ("--data", "--model", "--out"):
        refused("loop", tmp_path / "a", option, str(tmp_path / "loop"))
    odd = tmp_path / "\udcff"
    odd.mkdir()
    monkeypatch.chdir(odd)
    shutil.copy(TEXT, "a.txt")
    refused("holds characters", tmp_path / "a", "--data", "a.txt")
    assert names(tmp_path) == ["loop", odd.name]
    assert train("a", "--steps", "1") == 0


def test_folders_for_a_run(tmp_path, refused):
    """One within its data is refused, or with what an export would replace, and a file is named; but a start that
    failed takes none."""
    (tmp_path / "file").write_text("")
    shutil.copy(TEXT, tmp_path / "a.txt")
    for out in (tmp_path, f"{tmp_path}/../{tmp_path.name}/deep/a"):
        refused("is in the folder of --data", out, "--steps", "1", "--data", str(tmp_path))
    (tmp_path / "own" / "model").mkdir(parents=True)
    refused("own/model is there already", tmp_path / "own", "--steps", "1")
    shutil.rmtree(tmp_path / "own")
    (tmp_path / "own").mkdir()
    shutil.copy(TEXT, tmp_path / "own" / "metrics.csv")
    data = ["--data", str(tmp_path / "own" / "metrics.csv")]
    refused("own/metrics.csv is no file of this command's", tmp_path / "own", "--steps", "1", *data)
    shutil.rmtree(tmp_path / "own")
    for command in (SMALL, [*SMALL, "--resume"], AGAIN):
        refused(str(tmp_path / "file"), tmp_path / "file", command=command)
    assert names(tmp_path) == ["a.txt", "file"]
    (tmp_path / "deep").mkdir()
    refused("--device 'tpu'", tmp_path / "deep" / "a", "--device", "tpu")
    assert names(tmp_path / "deep") == []  # which was there before
    refused("too small", tmp_path / "deep" / "a", "--steps", "1", "--workspace", "1", "--head", "fused")
    assert train(tmp_path / "deep" / "a", "--steps", "1") == 0


@pytest.mark.parametrize("mode", ["gpu", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_it_exports_is_the_model_that_was_trained_and_can_be_trained_on(tmp_path, monkeypatch, capsys, mode):
    """A changed vocabulary sizes the tokenizer. A run goes on from another folder than it was begun in, but not with
    another configuration or tokenizer of its model."""
    (tmp_path / "own").mkdir()
    shutil.copy(TEXT, tmp_path / "own" / "a.txt")
    monkeypatch.chdir(tmp_path)
    own = [argument for argument in SMALL if argument not in ("--vocabulary", "300")]
    more = ["--change", "vocab_size", "300", "--data", "own", "--steps", "4", "--mode", mode, "--export"]
    more += ["--model", "gemma-2-2b", "--change", "head_dim", "8"]
    assert main([*own, "--out", "a", *more]) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained("a/model"), AutoTokenizer.from_pretrained("a/model")
    assert tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"]) == "def f(x):\n    return x"
    ends = model.generation_config.eos_token_id, model.generation_config.bos_token_id, model.config.pad_token_id
    assert ends == (tokenizer.eos_token_id, None, None)  # not Gemma's, which are tokens of text here
    held_out = load_corpus(None, 16, source="own", tokenizer="a/model/tokenizer.json").held_out
    rows = held_out[[place * len(held_out) // 6 for place in range(6)]]  # two batches, of four rows and of two
    loss = model(input_ids=rows, labels=rows).loss.item()
    assert loss == pytest.approx(metrics(tmp_path / "a")["held_out_loss"].iloc[-1], rel=1e-5)
    small = ["--seq", "16", "--batch", "4", "--device", "cpu", "--head", "chunked", "--out", "b", "--steps", "1"]
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.pad_token, tokenizer.model_max_length = "!", 99
    tokenizer.save_pretrained("a/model")
    assert main(["train", "--model", "a/model", "--data", "own", *small, "--export"]) == 0
    templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for name in ("tokenizer.json", "tokenizer_config.json", *templates):
        assert Path("b/model", name).read_bytes() == Path("a/model", name).read_bytes()
    monkeypatch.chdir(tmp_path / "own")
    assert main([*AGAIN, "--out", "../b", "--steps", "2"]) == 0
    for name in ("config.json", "tokenizer.json"):
        file = tmp_path / "a" / "model" / name
        before = file.read_text(encoding="utf-8")
        file.write_text(before + "\n", encoding="utf-8")
        assert main([*AGAIN, "--out", "../b", "--steps", "3"]) == 2
        assert "error: config.json or tokenizer.json in" in capsys.readouterr().err
        file.write_text(before, encoding="utf-8")
