import json
import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
from refusals import refused

from t1lib import fingerprint, paths
from t1lib.__main__ import main
from t1lib.kit.run import Run, redraw
from t1lib.measure import manifest

PARAMETERS = {"profile": "smoke", "steps": 2, "rate": 0.5}


def why(folder, drawn=False, **changes) -> str | None:
    return manifest.difference(folder, "demo", PARAMETERS | changes, drawn)


def test_a_run_is_stale_once_its_code_or_parameters_mean_something_else(checkout, monkeypatch):
    monkeypatch.setattr(fingerprint, "_ROOT", checkout.root / "kit")
    module, text = checkout.root / "kit" / "deep" / "a.py", '"""Doc."""\n\n\ndef f(x):\n    return x + 1\n'
    module.parent.mkdir(parents=True)
    module.write_text(text)
    path, folder = checkout.add("demo"), checkout.outputs("demo")
    checkout.finish(folder)
    manifest.change(folder, report=manifest.entry(path))
    assert manifest.damage(folder) == "../demo.pdf is not as the run left it"
    assert why(folder) is None  # a report that is gone is no reason to measure again
    assert {"commit", "dirty", "environment", "made_of"} <= set(manifest.read(folder))
    for changed in (text.replace("+ 1", "+ 2"), text.replace("x", "y"), text.replace("\n", "\nimport os\n", 1)):
        module.write_text(changed)
        assert why(folder) == "kit.deep.a changed"
    module.unlink()
    assert why(folder) == "kit.deep.a changed"
    module.write_text('"""Other."""\n\ndef f(x):  # words\n    """More."""\n    return (x\n            + 1)\n')
    assert why(folder) is None
    assert why(folder, steps=3) == "parameters changed"
    content = json.loads(path.read_text())
    content["metadata"]["t1"] = {"title": "another"}
    content["cells"][2]["source"] = "# why\n" + content["cells"][2]["source"].replace(", ", ",  ")
    content["cells"].append({"cell_type": "markdown", "metadata": {}, "id": "more", "source": "words"})
    path.write_text(json.dumps(content, indent=4))
    assert why(folder) is None
    content["cells"][2]["source"] = "pass"
    path.write_text(json.dumps(content))
    assert why(folder) == "notebook changed"
    assert why(folder, steps=3) == "notebook, parameters changed"


def test_meaning_is_the_same_in_every_version_of_python():
    """Runs are measured under one version and checked under another, which writes f-strings with other quotes."""
    code = """def f(a: int) -> str:
    return f"{a!r:>{b['w']}} it's \\"{b['k']}\\" {a + 1}\\n" f'{a=}'
"""
    assert fingerprint.meaning(code) == "513989902e29dc10084c3a0d7fddfd5ab0157e2d7cc77f180ec1c6237857b4c3"


@pytest.mark.parametrize("edited", ["kit_of_a_test.a", "kit_of_a_test.deep.b"])
def test_loaded_are_modules_that_were_imported_and_all_while_one_is_half_edited(tmp_path, monkeypatch, edited):
    root = tmp_path / "kit_of_a_test"
    texts = dict.fromkeys(("__init__", "deep.__init__", "other"), "")
    texts |= {"a": "def f():\n    from kit_of_a_test.deep.b import x", "deep.b": "x = 1"}
    for name, text in texts.items():
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(fingerprint, "_ROOT", root)
    for name in (root.name, f"{root.name}.a"):
        monkeypatch.setitem(sys.modules, name, Mock())
    usual = [root.name, *(f"{root.name}.{name}" for name in ("a", "deep", "deep.b"))]
    assert fingerprint.loaded() == usual
    root.parent.joinpath(*edited.split(".")).with_suffix(".py").write_text("def f(:")
    assert fingerprint.loaded() == [*usual, f"{root.name}.other"]


def test_results_of_another_gpu_or_with_an_open_file_are_not_replaced(checkout, monkeypatch):
    checkout.add("demo")
    final, staging = checkout.outputs("demo"), paths.staging("smoke", "demo")
    other = {"cpu": "Some CPU", "gpu": "Some GPU"}
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "environment", lambda: other)
        checkout.finish(final)
    checkout.finish(staging)
    for call in (partial(manifest.publish, staging, final), begin):
        refused(call, "outputs/smoke/demo was measured on Some GPU")
    assert main(["run", "demo", "--profile", "smoke", "--force"]) == 2
    monkeypatch.setattr(manifest, "environment", lambda: other)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(wraps=os.replace, side_effect=[DEFAULT, OSError(13, "is open"), DEFAULT]))
        refused(partial(manifest.publish, staging, final), "cannot replace outputs/smoke/demo (is open)")
    assert manifest.device(manifest.read(final)) == "Some GPU"
    manifest.publish(staging, final)
    assert manifest.read(final) and not staging.exists()


