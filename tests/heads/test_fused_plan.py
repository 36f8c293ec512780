"""The planner of head `fused`: budgets, layouts and shared plans, at real sizes, without a device."""

import random
from functools import partial
from itertools import accumulate, product
from types import SimpleNamespace

import pytest
import torch
from head_cases import least_of

from t1lib.heads.fused_plan import TILES, Device, Shape, bytes_needed, copies, device_of, early_from, layout, plan
from t1lib.heads.options import Tensors, evenly_spaced

HOPPER, INTERPRETER = Device("hopper", 132), Device("interpreter", 4)
SHAPES = {  # N, V, D
    "one token": (1, 257, 64),
    "small": (2048, 32000, 256),
    "Gemma 2": (8192, 256000, 2304),
    "Qwen3": (32768, 151936, 1024),
    "long": (131072, 128256, 4096),
}
MIB = 2**20
OTHERS = ({}, {"de": False}, {"dw": False}, {"ranks": 2}, {"copies": 300 * MIB}, {"compute": torch.float32})
by_kind = pytest.mark.parametrize("kind", ["early", "late", "loss"])


def shape_of(name: str, compute: torch.dtype = torch.bfloat16, **other) -> Shape:
    return Shape(*SHAPES[name], compute, **{"de": True, "dw": True, **other})


def keeps(kind: str, shape: Shape, budget: int, device: Device) -> None:
    """Assert that a plan keeps to its budget and covers every token once."""
    found = plan(kind, shape, budget, device)
    counted = shape if kind != "loss" else shape._replace(de=False, dw=False)
    assert bytes_needed(counted, found, kind == "early") <= budget
    tile = TILES[device.kind, shape.compute.itemsize]
    starts, sizes = zip(*found.bounds(shape.tokens, tile.m), strict=True)
    assert [*starts, shape.tokens] == [0, *accumulate(sizes)] and max(sizes) <= found.capacity
    assert min(sizes[:-1], default=tile.m) % tile.m == 0
    assert kind != "early" or found.columns == shape.vocab


@by_kind
def test_every_budget_from_the_least_on_is_kept(kind):
    draw, devices = random.Random(3), (HOPPER, INTERPRETER, Device("other", 80))
    cases = list(product([shape_of(name, **other) for name in SHAPES for other in OTHERS], devices[:2]))
    for _ in range(50):
        n, v, d = (int(2 ** draw.uniform(*logs)) for logs in ((9, 13), (6, 12), (5, 8)))
        compute, ranks = draw.choice([torch.bfloat16, torch.float32]), draw.choice([0, 2])
        shape = Shape(n, v, d, compute, kind == "loss" or draw.random() < 0.8, True, 0, ranks)
        cases.append((shape, draw.choice(devices)))
    for shape, device in cases:
        smallest = least_of(partial(plan, kind, shape, device=device))
        for budget in (smallest, smallest + 2**33, *(int(smallest * 2 ** draw.uniform(0, 3)) for _ in range(2))):
            keeps(kind, shape, budget, device)
        if kind == "early":  # from this limit on the forward makes the gradients
            limit = early_from(*shape[:3], shape.compute.itemsize, cuda=device != INTERPRETER)
            keeps(kind, shape, limit + shape.copies, device)


@pytest.mark.parametrize("kind", ["early", "late"])
@pytest.mark.parametrize("name", SHAPES)
def test_buffers_lie_apart_within_what_is_counted(name, kind):
    launch = pytest.importorskip("t1lib.heads.fused_launch", exc_type=ImportError)
    shape = shape_of(name, ranks=2)
    found = plan(kind, shape, None, HOPPER)
    end = 0
    for name, tensor in launch.allocate(torch.device("meta"), layout(shape, found, kind == "early")).items():
        size, (rows, columns), (stride, one) = tensor.element_size(), tensor.shape, tensor.stride()
        start = tensor.storage_offset() * size
        assert start >= end and start % 16 == 0 and stride * size % 16 == 0 and one == 1 and stride >= columns, name
        end = start + ((rows - 1) * stride + columns) * size
    assert end <= tensor.untyped_storage().nbytes() <= bytes_needed(shape, found, kind == "early")


@by_kind
def test_chunks_are_as_many_as_asked_for_fewer_with_more_memory_and_the_same_for_neighbouring_lengths(kind):
    plans = {n: plan(kind, shape_of("Qwen3")._replace(tokens=n), 512 * MIB, HOPPER) for n in range(4097, 4225)}
    assert len({id(p) for p in plans.values()}) == 1
    if kind == "loss":
        return
    counts = [plan(kind, shape_of("Gemma 2"), size * MIB, HOPPER).chunks for size in (256, 512, 1024, 4096)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    for chunks in (3, 10**6):
        found = plan(kind, shape_of("small"), None, HOPPER, chunks)
        assert found.chunks == min(chunks, 16) and len(list(found.bounds(2048, 128))) == found.chunks


@pytest.mark.parametrize("hip, kind", [(None, "hopper"), ("6.4", "other")])
def test_amds_ninth_generation_is_not_hopper(hip, kind, monkeypatch):
    properties = SimpleNamespace(major=9, minor=4, multi_processor_count=304)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert device_of(torch.device("cuda")) == Device(kind, 304)
    assert device_of(torch.device("cpu")).kind == "interpreter"


def test_an_input_whose_tokens_are_not_evenly_spaced_is_copied_and_the_copy_counts():
    e, wide, w = torch.zeros(2, 5, 8), torch.zeros(2, 5, 16), torch.zeros(3, 8)
    even = [e, e[:1, :-1], e[:, :1], e.flatten(0, 1)[::2], e.transpose(0, 1)[:1], wide[..., :8]]
    for given in (*even, e[:, :-1], e.transpose(0, 1), e.expand(2, 2, 5, 8)):
        copied = given.flatten(0, -2).untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        assert copies(Tensors(given, w, None, None, None, None), e.dtype, 3) == copied * given.nbytes, given.shape


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_the_compiler_need_not_know_how_many_tokens_are_evenly_spaced():
    def chosen(e, kept):
        e = e[kept][None]
        return e * evenly_spaced(e)

    e, kept = torch.ones(5, 8), torch.arange(5) > 1
    assert torch.equal(torch.compile(chosen, fullgraph=True, backend="eager")(e, kept), e[None, 2:])
