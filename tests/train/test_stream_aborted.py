"""What a step leaves behind that an error or an interrupt ends, and a streamed model that is dropped: nothing mixed."""

import copy
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import FrameType
from typing import Any

import pytest
import torch
from stream_cases import assert_same_weights, going_on, held_bytes, streamed_with, streaming, threads, wait_for, weights
from stream_loops import adamw, model_loss, own_clip, train
from stream_models import blocks, data
from test_stream_state import AT_ONCE, PLACES

from t1lib.plan.cost import Choice

pytestmark = pytest.mark.usefixtures("quick_collection")

BATCHES = data(6)


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Leave what was made before these tests out of every collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("options", PLACES[:3])
def test_aborted_steps(options, error):
    """Wherever it is, the next steps are as if it had not been tried; and there are fewer buffers than such steps."""
    with going_on(**options) as (streamed, own):
        before = weights(streamed)
        for layer, call in product((0, 2, 1, 3), (1, 2, 0)):
            fault = streamed.blocks[layer].fault
            fault.arm(error("broken"), call)
            try:
                model_loss(streamed, BATCHES[2]).backward()
            except error as raised:
                assert str(raised) == "broken"
                assert_same_weights(streamed, before)
            else:  # a layer whose activations are kept is called once
                assert call == 2 and fault.calls == 1
                fault.arm(None)
            own.zero_grad()
            assert all(p.grad is None for p in streamed.parameters())
            model_loss(streamed, BATCHES[3])  # of which an error in her own loss leaves no backward


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """Ctrl-C as call number `at` in `t1lib.train` begins, where Python looks for signals; gives the number of calls."""
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


def interrupt_at(at: int, options: dict[str, Any]) -> int:
    """Interrupt a step at its call number `at`, from 1; returns how many calls it made."""
    stepped = blocks()
    train(stepped, adamw(stepped), BATCHES[:3], clip=own_clip)
    with going_on(**options) as (streamed, own):
        before, saved = weights(streamed), copy.deepcopy(own.state_dict())

        def go_back() -> None:
            streamed.load_state_dict(before)
            own.load_state_dict(copy.deepcopy(saved))

        train(streamed, own, BATCHES[:1])  # so that an update is under way
        go_back()
        try:
            with interrupted(at) as calls:
                train(streamed, own, BATCHES[2:3], clip=own_clip)
        except KeyboardInterrupt:
            after = weights(streamed).values()
            whole = [all(map(torch.equal, after, each.values())) for each in (before, weights(stepped))]
            assert any(whole), "weights of two steps"
        go_back()
        own.zero_grad()
    return calls[0]


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", PLACES[:3])
def test_an_interrupt_at_any_call(options, times):
    """Weights are those before the step or after it, and a state that is loaded then is trained on as ever."""
    count = interrupt_at(0, options)
    for part in range(times):
        interrupt_at(1 + part * count // times, options)


def leave(options: dict[str, Any], end: str) -> list[weakref.ref]:
    """Train, and let go of model and optimizer; `end` says in which state."""
    model = blocks()
    streamed, own = streamed_with(model, **options)
    train(streamed, own, BATCHES)
    if end == "broken":
        model.blocks[2].fault.arm(ArithmeticError())
        with pytest.raises(ArithmeticError):
            model_loss(streamed, BATCHES[0])
    elif end == "in the middle":
        model_loss(streamed, BATCHES[0]).backward()
    elif end == "closed":
        own.close()
    return [weakref.ref(model), weakref.ref(own), weakref.ref(model.blocks[1].up.weight)]


@pytest.mark.parametrize("end", ["after a step", "in the middle", "broken", "closed"])
@pytest.mark.parametrize("options", [*PLACES[:3], AT_ONCE, {"gpu_memory": "1GiB"}])
def test_what_is_dropped_is_gone(options, end):
    """Threads end, and host memory is given back, with and without `close()`."""
    leave({}, "closed")  # what is made once in a process
    before, running = held_bytes(), threads()
    references = leave(options, end)
    assert wait_for(lambda: gc.collect() >= 0 and not any(each() for each in references))
    assert wait_for(lambda: threads() <= running), threads() - running
    assert held_bytes() <= before


def test_many_steps_without_growth():
    """Nor by forwards in vain, of which activations are kept."""
    with streaming(blocks(layers=2, hidden=16), choice=Choice(host_share=0.5, keep=1)) as (streamed, own):
        sizes = []
        for _ in range(3):
            for start in range(40):
                train(streamed, own, [BATCHES[start % 6]], clip=lambda _, optimizer: optimizer.clip_grad_norm_(0.1))
            model_loss(streamed, BATCHES[0])
            own.drain()
            gc.collect()
            sizes.append((held_bytes(), threading.active_count(), len(gc.get_objects())))
    assert sizes[2][:2] == sizes[1][:2] and sizes[2][2] <= sizes[1][2] + 50
