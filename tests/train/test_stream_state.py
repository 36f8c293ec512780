"""A streamed model's weights, gradients and state are whole whenever one looks, after errors and interrupts, too."""

import copy
import gc
import io
import itertools
import linecache
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import cycle, product
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import stream_cases
import torch
from copies import wait_for
from refusals import refused
from stream_cases import assert_same_state, assert_same_weights, going_on, six_steps, streaming, weights
from stream_loops import RATES, adamw, evaluated, grouped, model_loss, own_clip, sgd, train
from stream_models import blocks, data, last_hidden, layers_of, llama, qwen3
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from t1lib.measure.probes import AllocatorTimeline
from t1lib.plan.cost import Choice
from t1lib.train import activations, engine, outer, schedule, stream, travel
from t1lib.train.layers import HostLayer
from t1lib.train.outer import OuterParam
from t1lib.train.passes import Passes
from t1lib.train.schedule import Schedule
from t1lib.train.travel import Travel
from t1lib.train.update import update

pytestmark = pytest.mark.usefixtures("quick_collection")

CLIPPED = partial(train, clip=own_clip)
PLACES = [
    pytest.param({}, id="streamed"),
    pytest.param({"choice": Choice(resident=1, keep=2, host_share=0.5, grads="device")}, id="mixed"),
    pytest.param({"choice": Choice(slots=3, inputs="host", outer="host", host_share=1.0)}, id="host"),
    pytest.param({"choice": Choice(resident=4, outer="host"), "overlap": False}, id="resident"),
]
BATCHES = data(6)
FIRST, SECOND = BATCHES[:3], BATCHES[3:]


def placed(place: dict[str, Any] | None, model: nn.Module, optimizer: Any) -> Any:
    """The model and its optimizer, streamed or, for None, as they are."""
    return nullcontext((model, optimizer)) if place is None else streaming(model, optimizer, **place)


KINDS = {"plain": None, **{place.id: place.values[0] for place in PLACES}}
WAYS = ["plain mixed", "mixed plain", "plain host", "host plain", "streamed mixed", "plain resident", "host streamed"]


@pytest.mark.parametrize("optimizer", [sgd, grouped], ids=["sgd", "adamw"])
@pytest.mark.parametrize("source, target", [way.split() for way in WAYS])
def test_a_run_goes_on_elsewhere(source, target, optimizer):
    """From files in a fresh model or (AdamW) in one that was trained on something else; or with its own optimizer."""
    plain, usual, expected = six_steps(llama, optimizer)
    first, second = llama(), llama()
    used, other = optimizer(first), optimizer(second)
    with placed(KINDS[source], first, used) as (model, own):
        CLIPPED(model, own, FIRST)
        file = io.BytesIO()  # so that nothing is shared with what runs on
        torch.save((model.state_dict(), own.state_dict()), file)
    file.seek(0)
    saved, state = torch.load(file, weights_only=True)
    for each, begun in [(second, other), (first, used)][: 2 if source == "plain" else 1]:
        with placed(KINDS[target], each, begun) as (model, own):
            if each is second:
                train(model, own, SECOND[:2] if optimizer is grouped else [])
                model.load_state_dict(saved)
                own.load_state_dict(state)
            assert CLIPPED(model, own, SECOND) == expected[6:]
            assert_same_weights(model, plain)
            assert_same_state(own, usual)


@pytest.mark.parametrize("place", [*PLACES, {"update_in_backward": True}])
def test_a_cell_that_streams_a_model_runs_again(place):
    """As in a notebook, where nobody holds the first optimizer any more: plain PyTorch would go on from the weights."""
    plain, model, batches = llama(), llama(), data(3)
    expected = [train(plain, adamw(plain), batches) for _ in range(2)]
    for losses in expected:
        optimizer = adamw(model)
        gc.collect()
        model, optimizer = stream(model, optimizer, **place)
        assert train(model, optimizer, batches) == losses
    engine = weakref.ref(optimizer._engine)
    with streaming(model):
        del optimizer
        assert_same_weights(model, plain)
        gc.collect()
        assert engine() is None


