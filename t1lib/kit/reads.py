"""Which global variables a notebook cell's code reads and assigns, according to its bytecode."""

import ast
import dis
import gc
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache, cached_property, partial
from inspect import CO_OPTIMIZED
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from t1lib.params import PLAIN

_LOADS = ("LOAD_NAME", "LOAD_GLOBAL")
_STORES = ("STORE_NAME", "STORE_GLOBAL")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")  # the next instruction does not follow these
_ENDS += ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_HOLDERS = (dict, list, tuple, set, FunctionType, CellType, MethodType, staticmethod, classmethod, property)
_HOLDERS += (partial, cached_property, deque)


def names(source: str, namespace: dict[str, Any]) -> tuple[set[str], set[str], set[str]]:
    """Three sets of global variables: those that a cell reads, itself or in functions that it uses, before it certainly
    assigns them; likewise, but where any assignment comes before the read (`if …: x = 1`); those that it may assign. A
    function's variables count where it is used, not where it is defined: they may be made in between."""
    try:
        code = compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):  # the cell failed, or is one of another language
        return set(), set(), set()
    following, stores = _following(code), defaultdict(set)
    for step in dis.get_instructions(code):
        if step.opname in _STORES:
            stores[step.argval].add(step.offset)
    unassigned = {name: _reached(following, 0, places) for name, places in stores.items()}

    @cache
    def by_functions(name: str) -> set[str]:
        functions = _functions(namespace.get(name), namespace)
        return set().union(*(_loaded(function.__code__, at_once=False) for function in functions))

    read, doubtful = set(), set()
    for step in dis.get_instructions(code):
        used = [step.argval] if step.opname in _LOADS else [*_inner(step.argval, at_once=True)]
        for name in used:  # grows in this loop, by what functions read
            used += by_functions(name) - set(used)
            if name not in stores:
                read.add(name)
            elif step.offset in unassigned[name]:
                assigned_later = stores[name] & _reached(following, step.offset, set())
                (read if assigned_later else doubtful).add(name)
    # What it leaves as it is, it hands on. (Not loop variables: cells that share one would depend on each other.)
    ends = {step.offset for step in dis.get_instructions(code) if step.opname in _ENDS[:2]}
    branches = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    within = {node.id for branch in branches for node in ast.walk(branch) if isinstance(node, ast.Name)}
    doubtful |= {name for name in within & stores.keys() if unassigned[name] & ends}
    return read, doubtful - read, {*stores}


def _following(code: CodeType) -> dict[int, set[int]]:
    """The instructions that may run after each one, by their offsets."""
    steps = [*dis.get_instructions(code)]
    following = {step.offset: {step.argval} if step.opcode in dis.hasjrel else set() for step in steps}
    for step, after in pairwise(steps):
        following[step.offset] |= set() if step.opname in _ENDS else {after.offset}
    for entry in dis.Bytecode(code).exception_entries:
        for offset in range(entry.start, entry.end, 2):
            following.get(offset, set()).add(entry.target)
    return following


def _reached(following: dict[int, set[int]], start: int, ends: set[int]) -> set[int]:
    """The instructions that may run from `start` on, up to and with those in `ends`."""
    found, todo = {start}, [start]
    for offset in todo:  # grows in this loop
        new = set() if offset in ends else following[offset] - found
        found |= new
        todo += new
    return found


def _loaded(code: CodeType, at_once: bool) -> set[str]:
    """Global variables that code reads, nested code included; `at_once`: without functions, which run when called."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS}
    return found.union(*(_inner(constant, at_once) for constant in code.co_consts))


def _inner(constant: Any, at_once: bool) -> set[str]:
    """`_loaded` of a constant that may be code."""
    if not isinstance(constant, CodeType):
        return set()
    runs_now = constant.co_name.startswith("<") or not constant.co_flags & CO_OPTIMIZED  # comprehensions, classes
    return _loaded(constant, at_once) if runs_now or not at_once else set()


def _functions(value: Any, namespace: dict[str, Any]) -> Iterator[FunctionType]:
    """The notebook's functions that may run when `value` is used: itself, and those that it holds at any depth."""
    found, seen = [value], {id(namespace)}
    for each in found:  # grows in this loop, by what each of them holds
        if id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, FunctionType):
                seen |= {id(each.__globals__), id(each.__builtins__)}  # those of a library's functions, too
                if each.__globals__ is namespace:
                    yield each
            found += (held for held in _held(each, namespace.get("__name__")) if not isinstance(held, PLAIN))


def _held(value: Any, notebook: str | None) -> list[Any]:
    """All that a container, a function, what wraps one, or a class or object of the notebook's own refers to; of other
    objects the attributes, but not of the kit's, of which some know all the notebook's variables."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, _HOLDERS) or any(base.__module__ == notebook for base in kind.__mro__):
        return gc.get_referents(value)
    own = getattr(value, "__dict__", {})
    followed = isinstance(own, dict) and not isinstance(value, ModuleType) and not kind.__module__.startswith("t1lib.")
    return [*own.values()] if followed else [own.get("__wrapped__")]
