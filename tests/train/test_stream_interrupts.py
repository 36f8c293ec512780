"""Ctrl-C and other signals, wherever they come, leave a streamed model whole."""

import copy
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import stream_cases
import torch
from stream_cases import MIXTURES, assert_same_state, assert_same_weights, going_on, streaming, weights
from stream_loops import adamw, evaluated, model_loss, own_clip, train
from stream_models import blocks, data
from torch.nn.utils import get_total_norm

from t1lib.plan.cost import Choice
from t1lib.train import engine
from t1lib.train.layers import HostLayer
from t1lib.train.schedule import Schedule

BATCHES = data(6)
some = pytest.mark.parametrize("times", [6, pytest.param(100, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """Ctrl-C before line number `at` of those that `t1lib.train` runs; gives the number of lines. Not where a context
    ends: there Python looks for no signals."""
    lines, before = [0], sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "/t1lib/train/" not in frame.f_code.co_filename:
            return None
        context = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event in ("call", "line") and not context:
            lines[0] += 1
            if lines[0] == at:
                sys.settrace(before)
                signal.raise_signal(signal.SIGINT)  # which a handler may put off to the end of what must be whole
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def interrupt_some(run: Callable[..., int], times: int, *given: Any) -> None:
    """Call run(at, *given) for so many line numbers `at`, spread evenly over its lines, whose number it returns."""
    count = run(0, *given)
    for part in range(times):
        run(1 + part * count // times, *given)


@pytest.mark.parametrize("call", range(6))
def test_an_interrupt_as_a_context_ends(call):
    """The exception is kept, as notebooks do; another thread, such as autograd's, finds the lock free all the same."""
    left = call

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        generator = getattr(frame.f_locals.get("self"), "gen", None)
        if frame.f_code.co_name == "__exit__" and generator and "/t1lib/train/" in generator.gi_code.co_filename:
            left -= 1
            if left < 0:
                sys.settrace(before)
                signal.raise_signal(signal.SIGINT)

    before = sys.gettrace()
    with streaming(blocks()) as (streamed, own):
        train(streamed, own, BATCHES[:1])
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt) as kept:
                train(streamed, own, BATCHES[1:2])
        finally:
            sys.settrace(before)
        other = threading.Thread(target=evaluated, args=(streamed,), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), kept


def interrupt_at(at: int, options: dict[str, Any]) -> int:
    """Interrupt a step at its line number `at`, from 1; returns how many lines it ran."""
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
            with interrupted(at) as lines:
                train(streamed, own, BATCHES[2:3], clip=own_clip)
        except KeyboardInterrupt:
            after = weights(streamed).values()
            whole = [all(map(torch.equal, after, each.values())) for each in (before, weights(stepped))]
            assert any(whole), "weights of two steps"
        go_back()
        own.zero_grad()
    return lines[0]


@some
@pytest.mark.parametrize("options", MIXTURES[:3])
def test_an_interrupt_at_any_line(options, times):
    """Weights are those before the step or after it, and a state that is loaded then is trained on as ever."""
    interrupt_some(interrupt_at, times, options)


def stream_again(at: int, options: dict[str, Any]) -> int:
    """Interrupt a cell that streams a model again, while an update is under way, at its line number `at`."""
    plain, model = blocks(), blocks()
    train(plain, adamw(plain), BATCHES[:2])
    train(model, stream_cases.streamed_with(model, **options)[1], BATCHES[:2])
    with suppress(KeyboardInterrupt), interrupted(at) as lines:
        stream_cases.streamed_with(model, **options)
    with streaming(model, **options) as (_, own):
        assert_same_weights(model, plain)
        assert train(model, own, BATCHES[2:4]) == train(plain, adamw(plain), BATCHES[2:4])
    return lines[0]


@some
@pytest.mark.parametrize("options", MIXTURES)
def test_an_interrupt_while_a_model_is_streamed_again(options, times):
    """No update is lost, and no half of a streamed model is left."""
    interrupt_some(stream_again, times, options)


def plan_late(at: int, options: dict[str, Any]) -> int:
    """Interrupt the first forward, whose batch decides where layers and the optimizer's state are to be, at its line
    number `at`."""
    plain, model = blocks(), blocks()
    usual, given = adamw(plain), adamw(model)
    train(plain, usual, BATCHES[:1])
    train(model, given, BATCHES[:1])
    plan = patch.object(engine, "planned", return_value=options.get("choice", Choice()))
    with plan, streaming(model, given, gpu_memory="1GiB") as (_, own):
        with suppress(KeyboardInterrupt), interrupted(at) as lines:
            model_loss(model, BATCHES[1])
        assert train(model, own, BATCHES[1:3]) == train(plain, usual, BATCHES[1:3])
        assert_same_state(own, usual)
    return lines[0]


@some
@pytest.mark.parametrize("options", MIXTURES)
def test_an_interrupt_while_a_plan_is_carried_out(options, times):
    interrupt_some(plan_late, times, options)


def load(at: int) -> int:
    """Interrupt a load of the optimizer's state at its line number `at`."""
    with streaming(model := blocks()) as (_, own):
        train(model, own, BATCHES[:1])
        saved = copy.deepcopy(own.state_dict())
        train(model, own, BATCHES[1:2])
        own.param_groups[0]["lr"] *= 2
        with suppress(KeyboardInterrupt), interrupted(at) as lines:
            own.load_state_dict(saved)
        loaded = own.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
        assert {int(state["step"]) for state in own.state_dict()["state"].values()} == {1 if loaded else 2}
    return lines[0]


@some
def test_an_interrupt_while_a_state_is_loaded(times):
    interrupt_some(load, times)


def drop(at: int) -> int:
    """Interrupt at its line number `at` who makes a gradient None that has been looked at."""
    plain, model = blocks(), blocks()
    with streaming(model) as (_, own):
        for one in (model, plain):
            model_loss(one, BATCHES[0]).backward()
        param, other = model.blocks[1].up.weight, plain.blocks[1].up.weight
        param.grad.sum()
        with suppress(KeyboardInterrupt), interrupted(at) as lines:
            param.grad = None
        if param.grad is None:
            other.grad = None
        assert own.grad_norm() == get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    return lines[0]


def test_an_interrupt_while_a_gradient_is_dropped():
    for at in range(1, drop(0) + 1):
        drop(at)


def look(at: int, place: str) -> int:
    """Interrupt a look at clipped gradients at its line number `at`, and look again."""
    plain, model = blocks(), blocks()
    with streaming(model, choice=Choice(grads=place)) as (_, own):
        for one, optimizer in ((model, own), (plain, None)):
            model_loss(one, BATCHES[0]).backward()
            own_clip(one, optimizer)
        with suppress(KeyboardInterrupt), interrupted(at) as lines:
            model.blocks[1].up.weight.grad.sum()
        for name, param in model.named_parameters():
            assert torch.equal(param.grad, plain.get_parameter(name).grad), name
    return lines[0]


@pytest.mark.parametrize("place", ["device", "host"])
def test_an_interrupt_while_gradients_are_looked_at(place):
    for at in range(1, look(0, place) + 1):
        look(at, place)


def test_another_thread_trains_while_evaluations_are_interrupted():
    """At the end of a layer, which the other's next layer may follow in its slot."""
    plain, release, calls = blocks(), Schedule.release, cycle(range(3))
    train(plain, adamw(plain), BATCHES)

    def interrupt(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread() and next(calls) == 0:
            signal.raise_signal(signal.SIGINT)
        release(*args, **kwargs)

    for _ in range(20):
        with streaming(blocks(), choice=Choice(host_share=1.0)) as (model, own), ThreadPoolExecutor(1) as pool:
            with patch.object(Schedule, "release", interrupt):
                training = pool.submit(train, model, own, BATCHES)
                while not training.done():
                    with suppress(KeyboardInterrupt), torch.no_grad():
                        model_loss(model, BATCHES[0])
            training.result()
            assert_same_weights(model, plain)


def test_a_handler_of_another_signal_that_raises():
    """As PyTorch's for SIGCHLD does when a worker of a DataLoader dies. A step that it ends is an aborted one."""
    before, unbind = signal.signal(signal.SIGCHLD, lambda *which: 1 / 0), HostLayer.unbind

    def die(layer: HostLayer) -> None:
        if layer.index == 2:
            signal.raise_signal(signal.SIGCHLD)
        unbind(layer)

    with going_on() as (streamed, own):
        with patch.object(HostLayer, "unbind", die), pytest.raises(ZeroDivisionError):
            model_loss(streamed, BATCHES[0])
        own.zero_grad()
    signal.signal(signal.SIGCHLD, before)


def test_a_wait_for_another_threads_layer_can_be_interrupted():
    begun, ended = threading.Event(), threading.Event()
    with streaming(blocks()) as (streamed, own), ThreadPoolExecutor(1) as pool:
        streamed.blocks[1].up.register_forward_hook(lambda *_: begun.set() or (ended.wait(10) and None))
        evaluating = pool.submit(evaluated, streamed)
        begun.wait()
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            own.grad_norm()
        ended.set()
        evaluating.result()
