"""One pass over the logits: exp-sums per token, with the exponentials written out where gradients will be made."""

import triton
import triton.language as tl

from t1lib.heads.kernels.tiles import finish_logits, live_rows, load_tile, store_tile


@triton.jit
def exponentials(
    x, w, z, bias, class_weight, offset, target, flag, total, top, at, pull, info,
    chunk, capacity, vocab, hidden, row_blocks, splits, x_stride, w_stride, z_stride, softcap,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STORE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PULL: tl.constexpr, WEIGHTED: tl.constexpr,
    REDO: tl.constexpr, TMA: tl.constexpr, TMA_W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, part of the vocabulary): Σ 2^(z2 − offset), max z2, the target's z2, Σ c z2 of its rows.

    x (capacity, hidden) packed hidden states; w (vocab, hidden); offset, target (capacity). The sums go to
    total, top, at, pull (splits, capacity). STORE: z (capacity, vocab) ← 2^(z2 − offset), times the softcap's slope.
    A fixed offset instead of a running maximum saves the rescaling, and makes one scale a row hold for all of z; where
    it was too small, `check_range` sets `flag` and a better offset, and a second launch (REDO) makes those rows again.
    """
    m = tl.program_id(0) % row_blocks
    split = tl.program_id(0) // row_blocks
    if m * M >= live_rows(info, chunk):
        return
    if REDO:
        if tl.load(flag + m) == 0:
            return
    rows = m * M + tl.arange(0, M)
    y = tl.load(target + rows)
    shift = tl.load(offset + rows)
    tiles = tl.cdiv(vocab, N)
    sums = tl.zeros([M], tl.float32)
    tops = tl.full([M], -float("inf"), tl.float32)
    ats = tl.zeros([M], tl.float32)
    pulls = tl.zeros([M], tl.float32)
    for tile in tl.range(split * tiles // splits, (split + 1) * tiles // splits, flatten=True):
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, hidden, K):
            a = load_tile(x, m * M, k, capacity, hidden, x_stride, M, K, TMA)
            b = load_tile(w, tile * N, k, vocab, hidden, w_stride, N, K, TMA_W)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        z2, slope = finish_logits(acc, tile * N, bias, vocab, softcap, BIAS, SOFTCAP)
        columns = tile * N + tl.arange(0, N)
        ats += tl.sum(tl.where(columns[None, :] == y[:, None], z2, 0.0), 1)
        tops = tl.maximum(tops, tl.max(z2, 1))
        if PULL:
            inside = columns < vocab
            pulled = tl.where(inside[None, :], z2, 0.0)
            if WEIGHTED:
                pulled *= tl.load(class_weight + columns, mask=inside, other=0.0)[None, :]
            pulls += tl.sum(pulled, 1)
        p = tl.exp2(z2 - shift[:, None])
        sums += tl.sum(p, 1)
        if STORE:
            if SOFTCAP:
                p *= slope
            store_tile(z, m * M, tile * N, capacity, vocab, z_stride, p, False, 1, TMA)
    at_rows = split * capacity + rows
    tl.store(total + at_rows, sums)
    tl.store(top + at_rows, tops)
    tl.store(at + at_rows, ats)
    if PULL:
        tl.store(pull + at_rows, pulls)
