"""The training command: what it leaves on disk, how it resumes, how it stops, and what it refuses."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from full_disk import largest_file
from matplotlib import pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer

from t1lib.__main__ import main
from t1lib.files import locked
from t1lib.text import run
from t1lib.text import session as language
from t1lib.text.corpus import load_corpus
from t1lib.text.session import LanguageSession
from t1lib.train import checkpoint, session

SMALL = ["train", "--model", "tiny", "--change", "num_hidden_layers", "2", "--limit", "300KB", "--vocabulary", "300",
         "--seq", "16", "--batch", "4", "--device", "cpu", "--head", "chunked"]  # fmt: skip


def train(folder, *more):
    return main([*SMALL, "--out", str(folder), *more])


def metrics(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    return [float(row["loss"]) for row in metrics(folder)]


def test_it_leaves_metrics_a_checkpoint_and_a_plot(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "12", "--eval-every", "5", "--report-every", "4") == 0
    rows = metrics(tmp_path / "a")
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    held_out = {int(row["step"]): float(row["held_out_loss"]) for row in rows if row["held_out_loss"]}
    assert list(held_out) == [5, 10, 12] and held_out[12] < held_out[5]
    assert all(float(row["tokens_per_s"]) > 0 and float(row["host_gib"]) > 0 for row in rows)
    assert float(rows[0]["lr"]) > float(rows[-1]["lr"]) > 0
    assert (tmp_path / "a" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000012"]
    out = capsys.readouterr().out
    assert "step  4/12  loss" in out and "tokens/s" in out and "held out" in out and "parameters" in out


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_a_run_that_goes_on_has_the_losses_of_an_unbroken_one(tmp_path, mode):
    often = ["--mode", mode, "--schedule", "constant", "--warmup", "2", "--eval-every", "0"]
    assert train(tmp_path / "whole", *often, "--steps", "9") == 0
    assert train(tmp_path / "parts", *often, "--steps", "4") == 0
    with (tmp_path / "parts" / "metrics.csv").open("a") as file:
        file.write("5" + ",1.0" * 8 + ",\n")  # a step after the checkpoint, logged before a power failure
    assert train(tmp_path / "parts", *often, "--steps", "9", "--resume") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_cannot_end_within_its_warmup(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "4", "--warmup", "3") == 0
    for goes_on in (["train", "--out", str(tmp_path / "a")], [*SMALL, "--out", str(tmp_path / "a")]):
        assert main([*goes_on, "--resume", "--steps", "3"]) == 2
        assert "--steps 3 with a warmup of 3 steps; allowed: more steps than that" in capsys.readouterr().err


def test_interrupted_it_keeps_what_it_has(tmp_path):
    """Ctrl-C in the middle: a checkpoint of the last step, all metrics, exit code 130."""
    command = [sys.executable, "-m", "t1lib", *SMALL, "--out", str(tmp_path / "a"), "--steps", "100000"]
    command += ["--checkpoint-every", "0", "--eval-every", "0"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((tmp_path / "a" / "metrics.csv").is_file() and metrics(tmp_path / "a")):
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 130, out
    done = len(metrics(tmp_path / "a"))
    assert f"interrupted after step {done}" in out and "Traceback" not in out
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert (tmp_path / "a" / "metrics.png").is_file()


@pytest.mark.parametrize("signals, passed_on, code", [(1, 0.0, 0), (2, 0.0, 130), (2, 60.0, 0)])
def test_interrupted_in_its_last_checkpoint_it_finishes_that_unless_asked_twice(
    tmp_path, monkeypatch, signals, passed_on, code
):
    monkeypatch.setattr(run, "PASSED_ON", passed_on)
    write, sent = checkpoint._write, []

    def interrupted(path, content):
        if "00000003" in str(path) and len(sent) < signals:
            sent.append(path)
            os.kill(os.getpid(), signal.SIGINT)
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write", interrupted)
    assert train(tmp_path / "a", "--steps", "3", "--checkpoint-every", "2") == code
    assert len(sent) == signals
    kept = "step-00000003" if code == 0 else "step-00000002"
    assert [p.name for p in (tmp_path / "a" / "checkpoints").glob("step-*")] == [kept]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, capsys):
    write, calls = checkpoint._write, []

    def full(path, content):
        calls.append(path)
        if "00000004" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write", full)
    assert train(tmp_path / "a", "--steps", "6", "--checkpoint-every", "2", "--schedule", "constant") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.setattr(checkpoint, "_write", write)
    assert train(tmp_path / "a", "--steps", "6", "--checkpoint-every", "2", "--schedule", "constant", "--resume") == 0
    assert [int(row["step"]) for row in metrics(tmp_path / "a")] == [1, 2, 3, 4, 5, 6]


def test_a_disk_too_full_for_the_first_checkpoint_is_no_dead_end(tmp_path, capsys):
    with largest_file(100_000):
        assert train(tmp_path / "a", "--steps", "4", "--checkpoint-every", "2") == 2
    assert "step-00000002: File too large" in capsys.readouterr().err
    assert list((tmp_path / "a" / "checkpoints").iterdir()) == []
    assert train(tmp_path / "a", "--steps", "4", "--checkpoint-every", "2") == 2
    assert "holds a run; --resume goes on with it" in capsys.readouterr().err
    assert train(tmp_path / "a", "--steps", "4", "--resume") == 0
    assert [int(row["step"]) for row in metrics(tmp_path / "a")] == [1, 2, 3, 4]


def test_killed_in_its_first_checkpoint_before_any_row_it_begins_anew(tmp_path):
    assert train(tmp_path / "a", "--steps", "1") == 0
    (tmp_path / "a" / "metrics.csv").unlink()
    (tmp_path / "a" / "checkpoints" / "step-00000001").rename(tmp_path / "a" / "checkpoints" / ".step-00000001.partial")
    assert train(tmp_path / "a", "--steps", "2") == 0
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000002"]


def test_metrics_that_cannot_be_written_cost_no_step(tmp_path, monkeypatch, capsys):
    """The step's checkpoint is written, and the run resumes from it, without the row that was cut short."""
    step, save = LanguageSession.step, run.save_checkpoint
    with largest_file(2**30), monkeypatch.context() as patch:  # restores the limit at the end, whatever happens
        room = largest_file(350)  # within the third row: the header and two rows are about 300 bytes

        def full_in_the_third(self):
            record = step(self)
            if record.step == 3:
                room.__enter__()
            return record

        def with_room(*arguments):
            room.__exit__(None, None, None)
            return save(*arguments)

        patch.setattr(LanguageSession, "step", full_in_the_third)
        patch.setattr(run, "save_checkpoint", with_room)
        assert train(tmp_path / "a", "--steps", "6", "--schedule", "constant", "--eval-every", "0") == 2
    assert f"error: cannot write {tmp_path / 'a' / 'metrics.csv'}: File too large\n" == capsys.readouterr().err
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000003"]
    assert (tmp_path / "a" / "metrics.csv").stat().st_size == 350
    assert train(tmp_path / "a", "--steps", "6", "--schedule", "constant", "--eval-every", "0", "--resume") == 0
    assert {4, 5, 6} <= {int(row["step"]) for row in metrics(tmp_path / "a")}


