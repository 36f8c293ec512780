"""Cells that are run again: what they made is replaced, and what no longer holds is not shown or published."""

import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from t1lib import paths
from t1lib.measure import manifest
from t1lib.measure.records import Records

PARAMETERS = 'profile: str = "smoke"\nsteps: int = 3  # measured steps, ≥ 1\nscale: float = 0.5  # > 0\n'
SETUP = 'from t1lib.kit.run import Run\nrun = Run.start("demo", globals())\np, records = run.params, run.records'
CELLS = {
    "parameters": PARAMETERS,
    "setup": SETUP,
    "sizes": "factor = 10 * p.scale",
    "head": 'for step in range(2):\n    records.add("head", "wall", factor, "ms", step=step)',
    "step": 'for step in range(p.steps):\n    records.add("slide", "wall", step, "ms", "step", step)\n',
    "show": (
        'values = run.frame()\nprint(values[values["variant"] == "slide"]["value"].tolist(),'
        ' values[values["variant"] == "head"]["value"].tolist())'
    ),
    "finish": "run.finish()",
}


class Notebook:
    """A notebook whose cells an IPython shell in this process runs: named by their ids, as JupyterLab does, or not, as
    nbclient does."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        InteractiveShell.clear_instance()
        self.shell, self._capsys = InteractiveShell.instance(), capsys
        self.cells = dict(CELLS)

    def run(self, *names: str, ids: bool = True) -> str:
        """What the last of these cells printed, or the error that ended it."""
        for name in names:
            self._capsys.readouterr()
            done = self.shell.run_cell(self.cells[name], store_history=True, cell_id=name if ids else None)
            error = done.error_in_exec
        told = self._capsys.readouterr().out
        return told if error is None else f"{type(error).__name__}: {error}"

    def everything(self, ids: bool = True) -> str:
        return self.run(*self.cells, ids=ids)

    def edit(self, name: str, old: str, new: str) -> None:
        assert old in self.cells[name]
        self.cells[name] = self.cells[name].replace(old, new)


@pytest.fixture
def kernel(checkout, capsys):
    checkout.add("demo", parameters=PARAMETERS, yaml="profile: smoke\n")
    yield Notebook(capsys)
    InteractiveShell.clear_instance()


def published(checkout) -> list[tuple[str, float]]:
    records = Records.load(checkout.outputs("demo") / "samples.csv")
    return [(row["variant"], row["value"]) for row in records.rows]


@pytest.mark.parametrize("ids", [True, False])
def test_a_parameter_is_changed_and_three_cells_run_again(checkout, kernel, ids):
    assert kernel.everything(ids) == ""
    assert published(checkout) == [("head", 5.0)] * 2 + [("slide", float(step)) for step in range(3)]
    kernel.edit("parameters", "steps: int = 3", "steps: int = 2")
    assert kernel.run("parameters", "step", "show", ids=ids).endswith("[0.0, 1.0] [5.0, 5.0]\n")
    assert kernel.run("finish", ids=ids) == ""
    assert published(checkout) == [("head", 5.0)] * 2 + [("slide", 0.0), ("slide", 1.0)]
    assert manifest.read(checkout.outputs("demo"))["parameters"]["steps"] == 2


@pytest.mark.parametrize("ids", [True, False])
def test_what_is_downstream_of_a_change_is_left_out_and_refused(checkout, kernel, ids):
    kernel.everything(ids)
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    told = kernel.run("parameters", "show", ids=ids)
    assert "scale was 0.5, is 2.0" in told and told.endswith("[0.0, 1.0, 2.0] []\n")
    told = kernel.run("finish", ids=ids)
    assert told.startswith("T1Error: ") and "scale was 0.5, is 2.0" in told and len(told) < 320
    assert published(checkout)[0] == ("head", 5.0)  # the published run is as it was
    kernel.run("sizes", ids=ids)
    assert "factor has been made again" in kernel.run("finish", ids=ids)
    assert kernel.run("head", "show", "finish", ids=ids) == ""
    assert published(checkout)[:2] == [("head", 20.0)] * 2


@pytest.mark.parametrize("ids", [True, False])
def test_running_again_without_a_change_changes_nothing(checkout, kernel, ids):
    kernel.everything(ids)
    before = published(checkout)
    assert kernel.run("parameters", "setup", "step", "head", "step", "show", ids=ids).endswith("2.0] [5.0, 5.0]\n")
    assert kernel.run("finish", ids=ids) == "" and published(checkout) == before
    assert kernel.everything(ids) == "" and published(checkout) == before


def test_an_interrupt_leaves_no_number(checkout, kernel):
    kernel.everything()
    whole = kernel.cells["step"]
    kernel.cells["step"] += "    if step == 1: raise KeyboardInterrupt"
    assert kernel.run("step").startswith("KeyboardInterrupt")
    assert kernel.run("show").endswith("[] [5.0, 5.0]\n")
    assert "did not finish" in kernel.run("finish")
    kernel.cells["step"] = whole
    assert kernel.run("step", "show", "finish") == ""
    assert len(published(checkout)) == 5


def test_an_edited_cell_replaces_what_it_measured_and_drew_before(checkout, kernel):
    """Under nbclient too, which does not say that it is the same cell."""
    kernel.cells["step"] += 'run.number("demo.old", 1)'
    kernel.everything(ids=False)
    kernel.edit("step", "range(p.steps)", "range(1)")
    kernel.edit("step", "demo.old", "demo.new")
    assert kernel.run("step", "show", ids=False).endswith("[0.0] [5.0, 5.0]\n")
    assert kernel.run("finish", ids=False) == "" and len(published(checkout)) == 3
    assert set(json.loads((checkout.outputs("demo") / "numbers.json").read_text())) == {"demo.new"}


def test_what_was_made_or_read_before_its_records_is_refused(checkout, kernel):
    del kernel.cells["finish"]
    kernel.cells |= {"table": 'run.table("main", [{"n": len(run.frame())}])', "count": "total = len(run.frame())"}
    kernel.cells |= {"number": 'run.number("demo.n", total)', "finish": CELLS["finish"]}
    assert kernel.everything() == ""
    told = kernel.run("step", "number", "finish")
    assert "run.table(" in told and "total = len(" in told and "recorded has been made again" in told
    assert "run.table(" not in kernel.run("table", "finish")
    assert kernel.run("count", "number", "finish") == ""
    whole, kernel.cells["table"] = kernel.cells["table"], "1 / 0"
    assert "did not finish" in kernel.run("table", "finish")
    kernel.cells["table"] = whole
    assert kernel.run("table", "finish") == ""


@pytest.mark.parametrize("ids", [True, False])
def test_what_an_edited_cell_makes_no_longer_is_gone(checkout, kernel, ids):
    kernel.cells["number"] = 'run.number("demo.old", 1)\nrun.number("demo.kept", p.scale)'
    kernel.cells["finish"] = kernel.cells.pop("finish")
    kernel.everything(ids)
    if ids:
        kernel.edit("number", "demo.old", "demo.new")
    assert kernel.run("number", "finish", ids=ids) == ""
    numbers = json.loads((checkout.outputs("demo") / "numbers.json").read_text())
    assert set(numbers) == {"demo.new" if ids else "demo.old", "demo.kept"}
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    kernel.run("parameters", "sizes", "head", ids=ids)
    assert "scale was 0.5, is 2.0" in kernel.run("finish", ids=ids)  # the number's cell, too
    assert kernel.run("number", "finish", ids=ids) == ""


def test_tables_are_shown_whole(checkout, kernel):
    kernel.cells["wide"] = (
        "import pandas as pd\nprint(pd.DataFrame([{'a': 'word ' * 40}] * 100)._repr_html_().count('word'))"
    )
    assert kernel.run("parameters", "setup", "wide") == f"{40 * 100}\n"


def test_a_variable_of_a_later_cell_is_noticed(checkout, kernel):
    kernel.cells = {**{name: kernel.cells[name] for name in ("parameters", "setup", "sizes", "head")},
                    "later": "factor = 1000", "finish": "run.finish()"}  # fmt: skip
    assert kernel.everything() == ""
    assert "factor is that of another cell now" in kernel.run("head", "finish")
    assert kernel.run("sizes", "head", "finish") == ""
    assert published(checkout) == [("head", 5.0)] * 2


def test_a_corrected_parameter_is_accepted_though_the_file_holds_the_wrong_one(checkout, kernel):
    checkout.add("demo", parameters=PARAMETERS.replace("steps: int = 3", "steps: int = 0"), yaml="profile: smoke\n")
    kernel.edit("parameters", "steps: int = 3", "steps: int = 0")
    assert "'steps' is 0" in kernel.run("parameters", "setup")
    kernel.edit("parameters", "steps: int = 0", "steps: int = 1")
    assert kernel.everything() == "" and len(published(checkout)) == 3
    kernel.edit("parameters", "steps: int = 1", "steps: int = -1")
    assert "'steps' is -1" in kernel.run("parameters", "step")
    assert kernel.run("show").endswith("[] [5.0, 5.0]\n")  # what was measured with a right one is left out
    kernel.edit("parameters", "steps: int = -1", "steps: int = 2")
    assert kernel.run("parameters", "step") == ""


def test_a_profile_that_is_named_is_loaded_or_refused(checkout, kernel, monkeypatch):
    monkeypatch.setattr(sys.modules["t1lib.measure.environment"], "_gpu", lambda: None)
    checkout.params("demo", "profile: h200\n", "h200")
    checkout.params("demo", "profile: mine\nsteps: 1\nscale: 3\n", "mine")
    kernel.edit("parameters", '"smoke"', '"mine"')
    kernel.cells["own"] = "scale = 4.0"
    kernel.cells["measure"] = 'records.add("all", "scale", p.scale)\nrecords.add("all", "steps", p.steps)'
    assert "params/mine/demo.yaml sets steps=1, scale=3.0" in kernel.run("parameters", "setup")
    assert kernel.run("own", "measure", "finish") == ""
    content = manifest.read(checkout.root / "outputs" / "mine" / "demo")
    assert content["parameters"] == {"profile": "mine", "steps": 1, "scale": 4.0}
    kernel.edit("parameters", '"mine"', '"nobody"')
    assert "unknown profile 'nobody'" in kernel.run("parameters", "measure")
    kernel.edit("parameters", '"nobody"', '"h200"')
    assert "profile 'h200' is for a GPU" in kernel.run("parameters", "measure")
    assert not (checkout.root / "outputs" / "h200").exists()
    kernel.edit("parameters", '"h200"', '"smoke"')
    paths.params_file("smoke", "demo").unlink()
    assert "params/smoke/demo.yaml is missing" in kernel.run("parameters", "measure")


def test_a_cell_under_a_magic_depends_on_what_it_reads(checkout, kernel):
    kernel.cells["head"] = "%%time\n" + kernel.cells["head"]
    kernel.cells["wrong"] = "this is no Python"
    kernel.run("parameters", "setup", "sizes", "head", "wrong", "step", "show")
    kernel.edit("sizes", "10", "20")
    assert "factor has been made again" in kernel.run("sizes", "finish")


@pytest.mark.slow
def test_t1m3_with_another_length_and_an_interrupt(tmp_path, monkeypatch):
    """As issue 29 has it: other `seq` and `iters`, then the measuring cell and the table."""
    root = Path(__file__).resolve().parent.parent
    for folder in ("docs", "notebooks", "params"):
        shutil.copytree(root / folder, tmp_path / folder)
    monkeypatch.setenv("T1_ROOT", str(tmp_path))
    monkeypatch.delenv("T1_STAGING", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(root))
    notebook = nbformat.read(paths.notebook("t1m3"), 4)
    cells = {cell["id"]: (cell, index) for index, cell in enumerate(notebook.cells)}
    client = NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, interrupt_on_timeout=True)

    def run(*names: str) -> str:
        """The outputs of the last of these cells, or the error that ended it."""
        try:
            return json.dumps([client.execute_cell(*cells[name]).get("outputs") for name in names][-1])
        except CellExecutionError as error:
            return str(error)

    def edit(old: str, new: str) -> None:
        cell, _ = cells["parameters"]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    edit("iters: int = 10", "iters: int = 4")
    with client.setup_kernel():
        assert "Error" not in run(*cells)
        edit("seq: int = 128", "seq: int = 64")
        edit("iters: int = 4", "iters: int = 2")
        table = run("parameters", "step", "table1")
        assert "<td>2</td>" in table and "<td>4</td>" not in table
        assert "seq was 128, is 64" in run("table2")
        assert "seq was 128, is 64" in run("finish")
        client.timeout = 6  # interrupts the cell
        edit("iters: int = 2", "iters: int = 100000")
        assert "Interrupt" in run("parameters", "step")
        client.timeout = None
        assert "<td>ok<" not in run("table1") and "did not finish" in run("finish")
        edit("iters: int = 100000", "iters: int = 3")
        assert "Error" not in run(*cells)
    folder = tmp_path / "outputs" / "smoke" / "t1m3"
    rows = [tuple(row.values()) for row in Records.load(folder / "samples.csv").rows]
    walls = [row[2] for row in rows if (row[0], row[1], row[3]) == ("full", "step", "wall_ms")]
    assert walls == [0, 1, 2] and manifest.read(folder)["parameters"]["seq"] == 64


def told_to_run(kernel, numbers: dict[str, str]) -> list[str]:
    """The cells run by a user who runs what `finish` asks for, first what it says comes first, until it publishes."""
    ran = []
    while (told := kernel.run("finish")).startswith("T1Error") and len(ran) < 9:
        numbers[str(kernel.shell.execution_count)] = name = numbers[re.findall(r"`\[(\d+)\]", told.split(";")[0])[-1]]
        ran.append(name)
        kernel.run(name)
    return ran


def test_an_error_tells_cells_apart_and_names_the_one_that_comes_first(checkout, kernel):
    same = "runs = p.steps"
    made = {
        "factors": "low, high = 10 * p.scale, 20 * p.scale",
        "a": f"{same}\nrecords.add('a', 'wall', low, step=runs)",
    }
    made["b"] = f"{same}\nrecords.add('b', 'wall', high, step=runs)"
    ends = {"parameters": PARAMETERS, "setup": SETUP}
    kernel.cells = ends | made | {"finish": CELLS["finish"]}
    numbers = {str(number): name for number, name in enumerate(kernel.cells, start=1)}
    assert kernel.everything() == ""
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    kernel.edit("parameters", "steps: int = 3", "steps: int = 4")
    kernel.run("parameters")
    assert told_to_run(kernel, numbers) == ["factors", "a", "b"]
    assert published(checkout) == [("a", 20.0), ("b", 40.0)]


@pytest.mark.parametrize(
    ("maker", "user"),
    [
        ("factors = [p.scale]", "%time found = factors[0]"),
        ("factors = [p.scale]", "found = Kind().go()"),
        ("factors = [p.scale]", "found = kind.go()"),
        ("factors = [p.scale]", "class A:\n    found = factors[0]\nfound = A.found"),
        ("def make(x):\n    return lambda: x\nfactor = make(p.scale)", "found = factor()"),
        ("factor = eval(f'lambda *, x={p.scale}: x')", "found = factor()"),
    ],
)
def test_what_another_cell_uses_is_followed(checkout, kernel, maker, user):
    kind = "class Kind:\n    def go(self):\n        return factors[0]\nkind = Kind()"
    kernel.cells = {"parameters": PARAMETERS, "setup": SETUP, "kind": kind, "maker": maker}
    kernel.cells |= {"user": f"{user}\nrecords.add('a', 'wall', found)", "finish": CELLS["finish"]}
    kernel.everything()
    assert published(checkout) == [("a", 0.5)]
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    assert kernel.run("parameters", "maker", "finish").startswith("T1Error: cells to run again")
    kernel.run("user", "finish")
    assert published(checkout) == [("a", 2.0)]
