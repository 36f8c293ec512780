"""The two products of the gradients in one launch, dE = z w and dW = zᵀ x; and what targets add to dW and dBias."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles


@triton.jit
def first_of(pid, before, grid):
    """Pieces of work are dealt to the programs in turn, like cards, after `before` others: the first one that program
    `pid` gets. Then it gets every `grid`-th."""
    return (pid + grid - before) % grid


@triton.jit
def turns_of(pieces, first, grid):
    """How many pieces a program gets whose first one is `first`."""
    return tl.cdiv(tl.maximum(pieces - first, 0), grid)


@triton.jit
def counted(which, every, pid):
    """How many programs `which` selects, and how many of them come before program `pid`."""
    return tl.sum(which.to(tl.int32), 0), tl.sum((which & (every < pid)).to(tl.int32), 0)


@triton.jit
def extra_tiles(load, steps, down, across, every, pid, grid):
    """Programs with less `load` than the busiest one catch up by extra tiles of `steps` steps, down · across at most.
    They take these in turn: first all such programs, then, for the turns that are left, those that lag most.
    How many program `pid` takes; how many all take; what `tile_of` needs."""
    lag = tl.where(every < grid, (tl.max(load, 0) - load) // (steps + 3), 0)  # 3: an epilogue
    behind, place = counted(lag > 0, every, pid)
    lag = tl.minimum(lag, down * across // tl.maximum(behind, 1))
    turns = tl.min(tl.where(lag > 0, lag, 1 << 30), 0)  # of all that are behind
    furthest, furthest_place = counted(lag > turns, every, pid)
    mine = tl.sum(tl.where(every == pid, lag, 0), 0)
    return mine, tl.sum(lag, 0), (turns, behind, place, furthest, furthest_place)


@triton.jit
def tile_of(i, extra, all_extra, order, begin, grid):
    """The i-th tile of this program: its extra ones, then those dealt to it, which come after all extra ones."""
    turns, behind, place, furthest, furthest_place = order
    own = tl.where(i < turns, place + i * behind, turns * behind + furthest_place + (i - turns) * furthest)
    return tl.where(i < extra, own, all_extra + begin + (i - extra) * grid)


@triton.jit
def even_share(even_sum, class_weight, first, v, column, vocab, hidden, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The tile of c ⊗ even_sum at (first + v, column); c is 1 without class weights."""
    d = column + tl.arange(0, WIDTH)
    share = tl.load(even_sum + d, mask=d < hidden, other=0.0)[None, :]
    if class_weight is not None:
        r = first + v + tl.arange(0, HEIGHT)
        share = share * tl.load(class_weight + r, mask=r < vocab, other=0.0)[:, None]
    return share


