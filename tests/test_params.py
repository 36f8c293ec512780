import numpy as np
import pytest
import yaml
from refusals import refused

from t1lib import params, paths

UNREADABLE = ("2024-13-45", "!!timestamp abc", "1" * 5000, "[" * 500, "? [a]\n: b")  # by PyYAML


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("steps = 3", "steps = 3"),
        ("steps: int = 2 * 3", "2 * 3"),
        ("steps: dict = {}", "allowed: int, float"),
        ("steps: int = (", "not Python"),
        ("steps: int = -1  # ≥ 0", "'steps' is -1"),
    ],
)
def test_the_parameters_cell_holds_annotated_literals_only(checkout, line, part):
    checkout.add("demo", parameters=line)
    refused(lambda: params.declared("demo"), "notebooks/demo.ipynb", part)


def test_a_file_that_is_no_notebook_is_named_and_hidden_ones_are_none(checkout):
    checkout.add("demo")
    (checkout.root / "notebooks" / "._demo.ipynb").write_bytes(b"\x00\x05\xff")
    assert params.experiments() == ["demo"]
    cells = '{"cells": [{"cell_type": "code"%s}]}'
    for text in ("", "[]", "null", '{"cells": [1]}', cells % "", cells % ', "source": "x"', cells % ', "metadata": {}'):
        (checkout.root / "notebooks" / "bad.ipynb").write_text(text)
        refused(params.experiments, "cannot read the notebook notebooks/bad.ipynb: ")


