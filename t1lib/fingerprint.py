"""What a run was made of: its notebook's code and the modules of the kit that it loaded, by their meaning.

The meaning of code is what `ast` makes of it: comments, docstrings and layout do not count.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from t1lib import params, paths

_ROOT = Path(__file__).resolve().parent
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MISSING = "missing"


class _Plain(ast.NodeTransformer):
    """Leaves out docstrings, and writes f-strings as calls: versions of Python disagree about their quotes."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return super().generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Call:
        return ast.Call(ast.Name("f"), [self.visit(part) for part in node.values], [])

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.Call:
        spec = [self.visit(node.format_spec)] if node.format_spec else []
        return ast.Call(ast.Name("format"), [self.visit(node.value), ast.Constant(node.conversion), *spec], [])


@cache  # a notebook whose first cells run again asks for all modules again: a second
def meaning(text: str) -> str:
    """The SHA-256 of what Python code means, in any version of Python; of the text itself if it is not Python, such as
    a cell with a magic."""
    with suppress(SyntaxError, ValueError):
        text = ast.unparse(_Plain().visit(ast.parse(text)))  # a dump of the tree would name each version's own fields
    return hashlib.sha256(text.encode()).hexdigest()


def notebook(experiment: str) -> str:
    """The meaning of a notebook's code cells, less their outputs."""
    cells = params.code_cells(paths.notebook(experiment))
    return hashlib.sha256("".join(meaning(params.source(cell)) for cell in cells).encode()).hexdigest()


def _text(module: str) -> str | None:
    """The source of a module of the kit; None if there is no such module (any more)."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    files = (each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file())
    return next((each.read_text(encoding="utf-8") for each in files), None)


def everything() -> dict[str, str]:
    """The meaning of all modules of the kit."""
    names = (path.relative_to(_ROOT.parent).with_suffix("").parts for path in sorted(_ROOT.rglob("*.py")))
    return of(".".join(parts).removesuffix(".__init__") for parts in names)


def of(modules: Iterable[str]) -> dict[str, str]:
    """The meaning of each of these modules as it stands on the disk."""
    return {name: MISSING if (text := _text(name)) is None else meaning(text) for name in modules}


def loaded() -> list[str]:
    """The modules of the kit that this process has loaded, and those that they import, anywhere in them: processes that
    it started have loaded them."""
    waiting, found = list(sys.modules), set()
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] != _ROOT.name or name in found or (text := _text(name)) is None:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:  # names that it imports may be modules too
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found)
