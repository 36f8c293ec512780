"""What is changed between a forward and its backward is refused, as plain PyTorch refuses it. At other times it
counts, as there."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from refusals import refused
from stream_cases import assert_same_weights, streaming, weights
from stream_loops import adamw, model_loss, sgd, train
from stream_models import Blocks, adapted, blocks, data, layers_of
from torch import Tensor, nn

from t1lib.errors import T1Error
from t1lib.plan.cost import Choice

BATCHES = data(4)
PLACES = {
    "streamed": Choice(),
    "kept": Choice(keep=4),
    "on the host": Choice(inputs="host", outer="host", host_share=1.0),
    "resident": Choice(resident=2),
    "resident and kept": Choice(resident=4, keep=4, outer="host"),
}


def embedded(model: Blocks, number: int = 0) -> Tensor:
    return model.embed(BATCHES[number]["input_ids"])


def a_mask(model: Blocks, optimizer: Any) -> Tensor:
    """It is filled anew for a second forward."""
    mask = torch.zeros(7, 7)
    first = model.blocks[0](embedded(model), mask)
    second = model.blocks[0](embedded(model, 1), mask.fill_(1.0).tril_())
    return (first * second).sum()


def hidden_states(model: Blocks, optimizer: Any, layers: int = 1, factor: float = 2.0) -> Tensor:
    """The first layer's input, when this many layers have run."""
    hidden = out = embedded(model) * 1.0
    for block in model.blocks[:layers]:
        out = block(out)
    hidden.mul_(factor)
    return out.square().sum()


def a_weight(model: Blocks, optimizer: Any, name: str) -> Tensor:
    loss = model_loss(model, BATCHES[0])
    with torch.no_grad():
        model.get_parameter(name).mul_(0.9)
    return loss


def everything(model: nn.Module, optimizer: Any) -> Tensor:
    """By a step on another batch."""
    late = model_loss(model, BATCHES[0])
    train(model, optimizer, BATCHES[1:2])
    return late


CHANGES: dict[str, Callable[..., Tensor]] = {
    "a mask": a_mask,
    "hidden states": hidden_states,
    **{name: partial(a_weight, name=name) for name in ("head.weight", "blocks.0.up.weight", "blocks.3.qkv.weight")},
    "everything": everything,
}


def assert_as_plain(run: Callable[[Any, Any], object], choice: Choice) -> None:
    """That `run(model, optimizer)` leaves a streamed model with a plain one's weights."""
    run(plain := blocks(), adamw(plain))
    with streaming(blocks(), choice=choice) as (streamed, own):
        run(streamed, own)
        assert_same_weights(streamed, plain)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_a_change_between_forward_and_backward_is_refused(change, place):
    def run(model: nn.Module, optimizer: Any) -> None:
        train(model, optimizer, BATCHES[:1])
        late = CHANGES[change](model, optimizer)
        with pytest.raises((T1Error, RuntimeError), match=r"changed in place|updated since|modified by an inplace"):
            late.backward()
        optimizer.zero_grad()
        train(model, optimizer, BATCHES[2:])

    assert_as_plain(run, PLACES[place])


def test_adapters_are_updated_between_forward_and_backward():
    with streaming(adapted()) as (model, own):
        late = everything(model, own)
        with pytest.raises((T1Error, RuntimeError)):
            late.backward()


def test_an_input_that_has_left_for_the_host_may_change():
    with streaming(blocks(), choice=PLACES["on the host"]) as (model, own):
        grads = []
        for factor in (1.0, 2.0):
            hidden_states(model, own, 4, factor).backward()
            grads.append({name: param.grad.clone() for name, param in model.named_parameters() if "block" in name})
            own.zero_grad()
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def of_the_embedding(model: Blocks) -> Tensor:
    return embedded(model, 3).square().sum()


def of_a_layer(model: Blocks) -> Tensor:
    return model.blocks[0](embedded(model, 3)).square().sum()


def of_the_head(model: Blocks) -> Tensor:
    return model.head(torch.ones(4, 32)).square().sum()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("loss", [of_the_embedding, of_a_layer, of_the_head])
def test_gradients_that_come_after_a_step_count_in_the_next(loss, before):
    """While the update waits for a forward through the last layer. before: the forward comes before the step"""
    if before and loss is of_a_layer:
        pytest.skip("refused, as in plain PyTorch")

    def run(model: Blocks, optimizer: Any) -> None:
        for number in range(3):
            model_loss(model, BATCHES[number]).backward()
            late = loss(model) if before else None
            optimizer.step()
            (late if before else loss(model)).backward()
            optimizer.step()

    assert_as_plain(run, Choice(outer="host"))


