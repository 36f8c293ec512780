"""Which cell of a notebook made what, so that a cell that is run again makes what used it out of date.

A cell depends on the parameters that it read, by their values, and on the cells that made the variables it uses.
Variables that a cell changes in place, without assigning them, are not followed.
"""

import ast
import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType
from typing import Any

from t1lib.measure.records import Row

_MISSING = object()
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL")


@dataclass
class Cell:
    """One execution of a cell.

    title     as an error names it: by the number beside it, as several may begin with the same line
    reads     variable → maker, version; `made`: variable → version; records count as a variable
    rows      that it recorded; `drawn`: names of its figures, tables and numbers
    measured  it has recorded something, now or when it ran before; `drew` likewise
    """

    run: int
    measured: bool = False
    drew: bool = False
    title: str = ""
    reads: dict[str, tuple[str, int]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    records = property(lambda self: f"what `{self.title}` recorded")
    rows: list[Row] = field(default_factory=list)
    drawn: set[str] = field(default_factory=set)


class Cells:
    """The cells that a kernel has run, by an identity that the frontend gives (their id, else their source).

    namespace   the notebook's global variables
    parameters  returns the parameters' current values
    """

    def __init__(self, namespace: dict[str, Any], parameters: Callable[[], Mapping[str, Any]]) -> None:
        self.namespace, self.parameters = namespace, parameters
        self.known: dict[str, Cell] = {}
        self._makers: dict[str, str] = {}
        self._runs = 0
        self.begin("")

    def begin(self, key: str) -> list[Cell]:
        """A cell begins to run. Returns the executions that this one replaces."""
        self._runs += 1
        self.key, self._before, self._earlier = key, dict(self.namespace), self.known.get(key)
        had = self._earlier or Cell(0)
        self.running = self.known[key] = Cell(self._runs, had.measured, had.drew)
        return [self._earlier] if self._earlier else []

    def end(self, key: str, source: str, done: bool, number: int | None = None) -> list[Cell]:
        """It has ended. `key` may differ from that of `begin` for the cell that created this object. Returns the other
        cells that it replaces, as those of a frontend that gives no ids.

        number  of this execution, as frontends show it
        done    it reached its end; if not, what it recorded is removed
        """
        if key != self.key:
            self.key, self.known[key] = key, self.known.pop(self.key)
        cell = self.running
        cell.measured |= bool(cell.rows)
        if not done:
            cell.rows.clear()
        first = next(filter(None, map(str.strip, source.splitlines())), "")[:40]
        cell.title = f"[{number}] {first}" if number else first
        read, stored = names(source, self.namespace)
        given = self.parameters()
        cell.parameters |= {name: given[name] for name in read if name in given}
        for name in read - given.keys():
            maker = self._makers.get(name)
            if maker in self.known:
                self._read(cell, key, name, maker)
        for name in stored - given.keys():
            self._make(cell, key, name)
        if cell.measured:
            cell.made[cell.records] = cell.run
        if not done:
            cell.fault = "did not finish"
        return self._forget_replaced(cell)

    def read_records(self) -> None:
        """The running cell sees what the others have recorded."""
        others = {key: cell for key, cell in self.known.items() if cell.measured and key != self.key}
        self.running.reads |= {cell.records: (key, cell.run) for key, cell in others.items()}

    def _read(self, cell: Cell, key: str, name: str, maker: str) -> None:
        origin = self._earlier.reads.get(name) if self._earlier else None
        if origin and origin[0] != maker and origin[0] in self.known:
            cell.fault = f"{name} is that of another cell now; run `{self.known[origin[0]].title}` first"
            cell.reads[name] = origin
        elif maker != key:
            cell.reads[name] = maker, self.known[maker].made.get(name, 0)

    def _make(self, cell: Cell, key: str, name: str) -> None:
        known = self._earlier.made.get(name) if self._earlier and self._makers.get(name) == key else None
        kept = known is not None and _same(self._before.get(name, _MISSING), self.namespace.get(name))
        cell.made[name] = known if kept else cell.run
        self._makers[name] = key

    def _forget_replaced(self, cell: Cell) -> list[Cell]:
        """Forget the other cells that hold a sample of a variant, phase and metric that this one holds too, and return
        them. Statuses do not count."""

        def kinds(rows: list[Row]) -> set[tuple[Any, ...]]:
            return {(r["variant"], r["phase"], r["metric"]) for r in rows if r["metric"] != "status"}

        mine = kinds(cell.rows)
        replaced = {key: other for key, other in self.known.items() if other is not cell and mine & kinds(other.rows)}
        self.known = {key: other for key, other in self.known.items() if key not in replaced}
        return [*replaced.values()]

    def rows(self) -> list[list[Row]]:
        """What the cells have recorded that holds."""
        return [cell.rows for key, cell in self.known.items() if self.why_out_of_date(key) is None]

    def out_of_date(self) -> Iterator[tuple[Cell, str]]:
        """The cells that have recorded or drawn something, and are not as if the notebook had run from top to bottom;
        and why."""
        for key, cell in self.known.items():
            if (cell.measured or cell.drew) and (why := self.why_out_of_date(key)):
                yield cell, why

    def why_out_of_date(self, key: str) -> str | None:
        """Why what a cell made or showed no longer holds, and which cell has to be run before it; None if it does."""
        cause = self._cause(key, {})
        if cause is None or cause[0] == key:
            return cause and cause[1]
        return f"run `{self.known[cause[0]].title}` first: {cause[1]}"

    def _cause(self, key: str, found: dict[str, tuple[str, str] | None]) -> tuple[str, str] | None:
        """The first cell to run again, which may have made what this one reads, and why. `found`: known already."""
        if key not in found:
            found[key] = None  # ends a circle
            found[key] = self._find_cause(key, found)
        return found[key]

    def _find_cause(self, key: str, found: dict[str, tuple[str, str] | None]) -> tuple[str, str] | None:
        cell = self.known[key]
        if key == self.key or cell.fault:
            return (key, cell.fault) if cell.fault else None
        for maker, _ in cell.reads.values():
            if maker in self.known and (cause := self._cause(maker, found)):
                return cause
        for name, (maker, version) in cell.reads.items():
            if maker not in self.known or self.known[maker].made.get(name) != version:
                return key, f"{name} has been made again"
        given = self.parameters()
        for name, value in cell.parameters.items():
            if given.get(name, value) != value:
                return key, f"{name} was {value!r}, is {given[name]!r}"
        return None


def names(source: str, namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Global variables of others that a cell, or a function that it calls, reads, and those that it assigns. A function
    counts where its name is read, not where it is defined: what it uses may be made in between."""
    try:
        code = compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):  # the cell failed, or is one of another language
        return set(), set()
    direct, stored, loaded = set(), set(), set()
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            loaded.add(step.argval)
            if step.argval not in stored:
                direct.add(step.argval)
        elif step.opname == "STORE_NAME":
            stored.add(step.argval)
    called = {name for inner in _inner(code) if inner.co_name.startswith("<") for name in _globals(inner)}
    bodies = (inner for inner in _inner(code) if not inner.co_flags & CO_OPTIMIZED)  # of classes: they run at once
    called |= {step.argval for body in bodies for step in dis.get_instructions(body) if step.opname in _LOADS}
    waiting, followed = loaded | called, set()
    while waiting:
        name = waiting.pop()
        followed.add(name)
        for function in _functions(namespace.get(name), namespace):
            used = set(_globals(function.__code__))
            called |= used
            waiting |= used - followed
    return direct | (called - stored), stored


def _functions(value: Any, namespace: dict[str, Any]) -> Iterator[FunctionType]:
    """The notebook's functions that may run where a value is used: itself, or methods of its class."""
    kind = value if isinstance(value, type) else type(value)
    own = vars(kind).values() if kind.__module__ == namespace.get("__name__") else ()
    for each in (value, *own):
        if isinstance(each, FunctionType) and each.__globals__ is namespace:
            yield each


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _globals(code: CodeType) -> Iterator[str]:
    """Global variables that a function reads, functions within it included."""
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            yield step.argval
    for inner in _inner(code):
        yield from _globals(inner)


def _same(before: Any, now: Any) -> bool:
    """Whether a variable holds what it held; False where that cannot be told."""
    try:
        if isinstance(before, FunctionType) and isinstance(now, FunctionType):
            parts = ((f.__code__, f.__defaults__, f.__kwdefaults__) for f in (before, now))
            return before.__closure__ is now.__closure__ is None and next(parts) == next(parts)
        return before is now or (type(before) is type(now) and bool(before == now))
    except Exception:  # such as tensors of several elements
        return False
