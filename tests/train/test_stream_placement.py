"""Where weights, activations, state and updates are changes no bits, with masters or without."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from stream_cases import (
    Masters,
    adamw,
    compare,
    evaluated,
    grouped,
    loop,
    own_clip,
    sgd,
    streaming,
    torch_clip,
    train,
    two_forwards,
)
from stream_models import MODELS, data, llama, qwen3
from torch.optim.lr_scheduler import LambdaLR

from t1lib.plan.cost import HOST_GRADS, Choice

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = {"adamw": adamw, "sgd": sgd}
PLACE = ("device", "host")


PLACES = [
    dict(zip(("slots", "resident", "keep", "inputs", "outer", "grads"), (*values, PLACE[number % 2]), strict=True))
    for number, values in enumerate(product((2, 3), (0, 1, 4), (0, 2, 4), PLACE, PLACE))
]
SHARES = [0.0, 0.5, 1.0]
FEW = [*PLACES[::7], PLACES[-1]]


def everything(clip):
    """Loops in which whatever can still be under way meets whatever comes next."""
    rates = partial(LambdaLR, lr_lambda=lambda step: 0.8**step)
    return loop(batches=data(6, padded=True), clip=clip, schedule=rates, between=evaluated)


@pytest.mark.parametrize("at", range(len(FEW)))
def test_placement_changes_no_bits(at):
    """However layers, activations, state and updates are spread: with clipping for every other one."""
    choice = Choice(**FEW[at], host_share=SHARES[at % 3])
    compare(qwen3, grouped, everything(own_clip if at % 2 else None), choice=choice)


@pytest.mark.parametrize("inputs", ["device", "host"])
def test_two_forwards_with_the_head_on_the_host(inputs):
    """The first forward's output layer reads its weight when layers of the second have run their backward."""
    compare(qwen3, adamw, loop(loss=two_forwards), choice=Choice(outer="host", inputs=inputs))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(map(str, place.values())))
def test_all_placements_change_no_bits(place):
    for share, kind, clip in product(SHARES, ("llama", "blocks"), (None, torch_clip)):
        compare(MODELS[kind], grouped, everything(clip), choice=Choice(**place, host_share=share))


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


@pytest.mark.parametrize(
    "options", [{"overlap": False}, {"overlap": False, "choice": Choice(slots=3, host_share=0.5)}], ids=str
)
def test_the_schedule_changes_no_bits(options):
    compare(llama, grouped, everything(own_clip), **options)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["qwen3", "blocks"])
def test_bfloat16_has_float32_masters(kind, optimizer, share):
    build, make = partial(MODELS[kind], torch.bfloat16), OPTIMIZERS[optimizer]
    compare(build, make, usual=lambda model: Masters(make(model)), choice=Choice(host_share=share, outer="host"))


@pytest.mark.parametrize("layout", [{"master_weights": "split"}, {"moments": "bfloat16"}], ids=str)
def test_smaller_state_is_close(layout):
    """Split masters are rounded with ties away from zero, 16-bit moments with noise."""
    model, plain = (qwen3(torch.bfloat16) for _ in range(2))
    reference = Masters(grouped(plain))
    expected = train(plain, reference)
    with streaming(model, grouped(model), **layout) as (streamed, own):
        assert train(streamed, own) == pytest.approx(expected, rel=1e-2)
        assert_close_masters(own, reference, 0.05)


def test_clipping_with_masters():
    """The norm is that of the gradients in float32; PyTorch's function would round it to 16 bits."""
    model, plain = (llama(torch.bfloat16) for _ in range(2))
    reference = Masters(adamw(plain))
    expected = train(plain, reference, clip=own_clip)
    with streaming(model, adamw(model)) as (streamed, own):
        found = train(streamed, own, clip=own_clip)
        assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
        assert found == pytest.approx(expected, rel=2e-2)
        assert_close_masters(own, reference, 0.05)


@pytest.mark.parametrize(
    "choice",
    [Choice(resident=2, keep=1), Choice(outer="host"), Choice(host_share=0.5), Choice(grads="device")],
    ids=str,
)
def test_placement_changes_no_bits_of_clipped_masters(choice):
    losses = []
    for each in (Choice(), choice):
        model = llama(torch.bfloat16)
        with streaming(model, adamw(model), choice=each) as (streamed, own):
            losses.append(train(streamed, own, clip=own_clip))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("clip", [own_clip, torch_clip])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"zero": False}], ids=str)
def test_gradients_that_wait_on_the_device(options, clip):
    """Until more of them come, or until somebody looks at them."""
    compare(qwen3, sgd, loop(batches=data(9), clip=clip, **options), choice=Choice(resident=1, grads="device"))


def assert_close_masters(optimizer: Any, reference: Masters, most: float) -> None:
    """Distances are measured against how far the masters have moved since they were 16-bit weights."""
    found, expected = (each.state_dict()["state"] for each in (optimizer, reference))
    for index, slots in expected.items():
        master, first = slots["master"], slots["exp_avg"]
        assert found[index]["master"].dtype == torch.float32
        moved = 10 * 0.003 * math.sqrt(master.numel())
        assert (found[index]["master"] - master).norm() < most * moved, index
        assert (found[index]["exp_avg"].float() - first).norm() < 5 * most * first.norm(), index


def test_state_in_the_parameters_own_dtype():
    """Without masters it is what plain PyTorch does."""
    compare(partial(qwen3, torch.bfloat16), sgd, master_weights=None)
    compare(partial(qwen3, torch.bfloat16), adamw, loop(clip=torch_clip), master_weights=None)
