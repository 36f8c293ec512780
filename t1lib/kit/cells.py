"""Tracks which notebook cell made what, so that running a cell again makes all that used its results out of date.

A cell depends on the parameters that it read, by their values, and on the cells that made the variables it uses.
Variables that a cell changes in place, without assigning them, are not followed, nor those that it reads through a
string, as `eval` does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from t1lib.errors import require, shown
from t1lib.kit.reads import names
from t1lib.measure.records import Row
from t1lib.params import first_line, same

_MISSING = object()


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
    kept: set[str] = field(default_factory=set)  # variables that it may assign, and that it left as they were
    rows: list[Row] = field(default_factory=list)  # that it has recorded
    kinds: set[tuple[str, ...]] = field(default_factory=set)  # variant, phase and metric of what it has recorded
    drawn: set[str] = field(default_factory=set)  # names of the figures, tables and numbers that it has made
    framed: bool = False  # whether it has read the records of all others

    records = property(lambda self: f"what `{self.title}` recorded")  # the name of the variable that its records are


class Cells:
    """The cells that a kernel has run. Their keys: the ids that the frontend gives, else their source.

    namespace   the notebook's global variables
    parameters  returns the parameters' current values"""

    def __init__(self, namespace: dict[str, Any], parameters: Callable[[], Mapping[str, Any]]) -> None:
        self.namespace, self.parameters = namespace, parameters
        self.known: dict[str, Cell] = {}
        self.finished: set[str] = set()  # cells whose last execution reached its end
        self._ended = True  # whether all that the running cell has read is known
        self._makers: dict[str, str] = {}  # variable → the cell that assigned it last
        self._runs = 0

    def begin(self, key: str, ids: Sequence[str | None], sources: Sequence[str]) -> None:
        """A cell begins to run; what it made before is forgotten. `ids`, `sources`: of the saved notebook's cells."""
        self._runs, self._ended = self._runs + 1, False
        self.saved = {*ids, *sources}
        if self.known.keys() & {*ids}:  # the frontend gives ids: a new cell will be saved
            self.saved.add(key)
        self.order = {id: place for place, id in enumerate(ids)} if key in ids else {}  # empty: not known
        self.running_key, self._earlier, self._before = key, self.known.get(key, Cell(0, "")), dict(self.namespace)
        self.running = Cell(self._runs, first_line(key), self._earlier.measured, self._earlier.drew)
        if sources.count(key) > 1:
            self.running.fault = "stands twice in the notebook, and a frontend without ids cannot tell them apart"
        self.known[key] = self.running

    def end(self, key: str, source: str, done: bool, number: int) -> None:
        """The running cell has ended. `key` may differ from that of `begin` for the cell that created this object.

        number  the execution's number, as frontends show it
        done    it reached its end; if not, what it recorded is removed"""
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
            cell.kinds.clear()
        cell.title = f"[{number}] {first_line(source)[:40]}"
        read, doubtful, stored = names(source, self.namespace)
        cell.kept = {name for name in stored if self._unchanged(name)}
        read |= doubtful & cell.kept
        # Functions and strings (`exec`) assign variables, too. Names that begin with _ are mostly the frontend's.
        own = stored | {name for name in self.namespace if not name.startswith("_") and not self._unchanged(name)}
        cell.parameters |= {name: given[name] for name in read if name in given}
        for name in read - given.keys():
            self._read(name, name in own, name in earlier.kept)
        for name in own - given.keys():
            alike = self._makers.get(name) == key and _same(self._before.get(name, _MISSING), self.namespace.get(name))
            cell.made[name] = earlier.made.get(name, cell.run) if alike else cell.run
            self._makers[name] = key
        if cell.measured:
            cell.made[cell.records] = cell.run
        self._ended = True

    def _unchanged(self, name: str) -> bool:
        """Whether a variable is the object that it was before the running cell."""
        return self._before.get(name, _MISSING) is self.namespace.get(name, _MISSING)

    def _read(self, name: str, own: bool, kept: bool) -> None:
        """Note that the running cell has read a variable of another cell, before assigning it if it does.

        own   it may assign it, too
        kept  it did not do so when it ran before"""
        maker, right = self._makers.get(name), self._above(name, self.running_key)
        if maker not in self.known or (own and not right):
            return
        if maker == self.running_key and kept:  # it is the other cell's still
            maker = right
        right = right or maker
        if right != maker:
            self.running.fault = f"{name} is that of another cell now; run `{self.known[right].title}` first"
            self.running.kept.discard(name)  # it stays that cell's, though this one counts as its maker from now on
        self.running.reads[name] = Origin(right, self.known[right].made.get(name, 0))

    def _above(self, name: str, key: str) -> str | None:
        """The last cell above this one that makes a variable: in the saved notebook or, if that is not known, in the
        order in which cells ran first."""
        return next((other for other, cell in self._all_above(key).items() if name in cell.made), None)

    def _all_above(self, key: str) -> dict[str, Cell]:
        """The cells above this one, as `_above` says, the last one first."""
        places = self.order or {other: place for place, other in enumerate(self.known)}
        above = [other for other in places if other in self.known and places[other] < places.get(key, 0)]
        return {other: self.known[other] for other in reversed(above)}

    def _seen(self) -> dict[str, Cell]:
        """The cells that come before the running one in a run from top to bottom, and itself: those above it in the
        saved notebook, or all if that is not known."""
        at = self.order.get(self.running_key, 0)
        return {key: cell for key, cell in self.known.items() if not self.order or self.order.get(key, at + 1) <= at}

    def unsaved(self) -> list[Cell]:
        """The cells that have recorded or drawn something, and are not in the saved notebook."""
        absent = [cell for key, cell in self.known.items() if self.order and key not in self.order]
        return [cell for cell in absent if cell.rows or cell.drawn]

    def read_records(self) -> None:
        """Note that the running cell reads the records of the others."""
        self.running.framed = True
        for key, cell in self._seen().items():
            if cell.measured and key != self.running_key:
                valid = self._cause(key, {}) is None  # if not, they are left out
                self.running.reads[cell.records] = Origin(key, cell.run if valid else -1)

    def rows(self) -> list[list[Row]]:
        """The records that are up to date, as one list per cell."""
        return [cell.rows for key, cell in self._seen().items() if self._cause(key, {}) is None]

    def record(self, rows: list[Row]) -> None:
        """Note that the running cell is to record rows, and no other cell any of their kinds. Raises as `draw`; a cell
        that is not in the saved notebook is replaced: it was edited (where frontends give no ids), or deleted."""
        kinds = {(row["variant"], row["phase"], row["metric"]) for row in rows if row["metric"] != "status"}
        for kind in kinds - self.running.kinds:
            for key in [key for key, cell in self.known.items() if kind in cell.kinds]:
                self._require_alone(key, f"{'/'.join(filter(None, kind))!r} is recorded")
                replaced = self.known.pop(key)
                print(f"this cell replaces all that `{replaced.title}` recorded and drew: some is of one kind")
            self.running.kinds.add(kind)

    def draw(self, name: str) -> None:
        """Note that the figure, table or number of this name is now made by the running cell, and by no other. Raises
        `T1Error` if another cell of the saved notebook made it; one that is not there was edited, or deleted."""
        for key, cell in self.known.items():
            if name in cell.drawn and key != self.running_key:
                self._require_alone(key, f"{name!r} is made")
                cell.drawn.remove(name)
        self.running.drawn.add(name)

    def _require_alone(self, key: str, told: str) -> None:
        mend = "give one of them another name, run that cell again, or save the notebook without it"
        both = {key, self.running_key} <= self.saved
        require(not both, f"{told} by another cell, too, `{self.known[key].title}`; {mend}")

    def drawn(self) -> set[str]:
        """The names of the figures, tables and numbers that cells made when they ran last."""
        return set().union(*(cell.drawn for cell in self._seen().values()))

    def out_of_date(self) -> Iterator[tuple[Cell, str]]:
        """The cells whose records or drawings may differ from those of a run from top to bottom, each with the
        reason, which names the first cell to run again; in the order in which they are to be run."""
        places = self.order or {key: place for place, key in enumerate(self.known)}
        causes = {key: self._cause(key, {}) for key, cell in self._seen().items() if cell.measured or cell.drew}
        late = [(places.get(cause.first, 0), places.get(key, 0), key, cause) for key, cause in causes.items() if cause]
        for *_, key, cause in sorted(late, key=lambda one: one[:2]):
            cell, first = self.known[key], self.known[cause.first]
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
        if key == self.running_key and not self._ended:
            return
        origins = {name: origin for name, origin in cell.reads.items() if origin.maker in self.known}
        moved = {name for name, origin in origins.items() if self.order and self._above(name, key) != origin.maker}
        yield from filter(None, (self._cause(origins[name].maker, found) for name in origins if name not in moved))
        new = (other.records for other in self._all_above(key).values() if cell.framed and other.measured)
        for name in {**cell.reads, **dict.fromkeys(new)}:
            origin = origins.get(name)
            if origin is None or self.known[origin.maker].made.get(name) != origin.version:
                yield Cause(key, f"{name} has been made again")
            elif name in moved:
                yield Cause(key, f"{name} is not from the last cell above that makes it, in the saved notebook")
        for name, value in cell.parameters.items():
            if not same(value, given.get(name, value)):
                yield Cause(key, f"{name} was {shown(value)}, is {shown(given[name])}")


def _same(before: Any, now: Any) -> bool:
    """Whether a variable's value is unchanged; False if that cannot be determined."""
    if isinstance(before, FunctionType) and isinstance(now, FunctionType):
        given = ((f.__defaults__, f.__kwdefaults__, f.__closure__) for f in (before, now))
        return before.__code__ == now.__code__ and same(*given)
    return same(before, now)
