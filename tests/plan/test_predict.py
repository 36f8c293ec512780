"""The planner: what it counts, what it recommends, and what it says when nothing fits."""

import json
import shlex
from dataclasses import asdict, replace
from math import inf

import pytest
import torch

from t1lib import models
from t1lib.__main__ import main
from t1lib.errors import T1Error
from t1lib.heads import HEADS
from t1lib.heads.fused_plan import Device
from t1lib.memory import GIB
from t1lib.models import shape_only
from t1lib.optimizers import OptimizerSpec
from t1lib.plan import rates, work
from t1lib.plan.predict import Setting, predict, predict_point, recommended, would_fit
from t1lib.plan.rates import H200, Machine
from t1lib.plan.work import MODES, with_head, work_of

SETTING = Setting("qwen3-1.7b", rows=16, seq=1024)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "cache"))


def test_heads_workspaces_are_those_that_were_measured():
    """Notebook cce, shape Q, MiB beyond the gradients: full 13619, chunked 1203, fused with a workspace of 512: 442.
    PyTorch's own head, 8192 tokens, 256000 × 2304: 1163 MiB; 244 ms, of which three products take 42."""
    asked = work_of(shape_only("qwen3-1.7b", torch.bfloat16), OptimizerSpec("adamw").kinds, rows=8, seq=1024)
    # dE, which `full` does not hold yet at its peak; `with_head` deducts only dW.
    gradients = 8192 * 2048 * 2
    held = {head: with_head(asked, head).workspace / 2**20 for head in ("full", "chunked", "fused")}
    assert held["full"] - gradients / 2**20 == pytest.approx(13619, rel=0.01)
    assert held["chunked"] == pytest.approx(1203, rel=0.02)
    assert held["fused"] == pytest.approx(442, rel=0.02)
    asked = work_of(shape_only("gemma-2-2b", torch.bfloat16), OptimizerSpec("sgd").kinds, rows=1, seq=8192)
    found = with_head(asked, "torch")
    assert found.workspace / 2**20 == pytest.approx(1163, rel=0.01)
    assert found.head_moves * 8192 * 256000 / H200.memory * 1e3 == pytest.approx(244 - 42, rel=0.02)


def test_a_workspace_that_is_too_small_for_the_head_is_why_that_alone_does_not_fit(capsys):
    why, small = "workspace of 1024 bytes is too small for head 'fused'", replace(SETTING, workspace=1024)
    found = predict(small, 141 * GIB, None, H200)
    assert [(p.mode, p.head) for p in found] == [(m, h) for m in MODES for h in HEADS]
    assert all((why in p.why and p.reserved == inf) == (p.head == "fused") for p in found)
    assert recommended(found).head == "chunked"
    with pytest.raises(T1Error, match=why):
        predict_point(small, "gpu", "fused", H200)
    assert main(["plan", "--model", "tiny", "--vram", "1GiB", "--workspace", "1KiB"]) == 0
    out = capsys.readouterr().out
    assert "inf" not in out and "nan" not in out
    rows = [line.split(maxsplit=7) for line in out.splitlines() if why in line]
    assert [(row[1], row[2:7]) for row in rows] == [("fused", ["-"] * 5)] * 4