MEASURE = 'if measure:\n    run.records.put("slide", "", {"wall_ms": 41.25})'
FIGURE = """from matplotlib import pyplot
figure, axes = pyplot.subplots()
axes.plot(run.frame()["value"].astype(float))
run.figure("wall", figure)"""
TABLE = 'run.table("main", [{"a": 1}])'
NUMBER = 'run.number("demo.last", run.frame()["value"].iloc[-1], "ms")'
MADE = ["figures/wall.pdf", "figures/wall.png", "numbers.json", "numbers.tex", "tables/main.tex"]


def add(checkout, *more: str) -> Path:
    parameters = 'profile: str = "smoke"\nsteps: int = 2\nrate: float = 0.5\nmeasure: bool = True\n'
    return checkout.add("demo", MEASURE, FIGURE, TABLE, NUMBER, *more, parameters=parameters)


def begin(**changes):
    return Run.start("demo", PARAMETERS | {"measure": True} | changes)


draw = partial(redraw, "smoke", "demo")


def test_a_run_in_jupyterlab_publishes_figures_tables_and_numbers(checkout, monkeypatch):
    from matplotlib import pyplot

    add(checkout)
    checkout.params("demo", "profile: h200\n", "h200")
    with monkeypatch.context() as patch:
        patch.setattr("t1lib.measure.manifest._gpu", dict)
        refused(partial(begin, profile="h200"), "profile 'h200' is for a GPU")
    monkeypatch.setenv("T1_COMMIT", "a" * 40)
    with pyplot.rc_context({"figure.facecolor": "black"}):  # as a matplotlibrc may say
        run, final = begin(), checkout.outputs("demo")
        assert pyplot.rcParams["figure.facecolor"] == "white"
    monkeypatch.setenv("T1_COMMIT", "b" * 40)  # as if one had been made meanwhile
    run.records.put("slide", "", {"wall_ms": 41.25})
    assert run.figure("wall", pyplot.figure()) and pyplot.get_fignums() == []  # else JupyterLab shows it twice
    assert list(run.table("main", [{"a": 1}])["a"]) == ["1"]
    run.number("demo.last", run.frame()["value"].iloc[-1], "ms")
    assert not run.outdir.is_relative_to(checkout.root) and not final.exists()  # nothing is published before the end
    for value in (1, 2):  # cells that are run again after the end keep the folder whole
        run.table("main", [{"a": value}])
        run.finish()
        names = {path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()}
        assert names == {"manifest.json", *manifest.read(final)["files"]} == {"manifest.json", "samples.csv", *MADE}
        assert manifest.damage(final) is None and "{demo.last}{41.2}{ms}" in (final / "numbers.tex").read_text()
    assert (manifest.read(final)["parameters"], manifest.read(final)["commit"]) == (PARAMETERS, "a" * 40)
    assert why(final) == "not run by `python -m t1lib run`"  # the driver would redo it


def test_redraw_needs_only_the_samples_and_leaves_all_as_it_was_if_a_cell_fails(checkout, monkeypatch, command):
    add(checkout, "display(run.frame())")  # which every kernel has
    refused(draw, "holds no finished run")
    folder = checkout.outputs("demo")
    checkout.finish(folder)
    before = manifest.read(folder)
    manifest.change(folder, report={"sha256": "of a PDF with the figures of before"})
    assert draw() == MADE
    assert why(folder) is None and "{demo.last}{1.50}{ms}" in (folder / "numbers.tex").read_text()
    assert {**manifest.read(folder), "files": None} == {**before, "files": None}
    monkeypatch.setattr("t1lib.claims.write_page", lambda: None)
    for told in ("demo [smoke] drawn already", "demo [smoke] redrew"):
        assert told in command("report", "--profile", "smoke", "--no-pdf")
        assert why(folder) is None
        (folder / "figures" / "wall.pdf").unlink()
        assert why(folder)
    draw()
    add(checkout, "1 / 0")
    before = manifest.read(folder)
    refused(draw, "ZeroDivisionError")
    add(checkout, 'run.number("demo.last", 1)')
    refused(draw, "'demo.last' is made by another cell, too, `run.number(\"demo.last\"")
    assert manifest.read(folder) == before and manifest.damage(folder) is None
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]
    samples = folder / "samples.csv"
    samples.write_text(samples.read_text().replace("1.5", "0.1"))
    refused(draw, "samples.csv is not the one")


