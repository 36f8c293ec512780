"""Parameters of experiments: declared in the notebook, set by a profile, checked before anything runs.

A notebook declares its parameters in one cell tagged `parameters`, as annotated literals with a comment as help:
`steps: int = 10  # measured steps, ≥ 1`. A bound in the comment (`≥ 1`, `> 0` or `one of a, b`) applies to the value,
or to each item of a list, which then must not be empty.
"""

import ast
import copy
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from t1lib import paths
from t1lib.errors import T1Error, choose, require, shown

SCALARS = {"int": int, "float": Annotated[float, Field(allow_inf_nan=False)], "str": str, "bool": bool}
TYPES = (*SCALARS, *(f"list[{name}]" for name in SCALARS))
BASE = "smoke"  # the profile whose values the committed notebooks' parameters cells repeat
_BOUND = re.compile(r"(≥|>) (-?\d+(?:\.\d+)?)")
_CHOICE = re.compile(r"one of (\w+(?:, \w+)*)")
Values = dict[str, Any]
INJECTED = "# Parameters"  # the first line of the cell in which papermill sets parameters


class Parameter(NamedTuple):
    type: str  # as written
    default: Any
    help: str  # the comment

    def allowed(self) -> Any:
        """The type with the bound that `help` states, as an annotation for pydantic."""
        item = SCALARS[self.type.removeprefix("list[").removesuffix("]")]
        bound, choice = _BOUND.search(self.help), _CHOICE.search(self.help)
        if choice:
            item = Literal[tuple(choice[1].split(", "))]
        elif bound:
            item = Annotated[item, Field(**{"ge" if bound[1] == "≥" else "gt": float(bound[2])})]
        if self.type.startswith("list"):
            item = Annotated[list[item], Field(min_length=1 if bound or choice else 0)]
        return item


def profiles() -> list[str]:
    """The names of the profiles: the folders of params/, sorted."""
    return sorted(path.name for path in (paths.root() / "params").glob("[!.]*") if path.is_dir())


def experiments() -> list[str]:
    """The names of the experiments: the notebooks that declare parameters, sorted."""
    found = (paths.root() / "notebooks").glob("[!.]*.ipynb")  # macOS puts ._demo.ipynb beside a copied demo.ipynb
    return sorted(path.stem for path in found if any(map(holds_parameters, code_cells(path))))


def _read_notebook(path: Path) -> Values:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise T1Error(f"cannot read the notebook {paths.shown(path)}: {error}") from None


def title(experiment: str) -> str:
    """The notebook's title, from the kit's entry `t1` in its metadata; empty if it has none."""
    return _read_notebook(paths.notebook(experiment)).get("metadata", {}).get("t1", {}).get("title", "")


def first_line(text: str) -> str:
    """The start of a cell's first line, by which errors name it."""
    return text.strip().partition("\n")[0][:60]


def code_cells(path: Path) -> list[Values]:
    """The code cells of a notebook file, the source of each as one string. Raises `T1Error` if it is not one."""
    try:
        cells = [cell for cell in _read_notebook(path).get("cells", []) if cell["cell_type"] == "code"]
        for cell in cells:
            cell["source"] = "".join(cell["source"])  # nbformat allows a list of lines
            holds_parameters(cell)
    except (AttributeError, LookupError, TypeError):
        raise T1Error(f"cannot read the notebook {paths.shown(path)}: it is not of nbformat 4") from None
    return cells


