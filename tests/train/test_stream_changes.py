"""What is changed between a forward and its backward is refused, as plain PyTorch refuses it. At other times it
counts, as there: see also test_stream.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from refusals import refused
from stream_cases import PLACES, compare, streaming
from stream_loops import adamw, model_loss, train
from stream_models import Blocks, blocks, data, qwen3
from torch import Tensor, nn

from t1lib.errors import T1Error
from t1lib.plan.cost import Choice

BATCHES = data(4)


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


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_backward_is_refused(change):
    def run(model: nn.Module, optimizer: Any) -> list[float]:
        losses = train(model, optimizer, BATCHES[:1])
        late = CHANGES[change](model, optimizer)
        with pytest.raises((T1Error, RuntimeError), match=r"changed in place|updated since|modified by an inplace"):
            late.backward()
        optimizer.zero_grad()
        return losses + train(model, optimizer, BATCHES[2:])

    compare(blocks, loop=run, places=PLACES.values())


def test_an_input_that_has_left_for_the_host_may_change():
    with streaming(blocks(), choice=Choice(inputs="host")) as (model, own):
        grads = []
        for factor in (1.0, 2.0):
            hidden_states(model, own, 4, factor).backward()
            grads.append({name: param.grad.clone() for name, param in model.named_parameters() if "block" in name})
            own.zero_grad()
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_a_layer_that_is_called_within_another():
    with streaming(blocks(), choice=Choice(slots=1)) as (model, _):
        model.blocks[1].up.register_forward_hook(lambda *_: model.blocks[2](torch.ones(1, 2, 32)) and None)
        refused(lambda: model_loss(model, BATCHES[0]), "layer 2 is called within the call of layer 1")


@pytest.mark.parametrize("place", sorted(PLACES.keys() - {"all resident"}))
@pytest.mark.parametrize("masters", ["whole", "split"])
def test_weights_written_by_hand_are_saved_with_their_masters_and_train_on(masters, place):
    """Also what was written, or assigned, last before `close()`."""

    def masters_have_followed() -> None:
        saved = own.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            master, weight = saved[number]["master"].cpu(), param.detach().cpu().float()
            torch.testing.assert_close(master, weight, rtol=4e-3, atol=1e-37)

    model = qwen3(torch.bfloat16)
    with streaming(model, adamw(model, weight_decay=0.0), master_weights=masters, **PLACES[place]) as (streamed, own):
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
        up[2].data = torch.full_like(up[2].detach(), 0.5)
        own.close()
        masters_have_followed()
        assert (up[1] == 0.5).all() and (up[2] == 0.5).all()
