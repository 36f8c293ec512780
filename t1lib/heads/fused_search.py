"""Find the fastest plan of head `fused` within a memory budget, using a cost model of its chunks."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from t1lib.errors import T1Error
from t1lib.heads.contract import need_workspace
from t1lib.heads.fused_memory import SLACK, TOKEN_BYTES, bytes_needed, early_layout, late_layout, lent_layout
from t1lib.heads.fused_plan import NO_CHUNKS, Device, Early, Late, Lent, Shape, Tiles, Work, up

DEFAULT_WORKSPACE = 512 * 2**20  # near the speed of whole logits, and no more than a small model's weight gradient
LOSS_WORKSPACE = 16 * 2**20  # more memory does not speed up the loss alone
OVERHEAD = 2.8  # cost of a tile's epilogue, in steps of its product (measured, docs/log.md)
REREAD = 1e-4  # share of a late chunk's time added per row block: larger chunks re-read more (measured, docs/log.md)
ROUNDED = 0.015  # penalty per chunk beyond eight, as a share of a late plan's time: each rounds dW once more
UNEVEN = 0.06  # share of the processors' idle time in the last of several waves of dE that dW cannot fill (measured)
WIDTHS = 32  # widths of column ranges to try, from the widest down: some make whole waves of tiles
LAUNCHES = 60  # cost of a chunk's small kernels, in steps
TYPICAL = 8192  # number of tokens for which `early_from` compares: its result must not depend on the sequence length
MOVED = 1.5e6  # bytes copied within device memory in the time of one step
LENDING = 300  # extra cost of a chunk that uses dW's memory, in steps, besides its copy (measured, docs/log.md)


@cache
def splits_of(blocks: int, tiles: int, units: int) -> int:
    """Number of parts of the vocabulary for which row blocks × parts best fill the multiprocessors in whole waves."""

    def waves(s: int) -> float:
        return -(-blocks * s // units) * (-(-tiles // s) + 0.3)

    return min(range(1, min(64, tiles) + 1), key=waves)


def _pieces(tokens: int, tile: int, chunks: int | None = None) -> list[tuple[int, int]]:
    """Candidates (chunks, capacity), in whole row blocks, largest capacity first; with `chunks`, only that one."""
    blocks = -(-max(tokens, 1) // tile)
    counts = range(1, blocks + 1) if chunks is None else [min(chunks, blocks)]
    sizes = sorted({-(-blocks // c) for c in counts}, reverse=True)
    return [(-(-blocks // s), s * tile) for s in sizes]


def _budget(shape: Shape, workspace: int | None, default: int) -> int:
    """Bytes that the plan may use; to the default is added what every plan needs per token."""
    return default + TOKEN_BYTES * shape.tokens if workspace is None else workspace


class _Costs(NamedTuple):
    """Time of a chunk of `blocks` row blocks, in steps of a multiprocessor; one step is a product of m × n × k."""

    shape: Shape
    tiles: Tiles
    device: Device

    def logits(self, blocks: int, splits: int, columns: int | None = None) -> float:
        tiles = -(-(columns or self.shape.vocab) // self.tiles.n)
        waves = -(-blocks * splits // self.device.units) * -(-tiles // splits)
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
        hidden = min(longest / even, 1)  # share of dW's memory traffic that units of dE hide
        idle = UNEVEN * (longest - count * unit / units) * (count > units)
        return max(longest, even * (1 + 0.6 * (1 - hidden) / inner)) * (1 + 0.002 * parts) + idle

    def lent(self, plan: Lent) -> float:
        blocks = plan.capacity // self.tiles.m
        panels = -(-self.shape.vocab // plan.width)
        moved = plan.capacity * plan.width * self.shape.compute.itemsize / MOVED
        products = self.products(blocks, plan.width, plan.work.parts) + LAUNCHES
        return self.logits(blocks, plan.work.splits) + panels * products + moved + LENDING

    def late(self, plan: Late) -> float:
        blocks = plan.capacity // self.tiles.m
        whole, rest = divmod(self.shape.vocab, plan.columns)

        def one(columns: int) -> float:
            return self.logits(blocks, -(-columns // self.tiles.n), columns) + self.products(blocks, columns, 1)

        more = REREAD * blocks + ROUNDED * max(plan.chunks - 8, 0) * self.shape.dw
        return plan.chunks * (whole * one(plan.columns) + (one(rest) if rest else 0.0)) * (1 + more)


def _lent_plans(costs: _Costs) -> list[tuple[float, Lent]]:
    """(cost, plan) for various numbers of panels, and of tokens up to what the last panel has room for."""
    shape, t = costs.shape, costs.tiles
    step, columns = max(t.m, t.n), -(-shape.vocab // t.n)
    found = []
    for panels in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64) if shape.room else ():
        width = up(-(-shape.vocab // panels), step)
        last = shape.vocab - (-(-shape.vocab // width) - 1) * width
        most = min(shape.room * last // width, up(max(shape.tokens, 1), t.m)) // t.m
        for blocks in sorted({most * i // 16 for i in (4, 8, 12, 13, 14, 15, 16)} - {0}):
            splits = splits_of(blocks, columns, costs.device.units)
            for parts in range(1, 4 if shape.de else 2):
                plan = Lent(blocks * t.m, width, Work(splits, parts))
                found.append((costs.lent(plan), plan))
    return found


def _plain_plans(costs: _Costs, chunks: int | None = None) -> Iterator[tuple[float, Early]]:
    """(cost, plan) for chunks of every size (or for about `chunks` chunks), without using dW's memory."""
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
    """The fastest plan within the workspace, or with about `chunks` chunks and nothing lent. `T1Error` if none fits.

    Numbers of tokens that fill the same number of row blocks share a plan, so that varying sequence lengths need few.
    """
    return _plan_early(shape._replace(tokens=up(max(shape.tokens, 1), tiles.m)), workspace, device, tiles, chunks)


