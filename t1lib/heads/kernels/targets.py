"""Rows of dW and entries of dBias that belong to targets: their own gradients are added in float32, before rounding."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import live_rows


@triton.jit
def gather_columns(z, out, target, info, chunk, z_stride, out_stride, BLOCK: tl.constexpr):
    """Program per row: out[i, j] ← z[i, target_j], the exponentials in the columns of the chunk's own targets."""
    i = tl.program_id(0)
    rows = live_rows(info, chunk)
    for start in range(0, rows, BLOCK):
        j = start + tl.arange(0, BLOCK)
        y = tl.load(target + j, mask=j < rows, other=0)
        value = tl.load(z + i.to(tl.int64) * z_stride + y, mask=(j < rows) & (i < rows), other=0.0)
        tl.store(out + i.to(tl.int64) * out_stride + j, value, mask=j < rows)


@triton.jit
def target_rows(
    columns, x, dw, target, segment_end, row_target, even_sum, class_weight, info,
    chunk, capacity, hidden, columns_stride, x_stride, dw_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[y] += Σ_n z[n, y] x[n] + Σ_{n: y_n = y} τ_n x[capacity + n], for every target y of the chunk, rounded once.

    Program (M of the chunk's rows, N columns of dw): rows are sorted by target, and the first of each target writes.
    columns (rows, rows) from `gather_columns`; x: scaled hidden states, and from row `capacity` on the unscaled ones.
    """
    rows = live_rows(info, chunk)
    start = tl.program_id(0) * M
    if start >= rows:
        return
    begin = chunk * tl.load(info + 1)
    i = start + tl.arange(0, M)
    d = tl.program_id(1) * N + tl.arange(0, N)
    inside = d < hidden
    y = tl.load(target + i, mask=i < rows, other=-1)
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, rows, K):
        n = k + tl.arange(0, K)
        real = n < rows
        a = tl.load(columns + n.to(tl.int64)[:, None] * columns_stride + i[None, :],
                    mask=real[:, None] & (i < rows)[None, :], other=0.0)  # fmt: skip
        b = tl.load(x + n.to(tl.int64)[:, None] * x_stride + d[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
    last = tl.minimum(start + M, rows) - 1
    for k in range(start, tl.load(segment_end + begin + last) - begin, K):
        n = k + tl.arange(0, K)
        real = n < rows
        tau = tl.load(row_target + n, mask=real, other=0.0)
        hit = tl.load(target + n, mask=real, other=-2)[None, :] == y[:, None]
        own = tl.where(hit, tau[None, :], 0.0).to(x.dtype.element_ty)
        at = x + (capacity + n).to(tl.int64)[:, None] * x_stride + d[None, :]
        acc = tl.dot(own, tl.load(at, mask=real[:, None] & inside[None, :], other=0.0), acc, input_precision=PRECISION)
    if EVEN:
        per_class = tl.full([M], 1.0, tl.float32)
        if WEIGHTED:
            per_class *= tl.load(class_weight + y, mask=y >= 0, other=0.0)
        acc -= per_class[:, None] * tl.load(even_sum + d, mask=inside, other=0.0)[None, :]
    first = (i < rows) & ((i == 0) | (tl.load(target + i - 1, mask=(i > 0) & (i < rows), other=-1) != y))
    at = dw + y.to(tl.int64)[:, None] * dw_stride + d[None, :]
    written = first[:, None] & inside[None, :]
    tl.store(at, (tl.load(at, mask=written, other=0.0).to(tl.float32) + acc).to(dw.dtype.element_ty), mask=written)


@triton.jit
def target_entries(out, target, segment_end, row_target, info, chunk, BLOCK: tl.constexpr):
    """out[y] += Σ_{n: y_n = y} τ_n for every target y of the chunk; program per row, the first of each target writes."""
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    y = tl.load(target + i)
    if i > 0:
        if tl.load(target + i - 1) == y:
            return
    begin = chunk * tl.load(info + 1)
    end = tl.load(segment_end + begin + i) - begin
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(i, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        sums += tl.load(row_target + n, mask=n < end, other=0.0)
    tl.store(out + y, tl.load(out + y) + tl.sum(sums, 0))
