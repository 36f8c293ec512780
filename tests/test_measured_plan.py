"""Predictions for an H200 are close to what was measured on one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from t1lib.footprint import Choice
from t1lib.machine import H200
from t1lib.measure.frontier import LEAN as ROW
from t1lib.measure.frontier import NARROW
from t1lib.measure.memory import GIB
from t1lib.planner import Setting, predict_point
from t1lib.train.spec import OptimizerSpec

H200_KIT = Path(__file__).resolve().parent.parent / "outputs" / "h200"
SPLIT = {"split_master": True}
LEAN = Choice(slots=2, inputs="host", outer="parked")
T1M1 = Setting("qwen3-1.7b", rows=16, seq=1024, micro_batch=16, update="device")
CLIPPED = replace(T1M1, rows=32, max_grad_norm=1.0, update="both")


def adamw(**other):
    return OptimizerSpec("adamw", master_weights=True, **other)


@pytest.mark.parametrize(
    ("setting", "optimizer", "mode", "choice", "ms", "allocated", "reserved"),
    [
        (T1M1, {}, "gpu", None, 514, 72.1, 72.3),
        (T1M1, {}, "ckpt", None, 635, 27.9, 28.2),
        (T1M1, SPLIT, "slide", LEAN, 647, 3.60, 3.99),
        (T1M1, SPLIT, "slide", Choice(3, 1, 2, "host", "host", 8), 637, 7.62, 7.94),
        (T1M1, SPLIT, "slide", Choice(3, 0, 11, "host", "host", 8), 599, 23.11, 23.45),
        (T1M1, SPLIT, "slide", Choice(3, 15, 28, "device", "host", 8), 516, 61.69, 62.03),
        (CLIPPED, SPLIT, "slide", replace(LEAN, slots=3), 1423, 4.06, 4.38),
        (replace(T1M1, model="qwen3-8b"), {}, "slide", Choice(2, 0, 0, "device", "host", 4), 2692, 13.02, 13.35),
        (replace(T1M1, model="qwen3-14b"), NARROW, "slide", Choice(3, 1, 18, "host", "host", 8), 3959, 97.02, 97.91),
    ],
    ids=["gpu", "ckpt", "lean", "8GiB", "24GiB", "64GiB", "clipped", "8B", "14B"],
)
def test_settings_of_t1m1(setting, optimizer, mode, choice, ms, allocated, reserved):
    """Measured at commit b8f9a1d: ms, GiB."""
    found = predict_point(replace(setting, optimizer=adamw(**optimizer)), mode, "fused", H200, choice)
    assert found.ms == pytest.approx(ms, rel=0.12 if setting.model == "qwen3-14b" else 0.05)
    assert found.allocated == pytest.approx(allocated * GIB, rel=0.04)
    assert found.reserved == pytest.approx(reserved * GIB, rel=0.05)


@pytest.mark.parametrize(
    ("point", "ms", "allocated", "reserved"),
    [
        ("0.6b gpu full 8192", 234, 37.2, 39.6),
        ("0.6b gpu fused 512", 95, 9.25, 9.56),
        ("0.6b gpu fused 32768", 1287, 70.4, 70.7),
        ("0.6b ckpt chunked 512", 163, 9.24, 9.36),
        ("0.6b ckpt fused 4096", 171, 9.28, 9.54),
        ("0.6b ckpt chunked 65536", 5202, 21.6, 21.9),
        ("0.6b slide fused 512", 187, 1.18, 1.29),
        ("0.6b slide fused 4096", 190, 1.39, 1.94),  # at b3cdf03, with graphs
        ("0.6b slide fused 131072", 19157, 12.2, 13.6),
        ("1.7b ckpt full 4096", 211, 29.9, 31.1),
        ("1.7b ckpt full 16384", 894, 52.3, 57.1),
        ("1.7b ckpt fused 65536", 6439, 39.0, 40.0),
        ("1.7b slide full 512", 525, 2.16, 2.90),
        ("1.7b slide full 32768", 2286, 58.0, 67.8),
        ("1.7b slide chunked 32768", 2283, 7.80, 8.12),
        ("1.7b slide fused 4096", 530, 2.17, 2.74),
        ("1.7b slide fused 65536", 6859, 10.8, 12.1),
        ("4b ckpt fused 512", 226, 60.7, 60.9),
        ("4b ckpt fused 32768", 5070, 66.7, 67.8),
        ("4b slide fused 4096", 1287, 2.88, 3.60),
        ("8b slide fused 512", 2674, 6.45, 6.75),
        ("14b slide fused 4096", 3105, 9.80, 10.1),
    ],
)
def test_single_rows(point, ms, allocated, reserved):
    """Points of frontier, measured by scripts at b8f9a1d on a host that launches faster than the reference: ms, GiB."""
    size, mode, head, seq = point.split()
    spec = adamw(**(NARROW if size == "14b" else {}))
    setting = Setting("qwen3-" + size, 1, int(seq), optimizer=spec, changes={"max_position_embeddings": 131072})
    choice = Choice(**ROW | {"slots": 3 if size == "14b" else 2}) if mode == "slide" else None
    found = predict_point(setting, mode, head, replace(H200, launch_ms=0.8, graph_ms=0.19), choice)
    assert found.ms == pytest.approx(ms, rel=0.15)
    assert found.allocated == pytest.approx(allocated * GIB, rel=0.055)
    assert found.reserved == pytest.approx(reserved * GIB, rel=0.1)


@pytest.mark.parametrize("head", ["full", "chunked", "fused"])
def test_memory_of_t1m3(head):
    """The steps of t1m3's committed run: SGD, everything on the device."""
    measured = json.loads((H200_KIT / "t1m3" / "numbers.json").read_text(encoding="utf-8"))
    asked = json.loads((H200_KIT / "t1m3" / "manifest.json").read_text(encoding="utf-8"))["parameters"]
    setting = Setting(asked["model"], asked["batch"], asked["seq"], optimizer=OptimizerSpec("sgd"), workspace=300 << 20)
    found = predict_point(setting, "gpu", head, H200)
    assert found.allocated / GIB == pytest.approx(measured[f"t1m3.step.{head}.allocated_gib"]["value"], rel=0.02)
    assert found.reserved / GIB == pytest.approx(measured[f"t1m3.step.{head}.reserved_gib"]["value"], rel=0.10)
