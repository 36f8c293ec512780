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


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_committed_run_is_of_an_h200_and_of_one_commit(experiment):
    content = manifest.read(REFERENCE / experiment)
    assert "executed.ipynb" in content["files"] and "H200" in content["environment"]["gpu"]
    assert content["dirty"] is False and re.fullmatch(r"[0-9a-f]{40}", content["commit"])
