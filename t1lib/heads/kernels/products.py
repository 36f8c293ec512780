"""The two products of the gradients in one launch, dE = z w and dW = zᵀ x; and what targets add to dW and dBias."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles


@triton.jit(do_not_specialize=tiles.VARYING)
def products(
    z, zt, w, x, de, dw, even_sum, class_weight, number, start, size, capacity, hidden,
    vocab, first, held, x_rows, parts, z_stride, w_stride, x_stride, de_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ADD_DE: tl.constexpr, ADD_DW: tl.constexpr,
    PIECES_DE: tl.constexpr, PIECES_DW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs: first whole units of dE, long and all at the same columns; then tiles of dW, evenly dealt:
    programs with one unit of dE fewer take so many tiles first that all end together.
    z (capacity, held): columns of w's rows from `first` on; zt is z in the transposed product's tiles.
    de (parts · capacity, hidden) float32: one sum for each of `parts` ranges of columns. dw (vocab, hidden).
    even_sum: dw −= c ⊗ even_sum (label smoothing); c is 1 without class weights."""
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    rows = tiles.live_rows(number, start, size)
    across = tl.cdiv(hidden, N)
    units = 0
    unit_steps = 0
    if de is not None:
        steps = tl.cdiv(held, K)
        unit_steps = tl.cdiv(steps, parts)
        blocks = tl.cdiv(rows, M)
        units = blocks * across * parts
        for unit in range(pid, units, grid):
            n = unit % across
            m = unit // across % blocks
            part = unit // (across * blocks)
            acc = tl.zeros([M, N], tl.float32)
            for k in range(part * unit_steps, tl.minimum((part + 1) * unit_steps, steps)):
                a = tiles.load_tile(z, m * M, k * K, capacity, held, z_stride, M, K)
                b = tiles.load_tile(w, first + k * K, n * N, vocab, hidden, w_stride, K, N)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
            at = part * capacity + m * M
            tiles.store_tile(de, at, n * N, parts * capacity, hidden, de_stride, acc, ADD_DE, PIECES_DE)
    if dw is not None:
        inner = tl.cdiv(rows, K)
        total = tl.cdiv(held, M) * across
        if ADD_DW and rows == 0:
            total = 0
        held_until = tl.minimum(vocab, first + held)
        idle = grid - units % grid  # programs with one unit fewer; all of them where units divide evenly
        more = tl.where(units % grid == 0, 0, tl.minimum(unit_steps // (inner + 3), total // idle))  # 3: an epilogue
        ahead = more * idle
        mine = tl.where(pid >= grid - idle, more, 0)
        for i in tl.range(0, mine + tl.cdiv(tl.maximum(total - ahead - pid, 0), grid), flatten=True):
            tile = tl.where(i < mine, pid - (grid - idle) + i * idle, ahead + pid + (i - mine) * grid)
            v = tile // across
            n = tile % across
            acc = tl.zeros([M, N], tl.float32)
            for k in range(0, inner):
                a = tiles.load_tile(zt, k * K, v * M, capacity, held, z_stride, K, M)
                b = tiles.load_tile(x, k * K, n * N, x_rows, hidden, x_stride, K, N)
                acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
            if even_sum is not None:
                d = n * N + tl.arange(0, N)
                share = tl.load(even_sum + d, mask=d < hidden, other=0.0)[None, :]
                if class_weight is not None:
                    r = first + v * M + tl.arange(0, M)
                    share = share * tl.load(class_weight + r, mask=r < vocab, other=0.0)[:, None]
                acc -= share
            tiles.store_tile(dw, first + v * M, n * N, held_until, hidden, dw_stride, acc, ADD_DW, PIECES_DW)


@triton.jit(do_not_specialize=tiles.VARYING)
def frequent_rows(
    columns, x, frequent_sums, frequent_number, number, start, size, capacity, hidden,
    width, x_rows, columns_stride, x_stride, frequent_sums_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (M frequent targets, N columns of dW): frequent_sums[h] += Σ_n columns[n, h] x[n], in float32. columns
    (capacity, width) and x, scaled hidden states, have zero rows up to a multiple of K."""
    above = tl.program_id(0) * M
    count = tl.load(frequent_number)
    if above >= count:
        return
    left = tl.program_id(1) * N
    h = above + tl.arange(0, M)
    d = left + tl.arange(0, N)
    inside = (h < count)[:, None] & (d < hidden)[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, tiles.live_rows(number, start, size), K):
        a = tiles.load_tile(columns, k, above, capacity, width, columns_stride, K, M)
        b = tiles.load_tile(x, k, left, x_rows, hidden, x_stride, K, N)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
    at = frequent_sums + h.to(tl.int64)[:, None] * frequent_sums_stride + d[None, :]
    tl.store(at, acc + tl.load(at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=tiles.VARYING)
def target_rows(
    dw, db, frequent_sums, e, order, target, segment_end, row, slot, number, tokens, hidden, e_row, e_column,
    frequent_sums_stride, dw_stride, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (position, block of columns): for every target y, dw[y] ← Σ_{n: y_n = y} τ_n e_n + (dw[y], or where there
    is one frequent_sums[slot[y]]); db[y] += Σ τ_n. Sorted by target (−1: another shard's): the first of each writes."""
    i = tl.program_id(0)
    if i >= tl.load(number):
        return
    y = tl.load(target + i).to(tl.int64)
    if y < 0:
        return
    if tl.load(target + i - 1, mask=i > 0, other=-1) == y:
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
        where = tl.load(slot + y).to(tl.int64)
        if where >= 0:
            before = tl.load(frequent_sums + where * frequent_sums_stride + d, mask=inside, other=0.0)
        else:
            before = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, (before + tl.sum(parts, 0)).to(dw.dtype.element_ty), mask=inside)
    if db is not None and tl.program_id(1) == 0:
        tl.store(db + y, tl.load(db + y) + tl.sum(factors, 0))
