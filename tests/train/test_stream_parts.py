"""Wherever weights, state and activations are, whatever is frozen or dropped out: the bits are plain PyTorch's."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from stream_cases import Masters, compare, in_pieces, streaming
from stream_loops import CLIPS, adamw, evaluated, grouped, loop, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, adapted, adapters_of, blocks, data, layers_of, llama, partly_used, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from t1lib.plan.cost import HOST_GRADS, Choice

PLACE = ("device", "host")
PLACES = [
    Choice(*values, grads=PLACE[number % 2])
    for number, values in enumerate(product((2, 3), (0, 1, 4), (0, 2, 4), PLACE, PLACE))
]
SHARES = [0.0, 0.5, 1.0]


def everything(clip, count: int = 4):
    """Loops in which whatever can still be under way meets whatever comes next."""
    rates = partial(LambdaLR, lr_lambda=lambda step: 0.8**step)
    return loop(batches=data(count, padded=True), clip=clip, schedule=rates, after=evaluated)


@pytest.mark.parametrize("at, place", list(enumerate([*PLACES[::11], PLACES[-1]])))
def test_placement_changes_no_bits(at, place):
    """However layers, activations, state and updates are spread: with clipping for every other one."""
    choice = replace(place, host_share=SHARES[at % 3])
    compare(qwen3, grouped, everything(own_clip if at % 2 else None), choice=choice)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_placements_change_no_bits(place):
    for share, build, clip in product(SHARES, (llama, blocks), (None, torch_clip)):
        compare(build, grouped, everything(clip, 6), choice=replace(place, host_share=share))


@pytest.mark.parametrize(
    "choice",
    [Choice(host_share=1.0), Choice(resident=1, keep=2, host_share=0.5), Choice(3, inputs="host", outer="host")],
    ids=str,
)
def test_updates_in_the_backward_change_no_bits(choice):
    for optimizer in (grouped, sgd):
        compare(qwen3, optimizer, everything(None), choice=choice, update_in_backward=True)


def test_updates_of_the_cpu_in_the_backward_share_a_few_host_buffers():
    model = qwen3(num_hidden_layers=HOST_GRADS + 3)
    with streaming(model, sgd(model), choice=Choice(host_share=1.0), update_in_backward=True) as (streamed, own):
        train(streamed, own)
        assert len({layer.grads.data_ptr() for layer in own._engine.host}) == HOST_GRADS


@pytest.mark.parametrize("options", [{}, {"choice": Choice(slots=3, host_share=0.5)}], ids=str)
def test_the_schedule_changes_no_bits(options):
    compare(llama, grouped, everything(own_clip), overlap=False, **options)


@pytest.mark.parametrize("clip", [own_clip, torch_clip])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"zero": False}], ids=str)
def test_gradients_that_wait_on_the_device(options, clip):
    """Until more of them come, or until somebody looks at them."""
    compare(qwen3, sgd, loop(batches=data(6), clip=clip, **options), choice=Choice(resident=1, grads="device"))


# -- 16 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, make, share", [("qwen3", adamw, 0.5), ("blocks", sgd, 0.0), ("blocks", adamw, 1.0)])
def test_bfloat16_has_float32_masters(kind, make, share):
    build = partial(MODELS[kind], torch.bfloat16)
    compare(build, make, usual=lambda model: Masters(make(model)), choice=Choice(host_share=share, outer="host"))


def test_state_in_the_parameters_own_dtype():
    """Without masters it is what plain PyTorch does."""
    compare(partial(qwen3, torch.bfloat16), sgd, master_weights=None)
    compare(partial(qwen3, torch.bfloat16), adamw, loop(clip=torch_clip), master_weights=None)


@pytest.mark.parametrize(
    "layout, clip", [({"master_weights": "split"}, None), ({"moments": "bfloat16"}, None), ({}, "optimizer")], ids=str
)
def test_smaller_state_and_clipped_masters_are_close(layout, clip):
    """Split masters are rounded with ties away from zero, 16-bit moments with noise. The norm is that of the gradients
    in float32; PyTorch's function would round it to 16 bits."""
    model, plain = (llama(torch.bfloat16) for _ in range(2))
    reference = Masters(grouped(plain))
    expected = train(plain, reference, data(10), clip=CLIPS[clip])
    with streaming(model, grouped(model), **layout) as (streamed, own):
        found = train(streamed, own, data(10), clip=CLIPS[clip])
        assert found[:2] == pytest.approx(expected[:2], rel=1e-6 if clip else 1e-2)
        assert found == pytest.approx(expected, rel=2e-2 if clip else 1e-2)
        assert_close_masters(own, reference, 0.05)


