"""The notebooks as they are committed, and as a smoke run leaves them."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from t1lib import params
from t1lib.kit.cells import names
from t1lib.kit.redraw import run_cells
from t1lib.measure import manifest
from t1lib.measure.language import from_params
from t1lib.measure.records import COLUMNS

pytest_plugins = ["smoke_run"]

CHECKOUT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))
EXPERIMENTS = [path for path in NOTEBOOKS if path.stem != "start"]  # that one is a tour, and records nothing
NAMES = [path.stem for path in EXPERIMENTS]
PROFILES = sorted(path.name for path in (CHECKOUT / "params").iterdir() if path.is_dir())
ROUNDING = ("gpu-whole", "gpu-single")  # variants of t1m1 that sum in another order
FILES = {"executed.ipynb", "samples.csv", "numbers.json", "numbers.tex"}
FIGURE, TABLE = re.compile(r'run\.(?:draw|figure)\("(\w+)"'), re.compile(r'run\.table\("(\w+)"')


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def code(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def made(name: str, kind: re.Pattern[str]) -> list[str]:
    """The figures or tables that the cells of a notebook make."""
    return [
        found for cell in code(read(CHECKOUT / "notebooks" / f"{name}.ipynb")) for found in kind.findall(source(cell))
    ]


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch):
    monkeypatch.setenv("T1_ROOT", str(CHECKOUT))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path):
    for cell in code(read(path)):
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_ends_what_an_earlier_one_made(path):
    """Else it could not be run again."""
    for cell in code(read(path)):
        read_first, stored = names(source(cell), {})
        ended = set(re.findall(r"(\w+)\.(?:cleanup|close|unlink)\(", source(cell)))
        assert not ended & (read_first - stored), cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_format_and_metadata(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    metadata = notebook["metadata"]
    assert metadata["kernelspec"]["name"] == "python3" and metadata["kernelspec"]["language"] == "python"
    assert metadata["language_info"]["name"] == "python"
    assert metadata["t1"]["title"]
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for name in ids:  # a word or two, not the eight hexadecimal digits of an editor
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) and not re.fullmatch(r"[0-9a-f]{8}", name), name


@pytest.mark.parametrize("name", NAMES)
def test_no_two_cells_make_the_same_figure_or_table(name):
    found = made(name, FIGURE) + made(name, TABLE)
    assert found and len(found) == len(set(found))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=NAMES)
def test_one_sentence_says_what_each_figure_shows(path):
    cells = read(path)["cells"]
    for before, cell in pairwise(cells):
        if FIGURE.search(source(cell)):
            assert before["cell_type"] == "markdown", cell["id"]
            sentence = source(before).strip()
            assert re.match(r"\*\*Figure \d+\*\* shows ", sentence), sentence
            assert sentence.endswith(".") and not re.search(r"[.!?]\s", sentence), sentence


@pytest.mark.parametrize("path", EXPERIMENTS, ids=NAMES)
def test_no_cell_changes_what_another_has_read(path):
    """Neither a parameter nor a variable that a cell before it uses: that one could not be run again by itself."""
    known, makers, used = params.declared(path.stem), {}, set()
    for cell in code(read(path))[1:]:
        read_first, stored = names(source(cell), {})
        used |= {name for name in read_first if name in makers}
        assert not stored & known.keys(), cell["id"]
        assert not {name for name in stored & used if makers[name] != cell["id"]}, cell["id"]
        makers |= dict.fromkeys(stored, cell["id"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_resolves_every_notebook(profile, name):
    assert "profile" in params.declared(name)
    assert (CHECKOUT / "params" / profile / f"{name}.yaml").is_file()
    assert params.resolve(name, profile)["profile"] == profile


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_cell_says_what_smoke_says(name):
    """Where another profile says something else: that is how an edited value is told from one that was not."""
    known = params.declared(name)
    smoke = params._read_yaml(name, params.BASE, known)
    assert smoke == {key: known[key].default for key in smoke}
    for profile in PROFILES:
        assert params._read_yaml(name, profile, known).keys() <= smoke.keys()


@pytest.mark.parametrize("profile", PROFILES)
def test_cce_takes_the_model_that_convergence_trains(profile):
    one, other = (SimpleNamespace(**params.resolve(name, profile)) for name in ("convergence", "cce"))
    assert from_params(one, "cpu") == from_params(other, "cpu")


@pytest.fixture(params=NAMES)
def finished(request, smoke_outputs):
    """The folder of a finished smoke run."""
    return smoke_outputs / "outputs" / "smoke" / request.param


def test_a_run_leaves_every_file_and_its_manifest(finished):
    name = finished.name
    expected = FILES | {f"figures/{figure}.{kind}" for figure in made(name, FIGURE) for kind in ("pdf", "png")}
    expected |= {f"tables/{table}.tex" for table in made(name, TABLE)}
    content = manifest.read(finished)
    assert set(content["files"]) == expected
    assert {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()} == (
        expected | {"manifest.json"}
    )
    assert (content["experiment"], content["profile"]) == (name, "smoke")


def test_a_run_ends_without_an_error_in_any_cell(finished):
    cells = code(read(finished / "executed.ipynb"))
    assert all(isinstance(cell["execution_count"], int) for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]


def test_figures_are_shown_in_the_cell_that_draws_them(finished):
    drawn = []
    for cell in code(read(finished / "executed.ipynb")):
        names = FIGURE.findall(source(cell))
        drawn += names
        if names:
            assert sum("image/png" in output.get("data", {}) for output in cell["outputs"]) == len(names), cell["id"]
    assert drawn == made(finished.name, FIGURE)


def test_numbers_are_those_that_texts_quote(finished):
    texts = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md"),
                                                           *CHECKOUT.glob("report/*.*"))]  # fmt: skip
    key = re.compile(rf"(?<![\w./-]){finished.name}(?:\.[\w-]+)+")
    quoted = {found for text in texts for found in key.findall(text)}
    files = {f"{finished.name}.{suffix}" for suffix in ("tex", "pdf", "md", "ipynb", "yaml")}
    numbers = read(finished / "numbers.json")
    reference = read(CHECKOUT / "outputs" / "h200" / finished.name / "numbers.json")  # some keys name its shapes
    assert set(reference) == quoted - files
    missing = [key for key, entry in numbers.items() if entry["value"] is None]
    absent = re.compile("reserved|compiled|torch|cce|liger|quack|trl|qwen3|parallel")  # at smoke, on a CPU
    assert not [key for key in missing if not absent.search(key)]


def test_a_finished_run_is_drawn_again_without_a_change(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("T1_ROOT", str(finished.parents[2]))
    run_cells("smoke", finished.name, tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.suffix != ".png"):
        name = path.relative_to(tmp_path)
        assert path.is_dir() or path.read_bytes() == (finished / name).read_bytes(), name


def test_all_modes_have_the_same_losses(smoke_outputs):
    """t1m1 on a CPU in float32: bitwise equal losses, in every step of every phase that is compared."""
    with (smoke_outputs / "outputs" / "smoke" / "t1m1" / "samples.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "loss"]
    losses: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        losses.setdefault((row["phase"], row["step"]), {})[row["variant"]] = row["value"]
    whole = {"gpu", "ckpt", "slide", "fsdp"}
    two = {"clipped": {"ckpt", "slide", "slide-budget"}, "kept": {"gpu", "slide"}, "parity": {"gpu", "slide"}}
    compared = [(at, found) for at, found in losses.items() if at[0] not in ("ablation", "budget", "capacity")]
    assert {"own", "real", *two} < {phase for (phase, _), _ in compared}
    for at, found in compared:
        for other in ROUNDING:  # variants that sum in another order
            found.pop(other, None)
        assert set(found) == two.get(at[0], whole | ({"slide-device"} if at[0] != "real" else set())), at
        low, high = min(map(float, found.values())), max(map(float, found.values()))
        pieces = at[0] in ("clipped", "parity")  # micro-batches: the head sums the whole batch in slide, not in ckpt
        assert high - low <= (1e-6 * low if pieces else 0.0), (at, found)
    ablation = [found for (phase, _), found in losses.items() if phase == "ablation"]
    assert ablation and all(len(found) == 3 and len(set(found.values())) == 1 for found in ablation)


def test_the_same_arithmetic_trains_the_same(smoke_outputs):
    """convergence on a CPU in float32: with the same head, both modes have bitwise equal losses and norms."""
    with (smoke_outputs / "outputs" / "smoke" / "convergence" / "samples.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] in ("loss", "grad_norm", "held_out_loss")]
    curves: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        curves.setdefault(row["variant"], []).append((row["metric"], row["step"], row["value"]))
    for head in ("full", "chunked", "fused"):
        assert len(curves[f"{head}-gpu"]) > 60 and curves[f"{head}-gpu"] == curves[f"{head}-slide"]
    assert curves["filter-gpu"] != curves["fused-gpu"] != curves["order"]
    assert manifest.read(smoke_outputs / "outputs" / "smoke" / "convergence")["inputs"].keys() == {"corpus"}


def test_the_model_of_cce_has_the_losses_of_convergence(smoke_outputs):
    losses = {}
    for name, variant in (("cce", "model"), ("convergence", "fused-gpu")):
        with (smoke_outputs / "outputs" / "smoke" / name / "samples.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if (row["variant"], row["metric"]) == (variant, "loss")]
        losses[name] = [row["value"] for row in sorted(rows, key=lambda row: int(row["step"]))]
    assert len(losses["cce"]) == 30 and losses["cce"] == losses["convergence"]


def test_two_ranks_find_what_one_finds_and_hold_half_of_the_weight(smoke_outputs):
    """parallel on a CPU in float32, run on two actual processes."""
    with (smoke_outputs / "outputs" / "smoke" / "parallel" / "samples.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {(row["variant"], row["phase"], row["metric"]): row["value"] for row in rows if not row["step"]}
    assert found["full", "head/1", "status"] == "ok" and found["full", "head/2", "status"] == "unavailable"
    for head in ("chunked",):
        assert found[head, "head/1", "status"] == found[head, "head/2", "status"] == "ok"
        assert all(float(found[head, "head/2", f"error_{name}"]) < 1e-6 for name in ("loss", "dE", "dW"))
        weight = [float(found[head, f"head/{n}", "weight_mib"]) for n in (1, 2)]
        assert weight == [4099 * 64 * 4 / 2**20, 2050 * 64 * 4 / 2**20]
        assert float(found[head, "head/2", "collectives"]) >= 4
    assert found["fsdp", "step/1", "status"] == "ok"


def test_plain_papermill_runs_a_notebook(tmp_path):
    for folder in ("notebooks", "params"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    command = [sys.executable, "-m", "papermill", "notebooks/t1m3.ipynb", "out.ipynb", "-f", "params/smoke/t1m3.yaml"]
    environment = {k: v for k, v in os.environ.items() if k != "T1_STAGING"} | {"T1_ROOT": str(tmp_path)}
    command += ["-p", "iters", "2", "-p", "head_iters", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    outputs = [output for cell in code(read(tmp_path / "out.ipynb")) for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    folder = tmp_path / "outputs" / "smoke" / "t1m3"
    assert set(manifest.read(folder)["files"]) >= FILES - {"executed.ipynb"}
    assert (folder / "samples.csv").read_text().startswith(",".join(COLUMNS))
