"""Wherever weights, state and activations are, whatever is frozen or dropped out: the bits are plain PyTorch's."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from stream_cases import Masters, case, compare, pieces, streaming
from stream_loops import CLIPS, adamw, evaluated, grouped, loop, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import adapted, adapters_of, blocks, data, llama, partly_used, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from t1lib.plan.cost import HOST_GRADS, Choice

PLACE = ("device", "host")
PLACES = [
    Choice(*values, grads=PLACE[number % 2])
    for number, values in enumerate(product((2, 3), (0, 1, 4), (0, 2, 4), PLACE, PLACE))
]
SHARES = [0.0, 0.5, 1.0]
EARLY = [Choice(host_share=1.0), Choice(resident=1, keep=2, host_share=0.5), Choice(3, inputs="host", outer="host")]


def everything(clip, count: int = 4) -> dict[str, Any]:
    """A loop in which whatever can still be under way meets whatever comes next."""
    rates = partial(LambdaLR, lr_lambda=lambda step: 0.8**step)
    return {"batches": data(count, padded=True), "clip": clip, "schedule": rates, "after": evaluated}


def without(frozen: Callable[[str], bool], build: Any = blocks) -> nn.Module:
    model = build()
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen(name))
    return model


FROZEN: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: "embed" in name,
    "lower layers": lambda name: "embed" in name or ".0." in name or ".1." in name,
    "upper layers": lambda name: ".2." in name or ".3." in name,
    "norms inside layers": lambda name: "norm" in name and "blocks" in name,
    "all of a layer but its norms": lambda name: any(f".{i}." in name for i in range(4)) and "norm" not in name,
    "all but the layers": lambda name: not any(f".{i}." in name for i in range(4)),
}


def some_left_out(model: nn.Module) -> torch.optim.Optimizer:
    left = {"blocks.1.up.weight", "head.bias"}
    return torch.optim.AdamW([p for n, p in model.named_parameters() if n not in left and "unused" not in n], lr=0.01)


def masters(build: Callable[..., nn.Module], make: Callable[..., Any] = adamw, **options: Any) -> dict[str, Any]:
    """Of 16-bit weights."""
    return case(partial(build, torch.bfloat16), make, usual=lambda model: Masters(make(model)), **options)


half_decay, waiting = partial(adamw, weight_decay=0.5), Choice(resident=1, grads="device")
dropping, adapters, padded = partial(blocks, dropout=0.3), partial(pieces, layers=adapters_of), data(padded=True)
CASES: dict[str, dict[str, Any]] = {
    **{
        f"updated in the backward, {optimizer.__name__}, {choice}": case(
            qwen3, optimizer, **everything(None), choice=choice, update_in_backward=True
        )
        for optimizer in (grouped, sgd)
        for choice in EARLY
    },
    **{
        f"nothing overlaps, {choice}": case(llama, grouped, **everything(own_clip), overlap=False, choice=choice)
        for choice in (None, Choice(slots=3, host_share=0.5))
    },
    # until more of them come, or until somebody looks at them
    **{
        f"gradients wait on the device, {clip.__name__}, {own}": case(qwen3, sgd, clip=clip, choice=waiting, **own)
        for clip in (own_clip, torch_clip)
        for own in ({"accumulate": 3}, {"zero": False})
    },
    "masters": masters(qwen3, choice=Choice(host_share=0.5, outer="host")),
    "masters, on the device": masters(blocks, sgd, choice=Choice(host_share=0.0, outer="host")),
    "masters, by the CPU": masters(blocks, choice=Choice(host_share=1.0, outer="host")),
    "16 bits without masters": case(partial(qwen3, torch.bfloat16), sgd, master_weights=None),
    "16 bits, clipped": case(partial(qwen3, torch.bfloat16), clip=torch_clip, master_weights=None),
    **{f"frozen: {name}": case(partial(without, frozen), clip=own_clip) for name, frozen in FROZEN.items()},
    "frozen: all but the head": case(partial(without, lambda name: "head" not in name)),
    "frozen: a tied embedding": case(partial(without, FROZEN["embedding"], qwen3)),
    # parameters without a gradient do not decay
    "without a gradient": case(partly_used, half_decay),
    "without a gradient, masters": masters(partly_used, half_decay),
    "left out of the optimizer": case(partly_used, some_left_out),
    "adapters": case(partial(adapted, dropout=0.0), **adapters(None)),
    # dropout draws the same numbers again
    "adapters, dropout": case(adapted, clip=own_clip, **adapters(None)),
    "adapters, much dropout": case(partial(adapted, dropout=0.5), clip=torch_clip, **adapters(None)),
    "adapters, padded rows": case(adapted, batches=padded, **adapters(2)),
    "adapters in float32": case(partial(adapted, torch.bfloat16, base=llama)),
    "dropout in attention": case(partial(qwen3, attention_dropout=0.3), loss=two_forwards, **pieces(None)),
    "dropout, kept": case(dropping, loss=two_forwards, choice=Choice(keep=2), **pieces(None)),
    "dropout, from the host": case(dropping, loss=two_forwards, choice=Choice(inputs="host"), **pieces(None)),
    "dropout, some rows at a time": case(dropping, **pieces(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_changes_no_bits(name):
    compare(**CASES[name])


@pytest.mark.parametrize("at, place", list(enumerate([*PLACES[::11], PLACES[-1]])))
def test_placement_changes_no_bits(at, place):
    """However layers, activations, state and updates are spread: with clipping for every other one."""
    choice = replace(place, host_share=SHARES[at % 3])
    compare(**case(qwen3, grouped, **everything(own_clip if at % 2 else None), choice=choice))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_placements_change_no_bits(place):
    for share, build, clip in product(SHARES, (llama, blocks), (None, torch_clip)):
        compare(**case(build, grouped, **everything(clip, 6), choice=replace(place, host_share=share)))


def test_updates_of_the_cpu_in_the_backward_share_a_few_host_buffers():
    model = qwen3(num_hidden_layers=HOST_GRADS + 3)
    with streaming(model, sgd(model), choice=Choice(host_share=1.0), update_in_backward=True) as (streamed, own):
        train(streamed, own)
        assert len({layer.grads.data_ptr() for layer in own._engine.host}) == HOST_GRADS


AWAY: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "one": lambda name: name == "up.bias",
    "all but one": lambda name: name != "up.bias",
}


@pytest.mark.parametrize("clip", [None, own_clip], ids=["", "clipped"])
@pytest.mark.parametrize("away", AWAY)
def test_a_gradient_that_the_loop_changes_or_takes_away(away, clip):
    """The update and the norm take what the loop left in `grad`."""

    def changed(model: nn.Module, optimizer: Any) -> Tensor | None:
        for layer in model.blocks[2:]:
            layer.up.weight.grad.mul_(0.5)
        model.blocks[0].up.bias.grad = torch.ones(64)
        model.blocks[2].up.bias.grad += 1
        for name, param in model.blocks[1].named_parameters():
            if AWAY[away](name):
                param.grad = None
        if away == "all but one":
            model.blocks[1].up.bias.grad = torch.ones(64)
        return clip and clip(model, optimizer)

    compare(blocks, loop=loop(batches=data(5), clip=changed))


@pytest.mark.parametrize(
    "layout, clip", [({"master_weights": "split"}, None), ({"moments": "bfloat16"}, None), ({}, "optimizer")], ids=str
)
def test_smaller_state_and_clipped_masters_are_close(layout, clip):
    """Split masters are rounded with ties away from zero, 16-bit moments with noise; the norm is a float32."""
    model, plain = (llama(torch.bfloat16) for _ in range(2))
    reference = Masters(grouped(plain))
    expected = train(plain, reference, data(10), clip=CLIPS[clip])
    with streaming(model, grouped(model), **layout) as (streamed, own):
        found = train(streamed, own, data(10), clip=CLIPS[clip])
        assert found[:2] == pytest.approx(expected[:2], rel=1e-6 if clip else 1e-2)
        assert found == pytest.approx(expected, rel=2e-2 if clip else 1e-2)
        state = own.state_dict()["state"]
    for index, slots in reference.state_dict()["state"].items():
        master, first, moved = slots["master"], slots["exp_avg"], 10 * 0.003 * math.sqrt(slots["master"].numel())
        assert state[index]["master"].dtype == torch.float32
        assert (state[index]["master"] - master).norm() < 0.05 * moved, index
        assert (state[index]["exp_avg"].float() - first).norm() < 0.25 * first.norm(), index


def test_placement_changes_no_bits_of_clipped_masters():
    losses, resident, host = [], Choice(resident=2, keep=1, grads="device"), Choice(outer="host", host_share=0.5)
    for choice in (Choice(), resident, host):
        with streaming(llama(torch.bfloat16), choice=choice) as (streamed, own):
            losses.append(train(streamed, own, clip=own_clip))
    assert all(each == losses[0] for each in losses)


def test_an_update_starts_from_weights_written_before_the_step():
    """As without streaming: also where a master stands behind them."""

    def zeroed(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()

    plain, model = blocks(torch.bfloat16), blocks(torch.bfloat16)
    train(plain, adamw(plain, lr=1e-3), data(2), clip=zeroed)
    with streaming(model, adamw(model, lr=1e-3)) as both:
        train(*both, data(2), clip=zeroed)
    found, expected = ({n: v.abs().max().item() for n, v in m.state_dict().items()} for m in (model, plain))
    assert found == pytest.approx(expected, rel=1e-2)
