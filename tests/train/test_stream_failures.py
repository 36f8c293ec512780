"""Errors in the middle of a step, such as too little memory, leave a streamed model whole, or are told again."""

import copy
import itertools
from contextlib import suppress
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import stream_cases
import torch
from refusals import refused
from stream_cases import MIXTURES, assert_same_state, assert_same_weights, going_on, streaming, weights
from stream_loops import adamw, evaluated, model_loss, sgd, train
from stream_models import blocks, data, last_hidden, qwen3
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace
from t1lib.train import activations, engine, outer, schedule, travel
from t1lib.train.layers import HostLayer
from t1lib.train.optimizer import StreamOptimizer
from t1lib.train.outer import OuterParam
from t1lib.train.passes import Passes
from t1lib.train.schedule import Schedule
from t1lib.train.travel import Span, Travel, Traveller, Update
from t1lib.train.update import update

BATCHES = data(6)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("options", MIXTURES[:3])
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


def test_an_error_before_an_update_leaves_no_stale_weights():
    """Layer 2 already counts as on the device when its update fails to begin; then it is called alone."""
    plain, hidden = blocks(), torch.randn(1, 4, 32)
    train(plain, adamw(plain), BATCHES[:1])
    with streaming(blocks()) as (streamed, own):
        train(streamed, own, BATCHES[:1])
        broken = patch.object(Schedule, "_update_on_device", side_effect=MemoryError)
        with broken, torch.no_grad(), pytest.raises(MemoryError):
            model_loss(streamed, BATCHES[1])
        assert torch.equal(streamed.blocks[2](hidden), plain.blocks[2](hidden))


@pytest.mark.parametrize(
    "where",
    [(HostLayer, "give_back"), (Passes, "__init__"), (StreamOptimizer, "take_over")],
    ids=lambda where: where[1],
)
def test_a_plan_that_cannot_be_carried_out_leaves_an_ordinary_model(where):
    plain, model = blocks(), blocks()
    usual, given = adamw(plain), adamw(model)
    train(plain, usual, BATCHES[:1])
    train(model, given, BATCHES[:1])
    with patch.object(engine, "planned", return_value=Choice(resident=2, outer="host")):
        _, own = stream_cases.streamed_with(model, given, gpu_memory="1GiB")
        call = getattr(*where)

        def full(*args: Any) -> None:
            if where[1] != "take_over":  # else in its middle
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


def failed_update(which: int, pieces: int, way: str = "in") -> tuple[nn.Module, Any]:
    """A streamed model and its optimizer. In its second forward so many pieces of the update on the device of layer
    number `which`, of the embedding (4) or the head's matrix (5) had come in, or left, and then one found no memory."""
    calls, copy = itertools.count(), Travel._copy

    def fail(travel: Travel, *given: Any) -> None:
        if given[:2] == (which, way) and next(calls) == pieces:
            raise torch.OutOfMemoryError("of the device")
        copy(travel, *given)

    with patch.object(travel, "PIECE", 128):
        model, own = stream_cases.streamed_with(blocks(), choice=Choice(outer="host"))
    train(model, own, BATCHES[:1])
    with patch.object(Travel, "_copy", fail), pytest.raises(torch.OutOfMemoryError):
        model_loss(model, BATCHES[1])
    own.zero_grad()
    return model, own


WHICH = pytest.mark.parametrize("which", [2, 4, 5])


@WHICH
def test_an_update_on_the_device_that_could_not_begin_is_made_at_the_next_try(which):
    plain, (model, own) = blocks(), failed_update(which, 0)
    usual = adamw(plain)
    train(plain, usual, BATCHES[:1])
    assert train(model, own, BATCHES[1:3]) == train(plain, usual, BATCHES[1:3])
    own.close()