@pytest.mark.parametrize(
    "damage", [b",,\r\n", b",,", b"2,1.0,2", b"\0\0\0", b"\xff\xfe\r\n", b"2,x" + b",1" * 8 + b"\r\n"]
)
def test_damaged_rows_are_dropped(tmp_path, damage):
    assert train(tmp_path / "a", "--steps", "2", "--eval-every", "0") == 0
    before = (tmp_path / "a" / "metrics.csv").read_bytes()
    (tmp_path / "a" / "metrics.csv").write_bytes(before + damage)
    assert train(tmp_path / "a", "--steps", "2", "--eval-every", "0", "--resume") == 0
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == before


def test_a_finished_run_whose_plot_or_model_cannot_be_written_says_so(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "2") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    for name, more in (("metrics.png", []), ("model", ["--export"])):
        capsys.readouterr()
        with largest_file(5000):
            assert train(tmp_path / "a", "--steps", "2", "--resume", *more) == 2
        err = capsys.readouterr().err
        assert f"error: cannot write {tmp_path / 'a' / name}: " in err and "File too large" in err
        assert "Traceback" not in err
        assert before == {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    (tmp_path / "a" / "metrics.csv").unlink()
    assert train(tmp_path / "a", "--steps", "2", "--resume") == 2
    assert "metrics.csv has no step to plot" in capsys.readouterr().err
    assert not pyplot.get_fignums()


def test_a_tokenizer_that_cannot_be_written_leaves_no_model(tmp_path, monkeypatch, capsys):
    """Its library raises a bare Exception."""
    plain = language.save_tokenizer

    def blocked(tokenizer, folder):
        (folder / "tokenizer.json").mkdir()
        plain(tokenizer, folder)

    monkeypatch.setattr(language, "save_tokenizer", blocked)
    assert train(tmp_path / "a", "--steps", "1", "--export") == 2
    assert f"error: cannot write {tmp_path / 'a' / 'model'}: Is a directory" in capsys.readouterr().err
    assert not list((tmp_path / "a").glob("*model*"))


def test_a_disk_too_full_for_settings_and_metrics_leaves_those_before(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "2") == 0
    names = tmp_path / "a" / "run.json", tmp_path / "a" / "metrics.csv"
    before = [path.read_bytes() for path in names]
    for path in names:
        with largest_file(path.stat().st_size - 1):
            assert train(tmp_path / "a", "--steps", "2", "--resume") == 2
        assert "File too large" in capsys.readouterr().err
        assert [path.read_bytes() for path in names] == before


def test_a_row_longer_than_the_models_positions_is_refused_before_anything_is_built(tmp_path, monkeypatch, capsys):
    for module, name in ((session, "build_model"), (language, "load_corpus")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("built"))
    assert train(tmp_path / "a", "--seq", "4096") == 2
    assert "seq 4096; the model has 2048 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{}", "run.json is broken: no corpus or settings"),
        ("run.json", "[]", "run.json is broken: no corpus or settings"),
        ("run.json", '{"corpus": "", "settings": {"model": "tiny"}}', "run.json is broken: no batch, mode"),
        ("run.json", "{", "run.json is broken"),
        ("run.json", None, "holds no run to go on with"),
        ("checkpoints/step-00000001/checkpoint.json", "{", "checkpoint.json"),
    ],
)
def test_a_broken_folder_is_named(tmp_path, capsys, name, content, message):
    assert train(tmp_path / "a", "--steps", "1") == 0
    path = tmp_path / "a" / name
    path.unlink() if content is None else path.write_text(content)
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    assert train(tmp_path / "a", "--steps", "1", "--resume") == 2
    err = capsys.readouterr().err
    assert err.count(message) == 2 and err.count("\n") == 2
    if content is None:
        assert train(tmp_path / "a", "--steps", "1") == 2
        assert "holds a run without its run.json" in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "a").write_text("")
    for more in ([], ["--resume"]):
        assert train(tmp_path / "a", *more) == 2
        assert f"{tmp_path / 'a'}" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    assert (tmp_path / "a").read_text() == ""