def test_defaults_then_profile_then_command_line_in_the_declared_type(checkout):
    checkout.add("demo", yaml="steps: 5\nrate: 1e-4\n")
    assert params.experiments() == ["demo"] and params.profiles() == ["smoke"]
    assert params.declared("demo")["steps"] == ("int", 3, "measured steps")
    assert params.resolve("demo", "smoke") == {"profile": "smoke", "steps": 5, "rate": 1e-4}
    for kind, default, text, value in (
        ("int", "3  # steps, ≥ 0", "0", 0),
        ("float", "1.0", "1e-4", 1e-4),
        ("float", "1", "2", 2.0),
        ("int", "3", "0x10", 16),
        ("int", "3", "-1_000", -1000),
        ("int", "3", "!!int 12", 12),
        ("float", "1", ".5e+3", 500.0),
        ("list[str]", '["a"]', "[1e5ab, 1:30, 010]", ["1e5ab", "1:30", "010"]),
        ("bool", "False", "true", True),
        ("str", '"a"', "3", "3"),
        ("list[float]", "[]", "[1e-4, 2]", [1e-4, 2.0]),
    ):
        checkout.add("demo", parameters=f"x: {kind} = {default}", yaml="")
        found = params.resolve("demo", "smoke", {"x": text})
        assert found == {"x": value} and type(found["x"]) is type(value)
    checkout.add("demo", parameters="sizes: list[float] = [1, 2.5]", yaml="")
    assert str(params.declared("demo")["sizes"].default) == "[1.0, 2.5]"
    # The first is eight or ten: it depends on the version of YAML.
    for text in ("[010]", "[1__0]", "[1_.0]", "[!!float 1:30]", "[1٣]", *UNREADABLE):
        refused(lambda text=text: params.resolve("demo", "smoke", {"sizes": text}), "-p: 'sizes' is ")


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("stpes: 5", ["params/smoke/demo.yaml", "'stpes'", "allowed: profile, steps, rate", "mean 'steps'"]),
        ("steps: 1.0", ["'steps' is 1.0; it should be a valid integer"]),
        ("steps: 010", ["'steps' is '010'; it should be a valid integer"]),
        ("steps: !!int 010", ["'010' is not a number"]),
        ("profile: 2024-01-01", ["2024, 1, 1", "string"]),
        ("- steps", ["not flat"]),
        *((f"steps: {text}", ["cannot read params/smoke/demo.yaml"]) for text in ("[", *UNREADABLE)),
        ("steps: 1\nrate: 0.1\nsteps: 2", ["has steps twice"]),
        ("profile: h200", ["must be 'smoke'"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_parameter_file_is_refused(checkout, yaml, parts):
    checkout.add("demo", yaml=yaml)
    refused(lambda: params.resolve("demo", "smoke"), *parts)
    paths.params_file("smoke", "demo").write_bytes(b"steps: 3  # \xff\n")
    refused(lambda: params.resolve("demo", "smoke"), "cannot read params/smoke/demo.yaml: 'utf-8'")
    paths.params_file("smoke", "demo").unlink()
    refused(lambda: params.resolve("demo", "smoke"), "params/smoke/demo.yaml is missing")


@pytest.mark.parametrize(
    ("line", "text", "part"),
    [
        ("x: int = 1  # steps, ≥ 1", "0", "'x' is 0; it should be greater than or equal to 1"),
        ("x: float = 1.0  # rate, > 0", ".inf", "finite number"),
        ("x: list[int] = [1]  # sizes, each ≥ 1", "[2, 0]", "[2, 0]; it should be greater than or equal to 1"),
        ("x: list[int] = [1]  # sizes, each ≥ 1", "[]", "'x' is []"),
        ('x: list[str] = ["a"]  # kinds, one of a, bb', "[a, c]", "'a' or 'bb'"),
    ],
)
def test_what_the_comment_allows_holds_on_every_way_in(checkout, line, text, part):
    checkout.add("demo", parameters=f'profile: str = "smoke"\n{line}', yaml="")
    refused(lambda: params.resolve("demo", "smoke", {"x": text}), "-p", part)
    names = {"profile": "smoke", "x": yaml.safe_load(text)}
    refused(lambda: live(names).x, "the notebook", part)
    checkout.params("demo", f"x: {text}\n")
    refused(lambda: params.resolve("demo", "smoke"), "params/smoke/demo.yaml", part)


def live(namespace):
    return params.Live("demo", namespace, lambda values: None)


def test_the_parameters_of_a_notebook_are_what_its_variables_say(checkout):
    checkout.add("demo", yaml="profile: smoke\n")
    names = {"profile": "smoke", "steps": 4, "rate": 1, "wall_ms": 3.0}
    found = live(names)
    assert found.checked() == {"profile": "smoke", "steps": 4, "rate": 1.0} and found.steps == 4
    names["steps"] = 5
    assert found.steps == 5
    refused(lambda: setattr(found, "steps", 6), "is set by its variable, `steps = 6`")
    names["steps"] = "many"
    refused(lambda: found.steps, "'steps' is 'many'")
    refused(lambda: live({"profile": "smoke"}).steps, "steps, rate not set")
    injected = {"steps": 4, "stpes": 5, "In": ["", "# Parameters\nstpes = 5\n"]}  # by papermill
    refused(lambda: live(names | injected), "'stpes'", "mean 'steps'")


def test_a_value_is_the_same_only_in_the_same_types_at_every_depth():
    """What cannot be compared is another: a list that holds itself, an int of which Python prints no digits."""
    held = [[1], [1]]
    for each in held:
        each.append(each)
    alike = ((1, 1), ([1.5, "a"], [1.5, "a"]), ({"a": ({1},)}, {"a": ({1},)}), (np.float64(2), np.float64(2)))
    other = ((1, True), ([1], [1.0]), ([1], (1,)), ({1: 2}, {True: 2}), ([{1}], [{1.0}]), (0.0, -0.0))
    other += ((np.float32(2), np.float64(2)), (np.ones(1), np.ones(1)), (held[0], held[1]), (10**5000, 10**5000 + 1))
    assert all(params.same(*pair) for pair in alike) and not any(params.same(*pair) for pair in other)
    assert all(params.same(pair[0], pair[0]) for pair in (*alike, *other))


def test_root_is_found_upwards_or_named(checkout, monkeypatch):
    below = checkout.root / "params" / "deep"
    below.mkdir(parents=True)
    monkeypatch.delenv("T1_ROOT")
    monkeypatch.chdir(below)
    assert paths.root() == checkout.root
    monkeypatch.setenv("T1_ROOT", str(below))
    refused(paths.root, f"T1_ROOT is '{below}'; allowed: a folder with notebooks/ and params/")
    (checkout.root / "t1lib").mkdir()
    monkeypatch.setenv("T1_ROOT", str(checkout.root))
    refused(paths.root, f"would be said to be of '{checkout.root}/t1lib'", "to run the latter, `pip install -e .`")


def test_a_profile_sets_what_nobody_else_has_set(checkout, capsys):
    """A value that papermill injected stays, and one edited beside the profile's name, also once it was saved."""
    cell = 'profile: str = "mine"\nsteps: int = 4\nrate: float = 0.5\n'
    checkout.add("demo", yaml="steps: 3\nrate: 0.5\n")
    checkout.params("demo", "profile: mine\nsteps: 90\nrate: 2\n", "mine")
    names = {"profile": "mine", "steps": 3, "rate": 0.5, "In": ["", "# Parameters\nrate = 0.5\n"]}
    assert live(names).checked() == {"profile": "mine", "steps": 90, "rate": 0.5} and names["steps"] == 90
    assert capsys.readouterr().out == "params/mine/demo.yaml sets steps=90\n"
    edited = {"profile": "mine", "steps": 4, "rate": 0.5, "In": ["", cell]}
    assert live(dict(edited)).checked() == {"profile": "mine", "steps": 4, "rate": 2.0}
    assert "the notebook's own, not as params/mine/demo.yaml has it: steps=4\n" in capsys.readouterr().out
    checkout.add("demo", parameters=cell, yaml="steps: 3\nrate: 0.5\n")
    assert live(dict(edited)).checked() == {"profile": "mine", "steps": 4, "rate": 2.0}
    refused(lambda: live(edited | {"profile": "h200"}).steps, "unknown profile 'h200'; allowed: mine, smoke")
    paths.params_file("mine", "demo").unlink()
    refused(lambda: live(edited).steps, "params/mine/demo.yaml is missing")
