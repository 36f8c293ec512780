"""The two products of the backward in one launch: dE = z w and dW = zᵀ x; and dBias = zᵀ s beside the latter."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import even_share, live_rows, load_tile, store_tile


@triton.jit
def _input_units(
    z, w, de, units, unit_steps, blocks, across, steps,
    capacity, vocab, hidden, first, columns_held, z_rows, parts, z_stride, w_stride, de_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr,
    TMA: tl.constexpr, TMA_W: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """This program's units of dE."""
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        n = unit % across
        m = unit // across % blocks
        part = unit // (across * blocks)
        acc = tl.zeros([M, N], tl.float32)
        for k in range(part * unit_steps, tl.minimum((part + 1) * unit_steps, steps)):
            a = load_tile(z, m * M, k * K, z_rows, columns_held, z_stride, M, K, TMA)
            b = load_tile(w, first + k * K, n * N, vocab, hidden, w_stride, K, N, TMA_W)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        at = part * capacity + m * M
        store_tile(de, at, n * N, parts * capacity, hidden, de_stride, acc, ADD, PIECES, TMA)


@triton.jit
def _own_tile(i, mine, early, idle):
    """This program's i-th tile of dW: `mine` of the `early` ones, which idle programs take; then of the rest."""
    pid = tl.program_id(0)
    grid = tl.num_programs(0)
    return tl.where(i < mine, pid - (grid - idle) + i * idle, early + pid + (i - mine) * grid)


