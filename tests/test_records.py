import json
import subprocess

import numpy as np
import pytest
import torch

from t1lib.errors import T1Error
from t1lib.kit.run import Run
from t1lib.measure.environment import default_profile, device_name, environment, git_state
from t1lib.measure.records import Numbers, Records, escape_latex, format_number, numeric, statuses


def sample() -> Records:
    records = Records()
    records.add("slide", "wall", 0.1 + 0.2, "ms", phase="clean", step=0)
    records.add("slide", "wall", torch.tensor(1 / 3, dtype=torch.float64), "ms", phase="clean", step=1)
    records.add("gpu", "peak", np.int64(2**40 + 1), "B", step="layer 3")
    records.status("ckpt", "oom", phase="clean")
    return records


def test_csv_round_trip_is_exact(tmp_path):
    records = sample()
    records.save(tmp_path / "samples.csv")
    loaded = Records.load(tmp_path / "samples.csv")
    assert loaded.rows == records.rows
    loaded.save(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "samples.csv").read_bytes()
    frame = loaded.frame()
    assert list(frame.columns) == ["variant", "phase", "step", "metric", "unit", "value"]
    assert frame["value"].tolist() == [0.1 + 0.2, 1 / 3, 2.0**40 + 1, "oom"]
    assert len(numeric(frame)) == 3 and statuses(frame) == {"ckpt": "oom"}
    records.add("slide", "loss", float("nan"))
    records.save(tmp_path / "samples.csv")
    assert np.isnan(Records.load(tmp_path / "samples.csv").rows[-1]["value"])


def test_extend_takes_rows_of_another_process():
    records = Records()
    records.extend(json.loads(json.dumps(sample().rows)))
    assert records.rows == sample().rows


def test_the_name_of_a_metric_tells_its_unit():
    records = Records()
    records.put("slide", "own", {"loss": 1, "wall_ms": 2.5, "host_gib": 3.0, "h2d_gb_s": 4.0}, 7)
    assert [(r["metric"], r["unit"], r["value"], r["step"]) for r in records.rows] == [
        ("loss", "", 1.0, 7), ("wall_ms", "ms", 2.5, 7), ("host_gib", "GiB", 3.0, 7), ("h2d_gb_s", "GB/s", 4.0, 7)
    ]  # fmt: skip


def test_wrong_rows_are_refused(tmp_path):
    records = Records()
    with pytest.raises(T1Error, match="allowed: ok, shared, oom, unavailable, skipped, wrong"):
        records.status("gpu", "fine")
    with pytest.raises(T1Error, match="not a number"):
        records.add("gpu", "wall", "fast")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(T1Error, match="columns"):
        Records.load(tmp_path / "other.csv")


def test_numbers_read_well():
    texts = {0.0: "0", 2**34: "17,179,869,184", 9.999: "10.0", 0.012345: "0.0123", 1234.5678: "1235"}
    texts |= {1.5e-7: "1.50e-07", float("nan"): "n/a", True: "yes", "oom": "oom"}
    assert {value: format_number(value) for value in texts} == texts


def test_latex_escapes():
    assert escape_latex("50% of a_b & {c}") == r"50\% of a\_b \& \{c\}"
    assert escape_latex("1.50e-07") == r"\ensuremath{1.50\times10^{-7}}"
    assert escape_latex("-12,345") == r"\ensuremath{-12{,}345}"
    assert escape_latex("2.50") == "2.50"


def numbers() -> Numbers:
    found = Numbers()
    found.set("t1m1.slide.wall_ms", np.float64(41.23456), "ms")
    found.set("t1m1.speed-up", 1.98765, fmt=".1f")
    found.set("t1m1.share", 0.5, "%")
    found.set("t1m1.gone", float("inf"), fmt=".1f")
    return found


def test_numbers_round_trip(tmp_path):
    numbers().save_json(tmp_path / "numbers.json")
    assert Numbers.load_json(tmp_path / "numbers.json") == numbers()
    assert numbers()["t1m1.slide.wall_ms"] == {"value": 41.23456, "unit": "ms", "text": "41.2"}
    assert numbers()["t1m1.speed-up"]["text"] == "2.0"
    assert numbers()["t1m1.gone"] == {"value": None, "unit": "", "text": "n/a"}
    with pytest.raises(T1Error, match="'a b'"):
        numbers().set("a b", 1)


def test_environment_names_the_machine_but_not_its_owner(checkout, monkeypatch):
    import getpass
    import platform

    found = environment()
    assert found["torch"] == torch.__version__
    assert found["cores_logical"] >= 1
    assert found["ram_gib"] > 0
    assert all(isinstance(value, str | int | float) for value in found.values())
    texts = [str(value) for value in found.values()]
    assert platform.node() not in texts
    assert getpass.getuser() not in texts
    assert not any(str(checkout.root) in text for text in texts)
    assert device_name()
    assert default_profile() == "smoke" or torch.cuda.is_available()


def test_the_commit_is_gits_or_else_the_environments(checkout, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.root.parent))
    assert git_state() == {"commit": "unknown", "dirty": "unknown"}
    monkeypatch.setenv("T1_COMMIT", "abc1" * 10)
    monkeypatch.setenv("T1_DIRTY", "1")
    assert git_state() == {"commit": "abc1" * 10, "dirty": True}
    monkeypatch.setenv("T1_COMMIT", "main")
    checkout.add("demo")
    with pytest.raises(T1Error, match="T1_COMMIT is 'main'; allowed: a commit's 40 hexadecimal digits"):
        Run("demo", {"profile": "smoke", "steps": 1, "rate": 1.0})
    own = ["git", "-C", str(checkout.root), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*own, *command], check=True)
    monkeypatch.setenv("T1_COMMIT", "abc1" * 10)
    with pytest.raises(T1Error, match="abc1, and git says"):
        git_state()
    monkeypatch.delenv("T1_COMMIT")
    assert len(git_state()["commit"]) == 40
