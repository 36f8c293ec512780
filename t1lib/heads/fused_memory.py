"""The workspace of head `fused`: the buffers of a plan, in one piece of memory, and how many bytes a call needs."""

from typing import NamedTuple

import torch

from t1lib.heads.fused_plan import Early, Late, Lent, Shape, up

TOKEN_BYTES = 192  # order, sort keys and their copies, statistics and factors of a token
CLASS_BYTES = 2  # which of the frequent targets a class is
SLACK = 3 * 2**20  # CUDA's caching allocator may hand out so much more than asked for
FREQUENT = 1024  # targets whose rows of dW add up in float32 over the chunks, at most


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
    """What any plan holds of a chunk: packed hidden states (in `copies`), and sums over the vocabulary."""
    return {
        "x": Buffer(copies * capacity, shape.hidden, shape.compute),
        "target": Buffer(1, capacity, torch.int32),
        "flag": Buffer(1, capacity, torch.int32),
        "parts": Buffer(3 * splits, capacity, torch.float32),
    } | _shared(shape, capacity)


def _shared(shape: Shape, capacity: int) -> Layout:
    """What the shards of the vocabulary exchange of a chunk: statistics, here and of all; rows of dE."""
    if not shape.ranks:
        return {}
    shares = {"shares": Buffer(4 * (1 + shape.ranks), capacity, torch.float32)}
    return shares | ({"sum": Buffer(capacity, up(shape.hidden, 4), torch.float32)} if shape.de else {})


def _early_layout(shape: Shape, capacity: int, columns: int, splits: int, parts: int) -> Layout:
    """Of chunks of `capacity` tokens, exponentials in `columns` columns. The first buffer outlasts them."""
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
    """Buffers of a forward that makes gradients; `Frequent` and `kernels.rows.scale_rows` say what they hold."""
    splits = max(plan.long.splits, plan.short.splits)
    return _early_layout(shape, plan.capacity, shape.vocab, splits, plan.long.parts)


def lent_layout(shape: Shape, plan: Lent | None) -> Layout:
    """The same of its first chunk; z holds the last panel."""
    return _early_layout(shape, plan.capacity, plan.width, *plan.work) if plan else {}


def lent_panels(dw: torch.Tensor, plan: Lent, compute: torch.dtype) -> tuple[torch.Tensor, int]:
    """dW's memory as panels, `plan.width` columns wide, and how many rows each is below the one before."""
    numbers = dw.view(compute)
    room = numbers.shape[1]
    panels = -(-numbers.shape[0] // plan.width)
    return numbers.as_strided(((panels - 1) * room + plan.capacity, plan.width), (plan.width, 1)), room


def wrap(vocab: int, width: int, room: int) -> int:
    """Rows of all panels, for `tiles.place`; where there are none, a number that changes nothing."""
    return -(-vocab // width) * room or 16


def late_layout(shape: Shape, plan: Late) -> Layout:
    """Buffers of a backward that makes the logits again; of the loss alone where plan.columns is 0."""
    layout = _rows(shape, plan.capacity, plan.splits)
    if plan.columns:
        layout["z"] = Buffer(plan.capacity, min(plan.columns, shape.vocab), shape.compute)
        if shape.de:
            layout["de"] = Buffer(plan.capacity, shape.hidden, torch.float32)
    return layout


def bytes_needed(shape: Shape, *layouts: Layout) -> int:
    """Of a plan whose layouts are used in turn, with what is held outside of them."""
    loose = TOKEN_BYTES * shape.tokens + CLASS_BYTES * shape.vocab * shape.dw + 24 * shape.hidden
    return max(_sum(x) for x in layouts) + loose + SLACK