@cache
def _plan_early(shape: Shape, workspace: int | None, device: Device, tiles: Tiles, chunks: int | None) -> Early:
    costs = _Costs(shape, tiles, device)
    if chunks is not None:
        return min(_plain_plans(costs, chunks))[1]
    budget = _budget(shape, workspace, DEFAULT_WORKSPACE)
    plans = _early_plans(costs, budget)
    fits = [(cost, plan) for cost, plan in plans if early_bytes(shape, plan) <= budget]
    if fits:
        return min(fits, key=lambda p: p[0])[1]
    least = min((plan for _, plan in plans), key=lambda plan: early_bytes(shape, plan))
    need_workspace(workspace, early_bytes(shape, least), "fused")
    return least


def early_bytes(shape: Shape, plan: Early) -> int:
    """Bytes of a forward that computes gradients by this plan."""
    return bytes_needed(shape, early_layout(shape, plan), lent_layout(shape, plan.lent))


def _early_plans(costs: _Costs, budget: int) -> list[tuple[float, Early]]:
    """(cost, plan): every plan with nothing lent, and every lent chunk within the budget with any plan for the rest.

    Only the lent chunks are checked against the budget here.
    """
    shape, plans = costs.shape, list(_plain_plans(costs))
    for capacity, (cost, lent) in _cheapest_lent(costs, budget).items():
        left = shape.tokens - capacity
        rest = _plain_plans(costs._replace(shape=shape._replace(tokens=left))) if left > 0 else [(0.0, NO_CHUNKS)]
        plans += [(cost + more, plan._replace(lent=lent)) for more, plan in rest]
    return plans


def early_is_faster(shape: Shape, workspace: int, device: Device, tiles: Tiles) -> bool:
    """Whether, within the workspace, computing gradients in the forward is faster than recomputing the logits later."""
    return workspace - TOKEN_BYTES * up(shape.tokens, tiles.m) >= early_from(shape._replace(tokens=0), device, tiles)