@WHICH
@pytest.mark.parametrize("halfway", [(travel.TOGETHER,), (0, "out")])
def test_after_an_update_on_the_device_that_failed_halfway_nothing_goes_on(which, halfway):
    """Until the model is closed, or streamed again."""
    model, own = failed_update(which, *halfway)
    for again in (lambda: model_loss(model, BATCHES[1]), own.drain, own.state_dict):
        refused(again, "an update ended halfway, by OutOfMemoryError: of the device")
    other, _ = failed_update(which, *halfway)
    refused(own.close, "an update ended halfway")
    refused(lambda: stream_cases.streamed_with(other), "an update ended halfway")
    for one in (model, other):
        assert all(type(param) is nn.Parameter for param in one.parameters())
        evaluated(one)
        with streaming(one) as both:
            train(*both, BATCHES[:1])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("come_too", [True, False])
def test_an_update_that_has_overwritten_gradients_is_not_tried_again(come_too, error):
    """Those that wait on the device are multiplied where they are; others come in with the state."""
    rule, calls = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).param_groups[0], itertools.count()
    layer = Traveller(0, torch.ones(16), {"momentum_buffer": torch.zeros(16)})
    given = Update(torch.ones(16), [Span(slice(0, 16), rule, 1)], (), True, torch.tensor(0.5))
    dtypes = dict.fromkeys(["weight", "momentum_buffer", *["grad"] * come_too], torch.float32)
    with patch.object(travel, "PIECE", 8):
        way = Travel(SimpleNamespace(device=torch.device("cpu"), overlap=False, trace=NoTrace()), dtypes, 16)

    def fail(*given: Any) -> None:
        if next(calls) == 1:
            raise error
        update(*given)

    with patch.object(travel, "update", fail), pytest.raises(error):
        list(way.by_piece(layer, given))
    if come_too:
        list(way.by_piece(layer, given))
        assert torch.equal(layer.flat, torch.full((16,), 0.95))
    else:
        refused(lambda: list(way.by_piece(layer, given)), "an update ended halfway")


@pytest.mark.parametrize("where, share, again", [(schedule, 1.0, False), (schedule, 1.0, True), (travel, 0.0, False)])
def test_a_failed_update_is_told_by_what_closes_which_gives_an_ordinary_model_back(where, share, again):
    """Without the gradients that it may have changed. And all memory, though nothing collects garbage. (On the device
    `stream` would try again what has not begun.)"""

    def fail(*_: Any) -> None:
        raise ArithmeticError("broken")

    model = blocks()
    _, own = stream_cases.streamed_with(model, choice=Choice(host_share=share, outer="host"))
    model_loss(model, BATCHES[0]).backward()
    with patch.object(where, "update", fail), stream_cases.all_freed(own):
        with suppress(ArithmeticError):  # the first layer's update may have failed by the time the last one's begins
            own.step()
            if again:
                own.drain()  # until it has failed: `stream` refuses gradients first
        with pytest.raises(ArithmeticError, match="broken"):
            stream_cases.streamed_with(model) if again else own.close()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(param.grad is None for param in model.blocks.parameters())
    model.zero_grad()
    with streaming(model) as (streamed, own):
        train(streamed, own, BATCHES[:2])


@pytest.mark.parametrize("masters", [{}, {"master_weights": "split"}], ids=str)
def test_nor_after_one_in_the_backward_that_wrote_to_the_weights_in_their_slot(masters):
    dtype = torch.bfloat16 if masters else torch.float32
    with patch.object(travel, "PIECE", 128):
        model, own = stream_cases.streamed_with(blocks(dtype), update_in_backward=True, **masters)
    calls = itertools.count()

    def fail(*given: Any) -> None:
        update(*given)
        if next(calls) == 1:
            raise torch.OutOfMemoryError("of the device")

    with patch.object(travel, "update", fail), pytest.raises(torch.OutOfMemoryError):
        model_loss(model, BATCHES[0]).backward()
    own.zero_grad()
    refused(lambda: model_loss(model, BATCHES[0]), "an update ended halfway")
    refused(own.close, "an update ended halfway")


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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_input_that_finds_no_memory_on_the_host():
    """Nothing is left whose end would fail."""
    full = patch.object(activations, "pinned_zeros", side_effect=MemoryError)
    with streaming(qwen3(), choice=Choice(inputs="host")) as (model, _), full, pytest.raises(MemoryError):
        model_loss(model, data()[0])


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
