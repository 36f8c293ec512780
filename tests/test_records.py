"""Records and numbers, what a run notes of its machine, and the gate: losses that differ cost a variant its times."""

import getpass
import json
import math
import platform
import subprocess

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

from t1lib.kit.style import make_table, mean_std
from t1lib.measure.manifest import default_profile, environment, git_state
from t1lib.measure.records import Numbers, Records, escape_latex, format_number, gate_losses, numeric, pick, statuses


def test_csv_round_trip_is_exact_and_wrong_rows_are_refused(tmp_path):
    records = Records()
    records.put("slide", "clean", {"wall_ms": 0.1 + 0.2}, 0)
    records.put("slide", "clean", {"wall_ms": torch.tensor(1 / 3, dtype=torch.float64)}, 1)
    records.put("gpu", "", {"peak": np.int64(2**40 + 1)}, "layer 3, ²")
    records.put("gpu", "", {"peak": 1.0}, np.int64(3))
    records.status("ckpt", "oom", phase="clean")
    records.put("slide", "own", {"loss": 1, "wall_ms": 2.5, "host_gib": 3.0, "h2d_gb_s": 4.0}, 7)
    records.save(tmp_path / "samples.csv")
    loaded = Records.load(tmp_path / "samples.csv")
    assert loaded.rows == records.rows
    frame = loaded.frame()
    assert list(frame.columns) == ["variant", "phase", "step", "metric", "unit", "value"]
    assert frame["value"].tolist() == [0.1 + 0.2, 1 / 3, 2.0**40 + 1, 1.0, "oom", 1.0, 2.5, 3.0, 4.0]
    assert frame["unit"].tolist() == ["ms", "ms", "", "", "", "", "ms", "GiB", "GB/s"]  # by the metric's name
    assert len(numeric(frame)) == 8 and statuses(frame) == {"ckpt": "oom"}
    assert pick(frame, "wall_ms", "clean", "slide").tolist() == [0.1 + 0.2, 1 / 3]
    assert pick(frame, "wall_ms", "clean", "ckpt").empty and pick(frame, "status", "clean").empty
    records.put("slide", "", {"loss": float("nan")})
    records.save(tmp_path / "samples.csv")
    assert np.isnan(Records.load(tmp_path / "samples.csv").rows[-1]["value"])
    refused(lambda: records.status("gpu", "fine"), "allowed: ok, shared, oom, unavailable, skipped, wrong")
    for name in ("a\rb", "\ud800"):
        refused(lambda name=name: records.put(name, "", {"wall_ms": 1.0}), "printable")
    # Read back they would be of another type, so that what is drawn of the file would not find them.
    for names in ((8, ""), ("gpu", 8), ("gpu", "", 1e-4), ("gpu", "", True), ("gpu", "", "8")):
        refused(lambda names=names: records.put(*names[:2], {"loss": 1.0}, *names[2:]), "printable")
    with pytest.raises(ValueError, match="fast"):
        records.put("gpu", "", {"wall_ms": "fast"})
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    refused(lambda: Records.load(tmp_path / "other.csv"), "columns")


def test_numbers_read_well_in_text_and_in_latex():
    texts = {0.0: "0", 2**34: "17,179,869,184", 9.999: "10.0", 0.012345: "0.0123", 1234.5678: "1235"}
    texts |= {1.5e-7: "1.50e-07", float("nan"): "n/a", True: "yes", "oom": "oom"}
    assert {value: format_number(value) for value in texts} == texts
    texts = {"50% of a_b & {c}": r"50\% of a\_b \& \{c\}", "1.50e-07": r"\ensuremath{1.50\times10^{-7}}"}
    texts |= {"-12,345": r"\ensuremath{-12{,}345}", "2.50": "2.50"}
    texts |= {"< 2 | > 3": r"\ensuremath{<} 2 \ensuremath{|} \ensuremath{>} 3"}
    assert {text: escape_latex(text) for text in texts} == texts


def test_small_memory_is_shown_in_mib_column_by_column():
    missing = {"device (GiB)": float("nan"), "text (GiB)": "oom", "host (GiB)": 0.5, "none (GiB)": None}
    there = {"device (GiB)": 0.0078125, "text (GiB)": 0.01, "host (GiB)": 0.25, "none (GiB)": None}
    columns = {"device (MiB)": ["8.00", "–"], "text (MiB)": ["10.2", "oom"]}
    columns |= {"host (GiB)": ["0.250", "0.500"], "none (GiB)": ["–", "–"]}
    assert make_table([there, missing]).to_dict("list") == columns


def test_a_single_sample_has_no_deviation():
    assert [mean_std(pd.Series(values)) for values in ([2.0, 4.0], [2.0], [])] == ["3.00 ± 1.41", "2.00 ± –", "–"]


