"""What a chunk of tokens exchanges with the other shards of the vocabulary, packed by row of the chunk."""

import triton
import triton.language as tl

from t1lib.heads.kernels.forward import NEVER
from t1lib.heads.kernels.rows import LN2
from t1lib.heads.kernels.tiles import first_row, live_rows


@triton.jit
def take_rows(offset, log_total, correct, pull, order, info, out, chunk, capacity, BLOCK: tl.constexpr):
    """Program per BLOCK rows: the statistics of the chunk's tokens over the columns here; out (4, capacity)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < live_rows(info, chunk)
    token = tl.load(order + first_row(info, chunk) + i, mask=live, other=0)
    tl.store(out + i, tl.load(offset + token, mask=live, other=0.0), mask=i < capacity)
    tl.store(out + capacity + i, tl.load(log_total + token, mask=live, other=0.0), mask=i < capacity)
    tl.store(out + 2 * capacity + i, tl.load(correct + token, mask=live, other=0).to(tl.float32), mask=i < capacity)
    tl.store(out + 3 * capacity + i, tl.load(pull + token, mask=live, other=0.0), mask=i < capacity)


@triton.jit
def combine_rows(
    every, at, order, info, offset, log_total, logprob, correct, pull, chunk, capacity, ranks, BLOCK: tl.constexpr
):  # fmt: skip
    """Program per BLOCK rows: statistics of the tokens over the whole vocabulary, from every (ranks, 4, capacity).

    The offset stays what the exponentials here were made with; with it, log_total gives the whole log-sum-exp. All is
    taken relative to the largest offset: nearly always they are one, and no digit of the large number is lost.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < live_rows(info, chunk)
    position = first_row(info, chunk) + i
    token = tl.load(order + position, mask=live, other=0)
    common = tl.full([BLOCK], -float("inf"), tl.float32)
    for rank in range(ranks):
        common = tl.maximum(common, tl.load(every + rank * 4 * capacity + i, mask=live, other=0.0))
    highest = tl.full([BLOCK], -NEVER, tl.float32)  # finite: a shard far below the others sums up to 0, and to −inf
    total = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], 1.0, tl.float32)
    pulled = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        row = every + rank * 4 * capacity + i
        mine = tl.load(row + capacity, mask=live, other=0.0) + (tl.load(row, mask=live, other=0.0) - common)
        higher = tl.maximum(highest, mine)
        total = total * tl.exp2(highest - higher) + tl.exp2(mine - higher)
        highest = higher
        least = tl.minimum(least, tl.load(row + 2 * capacity, mask=live, other=0.0))
        pulled += tl.load(row + 3 * capacity, mask=live, other=0.0)
    whole = highest + tl.log2(total)
    tl.store(log_total + token, whole + (common - tl.load(offset + token, mask=live, other=0.0)), mask=live)
    tl.store(logprob + token, ((tl.load(at + position, mask=live, other=0.0) - common) - whole) * LN2, mask=live)
    tl.store(correct + token, least > 0.0, mask=live)
    tl.store(pull + token, pulled, mask=live)


@triton.jit
def place_rows(rows, out, order, info, chunk, first, tokens, hidden, rows_stride, out_stride, BLOCK: tl.constexpr):
    """Program (row, block of columns): the chunk's row to its token's in out, whose rows are tokens from `first` on."""
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    token = tl.load(order + first_row(info, chunk) + i) - first
    if (token < 0) | (token >= tokens):
        return
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows + i.to(tl.int64) * rows_stride + d, mask=d < hidden, other=0.0)
    tl.store(out + token * out_stride + d, value.to(out.dtype.element_ty), mask=d < hidden)
