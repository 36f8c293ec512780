import json
import os
import sys
import types

import pandas as pd
import pytest

from t1lib import notebook, paths
from t1lib.errors import T1Error
from t1lib.measure import manifest

PARAMETERS = {"profile": "smoke", "steps": 2, "rate": 0.5}


def finished(folder, executed: bool = True):
    """Fill a folder as a run does and give it a manifest."""
    folder.mkdir(parents=True)
    (folder / "samples.csv").write_text("variant,phase,step,metric,unit,value\nslide,,0,wall,ms,1.5\n")
    if executed:
        (folder / "executed.ipynb").write_text("{}")
    made_of = manifest.ingredients("demo", PARAMETERS)
    keys = {"experiment": "demo", "profile": "smoke", "parameters": PARAMETERS}
    manifest.write(folder, **keys, made_of=made_of, started=manifest.utc_now(), seconds=1.23)
    return manifest.fingerprint("demo", PARAMETERS)


def test_fingerprint_depends_on_sources_and_parameters_only(checkout):
    path = checkout.add("demo")
    before = manifest.fingerprint("demo", PARAMETERS)
    content = json.loads(path.read_text())
    content["metadata"]["t1"] = {"title": "another"}
    content["cells"][2]["source"] = content["cells"][2]["source"].splitlines(keepends=True)
    path.write_text(json.dumps(content, indent=4))
    assert manifest.fingerprint("demo", PARAMETERS) == before
    assert manifest.fingerprint("demo", {**PARAMETERS, "steps": 3}) != before
    content["cells"][2]["source"] = "pass"
    path.write_text(json.dumps(content))
    assert manifest.fingerprint("demo", PARAMETERS) != before


def test_manifest_tells_all_and_matches(checkout):
    checkout.add("demo")
    folder = checkout.outputs("demo")
    wanted = finished(folder)
    content = manifest.read(folder)
    assert manifest.matches(folder, wanted)
    assert content["parameters"] == PARAMETERS
    assert content["seconds"] == 1.2
    assert content["started"].endswith("+00:00")
    assert content["files"]["executed.ipynb"]["bytes"] == 2
    assert {"commit", "dirty", "environment", "fingerprint"} <= set(content)
    assert content["inputs"] == {}
    assert not (folder / "manifest.json.tmp").exists()


@pytest.mark.parametrize("harm", ["edit", "delete", "break", "remove", "other"])
def test_what_is_not_as_the_run_left_it_does_not_match(checkout, harm):
    checkout.add("demo")
    folder = checkout.outputs("demo")
    wanted = finished(folder)
    if harm == "edit":
        (folder / "samples.csv").write_text("made up")
    elif harm == "delete":
        (folder / "samples.csv").unlink()
    elif harm == "break":
        (folder / "manifest.json").write_text('{"files": ')
    elif harm == "remove":
        (folder / "manifest.json").unlink()
    else:
        wanted = "0" * 64
    assert not manifest.matches(folder, wanted)


def test_a_run_without_executed_notebook_is_not_the_drivers(checkout):
    checkout.add("demo")
    wanted = finished(checkout.outputs("demo"), executed=False)
    assert not manifest.matches(checkout.outputs("demo"), wanted)


def test_difference_names_what_changed(checkout):
    checkout.add("demo")
    finished(checkout.outputs("demo"))
    made_of = manifest.ingredients("demo", {**PARAMETERS, "steps": 9})
    why = manifest.difference(checkout.outputs("demo"), manifest.fingerprint_of(made_of), made_of)
    assert why == "parameters changed"


def test_publish_replaces_whole_folders(checkout):
    checkout.add("demo")
    final, staging = checkout.outputs("demo"), paths.staging("smoke", "demo")
    finished(final)
    (final / "stale.txt").write_text("of the run before")
    wanted = finished(staging)
    manifest.publish(staging, final)
    assert manifest.matches(final, wanted)
    assert [path.name for path in final.parent.iterdir()] == ["demo"]
    assert not (final / "stale.txt").exists()


def test_publish_refuses_a_folder_without_manifest(checkout):
    staging = checkout.outputs(".demo.partial")
    staging.mkdir(parents=True)
    with pytest.raises(T1Error, match="not complete"):
        manifest.publish(staging, checkout.outputs("demo"))


@pytest.mark.parametrize("calls", [0, 1])
def test_killed_while_publishing_leaves_the_old_run(checkout, monkeypatch, calls):
    checkout.add("demo")
    final, staging = checkout.outputs("demo"), paths.staging("smoke", "demo")
    wanted = finished(final)
    finished(staging)
    real, done = os.replace, []

    def dying(*names):
        if len(done) == calls:
            raise SystemExit
        done.append(real(*names))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(SystemExit):
            manifest.publish(staging, final)
    manifest.recover(final)
    assert manifest.matches(final, wanted)


