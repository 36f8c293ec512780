"""Parameters of experiments: declared in the notebook, set by a profile, checked before anything runs.

A notebook declares its parameters in one cell tagged `parameters`, as annotated literals with a
comment as help: `steps: int = 10  # measured steps, ≥ 1`. A bound in the comment (`≥ 1`, `> 0` or
`one of a, b`) applies to the value, or to each item of a list, which then must not be empty. papermill only
warns about a parameter that the notebook does not declare, and checks no types; here both are errors.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from t1lib import paths
from t1lib.errors import T1Error, choose, require

_SCALARS = {"int": int, "float": float, "str": str, "bool": bool}
TYPES = (*_SCALARS, "list", *(f"list[{name}]" for name in _SCALARS))
_SIMPLE = (bool, int, float, str, list, tuple, dict, type(None))
_IPYTHON_NAMES = {"In", "Out", "exit", "quit", "open", "get_ipython"}
_BOUND = re.compile(r"(≥|>) (-?\d+(?:\.\d+)?)")
_CHOICE = re.compile(r"one of (\w+(?:, \w+)*)")
_CHECKED = "_t1_parameters_checked"


class Parameter(NamedTuple):
    """One declared parameter: its type as written, its default, and its comment."""

    type: str
    default: Any
    help: str

    def check(self, where: str, name: str, value: Any) -> None:
        """Raise a `T1Error` if the comment has a bound and `value` does not keep to it."""
        bound, choice = _BOUND.search(self.help), _CHOICE.search(self.help)
        items = value if isinstance(value, list) else [value]
        require(bool(items) or not (bound or choice), f"{where}: {name!r} is empty; it needs at least one item")
        for item in items:
            if bound:
                within = item >= float(bound[2]) if bound[1] == "≥" else item > float(bound[2])
                require(within, f"{where}: {name!r} is {value!r}; it must be {bound[0]}")  # NaN is never within
            if choice:
                choose(f"{name} in {where}:", item, choice[1].split(", "))


def profiles() -> list[str]:
    """Return the names of the profiles: the folders of params/, sorted."""
    folder = paths.root() / "params"
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def experiments() -> list[str]:
    """Return the names of the experiments: the notebooks that declare parameters, sorted."""
    return sorted(path.stem for path in paths.notebooks().glob("*.ipynb") if _parameters_cell(path) is not None)


def read_notebook(path: Path) -> dict[str, Any]:
    """Return a notebook file as a dictionary. Raises `T1Error` if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise T1Error(f"cannot read the notebook {paths.shown(path)}: {error}") from None