def holds_parameters(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is the one tagged `parameters`."""
    return "parameters" in cell["metadata"].get("tags", [])


def declared(experiment: str) -> dict[str, Parameter]:
    """The parameters that an experiment's notebook declares, in order. Raises `T1Error` for an unknown experiment, and
    for a line that is not `name: type = literal  # help` with a type in `TYPES` and a literal within its bound."""
    path = paths.notebook(choose("experiment", experiment, experiments()))
    return _parse(next(filter(holds_parameters, code_cells(path)))["source"], paths.shown(path))


def _parse(text: str, where: str) -> dict[str, Parameter]:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise T1Error(f"{where}: the parameters cell is not Python: {error.msg} in line {error.lineno}") from None
    lines, found = text.encode().splitlines(), {}
    for node in body:
        try:
            kind, name, default = ast.unparse(node.annotation), node.target.id, ast.literal_eval(node.value)
        except (AttributeError, TypeError, ValueError):
            line = shown(ast.get_source_segment(text, node) or "")
            form = "the parameters cell allows only `name: type = literal  # help`"
            raise T1Error(f"{where}: {form}, not {line}") from None
        choose(f"type of the parameter {name!r} in {where}:", kind, TYPES)
        comment = lines[node.end_lineno - 1][node.end_col_offset :].decode().lstrip("# ")
        found[name] = Parameter(kind, default, comment)
        found[name] = found[name]._replace(default=_check(found, {name: default}, where)[name])
    return found


def _check(known: Mapping[str, Parameter], values: Values, where: str, profile: str | None = None) -> Values:
    """`values`, validated; if `profile` is given, one named "profile" must equal it. where: their source, for errors"""
    checked = {}
    for name, value in values.items():
        parameter = known[choose(f"parameter in {where}:", name, known)]
        try:
            checked[name] = TypeAdapter(parameter.allowed()).validate_python(value, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]["msg"].replace("Input", "it", 1)
            raise T1Error(f"{where}: {name!r} is {shown(value)}; {wrong} ({parameter.type})") from None
    named = checked.get("profile", profile)
    require(profile in (named, None), f"{where}: 'profile' is {shown(named)}; it must be {profile!r} here")
    return checked


PLAIN = (int, float, complex, str, bytes, type(None), np.generic)  # types whose values hold no other objects


def same(before: Any, now: Any) -> bool:
    """Whether two values are equal, and of the same types at every depth. Of types other than plain ones and their
    containers, only the same object is."""
    if before is now or type(before) is not type(now):
        return before is now
    if type(before) is dict:
        before, now = list(before.items()), list(now.items())
    with suppress(Exception):  # a list that holds itself, an int of too many digits
        if type(before) in (list, tuple, set, frozenset):
            return len(before) == len(now) and all(map(same, before, now))
        return isinstance(before, PLAIN) and str(before) == str(now)  # -0.0 is not 0.0
    return False


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Reads `1e-4` as a number, as YAML 1.2 does, and `010` and `1:30` as texts, which no number is: in YAML 1.1, which
    PyYAML and papermill read, they are eight and ninety, in YAML 1.2 ten and a text. Refuses a name twice in a
    mapping."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if tag not in (_INT, _FLOAT)]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"it has {twice} twice")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.Node) -> int | float:
        """Also of one with a tag, `!!int 010`, which must be a number without it."""
        found = self.resolve(yaml.ScalarNode, node.value, (True, False))
        if found not in (_INT, _FLOAT):
            raise yaml.YAMLError(f"{node.value!r} is not a number")
        return self.construct_yaml_int(node) if node.tag == _INT else self.construct_yaml_float(node)


for _tag, _form in (
    (_INT, r"[-+]?(0|[1-9](_?\d)*|0x[\da-fA-F]+)$"),
    (_FLOAT, r"[-+]?(\d(_?\d)*\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_form, re.ASCII), list("-+.0123456789"))
    _Loader.add_constructor(_tag, _Loader.construct_number)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file says. Raises `T1Error` for one that cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except Exception as error:  # PyYAML raises many kinds, for `2024-13-45`, `!!bool abc` or three thousand brackets
        told = " ".join(str(error).split())[:150]
        raise T1Error(f"cannot read {paths.shown(path)}: {told or type(error).__name__}") from None


def _read_profile(experiment: str, profile: str, known: Mapping[str, Parameter]) -> Values:
    path = paths.params_file(profile, experiment)
    where = paths.shown(path)
    require(path.is_file(), f"{experiment} has no parameters for the profile {profile!r}: {where} is missing")
    values = read_yaml(path) or {}
    require(isinstance(values, dict), f"{where} is not flat; write one `name: value` per line")
    return _check(known, values, where, profile)


def resolve(experiment: str, profile: str, overrides: Mapping[str, Any] | None = None) -> Values:
    """An experiment's parameters: defaults, then params/<profile>/<experiment>.yaml, then `overrides`, in which texts
    are read as on a command line (`-p steps 3`). Raises `T1Error` for an unknown experiment, profile or parameter, a
    missing or nested YAML file or one with a name twice, and a value of the wrong type or outside its bound."""
    known, given = declared(experiment), dict(overrides or {})
    values = {name: parameter.default for name, parameter in known.items()}
    values |= _read_profile(experiment, choose("profile", profile, profiles()), known)
    for name, text in given.items():
        if isinstance(text, str) and name in known and known[name].type != "str":
            with suppress(Exception):  # what is not YAML is refused below
                given[name] = yaml.load(text, _Loader)
    return values | _check(known, given, "-p", profile)


class Live:
    """The parameters of a running notebook as attributes: the current values of its variables, checked. Each one that
    is read is noted in `read_into`: name → value.

    Setting `profile` loads that profile's values, except for variables that papermill or the user has set. Those of the
    user are known by a value other than that of profile `BASE`, which the committed parameters cells repeat.

    namespace  the notebook's global variables, with IPython's list `In` of what was run
    allow      called with all parameters when one has changed; raises `T1Error` if these must not be run here
    """

    def __init__(self, experiment: str, namespace: Values, allow: Callable[[Values], None]) -> None:
        self._experiment, self._namespace, self._allow = experiment, namespace, allow
        self._values, self._seen, self.read_into = {}, None, {}
        known = self._declared()
        require("profile" in known, f"the notebook of {experiment} must declare the parameter `profile: str`")
        for name in self._injected():  # papermill only warns about one that is not declared
            choose("parameter in the notebook:", name, known)

    def _ran(self, pattern: str) -> str | None:
        """The latest cell that was run with a line that begins like this."""
        cells = reversed(self._namespace.get("In", []))
        return next((text for text in cells if re.search(f"^{pattern}", text, re.M)), None)

    def _declared(self) -> dict[str, Parameter]:
        """The parameters as the cell that was run declares them, whether or not it was saved."""
        cell = self._ran(r"profile\s*:\s*str")
        return declared(self._experiment) if cell is None else _parse(cell, "the parameters cell")

    def _injected(self) -> list[str]:
        return re.findall(r"^(\w+) = ", self._ran(rf"\A{INJECTED}") or "", re.M)

    def checked(self) -> Values:
        """All parameters. Raises `T1Error` for a wrong or missing variable, and for a profile that has no file."""
        if not same(self._now(), self._seen):
            self._values = self._load()
            self._seen = copy.deepcopy(self._now())
        return self._values

    def current(self) -> Values:
        """All parameters; if one is wrong, the unchecked variables: the next cell that reads a parameter raises."""
        try:
            return self.checked()
        except T1Error:
            return self._now()[1]

    def _now(self) -> tuple[int, Values]:
        return len(self._namespace.get("In", [])), {name: self._namespace.get(name) for name in self._values}

    def _load(self) -> Values:
        """Read and check the variables, and set those that the profile sets."""
        known, namespace = self._declared(), self._namespace
        missing = [name for name in known if name not in namespace]
        require(not missing, f"{', '.join(missing)} not set; run the cell tagged `parameters` first")
        values = _check(known, {name: namespace[name] for name in known}, "the notebook")
        loaded, kept = self._by_profile(choose("profile", values["profile"], profiles()), values, known)
        self._allow(values | loaded)
        file = paths.shown(paths.params_file(values["profile"], self._experiment))
        for what, chosen in ((f"{file} sets", loaded), (f"the notebook's own, not as {file} has it:", kept)):
            if chosen:
                print(what, ", ".join(f"{name}={value!r}" for name, value in chosen.items()))
        namespace |= loaded
        return values | loaded

    def _by_profile(self, profile: str, values: Values, known: Mapping[str, Parameter]) -> tuple[Values, Values]:
        """What the profile sets, and the variables that stay as the user has set them, though it has other values."""
        given, injected = _read_profile(self._experiment, profile, known), self._injected()
        base, loaded, kept = {name: parameter.default for name, parameter in known.items()}, {}, {}
        if paths.params_file(BASE, self._experiment).is_file():
            base |= _read_profile(self._experiment, BASE, known)
        for name, value in given.items():
            if name not in injected and values[name] == base[name] != value:
                loaded[name] = value
            elif name not in injected and values[name] != value:
                kept[name] = values[name]
        return loaded, kept

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as the methods that copy and pickle look for
            raise AttributeError(name)
        value = self.read_into[name] = self.checked()[choose("parameter", name, self.checked())]
        return value

    def __setattr__(self, name: str, value: Any) -> None:  # an attribute would hide the parameter from then on
        own = name.startswith("_") or name == "read_into"
        require(own, f"a parameter is set by its variable, `{name} = {shown(value)}`, and read as attribute only")
        super().__setattr__(name, value)
