"""Plans of head `fused`: tile sizes by architecture, and chunk sizes from a budget of bytes."""

from collections.abc import Iterator
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
MOVED = 3e6  # bytes copied within the device's memory in the time of such a step


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
    """Tokens N, vocabulary V, hidden size D, dtype of the products, and which of input and weight want a gradient.

    room: numbers in `compute` for which a row of dW has room, where dW may lend its memory.
    """

    tokens: int
    vocab: int
    hidden: int
    compute: torch.dtype
    de: bool
    dw: bool
    room: int = 0


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


def allocate(device: torch.device, *layouts: Layout) -> list[dict[str, torch.Tensor]]:
    """The buffers of each layout, uninitialised, all in one piece of memory that the layouts use in turn."""
    memory = torch.empty(max(_sum(x) for x in layouts), dtype=torch.uint8, device=device)

    def place(layout: Layout) -> dict[str, torch.Tensor]:
        found, start = {}, 0
        for name, b in layout.items():
            whole = memory[start : start + b.height * b.stride * b.dtype.itemsize].view(b.dtype)
            found[name] = whole.view(b.height, b.stride)[:, : b.width]
            start += b.nbytes
        return found

    return [place(x) for x in layouts]


def _sum(layout: Layout) -> int:
    return sum(b.nbytes for b in layout.values())


class Work(NamedTuple):
    """How a chunk's products are dealt: the logits' columns in `splits`, dE in `parts` sums over ranges of columns."""

    splits: int
    parts: int


class Lent(NamedTuple):
    """A first chunk of at most `capacity` tokens whose exponentials lie in what will be dW.

    As (V, C) row by row they would be in the way of dW's first rows at once: they lie in panels of `width` columns,
    each where dW's rows of the same classes will be, and a panel is moved to the workspace before it is multiplied.
    """

    capacity: int
    width: int
    work: Work


class Early(NamedTuple):
    """Gradients in the forward: `lent` first, then `chunks` of the other tokens, at most `capacity` in each.

    Where every token counts the first `longer` of them are one row block longer than the others.
    """

    capacity: int
    chunks: int
    longer: int
    long: Work
    short: Work
    lent: Lent | None = None

    def work(self, chunk: int) -> Work:
        return self.long if chunk < self.longer or not self.longer else self.short


NO_CHUNKS = Early(0, 0, 0, Work(1, 1), Work(1, 1))


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


def _early_layout(shape: Shape, capacity: int, columns: int, splits: int, parts: int) -> Layout:
    """Of chunks of `capacity` tokens, exponentials in `columns` columns. The first buffer outlasts them."""
    height = min(FREQUENT, shape.tokens) * shape.dw
    layout = {"sums": Buffer(height, shape.hidden, torch.float32)} if shape.dw else {}
    if capacity:
        layout |= _rows(shape, capacity, splits, 1 + shape.dw)
        layout |= {"z": Buffer(capacity, columns, shape.compute), "per_row": Buffer(2, capacity, torch.float32)}
        layout |= {"columns": Buffer(capacity, height, shape.compute)} if shape.dw else {}
        layout |= {"de": Buffer(parts * capacity, shape.hidden, torch.float32)} if shape.de else {}
    return layout


def early_layout(shape: Shape, plan: Early) -> Layout:
    """Buffers of a forward that makes gradients; `Frequent` and `kernels.rows.scale_rows` say what they hold."""
    splits = max(plan.long.splits, plan.short.splits)
    return _early_layout(shape, plan.capacity, shape.vocab, splits, plan.long.parts)


def lent_layout(shape: Shape, plan: Lent | None) -> Layout:
    """The same of its first chunk; z holds one panel."""
    return _early_layout(shape, plan.capacity, plan.width, *plan.work) if plan else {}


