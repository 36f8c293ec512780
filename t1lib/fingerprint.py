"""What a run was made of: its notebook's code and the modules of the kit that it loaded, by their meaning.

The meaning of code is its syntax tree: comments, docstrings and layout do not count, nor does Python's version.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from t1lib import params, paths

_ROOT = Path(__file__).resolve().parent
MISSING = "missing"


def meaning(text: str) -> str:
    """The SHA-256 of what Python code means; of the text itself if it is not Python, such as a cell with a magic."""
    try:
        told = _told(ast.parse(text))
    except (SyntaxError, ValueError):
        told = text
    return hashlib.sha256(told.encode()).hexdigest()


def _told(node: Any) -> str:
    """A syntax tree as text. Empty fields are left out: further ones come with every version of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_told, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        fields["body"] = node.body[ast.get_docstring(node, clean=False) is not None :]
    kept = [f"{name}={_told(value)}" for name, value in sorted(fields.items()) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(kept)})"


def notebook(experiment: str) -> str:
    """The meaning of a notebook's code cells, less their outputs."""
    cells = params.read_notebook(paths.notebook(experiment))["cells"]
    code = [meaning(params.source(cell)) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256("".join(code).encode()).hexdigest()


def _file(module: str) -> Path | None:
    """The source of a module of the kit; None if there is no such module (any more)."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)


def everything() -> dict[str, str]:
    """The meaning of all modules of the kit."""
    names = (path.relative_to(_ROOT.parent).with_suffix("").parts for path in sorted(_ROOT.rglob("*.py")))
    return of(".".join(parts).removesuffix(".__init__") for parts in names)


def of(modules: Iterable[str]) -> dict[str, str]:
    """The meaning of each of these modules as it stands on the disk."""
    files = {module: _file(module) for module in modules}
    return {name: meaning(path.read_text(encoding="utf-8")) if path else MISSING for name, path in files.items()}


def loaded() -> list[str]:
    """The modules of the kit that this process has loaded, and those that they import: processes that it started have
    loaded them."""
    waiting = [name for name in sys.modules if name.split(".")[0] == _ROOT.name]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name not in found and path is not None:
            found.add(name)
            waiting += [each for each in _imports(path) if each.split(".")[0] == _ROOT.name]
    return sorted(found)


def _imports(path: Path) -> Iterator[str]:
    """The modules that a source file imports, anywhere in it; names that it imports from one may be modules too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
