"""The two products of the backward in one launch: dE = z w and dW = zᵀ x."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import even_share, live_rows, load_tile, store_tile


@triton.jit
def products(
    z, zt, w, x, de, dw, even_sum, class_weight, info,
    chunk, capacity, vocab, hidden, first, columns_held, z_rows, x_rows, parts,
    z_stride, w_stride, x_stride, de_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DE: tl.constexpr, DW: tl.constexpr, ADD_DE: tl.constexpr, ADD_DW: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    TMA: tl.constexpr, TMA_W: tl.constexpr, TMA_DW: tl.constexpr, PIECES_DE: tl.constexpr, PIECES_DW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs: first whole units of dE, long and all at the same columns; then tiles of dW, evenly dealt.

    z (z_rows, columns_held) holds the vocabulary's columns from `first` on; zt is z in the transposed product's tiles.
    de (parts · capacity, hidden) float32: one sum for each of `parts` ranges of columns. dw (vocab, hidden).
    EVEN: dw −= c ⊗ even_sum (label smoothing).
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
        for i in tl.range(0, mine + rest, flatten=True):
            tile = tl.where(i < mine, pid - (grid - idle) + i * idle, early + pid + (i - mine) * grid)
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
            store_tile(dw, first + v * M, n * N, tl.minimum(vocab, first + columns_held), hidden, dw_stride, acc,
                       ADD_DW, PIECES_DW, TMA_DW)  # fmt: skip