def lent_panels(dw: torch.Tensor, plan: Lent, compute: torch.dtype) -> tuple[torch.Tensor, int]:
    """dW's memory as panels, `plan.width` columns wide, and how many rows each is below the one before."""
    numbers = dw.view(compute)
    room = numbers.shape[1]
    panels = -(-numbers.shape[0] // plan.width)
    return numbers.as_strided(((panels - 1) * room + plan.capacity, plan.width), (plan.width, 1)), room


def late_layout(shape: Shape, plan: Late) -> Layout:
    """Buffers of a backward that makes the logits again; of the loss alone where plan.columns is 0."""
    layout = _rows(shape, plan.capacity, plan.splits)
    if plan.columns:
        layout["z"] = Buffer(plan.capacity, min(plan.columns, shape.vocab), shape.compute)
        if shape.de:
            layout["de"] = Buffer(plan.capacity, shape.hidden, torch.float32)
    return layout


def _bytes(shape: Shape, *layouts: Layout) -> int:
    """Of a plan whose layouts are used in turn, with what is held outside of them."""
    loose = TOKEN_BYTES * shape.tokens + CLASS_BYTES * shape.vocab * shape.dw + 24 * shape.hidden
    return max(_sum(x) for x in layouts) + loose + SLACK


class _Costs(NamedTuple):
    """Time of a chunk of `blocks` row blocks in steps of a multiprocessor, a step being a product of m × n × k."""

    shape: Shape
    tiles: Tiles
    device: Device

    def logits(self, blocks: int, splits: int) -> float:
        columns = -(-self.shape.vocab // self.tiles.n)
        waves = -(-blocks * splits // self.device.units) * -(-columns // splits)
        return waves * (-(-self.shape.hidden // self.tiles.k) + OVERHEAD) + LAUNCHES

    def products(self, blocks: int, columns: int, parts: int) -> float:
        shape, tiles, units = self.shape, self.tiles, self.device.units
        across, steps = -(-shape.hidden // tiles.n), -(-columns // tiles.k)
        unit = -(-steps // parts) + OVERHEAD
        count = blocks * across * parts * shape.de
        longest = -(-count // units) * unit
        inner = blocks * tiles.m // tiles.k
        dw = -(-columns // tiles.m) * across * (inner + OVERHEAD) * shape.dw
        even = max((count * unit + dw) / units, 1.0)
        hidden = min(longest / even, 1)  # units of dE hide dW's traffic
        return max(longest, even * (1 + 0.6 * (1 - hidden) / inner)) * (1 + 0.002 * parts)

    def lent(self, plan: Lent) -> float:
        blocks = plan.capacity // self.tiles.m
        panels = -(-self.shape.vocab // plan.width)
        moved = plan.capacity * self.shape.vocab * self.shape.compute.itemsize / MOVED
        products = self.products(blocks, plan.width, plan.work.parts) + LAUNCHES / 4
        return self.logits(blocks, plan.work.splits) + panels * products + moved


def _lent_plans(costs: _Costs) -> list[tuple[float, Lent]]:
    """(cost, plan) for some numbers of panels, and of tokens up to what the last panel has room for."""
    shape, t = costs.shape, costs.tiles
    step, columns = max(t.m, t.n), -(-shape.vocab // t.n)
    found = []
    for panels in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64) if shape.room else ():
        width = up(-(-shape.vocab // panels), step)
        last = shape.vocab - (-(-shape.vocab // width) - 1) * width
        most = min(shape.room * last // width, up(max(shape.tokens, 1), t.m)) // t.m
        for blocks in sorted({most * i // 8 for i in (2, 4, 6, 7, 8)} - {0}):
            splits = splits_of(blocks, columns, costs.device.units)
            for parts in range(1, 4 if shape.de else 2):
                plan = Lent(blocks * t.m, width, Work(splits, parts))
                found.append((costs.lent(plan), plan))
    return found


def _plain_plans(costs: _Costs, chunks: int | None = None) -> Iterator[tuple[float, Early]]:
    """(cost, plan) in chunks of all sizes (or in about `chunks` of them), nothing lent."""
    shape, m = costs.shape, costs.tiles.m
    columns, most = -(-shape.vocab // costs.tiles.n), 12 if shape.de else 1

    def works(blocks: int) -> list[tuple[float, Work]]:
        splits = splits_of(blocks, columns, costs.device.units)
        logits = costs.logits(blocks, splits)
        return [(logits + costs.products(blocks, shape.vocab, p), Work(splits, p)) for p in range(1, most + 1)]

    for count, capacity in _pieces(shape.tokens, m, chunks):
        short, longer = divmod(-(-max(shape.tokens, 1) // m), count)
        by_parts = works(capacity // m)
        short_by_parts = works(short) if longer else by_parts
        for parts, (cost, work) in enumerate(by_parts, 1):
            cost_short, work_short = min(short_by_parts[:parts]) if longer else (cost, work)
            total = cost * (longer or count) + cost_short * (count - (longer or count))
            yield total, Early(capacity, count, longer, work, work_short)


def plan_early(shape: Shape, workspace: int | None, device: Device, tiles: Tiles, chunks: int | None) -> Early:
    """The fastest plan within the workspace (or of about `chunks` chunks, nothing lent). `T1Error` where none fits.

    One for all numbers of tokens that make as many row blocks, so that texts of any length share a few plans.
    """
    return _plan_early(shape._replace(tokens=up(max(shape.tokens, 1), tiles.m)), workspace, device, tiles, chunks)


@cache
def _plan_early(shape: Shape, workspace: int | None, device: Device, tiles: Tiles, chunks: int | None) -> Early:
    budget = _budget(shape, workspace, DEFAULT_WORKSPACE)
    costs = _Costs(shape, tiles, device)
    plans = list(_plain_plans(costs, chunks))

    def needs(plan: Early) -> int:
        return _bytes(shape, early_layout(shape, plan), lent_layout(shape, plan.lent))

    if chunks is not None:
        return min(plans)[1]
    for capacity, (cost, lent) in _cheapest_lent(costs, budget).items():
        left = shape.tokens - capacity
        rest = _plain_plans(costs._replace(shape=shape._replace(tokens=left))) if left > 0 else [(0.0, NO_CHUNKS)]
        plans += [(cost + more, plan._replace(lent=lent)) for more, plan in rest]
    fits = [(cost, plan) for cost, plan in plans if needs(plan) <= budget]
    if fits:
        return min(fits, key=lambda p: p[0])[1]
    least = min((plan for _, plan in plans), key=needs)
    need_workspace(workspace, needs(least), "fused")
    return least


def _cheapest_lent(costs: _Costs, budget: int) -> dict[int, tuple[float, Lent]]:
    """By number of tokens: the fastest that fits into the budget."""
    found: dict[int, tuple[float, Lent]] = {}
    for cost, plan in sorted(_lent_plans(costs), key=lambda p: p[0]):
        if _bytes(costs.shape, lent_layout(costs.shape, plan)) <= budget:
            found.setdefault(plan.capacity, (cost, plan))
    return found


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
