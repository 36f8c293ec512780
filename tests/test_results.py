"""The numbers in docs/results.md are those of the committed reference runs, and its rows say what ran."""

import json
import re
from pathlib import Path

import pytest

from t1lib.claims import PAGE, doubts, read_claims, write_page
from t1lib.measure import manifest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = (ROOT / PAGE).read_text(encoding="utf-8")
REFERENCE = ROOT / "outputs" / "h200"
EXPERIMENTS = sorted(path.parent.name for path in REFERENCE.glob("*/manifest.json"))
SHORT = ROOT / "outputs" / "h200-short" / "frontier"
RUNS = [*(REFERENCE / name for name in EXPERIMENTS), SHORT]
CLAIMS = read_claims()


def test_there_are_claims_of_every_committed_run():
    assert {claim.experiment for claim in CLAIMS} == set(EXPERIMENTS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_a_claims_number_is_the_reference_runs(claim):
    numbers = json.loads((REFERENCE / claim.experiment / "numbers.json").read_text(encoding="utf-8"))
    assert numbers[claim.key]["text"] == claim.number
    assert claim.holds(numbers[claim.key]["value"])


def test_the_page_is_made_of_the_claims():
    write_page()
    assert (ROOT / PAGE).read_text(encoding="utf-8") == RESULTS


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_reference_run_is_no_others(experiment):
    """Every file is the one that its manifest lists, and the numbers come out of the samples."""
    assert doubts(REFERENCE / experiment, experiment) is None


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_a_committed_run_is_of_an_h200_and_of_one_commit(folder):
    """A commit without changes, or the page says what ran."""
    content = manifest.read(folder)
    assert manifest.damage(folder) is None and "executed.ipynb" in content["files"]
    assert "H200" in content["environment"]["gpu"]
    told = f"The manifest of `{folder.name}` names {content['commit'][:7]} with changes" in RESULTS
    assert (content["dirty"] is False or told) and re.fullmatch(r"[0-9a-f]{40}", content["commit"])


def test_what_is_quoted_of_the_second_run_is_its_own():
    numbers = json.loads((SHORT / "numbers.json").read_text(encoding="utf-8"))
    names = ("time.within_20", "reserved.within_10", "reserved.largest", "allocated.within_5")
    time, reserved, largest, allocated = (numbers[f"frontier.accuracy.{name}"]["value"] for name in names)
    assert f"a second run: {time:.2f}," in RESULTS and f"{100 * time:.0f} % of the times are within 20 %" in RESULTS
    assert f"{100 * reserved:.0f} % of reserved memory within 10 % (at most {100 * largest:.0f} %)" in RESULTS
    assert allocated == 1
