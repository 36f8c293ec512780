"""Cells that are run again: what they made is replaced, and what no longer holds is not shown or published."""

import json
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat import v4

from t1lib.measure import manifest
from t1lib.measure.records import Records

PARAMETERS = 'profile: str = "smoke"\nsteps: int = 3  # measured steps, ≥ 1\nscale: float = 0.5  # > 0\n'
SETUP = 'from t1lib.kit.run import Run\nrun = Run.start("demo", globals())\np, records = run.params, run.records'
CELLS = {
    "parameters": PARAMETERS,
    "setup": SETUP,
    "sizes": "factor = 10 * p.scale",
    "head": 'for step in range(2):\n    records.put("head", "", {"wall_ms": factor}, step)',
    "step": 'for step in range(p.steps):\n    records.put("slide", "step", {"wall_ms": step}, step)\n',
    "show": 'print(*(run.frame().query(f"variant == {name!r}")["value"].tolist() for name in ("slide", "head")))',
}


class Notebook:
    """Cells that an IPython shell runs here: named by their ids, as by JupyterLab, or not, as by nbclient."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        InteractiveShell.clear_instance()
        self.shell, self._capsys, self.cells = InteractiveShell.instance(), capsys, dict(CELLS)

    def run(self, *names: str, ids: bool = True) -> str:
        """What the last of these cells printed, or the error that ended it."""
        for name in names:
            self._capsys.readouterr()
            source = self.cells.get(name, "run.finish()")
            done = self.shell.run_cell(source, store_history=True, cell_id=name if ids else None)
            error = done.error_in_exec
        told = self._capsys.readouterr().out
        return told if error is None else f"{type(error).__name__}: {error}"

    def everything(self, ids: bool = True) -> str:
        return self.run(*self.cells, "finish", ids=ids)

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
def test_cells_are_run_again_with_the_same_and_another_parameter(checkout, kernel, ids):
    for names in (CELLS, ("parameters", "setup", "step", "head", "step"), CELLS):
        assert kernel.run(*names, "finish", ids=ids) == ""  # again without a change: the same
        assert sorted(published(checkout)) == [("head", 5.0)] * 2 + [("slide", float(step)) for step in range(3)]
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


def test_what_was_made_or_read_before_its_records_or_did_not_finish_is_refused(checkout, kernel):
    kernel.cells |= {"table": 'run.table("main", [{"n": len(run.frame())}])', "count": "total = len(run.frame())"}
    kernel.cells["number"] = 'run.number("demo.n", total)'
    assert kernel.everything() == ""
    told = kernel.run("step", "number", "finish")
    assert "run.table(" in told and "total = len(" in told and "recorded has been made again" in told
    assert "run.table(" not in kernel.run("table", "finish")
    assert kernel.run("count", "number", "finish") == ""
    interrupted = kernel.cells["step"] + "    if step == 1: raise KeyboardInterrupt"
    for name, cell in (("table", "1 / 0"), ("step", interrupted)):
        whole, kernel.cells[name] = kernel.cells[name], cell
        assert "did not finish" in kernel.run(name, "finish")
        assert kernel.run("show").endswith("[5.0, 5.0]\n" if name == "table" else "[] [5.0, 5.0]\n")
        kernel.cells[name] = whole
        assert kernel.run(name, "table", "count", "number", "finish") == ""
    assert len(published(checkout)) == 5


@pytest.mark.parametrize("ids", [True, False])
def test_what_an_edited_cell_measured_or_made_before_is_gone(checkout, kernel, ids):
    """Under nbclient too, which does not say that it is the same cell."""
    kernel.cells["step"] += 'run.number("demo.old", 1)\nrun.number("demo.kept", p.scale)\nrun.table("old", [{"a": 1}])'
    kernel.cells["own"] = '(run.outdir / "traces").mkdir()\n(run.outdir / "traces" / "a.json").touch()'
    kernel.cells["figure"] = 'from matplotlib.figure import Figure\n_ = run.figure("kept", Figure())'
    kernel.everything(ids)
    kernel.edit("step", "range(p.steps)", "range(1)")
    kernel.edit("step", "old", "new")
    told = "this cell replaces all that `[5] for step in range(p.steps):` recorded and drew: some is of one kind\n"
    assert (told in kernel.run("step", ids=ids)) is not ids
    assert kernel.run("show", ids=ids).endswith("[0.0] [5.0, 5.0]\n")
    assert kernel.run("finish", ids=ids) == "" and len(published(checkout)) == 3
    folder = checkout.outputs("demo")
    assert set(json.loads((folder / "numbers.json").read_text())) == {"demo.new", "demo.kept"}
    assert [path.stem for path in (folder / "tables").iterdir()] == ["new"]
    assert (folder / "figures" / "kept.pdf").is_file() and (folder / "traces" / "a.json").is_file()
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    kernel.run("parameters", "sizes", "head", ids=ids)
    assert "scale was 0.5, is 2.0" in kernel.run("finish", ids=ids)  # the number's cell, too
    assert kernel.run("step", "finish", ids=ids) == ""


def test_the_executed_notebook_does_not_replace_the_folder_that_it_is_in(checkout, kernel, monkeypatch):
    kernel.everything()
    monkeypatch.chdir(checkout.outputs("demo"))
    for name in ("finish", "setup"):
        assert "open notebooks/demo.ipynb instead" in kernel.run(name)
    assert len(published(checkout)) == 5


def test_a_variable_of_a_later_cell_is_noticed(checkout, kernel):
    kernel.cells["later"] = "factor = 1000"
    kernel.everything()
    assert "factor is that of another cell now" in kernel.run("head", "finish")
    assert kernel.run("sizes", "head", "finish") == ""
    assert published(checkout)[:2] == [("head", 5.0)] * 2


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


def test_an_error_tells_cells_apart_and_names_the_one_that_comes_first(checkout, kernel):
    """The cells that a user runs who runs what `finish` asks for, first what it says comes first."""
    kernel.cells = {"parameters": PARAMETERS, "setup": SETUP, "factors": "low, high = 10 * p.scale, 20 * p.scale"}
    for name, value in (("a", "low"), ("b", "high")):
        kernel.cells[name] = f"runs = p.steps\nrecords.put('{name}', '', {{'wall_ms': {value}}}, runs)"
    numbers, ran = {str(number): name for number, name in enumerate(kernel.cells, start=1)}, []
    assert kernel.everything() == ""
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    kernel.edit("parameters", "steps: int = 3", "steps: int = 4")
    kernel.run("parameters")
    while (told := kernel.run("finish")).startswith("T1Error") and len(ran) < 9:
        ran.append(numbers[re.findall(r"`\[(\d+)\]", told.split(";")[0])[-1]])
        kernel.run(ran[-1])
        numbers[str(kernel.shell.execution_count - 1)] = ran[-1]
    assert ran == ["factors", "a", "b"] and published(checkout) == [("a", 20.0), ("b", 40.0)]


@pytest.mark.parametrize(
    ("maker", "user"),
    [
        ("factors = [p.scale]", "%time found = factors[0]"),
        ("factors = [p.scale]", "%%time\nfound = factors[0]"),
        ("factors = [p.scale]", "found = %time factors[0]"),
        ("factors = [p.scale]", "found = Kind().go()"),
        ("factors = [p.scale]", "found = kind.go()"),
        ("factors = [p.scale]", "found = ways['lambda']()"),
        ("factors = [p.scale]", "found = ways['partial']()"),
        ("factors = [p.scale]", "class A:\n    found = factors[0]\nfound = A.found"),
        ("def make(x):\n    return lambda: x\nfactor = make(p.scale)", "found = factor()"),
        ("factor = eval(f'lambda *, x={p.scale}: x')", "found = factor()"),
    ],
)
def test_what_another_cell_uses_is_followed(checkout, kernel, maker, user):
    kind = "class Kind:\n    def go(self):\n        return factors[0]\nkind = Kind()\n"
    kind += "import functools\nways = {'lambda': lambda: factors[0], 'partial': functools.partial(kind.go)}"
    kernel.cells = {"parameters": PARAMETERS, "setup": SETUP, "kind": kind, "maker": maker}
    kernel.cells["user"] = f"{user}\nrecords.put('a', '', {{'wall': found}})"
    kernel.everything()
    assert published(checkout) == [("a", 0.5)]
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    assert kernel.run("parameters", "maker", "finish").startswith("T1Error: cells to run again")
    kernel.run("user", "finish")
    assert published(checkout) == [("a", 2.0)]


@pytest.mark.parametrize(
    ("way", "use"),
    [
        ("import torch\n@torch.no_grad()\ndef way():\n    return factors[0]", "way()"),
        ("from functools import cache\nway = cache(lambda: factors[0])", "way.__wrapped__()"),
        ("def wrap(inner):\n    return lambda: inner()\nway = wrap(lambda: factors[0])", "way()"),
        ("def way(*, inner=lambda: factors[0]):\n    return inner()", "way()"),
        ("ways = {'a': [(lambda: factors[0],)]}", "ways['a'][0][0]()"),
        ("class Way:\n    go = property(lambda self: factors[0])", "Way().go"),
        ("class Way:\n    @staticmethod\n    def go():\n        return factors[0]", "Way.go()"),
        ("class Base:\n    def go(self):\n        return factors[0]\nclass Way(Base):\n    pass", "Way().go()"),
        ("class Way:\n    pass\nway = Way()\nway.go = lambda: factors[0]", "way.go()"),
    ],
)
def test_a_function_within_what_a_cell_uses_is_followed(checkout, kernel, way, use):
    kernel.cells = {"parameters": PARAMETERS, "setup": SETUP, "way": way, "maker": "factors = [p.scale]"}
    kernel.cells["user"] = f"records.put('a', '', {{'wall': {use}}})"
    kernel.everything()
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    assert kernel.run("parameters", "maker", "finish").startswith("T1Error: cells to run again")
    kernel.run("user", "finish")
    assert published(checkout) == [("a", 2.0)]


def save(checkout, cells: dict[str, str]) -> None:
    """The notebook's file has these cells, an empty one and the last, by their ids, as JupyterLab saves it."""
    saved = {**cells, "empty": " ", "finish": "run.finish()"}
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source, id=name) for name, source in saved.items()])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    (checkout.root / "notebooks" / "demo.ipynb").write_text(json.dumps(notebook))


