"""The two products of the gradients in one launch, dE = z w and dW = zᵀ x; and what targets add to dW and dBias."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles


@triton.jit
def counted(which, every, pid):
    """How many programs `which` selects, and how many of them come before program `pid`."""
    return tl.sum(which.to(tl.int32), 0), tl.sum((which & (every < pid)).to(tl.int32), 0)


@triton.jit(do_not_specialize=tiles.VARYING)
def products(
    z, zt, w, x, w_end, x_end, de, dw, frequent_sums, frequent_number, even_sum, class_weight,
    number, start, size, capacity, hidden, vocab, first, held, beyond, z_width, parts, group_de, group_dw,
    z_stride, w_stride, x_stride, de_stride, dw_stride, frequent_sums_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ENDS: tl.constexpr, ADD_DE: tl.constexpr, ADD_DW: tl.constexpr,
    PIECES_DE: tl.constexpr, PIECES_DW: tl.constexpr, PROGRAMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs: first whole units of dE, long and all at the same columns; then tiles of dW. Of these,
    programs that had less of dE first take as many as let all end together; the rest is dealt evenly.
    z (capacity, held): its columns are w's rows from `first` on. zt (capacity, z_width): z in the transposed product's
    tiles; from column `beyond` on, copies of the frequent targets' columns, for frequent_sums instead of dW.
    de (parts · capacity, hidden) float32: one sum for each of `parts` ranges of columns. dw (vocab, hidden).
    group_de row blocks of dE, and group_dw column blocks of dW, go through all columns and all rows together.
    even_sum: dw −= c ⊗ even_sum (label smoothing); c is 1 without class weights.
    ENDS: 2 if the last columns come in tiles of N / 2, of w as w_end and x as x_end. PROGRAMS: a power of 2 ≥ grid."""
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    rows = tiles.live_rows(number, start, size)
    across = tl.cdiv(hidden, N) if ENDS == 1 else hidden // N
    every = tl.arange(0, PROGRAMS)
    load = tl.zeros([PROGRAMS], tl.int32)  # steps of dE per program
    dealt = 0
    if de is not None:
        steps = tl.cdiv(held, K)
        unit_steps = tl.cdiv(steps, parts)
        blocks = tl.cdiv(rows, M)
        for end in tl.static_range(ENDS):
            wide = across if end == 0 else 1
            units = blocks * wide * parts
            for unit in range((pid + grid - dealt) % grid, units, grid):
                m, n = tiles.grouped(unit % (blocks * wide), blocks, wide, group_de)
                n = (end * across + n) * N
                part = unit // (wide * blocks)
                acc = tl.zeros([M, N // (end + 1)], tl.float32)
                for k in range(part * unit_steps, tl.minimum((part + 1) * unit_steps, steps)):
                    a = tiles.load_tile(z, m * M, k * K, capacity, held, z_stride, M, K)
                    b = w if end == 0 else w_end
                    b = tiles.load_tile(b, first + k * K, n, vocab, hidden, w_stride, K, N // (end + 1))
                    acc = tl.dot(a, b, acc, input_precision=PRECISION)
                at = part * capacity + m * M
                tiles.store_tile(de, at, n, parts * capacity, hidden, de_stride, acc, ADD_DE, PIECES_DE // (end + 1))
            turns = tl.cdiv(tl.maximum(units - (every + grid - dealt) % grid, 0), grid)
            load += turns * (unit_steps * (16 - 7 * end) // 16)  # half a tile takes 9 / 16 of the time of a whole one
            dealt = units % grid
    if dw is not None:
        inner = tl.cdiv(rows, K)
        down = tl.where(rows > 0, tl.cdiv(held, M), 0) if ADD_DW else tl.cdiv(held, M)
        fewer = tl.where(every < grid, (tl.max(load, 0) - load) // (inner + 3), 0)  # 3: an epilogue
        idle, place = counted(fewer > 0, every, pid)
        fewer = tl.minimum(fewer, down * across // tl.maximum(idle, 1))
        low = tl.min(tl.where(fewer > 0, fewer, 1 << 30), 0)  # turns that all idle programs take; then only the idlest
        idlest, idlest_place = counted(fewer > low, every, pid)
        mine = tl.sum(tl.where(every == pid, fewer, 0), 0)
        ahead = tl.sum(fewer, 0)
        dealt = 0
        column, height, stride = 0, tl.minimum(vocab, first + held), dw_stride
        for extra in tl.static_range(1 if frequent_sums is None else 2):  # dW, then frequent_sums
            if extra:
                column, height, stride = beyond, tl.load(frequent_number), frequent_sums_stride
                down = tl.where(rows > 0, tl.cdiv(height, M), 0)
            for end in tl.static_range(ENDS):
                wide = across if end == 0 else 1
                turn = (pid + grid - dealt) % grid
                for i in tl.range(0, mine + tl.cdiv(tl.maximum(down * wide - ahead - turn, 0), grid), flatten=True):
                    early = tl.where(i < low, place + i * idle, low * idle + idlest_place + (i - low) * idlest)
                    tile = tl.where(i < mine, early, ahead + turn + (i - mine) * grid)
                    n, v = tiles.grouped(tile, wide, down, group_dw)
                    n, v = (end * across + n) * N, v * M
                    acc = tl.zeros([M, N // (end + 1)], tl.float32)
                    for k in range(0, inner):
                        a = tiles.load_tile(zt, k * K, column + v, capacity, z_width, z_stride, K, M)
                        b = x if end == 0 else x_end
                        b = tiles.load_tile(b, k * K, n, capacity, hidden, x_stride, K, N // (end + 1))
                        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
                    if even_sum is not None and not extra:
                        d = n + tl.arange(0, N // (end + 1))
                        share = tl.load(even_sum + d, mask=d < hidden, other=0.0)[None, :]
                        if class_weight is not None:
                            r = first + v + tl.arange(0, M)
                            share = share * tl.load(class_weight + r, mask=r < vocab, other=0.0)[:, None]
                        acc -= share
                    if extra:
                        tiles.store_tile(frequent_sums, v, n, height, hidden, stride, acc, True, PIECES_DE // (end + 1))
                    else:
                        tiles.store_tile(dw, first + v, n, height, hidden, stride, acc, ADD_DW, PIECES_DW // (end + 1))
                dealt = (down * wide - ahead) % grid
                mine, ahead = 0, 0


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
