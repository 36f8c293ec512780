"""The tour, notebooks/start.ipynb: it runs anywhere, draws its figures, writes nothing, and shows what it says."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from t1lib import params

CHECKOUT = Path(__file__).resolve().parent.parent
TOUR = CHECKOUT / "notebooks" / "start.ipynb"
FOUND = """
import json
peaks = [{name: max(run["mib"]) for name, run in runs.items()} for runs in (streaming, heads)]
losses = [[run["losses"] for run in runs.values()] for runs in (streaming, heads)]
print(json.dumps({"peaks": peaks, "losses": losses, "size": by_size, "length": by_length}))
"""
HIDE_WIDGETS = "import sys\nsys.modules['ipywidgets'] = None"  # as if it were not installed


@pytest.mark.slow
def test_the_tour_runs_without_a_gpu_and_shows_both_walls_come_down(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(TOUR, as_version=4)
    notebook.cells = [nbformat.v4.new_code_cell(HIDE_WIDGETS), *notebook.cells, nbformat.v4.new_code_cell(FOUND)]
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not list(tmp_path.iterdir())
    outputs = [output for cell in notebook.cells[:-1] if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    found = json.loads(notebook.cells[-1].outputs[0]["text"])
    (plain, by_hand, streamed), (full, chunked, patched) = (list(peaks.values()) for peaks in found["peaks"])
    assert max(by_hand, streamed) < plain / 2 and max(chunked, patched) < full / 2
    for first, *others in found["losses"]:
        assert first[-1] < first[0]
        assert all(losses == pytest.approx(first, rel=1e-5) for losses in others)
    assert all(plain > 4 * both for plain, both in zip(found["size"]["plain"], found["size"]["both"], strict=True))
    assert found["length"]["stream"][-1] > 4 * found["length"]["both"][-1]


def test_the_tour_is_no_experiment():
    assert TOUR.is_file() and "start" not in params.experiments()
    assert not list((CHECKOUT / "params").glob("*/start.yaml"))
