"""Head `fused`: choose how many tokens and columns to take at a time, within a budget in bytes, by a cost model. A plan
is found in about a millisecond and kept; numbers of tokens that fill equally many row blocks share one."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.heads.options import Options, Settings, Shards, Tensors, evenly_spaced, need_workspace

DEFAULT_WORKSPACE = 3 * 2**29  # bytes, plus `TOKEN_BYTES` per token and copies; 1 GiB costs up to 2 % (docs/heads.md)
LOSS_WORKSPACE = 16 * 2**20  # more memory does not speed up the loss alone
TOKEN_BYTES = 192  # per token: order, sort keys and their copies, statistics and factors
CLASS_BYTES = 2  # per class: its position among the frequent targets
SLACK = 3 * 2**20  # by how much memory from CUDA's caching allocator may exceed the request
FREQUENT = 1024  # the most targets whose rows of dW accumulate in float32 over the chunks
WHOLE = 128  # copies of the frequent targets' columns begin in z at a multiple of this: no tile is higher
PARTS = 12  # the most partial sums of dE

# The cost model, in steps: the time in which a multiprocessor multiplies m × n × k (on an H200, docs/history/heads.md)
EPILOGUE = 2.8  # of a tile
LAUNCHES = 60  # a chunk's small kernels
HALF = 9 / 16  # time of a tile of half the columns, relative to a whole one (as `kernels.products` assumes, too)
UNEVEN = 0.06  # share of the idle time in dE's last wave, if it has several, that dW cannot fill
REREAD = 1e-4  # share of a late chunk's time added per row block: larger chunks re-read more
ROUNDED = 0.025  # per chunk beyond eight, as a share of a late plan's time: each rounds dW once more


class Tiles(NamedTuple):
    m: int  # of a product: tiles of m × n, in steps of k
    n: int
    k: int
    warps: int
    stages: int  # of the pipeline, for logits
    product_stages: int


TILES: dict[tuple[str, int], Tiles] = {  # by architecture and bytes per element
    ("hopper", 2): Tiles(128, 256, 64, 8, 3, 4),  # measured: H200
    ("hopper", 4): Tiles(128, 128, 32, 8, 3, 3),  # correct, not tuned
    ("other", 2): Tiles(128, 128, 32, 4, 3, 3),  # 48 KiB of shared memory: Ampere, Ada, Blackwell; not measured
    ("other", 4): Tiles(64, 64, 32, 4, 2, 2),
    ("interpreter", 2): Tiles(16, 32, 16, 4, 1, 1),
    ("interpreter", 4): Tiles(16, 32, 16, 4, 1, 1),
}


class Device(NamedTuple):
    kind: str  # as in `TILES`
    units: int  # multiprocessors


def device_of(device: torch.device) -> Device:
    if device.type != "cuda":  # Triton's interpreter
        return Device("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    hopper = properties.major == 9 and torch.version.hip is None  # AMD's gfx9 is 9, too
    return Device("hopper" if hopper else "other", properties.multi_processor_count)


class Shape(NamedTuple):
    tokens: int
    vocab: int
    hidden: int
    compute: torch.dtype  # of the products
    de: bool  # whether dE is wanted
    dw: bool
    copies: int = 0  # bytes, see `copies`
    ranks: int = 0  # over which the vocabulary is sharded; 0 if it is not


class Plan(NamedTuple):
    capacity: int  # the most tokens of a chunk
    chunks: int
    columns: int  # of the vocabulary at a time; 0: the loss alone
    splits: int = 1  # the most ranges that the vocabulary is divided into for a chunk's exponentials (`splits_of`)
    parts: int = 1  # partial sums of dE

    def bounds(self, tokens: int, tile: int) -> Iterator[tuple[int, int]]:
        """(start, size) of each chunk, if any. Their numbers of blocks of `tile` tokens differ by at most one."""
        blocks = ceil(tokens, tile)
        for chunk in range(self.chunks if tokens else 0):
            start, stop = (min(c * blocks // self.chunks * tile, tokens) for c in (chunk, chunk + 1))
            yield start, stop - start


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def up(value: int, multiple: int) -> int:
    return ceil(value, multiple) * multiple


@lru_cache(maxsize=1024)
def splits_of(blocks: int, tiles: int, units: int, least: int = 1) -> int:
    """Number of parts of the vocabulary, from `least` on, for which row blocks × parts best fill the multiprocessors in
    whole waves."""
    parts = range(min(least, tiles), min(64, tiles) + 1)
    return min((ceil(blocks * s, units) * (ceil(tiles, s) + 0.3), s) for s in parts)[1]


class Buffer(NamedTuple):
    height: int
    width: int
    dtype: torch.dtype = torch.float32

    stride = property(lambda self: up(self.width, 16 // self.dtype.itemsize))  # rows start on 16-byte boundaries
    nbytes = property(lambda self: up(self.height * self.stride * self.dtype.itemsize, 256))


def layout(shape: Shape, plan: Plan, early: bool) -> dict[str, Buffer]:
    """The buffers of a plan. early: for gradients in the forward, whose factors are applied after the exponentials."""
    rows, hidden, narrow, scaled = plan.capacity, shape.hidden, shape.compute, early and shape.dw
    found = {"x": Buffer(rows, hidden, narrow), "sums": Buffer(3 * plan.splits, rows)}
    found |= {"packed_target": Buffer(1, rows, torch.int32), "flag": Buffer(1, rows, torch.int32)}
    frequent = min(FREQUENT, shape.tokens) * scaled
    if plan.columns:
        found["z"] = Buffer(rows, up(plan.columns, WHOLE) + frequent if scaled else plan.columns, narrow)
    if plan.columns and shape.de:
        found["de"] = Buffer(plan.parts * rows, hidden)
    if scaled:
        found["frequent_sums"] = Buffer(frequent, hidden)
    if shape.ranks:  # what the shards of the vocabulary exchange
        found["exchange"] = Buffer(1, rows * hidden * shape.de)  # contiguous: gloo sums storage, strides or not
    return found


def bytes_needed(shape: Shape, plan: Plan, early: bool) -> int:
    return bytes_with(layout(shape, plan, early), shape, plan)


def bytes_with(buffers: dict[str, Buffer], shape: Shape, plan: Plan) -> int:
    """Bytes of the buffers, and of what a pass allocates beside them."""
    loose = TOKEN_BYTES * shape.tokens + CLASS_BYTES * shape.vocab * shape.dw + 24 * shape.hidden + shape.copies
    if shape.ranks:  # four statistics of a chunk's tokens, from each rank
        loose += 16 * (1 + shape.ranks) * plan.capacity
    return sum(b.nbytes for b in buffers.values()) + loose + SLACK


def default_workspace(shape: Shape, fixed: int = DEFAULT_WORKSPACE) -> int:
    return fixed + TOKEN_BYTES * shape.tokens + shape.copies


def copies(tensors: Tensors, compute: torch.dtype, rows: int) -> int:
    """Bytes of the copies that the kernels need: of weight and bias, for so many rows of the weight, and of an input
    (…, D) whose tokens are not evenly spaced in memory, as those of `hidden[:, :-1]` are not."""
    e, w, _, b, *_ = tensors
    copied = [t for t in (w, b) if t is not None and is_copied(t, compute)]
    found = sum(rows * (t.shape[1] if t.dim() == 2 else 1) * compute.itemsize for t in copied)
    return found if evenly_spaced(e) else found + e.numel() * e.dtype.itemsize


def is_copied(operand: Tensor, compute: torch.dtype) -> bool:
    """Whether the kernels need a copy of a weight or bias: in the products' dtype, with unit stride."""
    return operand.dtype != compute or (operand.dim() > 0 and operand.stride(-1) != 1)


