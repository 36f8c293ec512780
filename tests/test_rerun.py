"""Cells that are run again: what they made is replaced, and what no longer holds is not shown or published."""

import json
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from t1lib import params
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
    told = kernel.run("head", ids=ids)
    assert told == "what this cell made is out of date: run `[3] factor = 10 * p.scale` first: scale was 0.5, is 2.0\n"
    kernel.run("sizes", ids=ids)
    assert "factor has been made again" in kernel.run("finish", ids=ids)
    assert kernel.run("head", "show", "finish", ids=ids) == ""
    assert published(checkout)[:2] == [("head", 20.0)] * 2


def test_what_was_made_or_read_before_its_records_or_did_not_finish_is_refused(checkout, kernel):
    kernel.cells |= {"table": 'run.table("main", [{"n": len(run.frame())}])', "count": "total = len(records.rows)"}
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


@pytest.mark.parametrize("ids", [True, False])
def test_samples_are_on_disk_when_their_cell_ends_before_anything_is_drawn(checkout, kernel, ids):
    """Those of a cell that is run again replace its earlier ones; a run that only draws writes none."""
    kernel.cells["parameters"] = more = f"{PARAMETERS}measure: bool = True"
    checkout.add("demo", parameters=more, yaml="profile: smoke\n")

    def saved():
        path = kernel.shell.user_ns["run"].outdir / "samples.csv"
        return [(row["variant"], row["value"]) for row in Records.load(path).rows] if path.exists() else None

    kernel.run("parameters", "setup", "sizes", ids=ids)
    assert saved() is None
    kernel.run("head", ids=ids)
    assert saved() == [("head", 5.0)] * 2
    kernel.run("step", ids=ids)
    assert len(saved()) == 2 + 3
    kernel.edit("parameters", "steps: int = 3", "steps: int = 1")
    assert kernel.run("parameters", "step", ids=ids) == "" and saved() == [("head", 5.0)] * 2 + [("slide", 0.0)]
    kernel.run("finish", ids=ids)
    before = (checkout.outputs("demo") / "samples.csv").stat().st_mtime_ns
    InteractiveShell.clear_instance()
    kernel.shell = InteractiveShell.instance()  # as if the kernel had been restarted
    kernel.edit("parameters", "measure: bool = True", "measure: bool = False")
    assert kernel.run("parameters", "setup", "show", ids=ids).endswith("[0.0] [5.0, 5.0]\n")
    assert saved() is None and (checkout.outputs("demo") / "samples.csv").stat().st_mtime_ns == before


def test_the_executed_notebook_does_not_replace_the_folder_that_it_is_in(checkout, kernel, monkeypatch):
    kernel.everything()
    monkeypatch.chdir(checkout.outputs("demo"))
    for name in ("finish", "setup"):
        assert "open notebooks/demo.ipynb instead" in kernel.run(name)
    assert len(published(checkout)) == 5


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


def test_an_error_names_cells_in_the_order_in_which_they_are_to_be_run(checkout, kernel):
    """That of the notebook, whatever order they ran in before."""
    save(checkout, kernel.cells)
    assert kernel.run("parameters", "setup", "sizes", "step", "head", "show", "finish") == ""
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    kernel.edit("parameters", "steps: int = 3", "steps: int = 4")
    told = kernel.run("parameters", "finish")
    assert re.search(r"run `\[3\] factor = .*`\[4\] for step in range\(p", told), told


FACTORS, FOUND = "factors = [p.scale]", "found = p.scale"
KIND = "class Kind:\n    def go(self):\n        return factors[0]\n"
ONE = "import torch\none, ones = torch.nn.Sequential(torch.nn.Identity()), torch.ones(())\n"


