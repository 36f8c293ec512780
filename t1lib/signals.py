"""Ctrl-C and SIGTERM end the command at once, except while it trains: then the first ends it after the step."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from signal import default_int_handler
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_INTERRUPTED = 130
PASSED_ON = 1.0  # seconds in which what started the command, and was sent a signal too, passes it on
AT_ONCE = "interrupted at once; --resume goes on from the last checkpoint, if there is one"

_asked: list[float] | None = None  # when signals came; None unless it trains
_watched = False
_message = "interrupted while starting; nothing was trained"


def watch() -> None:
    """From now on signals end this process: not by an exception, which a library may swallow. Call it in the main
    thread, before slow imports."""
    global _watched
    for number in SIGNALS:
        signal.signal(number, partial(_hear, _exit))
    _watched = True


def _exit(*_: Any) -> NoReturn:
    os.write(2, f"{_message}\n".encode())
    os._exit(EXIT_INTERRUPTED)


def _hear(end: Callable[..., NoReturn], *arguments: Any) -> None:
    asked, now = _asked, time.monotonic()
    if asked is None or (asked and now - asked[0] > PASSED_ON):
        end(*arguments)
    asked.append(now)


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the training within this context is asked to stop. A second signal ends it at
    once: with `KeyboardInterrupt`, if this process does not `watch`."""
    global _asked, _message
    raising = partial(_hear, default_int_handler)
    before = {} if _watched else {number: signal.signal(number, raising) for number in SIGNALS}
    _asked, _message = [], AT_ONCE
    try:
        yield lambda: bool(_asked)
    finally:
        _asked = None
        for number, handler in before.items():
            signal.signal(number, handler)
