"""What is done once a token: packing hidden states, finishing statistics and factors, writing dE, sums for dBias."""

import triton
import triton.language as tl

from t1lib.heads.kernels.forward import settled_offset
from t1lib.heads.kernels.tiles import LOG2E, first_row, live_rows, place

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def deal(number, info, blocks_held, M: tl.constexpr):
    """One program: deal `number` tokens, in order, to the fewest chunks of at most `blocks_held` blocks of M rows.

    info ← number, rows of the shorter chunks, how many chunks are one block longer, M.
    """
    tokens = tl.load(number)
    blocks = tl.maximum(tl.cdiv(tokens, M), 1)
    chunks = tl.cdiv(blocks, blocks_held)
    tl.store(info, tokens)
    tl.store(info + 1, blocks // chunks * M)
    tl.store(info + 2, blocks % chunks)
    tl.store(info + 3, M)


@triton.jit
def pack(
    e, x, order, target, packed_target, flag, info, chunk, above, hidden, vocab, e_row, e_column, x_stride,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program per row: x[above + i] ← the token's hidden state, zero where no token is; its target, else −1.

    And flag ← 0 for each block of M rows.
    """
    i = tl.program_id(0)
    live = i < live_rows(info, chunk)
    token = tl.load(order + first_row(info, chunk) + i, mask=live, other=0)
    y = tl.load(target + token, mask=live, other=-1)
    real = (y >= 0) & (y < vocab)  # a target out of range is reported elsewhere; here it must not be followed
    for start in range(0, hidden, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < hidden
        value = tl.load(e + token * e_row + d * e_column, mask=inside & live, other=0.0).to(x.dtype.element_ty)
        tl.store(x + (above + i).to(tl.int64) * x_stride + d, value, mask=inside)
    tl.store(packed_target + i, tl.where(real, y, -1))
    tl.store(flag + i // M, 0, mask=i % M == 0)


@triton.jit
def finish_rows(
    total, top, pull, at, offset, order, info, out_offset, out_log_total, out_logprob, out_correct, out_pull,
    chunk, capacity, splits, SPLITS: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    """Program per row: combine the parts of the vocabulary; statistics go to the token's own place."""
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    position = first_row(info, chunk) + i
    part = tl.arange(0, SPLITS)
    inside = part < splits
    where = part * capacity + i
    log_total = tl.log2(tl.sum(tl.load(total + where, mask=inside, other=0.0), 0))
    highest = tl.max(tl.load(top + where, mask=inside, other=-float("inf")), 0)
    z2 = tl.load(at + position)
    shift = settled_offset(highest, tl.load(offset + position))
    token = tl.load(order + position)
    tl.store(out_offset + token, shift)
    tl.store(out_log_total + token, log_total)
    tl.store(out_logprob + token, ((z2 - shift) - log_total) * LN2)
    # two products of the same operands may differ in their last bits
    tl.store(out_correct + token, z2 >= highest - 1e-6 * tl.maximum(tl.abs(highest), 1.0))
    if PULL:
        tl.store(out_pull + token, tl.sum(tl.load(pull + where, mask=inside, other=0.0), 0) * LN2)


@triton.jit
def entry(z, row, column, width, room, wrap, stride):
    """Pointer to z's entry at (row, column) where it lies in panels."""
    r, c = place(row, column, width, room, wrap)
    return z + r.to(tl.int64) * stride + c


@triton.jit
def _clear(matrix, row, width, stride, BLOCK: tl.constexpr):
    """matrix[row] ← 0."""
    for start in range(0, width, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(matrix + row.to(tl.int64) * stride + c, tl.zeros([BLOCK], matrix.dtype.element_ty), mask=c < width)


@triton.jit
def _store_factor(factors, row, factor):
    """factors[row] (16) ← the factor rounded, what the rounding lost, and zeros."""
    c = tl.arange(0, 16)
    exact = tl.zeros([16], tl.float32) + factor
    rounded = exact.to(factors.dtype.element_ty)
    lost = (exact - rounded.to(tl.float32)).to(factors.dtype.element_ty)
    zero = tl.zeros([16], factors.dtype.element_ty)
    tl.store(factors + row * 16 + c, tl.where(c == 0, rounded, tl.where(c == 1, lost, zero)))


@triton.jit
def _scale_row(x, i, capacity, scale, hidden, x_stride, BLOCK: tl.constexpr):
    """x[i] ← scale · x[capacity + i]."""
    for start in range(0, hidden, BLOCK):
        d = start + tl.arange(0, BLOCK)
        row = tl.load(x + (capacity + i).to(tl.int64) * x_stride + d, mask=d < hidden, other=0.0)
        value = (row.to(tl.float32) * scale).to(x.dtype.element_ty)
        tl.store(x + i.to(tl.int64) * x_stride + d, value, mask=d < hidden)


@triton.jit
def _copy_frequent(
    z, columns, frequent, number, i, y, z_columns, room, wrap, z_stride, columns_stride, BLOCK: tl.constexpr
):
    """columns[i] ← z[i] at the frequent targets, 0 at its own."""
    count = tl.load(number)
    for start in range(0, count, BLOCK):
        h = start + tl.arange(0, BLOCK)
        v = tl.load(frequent + h, mask=h < count, other=0)
        at = entry(z, i, v, z_columns, room, wrap, z_stride)
        value = tl.load(at, mask=(h < count) & (v != y), other=0.0)
        tl.store(columns + i.to(tl.int64) * columns_stride + h, value, mask=h < count)


@triton.jit
def scale_rows(
    z, x, out_offset, out_log_total, out_logprob, order, info, packed_target, gradient, target_factor, base_factor,
    even_factor, frequent, number, columns, factors, row_scale, row_even, tau,
    chunk, capacity, hidden, z_columns, room, wrap, z_stride, x_stride, columns_stride, softcap, z_loss,
    BLOCK: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, SOFTCAP: tl.constexpr, Z_LOSS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Program per row of a chunk of exponentials: the factors that turn them into gradients.

    With s = A / Σ 2^(z2 − offset), row i of dL/dz is s · z[i] except at its target, where it is
    τ = slope · (A (p_y − 1) + A − B), kept by token in order. The target's entry of z becomes 0: neither cancellation
    nor the rounding of s touches τ. For dW the rows of x are scaled by s, and z's columns of the frequent targets
    are copied: columns (capacity, number). For dBias factors (capacity, 16) hold s: its first column rounded, its
    second what the rounding lost. z lies as `exponentials` wrote it.
    """
    i = tl.program_id(0)
    rows = live_rows(info, chunk)
    if i >= rows:
        if DB:
            _store_factor(factors, i, 0.0)
        if DW:  # rows up to the next whole tile take part in products: they must be 0
            _clear(x, i, hidden, x_stride, BLOCK)
            _clear(columns, i, tl.load(number), columns_stride, BLOCK)
        return
    position = first_row(info, chunk) + i
    token = tl.load(order + position)
    y = tl.load(packed_target + i)
    log_total = tl.load(out_log_total + token)
    r = tl.load(gradient + token)
    b = tl.load(target_factor + token)
    a = tl.load(base_factor + token)
    if Z_LOSS:
        a += 2.0 * z_loss * r * (tl.load(out_offset + token) + log_total) * LN2
    logprob = tl.load(out_logprob + token)
    own = a * (tl.exp2(logprob * LOG2E) - 1.0) + (a - b)
    if SOFTCAP:
        t = ((logprob * LOG2E + log_total) + tl.load(out_offset + token)) / (softcap * LOG2E)
        own *= 1.0 - t * t
    scale = a * tl.exp2(-log_total)
    here = y >= 0  # else another shard of the vocabulary has it, and nobody takes this τ
    tl.store(entry(z, i, y, z_columns, room, wrap, z_stride), tl.zeros([], z.dtype.element_ty), mask=here)
    tl.store(row_scale + i, scale)
    if DB:
        _store_factor(factors, i, scale)
    tl.store(tau + position, own)
    if EVEN:
        tl.store(row_even + i, tl.load(even_factor + token))
    if DW:
        _scale_row(x, i, capacity, scale, hidden, x_stride, BLOCK)
        _copy_frequent(z, columns, frequent, number, i, y, z_columns, room, wrap, z_stride, columns_stride, BLOCK)


@triton.jit
def finish_input_gradient(
    de, out, w, order, info, packed_target, row_scale, row_even, tau, even_vector,
    chunk, capacity, hidden, parts, de_stride, out_stride, w_stride,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): sum the parts; with SCALED apply row scale, w_y and the even share; place it.

    PACKED: in the chunk's row of `out` instead of the token's.
    """
    i = tl.program_id(0)
    if i >= live_rows(info, chunk):
        return
    position = first_row(info, chunk) + i
    token = tl.load(order + position)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden
    sums = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        sums += tl.load(de + (part * capacity + i).to(tl.int64) * de_stride + d, mask=inside, other=0.0)
    if SCALED:
        y = tl.load(packed_target + i)
        row = tl.load(w + y * w_stride + d, mask=inside & (y >= 0), other=0.0).to(tl.float32)
        sums = sums * tl.load(row_scale + i) + tl.load(tau + position) * row
        if EVEN:
            sums -= tl.load(row_even + i) * tl.load(even_vector + d, mask=inside, other=0.0)
    where = tl.cast(i, tl.int64) if PACKED else token
    tl.store(out + where * out_stride + d, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(
    x, row_factor, out, info, chunk, columns, row_stride, column_stride,
    BLOCK: tl.constexpr, HEIGHT: tl.constexpr, WEIGHED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, part of the rows): out[part] ← (ADD: +=) Σ_i row_factor_i · x[i]."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    inside = d < columns
    rows = live_rows(info, chunk)
    each = tl.cdiv(tl.cdiv(rows, HEIGHT), tl.num_programs(1)) * HEIGHT
    sums = tl.zeros([HEIGHT, BLOCK], tl.float32)
    for start in range(part * each, tl.minimum(rows, (part + 1) * each), HEIGHT):
        i = start + tl.arange(0, HEIGHT)
        at = i.to(tl.int64)[:, None] * row_stride + d[None, :] * column_stride
        value = tl.load(x + at, mask=(i < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if WEIGHED:
            value *= tl.load(row_factor + i, mask=i < rows, other=0.0)[:, None]
        sums += value
    total = tl.sum(sums, 0)
    at_out = out + part * columns + d
    if ADD:
        total += tl.load(at_out, mask=inside, other=0.0)
    tl.store(at_out, total, mask=inside)