@pytest.mark.parametrize(
    "cells",
    [
        (FACTORS, "%%time\nfound = factors[0]"),
        (FACTORS, "found = %time factors[0]"),
        (FACTORS, "class A:\n    found = factors[0]\nfound = A.found"),
        ("def make(x):\n    return lambda: x\nfactor = make(p.scale)", "found = factor()"),
        ("factor = eval(f'lambda *, x={p.scale}: x')", "found = factor()"),
        (f"{KIND}kind = Kind()", FACTORS, "found = kind.go()"),
        (f"{KIND}class Way(Kind):\n    pass", FACTORS, "found = Way().go()"),
        (f"{KIND}from functools import partial\nway = partial(Kind().go)", FACTORS, "found = way()"),
        ("from functools import cache\nway = cache(lambda: factors[0])", FACTORS, "found = way.__wrapped__()"),
        ("def wrap(inner):\n    return lambda: inner()\nway = wrap(lambda: factors[0])", FACTORS, "found = way()"),
        ("def way(*, inner=lambda: factors[0]):\n    return inner()", FACTORS, "found = way()"),
        ("ways = {'a': [(lambda: factors[0],)]}", FACTORS, "found = ways['a'][0][0]()"),
        ("class Way:\n    go = property(lambda self: factors[0])", FACTORS, "found = Way().go"),
        ("class Way:\n    @staticmethod\n    def go():\n        return factors[0]", FACTORS, "found = Way.go()"),
        ("class Way:\n    pass\nway = Way()\nway.go = lambda: factors[0]", FACTORS, "found = way.go()"),
        ("class Way:\n    __slots__ = 'go'\nway = Way()\nway.go = lambda: factors[0]", FACTORS, "found = way.go()"),
        ("from types import SimpleNamespace as Way\nway = Way(go=lambda: factors[0])", FACTORS, "found = way.go()"),
        ("from collections import deque\nways = deque([lambda: factors[0]])", FACTORS, "found = ways[0]()"),
        (f"{ONE}one.register_forward_hook(lambda *given: given[2] * factors[0])", FACTORS, "found = one(ones).item()"),
        (FOUND, "if p.steps == 9:\n    found = 99"),
        (FOUND, "for _ in range(p.steps - 3):\n    found = 99"),
        (FOUND, "import contextlib\nwith contextlib.suppress(Exception):\n    found = 1 // 0"),
        (FOUND, "def go():\n    return found\nfound = go() * 1"),
        ("exec('found = p.scale')", ""),
    ],
)
def test_what_a_cell_uses_is_followed_whatever_way_it_is_made_and_used(checkout, kernel, cells):
    *way, maker, user = cells
    kernel.cells = {"parameters": PARAMETERS, "setup": SETUP, "way": "".join(way), "maker": maker}
    kernel.cells["user"] = f"{user}\nrecords.put('a', '', {{'wall': found}})"
    assert kernel.everything() == "" and published(checkout) == [("a", 0.5)]
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    assert kernel.run("parameters", "maker", "finish").startswith("T1Error: cells to run again")
    assert kernel.run("user", "finish") == "" and published(checkout) == [("a", 2.0)]


def test_a_cell_that_may_assign_a_variable_is_run_again_by_itself_as_long_as_it_has_not(checkout, kernel):
    kernel.cells |= {"maybe": "if p.steps == 9:\n    factor = 99", "head": kernel.cells.pop("head")}
    assert kernel.everything() == kernel.run("maybe", "finish") == ""
    assert published(checkout)[-1] == ("head", 5.0)
    kernel.edit("parameters", "steps: int = 3", "steps: int = 9")
    assert "factor has been made again" in kernel.run("parameters", "step", "maybe", "finish")
    assert kernel.run("head", "finish") == "" and published(checkout)[-1] == ("head", 99.0)
    kernel.edit("parameters", "steps: int = 9", "steps: int = 3")
    told = kernel.run("parameters", "step", "maybe", "head", "finish")  # the 99 is still there
    assert "factor is that of another cell now; run `[3] factor" in told
    assert kernel.run("sizes", "maybe", "head", "finish") == "" and published(checkout)[-1] == ("head", 5.0)
    kernel.cells["later"] = "factor = 7"
    kernel.run("later", "maybe", "maybe", "head")  # the 7 is still the later cell's, however often it is kept
    assert "factor is that of another cell now; run `[22] factor" in kernel.run("finish")


