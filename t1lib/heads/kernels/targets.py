"""What targets add to the gradients of weight and bias: summed in float32, apart from the large product."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import live_rows


@triton.jit
def frequent_rows(
    columns, x, sums, dw, frequent, number, target, row_target, even_sum, class_weight, info,
    chunk, capacity, hidden, columns_stride, x_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[h] += Σ_n columns[n, h] x[n] + Σ_{n: y_n = frequent[h]} τ_n x[capacity + n], in float32; LAST: dw ← sums.

    Program (M frequent targets, N columns of dw). x: scaled hidden states, and from row `capacity` on the unscaled.
    """
    start = tl.program_id(0) * M
    count = tl.load(number)
    if start >= count:
        return
    rows = live_rows(info, chunk)
    h = start + tl.arange(0, M)
    d = tl.program_id(1) * N + tl.arange(0, N)
    inside = (h < count)[:, None] & (d < hidden)[None, :]
    y = tl.load(frequent + h, mask=h < count, other=0)
    at = sums + h.to(tl.int64)[:, None] * hidden + d[None, :]
    if FIRST:
        acc = tl.zeros([M, N], tl.float32)
    else:
        acc = tl.load(at, mask=inside, other=0.0)
    for k in range(0, rows, K):
        n = k + tl.arange(0, K)
        real = n < rows
        a = tl.load(columns + n.to(tl.int64)[:, None] * columns_stride + h[None, :],
                    mask=real[:, None] & (h < count)[None, :], other=0.0)  # fmt: skip
        row = x + n.to(tl.int64)[:, None] * x_stride + d[None, :]
        unscaled = x + (capacity + n).to(tl.int64)[:, None] * x_stride + d[None, :]
        mask = real[:, None] & (d < hidden)[None, :]
        acc = tl.dot(a.T, tl.load(row, mask=mask, other=0.0), acc, input_precision=PRECISION)
        hit = tl.load(target + n, mask=real, other=-2)[None, :] == y[:, None]
        own = tl.where(hit, tl.load(row_target + n, mask=real, other=0.0)[None, :], 0.0).to(x.dtype.element_ty)
        acc = tl.dot(own, tl.load(unscaled, mask=mask, other=0.0), acc, input_precision=PRECISION)
    if EVEN:
        per_class = tl.full([M], 1.0, tl.float32)
        if WEIGHTED:
            per_class *= tl.load(class_weight + y)
        acc -= per_class[:, None] * tl.load(even_sum + d, mask=d < hidden, other=0.0)[None, :]
    if LAST:
        out = dw + y.to(tl.int64)[:, None] * dw_stride + d[None, :]
        tl.store(out, acc.to(dw.dtype.element_ty), mask=inside)
    else:
        tl.store(at, acc, mask=inside)


@triton.jit
def other_rows(
    dw, x, target, segment_end, row_target, is_frequent, info, chunk, capacity, hidden, x_stride, dw_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dw[y] += Σ_{n: y_n = y} τ_n x[capacity + n] for every target that is not frequent; program per row of the chunk.

    Rows are sorted by target, and the first of each target writes.
    """
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    y = tl.load(target + i)
    before = tl.load(target + i - 1, mask=i > 0, other=-1)
    if (before == y) | (tl.load(is_frequent + y) != 0):
        return
    begin = chunk * tl.load(info + 1)
    end = tl.load(segment_end + begin + i) - begin
    for start in range(0, hidden, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < hidden
        acc = tl.load(dw + y.to(tl.int64) * dw_stride + d, mask=inside, other=0.0).to(tl.float32)
        for n in range(i, end):
            e = tl.load(x + (capacity + n).to(tl.int64) * x_stride + d, mask=inside, other=0.0).to(tl.float32)
            acc += tl.load(row_target + n) * e
        tl.store(dw + y.to(tl.int64) * dw_stride + d, acc.to(dw.dtype.element_ty), mask=inside)


@triton.jit
def target_entries(out, target, segment_end, row_target, info, chunk, BLOCK: tl.constexpr):
    """out[y] += Σ_{n: y_n = y} τ_n for every target y of the chunk; program per row, the first of each target writes."""
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    y = tl.load(target + i)
    if tl.load(target + i - 1, mask=i > 0, other=-1) == y:
        return
    begin = chunk * tl.load(info + 1)
    end = tl.load(segment_end + begin + i) - begin
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(i, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        sums += tl.load(row_target + n, mask=n < end, other=0.0)
    tl.store(out + y, tl.load(out + y) + tl.sum(sums, 0))