class Table:
    latex = "a & b"
    frame = pd.DataFrame({"a": [1]})


@pytest.fixture
def report(monkeypatch):
    """Stands in for t1lib.report: one figure, one table, one number of the experiment demo."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    import t1lib.report.style  # noqa: F401 (before its package is replaced)

    def figure(frame):
        drawn, axes = pyplot.subplots()
        axes.plot(frame["value"].astype(float))
        return drawn

    def numbers(frame, found):
        found.set("demo.last", frame["value"].iloc[-1], "ms")

    module = types.SimpleNamespace(
        FIGURES={"demo": {"wall": figure}}, TABLES={"demo": {"main": lambda frame: Table}}, NUMBERS={"demo": numbers}
    )
    monkeypatch.setitem(sys.modules, "t1lib.report", module)
    return module


def begin():
    return notebook.Run.start("demo", dict(PARAMETERS))


def test_a_run_in_jupyterlab_publishes_figures_tables_and_numbers(checkout, report, monkeypatch):
    from matplotlib import pyplot

    checkout.add("demo")
    run = begin()
    assert run.params.steps == 2
    assert run.outdir == paths.staging("smoke", "demo")
    run.records.add("slide", "wall", 41.25, "ms")
    assert run.draw("wall").axes
    assert pyplot.get_fignums() == []  # else JupyterLab shows the figure twice
    assert list(run.table("main")["a"]) == [1]
    with pytest.raises(T1Error, match="unknown figure of demo: 'wal'; allowed: wall"):
        run.draw("wal")
    run.finish()
    final = checkout.outputs("demo")
    names = {path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()}
    figures = {"figures/wall.pdf", "figures/wall.png", "tables/main.tex"}
    assert names == {"samples.csv", "numbers.json", "numbers.tex", "environment.json", "manifest.json"} | figures
    assert "{demo.last}{41.2}{ms}" in (final / "numbers.tex").read_text()
    assert not manifest.matches(final, manifest.fingerprint("demo", PARAMETERS))  # the driver would redo it


def test_cells_run_again_after_the_end_keep_the_folder_whole(checkout, report, monkeypatch):
    checkout.add("demo")
    run = begin()
    run.records.add("slide", "wall", 1.0, "ms")
    run.draw("wall")
    run.finish()
    run.table("main")
    run.finish()
    listed = manifest.read(checkout.outputs("demo"))["files"]
    assert {"figures/wall.pdf", "tables/main.tex"} <= set(listed)
    assert not paths.staging("smoke", "demo").exists()


def test_under_the_driver_nothing_is_published(checkout, report, monkeypatch, tmp_path):
    checkout.add("demo")
    monkeypatch.setenv("T1_STAGING", str(tmp_path / "elsewhere"))
    run = begin()
    run.records.add("slide", "wall", 1.0, "ms")
    run.finish()
    assert (tmp_path / "elsewhere" / "samples.csv").is_file()
    assert not checkout.outputs("demo").exists()


def test_redraw_needs_only_the_samples(checkout, report):
    checkout.add("demo")
    folder = checkout.outputs("demo")
    wanted = finished(folder)
    before = manifest.read(folder)
    written = notebook.redraw("smoke", "demo")
    assert written == ["figures/wall.pdf", "figures/wall.png", "numbers.json", "numbers.tex", "tables/main.tex"]
    assert manifest.matches(folder, wanted)
    after = manifest.read(folder)
    assert {**after, "files": None} == {**before, "files": None}
    pdf = (folder / "figures" / "wall.pdf").read_bytes()
    notebook.redraw("smoke", "demo")
    assert (folder / "figures" / "wall.pdf").read_bytes() == pdf
    assert manifest.matches(folder, wanted)


def test_a_figure_that_fails_leaves_the_old_files(checkout, report):
    checkout.add("demo")
    folder = checkout.outputs("demo")
    wanted = finished(folder)
    notebook.redraw("smoke", "demo")
    report.TABLES["demo"]["main"] = lambda frame: 1 / 0
    with pytest.raises(ZeroDivisionError):
        notebook.redraw("smoke", "demo")
    assert manifest.matches(folder, wanted)
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]


def test_redraw_refuses_edited_samples(checkout, report):
    checkout.add("demo")
    with pytest.raises(T1Error, match="holds no finished run"):
        notebook.redraw("smoke", "demo")
    folder = checkout.outputs("demo")
    finished(folder)
    (folder / "samples.csv").write_text("variant,phase,step,metric,unit,value\nslide,,0,wall,ms,0.1\n")
    with pytest.raises(T1Error, match=r"samples\.csv is not the one"):
        notebook.redraw("smoke", "demo")
