"""The notebooks as they are committed, and as a smoke run leaves them."""

import json
import re
from itertools import product
from pathlib import Path

import nbformat
import pytest
from copies import CHECKOUT, copy_kit, drawn, python
from nbclient import NotebookClient

from t1lib import params, paths
from t1lib.kit.reads import names
from t1lib.kit.run import run_cells
from t1lib.measure import manifest
from t1lib.measure.records import Records

NOTEBOOKS = sorted(path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb"))
EXPERIMENTS = [name for name in NOTEBOOKS if name != "start"]  # that one is a tour, and records nothing
PROFILES = sorted(path.name for path in (CHECKOUT / "params").iterdir() if path.is_dir())
FILES = {"executed.ipynb", "samples.csv", "numbers.json", "numbers.tex"}


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def notebook(name: str) -> nbformat.NotebookNode:
    return nbformat.read(CHECKOUT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch):
    monkeypatch.setenv("T1_ROOT", str(CHECKOUT))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_without_outputs_and_each_cell_can_be_run_again_by_itself(name):
    """No cell ends what an earlier one made, or changes a parameter or a variable that a cell before it uses."""
    content = notebook(name)
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"]["name"] == "python3" and content["metadata"]["t1"]["title"]
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code(content))
    known = params.declared(name) if name in params.experiments() else {}
    assert (name == "start") is (not known)
    makers, used = {}, set()
    for cell in code(content)[1:]:
        read_first, _, stored = names(cell.source, {})
        ended = set(re.findall(r"(\w+)\.(?:cleanup|close|unlink)\(", cell.source))
        used |= read_first & makers.keys()
        changed = {name for name in stored & used if makers[name] != cell["id"]}
        assert not changed and not stored & known.keys() and not ended & (read_first - stored), cell["id"]
        makers |= dict.fromkeys(stored, cell["id"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_profile_has_parameters_of_every_experiment(name):
    """The parameters cell has the values of smoke, by which an edited value is told from one that was not."""
    known = params.declared(name)
    smoke = params._read_profile(name, params.BASE, known)
    assert smoke == {key: known[key].default for key in smoke}
    for profile in PROFILES:
        assert params.resolve(name, profile)["profile"] == profile
        assert params._read_profile(name, profile, known).keys() <= smoke.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_numbers_are_those_that_texts_quote(name):
    texts = [CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("report/*.*")]
    key = re.compile(rf"(?<![\w./-]){name}(?:\.[\w-]+)+")
    quoted = {found for path in texts for found in key.findall(path.read_text(encoding="utf-8"))}
    files = {f"{name}.{suffix}" for suffix in ("tex", "pdf", "md", "ipynb", "yaml")}
    assert set(read(CHECKOUT / "outputs" / "h200" / name / "numbers.json")) == quoted - files


def test_a_run_leaves_every_file_and_shows_figures_in_the_cells_that_draw_them(finished):
    name = finished.name
    figures = [f"figures/{figure}.{kind}" for figure in drawn(name, "figure") for kind in ("pdf", "png")]
    made_by_cells = [*figures, *(f"tables/{table}.tex" for table in drawn(name, "table"))]
    assert figures and len(set(made_by_cells)) == len(made_by_cells), "two cells make the same figure or table"
    content = manifest.read(finished)
    assert set(content["files"]) == FILES | set(made_by_cells)
    left = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    assert left == {"manifest.json", *content["files"]}
    assert (content["experiment"], content["profile"]) == (name, "smoke")
    missing = [key for key, entry in read(finished / "numbers.json").items() if entry["value"] is None]
    absent = re.compile("reserved|torch|trainstream|cce|liger|quack|trl|qwen3|parallel")  # at smoke, on a CPU
    assert not [key for key in missing if not absent.search(key)]
    for cell in code(nbformat.read(finished / "executed.ipynb", as_version=4)):
        assert isinstance(cell["execution_count"], int)
        kinds = [(output["output_type"], output.get("name")) for output in cell["outputs"]]
        assert ("error", None) not in kinds and ("stream", "stderr") not in kinds, (cell["id"], cell["outputs"])
        shown = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        made = cell.source.count("run.figure(")
        assert shown == made or not made, (cell["id"], kinds, cell["outputs"][-1:])


def test_a_finished_run_is_drawn_again_without_a_change(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("T1_ROOT", str(finished.parents[2]))
    run_cells("smoke", finished.name, tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.suffix != ".png"):
        name = path.relative_to(tmp_path)
        assert path.is_dir() or path.read_bytes() == (finished / name).read_bytes(), name


@pytest.mark.slow
def test_two_ranks_find_what_one_finds_and_hold_half_of_the_weight(smoke_run):
    """parallel on a CPU in float32, run on two actual processes."""
    rows = Records.load(smoke_run("parallel") / "outputs/smoke/parallel/samples.csv").rows
    found = {(row["variant"], row["phase"], row["metric"]): row["value"] for row in rows}
    assert found["full", "head/1", "status"] == "ok" and found["full", "head/2", "status"] == "unavailable"
    assert found["chunked", "head/1", "status"] == found["chunked", "head/2", "status"] == "ok"
    assert all(found["chunked", "head/2", f"error_{name}"] < 1e-6 for name in ("loss", "dE", "dW"))
    weight = [found["chunked", f"head/{n}", "weight_mib"] for n in (1, 2)]
    assert weight == [4099 * 64 * 4 / 2**20, 2050 * 64 * 4 / 2**20]
    assert found["fsdp", "step/1", "status"] == "ok"


@pytest.mark.slow
def test_plain_papermill_runs_a_notebook(tmp_path, monkeypatch):
    monkeypatch.delenv("T1_STAGING", raising=False)
    given = ["notebooks/t1m3.ipynb", "out.ipynb", "-f", "params/smoke/t1m3.yaml", "-p", "iters", "2"]
    python("-m", "papermill", *given, "-p", "head_iters", "2", cwd=copy_kit(tmp_path), T1_ROOT=str(tmp_path))
    content = manifest.read(tmp_path / "outputs" / "smoke" / "t1m3")
    assert set(content["files"]) >= FILES - {"executed.ipynb"} and content["parameters"]["iters"] == 2


SLOW = pytest.mark.slow
VARIANTS = [  # of an experiment: rows of its table1
    pytest.param("cce", ("full", "torch", "chunked", "fused-32MiB"), marks=SLOW),
    pytest.param("chunks", ("full", "chunked", "chunked-vocabulary", "fused"), marks=SLOW),
    pytest.param("t1m1", ("gpu", "ckpt", "slide"), marks=SLOW),
    ("t1m3", ("full", "chunked", "chunked-vocabulary", "fused", "torch")),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # of empty legends, of means of nothing
@pytest.mark.parametrize(("experiment", "variants"), VARIANTS)
def test_a_variant_out_of_memory_is_a_row_and_no_traceback(smoke_run, tmp_path, monkeypatch, experiment, variants):
    """The run is drawn as if these variants had run out of memory before their first step."""
    monkeypatch.setenv("T1_ROOT", str(smoke_run(experiment)))
    whole = Records.load(paths.outputs("smoke", experiment) / "samples.csv").frame()
    phases = sorted(set(whole[whole["metric"] == "status"]["phase"]))
    for gone in (variants[:1], variants):
        left = Records()
        left.extend(whole[~whole["variant"].isin(gone)].to_dict("records"))
        for variant, phase in product(gone, phases):
            left.status(variant, "oom", phase)
        monkeypatch.setattr(Records, "load", lambda path, left=left: left)
        run_cells("smoke", experiment, tmp_path / str(len(gone)))
        rows = (tmp_path / str(len(gone)) / "tables/table1.tex").read_text().splitlines()
        assert {row.split(" & oom & ")[0].split(" & ")[-1] for row in rows if " & oom & " in row} == set(gone)


FOUND = """
import json
peaks = [{name: max(run["mib"]) for name, run in runs.items()} for runs in (streaming, heads)]
losses = [[run["losses"] for run in runs.values()] for runs in (streaming, heads)]
print(json.dumps({"peaks": peaks, "losses": losses, "size": by_size, "length": by_length}))
"""


@pytest.mark.slow
def test_the_tour_runs_without_a_gpu_writes_nothing_and_shows_both_walls_come_down(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tour = notebook("start")
    tour.cells.append(nbformat.v4.new_code_cell(FOUND))
    NotebookClient(tour, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not list(tmp_path.iterdir())
    outputs = [output for cell in tour.cells[:-1] if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    found = json.loads(tour.cells[-1].outputs[0]["text"])
    for plain, *others in (list(peaks.values()) for peaks in found["peaks"]):
        assert max(others) < plain / 2
    for first, *others in found["losses"]:
        assert first[-1] < first[0]
        assert all(losses == pytest.approx(first, rel=1e-5) for losses in others)
    assert all(plain > 4 * both for plain, both in zip(found["size"]["plain"], found["size"]["both"], strict=True))
    assert found["length"]["stream"][-1] > 4 * found["length"]["both"][-1]
