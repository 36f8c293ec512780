"""`python -m t1lib check` passes what was measured, and nothing else."""

import json
import random
import re
import shutil

import pytest
import yaml
from copies import CHECKOUT, copy_kit, largest_file
from refusals import refused

from t1lib.claims import FILE, PAGE, Claim, doubts, read_claims, write_page
from t1lib.files import write_signed
from t1lib.measure import manifest

KEY = "t1m3.head.full.over_floor"
REFERENCE = CHECKOUT / "outputs" / "h200"
EXPERIMENTS = sorted(path.parent.name for path in REFERENCE.glob("*/manifest.json"))


def row(key=KEY, ours="1.78 ×", within="5 %"):
    return {"claim": "a claim", "published": "–", "ours": ours, "within": within, "key": key}


@pytest.mark.parametrize(
    ("ours", "within", "value", "unit", "fault"),
    [
        ("2.00 ×", "5 %", 1.91, "", None),
        ("2.00 ×", "5 %", 1.89, "", "measured otherwise"),
        ("2.00 ×", "5 %", 2.11, "", "measured otherwise"),
        ("2.00 ×", "5 %", None, "", "no number"),
        ("12,345", "1 %", 12_400, "", None),
        ("0", "exact", 0, "", None),
        ("0", "exact", 1e-9, "", "measured otherwise"),
        ("3.20e-04", "≤ 0.02", 0.02, "", None),
        ("3.20e-04", "≤ 0.02", 0.021, "", "measured above the limit"),
        ("21 ×", "≤ 20", 13.4, "", "claimed above its own limit"),
        ("13.4 GiB", "5 %", 13.4, "GiB", None),
        ("13.4 MiB", "≤ 20", 13.4, "GiB", "claimed in another unit"),
        ("13.4", "exact", 13.4, "GiB", "claimed in another unit"),
    ],
)
def test_a_claim_holds_within_its_bound_in_its_unit(ours, within, value, unit, fault):
    assert Claim("", "", ours, within, "t1m3.x").fault({"value": value, "unit": unit}) == fault


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"t1m3": [row(within="15%")]}, r"t1m3 0 within: '15%'; allowed: .* claim, published, ours \(1.78 ×\)"),
        *(({"t1m3": [row(ours=ours)]}, "allowed:") for ours in ("many", "1.2-1.4", "1,78", 1.78)),
        ({"t1m1": [row()]}, "in the list of 't1m1'"),
        *(({"t1m3": [row() | wrong]}, "allowed:") for wrong in ({"key": "t1m3"}, {"more": "x"})),
        ({"t1m3": "text"}, "t1m3: 'text'; allowed: a list"),
        *((content, "holds no claims") for content in ({"t1m3": []}, {})),
        ("[", "cannot read claims.yaml"),
    ],
)
def test_claims_that_cannot_be_read_are_an_error(kit, content, message):
    (kit / FILE).write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True))
    refused(read_claims, match=message)


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A checkout with the reference run of t1m3, two claims about it and one about another run."""
    copy_kit(tmp_path, "outputs/h200/t1m3")
    shutil.copyfile(REFERENCE / "t1m3.pdf", tmp_path / "outputs/h200/t1m3.pdf")
    numbers = json.loads((REFERENCE / "t1m3/numbers.json").read_text(encoding="utf-8"))
    of_t1m3 = [row(ours=numbers[KEY]["text"]), row(KEY.replace("full", "fused"), "9.5 ×")]
    claims = {"t1m3": of_t1m3, "cce": [row(KEY.replace("t1m3", "cce"))]}
    (tmp_path / FILE).write_text(yaml.safe_dump(claims, allow_unicode=True), encoding="utf-8")
    monkeypatch.setenv("T1_ROOT", str(tmp_path))
    return tmp_path


def test_each_claim_gets_its_verdict(kit, command, bad_command):
    told = command("check", code=1)
    assert f"PASS  {KEY}" in told and "FAIL  t1m3.head.fused.over_floor" in told
    assert "cce: NOT RUN; python -m t1lib run cce --profile h200" in told
    assert told.endswith("3 checks: 1 PASS, 1 FAIL, 1 NOT RUN\n")
    path, before = kit / FILE, (kit / FILE).read_text(encoding="utf-8")
    for unknown in ("t1m33", "all"):
        path.write_text(before.replace("t1m3", unknown), encoding="utf-8")
        bad_command(f"unknown experiment '{unknown}'", "check")
    path.unlink()
    bad_command("error: cannot read claims.yaml:", "check")


def test_a_flipped_byte_is_noticed(kit):
    """Anywhere in the run's folder, its manifest, or the report that was built from it."""
    draw, root = random.Random(0), kit / "outputs/h200"
    listing = root / "t1m3/manifest.json"
    for path in [*(root / "t1m3").rglob("*.*"), root / "t1m3.pdf", *[listing] * (listing.stat().st_size // 97)]:
        before = path.read_bytes()
        data = bytearray(before)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        assert doubts(root / "t1m3", "t1m3"), path
        path.write_bytes(before)


def test_a_run_that_is_not_what_it_says_fails(kit, command):
    def fails(why: str) -> bool:
        return why in command("check", code=1)

    path, folder = kit / "params/h200/t1m3.yaml", kit / "outputs/h200/t1m3"
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace("\niters: ", "\niters: 1"), encoding="utf-8")
    assert fails("run with iters=")
    path.write_text(right, encoding="utf-8")

    numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    for factor in (1 + 1e-14, 1.01):  # the first is rounding
        assert doubts(folder, "t1m3") is None
        numbers[KEY]["value"] *= factor
        (folder / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")
        edited = shutil.copytree(folder, kit / f"edited-{factor}")
        manifest.replace_drawn(edited, folder, manifest.read(folder)["made_of"])  # the manifest agrees with them
    assert fails(f"{KEY} does not follow from samples.csv")
    for name, edit in (("numbers.json", str), ("numbers.tex", lambda text: text.replace("{t1m3.", "{t1m3.x.", 1))):
        text = edit((REFERENCE / "t1m3" / name).read_text(encoding="utf-8"))
        (folder / name).write_text(text, encoding="utf-8")
    manifest.change(folder, files=manifest.files(folder))
    assert fails("numbers.tex does not follow from samples.csv")

    whole = manifest.read(folder)
    for wrong in ({"experiment": "cce"}, {"profile": "smoke"}, {"files": {}}):
        write_signed(folder / "manifest.json", whole | wrong)
        assert fails("not that of a finished run of t1m3 with profile h200")
    (kit / FILE).write_text(yaml.safe_dump({"cce": [row(KEY.replace("t1m3", "cce"))]}), encoding="utf-8")
    assert fails("not that of a finished run")  # also without a claim about the run


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_committed_run_is_whole_and_of_one_commit_and_its_numbers_are_those_claimed(experiment):
    folder = REFERENCE / experiment
    assert doubts(folder, experiment) is None
    content = manifest.read(folder)
    assert "executed.ipynb" in content["files"] and "H200" in content["environment"]["gpu"]
    assert content["dirty"] is False and re.fullmatch(r"[0-9a-f]{40}", content["commit"])
    numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    claims = read_claims()[experiment]
    for claim in claims:
        number = numbers[claim.key]
        assert number["text"] == claim.ours.split(" ")[0] and claim.fault(number) is None, claim.key
    assert claims


def test_the_page_is_made_of_the_claims_and_they_are_of_committed_runs(tmp_path, monkeypatch):
    page, whole = copy_kit(tmp_path) / PAGE, (CHECKOUT / PAGE).read_text(encoding="utf-8")
    shutil.copyfile(CHECKOUT / FILE, tmp_path / FILE)
    monkeypatch.setenv("T1_ROOT", str(tmp_path))
    shorter = re.sub(r"(?m)^\|.*\| `t1m3\..*\n", "", whole)  # less a table's rows
    page.write_text(shorter, encoding="utf-8")
    with largest_file(4000):
        refused(write_page, f"cannot write {page}: File too large")
    assert page.read_text(encoding="utf-8") == shorter
    write_page()
    assert page.read_text(encoding="utf-8") == whole
    assert set(read_claims()) == set(EXPERIMENTS)
    page.write_text("", encoding="utf-8")
    refused(write_page, "no place for claims of cce")