@triton.jit(do_not_specialize=tiles.VARYING)
def products(
    z, zt, w, x, w_narrow, x_narrow, de, dw, frequent_sums, frequent_number, even_sum, class_weight,
    number, start, size, capacity, hidden, vocab, first, held, beyond, z_width, parts, group_de, group_dw,
    z_stride, w_stride, x_stride, de_stride, dw_stride, frequent_sums_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDTHS: tl.constexpr, ADD_DE: tl.constexpr, ADD_DW: tl.constexpr,
    PIECES_DE: tl.constexpr, PIECES_DW: tl.constexpr, PROGRAMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs: first whole units of dE, long and all at the same columns; then tiles of dW, of which those
    that had less of dE take `extra_tiles` first, so that all end together. The rest is dealt evenly.
    z (capacity, held): its columns are w's rows from `first` on. zt (capacity, z_width): z in the transposed product's
    tiles; from column `beyond` on, copies of the frequent targets' columns, for frequent_sums instead of dW.
    de (parts · capacity, hidden) float32: one sum for each of `parts` ranges of columns. dw (vocab, hidden).
    group_de row blocks of dE, and group_dw column blocks of dW, go through all columns and all rows together.
    even_sum: dw −= c ⊗ even_sum (label smoothing); c is 1 without class weights.
    WIDTHS: 2 if the last columns come in narrow tiles, N / 2 wide, of w as w_narrow and x as x_narrow.
    PROGRAMS: a power of 2 ≥ the grid."""
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    rows = tiles.live_rows(number, start, size)
    whole = tl.cdiv(hidden, N) if WIDTHS == 1 else hidden // N
    every = tl.arange(0, PROGRAMS)
    load = tl.zeros([PROGRAMS], tl.int32)  # steps of dE per program
    if de is not None:
        steps = tl.cdiv(held, K)
        unit_steps = tl.cdiv(steps, parts)
        down = tl.cdiv(rows, M)
        before = 0
        for narrow in tl.static_range(WIDTHS):
            across = 1 if narrow else whole
            units = down * across * parts
            for unit in range(first_of(pid, before, grid), units, grid):
                m, n = tiles.grouped(unit % (down * across), down, across, group_de)
                n = (narrow * whole + n) * N
                part = unit // (across * down)
                acc = tl.zeros([M, N // (narrow + 1)], tl.float32)
                for k in range(part * unit_steps, tl.minimum((part + 1) * unit_steps, steps)):
                    a = tiles.load_tile(z, m * M, k * K, capacity, held, z_stride, M, K)
                    b = w_narrow if narrow else w
                    b = tiles.load_tile(b, first + k * K, n, vocab, hidden, w_stride, K, N // (narrow + 1))
                    acc = tl.dot(a, b, acc, input_precision=PRECISION)
                at = part * capacity + m * M
                tiles.store_tile(de, at, n, parts * capacity, hidden, de_stride, acc, ADD_DE, PIECES_DE // (narrow + 1))
            turns = turns_of(units, first_of(every, before, grid), grid)
            load += turns * (unit_steps * (16 - 7 * narrow) // 16)  # a narrow tile takes 9 / 16 of a whole one's time
            before = units % grid
    if dw is not None:
        steps = tl.cdiv(rows, K)
        down = tl.where(rows > 0, tl.cdiv(held, M), 0) if ADD_DW else tl.cdiv(held, M)
        extra, all_extra, order = extra_tiles(load, steps, down, whole, every, pid, grid)
        column, end, stride = 0, tl.minimum(vocab, first + held), dw_stride
        before = 0
        for frequent in tl.static_range(1 if frequent_sums is None else 2):  # dW, then frequent_sums
            if frequent:
                column, end, stride = beyond, tl.load(frequent_number), frequent_sums_stride
                down = tl.where(rows > 0, tl.cdiv(end, M), 0)
            for narrow in tl.static_range(WIDTHS):
                across = 1 if narrow else whole
                begin = first_of(pid, before, grid)
                for i in tl.range(0, extra + turns_of(down * across - all_extra, begin, grid), flatten=True):
                    tile = tile_of(i, extra, all_extra, order, begin, grid)
                    n, v = tiles.grouped(tile, across, down, group_dw)
                    n, v = (narrow * whole + n) * N, v * M
                    acc = tl.zeros([M, N // (narrow + 1)], tl.float32)
                    for k in range(0, steps):
                        a = tiles.load_tile(zt, k * K, column + v, capacity, z_width, z_stride, K, M)
                        b = x_narrow if narrow else x
                        b = tiles.load_tile(b, k * K, n, capacity, hidden, x_stride, K, N // (narrow + 1))
                        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
                    if frequent:
                        tiles.store_tile(frequent_sums, v, n, end, hidden, stride, acc, True, PIECES_DE // (narrow + 1))
                    else:
                        if even_sum is not None:
                            acc -= even_share(even_sum, class_weight, first, v, n, vocab, hidden, M, N // (narrow + 1))
                        tiles.store_tile(dw, first + v, n, end, hidden, stride, acc, ADD_DW, PIECES_DW // (narrow + 1))
                before = (down * across - all_extra) % grid
                extra, all_extra = 0, 0


@triton.jit(do_not_specialize=tiles.VARYING)
def target_rows(
    dw, db, frequent_sums, e, order, target, segment_end, row, slot, place, number, tokens, hidden, e_row, e_column,
    frequent_sums_stride, dw_stride, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (h, block of columns). With `place`: for the frequent target h, whose tokens begin at position place[h],
    dw[y] ← frequent_sums[h] + Σ_{n: y_n = y} τ_n e_n. Without: if a target that is not frequent begins at position h,
    dw[y] += Σ τ_n e_n. db[y] += Σ τ_n. Positions are sorted by target (−1: another shard's). HEIGHT: tokens at once."""
    h = tl.program_id(0)
    if h >= tl.load(number):
        return
    i = h if place is None else tl.load(place + h).to(tl.int32)
    y = tl.load(target + i).to(tl.int64)
    if y < 0:
        return
    if place is None:
        another = tl.load(target + i - 1, mask=i > 0, other=-1) == y
        if dw is not None:
            another |= tl.load(slot + y) >= 0
        if another:
            return
    end = tl.load(segment_end + i)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden
    parts = tl.zeros([HEIGHT, BLOCK], tl.float32)
    factors = tl.zeros([HEIGHT], tl.float32)
    for begin in range(i, end, HEIGHT):
        n = begin + tl.arange(0, HEIGHT)
        factor = tl.load(row + tiles.TAU * tokens + n, mask=n < end, other=0.0)
        factors += factor
        if dw is not None:
            token = tl.load(order + n, mask=n < end, other=0)
            at = e + token[:, None] * e_row + d.to(tl.int64)[None, :] * e_column
            value = tl.load(at, mask=(n < end)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            parts += value * factor[:, None]
    if dw is not None:
        out = dw + y * dw_stride + d
        before = out if place is None else frequent_sums + h.to(tl.int64) * frequent_sums_stride + d
        sums = tl.load(before, mask=inside, other=0.0).to(tl.float32) + tl.sum(parts, 0)
        tl.store(out, sums.to(dw.dtype.element_ty), mask=inside)
    if db is not None and tl.program_id(1) == 0:
        tl.store(db + y, tl.load(db + y) + tl.sum(factors, 0))
