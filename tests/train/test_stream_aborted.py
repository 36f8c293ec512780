"""What a step leaves behind that an error or an interrupt ends, and a streamed model that is dropped: nothing mixed."""

import copy
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from stream_cases import assert_same_weights, going_on, held_bytes, streaming, threads, wait_for, weights
from stream_loops import adamw, model_loss, own_clip, train
from stream_models import blocks, data
from test_stream_state import AT_ONCE, PLACES
from torch import nn

from t1lib.plan.cost import Choice
from t1lib.train import stream

pytestmark = pytest.mark.usefixtures("quick_collection")

BATCHES = data(6)


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Leave what was made before these tests out of every collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Broken(Exception):
    """What the user's code raises here."""


ERRORS = {"error": Broken, "interrupt": KeyboardInterrupt}


@pytest.mark.parametrize("layer, error", [(0, "interrupt"), (2, "error")])
@pytest.mark.parametrize("call", [1, 2, 0], ids=["forward", "recompute", "backward"])
@pytest.mark.parametrize("options", PLACES[:3])
def test_an_error_in_a_layer(options, layer, call, error):
    """Weights and state are those before the step; the next steps are as if it had not been tried."""
    with going_on(**options) as (streamed, own):
        before, fault = weights(streamed), streamed.blocks[layer].fault
        fault.arm(ERRORS[error]("broken"), call)
        try:
            model_loss(streamed, BATCHES[2]).backward()
        except ERRORS[error] as raised:
            assert str(raised) == "broken"
            assert_same_weights(streamed, before)
        else:  # a layer whose activations are kept is called once
            assert call == 2 and fault.calls == 1
            fault.arm(None)
        own.zero_grad()


@pytest.mark.parametrize("options", PLACES[:3])
def test_steps_that_are_aborted_again_and_again(options):
    """No buffer is lost: neither in the forward nor in the backward, nor before the update, nor in her own loss."""
    with going_on(**options) as (streamed, own):
        for _ in range(4):  # more often than there are buffers
            with pytest.raises(Broken):
                broken(model_loss(streamed, BATCHES[2]))
        for number in range(6):
            streamed.blocks[number % 4].fault.arm(Broken(), call=number % 2)
            with pytest.raises(Broken):
                model_loss(streamed, BATCHES[3]).backward()
            own.zero_grad()


def broken(loss: torch.Tensor) -> None:
    raise Broken(loss)


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """Ctrl-C as function call number `at` in the package `t1lib.train` begins: there, Python looks for signals.

    Gives a list that holds the number of calls.
    """
    calls, before = [0], sys.gettrace()

    def call(frame: FrameType, event: str, argument: object) -> None:
        if "/t1lib/train/" in frame.f_code.co_filename:
            calls[0] += 1
            if calls[0] == at:
                sys.settrace(before)
                signal.raise_signal(signal.SIGINT)  # which a handler may put off to the end of what must be whole

    sys.settrace(call)
    try:
        yield calls
    finally:
        sys.settrace(before)


def one_step(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer, BATCHES[2:3], clip=own_clip)


def calls_of_a_step(options: dict[str, Any]) -> int:
    with streaming(blocks(), **options) as (streamed, own):
        train(streamed, own, BATCHES[:2], clip=own_clip)
        with interrupted(0) as calls:
            one_step(streamed, own)
    return calls[0]


def interrupt_at(at: int, options: dict[str, Any]) -> None:
    stepped = blocks()
    train(stepped, adamw(stepped), BATCHES[:3], clip=own_clip)
    with going_on(**options) as (streamed, own):
        before, saved = weights(streamed), copy.deepcopy(own.state_dict())
        train(streamed, own, BATCHES[:1])  # so that an update is under way
        streamed.load_state_dict(before)
        own.load_state_dict(copy.deepcopy(saved))
        try:
            with interrupted(at):
                one_step(streamed, own)
        except KeyboardInterrupt:
            after = weights(streamed)
            same = [all(torch.equal(value, after[name]) for name, value in each.items()) for each in (
                before, weights(stepped),
            )]  # fmt: skip
            assert any(same), "weights of two steps"
        streamed.load_state_dict(before)
        own.load_state_dict(copy.deepcopy(saved))
        own.zero_grad()


MANY = pytest.param(100, marks=pytest.mark.slow)


@pytest.mark.parametrize("times", [3, MANY])
@pytest.mark.parametrize("options", PLACES[:3])
def test_an_interrupt_at_any_call(options, times):
    """Weights are those before the step or after it, and a state that is loaded then is trained on as ever."""
    count = calls_of_a_step(options)
    for part in range(times):
        interrupt_at(1 + part * count // times, options)


def leave(options: dict[str, Any], end: str) -> list[weakref.ref]:
    """Train, and let go of model and optimizer; `end` says in which state."""
    model = blocks()
    streamed, own = stream(model, adamw(model), layers=model.blocks, **options)
    train(streamed, own, BATCHES)
    if end == "broken":
        model.blocks[2].fault.arm(Broken())
        with pytest.raises(Broken):
            model_loss(streamed, BATCHES[0])
    elif end == "in the middle":
        model_loss(streamed, BATCHES[0]).backward()
    elif end == "closed":
        own.close()
    return [weakref.ref(model), weakref.ref(own), weakref.ref(model.blocks[1].up.weight)]


@pytest.mark.parametrize("end", ["after a step", "in the middle", "broken", "closed"])
@pytest.mark.parametrize("options", [*PLACES[:3], AT_ONCE])
def test_what_is_dropped_is_gone(options, end):
    """Threads end, and host memory is given back, with and without `close()`."""
    leave({}, "closed")  # what is made once in a process
    before, running = held_bytes(), threads()
    references = leave(options, end)
    assert wait_for(lambda: gc.collect() >= 0 and not any(each() for each in references))
    assert wait_for(lambda: threads() <= running), threads() - running
    assert held_bytes() <= before


def test_many_steps_without_growth():
    with streaming(blocks(layers=2, hidden=16), choice=Choice(host_share=0.5)) as (streamed, own):
        sizes = []
        for _ in range(3):
            for start in range(40):
                train(streamed, own, [BATCHES[start % 6]], clip=lambda _, optimizer: optimizer.clip_grad_norm_(0.1))
            own.drain()
            gc.collect()
            sizes.append((held_bytes(), len(gc.get_objects()), threading.active_count()))
    first, last = sizes[1], sizes[2]
    assert last[0] == first[0]
    assert last[1] <= first[1] + 50
    assert last[2] == first[2]
