"""Plans of head `fused`: tile sizes by architecture, and chunk sizes from a budget of bytes."""

from typing import NamedTuple

import torch

from t1lib.heads.contract import Options, need_workspace

DEFAULT_WORKSPACE = 512 * 2**20  # near the speed of whole logits, and no more than the weight gradient of a small model
LOSS_WORKSPACE = 16 * 2**20  # for the loss alone more memory brings nothing
TOKEN_BYTES = 192  # order, sort keys and their copies, statistics and factors of a token
SLACK = 2**20  # CUDA's caching allocator may hand out so much more than asked for, for each large buffer
FREQUENT = 1024  # targets whose rows of dW add up in float32 over the chunks, at most
OVERHEAD = 2.6  # of a tile's epilogue, in steps of its product (measured, docs/log.md)


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
    """What a plan needs to know: a key of `TILES`, multiprocessors, and whether tiles are copied by descriptor."""

    kind: str
    units: int
    tma: bool


def device_of(device: torch.device) -> Device:
    """Describe a CUDA device; any other one is Triton's interpreter."""
    if device.type != "cuda":
        return Device("interpreter", 4, False)
    properties = torch.cuda.get_device_properties(device)
    kind = "hopper" if properties.major == 9 else "other"
    return Device(kind, properties.multi_processor_count, properties.major == 9)


