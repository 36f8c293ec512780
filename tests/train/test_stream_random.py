"""Streamed models in settings drawn by chance, in loops that do something by chance between any two lines: on a CPU the
same bits as plain PyTorch, and no races; on a GPU, where work is delayed by chance, the same within rounding."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from races import Races, watched
from stream_cases import assert_same_weights, in_pieces, streaming
from stream_loops import CLIPS, adamw, evaluated, grouped, model_loss, sgd
from stream_models import LAYERS, LENGTH, MODELS, ROWS, data, layers_of
from torch import Tensor, nn

from t1lib.plan.cost import Choice
from t1lib.train.lanes import Lane

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPTIMIZERS = {"adamw": partial(adamw, lr=1e-3), "sgd": sgd, "grouped": partial(grouped, make=torch.optim.SGD)}


def a_param(draw: random.Random, model: nn.Module) -> nn.Parameter:
    return draw.choice(list(model.parameters()))


def assign_weights(draw: random.Random, model: nn.Module, optimizer: Any) -> None:
    getattr(optimizer, "drain", lambda: None)()
    streamed = {*layers_of(model).parameters()}
    param = draw.choice([param for param in model.parameters() if param not in streamed])
    param.data = param.data * 0.9


def look_at_state(draw: random.Random, model: nn.Module, optimizer: Any) -> float:
    found = optimizer.state_dict()["state"].values()
    each = [slots.get("exp_avg", slots.get("momentum_buffer")) for slots in found]
    return sum(float(state.norm()) for state in each if state is not None)


def with_gradient(act: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """Of a parameter, if it has one."""

    def found(draw: random.Random, model: nn.Module, optimizer: Any) -> Any:
        grad = a_param(draw, model).grad
        return -1.0 if grad is None else act(grad)

    return found


def scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * 1.01 for name, value in tensors.items()}


# What a loop does between any two lines, given what draws, the model and its optimizer; a float is to be compared.
ACTIONS: dict[str, Callable[..., Any]] = {
    "evaluates": lambda draw, model, own: evaluated(model),
    "looks at weights": lambda draw, model, own: a_param(draw, model).norm().item(),
    "writes weights": torch.no_grad()(lambda draw, model, own: a_param(draw, model).mul_(0.9)),
    "assigns weights": assign_weights,
    "looks at state": look_at_state,
    "looks at gradients": with_gradient(lambda grad: grad.norm().item()),
    "changes gradients": with_gradient(lambda grad: grad.mul_(1.5)),
    "deletes a gradient": lambda draw, model, own: delattr(a_param(draw, model), "grad"),
    "drops a gradient": lambda draw, model, own: setattr(a_param(draw, model), "grad", None),
    "drops a layer's gradients": lambda draw, model, own: draw.choice(layers_of(model)).zero_grad(),
    "sets a gradient": with_gradient(lambda grad: grad.fill_(0.1)),
    "changes rates": lambda draw, model, own: (group := draw.choice(own.param_groups)).update(lr=group["lr"] / 2),
    "loads the optimizer": lambda draw, model, own: own.load_state_dict(deepcopy(own.state_dict())),
    "empties the optimizer": lambda draw, model, own: own.load_state_dict({**own.state_dict(), "state": {}}),
    "loads the model": lambda draw, model, own: model.load_state_dict(scaled(model.state_dict())),
    "goes forward in vain": lambda draw, model, own: model_loss(model, data(3, rows=ROWS, device=DEVICE)[2]).item(),
    "waits": lambda *_: GPU and torch.cuda.synchronize(),
    "keeps the device busy": lambda draw, *_: GPU and torch.cuda._sleep(draw.randrange(20_000_000)),  # cycles
}
OF_GRADIENTS = {name for name in ACTIONS if "gradient" in name}
# These would spoil a backward to come.
WRITES = {"writes weights", "assigns weights", "loads the model", "loads the optimizer", "empties the optimizer"}


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """What is trained, the options of `stream`, and what each step does."""
    draw = random.Random(seed)
    in_backward, accumulate = draw.random() < 0.3, draw.random() < 0.5
    choice = Choice(
        slots=draw.randint(1, 4), resident=draw.choice([0, 0, 1, 2, LAYERS]),
        keep=draw.choice([0, 0, 1, 2, LAYERS]), host_share=draw.choice([0.0, 0.0, 0.5, 1.0]),
        inputs=draw.choice(["device", "host"]), outer=draw.choice(["device", "host"]),
        grads=draw.choice(["device", "host"]),
    )  # fmt: skip
    options = {"choice": choice, "update_in_backward": in_backward, "accumulate": accumulate}
    options |= {"micro_batch": draw.choice([None, 1, 3]), "overlap": draw.random() < 0.8}
    trained = {"build": MODELS[draw.choice([*MODELS])], "optimizer": OPTIMIZERS[draw.choice([*OPTIMIZERS])]}
    known, steps = [name for name in ACTIONS if not (in_backward and name in OF_GRADIENTS)], []
    for _ in range(5):
        several = accumulate and not in_backward and options["micro_batch"] is None  # else sums are in another order
        times = draw.choice([1, 1, 2, 3]) if several else 1
        places = ["forward", "backward", "clipped", "step", "zeroed"]
        between = {place: draw.sample(known, draw.choice([0, 0, 1, 2])) for place in places}
        between["forward"] = [name for name in between["forward"] if name not in WRITES]
        for place in ("forward", "zeroed"):  # where a gradient would be one to add to
            between[place] = [name for name in between[place] if name != "sets a gradient"]
        if in_backward:  # the updates have begun by then
            between |= {place: ["keeps the device busy"] for place in ("backward", "clipped")}
        clip = None if in_backward else draw.choice([*CLIPS])
        skipped = not in_backward and draw.random() < 0.1
        none = not accumulate or draw.random() < 0.7
        steps.append({"times": times, "between": between, "clip": clip, "skipped": skipped, "none": none})
    return trained, options, steps


def events(model: nn.Module, optimizer: Any, steps: list[dict[str, Any]], seed: int) -> Iterator[tuple[str, Any]]:
    """Train so; gives what is seen on the way."""
    draw, batches = random.Random(seed), iter(data(20, padded=True, device=DEVICE))

    def acts(place: str) -> Iterator[tuple[str, Any]]:
        for name in step["between"][place]:
            found = ACTIONS[name](draw, model, optimizer)
            yield f"{name} after {place}", found if isinstance(found, float) else 0.0

    for step in steps:
        for _ in range(step["times"]):
            length = draw.randint(3, LENGTH)
            loss = model_loss(model, {name: value[:, :length] for name, value in next(batches).items()})
            yield "loss", loss.item()
            yield from acts("forward")
            (loss / step["times"]).backward()
            yield from acts("backward")
        if step["clip"] is not None:
            yield "norm", CLIPS[step["clip"]](model, optimizer).item()
        yield from acts("clipped")
        if not step["skipped"]:
            optimizer.step()
        yield from acts("step")
        optimizer.zero_grad(set_to_none=step["none"])
        yield from acts("zeroed")


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Let the lanes' work begin late by chance, so that what does not wait for it goes wrong."""
    draw, active = random.Random(seed), Lane.active

    def late(lane: Lane) -> Any:
        if lane.own is not None and draw.random() < 0.3:
            with torch.cuda.stream(lane.own):
                torch.cuda._sleep(draw.randrange(5_000_000))
        return active(lane)

    with patch.object(Lane, "active", late):
        yield


def check(seed: int) -> None:
    trained, options, steps = drawn(seed)
    plain, model = trained["build"]().to(DEVICE), trained["build"]()
    in_pieces(layers_of(plain), options["micro_batch"])
    usual = trained["optimizer"](plain)
    expected = list(events(plain, usual, steps, seed))
    lanes = delays(seed) if GPU else watched(races := Races())
    with lanes, streaming(model, trained["optimizer"](model), device=DEVICE, **options) as own:
        for number, found in enumerate(events(*own, steps, seed)):
            assert found[0] == expected[number][0]
            rel = GPU * (1e-3 if "looks" in found[0] else 1e-4)
            assert found[1] == pytest.approx(expected[number][1], rel=rel, abs=0.01 * rel), (number, found[0], seed)
        assert_same_weights(model, plain, 0.01 * GPU)
    assert GPU or not races.found, seed


@pytest.mark.skipif(GPU, reason="the GPU has its own")
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 100))])
def test_on_a_cpu(seed):
    check(seed)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(60))
def test_on_a_gpu(seed):
    check(seed)
