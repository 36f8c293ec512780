"""Predictions for an H200 are close to what was measured on one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from t1lib.measure.records import Records, numeric
from t1lib.memory import GIB
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.cost import Choice, device_bytes, reserved_bytes
from t1lib.plan.predict import Setting, predict_point, work_for
from t1lib.plan.rates import H200
from t1lib.plan.work import in_mode

FRONTIER = Path(__file__).resolve().parents[2] / "outputs" / "h200" / "frontier"
SPLIT = {"split_master": True}
NARROW = SPLIT | {"moments": "bfloat16"}
LEAN = Choice(slots=2, inputs="host", outer="host")
T1M1 = Setting("qwen3-1.7b", rows=16, seq=1024, micro_batch=16, together=False)
CLIPPED = replace(T1M1, rows=32, together=True)


def adamw(**other):
    return OptimizerSpec("adamw", master_weights=True, **other)


@pytest.mark.parametrize(
    ("setting", "optimizer", "mode", "choice", "ms", "allocated", "reserved"),
    [
        (T1M1, {}, "gpu", None, 519, 72.02, 72.46),
        (T1M1, {}, "ckpt", None, 650, 27.85, 28.10),
        (T1M1, SPLIT, "slide", LEAN, 672, 3.48, 3.93),
        (T1M1, SPLIT, "slide", Choice(3, 0, 2, "host", "host", 8), 673, 6.93, 7.31),
        (T1M1, SPLIT, "slide", Choice(3, 2, 10, "host", "host", 8), 664, 22.33, 22.77),
        (T1M1, SPLIT, "slide", Choice(3, 8, 28, "device", "host", 8), 564, 57.69, 58.16),
        (T1M1, {}, "fsdp", None, 1938, 5.28, 6.18),
        (CLIPPED, SPLIT, "slide", replace(LEAN, slots=3, host_share=1 / 4), 1513, 3.82, 4.29),
        (CLIPPED, SPLIT, "slide", Choice(3, 4, 1, grads="device"), 1347, 15.58, 16.54),
        (replace(T1M1, model="qwen3-8b"), {}, "slide", Choice(2, 1, 0, "host", "host", 8), 2451, 12.86, 13.44),
    ],
    ids=["gpu", "ckpt", "lean", "8GiB", "24GiB", "60GiB", "fsdp", "clipped", "clipped in 16GiB", "8B"],
)
def test_settings_of_t1m1(setting, optimizer, mode, choice, ms, allocated, reserved):
    """Measured at commit e04ac27: ms, GiB."""
    found = predict_point(replace(setting, optimizer=adamw(**optimizer)), mode, "fused", H200, choice)
    off = 0.2 if mode == "fsdp" else 0.1  # the hosts' CPUs differ
    assert found.ms == pytest.approx(ms, rel=off)
    assert found.allocated == pytest.approx(allocated * GIB, rel=0.11 if mode == "fsdp" or setting.together else 0.05)
    assert found.reserved == pytest.approx(reserved * GIB, rel=0.08)


def test_points_of_frontier():
    """Against the committed run. At most a process that ran other lengths and heads before reserves 15 % more."""
    frame = Records.load(FRONTIER / "samples.csv").frame()
    asked = json.loads((FRONTIER / "manifest.json").read_text(encoding="utf-8"))["parameters"]
    facts = frame[frame["phase"] == "facts"].set_index("metric")["value"]
    vram = (float(facts["vram_gib"]) - float(facts["context_gib"])) * GIB  # no more than that is reserved
    keys = {"index": ["variant", "phase"], "columns": "metric", "values": "value"}
    measured = numeric(frame).pivot_table(**keys, aggfunc="median", sort=False).dropna(subset=["wall_ms"])
    found, most = [], []
    for (variant, phase), point in measured.iterrows():
        model, mode, head = variant.split("/")
        narrow = model in asked["narrow"]
        setting = Setting(model, 1, int(phase.removeprefix("seq/")), optimizer=adamw(**NARROW if narrow else {}))
        setting = replace(setting, together=False, changes={"max_position_embeddings": max(asked["lengths"])})
        choice = replace(LEAN, slots=2 + narrow)
        p = predict_point(setting, mode, head, H200, choice)
        found.append((p.allocated / GIB / point["allocated_gib"], min(p.reserved, vram) / GIB / point["reserved_gib"],
                      p.ms / point["wall_ms"]))  # fmt: skip
        if mode == "slide" and not narrow:
            work = in_mode(work_for(setting), mode, head)
            reserved = reserved_bytes(work, device_bytes(work, choice), choice, most=True)
            most.append(reserved / GIB / point["reserved_gib"])
    allocated, reserved, time = np.abs(np.array(found) - 1).T
    assert len(found) > 30 and (allocated <= 0.05).mean() >= 0.9 and allocated.max() <= 0.06
    assert (reserved <= 0.10).mean() >= 0.9 and reserved.max() <= 0.21 and (time <= 0.20).mean() >= 0.8
    assert len(most) > 10 and min(most) >= 0.87 and 1 < np.mean(most) < 1.15