def test_it_goes_on_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("".join(f"line {i} of many\n" for i in range(2000)))
    monkeypatch.chdir(tmp_path)
    assert train("a", "--steps", "1", "--data", "own", "--export") == 0
    more = ["--data", "own", "--seq", "16", "--batch", "4", "--device", "cpu", "--head", "chunked", "--out", "b"]
    assert main(["train", "--model", "a/model", *more, "--steps", "1"]) == 0
    monkeypatch.chdir(tmp_path / "own")
    for name in ("a", "b"):
        assert main(["train", "--resume", "--out", f"../{name}", "--steps", "2"]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "0"], "--steps 0; allowed: 1 or more"),
        (["--eval-rows", "-1"], "--eval-rows -1; allowed: 0 or more"),
        (["--eval-rows", "0"], "--eval-rows 0; allowed: 1 or more, or --eval-every 0"),
        (["--device", "tpu"], "--device tpu; allowed here: cpu"),
        (["--change", "num_hidden_layers", "0"], "num_hidden_layers=0; allowed: 1 or more"),
        (["--change", "num_hidden_layers", "x"], "num_hidden_layers='x'; allowed: 1 or more"),
        (["--change", "hidden_size", "x"], "hidden_size='x'; allowed: 1 or more"),
        (["--change", "hidden_size", "-64"], "hidden_size=-64; allowed: 1 or more"),
        (["--change", "vocab_size", "0"], "vocab_size=0; allowed: 1 or more"),
        (["--change", "num_key_value_heads", "3"], "num_key_value_heads=3; allowed: divisors of num_attention_heads=4"),
        (["--change", "hidden_act", "foo"], "unknown hidden_act 'foo'; allowed: gelu, "),
        (["--change", "dtype", "float16"], "dtype='float16' is no change of the shape; allowed: by its own option"),
        (["--change", "rms_norm_eps", "x"], "tiny cannot be changed so"),
        (["--vocabulary", "0"], "--vocabulary 0; allowed: 1 or more"),
        (["--weight-decay", "-1"], "weight_decay -1.0; allowed: a finite number, 0 or more"),
        (["--mode", "slid"], "unknown mode 'slid'"),
        (["--head", "best"], "unknown head 'best'"),
        (["--data", "/nowhere"], "no corpus at /nowhere"),
        (["--vocabulary", "100000"], "is more than this corpus supports"),
        (["--seq", "4096"], "seq 4096; the model has 2048 positions"),
        (["--gpu-memory", "1GiB"], "--gpu-memory is of mode slide, the mode is gpu"),
        (["--update", "device"], "--update is of mode slide, not gpu"),
        (["--mode", "slide", "--update", "gpu"], "unknown update 'gpu'"),
        (["--mode", "slide", "--gpu-memory", "1MiB"], "the least that works"),
        (["--change", "layers", "3"], "layers"),
        (["--model", "qwen3-06b"], "unknown model 'qwen3-06b'"),
        (["--batch", "100000"], "batch 100000; the corpus has"),
        (["--resume"], "holds no run to go on with"),
        (["--micro-batch", "0"], "--micro-batch 0; allowed: 1 or more"),
        (["--lr", "-1"], "lr -1.0; allowed: a finite number, 0 or more"),
        (["--seed", "99999999999999"], "--seed 99999999999999; allowed: less than 2^32"),
        (["--change", "pad_token_id", "9999"], "no model of type 'qwen3' can be made of this configuration"),
        (["--workspace", "much"], "bad size 'much'"),
    ],
)
def test_bad_input_is_named_and_nothing_is_left(tmp_path, capsys, more, message):
    assert train(tmp_path / "a", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_it_goes_on_with_nothing_but_its_folder(tmp_path, capsys):
    assert train(tmp_path / "whole", "--steps", "6", "--schedule", "constant") == 0
    assert train(tmp_path / "parts", "--steps", "3", "--schedule", "constant") == 0
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--steps", "6"]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert main(["train", "--resume"]) == 2 and "needs --out" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(tmp_path / "none")]) == 2
    assert "holds no run to go on with" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "none")]) == 2 and "--model is missing" in capsys.readouterr().err