class Shape(NamedTuple):
    """Tokens N, vocabulary V, hidden size D, bytes an element, and which of input and weight want a gradient."""

    tokens: int
    vocab: int
    hidden: int
    size: int
    de: bool
    dw: bool

    def row(self, columns: int) -> int:
        """Bytes of a row of `columns` elements in a buffer, each row on a 16-byte boundary."""
        return up(columns, 16 // self.size) * self.size


class Early(NamedTuple):
    """Gradients in the forward: `chunks` of at most `capacity` tokens; dE in `parts` sums over ranges of columns."""

    capacity: int
    chunks: int
    parts: int
    splits: int


class Late(NamedTuple):
    """Gradients in the backward: `chunks` of at most `capacity` tokens, `columns` of the vocabulary at a time."""

    capacity: int
    chunks: int
    columns: int


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def splits_of(blocks: int, tiles: int, units: int) -> int:
    """Parts of the vocabulary, so that row blocks times parts fill the multiprocessors in whole waves."""
    def waves(s: int) -> float:
        return -(-blocks * s // units) * (-(-tiles // s) + 0.3)

    return min(range(1, min(64, tiles) + 1), key=waves)


def _pieces(tokens: int, tile: int) -> list[tuple[int, int]]:
    """(chunks, capacity) to choose from: as many chunks as there are row blocks, the largest capacity first."""
    blocks = -(-max(tokens, 1) // tile)
    sizes = sorted({-(-blocks // c) for c in range(1, blocks + 1)}, reverse=True)
    return [(-(-blocks // s), s * tile) for s in sizes]


def _budget(shape: Shape, opts: Options, default: int) -> int:
    """Bytes that the plan may use; the default does not count what grows with the tokens whatever the plan."""
    return default + TOKEN_BYTES * shape.tokens if opts.workspace is None else opts.workspace


def _early_bytes(shape: Shape, plan: Early) -> int:
    c = plan.capacity
    z = c * shape.row(shape.vocab)
    height = min(FREQUENT, shape.vocab)
    frequent = (height * (4 * shape.hidden + 12) + c * shape.row(height) + 6 * shape.vocab) * shape.dw
    x = (1 + shape.dw) * c * shape.row(shape.hidden)
    de = plan.parts * c * shape.hidden * 4 * shape.de
    rows = c * (12 * plan.splits + 48)
    return z + x + de + frequent + rows + 16 * shape.hidden + TOKEN_BYTES * shape.tokens + 7 * SLACK


def _early_cost(shape: Shape, tiles: Tiles, device: Device, plan: Early) -> float:
    """Steps of a multiprocessor, a step being a product of m × n × k."""
    blocks, across = plan.capacity // tiles.m, -(-shape.hidden // tiles.n)
    columns = -(-shape.vocab // tiles.n)
    waves = -(-blocks * plan.splits // device.units) * -(-columns // plan.splits)
    logits = waves * (-(-shape.hidden // tiles.k) + OVERHEAD)
    unit = -(-(-(-shape.vocab // tiles.k)) // plan.parts) + OVERHEAD
    units = blocks * across * plan.parts * shape.de
    longest = -(-units // device.units) * unit
    dw = -(-shape.vocab // tiles.m) * across * (plan.capacity // tiles.k + OVERHEAD) * shape.dw
    products = max(longest, (units * unit + dw) / device.units)
    return plan.chunks * (logits + products * (1 + 0.01 * plan.parts))  # a long unit beside dW hides more of its traffic


def plan_early(shape: Shape, opts: Options, device: Device, tiles: Tiles, chunks: int | None) -> Early:
    """The fastest plan within the workspace (or of about `chunks` chunks). `T1Error` where none fits."""
    budget = _budget(shape, opts, DEFAULT_WORKSPACE)
    found: list[tuple[float, Early]] = []
    least: list[int] = []
    for count, capacity in _pieces(shape.tokens, tiles.m):
        if chunks is not None and count != chunks and capacity != _nearest(shape.tokens, tiles.m, chunks):
            continue
        splits = splits_of(capacity // tiles.m, -(-shape.vocab // tiles.n), device.units)
        for parts in range(1, 13 if shape.de else 2):
            plan = Early(capacity, count, parts, splits)
            needs = _early_bytes(shape, plan)
            least.append(needs)
            if chunks is not None or needs <= budget:
                found.append((_early_cost(shape, tiles, device, plan), plan))
    if not found:
        if opts.workspace is not None:
            need_workspace(opts, min(least), "fused")
        return Early(tiles.m, -(-shape.tokens // tiles.m), 1, splits_of(1, -(-shape.vocab // tiles.n), device.units))
    return min(found)[1]


def _nearest(tokens: int, tile: int, chunks: int) -> int:
    """Capacity of about `chunks` chunks: rows a chunk, rounded up to whole row blocks."""
    return up(-(-max(tokens, 1) // chunks), tile)


def _late_bytes(shape: Shape, capacity: int, columns: int) -> int:
    """`columns` 0: the loss alone."""
    z, x = capacity * shape.row(columns), capacity * shape.row(shape.hidden)
    de = capacity * shape.hidden * 4 * (shape.de and columns > 0)
    return z + x + de + capacity * (12 * 64 + 64) + TOKEN_BYTES * shape.tokens + (5 if columns else 3) * SLACK


def plan_late(shape: Shape, opts: Options, tiles: Tiles, chunks: int | None) -> Late:
    """The plan with the least traffic within the workspace: sums of dE once a range of columns, of dW once a chunk."""
    budget = _budget(shape, opts, DEFAULT_WORKSPACE)
    step = max(tiles.m, tiles.n)
    found: list[tuple[float, Late]] = []
    for count, capacity in _pieces(shape.tokens, tiles.m):
        if chunks is not None and capacity != _nearest(shape.tokens, tiles.m, chunks):
            continue
        room = (budget - _late_bytes(shape, capacity, 0)) // (capacity * shape.size)
        columns = min(up(shape.vocab, step), room // step * step)
        if chunks is not None:
            columns = max(columns, step)
        if columns >= step:
            passes = -(-shape.vocab // columns)
            columns = up(-(-shape.vocab // passes), step)
            traffic = 8 * passes * shape.tokens * shape.hidden * shape.de + 4 * (count - 1) * shape.vocab * shape.hidden
            found.append((traffic + 2e7 * count * passes, Late(capacity, count, columns)))  # 2e7: a few launches
    if not found:
        need_workspace(opts, _late_bytes(shape, tiles.m, step), "fused")
        return Late(tiles.m, -(-shape.tokens // tiles.m), step)
    return min(found)[1]


def plan_loss(shape: Shape, opts: Options, tiles: Tiles) -> Late:
    """The loss alone: as many tokens a chunk as fit in the workspace or in `LOSS_WORKSPACE`."""
    budget = min(_budget(shape, opts, LOSS_WORKSPACE), LOSS_WORKSPACE + TOKEN_BYTES * shape.tokens)
    for count, capacity in _pieces(shape.tokens, tiles.m):
        if _late_bytes(shape, capacity, 0) <= budget:
            return Late(capacity, count, 0)
    need_workspace(opts, _late_bytes(shape, tiles.m, 0), "fused")
    return Late(tiles.m, -(-shape.tokens // tiles.m), 0)


def splits_for(capacity: int, shape: Shape, tiles: Tiles, device: Device) -> int:
    """Parts of the vocabulary for chunks of `capacity` rows."""
    return splits_of(capacity // tiles.m, -(-shape.vocab // tiles.n), device.units)