def assert_close_masters(optimizer: Any, reference: Masters, most: float) -> None:
    """Distances are measured against how far the masters have moved since they were 16-bit weights."""
    found, expected = (each.state_dict()["state"] for each in (optimizer, reference))
    for index, slots in expected.items():
        master, first = slots["master"], slots["exp_avg"]
        assert found[index]["master"].dtype == torch.float32
        moved = 10 * 0.003 * math.sqrt(master.numel())
        assert (found[index]["master"] - master).norm() < most * moved, index
        assert (found[index]["exp_avg"].float() - first).norm() < 5 * most * first.norm(), index


def test_placement_changes_no_bits_of_clipped_masters():
    losses = []
    for choice in (
        Choice(), Choice(resident=2, keep=1), Choice(outer="host"), Choice(host_share=0.5), Choice(grads="device")
    ):  # fmt: skip
        with streaming(llama(torch.bfloat16), choice=choice) as (streamed, own):
            losses.append(train(streamed, own, clip=own_clip))
    assert all(each == losses[0] for each in losses)


def test_an_update_starts_from_weights_written_before_the_step():
    """As without streaming: also where a master stands behind them."""

    def zeroed(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()

    found = []
    for stream in (True, False):
        model = blocks(torch.bfloat16)
        with streaming(model, adamw(model, lr=1e-3)) if stream else nullcontext((model, adamw(model, lr=1e-3))) as both:
            train(*both, data(2), clip=zeroed)
            found.append({name: value.abs().max().item() for name, value in model.state_dict().items()})
    assert found[0] == pytest.approx(found[1], rel=1e-2)


# -- frozen, unused and changed parameters -----------------------------------------------------------------------------


FROZEN = {
    "embedding": lambda name: "embed" in name,
    "lower layers": lambda name: "embed" in name or ".0." in name or ".1." in name,
    "upper layers": lambda name: ".2." in name or ".3." in name,
    "norms inside layers": lambda name: "norm" in name and "blocks" in name,
    "all of a layer but its norms": lambda name: any(f".{i}." in name for i in range(4)) and "norm" not in name,
    "all but the layers": lambda name: not any(f".{i}." in name for i in range(4)),
    "all but the head": lambda name: "head" not in name,
}


def without(frozen: Any, build: Any = blocks) -> Any:
    def made() -> nn.Module:
        model = build()
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen(name))
        return model

    return made


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(frozen):
    compare(without(FROZEN[frozen]), adamw, loop(clip=own_clip if frozen != "all but the head" else None))
    if frozen == "embedding":  # where it is tied, too
        compare(without(FROZEN[frozen], qwen3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_a_gradient_do_not_decay(dtype):
    make = partial(adamw, weight_decay=0.5)
    masters = {"usual": lambda model: Masters(make(model))} if dtype == torch.bfloat16 else {}
    compare(partial(partly_used, dtype), make, **masters)


def test_what_the_optimizer_leaves_out_stays():
    def without_layer(model: nn.Module) -> torch.optim.Optimizer:
        left = {"blocks.1.up.weight", "head.bias"}
        params = [p for name, p in model.named_parameters() if name not in left and "unused" not in name]
        return torch.optim.AdamW(params, lr=0.01)

    compare(partly_used, without_layer)


AWAY: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "one": lambda name: name == "up.bias",
    "all but one": lambda name: name != "up.bias",
}


@pytest.mark.parametrize("clip", [None, own_clip], ids=["", "clipped"])
@pytest.mark.parametrize("away", AWAY)
def test_a_gradient_that_the_loop_changes_or_takes_away(away, clip):
    """The update and the norm take what the loop left in `grad`. It scales gradients in place, replaces one, adds to
    one, and takes away those of a layer, at which it has not looked, or some of them, or sets the only one left."""

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


# -- adapters and dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout, clip", [(0.0, None), (0.05, "optimizer"), (0.5, "torch")])
def test_adapters(dropout, clip):
    """Dropout draws the same numbers again when a layer is recomputed."""
    build = partial(adapted, dropout=dropout)
    compare(build, adamw, loop(clip=CLIPS[clip]), lambda model: in_pieces(adapters_of(model)))


def test_other_adapters():
    """In micro-batches; and in float32, of a bfloat16 base."""
    padded = loop(batches=data(padded=True))
    compare(adapted, adamw, padded, lambda model: in_pieces(adapters_of(model), 2), micro_batch=2)
    compare(partial(adapted, torch.bfloat16, base=llama))


@pytest.mark.parametrize("choice", [Choice(), Choice(keep=2), Choice(inputs="host")], ids=str)
def test_dropout(choice):
    """In the layers, and in the attention of a model of transformers."""
    build = partial(qwen3, attention_dropout=0.3) if choice == Choice() else partial(blocks, dropout=0.3)
    compare(build, adamw, loop(loss=two_forwards), lambda model: in_pieces(layers_of(model)), choice=choice)


def test_dropout_in_micro_batches():
    compare(partial(blocks, dropout=0.3), reference=lambda model: in_pieces(layers_of(model), 3), micro_batch=3)