@pytest.mark.parametrize("place", PLACES)
def test_weights_written_through_an_alias(place):
    """Taken once, and written to after each `drain()`."""

    def run(model: nn.Module, optimizer: Any) -> None:
        held = [param.detach() for param in layers_of(model).parameters()]
        for number in range(3):
            train(model, optimizer, BATCHES[number : number + 1])
            getattr(optimizer, "drain", lambda: None)()
            for weight in held:
                weight.mul_(0.9)

    assert_as_plain(run, PLACES[place])


@pytest.mark.parametrize("options", [{}, {"moments": "bfloat16"}], ids=str)
def test_an_evaluation_in_inference_mode_comes_before_the_first_update(options):
    """Which is pending then, and needs buffers that later ones use, too."""
    with streaming(blocks(torch.bfloat16), choice=Choice(outer="host"), **options) as (model, own):
        train(model, own, BATCHES[:1])
        with torch.inference_mode():
            model_loss(model, BATCHES[0])
        train(model, own, BATCHES)


def test_an_alias_of_embedding_and_head_is_written_before_the_step():
    """While somebody holds one, their memory is not released, and what is there counts."""

    def run(model: Blocks, optimizer: Any) -> None:
        held = [model.embed.weight.detach(), model.head.weight.detach()]
        for batch in BATCHES:
            model_loss(model, batch).backward()
            for weight in held:
                weight.mul_(0.9)
            optimizer.step()
            optimizer.zero_grad()
            getattr(optimizer, "drain", lambda: None)()

    assert_as_plain(run, Choice(outer="host"))


@pytest.mark.parametrize("place", PLACES)
def test_a_look_at_the_state_within_a_layer(place):
    """By a hook, or by a signal's handler that saves a checkpoint."""
    plain = blocks()
    train(plain, adamw(plain), BATCHES)
    with streaming(blocks(), choice=PLACES[place]) as (model, own):
        model.blocks[1].up.register_forward_hook(lambda *_: own.state_dict() and None)
        train(model, own, BATCHES)
        assert_same_weights(model, plain)


def test_a_layer_that_is_called_within_another():
    with streaming(blocks(), choice=Choice(slots=1)) as (model, _):
        model.blocks[1].up.register_forward_hook(lambda *_: model.blocks[2](torch.ones(1, 2, 32)) and None)
        refused(lambda: model_loss(model, BATCHES[0]), "layer 2 is called within the call of layer 1")


class Counted(nn.Module):
    """Layers that count in an argument how often they were called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, hidden: Tensor, calls: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, calls)
        return hidden.square().sum()


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1.0)
        return super().forward(hidden)


def test_layers_that_write_to_an_argument():
    """Kept, they do as in plain PyTorch; recomputed, they would write again, which is refused in the forward."""

    def run(model: Counted, optimizer: Any) -> Tensor:
        calls = torch.zeros(())
        for _ in range(2):
            model(torch.ones(1, 2, 8), calls).backward()
            optimizer.step()
            optimizer.zero_grad()
        return calls

    calls = run(plain := Counted(), adamw(plain))
    for choice in (Choice(keep=3), Choice()):
        model = Counted()
        with streaming(model, adamw(model), layers=model.layers, choice=choice) as (streamed, own):
            if choice.keep:
                assert torch.equal(run(streamed, own), calls)
                assert_same_weights(streamed, plain)
            else:
                refused(lambda model=streamed, own=own: run(model, own), "layer 0 writes to an argument")


def fail(grad: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("forget", ["zero_grad", "load_state_dict"])
@pytest.mark.parametrize("where", ["embed", "blocks.1", "head"])
def test_an_error_outside_the_layers_ends_an_updating_backward(where, forget):
    """In the gradient of this module's output. The next backward is as ever; after that no other before a step."""
    plain = blocks()
    train(plain, sgd(plain), BATCHES)
    with streaming(model := blocks(), sgd(model), update_in_backward=True) as (model, own):
        train(model, own, BATCHES[:2])
        before, saved = weights(model), deepcopy(own.state_dict())
        hook = model.get_submodule(where).register_forward_hook(
            lambda module, args, out: out.register_hook(fail) and None
        )
        loss = model_loss(model, BATCHES[0])
        hook.remove()
        with pytest.raises(ArithmeticError):
            loss.backward()
        if forget == "zero_grad":
            own.zero_grad()
            model.load_state_dict(before)
        else:
            model.load_state_dict(before)
            own.load_state_dict(saved)
            for param in (*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()):
                param.grad = None
        if forget == "load_state_dict":
            train(model, own, BATCHES[2:])
            assert_same_weights(model, plain)
        loss, again = (model_loss(model, BATCHES[2]) for _ in range(2))
        loss.backward()
        own.zero_grad()
        refused(again.backward, "a second backward before step()")
        own.load_state_dict(saved)
        model_loss(model, BATCHES[2]).backward()