def early_from(tokens: int, vocab: int, hidden: int, itemsize: int, cuda: bool) -> int:
    """The least workspace in bytes, without copies, with which the forward computes the gradients: 256 tokens fit.
    With less, recomputing the logits beats many small chunks. Plain arithmetic, which the compiler can follow."""
    row = (vocab + hidden + FREQUENT) * itemsize + 4 * hidden
    fixed = TOKEN_BYTES * tokens + FREQUENT * 4 * hidden + CLASS_BYTES * vocab + SLACK
    return (256 if cuda else 64) * row + fixed


class Planner(NamedTuple):
    kind: str  # of pass, as in `plan`
    shape: Shape
    tiles: Tiles
    units: int

    def products(self, blocks: int, columns: int, parts: int) -> float:
        shape, tiles, units = self.shape, self.tiles, self.units
        whole, rest = divmod(shape.hidden, tiles.n)
        across = whole + (HALF if 0 < rest <= tiles.n // 2 else min(rest, 1))
        unit = ceil(ceil(columns, tiles.k), parts) + EPILOGUE
        count, inner = blocks * across * parts * shape.de, blocks * tiles.m // tiles.k
        longest = ceil(count, units) * unit
        dw = ceil(columns, tiles.m) * across * (inner + EPILOGUE) * shape.dw
        even = max((count * unit + dw) / units, 1.0)
        hidden = min(longest / even, 1)  # share of dW's memory traffic that units of dE hide
        idle = UNEVEN * (longest - count * unit / units) * (count > units)
        return max(longest, even * (1 + 0.6 * (1 - hidden) / inner)) * (1 + 0.002 * parts) + idle

    def cost(self, plan: Plan) -> float:
        """Steps for all ranges of columns of all chunks, some of which have one row block more than the others."""
        shape, late, cost, width = self.shape, self.kind == "late", 0.0, plan.columns or self.shape.vocab
        tile = ceil(shape.hidden, self.tiles.k) + EPILOGUE
        low, higher = divmod(ceil(shape.tokens, self.tiles.m), plan.chunks)
        if late:  # counted as if all chunks were the longest
            low, higher = plan.capacity // self.tiles.m, 0
        whole, rest = divmod(shape.vocab, width)
        for height, chunks in ((low + 1, higher), (low, plan.chunks - higher)):
            for columns, ranges in ((width, whole), (rest, min(rest, 1))):
                if chunks * ranges:
                    tiles = ceil(columns, self.tiles.n)
                    splits = tiles if late else splits_of(height, tiles, self.units)
                    waves = ceil(height * splits, self.units) * ceil(tiles, splits)
                    logits = waves * tile + LAUNCHES
                    cost += chunks * ranges * (logits + self.products(height, columns, plan.parts))
        extra = REREAD * plan.capacity / self.tiles.m + ROUNDED * max(plan.chunks - 8, 0) * shape.dw
        return cost * (1 + extra * late)

    def plans(self, chunks: int, budget: int) -> Iterator[Plan]:
        """Plans with `chunks` chunks of tokens, those with fewer parts of dE first. Late ones have ranges of columns as
        wide as fit or a little narrower: of even width, or such that their tiles make whole waves."""
        shape, (m, n), vocab = self.shape, self.tiles[:2], self.shape.vocab
        blocks = ceil(shape.tokens, m)
        capacity = ceil(blocks, chunks) * m
        if self.kind != "late":
            splits = max(splits_of(b, ceil(vocab, n), self.units) for b in (ceil(blocks, chunks), blocks // chunks))
            for parts in range(1, PARTS + 1 if shape.de else 2):
                yield Plan(capacity, chunks, vocab if self.kind == "early" else 0, splits, parts)
            return
        step = max(m, n)
        room = budget - bytes_needed(shape, Plan(capacity, chunks, step), False)
        whole, tiles = ceil(vocab, step), capacity // m * (step // n)
        widest = min(1 + max(room, 0) // (capacity * shape.compute.itemsize * step), whole)
        waves = {(widest * tiles // self.units - i) * self.units // tiles for i in range(3)}
        for steps in {ceil(whole, ceil(whole, widest)), widest, *waves}:
            if steps > 0:
                yield Plan(capacity, chunks, steps * step)


def plan(kind: str, shape: Shape, workspace: int | None, device: Device, chunks: int | None = None) -> Plan:
    """The fastest plan within the workspace; `T1Error` naming the least that works if none fits.
    kind     "early": gradients in the forward; "late": in the backward, from recomputed logits; "loss": no gradients
    chunks   instead of a workspace: the number of chunks of tokens (unused for a "loss")"""
    shape = shape._replace(tokens=up(max(shape.tokens, 1), TILES[device.kind, shape.compute.itemsize].m))
    if kind == "loss":
        shape, chunks = shape._replace(de=False, dw=False), None
    return _plan(kind, shape, workspace, device, chunks)


@lru_cache(maxsize=1024)
def _plan(kind: str, shape: Shape, workspace: int | None, device: Device, chunks: int | None) -> Plan:
    planner = Planner(kind, shape, TILES[device.kind, shape.compute.itemsize], device.units)
    default = default_workspace(shape, LOSS_WORKSPACE if kind == "loss" else DEFAULT_WORKSPACE)
    budget = default if workspace is None else min(workspace, default) if kind == "loss" else workspace
    blocks = ceil(shape.tokens, planner.tiles.m)
    counts = sorted({ceil(blocks, h) for h in range(1, blocks + 1)}) if chunks is None else [min(chunks, blocks)]
    fit, others = [], []
    for count in counts:
        for found in planner.plans(count, budget):
            need = bytes_needed(shape, found, kind == "early")
            if need > budget and chunks is None:
                others.append((need, found))
                break
            fit.append((planner.cost(found), found))
        if kind != "late" and fit and count >= 2 * fit[0][1].chunks:  # smaller chunks than these are slower
            break
    if fit:
        return min(fit)[1]
    need, least = min(others)
    need_workspace(workspace, need, "fused")
    return least


def bytes_held(
    tokens: int, vocab: int, hidden: int, size: int, workspace: int, chunks: int | None, tail: str | None, early: bool,
    trained: bool,
) -> int:  # fmt: skip
    """For the planner: bytes that the gradients need within a workspace, or in so many chunks, for operands of `size`
    bytes per element; on this GPU or, if there is none, on an H200. early: whether the forward may compute them;
    trained: whether the weight has one. Raises `T1Error` as `plan` does."""
    device = device_of(torch.device("cuda")) if torch.cuda.is_available() else Device("hopper", 132)
    shape = Shape(tokens, vocab, hidden, torch.bfloat16 if size == 2 else torch.float32, de=True, dw=trained)
    early &= chunks is not None or workspace >= early_from(tokens, vocab, hidden, size, cuda=True)
    chosen = plan("early" if early else "late", shape, None if chunks else workspace, device, chunks)
    need = bytes_needed(shape, chosen, early)
    if tail is None or device.kind != "hopper":
        return need
    from t1lib.heads import fused_tail  # needs Triton

    return max(need, fused_tail.bytes_needed(shape, fused_tail.plan(shape, workspace, device.units)))


class Packed(NamedTuple):
    """The operators' arguments besides tensors, which they take as three lists and a string: one by one, these would
    take the host longer."""

    settings: Settings
    chunks: int | None
    autocast: str  # the dtype of the products, or "-" outside autocast
    needs: Sequence[bool]  # whether the gradients of input, weight and bias are wanted
    early: bool  # whether the forward computes them
    tail: bool  # FP8

    def lists(self) -> tuple[list[float], list[int], str, list[bool]]:
        """Numbers, sizes, words and flags."""
        s = self.settings
        group, rows, sequence = s.shards or ("", (), False)
        numbers = [s.label_smoothing, s.softcap or 0.0, s.z_loss, s.filter_eps or 0.0]  # 0: none
        sizes = [s.ignore_index, -1 if s.workspace is None else s.workspace, self.chunks or 0, *rows]
        flags = [*self.needs, self.early, self.tail, s.return_stats, sequence]
        return numbers, sizes, f"{s.reduction} {self.autocast} {group}", flags

    @classmethod
    def of(cls, numbers, sizes, words, flags) -> "Packed":
        smooth, softcap, z_loss, filter_eps = numbers
        ignore_index, workspace, chunks, *rows = sizes
        reduction, autocast, group = words.split(" ")
        *needs, early, tail, stats, sequence = flags
        settings = Settings(
            reduction, ignore_index, smooth, softcap or None, z_loss, None if workspace == -1 else workspace,
            filter_eps or None, stats, Shards(group, tuple(rows), sequence) if group else None,
        )  # fmt: skip
        return cls(settings, chunks or None, autocast, needs, early, tail)


class Operands:
    """An operator's arguments as the kernels need them: e (N, D), of any strides; w (V, D) with unit column stride and
    b (V) or None, both in the products' dtype. needs: whether their gradients are wanted. shape, device: for `plan`."""

    def __init__(self, tensors: Tensors, given: Packed, check: bool) -> None:
        (e, w, _, b, *_), s = tensors, given.settings
        with torch.autocast(e.device.type, enabled=False):  # the forward's state counts, also in the backward
            self.opts = Options(tensors, s, same_dtype=given.autocast == "-", check=check)
        compute = e.dtype if given.autocast == "-" else getattr(torch, given.autocast)
        self.needs, self.dw_dtype, self.chunks, self.check = given.needs, w.dtype, given.chunks, check
        self.e = self.opts.tokens(e.reshape(-1, e.shape[-1]))
        self.w = w.to(compute) if w.stride(1) == 1 else w.to(compute).contiguous()
        self.b = None if b is None else b.to(compute).contiguous()
        most = self.opts.most  # all shards must split the tokens into the same chunks
        copied, ranks = copies(tensors, compute, most), 0 if s.shards is None else s.shards.size
        self.shape = Shape(len(self.e), most, w.shape[1], compute, *self.needs[:2], copied, ranks)
        self.device = device_of(e.device)

    def plan(self, kind: str) -> tuple[Plan, dict[str, Buffer]]:
        found = plan(kind, self.shape, self.opts.settings.workspace, self.device, self.chunks)
        return found, layout(self.shape, found, kind == "early")