def test_a_closed_model_its_copy_and_the_model_streamed_again_train_on():
    """After `close()` nothing is left of the streaming: not in the model, not in a copy of it, not on the device."""
    plain, _, expected = six_steps(qwen3)
    model = qwen3()
    embedding = model.model.embed_tokens
    embedding.forward = own_forward = embedding.forward  # in the module's own dictionary
    kind, names, start = type(model), [set(vars(m)) for m in model.modules()], weights(model)
    with streaming(model) as (_, own):
        own.close()  # unused; and again at the end
    assert_same_weights(model, start)
    with streaming(model, choice=Choice(resident=1, outer="host")) as (streamed, own):
        assert streamed is model
        CLIPPED(streamed, own, FIRST)
        saved = copy.deepcopy(own.state_dict())
        buffers = [weakref.ref(tensor) for tensor in own._engine.schedule.device_tensors()]
    gc.collect()
    assert buffers and not any(buffer() is not None for buffer in buffers)
    assert type(model) is kind and embedding.forward is own_forward
    assert [set(vars(m)) for m in model.modules()] == names
    for one, place in ((copy.deepcopy(model), None), (copy.deepcopy(model), KINDS["mixed"]), (model, None)):
        with placed(place, one, adamw(one)) as (found, optimizer):
            optimizer.load_state_dict(copy.deepcopy(saved))
            assert CLIPPED(found, optimizer, SECOND) == expected[6:]
            assert_same_weights(found, plain)


@pytest.mark.parametrize("options", PLACES[:3])
@pytest.mark.parametrize("masters", ["whole", "split"])
def test_weights_written_by_hand_are_saved_with_their_masters_and_train_on(masters, options):
    """Also what was written, or assigned, last before `close()`."""

    def masters_have_followed() -> None:
        saved = own.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            master, weight = saved[number]["master"].cpu(), param.detach().cpu().float()
            torch.testing.assert_close(master, weight, rtol=4e-3, atol=1e-37)

    model = qwen3(torch.bfloat16)
    optimizer = adamw(model, weight_decay=0.0)
    with streaming(model, optimizer, master_weights=masters, **options) as (streamed, own):
        train(streamed, own, data(3))
        with torch.no_grad():
            for param in streamed.parameters():
                param.add_(0.25)
            up = [layer.mlp.up_proj.weight for layer in model.model.layers]
            zeroed = [streamed.lm_head.weight, up[1]]
            zeroed[1].zero_()
        zeroed[0].data = torch.zeros_like(zeroed[0])
        streamed.model.norm.weight.data = torch.full_like(streamed.model.norm.weight, 0.5)
        masters_have_followed()
        train(streamed, own, data(3))
        assert all((param == 0).float().mean() < 0.05 for param in zeroed)
        up[1].data.fill_(0.5)
        for weight in (up[0], up[2]):
            weight.data = torch.full_like(weight.detach(), 0.5)
        own.close()
        masters_have_followed()
        assert all((weight == 0.5).all() for weight in up[:3])


def test_hooks_of_loading_are_called():
    """As PyTorch calls them: one before may change what is given, or return something else."""
    with streaming(blocks()) as (streamed, own):
        train(streamed, own, FIRST[:1])
        state, loaded = own.state_dict(), []
        own.register_load_state_dict_pre_hook(lambda _, given: given.pop("extra"))
        own.register_load_state_dict_pre_hook(lambda _, given: given | {"param_groups": copy.deepcopy(rates)})
        own.register_load_state_dict_post_hook(lambda optimizer: loaded.append(optimizer.param_groups[0]["lr"]))
        rates = [{**group, "lr": 0.5} for group in state["param_groups"]]
        own.load_state_dict(given := {**state, "extra": None})
        assert loaded == [0.5] and "extra" in given


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_loading_forgets_an_earlier_schedule_and_leaves_what_is_loaded_to_the_user(rate):
    """The next schedule begins with the loaded rate, and none writes to it."""

    def schedules(model: nn.Module, optimizer: Any) -> list[float]:
        found, saved = [], copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] *= 0.5
        for _ in range(3):
            found += train(model, optimizer, FIRST, schedule=RATES)
            optimizer.load_state_dict(saved)
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    stream_cases.compare(llama, lambda model: adamw(model, lr=copy.deepcopy(rate)), schedules)


