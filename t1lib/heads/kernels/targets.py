"""What targets add to the gradients of weight and bias, apart from the large product: in float32, rounded once."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import first_row, live_rows, load_tile


@triton.jit
def target_rows(
    dw, sums, x, target, segment_end, row_target, slot, info, chunk, capacity, hidden, x_stride, sums_stride, dw_stride,
    HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[y] += Σ_{n: y_n = y} τ_n x[capacity + n] for every target y of the chunk; sums[slot[y]] where that is not −1.

    Program (row of the chunk, block of columns). Rows are sorted by target, and the first of each target writes.
    """
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    y = tl.load(target + i)
    if tl.load(target + i - 1, mask=i > 0, other=-1) == y:
        return
    begin = first_row(info, chunk)
    end = tl.load(segment_end + begin + i) - begin
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden
    parts = tl.zeros([HEIGHT, BLOCK], tl.float32)
    for start in range(i, end, HEIGHT):
        n = start + tl.arange(0, HEIGHT)
        mask = (n < end)[:, None] & inside[None, :]
        e = tl.load(x + (capacity + n).to(tl.int64)[:, None] * x_stride + d[None, :], mask=mask, other=0.0)
        parts += e.to(tl.float32) * tl.load(row_target + n, mask=n < end, other=0.0)[:, None]
    acc = tl.sum(parts, 0)
    where = tl.load(slot + y).to(tl.int64)
    if where >= 0:
        at = sums + where * sums_stride + d
        tl.store(at, tl.load(at, mask=inside, other=0.0) + acc, mask=inside)
    else:
        row = dw + y.to(tl.int64) * dw_stride + d
        acc += tl.load(row, mask=inside, other=0.0).to(tl.float32)
        tl.store(row, acc.to(dw.dtype.element_ty), mask=inside)


@triton.jit
def frequent_rows(
    columns, x, sums, dw, frequent, number, even_sum, class_weight, info,
    chunk, capacity, hidden, width, x_rows, columns_stride, x_stride, sums_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[h] += Σ_n columns[n, h] x[n], in float32; LAST: dw[frequent[h]] ← sums[h].

    Program (M frequent targets, N columns of dw). columns (capacity, width), zero rows up to a multiple of K; x: scaled
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
    y = tl.load(frequent + h, mask=h < count, other=0)
    if EVEN:
        per_class = tl.full([M], 1.0, tl.float32)
        if WEIGHTED:
            per_class *= tl.load(class_weight + y)
        acc -= per_class[:, None] * tl.load(even_sum + d, mask=d < hidden, other=0.0)[None, :]
    if LAST:
        tl.store(dw + y.to(tl.int64)[:, None] * dw_stride + d[None, :], acc.to(dw.dtype.element_ty), mask=inside)
    else:
        tl.store(at, acc, mask=inside)


@triton.jit
def target_entries(out, target, segment_end, row_target, info, chunk, BLOCK: tl.constexpr):
    """out[y] += Σ_{n: y_n = y} τ_n for every target y of the chunk; program per row, a target's first one writes."""
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    y = tl.load(target + i)
    if tl.load(target + i - 1, mask=i > 0, other=-1) == y:
        return
    begin = first_row(info, chunk)
    end = tl.load(segment_end + begin + i) - begin
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(i, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        sums += tl.load(row_target + n, mask=n < end, other=0.0)
    tl.store(out + y, tl.load(out + y) + tl.sum(sums, 0))
