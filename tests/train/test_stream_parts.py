"""Whatever is frozen, left out, dropped out or kept in 16 bits: the bits are plain PyTorch's."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import Masters, case, compare, pieces, streaming
from stream_loops import CLIPS, adamw, grouped, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import adapted, adapters_of, blocks, data, llama, partly_used, qwen3
from torch import Tensor, nn

from t1lib.plan.cost import HOST_GRADS, Choice


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


def two_adapters() -> nn.Module:
    """In float32, for 16-bit weights. The second ones are frozen."""
    model = adapted(torch.bfloat16, base=llama, dropout=0.0)
    model.add_adapter("other", model.peft_config["default"])
    for name, param in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(param, std=0.02)
    return model


def beside_reference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in a loss of preferences: others' adapters in between."""
    loss = model_loss(model, batch)
    model.set_adapter("other")
    with torch.no_grad():
        known = model_loss(model, batch)
    model.set_adapter("default")
    return loss * known


half_decay = partial(adamw, weight_decay=0.5)
dropping, adapters, padded = partial(blocks, dropout=0.3), partial(pieces, layers=adapters_of), data(padded=True)
CASES: dict[str, dict[str, Any]] = {
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
    "adapters in float32, others for reference": case(two_adapters, loss=beside_reference),
    "adapters in float32": case(partial(adapted, torch.bfloat16, base=llama)),
    "dropout in attention": case(partial(qwen3, attention_dropout=0.3), loss=two_forwards, **pieces(None)),
    "dropout, kept": case(dropping, loss=two_forwards, choice=Choice(keep=2), **pieces(None)),
    "dropout, from the host": case(dropping, loss=two_forwards, choice=Choice(inputs="host"), **pieces(None)),
    "dropout, some rows at a time": case(dropping, **pieces(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_changes_no_bits(name):
    compare(**CASES[name])


def test_updates_of_the_cpu_in_the_backward_share_a_few_host_buffers():
    model = qwen3(num_hidden_layers=HOST_GRADS + 3)
    with streaming(model, sgd(model), choice=Choice(host_share=1.0), update_in_backward=True) as (streamed, own):
        train(streamed, own)
        assert len({layer.grads.data_ptr() for layer in own._engine.host}) == HOST_GRADS


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