def test_accelerate_saves_all_weights(tmp_path):
    """It takes tensors of one storage for tied ones."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(*stream(model, adamw(model)))
    train(model, optimizer, data(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path)
    train(model, optimizer, data(2))
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0.0, atol=0.0)


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


BLOCKS = [f"blocks.{layer}" for layer in range(4)]


def failing(model: nn.Module, where: str, call: int | None) -> Tensor:
    """A loss whose backward fails: within this layer, as in `Fault`, or (None) in the gradient of a module's output."""
    module = model.get_submodule(where)
    if call is not None:
        module.fault.arm(ArithmeticError(), call)
        return model_loss(model, BATCHES[2])
    hook = module.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: 1 / 0) and None)
    loss = model_loss(model, BATCHES[2])
    hook.remove()
    return loss


@pytest.mark.parametrize("optimizer, resident", [(adamw, 0), (sgd, 0), (adamw, 2)])
@pytest.mark.parametrize("where, call", [*product(BLOCKS, (0, 2)), *product(("head", "blocks.1", "embed"), (None,))])
def test_an_aborted_backward_that_had_updated_layers_is_undone_by_a_checkpoint(where, call, optimizer, resident):
    """The next backward is as ever; after that no other before a step."""
    model, kept = blocks(), Choice(resident=resident)
    with streaming(model, optimizer(model), update_in_backward=True, choice=kept) as (model, own):
        train(model, own, BATCHES[:2])
        saved = copy.deepcopy((model.state_dict(), own.state_dict()))
        train(model, own, BATCHES[2:])
        after = weights(model)

        def fail_and_go_back() -> None:
            with pytest.raises(ArithmeticError):
                failing(model, where, call).backward()
            model.load_state_dict(saved[0])
            own.load_state_dict(saved[1])

        for _ in range(2):
            fail_and_go_back()
        for param in model.parameters():
            param.grad = None
        train(model, own, BATCHES[2:])
        assert_same_weights(model, after)
        with pytest.raises(ArithmeticError):
            failing(model, where, call).backward()
        own.zero_grad()
        model_loss(model, BATCHES[2]).backward()
        for _ in range(2):
            own.zero_grad()  # does not take back a whole backward's updates
            refused(lambda: model_loss(model, BATCHES[0]).backward(), "a second backward before step")
        own.load_state_dict(saved[1])
        model_loss(model, BATCHES[2]).backward()


def test_a_backward_while_an_update_is_under_way_leaves_the_weights_whole():
    """Its forward came before the step. The update began in a forward after it, which an error ended. A layer that
    streams refuses such a backward before it can do any harm, so here all are resident."""
    plain, model = blocks(), blocks()
    train(plain, adamw(plain), BATCHES[:1])
    with streaming(model, choice=Choice(resident=4, outer="host"), update_in_backward=True) as (streamed, own):
        first, second = model_loss(streamed, BATCHES[0]), last_hidden(streamed, BATCHES[1])
        first.backward()
        own.step()
        own.zero_grad()
        streamed.blocks[2].fault.arm(ArithmeticError())
        with pytest.raises(ArithmeticError):
            model_loss(streamed, BATCHES[2])
        refused(second.sum().backward, "was changed in place")
        assert torch.equal(streamed.embed.weight, plain.embed.weight)
        assert torch.equal(streamed.head.weight, plain.head.weight)


def test_a_gradient_in_another_layout_is_copied_before_the_update_may_read_it(monkeypatch):
    seen, by_piece = [], Travel.by_piece

    def note(self, held, given, **options):
        seen.append(given.grads is held.update.grads)
        return by_piece(self, held, given, **options)

    monkeypatch.setattr(Travel, "by_piece", note)
    with streaming(model := llama(), adamw(model), choice=Choice(outer="host", resident=4)) as (model, own):
        model_loss(model, BATCHES[0]).backward()
        model.lm_head.weight.grad = model.lm_head.weight.grad.t().contiguous().t()
        own.step()
        own.drain()
    assert seen and all(seen)


