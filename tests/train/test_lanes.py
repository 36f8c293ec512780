"""In which order layers are updated, and signals heard, where none of it needs a GPU."""

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from stream_cases import streaming
from stream_loops import evaluated, model_loss
from stream_models import LAYERS, data, llama

from t1lib.plan.cost import Choice
from t1lib.train import lanes, schedule
from t1lib.train.lanes import Lane, UpdateThread, uninterrupted


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


@pytest.fixture
def handlers() -> Iterator[list[str]]:
    """Ctrl-C and SIGTERM note that they came, and raise; an alarm notes it only. All is as before in the end."""
    heard: list[str] = []

    def note(number: int, frame: object) -> None:
        heard.append(signal.Signals(number).name)
        if number != signal.SIGALRM:
            raise InterruptedError(heard[-1])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_heard_once_each_in_the_end_though_their_handlers_raise(handlers):
    own = signal.getsignal(signal.SIGINT)
    with pytest.raises(InterruptedError) as told, uninterrupted(), uninterrupted():
        for _ in range(2):
            for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
        assert not handlers
        raise ArithmeticError("its own error")
    assert sorted(handlers) == ["SIGALRM", "SIGINT", "SIGTERM"]
    assert "its own error" in "".join(traceback.format_exception(told.value))
    assert signal.getsignal(signal.SIGINT) is own


def test_a_handler_that_raises_before_another_is_back_does_not_make_that_one_deaf(handlers):
    def set_and_raise(number: int, handler: object) -> Any:
        before = set_signal(number, handler)
        if number == signal.SIGTERM and handler is own:
            signal.raise_signal(number)
        return before

    set_signal, own = signal.signal, signal.getsignal(signal.SIGTERM)
    numbers = [signal.SIGTERM, signal.SIGINT]
    both = patch.multiple(lanes, SIGNALS=numbers, signal=Mock(wraps=signal, signal=set_and_raise))
    with pytest.raises(InterruptedError), both, uninterrupted():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(InterruptedError):
        signal.raise_signal(signal.SIGINT)
    assert handlers == ["SIGTERM", "SIGINT", "SIGINT"]
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is own


def test_a_handler_that_is_set_meanwhile_stays_and_may_call_what_it_has_replaced(handlers):
    def mine(number: int, frame: object) -> None:
        handlers.append("mine")
        before(number, frame)

    with uninterrupted():
        before = signal.signal(signal.SIGALRM, mine)
    with uninterrupted():
        signal.raise_signal(signal.SIGALRM)
    assert handlers == ["mine", "SIGALRM"]
    assert signal.getsignal(signal.SIGALRM) is mine


def queued(monkeypatch):
    """Let copies to and from a device be made at once, but count as under way until somebody waits for them; returns
    their marks, by the tensor that is read."""
    reading: dict[int, SimpleNamespace] = {}

    def copy(lane, to, source, span, *marks):
        to.copy_(source)
        reading[id(source)] = arrival(False)
        return reading[id(source)]

    monkeypatch.setattr(Lane, "copy", copy)
    monkeypatch.setattr(Lane, "after", lambda *given: None)
    return reading


def test_whoever_writes_weights_waits_for_the_copies_that_read_them(monkeypatch):
    """Also where another layer has come into the slot since."""
    reading, model = queued(monkeypatch), llama()
    with streaming(model, choice=Choice(slots=1)) as (streamed, own):
        model_loss(streamed, data(1)[0]).backward()
        for held in own._engine.host:
            with torch.no_grad():
                next(iter(held.params.values())).mul_(0.9)
            assert reading[id(held.flat)].query()
        own.zero_grad()
        model_loss(streamed, data(1)[0]).backward()
        own.drain()  # then also writes to aliases are safe
        assert all(reading[id(held.flat)].query() for held in own._engine.host)


def test_an_update_by_the_cpu_waits_for_an_evaluation(monkeypatch):
    reading, model, seen = queued(monkeypatch), llama(), []

    def noted(weights, *given):
        layers = [held for held in own._engine.host if held.flat.data_ptr() == weights[0].data_ptr()]
        seen.extend(reading[id(held.flat)].query() for held in layers)

    with streaming(model, choice=Choice(slots=1, host_share=1.0)) as (streamed, own):
        monkeypatch.setattr(schedule, "update", noted)
        model_loss(streamed, data(1)[0]).backward()
        evaluated(streamed)
        own.step()
    assert seen == [True] * LAYERS
