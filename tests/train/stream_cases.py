"""Comparisons of the tests of `stream`: a streamed model against a plain one, and what both leave behind."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from stream_loops import adamw, evaluated, own_clip, train
from stream_models import Blocks, blocks, data, layers_of
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from t1lib.plan.cost import Choice
from t1lib.train import stream

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "kept": {"choice": Choice(keep=4)},
    "on the host": {"choice": Choice(inputs="host", outer="host", host_share=0.5)},
    "resident": {"choice": Choice(resident=2, keep=2, slots=1)},
    "waiting": {"choice": Choice(host_share=0.5, grads="device")},
    "all resident": {"choice": Choice(resident=4, keep=4, outer="host")},
}
MIXTURES = [  # each with several things elsewhere
    pytest.param({}, id="streamed"),
    pytest.param({"choice": Choice(resident=1, keep=2, host_share=0.5, grads="device")}, id="mixed"),
    pytest.param({"choice": Choice(slots=3, inputs="host", outer="host", host_share=1.0)}, id="host"),
    pytest.param({"choice": Choice(resident=4, outer="host"), "overlap": False}, id="resident"),
]
OPTIONS = {"choice", "gpu_memory", "master_weights", "micro_batch", "overlap", "update_in_backward"}
OPTIONS |= {"reference", "rel", "usual"}


def streamed_with(model: nn.Module, optimizer: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    layers = {"layers": model.blocks} if isinstance(model, Blocks) else {}
    return stream(model, adamw(model) if optimizer is None else optimizer, **(layers | options))


@contextmanager
def streaming(model: nn.Module, optimizer: Any = None, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    """A streamed model and its optimizer (AdamW, if none is given), closed in the end."""
    streamed, own = streamed_with(model, optimizer, **options)
    try:
        yield streamed, own
    finally:
        own.close()


def compare(
    build: Callable[[], nn.Module], optimizer: Callable[..., Any] = adamw, loop: Callable[..., list[float]] = train,
    reference: Callable[[nn.Module], object] | None = None, usual: Callable[..., Any] | None = None, rel: float = 0.0,
    device: str = "cpu", places: Sequence[dict[str, Any]] = ({},), **options: Any,
) -> None:  # fmt: skip
    """Assert that a streamed model trains as a plain one: the same bits of losses, weights, state and random numbers;
    with `rel`, within rounding. `reference` may change the plain model, and `usual` make another optimizer for it. The
    model is streamed once for each of `places`, which are options, too."""
    plain = build().to(device)
    other = (usual or optimizer)(plain)
    if reference is not None:
        reference(plain)
    torch.manual_seed(7)
    expected, drawn = loop(plain, other), torch.get_rng_state()
    assert max(expected) > min(expected) * (1 + 10 * rel)
    for place in places:
        print(place)  # told where one of several fails
        model = build()
        with streaming(model, optimizer(model), device=device, **options | place) as (streamed, own):
            torch.manual_seed(7)
            assert loop(streamed, own) == pytest.approx(expected, rel=rel, abs=0.0)
            if rel:
                assert evaluated(streamed) == pytest.approx(evaluated(plain), rel=rel)
            else:
                assert torch.equal(torch.get_rng_state(), drawn)
                assert_same_state(own, other)
            assert_same_weights(streamed, plain, 100 * rel)
        assert_same_weights(model, plain, 100 * rel)


def case(build: Callable[..., nn.Module], optimizer: Callable[..., Any] = adamw, **given: Any) -> dict[str, Any]:
    """Arguments of `compare`: what neither it nor `stream` takes is for the loop."""
    own = {name: given.pop(name) for name in OPTIONS & given.keys()}
    return {"build": build, "optimizer": optimizer, "loop": partial(train, **given), **own}


def masters(build: Callable[..., nn.Module], make: Callable[..., Any] = adamw, **options: Any) -> dict[str, Any]:
    """Of 16-bit weights."""
    return case(partial(build, torch.bfloat16), make, usual=lambda model: Masters(make(model)), **options)


def pieces(rows: int | None) -> dict[str, Any]:
    """What the reference does, and the streamed model, to run `rows` rows at a time (None: all, and draw again)."""
    return {"reference": lambda model: in_pieces(layers_of(model), rows), "micro_batch": rows}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_weights(model: Any, other: Any, rel: float = 0.0) -> None:
    """Models, or what `weights` gave: the same bits, or `rel` of each weight's norm apart at most."""
    first, second = (m.state_dict() if isinstance(m, nn.Module) else m for m in (model, other))
    assert first.keys() == second.keys()
    apart = {name: (first[name].cpu() - value.cpu()).float().norm() for name, value in second.items()}
    unequal = [name for name, value in second.items() if not apart[name] <= rel * value.float().norm().cpu()]
    assert not unequal, unequal


