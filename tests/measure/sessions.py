"""A small session for test_isolate: importable by name in the processes that hold it."""

import os
import signal
import time
from pathlib import Path

from t1lib.errors import T1Error, UnavailableError

ERRORS = {"t1": T1Error, "unavailable": UnavailableError, "memory": MemoryError, "value": ValueError}


class Diary:
    """Writes its name to a file shared with other sessions whenever a method is called."""

    def __init__(self, name: str, path: str, refuse: str = "") -> None:
        if refuse:
            self.fail(refuse)
        self.name, self.path = name, Path(path)
        self.write("+")

    def write(self, what: str = "") -> int:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self.name}{what} ")
        return os.getpid()

    def fail(self, kind: str) -> None:
        raise ERRORS[kind](f"this is {kind}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)

    def sleep(self) -> None:
        time.sleep(600)