def test_numbers_round_trip(tmp_path):
    numbers = Numbers()
    numbers.set("t1m1.slide.wall_ms", np.float64(41.23456), "ms")
    numbers.set("t1m1.speed-up", 1.98765, fmt=".1f")
    numbers.set("t1m1.gone", float("inf"), fmt=".1f")
    numbers.save_json(tmp_path / "numbers.json")
    assert json.loads((tmp_path / "numbers.json").read_text("utf-8")) == numbers
    assert numbers["t1m1.slide.wall_ms"] == {"value": 41.23456, "unit": "ms", "text": "41.2"}
    assert numbers["t1m1.speed-up"]["text"] == "2.0"
    assert numbers["t1m1.gone"] == {"value": None, "unit": "", "text": "n/a"}
    refused(lambda: numbers.set("a b", 1), "'a b'")


def test_environment_names_the_machine_but_not_its_owner(checkout):
    found = environment()
    assert found["torch"] == torch.__version__ and found["cores_logical"] >= 1 and found["ram_gib"] > 0
    assert not {platform.node(), getpass.getuser()} & set(map(str, found.values()))
    assert str(checkout.root) not in json.dumps(found)
    assert default_profile() == "smoke" or torch.cuda.is_available()


def test_the_commit_is_gits_or_else_the_environments(checkout, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.root.parent))
    assert git_state() == {"commit": "unknown", "dirty": "unknown"}
    monkeypatch.setenv("T1_COMMIT", "abc1" * 10)
    monkeypatch.setenv("T1_DIRTY", "1")
    assert git_state() == {"commit": "abc1" * 10, "dirty": True}
    monkeypatch.setenv("T1_COMMIT", "main")
    refused(git_state, "T1_COMMIT is 'main'; allowed: a commit's 40 hexadecimal digits")
    own = ["git", "-C", str(checkout.root), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*own, *command], check=True)
    monkeypatch.setenv("T1_COMMIT", "abc1" * 10)
    refused(git_state, "abc1, and git says")
    monkeypatch.delenv("T1_COMMIT")
    assert len(git_state()["commit"]) == 40 and git_state()["dirty"] is False
    subprocess.run([*own, "config", "status.showUntrackedFiles", "no"], check=True)
    (checkout.root / "params" / "smoke" / "demo.yaml").touch()
    assert git_state()["dirty"] is True
    monkeypatch.setenv("T1_ROOT", str(checkout.root / "copy"))  # in the repository of another, which lacks it
    for name in ("notebooks", "params"):
        (checkout.root / "copy" / name).mkdir(parents=True)
    for ignored in ("", "copy/\n"):
        (checkout.root / ".gitignore").write_text(ignored)
        assert git_state() == {"commit": "unknown", "dirty": True}  # by T1_DIRTY


@pytest.mark.parametrize(
    ("losses", "bound", "difference", "right"),
    [
        ({"gpu": [4.0], "slide": [4.5]}, 0.2, 0.125, {"gpu", "slide"}),
        ({"gpu": [2.0, 1.0], "slide": [2.0, 1.25], "ckpt": [2.0, 1.0]}, 0.2, 0.25, {"gpu", "ckpt"}),
        ({"gpu": [2.0, 1.0], "slide": [math.nan, 1.0]}, 0.2, math.inf, {"gpu"}),
        ({"slide": [3.0], "ckpt": [2.0]}, 0.0, 1 / 3, {"slide"}),  # without the reference, the next one takes its place
        ({"gpu": [0.0], "slide": [1e-9], "ckpt": [0.0]}, 0.1, math.inf, {"gpu", "ckpt"}),
        ({"gpu": [1.0], "slide": [None, 1.0]}, 0.1, math.inf, {"gpu"}),  # other steps are no agreement
    ],
)
def test_a_variant_whose_losses_differ_loses_its_times_and_no_one_else_does(losses, bound, difference, right):
    records, runs = Records(), [(variant, "losses", "own") for variant in ("gpu", "slide", "ckpt")]
    assert gate_losses(records, runs, bound) == 0.0
    for variant, values in losses.items():
        for step, loss in enumerate(values):
            if loss is not None:
                records.put(variant, "losses", {"loss": loss, "forward_ms": 1.0}, step)
            records.put(variant, "own", {"host_gib": 1.0, "wall_ms": 5.0, "forward_ms": 2.0}, step)
        records.status(variant, "ok", "own")
    found = gate_losses(records, runs, bound)
    assert found == pytest.approx(difference)
    assert [r["value"] for r in records.rows if r["metric"] == "loss_difference"] == [found]
    assert statuses(records.frame()) == {variant: "ok" if variant in right else "wrong" for variant in losses}
    for variant in losses:
        left = {(r["phase"], r["metric"]) for r in records.rows if r["variant"] == variant}
        times = {("own", "wall_ms"), ("own", "forward_ms")} if variant in right else set()
        assert left == times | {("losses", "loss"), ("losses", "forward_ms"), ("own", "host_gib"), ("own", "status")}
