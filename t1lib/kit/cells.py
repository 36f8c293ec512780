"""Tracks which notebook cell made what, so that running a cell again makes all that used its results out of date.

A cell depends on the parameters that it read, by their values, and on the cells that made the variables it uses.
Variables that a cell changes in place, without assigning them, are not followed.
"""

import ast
import dis
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from t1lib.errors import require
from t1lib.measure.records import Row
from t1lib.params import first_line

_MISSING = object()
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL")
_PLAIN = (int, float, complex, str, bytes, type(None))  # hold no other objects
_WRAPPERS = {partial: "func", cached_property: "func", property: "fget"}  # type: attribute that holds what it calls
_WRAPPERS |= dict.fromkeys((MethodType, staticmethod, classmethod), "__func__")


class Origin(NamedTuple):
    """Where a variable's value is from."""

    maker: str  # the cell's key
    version: int


class Cause(NamedTuple):
    """Why a cell's results are out of date."""

    first: str  # key of the cell to run again first
    why: str


@dataclass
class Cell:
    """One execution of a cell."""

    run: int  # its number among all executions; the version of what it makes
    title: str  # how errors name it: with its number in the frontend, as several cells may begin with the same line
    measured: bool = False  # whether it has recorded anything, now or in an earlier execution
    drew: bool = False  # likewise, drawn
    fault: str = ""  # why it has to be run again, whatever it has read
    reads: dict[str, Origin] = field(default_factory=dict)  # by variable; a cell's records are one
    made: dict[str, int] = field(default_factory=dict)  # variable → version: an earlier one's if the value is the same
    parameters: dict[str, Any] = field(default_factory=dict)  # that it has read, with their values
    rows: list[Row] = field(default_factory=list)  # that it has recorded
    drawn: set[str] = field(default_factory=set)  # names of the figures, tables and numbers that it has made

    @property
    def records(self) -> str:
        """The name of the variable that its records are."""
        return f"what `{self.title}` recorded"


