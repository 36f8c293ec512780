"""Kernels that run once per call (order, factors; in PyTorch these would be some fifty launches) or per row of a chunk:
packing hidden states, finishing statistics and factors, writing dE, sums for dBias."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles
from t1lib.heads.kernels.logits import settled_offset


@triton.jit(do_not_specialize=("tokens", "ignore_index"))
def sort_keys(
    token_target, token_weight, whole_class_weight, key, number, denominator, in_range, tokens, ignore_index, classes,
    BY_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. key (tokens) ← what tokens are sorted by, so that ignored ones come last. BY_TARGET: the target, or
    `classes` if ignored; otherwise 0, or 1 if ignored. number ← how many count; denominator ← the sum of their token
    weights times their targets' class weights; in_range ← whether their targets are in [0, classes)."""
    count = 0
    total = 0.0
    wrong = 0
    for begin in range(0, tokens, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        y = tl.load(token_target + n, mask=n < tokens, other=0)
        valid = (n < tokens) & (y != ignore_index)
        wrong += tl.sum((valid & ((y < 0) | (y >= classes))).to(tl.int32), 0)
        y = tl.minimum(tl.maximum(y, 0), classes - 1)
        weight = valid.to(tl.float32)
        if token_weight is not None:
            weight *= tl.load(token_weight + n, mask=valid, other=0.0)
        if whole_class_weight is not None:
            weight *= tl.load(whole_class_weight + y, mask=valid, other=0.0)
        count += tl.sum(valid.to(tl.int32), 0)
        total += tl.sum(weight, 0)
        by = tl.where(valid, y, classes) if BY_TARGET else 1 - valid.to(tl.int32)
        tl.store(key + n, by.to(key.dtype.element_ty), mask=n < tokens)
    tl.store(number, count)
    tl.store(denominator, total)
    tl.store(in_range, (wrong == 0).to(tl.int8))


@triton.jit(do_not_specialize=("tokens", "first", "upstream_stride"))
def fill_rows(
    order, token_target, token_weight, whole_class_weight, class_sum, upstream, denominator, number, target, row,
    tokens, first, vocab, classes, smooth, upstream_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program per BLOCK tokens in order: target ← the target as a row of this process's weight, −1 if it has none;
    row ← r, A without its z-loss part (everything), B (own) and E (even) of the gradient's equation in `chunked`."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = n < tl.load(number)
    token = tl.load(order + n, mask=live, other=0)
    y = tl.load(token_target + token, mask=live, other=-1)
    local = y - first
    local = tl.where(live & (local >= 0) & (local < vocab), local, -1)
    tl.store(target + n, local.to(tl.int32), mask=n < tokens)
    r = tl.full([BLOCK], 1.0, tl.float32)
    if upstream is not None:
        r = tl.load(upstream + token * upstream_stride, mask=live, other=0.0)
    if token_weight is not None:
        r *= tl.load(token_weight + token, mask=live, other=0.0)
    if denominator is not None:
        r /= tl.load(denominator)
    r = tl.where(live, r, 0.0)  # last, as the division is by 0 if all are ignored
    own = r
    if whole_class_weight is not None:
        own *= tl.load(whole_class_weight + y, mask=live & (y >= 0) & (y < classes), other=0.0)
    even = tl.zeros([BLOCK], tl.float32)
    everything = own
    if smooth is not None:
        own *= 1.0 - smooth
        even = r * (smooth / classes)
        everything = own + even * (classes if class_sum is None else tl.load(class_sum))
    inside = n < tokens
    tl.store(row + tiles.TOKEN * tokens + n, r, mask=inside)
    tl.store(row + tiles.SOFTMAX * tokens + n, everything, mask=inside)
    tl.store(row + tiles.TARGET * tokens + n, own, mask=inside)
    tl.store(row + tiles.EVEN * tokens + n, even, mask=inside)


@triton.jit(do_not_specialize=tiles.VARYING)
def pack(
    e, x, order, target, packed_target, flag, number, start, size, hidden, e_row, e_column, x_stride,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program per row: x[i] ← the token's hidden state, zero where no token is; packed_target ← its target,
    else −1; and flag ← 0 for each block of M rows."""
    i = tl.program_id(0)
    live = i < tiles.live_rows(number, start, size)
    token = tl.load(order + start + i, mask=live, other=0)
    for begin in range(0, hidden, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        inside = d < hidden
        at = e + token * e_row + d.to(tl.int64) * e_column
        value = tl.load(at, mask=inside & live, other=0.0).to(x.dtype.element_ty)
        tl.store(x + i.to(tl.int64) * x_stride + d, value, mask=inside)
    tl.store(packed_target + i, tl.load(target + start + i, mask=live, other=-1))
    tl.store(flag + i // M, 0, mask=i % M == 0)


@triton.jit(do_not_specialize=tiles.VARYING)
def finish_rows(
    row, sums, number, tokens, start, size, capacity, splits, SPLITS: tl.constexpr, EVEN_SHARE: tl.constexpr
):
    """Program per row: combine the results of the parts of the vocabulary into the token's statistics."""
    i = tl.program_id(0)
    if i >= tiles.live_rows(number, start, size):
        return
    here = row + start + i
    part = tl.arange(0, SPLITS)
    inside = part < splits
    where = sums + part * capacity + i
    log_total = tl.log2(tl.sum(tl.load(where, mask=inside, other=0.0), 0))
    highest = tl.max(tl.load(where + splits * capacity, mask=inside, other=-float("inf")), 0)
    z2 = tl.load(here + tiles.AT * tokens)
    shift = settled_offset(highest, tl.load(here + tiles.OFFSET * tokens))
    tl.store(here + tiles.OFFSET * tokens, shift)
    tl.store(here + tiles.LOG_TOTAL * tokens, log_total)
    tl.store(here + tiles.LOGPROB * tokens, ((z2 - shift) - log_total) * tiles.LN2)
    # two products of the same operands may differ in their last bits
    close = z2 >= highest - 1e-6 * tl.maximum(tl.abs(highest), 1.0)
    tl.store(here + tiles.CORRECT * tokens, close.to(tl.float32))
    if EVEN_SHARE:
        pull = tl.sum(tl.load(where + 2 * splits * capacity, mask=inside, other=0.0), 0)
        tl.store(here + tiles.PULL * tokens, pull * tiles.LN2)


@triton.jit(do_not_specialize=tiles.VARYING)
def scale_rows(
    z, x, row, packed_target, frequent, frequent_number, columns,
    number, tokens, start, size, hidden, z_stride, x_stride, columns_stride, softcap, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program per row of a chunk of exponentials: the factors that turn them into gradients.
    With s = A / Σ 2^(z2 − offset), row i of dL/dz is s · z[i] except at its target, where it is
    τ = slope · (A (p_y − 1) + A − B). The target's entry of z becomes 0: neither cancellation nor the rounding of s
    touches τ. For dW the rows of x are scaled by s, and z's columns of the frequent targets are copied into columns, 0
    at a row's own target. Rows up to the next whole tile become 0."""
    i = tl.program_id(0)
    live = i < tiles.live_rows(number, start, size)
    here = row + start + i
    y = tl.load(packed_target + i)
    log_total = tl.load(here + tiles.LOG_TOTAL * tokens, mask=live, other=0.0)
    a = tl.load(here + tiles.SOFTMAX * tokens, mask=live, other=0.0)
    offset = tl.load(here + tiles.OFFSET * tokens, mask=live, other=0.0)
    if z_loss is not None:
        r = tl.load(here + tiles.TOKEN * tokens, mask=live, other=0.0)
        a += 2.0 * z_loss * r * (offset + log_total) * tiles.LN2
    logprob = tl.load(here + tiles.LOGPROB * tokens, mask=live, other=0.0) * tiles.LOG2E
    own = a * (tl.exp2(logprob) - 1.0) + (a - tl.load(here + tiles.TARGET * tokens, mask=live, other=0.0))
    if softcap is not None:
        t = tl.load(here + tiles.AT * tokens, mask=live, other=0.0) / (softcap * tiles.LOG2E)
        own *= 1.0 - t * t
    scale = a * tl.exp2(-log_total)
    # if y < 0, another shard of the vocabulary has the target, and this τ is not used
    tl.store(z + i.to(tl.int64) * z_stride + y, tl.zeros([], z.dtype.element_ty), mask=live & (y >= 0))
    tl.store(here + tiles.SCALE * tokens, scale, mask=live)
    tl.store(here + tiles.TAU * tokens, own, mask=live)
    if columns is not None:
        for begin in range(0, hidden, BLOCK):
            d = begin + tl.arange(0, BLOCK)
            at = x + i.to(tl.int64) * x_stride + d
            value = tl.load(at, mask=d < hidden, other=0.0).to(tl.float32) * scale
            tl.store(at, value.to(x.dtype.element_ty), mask=d < hidden)
        count = tl.load(frequent_number)
        for begin in range(0, count, BLOCK):
            h = begin + tl.arange(0, BLOCK)
            v = tl.load(frequent + h, mask=h < count, other=0)
            at = z + i.to(tl.int64) * z_stride + v
            value = tl.load(at, mask=(h < count) & (v != y) & live, other=0.0)
            tl.store(columns + i.to(tl.int64) * columns_stride + h, value, mask=h < count)


@triton.jit(do_not_specialize=tiles.VARYING)
def finish_input_gradient(
    de, out, w, row, order, packed_target, even_vector,
    number, tokens, start, size, capacity, hidden, parts, de_stride, out_stride, w_stride,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): sum the parts; if SCALED, apply the row's scale, add τ w_y and subtract the even
    share; write to the token's row of `out` or, if PACKED, to the chunk's. Ignored tokens get 0."""
    i = tl.program_id(0)
    live = i < tiles.live_rows(number, start, size)
    here = row + start + i
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (d < hidden) & live
    sums = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        sums += tl.load(de + (part * capacity + i).to(tl.int64) * de_stride + d, mask=inside, other=0.0)
    if SCALED:
        y = tl.load(packed_target + i)
        own = tl.load(w + y.to(tl.int64) * w_stride + d, mask=inside & (y >= 0), other=0.0).to(tl.float32)
        tau = tl.load(here + tiles.TAU * tokens, mask=live, other=0.0)
        sums = sums * tl.load(here + tiles.SCALE * tokens, mask=live, other=0.0) + tau * own
        if even_vector is not None:
            even = tl.load(here + tiles.EVEN * tokens, mask=live, other=0.0)
            sums -= even * tl.load(even_vector + d, mask=inside, other=0.0)
    where = tl.cast(i, tl.int64) if PACKED else tl.load(order + start + i)
    tl.store(out + where * out_stride + d, sums.to(out.dtype.element_ty), mask=d < hidden)


@triton.jit(do_not_specialize=tiles.VARYING)
def sum_rows(
    x, factor, out, number, start, size, columns, row_stride, column_stride,
    BLOCK: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, part of the rows): out[part] += Σ_i factor_i · x[i]."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    inside = d < columns
    rows = tiles.live_rows(number, start, size)
    each = tl.cdiv(tl.cdiv(rows, HEIGHT), tl.num_programs(1)) * HEIGHT
    sums = tl.zeros([HEIGHT, BLOCK], tl.float32)
    for begin in range(part * each, tl.minimum(rows, (part + 1) * each), HEIGHT):
        i = begin + tl.arange(0, HEIGHT)
        at = i.to(tl.int64)[:, None] * row_stride + d.to(tl.int64)[None, :] * column_stride
        f = (i < rows).to(tl.float32)
        if factor is not None:
            f = tl.load(factor + i, mask=i < rows, other=0.0)
        counts = (f != 0.0)[:, None]  # rows of factor 0 are not read, whatever is there
        sums += tl.load(x + at, mask=counts & inside[None, :], other=0.0).to(tl.float32) * f[:, None]
    at_out = out + part * columns + d
    tl.store(at_out, tl.load(at_out, mask=inside, other=0.0) + tl.sum(sums, 0), mask=inside)