@triton.jit
def _put_weight_tile(
    dw, acc, even_sum, class_weight, v, n, vocab, hidden, first, held_until, dw_stride,
    M: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    TMA: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Store a tile of dW or add it, without label smoothing's even share."""
    if EVEN:
        r = first + v * M + tl.arange(0, M)
        acc -= even_share(even_sum, class_weight, r, r < vocab, n * N + tl.arange(0, N), hidden, WEIGHTED)
    store_tile(dw, first + v * M, n * N, held_until, hidden, dw_stride, acc, ADD, PIECES, TMA)


@triton.jit
def _bias_units(
    zt, factors, db, begin, end, inner, first, columns_held, held_until, z_rows, x_rows, z_stride,
    M: tl.constexpr, K: tl.constexpr, BIAS_STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dBias of the rows of dW's tiles from `begin` to `end`. Tiles are small: BIAS_STAGES of them may be underway."""
    for v in tl.range(begin, end, flatten=True):
        acc = tl.zeros([M, 16], tl.float32)
        for k in tl.range(0, inner, num_stages=BIAS_STAGES):
            a = load_tile(zt, k * K, v * M, z_rows, columns_held, z_stride, K, M, TMA)
            b = load_tile(factors, k * K, 0, x_rows, 16, 16, K, 16, TMA)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        r = first + v * M + tl.arange(0, M)
        total = tl.load(db + r, mask=r < held_until, other=0.0) + tl.sum(acc, 1)
        tl.store(db + r, total, mask=r < held_until)


@triton.jit
def _weight_tiles(
    zt, x, dw, even_sum, class_weight, begin, end, across, inner, mine, early, idle,
    vocab, hidden, first, columns_held, held_until, z_rows, x_rows, z_stride, x_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
    WEIGHTED: tl.constexpr, TMA: tl.constexpr, TMA_DW: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """This program's tiles of dW from its `begin`-th to its `end`-th."""
    for i in tl.range(begin, end, flatten=True):
        tile = _own_tile(i, mine, early, idle)
        v = tile // across
        n = tile % across
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, inner):
            a = load_tile(zt, k * K, v * M, z_rows, columns_held, z_stride, K, M, TMA)
            b = load_tile(x, k * K, n * N, x_rows, hidden, x_stride, K, N, TMA)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        _put_weight_tile(
            dw, acc, even_sum, class_weight, v, n, vocab, hidden, first, held_until, dw_stride,
            M, N, ADD, EVEN, WEIGHTED, TMA_DW, PIECES,
        )  # fmt: skip


@triton.jit
def _deal_weight_tiles(
    zt, x, factors, dw, db, even_sum, class_weight, rows, across, units, unit_steps,
    vocab, hidden, first, columns_held, z_rows, x_rows, z_stride, x_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS_STAGES: tl.constexpr, DB: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr, TMA: tl.constexpr, TMA_DW: tl.constexpr, PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """This program's tiles of dW, where `units` of dE, of `unit_steps` steps each, went before. `across`: in a row.

    Its share of dBias it takes on the way, each program at another point: so z is read where the tiles of dW read it,
    and few programs at a time wait for the memory.
    """
    grid = tl.num_programs(0)
    pid = tl.program_id(0)
    inner = tl.cdiv(rows, K)
    heights = tl.cdiv(columns_held, M)
    if ADD and rows == 0:
        heights = 0
    held_until = tl.minimum(vocab, first + columns_held)
    idle = grid - units % grid  # programs with one unit fewer; all of them where units divide evenly
    more = tl.minimum(unit_steps // (inner + 3), heights * across // idle)  # 3: of a tile's epilogue
    more = tl.where(units % grid == 0, 0, more)
    early = more * idle
    mine = tl.where(pid >= grid - idle, more, 0)
    end = mine + tl.cdiv(tl.maximum(heights * across - early - pid, 0), grid)
    begin = 0
    if DB:
        begin = end * pid // grid
        _weight_tiles(
            zt, x, dw, even_sum, class_weight, 0, begin, across, inner, mine, early, idle,
            vocab, hidden, first, columns_held, held_until, z_rows, x_rows, z_stride, x_stride, dw_stride,
            M, N, K, ADD, EVEN, WEIGHTED, TMA, TMA_DW, PIECES, PRECISION,
        )  # fmt: skip
        _bias_units(
            zt, factors, db, heights * pid // grid, heights * (pid + 1) // grid, inner,
            first, columns_held, held_until, z_rows, x_rows, z_stride, M, K, BIAS_STAGES, TMA, PRECISION,
        )  # fmt: skip
    _weight_tiles(
        zt, x, dw, even_sum, class_weight, begin, end, across, inner, mine, early, idle,
        vocab, hidden, first, columns_held, held_until, z_rows, x_rows, z_stride, x_stride, dw_stride,
        M, N, K, ADD, EVEN, WEIGHTED, TMA, TMA_DW, PIECES, PRECISION,
    )  # fmt: skip


@triton.jit
def products(
    z, zt, w, x, factors, de, dw, db, even_sum, class_weight, info,
    chunk, capacity, vocab, hidden, first, columns_held, z_rows, x_rows, parts,
    z_stride, w_stride, x_stride, de_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS_STAGES: tl.constexpr,
    DE: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, ADD_DE: tl.constexpr, ADD_DW: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr,
    TMA: tl.constexpr, TMA_W: tl.constexpr, TMA_DW: tl.constexpr, PIECES_DE: tl.constexpr, PIECES_DW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Persistent programs: first whole units of dE, long and all at the same columns; then tiles of dW, evenly dealt.

    z (z_rows, columns_held) holds the vocabulary's columns from `first` on; zt is z in the transposed product's tiles.
    de (parts · capacity, hidden) float32: one sum for each of `parts` ranges of columns. dw (vocab, hidden).
    EVEN: dw −= c ⊗ even_sum (label smoothing).
    DB: db (vocab) float32 += zᵀ s, where s is the sum of factors' (rows, 16) columns: a narrow product, by BIAS_STAGES.
    Programs without a unit of dE take so many more tiles of dW first that all end together.
    """
    rows = live_rows(info, chunk)
    across = tl.cdiv(hidden, N)
    units = 0
    unit_steps = 0
    if DE:
        steps = tl.cdiv(columns_held, K)
        unit_steps = tl.cdiv(steps, parts)
        blocks = tl.cdiv(rows, M)
        units = blocks * across * parts
        _input_units(
            z, w, de, units, unit_steps, blocks, across, steps,
            capacity, vocab, hidden, first, columns_held, z_rows, parts, z_stride, w_stride, de_stride,
            M, N, K, ADD_DE, TMA, TMA_W, PIECES_DE, PRECISION,
        )  # fmt: skip
    if DW:
        _deal_weight_tiles(
            zt, x, factors, dw, db, even_sum, class_weight, rows, across, units, unit_steps,
            vocab, hidden, first, columns_held, z_rows, x_rows, z_stride, x_stride, dw_stride,
            M, N, K, BIAS_STAGES, DB, ADD_DW, EVEN, WEIGHTED, TMA, TMA_DW, PIECES_DW, PRECISION,
        )  # fmt: skip
