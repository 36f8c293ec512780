"""The logits of a chunk, tile by tile in registers; from each tile its exponentials or, later, its gradient."""

from typing import NamedTuple

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles

HEADROOM = tl.constexpr(96.0)  # largest z2 − offset whose exponential and its sums are far from float32's end
NEVER = tl.constexpr(3e38)  # offset of a row without a token: its exponentials are 0
LEAD = tl.constexpr(32.0)  # how far the first offset is above the target's logit, which no row's maximum is below


class Flags(NamedTuple):
    gradient: bool  # see `logits`
    redo: bool
    precise: bool  # a softcap of at least `tiles.PRECISE_FROM`
    even_share: bool  # label smoothing
    ragged: bool  # there are columns beyond the vocabulary


@triton.jit(do_not_specialize=tiles.VARYING)
def target_logits(
    e, w, bias, order, target, row, number, tokens, hidden, e_row, e_column, w_stride, softcap,
    M: tl.constexpr, K: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program per M tokens in order: at ← z2 of the token's target; offset ← a first guess at that of its exponentials.
    z2 is on the diagonal of a small product: so it is summed as in `logits`, which then need not look for it."""
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
    if bias is not None:
        z += tl.load(bias + y, mask=real, other=0.0).to(tl.float32)
    unit = softcap * tiles.LOG2E if softcap is not None else 1.0 * tiles.LOG2E
    z2 = tiles.capped(z, softcap, PRECISE, tiles.reciprocal)[0] * unit
    tl.store(row + tiles.AT * tokens + i, z2, mask=live)
    tl.store(row + tiles.OFFSET * tokens + i, tl.where(real, tl.floor(z2) + LEAD, NEVER), mask=live)


@triton.jit
def settled_offset(highest, guess):
    """The guess, or a row's largest logit where that is so far above it that exponentials would overflow."""
    return tl.where(highest - guess > HEADROOM, highest, guess)


@triton.jit
def offsets_of(rows, nothing, row, sums, tokens, start, live, splits, capacity, FLAGS: tl.constexpr):
    """Of `rows` of the chunk: the first guess, or with FLAGS.redo what is settled. nothing: −inf for each."""
    shift = tl.load(row + tiles.OFFSET * tokens + start + rows, mask=rows < live, other=NEVER)
    if FLAGS.redo:
        highest = nothing
        for part in range(splits):
            highest = tl.maximum(highest, tl.load(sums + (splits + part) * capacity + rows))
        shift = settled_offset(highest, shift)
    return shift


@triton.jit
def work_of(live, size, held, splits, group, flag, M: tl.constexpr, N: tl.constexpr, FLAGS: tl.constexpr):
    """Whether this program has tiles to do; (row block, part of the vocabulary, range of tiles; blocks, across)."""
    across = tl.cdiv(held, N)
    m, split = tiles.grouped(tl.program_id(0), tl.cdiv(size, M), splits, group)
    blocks = tl.cdiv(live, M)
    begin = split * across // splits
    end = (split + 1) * across // splits
    stride = 1
    needed = m * M < live
    if FLAGS.redo:
        needed = needed & (tl.load(flag + m) != 0)
    if FLAGS.gradient:
        begin = tl.program_id(0)
        end = blocks * across
        stride = tl.num_programs(0)
        needed = begin < end
    return needed, (m, split, begin, end, stride, blocks, across)


@triton.jit
def load_factors(here, tokens, live):
    """Of each row: offset and log_total, by which logits become p; A, and A − B."""
    shift = tl.load(here + tiles.OFFSET * tokens, mask=live, other=NEVER)
    log_total = tl.load(here + tiles.LOG_TOTAL * tokens, mask=live, other=0.0)
    by_p = tl.load(here + tiles.SOFTMAX * tokens, mask=live, other=0.0)
    return shift, log_total, by_p, by_p - tl.load(here + tiles.TARGET * tokens, mask=live, other=0.0)


@triton.jit
def gradients(z2, softcap, slope, columns, y, factors, even, class_weight, vocab, filter_eps, FLAGS: tl.constexpr):
    """A tile of dL/d(raw logits): with p the softmax, slope · (A (p − [v = y]) + (A − B) [v = y] − E c_v), filtered.
    p − 1 is made first, so that nothing cancels as p_y → 1."""
    shift, log_total, by_p, fix = factors
    hit = columns[None, :] == y[:, None]
    p = tl.exp2((z2 - shift[:, None]) - log_total[:, None])
    p = tl.where(hit, p - 1.0, p)
    found = p * by_p[:, None] + tl.where(hit, fix[:, None], 0.0)
    if FLAGS.even_share:
        even = even[:, None]
        if class_weight is not None:
            even = even * tl.load(class_weight + columns, mask=columns < vocab, other=0.0)[None, :]
        found -= even
    if softcap is not None:
        found *= slope
    if filter_eps is not None:
        found = tl.where((p < filter_eps) & (p > -filter_eps), 0.0, found)
    return found


@triton.jit
def exponentials(logits, softcap, slope, unit, columns, shift, found, class_weight, vocab, FLAGS: tl.constexpr):
    """A tile of 2^(z2 − offset), times the softcap's slope, where z2 = `unit` · logits; and `found` with this tile
    added: for each row, their sum (without the slope), the largest logit, and Σ c · logits."""
    total, top, pull = found
    if FLAGS.even_share:
        pulled = logits
        if class_weight is not None:
            pulled = pulled * tl.load(class_weight + columns, mask=columns < vocab, other=0.0)[None, :]
        if FLAGS.ragged:
            pulled = tl.where((columns < vocab)[None, :], pulled, 0.0)
        pull += tl.sum(pulled, 1)
    if FLAGS.ragged:
        logits = tl.where((columns < vocab)[None, :], logits, -float("inf"))
    top = tl.maximum(top, tl.max(logits, 1))
    p = tl.exp2(logits * unit - shift[:, None])
    total += tl.sum(p, 1)
    if softcap is not None:
        p *= slope
    return p, (total, top, pull)


@triton.jit
def store_sums(out, step, found, unit, shift, flag, FLAGS: tl.constexpr):
    """Store what `exponentials` found, `step` apart, and set `flag` if an exponential may have overflowed."""
    total, top, pull = found
    top *= unit
    tl.store(out, total)
    tl.store(out + step, top)
    if FLAGS.even_share:
        tl.store(out + 2 * step, pull * unit)
    if not FLAGS.redo:
        over = tl.max((top - shift > HEADROOM).to(tl.int32), 0)
        if over > 0:
            tl.store(flag, over)


@triton.jit(do_not_specialize=tiles.VARYING)
def logits(
    x, w, z, bias, class_weight, row, packed_target, flag, sums,
    number, tokens, start, size, capacity, hidden, vocab, first, held, group, splits, softcap, filter_eps,
    x_stride, w_stride, z_stride, FLAGS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (capacity, hidden) packed hidden states; w (vocab, hidden); z (capacity, held): its columns are w's rows from
    `first` on. Exponentials: program (row block, one of `splits` ranges of the vocabulary), in `tiles.grouped` order:
    sums (3, splits, capacity) ← Σ 2^(z2 − offset), max z2, Σ c z2 of its rows. z, if given, ← `exponentials`. As the
    offset is fixed, one scale per row holds for all of z; where it was too small, `flag` is set, and a second launch
    (FLAGS.redo) computes those row blocks again, with `settled_offset`.
    FLAGS.gradient, once the log-sum-exp is known: persistent programs, tile after tile: z ← `gradients`."""
    live = tiles.live_rows(number, start, size)
    needed, work = work_of(live, size, held, splits, group, flag, M, N, FLAGS)
    if not needed:
        return
    m, split, begin, end, stride, blocks, across = work
    rows = m * M + tl.arange(0, M)
    unit = softcap * tiles.LOG2E if softcap is not None else 1.0 * tiles.LOG2E
    nothing = tl.full([M], -float("inf"), tl.float32)
    shift = offsets_of(rows, nothing, row, sums, tokens, start, live, splits, capacity, FLAGS)
    found = (tl.zeros([M], tl.float32), nothing, tl.zeros([M], tl.float32))
    for index in tl.range(begin, end, stride, flatten=True):
        n = index
        if FLAGS.gradient:
            m, n = tiles.grouped(index, blocks, across, group)
            rows = m * M + tl.arange(0, M)
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, hidden, K):
            a = tiles.load_tile(x, m * M, k, capacity, hidden, x_stride, M, K)
            b = tiles.load_tile(w, first + n * N, k, vocab, hidden, w_stride, N, K)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        columns = first + n * N + tl.arange(0, N)
        if bias is not None:
            acc += tl.load(bias + columns, mask=columns < vocab, other=0.0).to(tl.float32)[None, :]
        z2, slope = tiles.capped(acc, softcap, FLAGS.precise, tiles.reciprocal)
        if FLAGS.gradient:
            here = row + start + rows
            factors = load_factors(here, tokens, rows < live)
            even = tl.load(here + tiles.EVEN * tokens, mask=rows < live, other=0.0)
            y = tl.load(packed_target + rows)
            p = gradients(z2 * unit, softcap, slope, columns, y, factors, even, class_weight, vocab, filter_eps, FLAGS)
        else:
            p, found = exponentials(z2, softcap, slope, unit, columns, shift, found, class_weight, vocab, FLAGS)
        if z is not None:
            tiles.store_tile(z, m * M, n * N, capacity, held, z_stride, p, False, 1)
    if not FLAGS.gradient:
        store_sums(sums + split * capacity + rows, splits * capacity, found, unit, shift, flag + m, FLAGS)
