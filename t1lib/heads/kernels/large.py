"""Beside the tail in FP8: each row's offset, so that few exponentials are large, and what the large ones add."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles
from t1lib.heads.kernels.logits import HEADROOM
from t1lib.heads.kernels.tail import LARGEST, MARK, index_at

SHARE = tl.constexpr(128)  # an exponential is large above 1 / SHARE of what its row sums up to, its largest one aside
WRONG = tl.constexpr(16)  # factor by which an offset may be too large
SLOTS = tl.constexpr(256)  # the most large ones of a row: with the right offset it has at most SHARE · 448 / 432 + 2
NOWHERE = tl.constexpr(2**31 - 1)  # the class of a slot without an entry


@triton.jit(do_not_specialize=(*tiles.VARYING, "every"))
def offsets(
    row, sums, count, flag, number, tokens, start, size, capacity, splits, every,
    M: tl.constexpr, SPLITS: tl.constexpr, GUESS: tl.constexpr,
):  # fmt: skip
    """Program per row: offset ← one for which exponentials are large above 1 / SHARE of their sum, their largest one
    and the target's aside. GUESS: from the sums over one of `every` columns, without the largest of each part;
    else only where a row has too many large ones, or its offset is too large by more than WRONG, and the block's flag
    is set."""
    i = tl.program_id(0)
    if i >= tiles.live_rows(number, start, size):
        return
    here = row + start + i
    part = tl.arange(0, SPLITS)
    inside = part < splits
    where = sums + part * capacity + i
    totals = tl.load(where, mask=inside, other=0.0)
    tops = tl.load(where + splits * capacity, mask=inside, other=-float("inf"))
    highest = tl.max(tops, 0)
    offset = tl.load(here + tiles.OFFSET * tokens)
    offset = tl.where(offset > -float("inf"), offset, 0.0)
    top = tl.exp2(highest - offset)
    own = tl.exp2(tl.load(here + tiles.AT * tokens) - offset)
    if GUESS:
        rest = tl.sum(tl.where(tops > -float("inf"), totals - tl.exp2(tops - offset), 0.0), 0) * every
    else:
        rest = tl.sum(totals, 0) - top
        rest -= tl.where(own < 0.999 * top, own, 0.0)
    rest = tl.maximum(rest, tl.maximum(top, own) * 1e-5)  # of a row with nothing else
    off = rest / (LARGEST * SHARE)
    settled = tl.where(highest - offset > HEADROOM, highest - 8, offset + tl.log2(off))
    if GUESS:
        tl.store(here + tiles.OFFSET * tokens, settled)
    elif (tl.load(count + i) > SLOTS) | (off < 1 / WRONG) | (highest - offset > HEADROOM):
        tl.store(here + tiles.OFFSET * tokens, settled)
        tl.store(flag + i // M, 1)


@triton.jit(do_not_specialize=tiles.VARYING)
def find(
    z, marks, large, count, flag, number, start, size, width, z_stride,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, REDO: tl.constexpr,
):  # fmt: skip
    """Program per row: large (size, SLOTS) ← the classes of z's entries that are MARK, the rest NOWHERE; count (size).
    `marks` says in which tiles of N columns there are some. REDO: only in blocks whose flag is set."""
    i = tl.program_id(0)
    if REDO:  # noqa: SIM102 - a constant: `and` would read the flag in any case
        if tl.load(flag + i // M) == 0:
            return
    live = i < tiles.live_rows(number, start, size)
    across = tl.where(live, tl.cdiv(width, N), 0)
    found = 0
    out = large + i * SLOTS
    here = tl.arange(0, BLOCK)
    for begin in range(0, across, BLOCK):
        marked = tl.load(marks + i * tl.cdiv(width, N) + begin + here, mask=begin + here < across, other=0) != 0
        tile = tl.min(tl.where(marked, here, BLOCK), 0)
        while tile < BLOCK:
            place = (begin + tile) * N + tl.arange(0, N)
            is_large = tl.load(z + i.to(tl.int64) * z_stride + place, mask=place < width, other=0) == MARK
            slot = tl.cumsum(is_large.to(tl.int32), 0) - 1 + found
            tl.store(out + slot, index_at(place), mask=is_large & (slot < SLOTS))
            found += tl.sum(is_large.to(tl.int32), 0)
            tile = tl.min(tl.where(marked & (here > tile), here, BLOCK), 0)
    slot = tl.arange(0, SLOTS)
    tl.store(out + slot, tl.full([SLOTS], NOWHERE, tl.int32), mask=slot >= found)
    tl.store(count + i, found)


@triton.jit(do_not_specialize=tiles.VARYING)
def row_terms(
    large, count, excess, x, w, bias, row, de, tokens, start, hidden, x_stride, w_stride, de_stride, softcap,
    BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Program per row: excess ← by how much its large exponentials exceed LARGEST; de += Σ excess · w."""
    i = tl.program_id(0)
    found = tl.load(count + i)
    if found == 0:
        return
    d = tl.arange(0, BLOCK)
    inside = d < hidden
    mine = tl.load(x + i.to(tl.int64) * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(row + tiles.OFFSET * tokens + start + i)
    unit = softcap * tiles.LOG2E if softcap is not None else 1.0 * tiles.LOG2E
    sums = tl.zeros([BLOCK], tl.float32)
    for s in range(found):
        v = tl.load(large + i * SLOTS + s)
        theirs = tl.load(w + v.to(tl.int64) * w_stride + d, mask=inside, other=0.0).to(tl.float32)
        z = tl.sum(mine * theirs, 0)
        if bias is not None:
            z += tl.load(bias + v).to(tl.float32)
        z, slope = tiles.capped(z, softcap, PRECISE, tiles.reciprocal)
        more = tl.exp2(z * unit - offset)
        if softcap is not None:
            more *= slope
        more -= LARGEST
        tl.store(excess + i * SLOTS + s, more)
        sums += more * theirs
    if de is not None:
        at = de + i.to(tl.int64) * de_stride + d
        tl.store(at, tl.load(at, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit(do_not_specialize=tiles.VARYING)
def class_terms(
    classes, order, entries, excess, x, row, dw, db, slot, frequent_sums, tokens, start, hidden, x_stride, dw_stride,
    frequent_sums_stride,
    HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[v] += Σ excess · scale · x and db[v] += Σ excess · scale over the large entries of class v. `classes` are
    sorted, `order` are their slots, the first `entries` hold something. Items (position, block of columns) are dealt to
    the programs; the first position of a class does the work for all of it."""
    last = tl.load(entries).to(tl.int32)
    blocks = tl.cdiv(hidden, BLOCK)
    for item in range(tl.program_id(0), last * blocks, tl.num_programs(0)):
        first = item // blocks
        v = tl.load(classes + first)
        if tl.load(classes + first - 1, mask=first > 0, other=-1) != v:
            d = item % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = d < hidden
            place = tl.load(slot + v).to(tl.int64) if dw is not None else 0
            sums = tl.zeros([HEIGHT, BLOCK], tl.float32)
            factors = tl.zeros([HEIGHT], tl.float32)
            more = True
            while more:
                at = first + tl.arange(0, HEIGHT)
                same = tl.load(classes + at, mask=at < last, other=-1) == v
                entry = tl.load(order + at, mask=same, other=0).to(tl.int32)
                i = entry // SLOTS
                factor = tl.load(row + tiles.SCALE * tokens + start + i, mask=same, other=0.0)
                factor *= tl.load(excess + entry, mask=same, other=0.0)
                at = x + i.to(tl.int64)[:, None] * x_stride + d[None, :]
                value = tl.load(at, mask=same[:, None] & inside[None, :], other=0.0).to(tl.float32)
                sums += value * factor[:, None]
                factors += factor
                more = tl.sum(same.to(tl.int32), 0) == HEIGHT
                first += HEIGHT
            if dw is not None:
                found = tl.sum(sums, 0)
                if place < 0:
                    out = dw + v.to(tl.int64) * dw_stride + d
                    before = tl.load(out, mask=inside, other=0.0).to(tl.float32)
                    tl.store(out, (before + found).to(dw.dtype.element_ty), mask=inside)
                else:
                    apart = frequent_sums + place * frequent_sums_stride + d
                    tl.store(apart, tl.load(apart, mask=inside, other=0.0) + found, mask=inside)
            if db is not None and item % blocks == 0:
                tl.store(db + v, tl.load(db + v) + tl.sum(factors, 0))