class Cells:
    """The cells that a kernel has run. Their keys: the ids that the frontend gives, else their source.

    namespace   the notebook's global variables
    parameters  returns the parameters' current values
    saved       returns the keys of the saved notebook's cells
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        parameters: Callable[[], Mapping[str, Any]],
        saved: Callable[[], Collection[str | None]],
    ) -> None:
        self.namespace, self.parameters, self.saved = namespace, parameters, saved
        self.known: dict[str, Cell] = {}
        self.finished: set[str] = set()  # cells whose last execution reached its end
        self._makers: dict[str, str] = {}  # variable → the cell that assigned it last
        self._runs = 0

    def begin(self, key: str) -> None:
        """A cell begins to run. What it made when it ran before is forgotten."""
        self._runs += 1
        self.running_key, self._earlier, self._before = key, self.known.get(key, Cell(0, "")), dict(self.namespace)
        self.running = Cell(self._runs, first_line(key), self._earlier.measured, self._earlier.drew)
        self.known[key] = self.running

    def end(self, key: str, source: str, done: bool, number: int) -> None:
        """The running cell has ended. `key` may differ from that of `begin` for the cell that created this object.

        number  the execution's number, as frontends show it
        done    it reached its end; if not, what it recorded is removed
        """
        if key != self.running_key:
            self.known[key] = self.known.pop(self.running_key)
            self.running_key = key
        cell, earlier, given = self.running, self._earlier, self.parameters()
        cell.measured |= bool(cell.rows)
        cell.drew |= bool(cell.drawn)
        if done:
            self.finished.add(key)
        else:
            self.finished.discard(key)
            cell.fault = "did not finish"
            cell.rows.clear()
        cell.title = f"[{number}] {first_line(source)[:40]}"
        read, stored = names(source, self.namespace)
        cell.parameters |= {name: given[name] for name in read if name in given}
        for name in read - given.keys():
            maker, before = self._makers.get(name), earlier.reads.get(name)
            if maker not in self.known:
                continue
            if before and before.maker in self.known and before.maker != maker:
                cell.fault = f"{name} is that of another cell now; run `{self.known[before.maker].title}` first"
                cell.reads[name] = before
            elif maker != key:
                cell.reads[name] = Origin(maker, self.known[maker].made.get(name, 0))
        for name in stored - given.keys():
            same = self._makers.get(name) == key and _same(self._before.get(name, _MISSING), self.namespace.get(name))
            cell.made[name] = earlier.made.get(name, cell.run) if same else cell.run
            self._makers[name] = key
        if cell.measured:
            cell.made[cell.records] = cell.run
        # An edited cell has a new key if the frontend gives no ids; a copied or split cell always has. The cell that it
        # replaces is known by samples of the same kinds.
        mine = _kinds(cell.rows)
        for other in [key for key, c in self.known.items() if c is not cell and mine & _kinds(c.rows)]:
            print(f"this cell replaces all that `{self.known.pop(other).title}` recorded and drew: some is of one kind")

    def read_records(self, below: Collection[str]) -> None:
        """Note that the running cell reads the records of all other cells, except those `below` it."""
        for key, cell in self.known.items():
            if cell.measured and key != self.running_key and key not in below:
                self.running.reads[cell.records] = Origin(key, cell.run)

    def rows(self, below: Collection[str] = ()) -> list[list[Row]]:
        """The records that are up to date, as one list per cell, except of cells `below`."""
        return [cell.rows for key, cell in self.known.items() if key not in below and self._cause(key, {}) is None]

    def draw(self, name: str) -> None:
        """Note that the figure, table or number of this name is now made by the running cell, and by no other. Raises
        `T1Error` if another cell of the saved notebook made it; one that is not there was edited, or moved here."""
        for key, cell in self.known.items():
            if name in cell.drawn and key != self.running_key:
                told = f"{name!r} is made by another cell, too, `{cell.title}`"
                both = {key, self.running_key} <= {*self.saved()}
                mend = "give one of them another name, run that cell again, or save the notebook without it"
                require(not both, f"{told}; {mend}")
                cell.drawn.remove(name)
        self.running.drawn.add(name)

    def drawn(self) -> set[str]:
        """The names of the figures, tables and numbers that cells made when they ran last."""
        return set().union(*(cell.drawn for cell in self.known.values()))

    def out_of_date(self) -> Iterator[tuple[Cell, str]]:
        """The cells whose records or drawings may differ from those of a run from top to bottom, each with the
        reason, which names the first cell to run again."""
        for key, cell in self.known.items():
            if (cell.measured or cell.drew) and (cause := self._cause(key, {})):
                first = self.known[cause.first]
                yield cell, cause.why if first is cell else f"run `{first.title}` first: {cause.why}"

    def _cause(self, key: str, found: dict[str, Cause | None]) -> Cause | None:
        """Why the results of cell `key` are not valid; None if they are. `found`: a cache."""
        if key not in found:
            found[key] = None  # ends the recursion if cells depend on each other
            found[key] = next(self._causes(key, found), None)
        return found[key]

    def _causes(self, key: str, found: dict[str, Cause | None]) -> Iterator[Cause]:
        cell, given = self.known[key], self.parameters()
        if cell.fault:
            yield Cause(key, cell.fault)
        if key == self.running_key:
            return
        origins = {name: origin for name, origin in cell.reads.items() if origin.maker in self.known}
        yield from filter(None, (self._cause(origin.maker, found) for origin in origins.values()))
        for name in cell.reads:
            origin = origins.get(name)
            if origin is None or self.known[origin.maker].made.get(name) != origin.version:
                yield Cause(key, f"{name} has been made again")
        for name, value in cell.parameters.items():
            if given.get(name, value) != value:
                yield Cause(key, f"{name} was {value!r}, is {given[name]!r}")


def _kinds(rows: list[Row]) -> set[tuple[Any, ...]]:
    return {(r["variant"], r["phase"], r["metric"]) for r in rows if r["metric"] != "status"}


def names(source: str, namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The global variables of other cells that a cell reads, itself or in functions that it uses, and those that it
    assigns. A function's variables count where it is used, not where it is defined: they may be made in between."""
    try:
        code = compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):  # the cell failed, or is one of another language
        return set(), set()
    direct, stored = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in _LOADS and step.argval not in stored:
            direct.add(step.argval)
        elif step.opname == "STORE_NAME":
            stored.add(step.argval)
    read = list(_loaded(code, at_once=True))
    for name in read:  # grows in this loop, by what functions read
        for function in _functions(namespace.get(name), namespace):
            read += _loaded(function.__code__, at_once=False) - set(read)
    return direct | (set(read) - stored), stored


def _loaded(code: CodeType, at_once: bool) -> set[str]:
    """Global variables that code reads, nested code included; `at_once`: without functions, which run when called."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS}
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        runs_now = inner.co_name.startswith("<") or not inner.co_flags & CO_OPTIMIZED  # comprehensions, classes
        found |= _loaded(inner, at_once) if runs_now or not at_once else set()
    return found


def _functions(value: Any, namespace: dict[str, Any]) -> Iterator[FunctionType]:
    """The notebook's functions that may run when `value` is used: itself, and those that it holds at any depth."""
    found, seen = [value], {id(namespace)}
    for each in found:  # grows in this loop, by what each of them holds
        if id(each) not in seen:
            seen.add(id(each))
            found += (held for held in _held(each, namespace) if not isinstance(held, _PLAIN))
            if isinstance(each, FunctionType) and each.__globals__ is namespace:
                yield each


def _held(value: Any, namespace: dict[str, Any]) -> Iterator[Any]:
    """What a container holds, what a function wraps or closes over, and what the notebook's own classes bring."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                yield cell.cell_contents
    for kind, name in _WRAPPERS.items():
        if isinstance(value, kind):
            yield getattr(value, name)
    own = getattr(value, "__dict__", {})
    yield own.get("__wrapped__")
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        if base.__module__ == namespace.get("__name__"):
            yield from (*own.values(), *vars(base).values())


def _same(before: Any, now: Any) -> bool:
    """Whether a variable's value is unchanged; False if that cannot be determined."""
    try:
        if isinstance(before, FunctionType) and isinstance(now, FunctionType):
            parts = ((f.__code__, f.__defaults__, f.__kwdefaults__) for f in (before, now))
            return before.__closure__ is now.__closure__ is None and next(parts) == next(parts)
        return before is now or (type(before) is type(now) and bool(before == now))
    except Exception:  # such as tensors of several elements
        return False
