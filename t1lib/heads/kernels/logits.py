"""The logits of a chunk, tile by tile in registers; from each tile its exponentials or, later, its gradient."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles

HEADROOM = tl.constexpr(96.0)  # largest z2 − offset whose exponential and its sums are far from float32's end
NEVER = tl.constexpr(1e30)  # offset of a row without a token: its exponentials are 0
LEAD = tl.constexpr(32.0)  # the offset lies so much above the target's logit, which no row's maximum is below


@triton.jit(do_not_specialize=tiles.VARYING)
def target_logits(
    e, w, bias, order, target, row, number, tokens, hidden, e_row, e_column, w_stride, softcap,
    M: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program per M tokens in order: at ← z2 of the token's target; offset ← the first guess of its exponentials'.

    The diagonal of a small product, so that it adds up as `logits` does, which need not look for it then.
    """
    i = tl.program_id(0) * M + tl.arange(0, M)
    live = i < tl.load(number)
    token = tl.load(order + i, mask=live, other=0)
    y = tl.load(target + i, mask=live, other=-1)
    real = y >= 0
    at_y = y.to(tl.int64) * w_stride
    acc = tl.zeros([M, M], tl.float32)
    for k in range(0, hidden, K):
        d = k + tl.arange(0, K)
        inside = (d < hidden)[None, :]
        at = token[:, None] * e_row + d.to(tl.int64)[None, :] * e_column
        a = tl.load(e + at, mask=live[:, None] & inside, other=0.0)
        b = tl.load(w + at_y[:, None] + d[None, :], mask=real[:, None] & inside, other=0.0)
        acc = tl.dot(a.to(w.dtype.element_ty), b.T, acc, input_precision=PRECISION)
    j = tl.arange(0, M)
    z = tl.sum(tl.where(j[:, None] == j[None, :], acc, 0.0), 1)
    if BIAS:
        z += tl.load(bias + y, mask=real, other=0.0).to(tl.float32)
    z2 = tiles.tanh(z / softcap, SOFTCAP == 2) * (softcap * tiles.LOG2E) if SOFTCAP > 0 else z * tiles.LOG2E
    tl.store(row + tiles.AT * tokens + i, z2, mask=live)
    tl.store(row + tiles.OFFSET * tokens + i, tl.where(real, tl.floor(z2) + LEAD, NEVER), mask=live)


@triton.jit
def settled_offset(highest, guess):
    """The guess, or a row's largest logit where that is so far above it that exponentials would overflow."""
    return tl.where(highest - guess > HEADROOM, highest, guess)