def test_an_interrupt_before_an_update_leaves_no_stale_weights():
    """Layer 2 already counts as on the device when its update fails to begin; then it is called alone."""
    plain, hidden = blocks(), torch.randn(1, 4, 32)
    train(plain, adamw(plain), BATCHES[:1])
    with streaming(blocks()) as (streamed, own):
        train(streamed, own, BATCHES[:1])
        broken = patch.object(Schedule, "_update_on_device", side_effect=KeyboardInterrupt)
        with broken, torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model_loss(streamed, BATCHES[1])
        assert torch.equal(streamed.blocks[2](hidden), plain.blocks[2](hidden))


def test_a_failed_update_is_told_by_close_which_gives_an_ordinary_model_back():
    model = blocks()
    _, own = stream_cases.streamed_with(model, choice=Choice(host_share=1.0, outer="host"))
    model_loss(model, BATCHES[0]).backward()
    with patch.object(schedule, "update", side_effect=ArithmeticError("broken")):
        with suppress(ArithmeticError):  # the first layer's update may have failed by the time the last one's begins
            own.step()
        with pytest.raises(ArithmeticError, match="broken"):
            own.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    model.zero_grad()
    with streaming(model) as (streamed, own):
        train(streamed, own, BATCHES[:2])


def test_an_update_in_the_backward_begins_with_weights_that_were_written():
    """Not with the masters from before."""
    model = llama(torch.bfloat16)
    with streaming(model, adamw(model, lr=1e-6), update_in_backward=True) as (streamed, own):
        train(streamed, own, BATCHES[:1])
        with torch.no_grad():
            for param in layers_of(streamed).parameters():
                param.fill_(0.25)
        train(streamed, own, BATCHES[:1])
        for param in layers_of(streamed).parameters():
            torch.testing.assert_close(param, torch.full_like(param, 0.25))