def source(cell: Mapping[str, Any]) -> str:
    """Return a cell's source as one string (nbformat allows a list of lines)."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def _parameters_cell(path: Path) -> str | None:
    for cell in read_notebook(path).get("cells", []):
        if cell.get("cell_type") == "code" and "parameters" in cell.get("metadata", {}).get("tags", []):
            return source(cell)
    return None


def declared(experiment: str) -> dict[str, Parameter]:
    """Return the parameters that an experiment's notebook declares, in order.

    Raises `T1Error` for an unknown experiment, and for a line of the parameters cell that is
    not `name: type = literal  # help` with a type in `TYPES` and a literal within the help's bound.
    """
    choose("experiment", experiment, experiments())
    path = paths.notebook(experiment)
    return _parse(_parameters_cell(path) or "", paths.shown(path))


def _parse(text: str, where: str) -> dict[str, Parameter]:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise T1Error(f"{where}: the parameters cell is not Python: {error.msg} in line {error.lineno}") from None
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in body:
        line = ast.get_source_segment(text, node) or ""
        form = f"{where}: the parameters cell allows only `name: type = literal  # help`, not `{line}`"
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None):
            raise T1Error(form)
        kind, name = ast.unparse(node.annotation), node.target.id
        choose(f"type of the parameter {name!r} in {where}:", kind, TYPES)
        try:
            literal = ast.literal_eval(node.value)
        except ValueError:
            raise T1Error(form) from None
        default = _convert(where, name, kind, literal)
        found[name] = Parameter(kind, default, comments.get(node.end_lineno or 0, ""))
        found[name].check(where, name, default)
    return found


def _convert(where: str, name: str, kind: str, value: Any) -> Any:
    """Return `value` as the declared type, or raise a `T1Error` that says where the value comes from."""
    if kind.startswith("list"):
        if isinstance(value, list):
            flat = not any(isinstance(item, list | dict) for item in value)
            require(flat, f"{where}: {name!r} is nested; a list may hold numbers, texts and true/false only")
            item_kind = kind[5:-1]
            return [_convert(where, name, item_kind, item) for item in value] if item_kind else value
    elif kind == "float":
        # YAML 1.1 reads `1e-4` (no dot) as a string; a string that parses as a number is meant as one.
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif type(value) is _SCALARS[kind]:  # exact, because True is an int to isinstance
        return value
    raise T1Error(f"{where}: {name!r} is {value!r} ({type(value).__name__}); expected {kind}")


def _check(experiment: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = declared(experiment)
    for name in values:
        choose(f"parameter of {experiment} in {where}:", name, known)
    converted = {name: _convert(where, name, known[name].type, value) for name, value in values.items()}
    for name, value in converted.items():
        known[name].check(where, name, value)
    return converted


def _read_yaml(experiment: str, profile: str) -> dict[str, Any]:
    path = paths.params_file(profile, experiment)
    where = paths.shown(path)
    require(path.is_file(), f"{experiment} has no parameters for the profile {profile!r}: {where} is missing")
    try:
        text = path.read_text(encoding="utf-8")
        values, tree = yaml.safe_load(text) or {}, yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise T1Error(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    flat = isinstance(values, dict) and all(isinstance(key, str) for key in values)
    flat = flat and not any(isinstance(value, dict) for value in values.values())
    require(flat, f"{where} is not flat; write one `name: value` a line")
    names = [key.value for key, _ in tree.value] if values else []
    twice = [name for name in values if names.count(name) > 1]
    require(not twice, f"{where} has {', '.join(twice)} twice; write it once")
    return _check(experiment, values, where)


def parse_text(kind: str, text: str) -> Any:
    """Return what a command line's `text` means for a parameter of type `kind` (unchecked)."""
    if kind == "str":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def resolve(experiment: str, profile: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an experiment's parameters: defaults, then params/<profile>/<experiment>.yaml, then `overrides`.

    Texts in `overrides` are read as on a command line (`-p steps 3`), other values as they are.
    Raises `T1Error`, in one or two lines, for an unknown experiment, profile or parameter, a
    missing or nested YAML file or one with a name twice, and a value of the wrong type or outside its bound.
    """
    known = declared(experiment)
    choose("profile", profile, profiles())
    values = {name: parameter.default for name, parameter in known.items()}
    values |= _read_yaml(experiment, profile)
    given = dict(overrides or {})
    for name, value in given.items():
        if name in known and isinstance(value, str):
            given[name] = parse_text(known[name].type, value)
    values |= _check(experiment, given, "-p")
    # Plain papermill knows the profile from this parameter alone, and outputs are saved under it.
    if values.get("profile", profile) != profile:
        where = paths.shown(paths.params_file(profile, experiment))
        raise T1Error(f"{where}: 'profile' is {values['profile']!r}; it must be {profile!r}, like the folder's name")
    return values


def check_injected(experiment: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Check the parameters of a notebook that plain papermill or JupyterLab runs, and return them.

    `namespace` is the notebook's `globals()` in its second code cell, when it holds nothing but
    parameters, imports, and IPython's own names. papermill injects a misspelt parameter with a
    mere warning; here it shows up as a variable that is not declared. Only the first call in a
    kernel can detect that, because at a second Run All the variables of later cells exist, too; so
    the success of the first call is remembered in `namespace`.

    Raises `T1Error` for an undeclared or missing name, and for a value of the wrong type or outside its bound.
    """
    known = declared(experiment)
    missing = [name for name in known if name not in namespace]
    require(not missing, f"{experiment}: {', '.join(missing)} not set; run the cell tagged `parameters` first")
    present = [name for name, value in namespace.items() if isinstance(value, _SIMPLE)]
    named = {name for name in present if not name.startswith("_") and name not in _IPYTHON_NAMES}
    relevant = {name: namespace[name] for name in namespace if name in known or name in named}
    if namespace.get(_CHECKED):
        relevant = {name: namespace[name] for name in known}
    values = _check(experiment, relevant, "the notebook")
    namespace[_CHECKED] = True
    return {name: values[name] for name in known}
