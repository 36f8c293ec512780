"""For the tail in FP8: each row's offset, so that few exponentials are large, and what large ones add to dE and dW."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles
from t1lib.heads.kernels.logits import HEADROOM
from t1lib.heads.kernels.tail import LARGEST, MARK, index_at

SHARE = tl.constexpr(40)  # an exponential is large if it is above 1 / SHARE of its row's sum without the largest one
WRONG = tl.constexpr(16)  # factor by which an offset may be too large
SLOTS = tl.constexpr(256)  # most large ones kept per row; with the right offset there are at most SHARE · 448 / 432 + 2
OVER = tl.constexpr(512)  # added to the count of a row that has more large ones than SLOTS
NOWHERE = tl.constexpr(2**31 - 1)  # the class of a slot without an entry


@triton.jit(do_not_specialize=(*tiles.VARYING, "every"))
def offsets(
    row, sums, count, flag, number, tokens, start, size, capacity, splits, every,
    M: tl.constexpr, SPLITS: tl.constexpr, GUESS: tl.constexpr,
):  # fmt: skip
    """Program per row: offset ← one for which exponentials are large above 1 / SHARE of their sum, not counting the
    largest one and the target's. GUESS: from sums over one of `every` columns, whose largest may or may not stand for
    `every` others; the guess is between the two, nearer to the latter. Otherwise only for rows with too many large
    ones, an overflow, or an offset too large by a factor above WRONG; these set their block's flag."""
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
    total = tl.sum(totals, 0)
    rest = total - top
    if GUESS:
        rest = tl.maximum(rest, 1e-5 * total + 1e-37)
        rest *= tl.sqrt(tl.sqrt(total / rest)) * every
    else:
        rest -= tl.where(own < 0.999 * top, own, 0.0)
    rest = tl.maximum(rest, tl.maximum(tl.maximum(top, own) * 1e-5, 1e-30))  # of a row with nothing else
    factor = rest / (LARGEST * SHARE)  # by which 2^offset is wrong
    overflow = highest - offset > HEADROOM
    better = tl.where(overflow, highest - 8, offset + tl.log2(factor))
    if GUESS:
        tl.store(here + tiles.OFFSET * tokens, better)
    elif (tl.load(count + i) > SLOTS) | (factor < 1 / WRONG) | overflow:
        tl.store(here + tiles.OFFSET * tokens, better)
        tl.store(flag + i // M, 1)


@triton.jit(do_not_specialize=tiles.VARYING)
def find(
    z, marks, packed_target, large, excess, count, flag, number, start, size, width, z_stride,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, REDO: tl.constexpr,
):  # fmt: skip
    """Program per row: large (size, SLOTS) ← classes of z's entries that are MARK, but for the target, then NOWHERE;
    count (size) ← their number, up to SLOTS, plus OVER if there are more. `marks` tells which tiles of N columns have
    some: those are listed in `excess` and searched TILES at a time. REDO: only in blocks whose flag is set."""
    i = tl.program_id(0)
    if REDO:  # noqa: SIM102 - a constant: `and` would read the flag in any case
        if tl.load(flag + i // M) == 0:
            return
    live = i < tiles.live_rows(number, start, size)
    across = tl.where(live, tl.cdiv(width, N), 0)
    y = tl.load(packed_target + i)
    out = large + i * SLOTS
    listed = (excess + i * SLOTS).to(tl.pointer_type(tl.int32))
    found = 0
    over = False
    for begin in range(0, across, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        marked = tl.load(marks + i * tl.cdiv(width, N) + tile, mask=tile < across, other=0) != 0
        at = tl.cumsum(marked.to(tl.int32), 0) - 1
        tl.store(listed + at, tile, mask=marked & (at < SLOTS))
        tl.debug_barrier()
        number_of = tl.sum(marked.to(tl.int32), 0)
        for first in range(0, tl.minimum(number_of, SLOTS), TILES):
            which = first + tl.arange(0, TILES)
            looked = tl.load(listed + which, mask=which < number_of, other=across)
            place = tl.reshape(looked[:, None] * N + tl.arange(0, N)[None, :], (TILES * N,))
            code = tl.load(z + i.to(tl.int64) * z_stride + place, mask=place < width, other=0)
            is_large = (code == MARK) & (index_at(place) != y)
            slot = tl.cumsum(is_large.to(tl.int32), 0) - 1 + found
            tl.store(out + slot, index_at(place), mask=is_large & (slot < SLOTS))
            found += tl.sum(is_large.to(tl.int32), 0)
        over = over | (number_of > SLOTS)
        tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    tl.store(out + slot, tl.full([SLOTS], NOWHERE, tl.int32), mask=slot >= found)
    tl.store(count + i, tl.minimum(found, SLOTS) + tl.where(over | (found > SLOTS), OVER, 0))


@triton.jit(do_not_specialize=tiles.VARYING)
def row_terms(
    large, count, excess, x, w, row, de, tokens, start, hidden, x_stride, w_stride, de_stride, softcap,
    BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Program per row: de += Σ more · w; excess ← more · scale. more: by what a large exponential exceeds LARGEST."""
    i = tl.program_id(0)
    found = tl.load(count + i)
    if found == 0:
        return
    d = tl.arange(0, BLOCK)
    inside = d < hidden
    mine = tl.load(x + i.to(tl.int64) * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(row + tiles.OFFSET * tokens + start + i)
    scale = tl.load(row + tiles.SCALE * tokens + start + i)
    unit = softcap * tiles.LOG2E if softcap is not None else 1.0 * tiles.LOG2E
    sums = tl.zeros([BLOCK], tl.float32)
    for s in range(found):
        v = tl.load(large + i * SLOTS + s)
        theirs = tl.load(w + v.to(tl.int64) * w_stride + d, mask=inside, other=0.0).to(tl.float32)
        z = tl.sum(mine * theirs, 0)
        z, slope = tiles.capped(z, softcap, PRECISE, tiles.reciprocal)
        more = tl.exp2(z * unit - offset)
        if softcap is not None:
            more *= slope
        more -= LARGEST
        tl.store(excess + i * SLOTS + s, more * scale)
        sums += more * theirs
    if de is not None:
        at = de + i.to(tl.int64) * de_stride + d
        tl.store(at, tl.load(at, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit
def _terms(entry, some, excess, x, d, inside, x_stride):
    """(entries, columns d): each entry's excess times its row of x."""
    factor = tl.load(excess + entry, mask=some, other=0.0)
    where = x + (entry // SLOTS).to(tl.int64)[:, None] * x_stride + d[None, :]
    value = tl.load(where, mask=some[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return value * factor[:, None]


@triton.jit
def _slots(first, v, last, classes, order, COUNT: tl.constexpr):
    """Of COUNT sorted entries from `first` on: which are of class v, their slots, whether there is one."""
    at = first + tl.arange(0, COUNT)
    mine = tl.load(classes + at, mask=at < last, other=-1) == v
    return mine, tl.load(order + at, mask=at < last, other=0).to(tl.int32), tl.max(mine.to(tl.int32), 0) > 0


@triton.jit
def class_terms(
    classes, order, entries, excess, x, dw, slot, frequent_sums, hidden, x_stride, dw_stride, frequent_sums_stride,
    HEIGHT: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[v] += Σ excess · x over the large entries of class v. classes: sorted, the first `entries` not NOWHERE; order:
    their slots. Items (HEIGHT positions, block of columns) are dealt to the programs. An item does every class that
    begins among its positions, all of it: what the last one has beyond them, MORE entries at a time."""
    last = tl.load(entries).to(tl.int32)
    blocks = tl.cdiv(hidden, BLOCK)
    for item in range(tl.program_id(0), tl.cdiv(last, HEIGHT) * blocks, tl.num_programs(0)):
        next = item // blocks * HEIGHT
        here = next + tl.arange(0, HEIGHT)
        some = here < last
        v = tl.load(classes + here, mask=some, other=-1)
        begins = some & (v != tl.load(classes + here - 1, mask=some & (here > 0), other=-1))
        final = tl.max(tl.where(begins, here, -1), 0)
        if final >= 0:
            d = item % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = d < hidden
            place = tl.load(slot + v, mask=begins, other=-1).to(tl.int64)
            rare = (begins & (place < 0))[:, None] & inside[None, :]
            at_dw = dw + v.to(tl.int64)[:, None] * dw_stride + d[None, :]
            found = tl.load(at_dw, mask=rare, other=0.0).to(tl.float32)
            entry = tl.load(order + here, mask=some, other=0).to(tl.int32)
            terms = _terms(entry, some, excess, x, d, inside, x_stride)
            same = begins[:, None] & (v[:, None] == v[None, :])
            sums = tl.dot(same.to(tl.float32), terms, input_precision="ieee")
            longest = tl.max(v, 0)
            next += HEIGHT
            if tl.load(classes + next, mask=next < last, other=-1) == longest:
                rest = tl.zeros([MORE, BLOCK], tl.float32)
                mine, slots, goes_on = _slots(next, longest, last, classes, order, MORE)
                while goes_on:
                    next += MORE  # looked up while the ones before are added
                    too, ahead, more = _slots(next, longest, last, classes, order, MORE)
                    rest += _terms(slots, mine, excess, x, d, inside, x_stride)
                    mine, slots, goes_on = too, ahead, more
                sums += tl.where((here == final)[:, None], tl.sum(rest, 0)[None, :], 0.0)
            tl.store(at_dw, (found + sums).to(dw.dtype.element_ty), mask=rare)
            often = (place >= 0)[:, None] & inside[None, :]
            apart = frequent_sums + place[:, None] * frequent_sums_stride + d[None, :]
            tl.store(apart, tl.load(apart, mask=often, other=0.0) + sums, mask=often)
