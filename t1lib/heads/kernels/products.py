"""The two products of the backward in one launch: dE = z w and dW = zᵀ x; and dBias = zᵀ s beside the latter."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import even_share, live_rows, load_tile, store_tile


@triton.jit
def products(
    z, zt, w, x, factors, de, dw, db, even_sum, class_weight, info,
    chunk, capacity, vocab, hidden, first, columns_held, z_rows, x_rows, parts,
    z_stride, w_stride, x_stride, de_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DE: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, ADD_DE: tl.constexpr, ADD_DW: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    TMA: tl.constexpr, TMA_W: tl.constexpr, TMA_DW: tl.constexpr, PIECES_DE: tl.constexpr, PIECES_DW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs: first whole units of dE, long and all at the same columns; then tiles of dW, evenly dealt.

    z (z_rows, columns_held) holds the vocabulary's columns from `first` on; zt is z in the transposed product's tiles.
    de (parts · capacity, hidden) float32: one sum for each of `parts` ranges of columns. dw (vocab, hidden).
    EVEN: dw −= c ⊗ even_sum (label smoothing).
    DB: db (vocab) float32 += zᵀ s, where s is the sum of factors' (rows, 16) columns: a narrow product beside dW's
    first columns, whose tiles come first. To read z once more for it would take longer.
    Programs without a unit of dE take so many more tiles of dW first that all end together.
    """
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    rows = live_rows(info, chunk)
    across = tl.cdiv(hidden, N)
    units = 0
    unit_steps = 0
    if DE:
        steps = tl.cdiv(columns_held, K)
        unit_steps = tl.cdiv(steps, parts)
        blocks = tl.cdiv(rows, M)
        units = blocks * across * parts
        for unit in range(pid, units, grid):
            m = unit % blocks
            n = unit // blocks % across
            part = unit // (blocks * across)
            acc = tl.zeros([M, N], tl.float32)
            for k in range(part * unit_steps, tl.minimum((part + 1) * unit_steps, steps)):
                a = load_tile(z, m * M, k * K, z_rows, columns_held, z_stride, M, K, TMA)
                b = load_tile(w, first + k * K, n * N, vocab, hidden, w_stride, K, N, TMA_W)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
            at = part * capacity + m * M
            store_tile(de, at, n * N, parts * capacity, hidden, de_stride, acc, ADD_DE, PIECES_DE, TMA)
    if DW:
        inner = tl.cdiv(rows, K)
        count = tl.cdiv(columns_held, M) * across
        if ADD_DW and rows == 0:
            count = 0
        idle = grid - units % grid  # programs with one unit fewer; all of them where units divide evenly
        more = tl.minimum(unit_steps // (inner + 3), count // idle)  # 3: of a tile's epilogue
        more = tl.where(units % grid == 0, 0, more)
        early = more * idle
        mine = tl.where(pid >= grid - idle, more, 0)
        rest = tl.cdiv(tl.maximum(count - early - pid, 0), grid)
        held_until = tl.minimum(vocab, first + columns_held)
        with_bias = 0
        if DB:
            heights = count // across
            with_bias = tl.minimum(tl.maximum(tl.cdiv(heights - (pid - (grid - idle)), idle), 0), mine)
            with_bias += tl.minimum(tl.maximum(tl.cdiv(heights - early - pid, grid), 0), rest)
            for i in range(0, with_bias):  # flattened, its two products would wait for one another
                v = tl.where(i < mine, pid - (grid - idle) + i * idle, early + pid + (i - mine) * grid)
                acc = tl.zeros([M, N], tl.float32)
                sums = tl.zeros([M, 16], tl.float32)
                for k in tl.range(0, inner, num_stages=3):
                    a = load_tile(zt, k * K, v * M, z_rows, columns_held, z_stride, K, M, TMA)
                    b = load_tile(x, k * K, 0, x_rows, hidden, x_stride, K, N, TMA)
                    s = load_tile(factors, k * K, 0, x_rows, 16, 16, K, 16, TMA)
                    acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
                    sums = tl.dot(a.T, s, sums, input_precision=PRECISION)
                r = first + v * M + tl.arange(0, M)
                total = tl.load(db + r, mask=r < held_until, other=0.0) + tl.sum(sums, 1)
                tl.store(db + r, total, mask=r < held_until)
                if EVEN:
                    acc -= even_share(even_sum, class_weight, r, r < vocab, tl.arange(0, N), hidden, WEIGHTED)
                store_tile(dw, first + v * M, 0, held_until, hidden, dw_stride, acc, ADD_DW, PIECES_DW, TMA_DW)
        for i in tl.range(with_bias, mine + rest, flatten=True):
            tile = tl.where(i < mine, pid - (grid - idle) + i * idle, early + pid + (i - mine) * grid)
            if DB:
                v = (tile - count // across) // tl.maximum(across - 1, 1)
                n = 1 + (tile - count // across) % tl.maximum(across - 1, 1)
            else:
                v = tile // across
                n = tile % across
            acc = tl.zeros([M, N], tl.float32)
            for k in range(0, inner):
                a = load_tile(zt, k * K, v * M, z_rows, columns_held, z_stride, K, M, TMA)
                b = load_tile(x, k * K, n * N, x_rows, hidden, x_stride, K, N, TMA)
                acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
            if EVEN:
                r = first + v * M + tl.arange(0, M)
                acc -= even_share(even_sum, class_weight, r, r < vocab, n * N + tl.arange(0, N), hidden, WEIGHTED)
            store_tile(dw, first + v * M, n * N, held_until, hidden, dw_stride, acc, ADD_DW, PIECES_DW, TMA_DW)