def test_all_cells_may_run_again_though_they_use_the_same_names(checkout, kernel):
    """Neither loops, with blocks nor two branches count as if they might not assign."""
    names = "for size in (1, 2):\n    for found in [size]:\n        last = found\n    print(last)\n"
    names += "with open(__import__('os').devnull) as file:\n    read = file.read()\nif read:\n    kind = []\n"
    names += "else:\n    kind = {}\nprint(read, kind, found)\n"
    kernel.cells |= {"one": names + "run.number('demo.one', last)", "two": names + "run.number('demo.two', last)"}
    for saved in (False, True):
        if saved:
            save(checkout, kernel.cells)
        assert kernel.everything() == kernel.everything() == ""


def test_a_value_of_another_type_at_any_depth_is_another(checkout, kernel):
    kernel.cells["sizes"] = "factor = {'a': (1,)}"
    kernel.edit("head", '"wall_ms": factor', '"wall_ms": 1 if factor else 0')
    assert kernel.everything() == kernel.run("sizes", "finish") == ""  # the same again
    kernel.edit("sizes", "(1,)", "(1.0,)")
    assert "factor has been made again" in kernel.run("sizes", "finish")


def test_an_array_in_a_parameters_variable_is_refused(checkout, kernel):
    cell = PARAMETERS + "sizes: list[int] = [1, 2]\n"
    checkout.add("demo", parameters=cell, yaml="profile: smoke\n")
    kernel.cells |= {"parameters": cell, "array": "import numpy\nsizes = numpy.ones((3, 3))"}
    kernel.edit("sizes", "p.scale", "p.scale * len(p.sizes) * len(sizes)")
    told = kernel.everything()
    assert told.startswith("T1Error: ") and told.count("\n") <= 1 and "sizes was [1, 2], is " in told
    told = kernel.run("head", "show", "step")
    assert told.startswith("T1Error: the notebook: 'sizes' is ") and "valid list (list[int])" in told
    assert told.count("\n") <= 1
    assert kernel.run("parameters", "step", "head", "finish") == ""
    kernel.cells["parameters"] = cell.replace("= [1, 2]", "= numpy.ones((3, 3))")
    assert "the parameters cell allows only" in kernel.run("parameters", "step")


def save(checkout, cells: dict[str, str]) -> None:
    """The notebook's file has these cells, an empty one and the last."""
    checkout.save("demo", {**cells, "empty": " ", "finish": "run.finish()"})


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


def test_what_was_drawn_of_all_records_is_drawn_again_once_there_are_others(checkout, kernel):
    """A cell above records for the first time, or what was left out is back, as its parameter is."""
    kernel.cells |= {"new": "0", "count": "run.number('demo.n', len(run.frame()))"}
    save(checkout, kernel.cells)
    assert kernel.everything() == ""
    kernel.cells["new"] = "records.put('new', '', {'wall_ms': 1})"
    save(checkout, kernel.cells)
    assert "`[8] run.number('demo.n', len(run.frame()))`: what `[10] records" in kernel.run("new", "finish")
    assert kernel.run("count", "finish") == ""
    kernel.edit("parameters", "scale: float = 0.5", "scale: float = 2.0")
    kernel.run("parameters", "count")
    kernel.cells["parameters"] = PARAMETERS
    assert "`[15] run.number('demo.n', len(run.frame()))`: what `[4] for step" in kernel.run("parameters", "finish")
    assert kernel.run("count", "finish") == ""
    assert "recorded has been made again" in kernel.run("head", "finish")  # where it stood before