def test_why_the_others_fail_and_what_would_fit():
    """The smallest change of each kind is named; changes that do not help are not."""
    found = {(p.mode, p.head): p for p in predict(SETTING, 16 * GIB, 64 * GIB, H200)}
    assert found["gpu", "fused"].why.endswith("of 16.0 GiB on the device")
    assert recommended(found.values()) == found["slide", "fused"]
    with pytest.raises(T1Error, match=r"nothing fits; the least is mode slide .* GiB on the device and .*host"):
        recommended(predict(SETTING, 16 * GIB, 8 * GIB, H200))
    short_host = would_fit(SETTING, 16 * GIB, 16 * GIB, H200)
    assert {"--moments bfloat16 --split-master", "--optimizer sgd", "--model qwen3-0.6b"} <= short_host.keys()
    assert all(not p.why and p.host <= 16 * GIB for p in short_host.values())
    short_device = would_fit(SETTING, 7 * GIB // 2, None, H200)
    assert "--micro-batch 1" in short_device and not any("moments" in change for change in short_device)


def test_the_command_prints_the_table_and_a_command_to_train_as_a_shell_takes_it(capsys, monkeypatch):
    asked = ["--model", "qwen3-8b", "--seq", "4096", "--vram", "16 GiB", "--max-grad-norm", "0"]
    assert main(["plan", *asked, "--change", "rope_parameters", (value := "{'rope_type': 'default'}")]) == 0
    out = capsys.readouterr().out
    assert out.count("GiB on the device") == 8 and "recommended: mode slide, head fused" in out
    assert "an H200's rates, not this machine's" in out
    command = shlex.split(out.splitlines()[-2])
    assert " ".join(command[:10]) == "python -m t1lib train --model qwen3-8b --mode slide --head fused"
    assert command[-3:] == ["--change", "rope_parameters", value]
    given = dict(zip(command[4::2], command[5::2], strict=False))
    assert {"--gpu-memory": "16 GiB", "--seq": "4096", "--max-grad-norm": "0"}.items() <= given.items()
    config = shape_only("tiny").config  # of a model of the hub there is no such command
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", lambda *_, **__: config)
    assert main(["plan", "--model", "owner/model", "--vram", "1GiB"]) == 0
    assert "t1lib train" not in capsys.readouterr().out


def test_without_a_budget_the_command_names_the_memory_that_is_free(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "--model", "tiny"]) == 2
    assert "--vram is missing, and there is no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * GIB, 25 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(work, "device_of", lambda _: Device("hopper", 132))
    assert main(["plan", "--model", "qwen3-8b", "--seq", "16384"]) == 0
    out = capsys.readouterr().out
    assert "--gpu-memory 24576MiB" in out.splitlines()[-2] and "this machine's rates" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model qwen3-8b --vram 1GiB", "nothing fits; the least is"),
        ("--model tiny --vram 1MiB", "would fit: nothing near it, either"),
        ("--model qwen3-1.7b --vram 8GiB --host 16GiB", "--moments bfloat16 --split-master ("),
        ("--model tiny --vram 1GiB --optimizer sgd --split-master", "are for name='adamw'"),
        ("--vram 16GiB", "--model is missing"),
        ("--model tiny --vram 1GiB --max-grad-norm nan", "--max-grad-norm nan; allowed: 0 or more"),
        (f"--model tiny --vram 1GiB --host {'9' * 400}GiB", "bad size '999"),
        ("--model qwen3-1.7b --vram 1GiB --seq 50000", "seq 50000; qwen3-1.7b has 40960 positions"),
        ("--model tiny --vram 1GiB --batch 0", "rows=0; allowed: 1 or more"),
        (
            "--model tiny --vram 1GiB --batch 1000000000",
            "tokens per step of rows=1000000000, seq=1024; allowed: 134217728",
        ),
        ("--model tiny --vram 1GiB --change dtype float16", "dtype='float16' is no change of the shape"),
    ],
)
def test_bad_commands_are_named(arguments, message, capsys):
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error) < 600 and "Traceback" not in error


def test_calibrating_keeps_rates_that_are_used_on_this_device_alone(capsys, monkeypatch):
    monkeypatch.setattr(rates, "ROUNDS", 1)
    assert rates.this_machine() == H200
    assert main(["plan", "--calibrate"]) == 0
    assert "GB/s" in capsys.readouterr().out
    found = rates.this_machine()
    assert found != H200 and min(v for v in asdict(found).values() if not isinstance(v, str)) > 0
    assert Machine(**json.loads(rates.machine_file().read_text())) == found
    monkeypatch.setattr(rates, "device_name", lambda: "another")
    assert rates.this_machine() == H200
    rates.machine_file().write_text("{")
    assert rates.this_machine() == H200
