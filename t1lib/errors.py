"""One kind of error for bad input: it names the value and what is allowed."""

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

LISTED = 262  # characters for all that varies in the message of `choose`


class T1Error(ValueError):
    """Bad input, or an obstacle such as a full disk. The message, one or two lines, names it and what is allowed."""


class UnavailableError(RuntimeError):
    """Something optional is not installed here (a peer, a PyTorch version, a compiler)."""


def choose(what: str, value: Any, allowed: Iterable[str]) -> Any:
    """Return `value` if it is one of `allowed`, else raise a `T1Error` that lists them."""
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return value
    close = get_close_matches(shown(value).strip("'"), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    room = max(LISTED - len(what) - len(shown(value)) - len(hint), 20)
    listed = shorten(", ".join(names), room, placeholder=" and more")
    raise T1Error(f"unknown {what} {shown(value)}; allowed: {listed}.{hint}")


def shown(value: Any) -> str:
    """The value as an error names it: its `repr` in one line, cut to 80 characters."""
    try:
        text = " ".join(map(str.strip, repr(value).split("\n")))  # an array's has several lines
    except Exception:  # Python does not print ints of more than 4300 digits, for one
        text = f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 80 else f"{text[:77]}..."


def reason(error: BaseException) -> str:
    """A library's reason, to quote in an error of ours: its message's first line, cut to 140 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 140 else f"{lines[0][:137]}..."


def require(condition: bool, message: str) -> None:
    """Raise `T1Error(message)` unless `condition` holds."""
    if not condition:
        raise T1Error(message)


def is_whole(value: Any, least: int, most: int | None = None) -> bool:
    """Whether `value` is an integer from `least` to `most`; a bool does not count."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= least and (most is None or value <= most)


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float other than NaN; a bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