def test_it_goes_on_with_the_warm_up_that_it_has(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "2", "--warmup", "1") == 0
    before = (tmp_path / "a" / "run.json").read_bytes()
    assert train(tmp_path / "a", "--steps", "60", "--resume", "--warmup", "5") == 2
    err = capsys.readouterr().err
    assert "schedule is {'name': 'cosine', 'warmup': 5}; the run in" in err and "'warmup': 1} and goes on with" in err
    assert main(["train", "--out", str(tmp_path / "a"), "--resume", "--warmup", "1"]) == 2
    assert "leave out --warmup" in capsys.readouterr().err
    assert (tmp_path / "a" / "run.json").read_bytes() == before
    for more in ([], ["--warmup", "1"]):
        assert train(tmp_path / "a", "--steps", "60", "--resume", "--eval-every", "0", *more) == 0
        assert run.read_settings(tmp_path / "a")["settings"]["schedule"]["warmup"] == 1


def test_what_is_the_runs_own_is_not_given_again(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "2") == 0
    assert main(["train", "--out", str(tmp_path / "a"), "--resume", "--lr", "1", "--batch", "8"]) == 2
    assert "leave out --batch, --lr" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "a"), "--resume"]) == 0
    assert "is at step 2 of 2: nothing to train" in capsys.readouterr().out


