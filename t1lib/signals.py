"""Ctrl-C and SIGTERM end the command `train` at once, except while it trains: then the first ends it after the step."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_INTERRUPTED = 130
PASSED_ON = 1.0  # seconds within which a parent process may pass on a signal that this one got, too
AT_ONCE = "interrupted at once; --resume goes on from the last checkpoint, if there is one"

_message = "interrupted while starting; nothing was trained"


def watch() -> None:
    """From now on Ctrl-C and SIGTERM end the process directly, not with an exception, which a library might swallow.
    Call it in the main thread, before slow imports."""
    for number in SIGNALS:
        signal.signal(number, _exit)


def _exit(*_: Any) -> NoReturn:
    os.write(2, f"{_message}\n".encode())
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a signal has asked the training in this context to stop. Another one,
    after `PASSED_ON`, ends the process or, without `watch`, raises `KeyboardInterrupt`. Enter it in the main thread."""
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