@pytest.mark.parametrize("ids", [True, False])
def test_two_cells_of_a_notebook_do_not_make_the_same(checkout, kernel, ids):
    """But one that is run again may, and one that replaces another: edited, where frontends give no ids, or moved."""
    kernel.cells |= {"one": "run.number('demo.a', 1)", "other": "# other\nrun.number('demo.a', 1)"}
    save(checkout, kernel.cells)
    assert kernel.run(*CELLS, "one", "one", ids=ids) == ""
    told = "T1Error: 'demo.a' is made by another cell, too, `[8] run.number('demo.a', 1)`; "
    assert kernel.run("other", ids=ids).startswith(told)
    assert kernel.run("one", ids=ids) == ""
    del kernel.cells["one"]
    save(checkout, kernel.cells)
    assert kernel.run("other", "finish", ids=ids) == ""
    kernel.edit("other", "# other", "# edited")
    assert kernel.run("other", "finish", ids=ids) == ""


@pytest.mark.parametrize("ids", [True, False])
def test_two_cells_of_a_notebook_do_not_record_the_same(checkout, kernel, ids):
    """But an edited one replaces that which it was, and one that is not saved the one that was copied."""
    copied = f"# copied\n{kernel.cells['head']}"
    save(checkout, kernel.cells | {"copied": copied})
    assert kernel.everything(ids) == ("" if not ids else kernel.run("finish"))
    kernel.cells["copied"] = copied
    told = "T1Error: 'head/wall_ms' is recorded by another cell, too, `[4] for step in range(2):`; give one of them"
    assert kernel.run("copied", ids=ids).startswith(told)
    assert kernel.run("show", ids=ids).endswith("[5.0, 5.0]\n")
    del kernel.cells["copied"]
    save(checkout, kernel.cells)
    kernel.cells["new"] = copied
    assert not ids or kernel.run("new").startswith(told)  # not saved yet
    del kernel.cells["new"]
    assert kernel.run("finish", ids=ids) == "" and len(published(checkout)) == 5
    kernel.edit("head", "range(2)", "range(1)")
    save(checkout, kernel.cells)
    assert kernel.run("head", "finish", ids=ids) == "" and len(published(checkout)) == 4


def test_two_cells_of_one_source_are_refused_where_cells_have_no_ids(checkout, kernel):
    save(checkout, kernel.cells | {"again": kernel.cells["head"]})
    assert "`[4] for step in range(2):`: stands twice in the notebook" in kernel.everything(ids=False)


def test_what_a_deleted_or_unsaved_cell_made_is_not_published(checkout, kernel):
    kernel.cells["own"] = (
        "records.put('own', '', {'wall_ms': 1})\nrun.number('demo.own', 1)\nrun.table('own', [])\nx = 1"
    )
    save(checkout, kernel.cells)
    assert kernel.everything() == ""
    folder, whole = checkout.outputs("demo"), kernel.cells.copy()
    assert ("own", 1.0) in published(checkout) and (folder / "tables" / "own.tex").is_file()
    del kernel.cells["own"]
    save(checkout, kernel.cells)
    told = "left out, as long as the saved notebook does not have it: `[7] records.put('own', '', {'wall_ms': 1})`\n"
    assert kernel.run("finish").startswith(told) and kernel.run("show").startswith(told)
    assert ("own", 1.0) not in published(checkout) and not (folder / "tables" / "own.tex").exists()
    assert json.loads((folder / "numbers.json").read_text()) == {}
    save(checkout, whole)  # it was only not saved yet
    assert kernel.run("finish") == "" and ("own", 1.0) in published(checkout)
    assert (folder / "tables" / "own.tex").is_file()
    assert json.loads((folder / "numbers.json").read_text()).keys() == {"demo.own"}
    kernel.cells = whole | {"user": "run.number('demo.user', x)"}
    save(checkout, kernel.cells)
    assert kernel.run("user", "finish") == ""
    del kernel.cells["own"]
    save(checkout, kernel.cells)
    assert "x is not from the last cell above that makes it, in the saved notebook" in kernel.run("finish")