def test_a_cell_sees_what_those_above_it_recorded_and_all_may_run_again(checkout, kernel):
    """Also while somebody's edit of the notebook cannot be read."""
    last = {name: kernel.cells.pop(name) for name in ("step", "show")}
    kernel.cells |= {"early": 'run.number("demo.n", len(run.frame()))', **last}
    save(checkout, kernel.cells)
    path = checkout.root / "notebooks" / "demo.ipynb"
    for _ in range(2):
        assert kernel.everything() == ""
        assert json.loads((checkout.outputs("demo") / "numbers.json").read_text())["demo.n"]["value"] == 2
        path.write_text(path.read_text()[:200])
    assert len(published(checkout)) == 5


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("figures/a", "from matplotlib.figure import Figure\n_ = run.figure('a', Figure())"),
        ("tables/a", "_ = run.table('a', [])"),
        ("demo.a", "run.number('demo.a', 1)"),
    ],
)
def test_two_cells_of_a_notebook_do_not_make_the_same(checkout, kernel, name, make, ids):
    """But one that is run again may, and one that replaces another: edited, where frontends give no ids, or moved."""
    kernel.cells |= {"one": make, "other": f"# other\n{make}"}
    save(checkout, kernel.cells)
    assert kernel.run(*CELLS, "one", "one", ids=ids) == ""
    told = f"T1Error: {name!r} is made by another cell, too, `[8] {make.splitlines()[0]}`; "
    assert kernel.run("other", ids=ids).startswith(told)
    assert kernel.run("one", ids=ids) == ""
    del kernel.cells["one"]
    save(checkout, kernel.cells)
    assert kernel.run("other", "finish", ids=ids) == ""
    kernel.edit("other", "# other", "# edited")
    assert kernel.run("other", "finish", ids=ids) == ""


def test_a_part_of_a_notebook_is_not_published(checkout, kernel):
    """Neither if a cell was left out, nor if one was interrupted before it recorded anything."""
    save(checkout, CELLS)
    assert kernel.everything() == ""
    whole = published(checkout)
    InteractiveShell.clear_instance()
    kernel.shell = InteractiveShell.instance()  # as if the kernel had been restarted
    told = "T1Error: cells of notebooks/demo.ipynb that have not run to their end: 3, first `factor = 10 * p.scale`"
    assert kernel.run("parameters", "setup", "step", "finish").startswith(told)
    kernel.cells["interrupted"] = kernel.cells["head"]
    kernel.edit("head", "for", "raise KeyboardInterrupt\nfor")
    told = kernel.run("sizes", "head", "show", "finish")
    assert "1, first `for step in range(2):`" in told and published(checkout) == whole
    kernel.cells["head"] = kernel.cells["interrupted"]
    assert kernel.run("head", "finish") == "" and sorted(published(checkout)) == sorted(whole)