def test_a_start_that_failed_does_not_lock_its_folder(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "2", "--workspace", "1") == 2
    assert "too small" in capsys.readouterr().err
    assert train(tmp_path / "a", "--steps", "2") == 0


@pytest.mark.parametrize("mode", ["gpu", "slide", "fsdp"])
def test_what_it_exports_is_the_model_that_was_trained(tmp_path, mode):
    assert train(tmp_path / "a", "--steps", "4", "--mode", mode, "--export", "--eval-rows", "8") == 0
    exported = tmp_path / "a" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"]) == "def f(x):\n    return x"
    held_out = load_corpus(None, 16, limit="300KB", tokenizer=exported / "tokenizer.json").held_out
    rows = held_out.take([place * len(held_out) // 8 for place in range(8)])
    loss = model(input_ids=rows["input_ids"], labels=rows["labels"]).loss.item()
    assert loss == pytest.approx(float(metrics(tmp_path / "a")[-1]["held_out_loss"]), rel=1e-5)
    more = ["train", "--model", str(exported), "--limit", "300KB", "--seq", "16", "--batch", "4", "--device", "cpu"]
    assert main([*more, "--head", "chunked", "--steps", "1", "--out", str(tmp_path / "b")]) == 0


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path):
    assert train(tmp_path / "a", "--steps", "3") == 0
    before = losses(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert train(tmp_path / "a", "--steps", "3", "--resume") == 0
    assert losses(tmp_path / "a") == before


def test_a_run_is_not_overwritten_and_goes_on_with_its_own_settings_alone(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "2") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert train(tmp_path / "a", "--steps", "2") == 2
    assert "holds a run; --resume goes on with it" in capsys.readouterr().err
    assert train(tmp_path / "a", "--steps", "2", "--resume", "--batch", "8") == 2
    assert "batch is 8; the run in" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}


def test_a_resumed_run_keeps_its_length_unless_told(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "4") == 0
    assert train(tmp_path / "a", "--resume") == 0
    assert "is at step 4 of 4: nothing to train" in capsys.readouterr().out
    assert train(tmp_path / "a", "--resume", "--steps", "2") == 2
    assert "is at step 4; allowed: --steps 4 or more" in capsys.readouterr().err
    assert json.loads((tmp_path / "a" / "run.json").read_text())["settings"]["steps"] == 4


def test_a_changed_vocabulary_sizes_the_tokenizer(tmp_path):
    own = [argument for argument in SMALL if argument not in ("--vocabulary", "300")]
    assert main([*own, "--out", str(tmp_path / "a"), "--steps", "1", "--change", "vocab_size", "300"]) == 0


def test_a_run_in_the_folder_of_its_data_is_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 5000)
    for out in (tmp_path, f"{tmp_path}/../{tmp_path.name}"):
        assert main([*SMALL, "--out", str(out), "--steps", "1", "--data", str(tmp_path)]) == 2
        assert "is the folder of --data" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(("option", "value"), [("--out", ""), ("--out", "a\udcff")], ids=["empty", "no text"])
def test_folders_that_cannot_be(tmp_path, monkeypatch, capsys, option, value):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, option, value, "--steps", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} ")
    assert not list(tmp_path.iterdir())


def test_options_are_given_even_at_their_defaults(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "1", "--batch", "2") == 0
    assert main(["train", "--resume", "--out", str(tmp_path / "a"), "--batch", "16"]) == 2
    assert "goes on with the run's own settings; leave out --batch" in capsys.readouterr().err


def test_two_processes_do_not_train_in_one_folder(tmp_path, capsys):
    assert train(tmp_path / "a", "--steps", "1") == 0
    with locked(tmp_path / "a" / ".lock", ""):
        assert train(tmp_path / "a", "--steps", "2", "--resume") == 2
    assert "another process trains in" in capsys.readouterr().err
    assert train(tmp_path / "a", "--steps", "2", "--resume") == 0
