"""What targets add to the gradients of weight and bias, apart from the large product: in float32, rounded once."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import even_share, live_rows, load_tile


@triton.jit
def frequent_rows(
    columns, x, sums, frequent, number, even_sum, class_weight, info,
    chunk, capacity, hidden, width, x_rows, columns_stride, x_stride, sums_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[h] += Σ_n columns[n, h] x[n], in float32. EVEN: −= c ⊗ even_sum, as in `products`.

    Program (M frequent targets, N columns of dW). columns (capacity, width), zero rows up to a multiple of K; x: scaled
    hidden states, likewise.
    """
    start = tl.program_id(0) * M
    count = tl.load(number)
    if start >= count:
        return
    first = tl.program_id(1) * N
    h = start + tl.arange(0, M)
    d = first + tl.arange(0, N)
    inside = (h < count)[:, None] & (d < hidden)[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, live_rows(info, chunk), K):
        a = load_tile(columns, k, start, capacity, width, columns_stride, K, M, TMA)
        b = load_tile(x, k, first, x_rows, hidden, x_stride, K, N, TMA)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
    at = sums + h.to(tl.int64)[:, None] * sums_stride + d[None, :]
    acc += tl.load(at, mask=inside, other=0.0)
    if EVEN:
        y = tl.load(frequent + h, mask=h < count, other=0)
        acc -= even_share(even_sum, class_weight, y, h < count, d, hidden, WEIGHTED)
    tl.store(at, acc, mask=inside)


@triton.jit
def target_rows(
    dw, db, sums, e, order, key, segment_end, tau, slot, info, vocab, hidden, e_row, e_column, sums_stride, dw_stride,
    HEIGHT: tl.constexpr, BLOCK: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    """dw[y] ← (sums[slot[y]] where that is not −1, else dw[y]) + Σ_{n: y_n = y} τ_n e_n for every target y.
    db[y] += Σ τ_n.

    Program (token in order, block of columns). Tokens are sorted by target, and the first of each target writes; key
    is −1 or vocab where another shard of the vocabulary has the target.
    """
    i = tl.program_id(0)
    if i >= tl.load(info):
        return
    y = tl.load(key + i)
    if (y < 0) | (y >= vocab):
        return
    if tl.load(key + i - 1, mask=i > 0, other=-1) == y:
        return
    end = tl.load(segment_end + i)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden
    parts = tl.zeros([HEIGHT, BLOCK], tl.float32)
    factors = tl.zeros([HEIGHT], tl.float32)
    for start in range(i, end, HEIGHT):
        n = start + tl.arange(0, HEIGHT)
        factor = tl.load(tau + n, mask=n < end, other=0.0)
        factors += factor
        if DW:
            token = tl.load(order + n, mask=n < end, other=0)
            at = e + token[:, None] * e_row + d[None, :] * e_column
            row = tl.load(at, mask=(n < end)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            parts += row * factor[:, None]
    if DW:
        out = dw + y.to(tl.int64) * dw_stride + d
        where = tl.load(slot + y).to(tl.int64)
        if where >= 0:
            before = tl.load(sums + where * sums_stride + d, mask=inside, other=0.0)
        else:
            before = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, (before + tl.sum(parts, 0)).to(dw.dtype.element_ty), mask=inside)
    if DB and tl.program_id(1) == 0:
        tl.store(db + y, tl.load(db + y) + tl.sum(factors, 0))
