"""Plans of head `fused`: tile sizes by architecture, and chunk sizes from a budget of bytes."""

from functools import cache
from typing import NamedTuple

import torch

from t1lib.heads.contract import need_workspace

DEFAULT_WORKSPACE = 512 * 2**20  # near the speed of whole logits, and no more than the weight gradient of a small model
LOSS_WORKSPACE = 16 * 2**20  # for the loss alone more memory brings nothing
TOKEN_BYTES = 192  # order, sort keys and their copies, statistics and factors of a token
CLASS_BYTES = 2  # which of the frequent targets a class is
SLACK = 3 * 2**20  # CUDA's caching allocator may hand out so much more than asked for
FREQUENT = 1024  # targets whose rows of dW add up in float32 over the chunks, at most
OVERHEAD = 2.8  # of a tile's epilogue, in steps of its product (measured, docs/log.md)
LAUNCHES = 60  # of a chunk's small kernels, in such steps


class Tiles(NamedTuple):
    """Tile of a product (m × n, k at a time), warps a program, and stages of its pipelines: logits, other products."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    product_stages: int


TILES: dict[tuple[str, int], Tiles] = {
    ("hopper", 2): Tiles(128, 256, 64, 8, 3, 4),  # measured: H200
    ("hopper", 4): Tiles(128, 128, 32, 8, 3, 3),  # right, not tuned
    ("other", 2): Tiles(128, 128, 32, 4, 3, 3),  # 48 KiB of shared memory: Ampere, Ada, Blackwell; not measured
    ("other", 4): Tiles(64, 64, 32, 4, 2, 2),
    ("interpreter", 2): Tiles(32, 64, 32, 4, 1, 1),
    ("interpreter", 4): Tiles(32, 64, 32, 4, 1, 1),
}
"""By architecture and bytes an element. Hopper alone could be measured; the others are a safe choice."""


class Device(NamedTuple):
    """What a plan needs to know: a key of `TILES`, and multiprocessors."""

    kind: str
    units: int

    @property
    def tma(self) -> bool:
        """Whether tiles are copied by descriptor."""
        return self.kind == "hopper"


def device_of(device: torch.device) -> Device:
    """Describe a CUDA device; any other one is Triton's interpreter."""
    if device.type != "cuda":
        return Device("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    kind = "hopper" if properties.major == 9 else "other"
    return Device(kind, properties.multi_processor_count)


class Shape(NamedTuple):
    """Tokens N, vocabulary V, hidden size D, dtype of the products, and which of input and weight want a gradient."""

    tokens: int
    vocab: int
    hidden: int
    compute: torch.dtype
    de: bool
    dw: bool


class Buffer(NamedTuple):
    """A matrix in the workspace, each row on a 16-byte boundary."""

    height: int
    width: int
    dtype: torch.dtype

    @property
    def stride(self) -> int:
        return up(self.width, 16 // self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return up(self.height * self.stride * self.dtype.itemsize, 256)


Layout = dict[str, Buffer]


def allocate(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    """The buffers of a plan, uninitialised, in one piece of memory."""
    memory = torch.empty(sum(b.nbytes for b in layout.values()), dtype=torch.uint8, device=device)
    found, start = {}, 0
    for name, b in layout.items():
        whole = memory[start : start + b.height * b.stride * b.dtype.itemsize].view(b.dtype)
        found[name] = whole.view(b.height, b.stride)[:, : b.width]
        start += b.nbytes
    return found


class Work(NamedTuple):
    """How a chunk's products are dealt: the logits' columns in `splits`, dE in `parts` sums over ranges of columns."""

    splits: int
    parts: int


class Early(NamedTuple):
    """Gradients in the forward: `chunks` of tokens, at most `capacity` in each.

    Where every token counts the first `longer` of them are one row block longer than the others.
    """

    capacity: int
    chunks: int
    longer: int
    long: Work
    short: Work

    def work(self, chunk: int) -> Work:
        return self.long if chunk < self.longer or not self.longer else self.short


class Late(NamedTuple):
    """Gradients in the backward: `chunks` of at most `capacity` tokens, `columns` of the vocabulary at a time.

    The loss alone: no columns, the vocabulary in `splits` parts.
    """

    capacity: int
    chunks: int
    columns: int
    splits: int = 0


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@cache
def splits_of(blocks: int, tiles: int, units: int) -> int:
    """Parts of the vocabulary, so that row blocks times parts fill the multiprocessors in whole waves."""

    def waves(s: int) -> float:
        return -(-blocks * s // units) * (-(-tiles // s) + 0.3)

    return min(range(1, min(64, tiles) + 1), key=waves)


def _pieces(tokens: int, tile: int, chunks: int | None = None) -> list[tuple[int, int]]:
    """(chunks, capacity) to choose from, in whole row blocks, the largest first; `chunks`: that one alone."""
    blocks = -(-max(tokens, 1) // tile)
    counts = range(1, blocks + 1) if chunks is None else [min(chunks, blocks)]
    sizes = sorted({-(-blocks // c) for c in counts}, reverse=True)
    return [(-(-blocks // s), s * tile) for s in sizes]


def _budget(shape: Shape, workspace: int | None, default: int) -> int:
    """Bytes that the plan may use; the default does not count what grows with the tokens whatever the plan."""
    return default + TOKEN_BYTES * shape.tokens if workspace is None else workspace


def _rows(shape: Shape, capacity: int, splits: int, copies: int = 1) -> Layout:
    """What any plan holds of a chunk: packed hidden states (in `copies`), and sums over the vocabulary."""
    return {
        "x": Buffer(copies * capacity, shape.hidden, shape.compute),
        "target": Buffer(1, capacity, torch.int32),
        "flag": Buffer(1, capacity, torch.int32),
        "parts": Buffer(3 * splits, capacity, torch.float32),
    }


def early_layout(shape: Shape, plan: Early) -> Layout:
    """Buffers of a forward that makes gradients; `Frequent` and `kernels.rows.scale_rows` say what they hold."""
    c = plan.capacity
    layout = _rows(shape, c, max(plan.long.splits, plan.short.splits), 1 + shape.dw)
    layout |= {"z": Buffer(c, shape.vocab, shape.compute), "per_row": Buffer(2, c, torch.float32)}
    if shape.de:
        layout["de"] = Buffer(plan.long.parts * c, shape.hidden, torch.float32)
    if shape.dw:
        height = min(FREQUENT, shape.tokens)
        layout["columns"] = Buffer(c, height, shape.compute)
        layout["sums"] = Buffer(height, shape.hidden, torch.float32)
    return layout


def late_layout(shape: Shape, plan: Late) -> Layout:
    """Buffers of a backward that makes the logits again; of the loss alone where plan.columns is 0."""
    layout = _rows(shape, plan.capacity, plan.splits)
    if plan.columns:
        layout["z"] = Buffer(plan.capacity, min(plan.columns, shape.vocab), shape.compute)
        if shape.de:
            layout["de"] = Buffer(plan.capacity, shape.hidden, torch.float32)
    return layout


def _bytes(shape: Shape, layout: Layout) -> int:
    """Of a plan, with what is held outside of its layout."""
    loose = TOKEN_BYTES * shape.tokens + CLASS_BYTES * shape.vocab * shape.dw + 24 * shape.hidden
    return sum(b.nbytes for b in layout.values()) + loose + SLACK


def _chunk_cost(shape: Shape, tiles: Tiles, device: Device, blocks: int, work: Work) -> float:
    """Steps of a multiprocessor that a chunk of `blocks` row blocks takes, a step being a product of m × n × k."""
    across, columns, steps = -(-shape.hidden // tiles.n), -(-shape.vocab // tiles.n), -(-shape.vocab // tiles.k)
    waves = -(-blocks * work.splits // device.units) * -(-columns // work.splits)
    logits = waves * (-(-shape.hidden // tiles.k) + OVERHEAD)
    unit = -(-steps // work.parts) + OVERHEAD
    units = blocks * across * work.parts * shape.de
    longest = -(-units // device.units) * unit
    inner = blocks * tiles.m // tiles.k
    dw = -(-shape.vocab // tiles.m) * across * (inner + OVERHEAD) * shape.dw
    even = max((units * unit + dw) / device.units, 1.0)
    products = max(longest, even * (1 + 0.6 * (1 - min(longest / even, 1)) / inner))  # units of dE hide dW's traffic
    return logits + products * (1 + 0.002 * work.parts) + LAUNCHES


def _early_plan(
    shape: Shape, tiles: Tiles, device: Device, chunks: int, capacity: int, parts: int
) -> tuple[float, Early]:
    """(cost, plan) where the longest chunk's dE is in `parts` sums."""
    columns = -(-shape.vocab // tiles.n)
    short, longer = divmod(-(-max(shape.tokens, 1) // tiles.m), chunks)

    def best(blocks: int, choices: range) -> tuple[float, Work]:
        splits = splits_of(blocks, columns, device.units)
        return min((_chunk_cost(shape, tiles, device, blocks, Work(splits, p)), Work(splits, p)) for p in choices)

    cost, work = best(capacity // tiles.m, range(parts, parts + 1))
    if not longer:
        return cost * chunks, Early(capacity, chunks, 0, work, work)
    cost_short, work_short = best(short, range(1, parts + 1))
    return cost * longer + cost_short * (chunks - longer), Early(capacity, chunks, longer, work, work_short)


@cache
def plan_early(shape: Shape, workspace: int | None, device: Device, tiles: Tiles, chunks: int | None) -> Early:
    """The fastest plan within the workspace (or of about `chunks` chunks). `T1Error` where none fits."""
    budget = _budget(shape, workspace, DEFAULT_WORKSPACE)
    plans = [
        _early_plan(shape, tiles, device, count, capacity, parts)
        for count, capacity in _pieces(shape.tokens, tiles.m, chunks)
        for parts in range(1, 13 if shape.de else 2)
    ]

    def needs(plan: Early) -> int:
        return _bytes(shape, early_layout(shape, plan))

    fits = [(cost, plan) for cost, plan in plans if chunks is not None or needs(plan) <= budget]
    if fits:
        return min(fits)[1]
    least = min((plan for _, plan in plans), key=needs)
    need_workspace(workspace, needs(least), "fused")
    return least


@cache
def plan_late(shape: Shape, workspace: int | None, tiles: Tiles, chunks: int | None) -> Late:
    """The plan with the least traffic within the workspace: sums of dE once a range of columns, of dW once a chunk."""
    budget = _budget(shape, workspace, DEFAULT_WORKSPACE)
    step = max(tiles.m, tiles.n)
    found: list[tuple[float, Late]] = []
    for count, capacity in _pieces(shape.tokens, tiles.m, chunks):
        least = Late(capacity, count, step)
        room = (budget - _bytes(shape, late_layout(shape, least))) // (capacity * shape.compute.itemsize)
        columns = min(up(shape.vocab, step), step + room // step * step)
        if chunks is not None:
            columns = max(columns, step)
        if columns >= step:
            passes = -(-shape.vocab // columns)
            columns = up(-(-shape.vocab // passes), step)
            traffic = 8 * passes * shape.tokens * shape.hidden * shape.de + 4 * (count - 1) * shape.vocab * shape.hidden
            found.append((traffic + 2e7 * count * passes, Late(capacity, count, columns)))  # 2e7: a few launches
    if not found:
        least = Late(tiles.m, -(-shape.tokens // tiles.m), step)
        need_workspace(workspace, _bytes(shape, late_layout(shape, least)), "fused")
        return least
    return min(found)[1]


@cache
def plan_loss(shape: Shape, workspace: int | None, device: Device, tiles: Tiles) -> Late:
    """The loss alone, within the workspace or `LOSS_WORKSPACE`: the chunks that leave the fewest processors idle."""
    budget = min(_budget(shape, workspace, LOSS_WORKSPACE), LOSS_WORKSPACE + TOKEN_BYTES * shape.tokens)
    forward = shape._replace(de=False, dw=False)
    columns = -(-shape.vocab // tiles.n)
    found: list[tuple[float, Late]] = []
    for count, capacity in _pieces(shape.tokens, tiles.m):
        blocks = capacity // tiles.m
        splits = splits_of(blocks, columns, device.units)
        plan = Late(capacity, count, 0, splits)
        if _bytes(forward, late_layout(forward, plan)) <= budget:
            found.append((count * (-(-blocks * splits // device.units) * (-(-columns // splits) + 0.3) + 2), plan))
    if not found:
        least = Late(tiles.m, -(-shape.tokens // tiles.m), 0, 1)
        need_workspace(workspace, _bytes(forward, late_layout(forward, least)), "fused")
        return least
    return min(found)[1]