def test_what_other_code_drew_or_another_page_is_drawn_again(checkout, command, monkeypatch):
    """Though the code that measured is back, and the folder is as its manifest says."""
    path, folder, report = add(checkout), checkout.outputs("demo"), ("report", "--profile", "smoke", "--no-pdf")
    monkeypatch.setattr("t1lib.claims.write_page", lambda: None)
    checkout.finish(folder)
    draw()
    before, right = manifest.read(folder), path.read_text()
    page = checkout.root / "docs" / "differences.md"
    page.parent.mkdir()

    def edited() -> None:
        path.write_text(right.replace(".iloc[-1]", ".iloc[-1] * 1000"))
        assert "redrew 5 files; its run is stale: notebook changed" in command(*report)
        path.write_text(right)

    for change in (edited, lambda: page.write_text("| D1 | another |")):
        change()
        assert "stale    drawn by other code" in command("list") and why(folder) is None
        assert "redrew 5 files\n" in command(*report) and "drawn already" in command(*report)
        assert manifest.read(folder)["files"] == before["files"]


def test_a_parameter_that_a_run_did_not_have_is_the_profiles_when_it_is_drawn_again(checkout):
    add(checkout)
    checkout.finish(checkout.outputs("demo"))
    parameters = "".join(f"{name}: {type(value).__name__} = {value!r}\n" for name, value in PARAMETERS.items())
    more = parameters + "measure: bool = True\nbound: int = 1\n"
    checkout.add("demo", 'run.number("demo.bound", run.params.bound)', parameters=more, yaml="steps: 9\nbound: 7\n")
    draw()
    assert "{demo.bound}{7}" in (checkout.outputs("demo") / "numbers.tex").read_text()


def test_a_notebook_draws_its_finished_run_again_where_measure_is_false(checkout):
    add(checkout)
    folder = checkout.outputs("demo")
    checkout.finish(folder)
    refused(partial(begin, measure=False, steps=3), "was run with steps=2; steps=3 has to be measured")
    names = PARAMETERS | {"measure": False}
    run, path = Run.start("demo", names), paths.notebook("demo")
    refused(lambda: run.records.put("slide", "", {"wall_ms": 1.0}), "`measure` False")
    run.table("main", [{"a": len(run.frame())}])
    right = path.read_text()
    path.write_text(right.replace("iloc[-1]", "iloc[0]"))  # edited, run and saved, before it is as it was again
    run.finish()
    path.write_text(right)
    assert why(folder, drawn=True).startswith("drawn by other code")
    run.finish()
    assert why(folder, drawn=True) is None and "tables/main.tex" in manifest.read(folder)["files"]
    samples = folder / "samples.csv"
    samples.write_text(samples.read_text().replace("1.5", "7.5"))
    manifest.change(folder, files=manifest.files(folder))  # as if it had been measured again meanwhile
    refused(run.finish, "other samples than those drawn here")
    names["measure"] = True
    refused(run.params.checked, "restart the kernel")


def test_a_copied_notebook_that_names_its_original_still_is_refused_and_changes_nothing_there(checkout, monkeypatch):
    add(checkout)
    copied = paths.notebook("mine")
    copied.write_text(paths.notebook("demo").read_text().replace("demo.last", "mine.last"))
    checkout.params("mine", "")
    original, own = checkout.outputs("demo"), checkout.outputs("mine")
    checkout.finish(original)
    checkout.finish(own, "mine")
    before = manifest.read(original)
    told = "Run.start names 'demo' in a run of 'mine'"
    refused(partial(redraw, "smoke", "mine"), told)
    monkeypatch.setenv("T1_STAGING", str(paths.staging("smoke", "mine")))
    refused(begin, told)
    assert manifest.read(original) == before and not (original / "numbers.json").exists()
    copied.write_text(copied.read_text().replace("Run.start('demo'", "Run.start('mine'"))
    monkeypatch.delenv("T1_STAGING")
    assert redraw("smoke", "mine") == MADE
