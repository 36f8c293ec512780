"""Ctrl-C and SIGTERM end the command at once, except while it trains: then the first ends it after the step."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_INTERRUPTED = 130
PASSED_ON = 1.0  # seconds in which what started the command, and was sent a signal too, passes it on
AT_ONCE = "interrupted at once; --resume goes on from the last checkpoint, if there is one"

_message = "interrupted while starting; nothing was trained"


def watch() -> None:
    """From now on signals end this process: not by an exception, which a library may swallow. Call it in the main
    thread, before slow imports."""
    for number in SIGNALS:
        signal.signal(number, _exit)


def _exit(*_: Any) -> NoReturn:
    os.write(2, f"{_message}\n".encode())
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the training within this context is asked to stop. A second signal ends it at
    once: with `KeyboardInterrupt`, if this process does not `watch`. Enter it in the main thread."""
    global _message
    asked: list[float] = []  # when signals came
    end = _exit if signal.getsignal(signal.SIGINT) is _exit else signal.default_int_handler

    def hear(*arguments: Any) -> None:
        now = time.monotonic()
        if asked and now - asked[0] > PASSED_ON:
            end(*arguments)
        asked.append(now)

    _message = AT_ONCE
    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
