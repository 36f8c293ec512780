import pytest

from t1lib import params, paths
from t1lib.errors import T1Error


def refused(call, *parts):
    """Assert that `call` raises a T1Error of one or two lines that holds all `parts`."""
    with pytest.raises(T1Error) as raised:
        call()
    message = str(raised.value)
    assert len(message.splitlines()) <= 2
    for part in parts:
        assert part in message


def test_declared_gives_types_defaults_and_help(checkout):
    checkout.add("demo", parameters='profile: str = "smoke"  # machine\nsizes: list[float] = [1, 2.5]  # in GiB\n')
    assert params.experiments() == ["demo"]
    assert params.profiles() == ["smoke"]
    assert params.declared("demo") == {
        "profile": ("str", "smoke", "machine"),
        "sizes": ("list[float]", [1.0, 2.5], "in GiB"),
    }


def test_a_notebook_without_parameters_is_no_experiment(checkout):
    path = checkout.add("tutorial")
    path.write_text(path.read_text().replace('"parameters"', '"other"'))
    assert params.experiments() == []


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("steps = 3", "steps = 3"),
        ("steps: int = 2 * 3", "2 * 3"),
        ("steps: int", "`steps: int`"),
        ("steps: dict = {}", "allowed: int, float"),
        ("steps: int = 1.5", "expected int"),
        ("steps: int = (", "not Python"),
    ],
)
def test_the_parameters_cell_holds_annotated_literals_only(checkout, line, part):
    checkout.add("demo", parameters=line)
    refused(lambda: params.declared("demo"), "notebooks/demo.ipynb", part)


def test_defaults_then_profile_then_overrides(checkout):
    checkout.add("demo", yaml="steps: 5\nrate: 1e-4\n")
    assert params.resolve("demo", "smoke") == {"profile": "smoke", "steps": 5, "rate": 1e-4}
    assert params.resolve("demo", "smoke", {"steps": "7", "rate": 2})["steps"] == 7
    assert type(params.resolve("demo", "smoke", {"rate": 2})["rate"]) is float


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("stpes: 5", ["params/smoke/demo.yaml", "'stpes'", "allowed: profile, steps, rate", "mean 'steps'"]),
        ("steps: ten", ["'steps' is 'ten' (str)", "expected int"]),
        ("steps: true", ["'steps' is True (bool)", "expected int"]),
        ("steps: 1.0", ["expected int"]),
        ("rate: fast", ["expected float"]),
        ("rate: true", ["expected float"]),
        ("profile: 2024-01-01", ["(date)", "expected str"]),
        ("steps: {first: 1}", ["not flat"]),
        ("- steps", ["not flat"]),
        ("steps: [", ["not YAML"]),
        ("steps: 1\nrate: 0.1\nsteps: 2", ["has steps twice"]),
        ("profile: h200", ["must be 'smoke'"]),
    ],
)
def test_a_wrong_parameter_file_is_refused(checkout, yaml, parts):
    checkout.add("demo", yaml=yaml)
    refused(lambda: params.resolve("demo", "smoke"), *parts)


def test_unknown_names_are_refused(checkout):
    checkout.add("demo")
    refused(lambda: params.resolve("deno", "smoke"), "'deno'", "allowed: demo", "mean 'demo'")
    refused(lambda: params.resolve("demo", "smok"), "profile 'smok'", "allowed: smoke")
    refused(lambda: params.resolve("demo", "smoke", {"stpes": "1"}), "-p", "mean 'steps'")
    refused(lambda: params.resolve("demo", "smoke", {"steps": "one"}), "-p", "expected int")
    paths.params_file("smoke", "demo").unlink()
    refused(lambda: params.resolve("demo", "smoke"), "params/smoke/demo.yaml is missing")