@cache
def early_from(shape: Shape, device: Device, tiles: Tiles) -> int:
    """Bytes, besides `TOKEN_BYTES` per token, from which on computing the gradients in the forward is faster.

    With less, recomputing the logits costs less than the many small chunks of such a forward, or these do not fit at
    all. The value is the same for any number of tokens, because the compiler must know which of the two applies
    without knowing the number of tokens.
    """
    shape = shape._replace(tokens=TYPICAL)
    costs, rows = _Costs(shape, tiles, device), TOKEN_BYTES * TYPICAL

    def early_wins(budget: int) -> bool:
        plans = _early_plans(costs, budget)
        early = min((cost for cost, plan in plans if early_bytes(shape, plan) <= budget), default=None)
        if early is None:
            return False
        try:
            forward, late = plan_loss(shape, budget, device, tiles), plan_late(shape, budget, device, tiles, None)
        except T1Error:
            return True
        first = forward.chunks * costs.logits(forward.capacity // tiles.m, forward.splits)
        return early <= first + costs.late(late)

    steps = [rows + int(SLACK * 2 ** (i / 16)) for i in range(16 * 12)]
    at = bisect_left(steps, True, key=early_wins)
    return steps[min(at, len(steps) - 1)] - rows


def _cheapest_lent(costs: _Costs, budget: int) -> dict[int, tuple[float, Lent]]:
    """For each capacity in tokens, the fastest lent chunk that fits the budget, as (cost, plan)."""
    found: dict[int, tuple[float, Lent]] = {}
    for cost, plan in sorted(_lent_plans(costs), key=lambda p: p[0]):
        if bytes_needed(costs.shape, lent_layout(costs.shape, plan)) <= budget:
            found.setdefault(plan.capacity, (cost, plan))
    return found


@cache
def plan_late(shape: Shape, workspace: int | None, device: Device, tiles: Tiles, chunks: int | None) -> Late:
    """The fastest plan of a backward within the workspace, with column ranges as wide as fit or a little narrower."""
    budget = _budget(shape, workspace, DEFAULT_WORKSPACE)
    costs, step = _Costs(shape, tiles, device), max(tiles.m, tiles.n)
    found: list[tuple[float, Late]] = []
    for count, capacity in _pieces(shape.tokens, tiles.m, chunks):
        least = Late(capacity, count, step)
        room = (budget - bytes_needed(shape, late_layout(shape, least))) // (capacity * shape.compute.itemsize)
        widest = min(up(shape.vocab, step), step + room // step * step)
        if chunks is not None and workspace is None:
            widest = max(widest, step)
        if widest < step:
            continue
        fewest = -(-shape.vocab // widest)
        even = {up(-(-shape.vocab // passes), step) for passes in range(fewest, fewest + 4)}
        for columns in even | set(range(widest, max(0, widest - WIDTHS * step), -step)):
            plan = Late(capacity, count, columns)
            found.append((costs.late(plan), plan))
    if not found:
        smallest = [Late(capacity, count, step) for count, capacity in _pieces(shape.tokens, tiles.m, chunks)]
        need, least = min((bytes_needed(shape, late_layout(shape, plan)), plan) for plan in smallest)
        need_workspace(workspace, need, "fused")
        return least
    return min(found)[1]


@cache
def plan_loss(shape: Shape, workspace: int | None, device: Device, tiles: Tiles) -> Late:
    """Plan the loss alone, within the workspace and `LOSS_WORKSPACE`, so that the fewest processors are idle."""
    budget = min(_budget(shape, workspace, LOSS_WORKSPACE), LOSS_WORKSPACE + TOKEN_BYTES * shape.tokens)
    forward = shape._replace(de=False, dw=False)
    columns = -(-shape.vocab // tiles.n)
    found: list[tuple[float, Late]] = []
    for count, capacity in _pieces(shape.tokens, tiles.m):
        blocks = capacity // tiles.m
        splits = splits_of(blocks, columns, device.units)
        plan = Late(capacity, count, 0, splits)
        if bytes_needed(forward, late_layout(forward, plan)) <= budget:
            found.append((count * (-(-blocks * splits // device.units) * (-(-columns // splits) + 0.3) + 2), plan))
    if not found:
        least = Late(tiles.m, -(-shape.tokens // tiles.m), 0, 1)
        need_workspace(workspace, bytes_needed(forward, late_layout(forward, least)), "fused")
        return least
    return min(found)[1]
