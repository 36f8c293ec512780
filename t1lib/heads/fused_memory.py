"""The workspace of head `fused`: a plan's buffers, in one allocation, and how many bytes a call needs."""

from typing import NamedTuple

import torch

from t1lib.heads.fused_plan import Early, Late, Lent, Shape, up

TOKEN_BYTES = 192  # per token: order, sort keys and their copies, statistics and factors
CLASS_BYTES = 2  # per class: its position among the frequent targets
SLACK = 3 * 2**20  # by how much memory from CUDA's caching allocator may exceed the request
FREQUENT = 1024  # the most targets whose rows of dW accumulate in float32 over the chunks


class Buffer(NamedTuple):
    """A matrix in the workspace; each row starts on a 16-byte boundary."""

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
    """The buffers of each layout, uninitialised, in a single allocation that the layouts use one after another."""
    memory = torch.empty(max(_sum(x) for x in layouts), dtype=torch.uint8, device=device)
    numbers = {dtype: memory.view(dtype) for dtype in {b.dtype for x in layouts for b in x.values()}}

    def place(layout: Layout) -> dict[str, torch.Tensor]:
        found, start = {}, 0
        for name, b in layout.items():
            at = start // b.dtype.itemsize
            found[name] = numbers[b.dtype].as_strided((b.height, b.width), (b.stride, 1), at)
            start += b.nbytes
        return found

    return [place(x) for x in layouts]


def _sum(layout: Layout) -> int:
    return sum(b.nbytes for b in layout.values())


def _rows(shape: Shape, capacity: int, splits: int, copies: int = 1) -> Layout:
    """Buffers that any plan needs for a chunk: packed hidden states (`copies` of them) and sums over the vocabulary."""
    return {
        "x": Buffer(copies * capacity, shape.hidden, shape.compute),
        "target": Buffer(1, capacity, torch.int32),
        "flag": Buffer(1, capacity, torch.int32),
        "parts": Buffer(3 * splits, capacity, torch.float32),
    } | _shared(shape, capacity)


def _shared(shape: Shape, capacity: int) -> Layout:
    """Buffers for what vocabulary shards exchange per chunk: statistics (its own and all shards'), and rows of dE."""
    if not shape.ranks:
        return {}
    shares = {"shares": Buffer(4 * (1 + shape.ranks), capacity, torch.float32)}
    return shares | ({"sum": Buffer(capacity, up(shape.hidden, 4), torch.float32)} if shape.de else {})


def _early_layout(shape: Shape, capacity: int, columns: int, splits: int, parts: int) -> Layout:
    """Buffers for chunks of `capacity` tokens with `columns` columns of exponentials. `sums` outlives the chunks."""
    height = min(FREQUENT, shape.tokens) * shape.dw
    layout = {"sums": Buffer(height, shape.hidden, torch.float32)} if shape.dw else {}
    if capacity:
        layout |= _rows(shape, capacity, splits, 1 + shape.dw)
        layout |= {"z": Buffer(capacity, columns, shape.compute), "per_row": Buffer(2, capacity, torch.float32)}
        widths = {"columns": height, "factors": 16} if shape.dw else {}
        layout |= {name: Buffer(capacity, width, shape.compute) for name, width in widths.items()}
        layout |= {"de": Buffer(parts * capacity, shape.hidden, torch.float32)} if shape.de else {}
    return layout


def early_layout(shape: Shape, plan: Early) -> Layout:
    """Buffers of a forward that computes gradients; `Frequent` and `kernels.rows.scale_rows` say what they hold."""
    splits = max(plan.long.splits, plan.short.splits)
    return _early_layout(shape, plan.capacity, shape.vocab, splits, plan.long.parts)


def lent_layout(shape: Shape, plan: Lent | None) -> Layout:
    """The same for its first chunk, if that uses the memory of dW; z then holds only the last panel."""
    return _early_layout(shape, plan.capacity, plan.width, *plan.work) if plan else {}


def lent_panels(dw: torch.Tensor, plan: Lent, compute: torch.dtype) -> tuple[torch.Tensor, int]:
    """dW's memory viewed as panels `plan.width` columns wide, and the distance in rows from one panel to the next."""
    numbers = dw.view(compute)
    room = numbers.shape[1]
    panels = -(-numbers.shape[0] // plan.width)
    return numbers.as_strided(((panels - 1) * room + plan.capacity, plan.width), (plan.width, 1)), room


def wrap(vocab: int, width: int, room: int) -> int:
    """Total rows of all panels, for `tiles.place`; without panels (room 0) a nonzero number that has no effect."""
    return -(-vocab // width) * room or 16


def late_layout(shape: Shape, plan: Late) -> Layout:
    """Buffers of a backward that recomputes the logits; of the loss alone if plan.columns is 0."""
    layout = _rows(shape, plan.capacity, plan.splits)
    if plan.columns:
        layout["z"] = Buffer(plan.capacity, min(plan.columns, shape.vocab), shape.compute)
        if shape.de:
            layout["de"] = Buffer(plan.capacity, shape.hidden, torch.float32)
    return layout


def bytes_needed(shape: Shape, *layouts: Layout) -> int:
    """Bytes of a plan whose layouts are used one after another, including what is allocated outside of them."""
    loose = TOKEN_BYTES * shape.tokens + CLASS_BYTES * shape.vocab * shape.dw + 24 * shape.hidden
    return max(_sum(x) for x in layouts) + loose + SLACK