def test_an_evaluation_sends_no_layer_twice():
    """Three layers in two slots: the second stays; the first and the third take turns in the other slot."""
    with streaming(blocks(layers=3)) as (streamed, _), torch.no_grad():
        model_loss(streamed, BATCHES[0])
        with patch.object(Schedule, "_copy_in", autospec=True, side_effect=Schedule._copy_in) as copy_in:
            model_loss(streamed, BATCHES[0])
    assert [call.args[1].index for call in copy_in.call_args_list] == [2, 0]


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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_an_input_leaves():
    """It ends what makes the copy, and nothing is left whose end would fail."""
    interrupt = patch.object(activations, "pinned_zeros", side_effect=KeyboardInterrupt)
    with streaming(qwen3(), choice=Choice(inputs="host")) as (model, _), interrupt, pytest.raises(KeyboardInterrupt):
        model_loss(model, data()[0])


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


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", PLACES[:3])
def test_an_interrupt_at_any_line(options, times):
    """Weights are those before the step or after it, and a state that is loaded then is trained on as ever."""
    count = interrupt_at(0, options)
    for part in range(times):
        interrupt_at(1 + part * count // times, options)


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


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", PLACES)
def test_an_interrupt_while_a_model_is_streamed_again(options, times):
    """No update is lost, and no half of a streamed model is left."""
    count = stream_again(0, options)
    for part in range(times):
        stream_again(1 + part * count // times, options)


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


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", PLACES)
def test_an_interrupt_while_a_plan_is_carried_out(options, times):
    count = plan_late(0, options)
    for part in range(times):
        plan_late(1 + part * count // times, options)


@pytest.mark.parametrize("resident", [0, 2])
def test_a_plan_that_cannot_be_carried_out_leaves_an_ordinary_model(resident):
    plain, model = blocks(), blocks()
    usual, given = adamw(plain), adamw(model)
    train(plain, usual, BATCHES[:1])
    train(model, given, BATCHES[:1])
    with patch.object(engine, "planned", return_value=Choice(resident=resident, outer="host")):
        _, own = stream_cases.streamed_with(model, given, gpu_memory="1GiB")
        where = (HostLayer, "give_back") if resident else (Passes, "__init__")
        call = getattr(*where)

        def full(*args: Any) -> None:
            call(*args)
            if own._engine.closed is False:
                raise torch.OutOfMemoryError("of the device")

        with patch.object(*where, full), pytest.raises(torch.OutOfMemoryError):
            train(model, own, BATCHES[1:2])
        refused(own.step, "an optimizer that was closed")
    assert_same_state(own, usual)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert evaluated(model) == evaluated(plain)
    with streaming(model, given) as (_, own):
        assert train(model, own, BATCHES[1:3]) == train(plain, usual, BATCHES[1:3])


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


@pytest.mark.parametrize("where", [(OuterParam, "refill"), (outer, "version_of")], ids=["a copy", "its memory"])
@pytest.mark.parametrize("fails", [0, 1])
def test_weights_that_could_not_be_brought_back_are_at_the_next_try(where, fails):
    """Embedding or head, whose memory an aborted backward had released."""
    plain, model, call, calls = blocks(), blocks(), getattr(*where), itertools.count()

    def full(*args: Any) -> Any:
        if next(calls) == fails:
            raise torch.OutOfMemoryError("of the device")
        return call(*args)

    with streaming(model, choice=Choice(outer="host")) as (_, own):
        model.blocks[1].fault.arm(ArithmeticError(), 0)
        with pytest.raises(ArithmeticError):
            model_loss(model, BATCHES[0]).backward()
        with patch.object(*where, full), pytest.raises(torch.OutOfMemoryError):
            model_loss(model, BATCHES[0])
        own.zero_grad()
        assert evaluated(model) == evaluated(plain)


def failed_update(which: int, pieces: int) -> tuple[nn.Module, Any]:
    """A streamed model and its optimizer. In its second forward so many pieces of the update on the device of layer
    number `which`, of the embedding (4) or the head's matrix (5) were queued, and then one found no memory."""
    by_piece = Travel._by_piece

    def fail(travel: Travel, traveller: Any, *given: Any) -> Any:
        found = by_piece(travel, traveller, *given)
        if traveller.index == which:
            yield from itertools.islice(found, pieces)
            raise torch.OutOfMemoryError("of the device")
        yield from found

    with patch.object(travel, "PIECE", 128):
        model, own = stream_cases.streamed_with(blocks(), choice=Choice(outer="host"))
    train(model, own, BATCHES[:1])
    with patch.object(Travel, "_by_piece", fail), pytest.raises(torch.OutOfMemoryError):
        model_loss(model, BATCHES[1])
    own.zero_grad()
    return model, own


WHICH = pytest.mark.parametrize("which", [2, 4, 5])


@WHICH
def test_an_update_on_the_device_that_could_not_begin_is_made_at_the_next_try(which):
    plain, (model, own) = blocks(), failed_update(which, pieces=0)
    usual = adamw(plain)
    train(plain, usual, BATCHES[:1])
    assert train(model, own, BATCHES[1:3]) == train(plain, usual, BATCHES[1:3])
    own.close()


@WHICH
def test_after_an_update_on_the_device_that_failed_halfway_nothing_goes_on(which):
    """Until the model is closed, or streamed again."""
    model, own = failed_update(which, pieces=1)
    for again in (lambda: model_loss(model, BATCHES[1]), own.drain, own.state_dict):
        refused(again, "an update ended halfway, by OutOfMemoryError: of the device")
    other, _ = failed_update(which, pieces=1)
    refused(own.close, "an update ended halfway")
    refused(lambda: stream_cases.streamed_with(other), "an update ended halfway")
    for one in (model, other):
        assert all(type(param) is nn.Parameter for param in one.parameters())
        evaluated(one)
        with streaming(one) as both:
            train(*both, BATCHES[:1])


def test_a_layer_that_cannot_be_given_back_does_not_keep_the_rest_from_it():
    model, give_back = blocks(), HostLayer.give_back
    _, own = stream_cases.streamed_with(model)

    def full(layer: HostLayer) -> None:
        if layer.index == 1:
            raise MemoryError
        give_back(layer)

    with patch.object(HostLayer, "give_back", full), pytest.raises(MemoryError):
        own.close()
    kinds = [type(next(block.parameters())) is nn.Parameter for block in model.blocks]
    assert kinds == [True, False, True, True]
    assert evaluated(model) == evaluated(blocks())


@pytest.mark.parametrize("before", [0, 1])
def test_gradients_that_found_no_memory_are_those_from_before(before):
    with streaming(model := blocks(), choice=Choice(grads="device")) as (_, own):
        for batch in BATCHES[:before]:
            model_loss(model, batch).backward()
        full = patch.object(Schedule, "_keep_gradients", side_effect=torch.OutOfMemoryError("of the device"))
        with full, pytest.raises(torch.OutOfMemoryError):
            model_loss(model, BATCHES[1]).backward()
        grads = [param.grad for param in model.blocks.parameters()]
        assert all((grad is None) is (before == 0) for grad in grads)
        seen = [param.grad for param in model.parameters() if param.grad is not None]
        assert own.grad_norm() == get_total_norm(seen)
        own.zero_grad(set_to_none=False)


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


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_an_interrupt_while_a_state_is_loaded(times):
    lines = load(0)
    for part in range(times):
        load(1 + part * lines // times)


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


def leave(options: dict[str, Any], end: str) -> list[weakref.ref]:
    """Train, and let go of model and optimizer; `end` says in which state."""
    model = blocks()
    streamed, own = stream_cases.streamed_with(model, **options)
    train(streamed, own, FIRST)
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
@pytest.mark.parametrize("options", [*PLACES[:3], {"update_in_backward": True}, {"gpu_memory": "1GiB"}])
def test_what_is_dropped_is_gone(options, end):
    """Threads end, and host memory is given back, with and without `close()`."""
    leave({}, "closed")  # what is made once in a process
    before, running = stream_cases.held_bytes(), {*threading.enumerate()}
    references = leave(options, end)
    assert wait_for(lambda: gc.collect() >= 0 and not any(each() for each in references))
    assert wait_for(lambda: running.issuperset(threading.enumerate())), {*threading.enumerate()} - running
    assert stream_cases.held_bytes() <= before


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
            sizes.append((stream_cases.held_bytes(), threading.active_count(), len(gc.get_objects())))
    assert sizes[2][:2] == sizes[1][:2] and sizes[2][2] <= sizes[1][2] + 50


def test_a_loss_that_is_kept_keeps_nothing_of_its_batch():
    """Such as a sum of losses that is logged later: masks and positions are freed by the backward, too."""
    with streaming(llama(), choice=Choice(outer="host", keep=1)) as (streamed, own):
        total, sizes, batches = torch.zeros(()), [], data(6, padded=True)
        for batch in batches:
            loss = model_loss(streamed, batch)
            loss.backward()
            total = total + loss
            own.step()
            own.zero_grad()
            del loss
            own.drain()
            sizes.append(stream_cases.held_bytes())
    assert total.requires_grad and sizes[5] - sizes[2] < 64, sizes


def test_gradients_that_are_zeroed_need_none_themselves():
    """They were changed where graphs are recorded, as by a penalty; their graph would grow with every step."""
    with streaming(qwen3()) as (streamed, own):
        model_loss(streamed, BATCHES[0]).backward()
        params = [streamed.model.norm.weight, streamed.model.layers[0].mlp.up_proj.weight]
        for param in params:
            param.grad.add_(param * 0.1)
        own.zero_grad(set_to_none=False)
        assert not any(param.grad.requires_grad or param.grad.any() for param in params)


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_first_update_with_momentum_has_pytorchs_bits_and_takes_no_second_buffer(kind):
    """Also of a gradient of −0."""
    rule = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.0} | kind
    weight, grad = nn.Parameter(torch.randn(2**16)), torch.randn(2**16)
    grad[:8] = -0.0
    plain, state = nn.Parameter(weight.detach().clone()), {"momentum_buffer": torch.zeros(2**16)}
    reference = torch.optim.SGD([plain], **rule)
    for count in (1, 2):
        plain.grad = grad.clone()
        reference.step()
        with AllocatorTimeline(torch.device("cpu"), 0) as timeline:
            update([weight.data], [grad], [state], reference.param_groups[0], count)
        assert timeline.peak < grad.nbytes / 2
        pairs = (weight, plain), (state["momentum_buffer"], reference.state[plain]["momentum_buffer"])
        assert all(torch.equal(*(t.detach().view(torch.int32) for t in pair)) for pair in pairs)
