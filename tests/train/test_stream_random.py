"""Streamed models in settings drawn by chance, in loops that do something by chance between any two lines: on a CPU the
same bits as plain PyTorch; on a GPU, where copies and updates are delayed by chance, the same within rounding."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import assert_same_weights, in_pieces, streaming
from stream_loops import CLIPS, adamw, evaluated, grouped, model_loss, sgd
from stream_models import LAYERS, MODELS, ROWS, data, layers_of
from torch import nn

from t1lib.plan.cost import Choice
from t1lib.train.lanes import Lane

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OPTIMIZERS = {"adamw": partial(adamw, lr=1e-3), "sgd": sgd, "grouped": partial(grouped, make=torch.optim.SGD)}


class Actions:
    """What a loop does between any two lines; some give a number to compare."""

    def __init__(self, draw: random.Random, model: nn.Module, optimizer: Any) -> None:
        self._draw, self._model, self._optimizer = draw, model, optimizer

    def _param(self) -> nn.Parameter:
        return self._draw.choice(list(self._model.parameters()))

    def evaluates(self) -> float:
        return evaluated(self._model)

    def looks_at_weights(self) -> float:
        return self._param().norm().item()

    def writes_weights(self) -> None:
        with torch.no_grad():
            self._param().mul_(0.9)

    def assigns_weights(self) -> None:
        getattr(self._optimizer, "drain", lambda: None)()
        streamed = {*layers_of(self._model).parameters()}
        param = self._draw.choice([param for param in self._model.parameters() if param not in streamed])
        param.data = param.data * 0.9

    def looks_at_state(self) -> float:
        found = self._optimizer.state_dict()["state"].values()
        each = [slots.get("exp_avg", slots.get("momentum_buffer")) for slots in found]
        return sum(float(state.norm()) for state in each if state is not None)

    def looks_at_gradients(self) -> float:
        grad = self._param().grad
        return -1.0 if grad is None else grad.norm().item()

    def changes_gradients(self) -> None:
        grad = self._param().grad
        if grad is not None:
            grad.mul_(1.5)

    def drops_a_gradient(self) -> None:
        self._param().grad = None

    def drops_a_layers_gradients(self) -> None:
        self._draw.choice(layers_of(self._model)).zero_grad()

    def sets_a_gradient(self) -> None:
        grad = self._param().grad
        if grad is not None:
            grad.fill_(0.1)

    def changes_rates(self) -> None:
        self._draw.choice(self._optimizer.param_groups)["lr"] *= 0.5

    def loads_the_optimizer(self) -> None:
        self._optimizer.load_state_dict(deepcopy(self._optimizer.state_dict()))

    def empties_the_optimizer(self) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": {}, "param_groups": groups})

    def loads_the_model(self) -> None:
        self._model.load_state_dict({name: value * 1.01 for name, value in self._model.state_dict().items()})

    def goes_forward_in_vain(self) -> float:
        return model_loss(self._model, data(3, rows=ROWS, device=DEVICE)[2]).item()

    def waits(self) -> None:
        if GPU:
            torch.cuda.synchronize()

    def keeps_the_device_busy(self) -> None:
        if GPU:
            torch.cuda._sleep(self._draw.randrange(20_000_000))  # cycles


ACTIONS = [name for name in vars(Actions) if not name.startswith("_")]
OF_GRADIENTS = {name for name in ACTIONS if "gradient" in name}
# These would spoil a backward to come.
WRITES = {"writes_weights", "assigns_weights", "loads_the_model", "loads_the_optimizer", "empties_the_optimizer"}


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """What is trained, the options of `stream`, and what each step does."""
    draw = random.Random(seed)
    in_backward, accumulate = draw.random() < 0.3, draw.random() < 0.5
    choice = Choice(
        slots=draw.randint(1, 4), grad_slots=draw.randint(1, 3), resident=draw.choice([0, 0, 1, 2, LAYERS]),
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
            between[place] = [name for name in between[place] if name != "sets_a_gradient"]
        if in_backward:  # the updates have begun by then
            between |= {place: ["keeps_the_device_busy"] for place in ("backward", "clipped")}
        clip = None if in_backward else draw.choice([*CLIPS])
        skipped = not in_backward and draw.random() < 0.1
        none = not accumulate or draw.random() < 0.7
        steps.append({"times": times, "between": between, "clip": clip, "skipped": skipped, "none": none})
    return trained, options, steps


def events(model: nn.Module, optimizer: Any, steps: list[dict[str, Any]], seed: int) -> Iterator[tuple[str, Any]]:
    """Train so; gives what is seen on the way."""
    actions, batches = Actions(random.Random(seed), model, optimizer), iter(data(20, padded=True, device=DEVICE))

    def acts(place: str) -> Iterator[tuple[str, Any]]:
        for name in step["between"][place]:
            found = getattr(actions, name)()
            yield f"{name} after {place}", 0.0 if found is None else found

    for step in steps:
        for _ in range(step["times"]):
            loss = model_loss(model, next(batches))
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
def delays(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[None]:
    """Let the lanes' work begin late by chance, so that what does not wait for it goes wrong."""
    draw, active = random.Random(seed), Lane.active

    def late(lane: Lane) -> Any:
        if lane.own is not None and draw.random() < 0.3:
            with torch.cuda.stream(lane.own):
                torch.cuda._sleep(draw.randrange(5_000_000))
        return active(lane)

    with monkeypatch.context() as patched:
        patched.setattr(Lane, "active", late)
        yield


def check(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    trained, options, steps = drawn(seed)
    plain, model = trained["build"]().to(DEVICE), trained["build"]()
    in_pieces(layers_of(plain), options["micro_batch"])
    usual = trained["optimizer"](plain)
    expected = list(events(plain, usual, steps, seed))
    with delays(monkeypatch, seed), streaming(model, trained["optimizer"](model), device=DEVICE, **options) as own:
        for number, found in enumerate(events(*own, steps, seed)):
            assert found[0] == expected[number][0]
            rel = GPU * (1e-3 if "looks" in found[0] else 1e-4)
            assert found[1] == pytest.approx(expected[number][1], rel=rel, abs=0.01 * rel), (number, found[0], seed)
        assert_same_weights(model, plain, 0.01 * GPU)


@pytest.mark.skipif(GPU, reason="the GPU has its own")
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 100))])
def test_on_a_cpu(monkeypatch, seed):
    check(monkeypatch, seed)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(60))
def test_on_a_gpu(monkeypatch, seed):
    check(monkeypatch, seed)
