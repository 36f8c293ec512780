"""In which order layers are updated, where none of it needs a GPU."""

import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from t1lib.train.lanes import UpdateThread


def arrival(here: bool) -> SimpleNamespace:
    """A mark that the device has reached, or reaches when somebody waits for it."""
    reached = threading.Event()
    if here:
        reached.set()
    return SimpleNamespace(query=reached.is_set, synchronize=reached.set)


def test_updates_begin_with_what_has_arrived_and_is_needed_first():
    thread, begin, done = UpdateThread(torch.device("cpu")), threading.Event(), []
    marks = {number: arrival(number in (1, 3)) for number in range(5)}
    thread.submit(9, begin.wait)
    for number, mark in marks.items():
        thread.submit(number, lambda number=number: done.append(number), None, mark)
    thread.then(3, lambda: done.append("3 again"))
    begin.set()
    thread.close()
    assert done == [1, 3, "3 again", 4, 2, 0]


def test_an_error_of_the_device_reaches_whoever_waits():
    thread = UpdateThread(torch.device("cpu"))
    broken = Mock(side_effect=RuntimeError("the device failed"))
    thread.submit(0, lambda: None, SimpleNamespace(query=broken, synchronize=broken))
    with pytest.raises(RuntimeError, match="the device failed"):
        thread.wait(0)
    thread.close()


def test_nobody_waits_for_a_job_that_never_ends():
    """It ends its thread, or comes when that has ended."""
    thread = UpdateThread(torch.device("cpu"))
    thread.submit(0, sys.exit)
    with pytest.raises(SystemExit):
        thread.wait(0)
    thread.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        thread.submit(1, lambda: None)
    assert 1 not in thread._last