def test_cells_that_were_moved_are_run_again(checkout, kernel):
    """A cell reads the records and variables of those above it."""
    kernel.cells |= {
        "count": "run.number('demo.n', len(run.frame()))",
        "twice": "factor = 2 * p.scale",
        "end": "factor",
    }
    save(checkout, kernel.cells)
    assert kernel.everything() == ""
    for moved, told in (("head", "`head` recorded is not from"), ("twice", "factor is not from")):
        cells = kernel.cells.copy()
        names = [name for name in cells if name != moved]
        names.insert(names.index("count") + 1 if moved == "head" else names.index("sizes") + 1, moved)
        save(checkout, {name: cells[name] for name in names})
        found = kernel.run("finish")
        assert "is not from the last cell above that makes it, in the saved notebook" in found, told
        assert kernel.run(*names, "finish") == ""
        save(checkout, cells)
        kernel.run(*cells, "finish")
    assert published(checkout)[0] == ("head", 5.0)


def test_what_was_made_before_an_attempt_that_failed_is_gone(checkout, kernel):
    good = "run.number('demo.n', 1)\nrun.table('t', [{'a': 1}])\nrun.figure('f', Figure())\n"
    failing = "class Bad(Figure):\n    def savefig(self, path, **options):\n"
    failing += "        open(path, 'w').write('half')\n        1 / 0\n"
    for call in ("number('demo.n', 1j)", "table('t', 3)", "figure('f', Bad())"):
        failing += f"try:\n    run.{call}\nexcept Exception:\n    pass\n"
    kernel.cells["made"] = f"from matplotlib.figure import Figure\n{good}other = run.number('demo.other', 2)"
    assert kernel.everything() == ""
    folder = checkout.outputs("demo")
    made = {path.name for path in folder.rglob("*.*") if path.parent != folder}
    assert made == {"f.pdf", "f.png", "t.tex"} and "demo.n" in json.loads((folder / "numbers.json").read_text())
    for cell in (good + failing, failing):
        kernel.cells["made"] = f"from matplotlib.figure import Figure\n{cell}other = run.number('demo.other', 2)"
        assert kernel.run("made", "finish") == ""
        assert not [path for path in folder.rglob("*.*") if path.parent != folder]
        assert json.loads((folder / "numbers.json").read_text()).keys() == {"demo.other"}


@pytest.mark.parametrize(
    "call",
    [
        *(f"run.figure({name!r}, None)" for name in ("../x", "", "a b", "a\\b", "a/b", "a.b", 3)),
        *(f"run.number({name!r}, 1)" for name in ("../x", "", "a b", 3)),
        "run.number('demo.n', 1j)",
        "run.number('demo.n', __import__('numpy').ones(2))",
        "run.number('demo.n', __import__('torch').ones(2))",
        "run.number('demo.n', 1, unit=None)",
    ],
)
def test_names_and_numbers_that_cannot_be_written_are_refused_at_the_call(kernel, call):
    kernel.run("parameters", "setup")
    kernel.cells["call"] = call
    assert re.match(r"T1Error: the (name|key|number) .*(letters, digits|allowed: )", kernel.run("call"))


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


def test_what_an_edit_drew_that_was_not_saved_is_to_be_drawn_again(checkout, kernel):
    kernel.cells = {"parameters": f"{PARAMETERS}measure: bool = True", "setup": SETUP, "n": 'run.number("demo.n", 1)'}
    save(checkout, kernel.cells)
    checkout.finish(folder := checkout.outputs("demo"))
    kernel.edit("parameters", "True", "False")
    assert kernel.everything() == ""
    for old, new, told in (("1", "2", "drawn by other code, or from another docs/differences.md"), ("2", "1", None)):
        kernel.edit("n", old, new)
        assert kernel.run("n", "finish") == ""
        assert manifest.difference(folder, "demo", params.resolve("demo", "smoke"), drawn=True) == told
