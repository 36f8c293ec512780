"""What a run was made of: its notebook's code and the modules of the kit that it loaded, by their meaning.

The meaning of code is what `ast` makes of it: comments, docstrings and layout do not count.
"""

import ast
import hashlib
import json
import sys
from contextlib import suppress
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from t1lib import params, paths

_ROOT = Path(__file__).resolve().parent
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


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


@cache  # all modules take a second, and every experiment's state and a run's end ask for them again
def meaning(text: str) -> str:
    """The SHA-256 of code's meaning, the same in any Python version; of the text itself if it is not Python."""
    with suppress(SyntaxError, ValueError):
        text = ast.unparse(_Plain().visit(ast.parse(text)))  # a dump of the tree would name each version's own fields
    return hashlib.sha256(text.encode()).hexdigest()


def notebook(experiment: str) -> str:
    """The meaning of a notebook's code cells, less their outputs."""
    cells = params.code_cells(paths.notebook(experiment))
    return hashlib.sha256("".join(meaning(cell["source"]) for cell in cells).encode()).hexdigest()


def drawing(made_of: dict[str, Any]) -> str:
    """The hash of what figures, tables and numbers follow from besides samples: the code (`made_of`), and the page from
    which some tables are made, as it is now."""
    page = paths.root() / "docs" / "differences.md"
    told = page.read_text(encoding="utf-8") if page.is_file() else None
    return hashlib.sha256(json.dumps([made_of, told], sort_keys=True).encode()).hexdigest()


def everything() -> dict[str, str]:
    """The meaning of all modules of the kit, as they stand on the disk."""
    found = {}
    for path in sorted(_ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = meaning(path.read_text(encoding="utf-8"))
    return found


def loaded() -> list[str]:
    """The kit's modules that this process has loaded and, at any depth, those that they import, even inside functions:
    processes that it started may have loaded those. If one cannot be parsed, as during an edit: all of the kit's."""
    kit, finder = everything().keys(), ModuleFinder([str(_ROOT.parent)])
    for name in [name for name in sys.modules if name.partition(".")[0] == _ROOT.name]:
        try:
            finder.import_hook(name)
        except SyntaxError:
            return sorted(kit)
        except ImportError:  # its file is gone
            continue
    found = {name for name in finder.modules if name.partition(".")[0] == _ROOT.name}
    return sorted(kit if kit & finder.badmodules.keys() else found)