@pytest.mark.parametrize(
    ("line", "text", "part"),
    [
        ("x: int = 1  # steps, ≥ 1", "0", "'x' is 0; it must be ≥ 1"),
        ("x: float = 1.0  # rate, > 0", "0", "'x' is 0.0; it must be > 0"),
        ("x: float = 1.0  # rate, > 0", ".nan", "must be > 0"),
        ("x: float = 1.0  # at ≥ 0.5", "0.4", "must be ≥ 0.5"),
        ("x: list[int] = [1]  # sizes, each ≥ 1", "[2, 0]", "[2, 0]; it must be ≥ 1"),
        ("x: list[int] = [1]  # sizes, each ≥ 1", "[]", "'x' is empty"),
        ('x: str = "a"  # kind, one of a, bb: the second is slow', "b", "allowed: a, bb."),
        ('x: list[str] = ["a"]  # kinds, one of a, bb', "[a, c]", "'c'"),
    ],
)
def test_what_the_comment_allows_holds_on_every_way_in(checkout, line, text, part):
    checkout.add("demo", parameters=line, yaml="")
    refused(lambda: params.resolve("demo", "smoke", {"x": text}), "-p", part)
    value = params.parse_text(params.declared("demo")["x"].type, text)
    refused(lambda: params.check_injected("demo", {"x": value}), "the notebook", part)
    checkout.params("demo", f"x: {text}\n")
    refused(lambda: params.resolve("demo", "smoke"), "params/smoke/demo.yaml", part)


def test_a_bound_admits_its_edge_and_holds_for_the_default(checkout):
    checkout.add("demo", parameters="x: int = 3  # steps, ≥ 0", yaml="")
    assert params.resolve("demo", "smoke", {"x": "0"}) == {"x": 0}
    checkout.add("demo", parameters="x: int = -1  # steps, ≥ 0", yaml="")
    refused(lambda: params.declared("demo"), "notebooks/demo.ipynb", "'x' is -1")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "3", 3),
        ("float", "1e-4", 1e-4),
        ("bool", "true", True),
        ("str", "3", "3"),
        ("list[int]", "[1, 2]", [1, 2]),
        ("list[float]", "[1e-4, 2]", [1e-4, 2.0]),
    ],
)
def test_command_line_texts_take_the_declared_type(checkout, kind, text, value):
    default = {"int": 1, "float": 1.0, "bool": False, "str": "a"}.get(kind, [])
    checkout.add("demo", parameters=f"x: {kind} = {default!r}", yaml="")
    assert params.resolve("demo", "smoke", {"x": text}) == {"x": value}


def test_nested_and_mixed_lists_are_refused(checkout):
    checkout.add("demo", parameters="x: list[int] = []", yaml="")
    refused(lambda: params.resolve("demo", "smoke", {"x": "[[1]]"}), "nested")
    refused(lambda: params.resolve("demo", "smoke", {"x": "[a]"}), "expected int")
    refused(lambda: params.resolve("demo", "smoke", {"x": "3"}), "expected list[int]")


def test_injected_parameters_are_checked_once_strictly(checkout):
    checkout.add("demo")
    names = {"profile": "smoke", "steps": 4, "rate": 1, "In": [], "_": 0, "Path": object, "params": params}
    assert params.check_injected("demo", dict(names)) == {"profile": "smoke", "steps": 4, "rate": 1.0}
    refused(lambda: params.check_injected("demo", {**names, "stpes": 5}), "'stpes'", "mean 'steps'")
    refused(lambda: params.check_injected("demo", {**names, "steps": "5"}), "expected int")
    refused(lambda: params.check_injected("demo", {"profile": "smoke"}), "steps, rate not set")


def test_a_second_run_all_in_jupyterlab_is_no_error(checkout):
    checkout.add("demo")
    namespace = {"profile": "smoke", "steps": 4, "rate": 1.0}
    params.check_injected("demo", namespace)
    namespace["wall_ms"] = 3.0  # a variable of a later cell
    assert params.check_injected("demo", namespace)["steps"] == 4
    namespace["steps"] = "many"
    refused(lambda: params.check_injected("demo", namespace), "expected int")


def test_root_is_found_upwards_or_named(checkout, monkeypatch, tmp_path):
    monkeypatch.delenv("T1_ROOT")
    below = tmp_path / "notebooks" / "deep"
    below.mkdir()
    monkeypatch.chdir(below)
    assert paths.root() == tmp_path
    monkeypatch.setenv("T1_ROOT", str(below))
    refused(paths.root, "T1_ROOT", "notebooks/")