def assert_same_state(optimizer: Any, other: Any) -> None:
    """The same groups, and per parameter the same tensors; SGD may count its steps, too."""
    first, second = optimizer.state_dict(), other.state_dict()
    for key in ("params", "lr"):
        assert [g[key] for g in first["param_groups"]] == [g[key] for g in second["param_groups"]]
    one, two = first["state"], second["state"]
    for index in one.keys() | two.keys():
        found, expected = ({k: v for k, v in s.get(index, {}).items() if v is not None} for s in (one, two))
        assert found.keys() - {"step"} == expected.keys() - {"step"}, index
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), (index, key)


class Masters:
    """The reference for 16-bit parameters: a plain optimizer that updates float32 copies, which are then rounded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.wide = {p: p.detach().float().requires_grad_() for p in params}
        groups = [{**group, "params": [self.wide[p] for p in group["params"]]} for group in optimizer.param_groups]
        self.inner = type(optimizer)(groups)
        self.param_groups, self.zero_grad = self.inner.param_groups, optimizer.zero_grad

    def step(self) -> None:
        for param, master in self.wide.items():
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, master in self.wide.items():
            param.data.copy_(master.data)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """By a norm in float32."""
        total = get_total_norm([p.grad.float() for p in self.wide if p.grad is not None])
        clip_grads_with_norm_(self.wide, most, total)
        return total

    def state_dict(self) -> dict[str, Any]:
        """As `stream`'s: with the masters."""
        found, masters = self.inner.state_dict(), list(self.wide.values())
        for index, slots in found["state"].items():
            slots["master"] = masters[index].detach()
        return found


def in_pieces(layers: nn.ModuleList, rows: int | None = None) -> None:
    """Make each layer run `rows` rows at a time (None, or with a cache in evaluation: all), under PyTorch's
    recomputation, which draws again."""
    for layer in layers:
        layer.forward = partial(_in_pieces, layer, layer.forward, rows)


def _in_pieces(layer: nn.Module, run: Callable, rows: int | None, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    caches = {name: None for name in ("past_key_values", "cache") if name in kwargs}  # by version of transformers
    rows = None if not layer.training and any(kwargs[name] is not None for name in caches) else rows
    kwargs, whole = kwargs | caches, len(hidden)
    starts = list(range(0, whole, rows or whole))

    def piece(start: int) -> Tensor:
        def cut(value: Any) -> Any:
            per_row = isinstance(value, Tensor) and value.dim() > 1 and len(value) == whole > 1
            return value[start : start + (rows or whole)] if per_row else value

        given = {name: cut(value) for name, value in kwargs.items()}
        return checkpoint(run, *map(cut, (hidden, *args)), use_reentrant=False, **given)

    # The backward begins with the piece that was computed last. Of two sums the order is all one, but not of what
    # dropout draws, which these tests have with two pieces at most.
    outputs = {start: piece(start) for start in (starts if len(starts) < 3 else starts[::-1])}
    return torch.cat([outputs[start] for start in starts])


@cache
def six_steps(build: Callable[..., Any], optimizer: Callable[..., Any] = adamw) -> tuple[nn.Module, Any, list[float]]:
    """A plain model after six clipped steps, its optimizer, and losses and norms."""
    plain = build()
    usual = optimizer(plain)
    return plain, usual, train(plain, usual, data(6), clip=own_clip)


@contextmanager
def going_on(build: Callable[[], nn.Module] = blocks, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    """A streamed model after two steps, and its optimizer. After the body, four more steps are as in a plain run of six
    in which the body did nothing."""
    (plain, usual, expected), batches, model = six_steps(build), data(6), build()
    with streaming(model, adamw(model), **options) as (streamed, own):
        found = train(streamed, own, batches[:2], clip=own_clip)
        yield streamed, own
        assert found + train(streamed, own, batches[2:], clip=own_clip) == expected
        assert_same_weights(streamed, plain)
        assert_same_state(own, usual)


def held_bytes() -> int:
    """Bytes of the storages of all dense tensors that Python can reach."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided and not t.is_nested]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@contextmanager
def all_freed(own: Any) -> Iterator[None]:
    """In which streaming ends: all its buffers are gone after it, though Python collects no cycles meanwhile."""
    schedule, inputs, layers = own._engine.schedule, own._engine.passes._inputs, own._engine.host
    tensors = [*schedule.device_tensors(), *(held.flat for held in layers), *([] if inputs is None else inputs.free)]
    found = [weakref.ref(tensor) for tensor in tensors]
    del schedule, inputs, layers, tensors
    gc.disable()
    try:
        yield
        alive = sum(each() is not None for each in found)
    finally:
        gc.enable()
    assert found and not alive