@triton.jit
def logit_gradient(
    z2, slope, columns, row, positions, live, tokens, y, class_weight, vocab, filter_eps,
    EVEN_SHARE: tl.constexpr, WEIGHTED: tl.constexpr, SOFTCAP: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """A tile of dL/d(raw logits): with p the softmax, slope · (A (p − [v = y]) + (A − B) [v = y] − E c_v).

    p − 1 is made first, so that nothing cancels as p_y → 1. FILTER drops entries with |p − [v = y]| < filter_eps.
    """
    hit = columns[None, :] == y[:, None]
    shift = tl.load(row + tiles.OFFSET * tokens + positions, mask=live, other=NEVER)
    log_total = tl.load(row + tiles.LOG_TOTAL * tokens + positions, mask=live, other=0.0)
    by_p = tl.load(row + tiles.SOFTMAX * tokens + positions, mask=live, other=0.0)
    fix = by_p - tl.load(row + tiles.TARGET * tokens + positions, mask=live, other=0.0)
    p = tl.exp2((z2 - shift[:, None]) - log_total[:, None])
    p = tl.where(hit, p - 1.0, p)
    gradient = p * by_p[:, None] + tl.where(hit, fix[:, None], 0.0)
    if EVEN_SHARE:
        even = tl.load(row + tiles.EVEN * tokens + positions, mask=live, other=0.0)[:, None]
        if WEIGHTED:
            even = even * tl.load(class_weight + columns, mask=columns < vocab, other=0.0)[None, :]
        gradient -= even
    if SOFTCAP > 0:
        gradient *= slope
    if FILTER:
        gradient = tl.where((p < filter_eps) & (p > -filter_eps), 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=tiles.VARYING)
def logits(
    x, w, z, bias, class_weight, row, target, flag, sums,
    number, tokens, start, size, capacity, hidden, vocab, first, held, group, splits,
    x_stride, w_stride, z_stride, softcap, filter_eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GRADIENT: tl.constexpr, STORE: tl.constexpr, REDO: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, EVEN_SHARE: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    FILTER: tl.constexpr, TMA: tl.constexpr, TMA_W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (capacity, hidden) packed hidden states; w (vocab, hidden); z (capacity, held): columns of w's rows from
    `first` on; target (capacity): of the packed rows. In two ways:

    Exponentials. Program (row block, one of `splits` ranges of the vocabulary), in the order of `tiles.grouped`:
    sums (3, splits, capacity) ← Σ 2^(z2 − offset), max z2, Σ c z2 of its rows. STORE: z ← 2^(z2 − offset), times the
    softcap's slope. A fixed offset instead of a running maximum saves the rescaling, and makes one scale per row hold
    for all of z; where it was too small, `flag` is set, and a second launch (REDO) makes those rows again from their
    largest logit. RAGGED: vocab is no multiple of N.

    GRADIENT, once the log-sum-exp is known: persistent programs, tile after tile: z ← `logit_gradient`.
    """
    live = tiles.live_rows(number, start, size)
    row_blocks = tl.cdiv(size, M)
    m, split = tiles.grouped(tl.program_id(0), row_blocks, splits, group)
    across = tl.cdiv(held, N)
    begin = split * across // splits
    end = (split + 1) * across // splits
    stride = 1
    rows = m * M + tl.arange(0, M)
    shift = tl.load(row + tiles.OFFSET * tokens + start + rows, mask=rows < live, other=NEVER)
    if GRADIENT:
        row_blocks = tl.cdiv(live, M)
        begin = tl.program_id(0)
        end = row_blocks * across
        stride = tl.num_programs(0)
    elif m * M >= live:
        return
    if REDO:
        if tl.load(flag + m) == 0:
            return
        highest = tl.full([M], -float("inf"), tl.float32)
        for part in range(splits):
            highest = tl.maximum(highest, tl.load(sums + (splits + part) * capacity + rows))
        shift = settled_offset(highest, shift)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], -float("inf"), tl.float32)
    pull = tl.zeros([M], tl.float32)
    for index in tl.range(begin, end, stride, flatten=True):
        if GRADIENT:
            m, n = tiles.grouped(index, row_blocks, across, group)
        else:
            n = index
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, hidden, K):
            a = tiles.load_tile(x, m * M, k, capacity, hidden, x_stride, M, K, TMA)
            b = tiles.load_tile(w, first + n * N, k, vocab, hidden, w_stride, N, K, TMA_W)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        columns = first + n * N + tl.arange(0, N)
        z2, slope = tiles.finish_logits(acc, columns, bias, vocab, softcap, BIAS, SOFTCAP)
        if GRADIENT:
            at = m * M + tl.arange(0, M)
            gradient = logit_gradient(
                z2, slope, columns, row, start + at, at < live, tokens, tl.load(target + at), class_weight, vocab,
                filter_eps, EVEN_SHARE, WEIGHTED, SOFTCAP, FILTER,
            )  # fmt: skip
            tiles.store_tile(z, m * M, n * N, capacity, held, z_stride, gradient, False, 1, TMA)
        else:
            if EVEN_SHARE:
                pulled = z2
                if WEIGHTED:
                    pulled *= tl.load(class_weight + columns, mask=columns < vocab, other=0.0)[None, :]
                if RAGGED:
                    pulled = tl.where((columns < vocab)[None, :], pulled, 0.0)
                pull += tl.sum(pulled, 1)
            if RAGGED:
                z2 = tl.where((columns < vocab)[None, :], z2, -float("inf"))
            top = tl.maximum(top, tl.max(z2, 1))
            p = tl.exp2(z2 - shift[:, None])
            total += tl.sum(p, 1)
            if STORE:
                if SOFTCAP > 0:
                    p *= slope
                tiles.store_tile(z, m * M, n * N, capacity, held, z_stride, p, False, 1, TMA)
    if not GRADIENT:
        out = sums + split * capacity + rows
        tl.store(out, total)
        tl.store(out + splits * capacity, top)
        if EVEN_SHARE:
            tl.store(out + 2 * splits * capacity, pull)
        if not REDO:
            over = tl.max((top - shift > HEADROOM).to(tl.int32), 0)
            tl.store(flag + m, over, mask=over > 0)
