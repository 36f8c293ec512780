"""Bad input is one short `T1Error`."""

import re
from collections.abc import Callable

import pytest

from t1lib.errors import T1Error


def refused(call: Callable[[], object], *parts: str, match: str = "") -> str:
    """Assert that `call` raises a `T1Error` of at most two lines and under 300 characters which holds `parts` and what
    the regular expression `match` matches; returns what it says."""
    with pytest.raises(T1Error) as caught:
        call()
    message = str(caught.value)
    assert 0 < len(message) < 300 and message.count("\n") <= 1, message
    missing = [part for part in parts if part not in message]
    assert not missing and re.search(match, message), (missing or match, message)
    return message
