"""One pass over the logits: exp-sums per token, with the exponentials written out where gradients will be made."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import (
    LOG2E,
    finish_logits,
    first_row,
    grouped,
    live_rows,
    load_tile,
    place,
    store_tile,
    tanh,
)

HEADROOM = tl.constexpr(96.0)  # largest z2 − offset whose exponential and its sums are far from float32's end
NEVER = tl.constexpr(1e30)  # offset of a row without a token: its exponentials are 0
LEAD = tl.constexpr(32.0)  # the offset lies so much above the target's logit, which no row's maximum is below


@triton.jit
def target_logits(
    e, w, bias, order, target, info, at, offset, hidden, vocab, e_row, e_column, w_stride, softcap,
    M: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program per M tokens in `order`: at ← z2 of the token's target; offset ← the first guess of its exponentials'.

    The diagonal of a small product, so that it adds up as `exponentials` does, which need not look for it then.
    """
    i = tl.program_id(0) * M + tl.arange(0, M)
    live = i < tl.load(info)
    token = tl.load(order + i, mask=live, other=0)
    y = tl.load(target + token, mask=live, other=-1)
    real = live & (y >= 0) & (y < vocab)  # a target out of range is reported elsewhere; here it must not be followed
    acc = tl.zeros([M, M], tl.float32)
    for k in range(0, hidden, K):
        d = k + tl.arange(0, K)
        inside = (d < hidden)[None, :]
        a = tl.load(e + token[:, None] * e_row + d[None, :] * e_column, mask=live[:, None] & inside, other=0.0)
        b = tl.load(w + y[:, None] * w_stride + d[None, :], mask=real[:, None] & inside, other=0.0)
        acc = tl.dot(a.to(w.dtype.element_ty), b.T, acc, input_precision=PRECISION)
    j = tl.arange(0, M)
    z = tl.sum(tl.where(j[:, None] == j[None, :], acc, 0.0), 1)
    if BIAS:
        z += tl.load(bias + y, mask=real, other=0.0).to(tl.float32)
    z2 = tanh(z / softcap) * (softcap * LOG2E) if SOFTCAP else z * LOG2E
    tl.store(at + i, z2, mask=live)
    tl.store(offset + i, tl.where(real, tl.floor(z2) + LEAD, NEVER), mask=live)


@triton.jit
def settled_offset(highest, guess):
    """The guess, or a row's largest logit where that is so far above it that exponentials would overflow."""
    return tl.where(highest - guess > HEADROOM, highest, guess)


@triton.jit
def exponentials(
    x, w, z, bias, class_weight, offset, flag, total, top, pull, info,
    chunk, capacity, vocab, hidden, row_blocks, group, splits, z_rows, z_columns, room, wrap,
    x_stride, w_stride, z_stride, softcap,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STORE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PULL: tl.constexpr, WEIGHTED: tl.constexpr,
    RAGGED: tl.constexpr, REDO: tl.constexpr, TMA: tl.constexpr, TMA_W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, part of the vocabulary): Σ 2^(z2 − offset), max z2, Σ c z2 of its rows.

    x (capacity, hidden) packed hidden states; w (vocab, hidden); offset by token in order. The sums go to
    total, top, pull (splits, capacity). STORE: z ← 2^(z2 − offset), times the softcap's slope: (capacity, vocab),
    or panels of z_columns columns (`tiles.place`). Programs come in the order of `tiles.grouped`.
    A fixed offset instead of a running maximum saves the rescaling, and makes one scale a row hold for all of z; where
    it was too small, `flag` is set, and a second launch (REDO) makes those rows again from their largest logit.
    RAGGED: vocab is no multiple of N.
    """
    m, split = grouped(tl.program_id(0), row_blocks, splits, group)
    live = live_rows(info, chunk)
    if m * M >= live:
        return
    rows = m * M + tl.arange(0, M)
    shift = tl.load(offset + first_row(info, chunk) + rows, mask=rows < live, other=NEVER)
    if REDO:
        if tl.load(flag + m) == 0:
            return
        highest = tl.full([M], -float("inf"), tl.float32)
        for part in range(splits):
            highest = tl.maximum(highest, tl.load(top + part * capacity + rows))
        shift = settled_offset(highest, shift)
    tiles = tl.cdiv(vocab, N)
    sums = tl.zeros([M], tl.float32)
    tops = tl.full([M], -float("inf"), tl.float32)
    pulls = tl.zeros([M], tl.float32)
    for tile in tl.range(split * tiles // splits, (split + 1) * tiles // splits, flatten=True):
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, hidden, K):
            a = load_tile(x, m * M, k, capacity, hidden, x_stride, M, K, TMA)
            b = load_tile(w, tile * N, k, vocab, hidden, w_stride, N, K, TMA_W)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        columns = tile * N + tl.arange(0, N)
        z2, slope = finish_logits(acc, columns, bias, vocab, softcap, BIAS, SOFTCAP)
        if PULL:
            pulled = z2
            if WEIGHTED:
                pulled *= tl.load(class_weight + columns, mask=columns < vocab, other=0.0)[None, :]
            if RAGGED:
                pulled = tl.where((columns < vocab)[None, :], pulled, 0.0)
            pulls += tl.sum(pulled, 1)
        if RAGGED:
            z2 = tl.where((columns < vocab)[None, :], z2, -float("inf"))
        tops = tl.maximum(tops, tl.max(z2, 1))
        p = tl.exp2(z2 - shift[:, None])
        sums += tl.sum(p, 1)
        if STORE:
            if SOFTCAP:
                p *= slope
            row, column = place(m * M, tile * N, z_columns, room, wrap)
            store_tile(z, row, column, z_rows, z_columns, z_stride, p, False, 1, TMA)
    at_rows = split * capacity + rows
    tl.store(total + at_rows, sums)
    tl.store(top + at_rows, tops)
    if PULL:
        tl.store(pull + at_rows, pulls)
    if not REDO:
        over = tl.max((tops - shift > HEADROOM).to(tl.int32), 0)
        tl.store(flag + m, over, mask=over > 0)
