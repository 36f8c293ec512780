"""Gradients of the logits from a known log-sum-exp: the logits are made again, tile by tile, in registers."""

import triton
import triton.language as tl

from t1lib.heads.kernels.forward import NEVER
from t1lib.heads.kernels.tiles import finish_logits, grouped, live_rows, load_tile, store_tile


@triton.jit
def logit_gradients(
    x, w, z, bias, class_weight, offset, log_total, softmax_factor, target_factor, even_factor, target, info,
    chunk, capacity, vocab, hidden, first, columns_held, group, x_stride, w_stride, z_stride,
    softcap, filter_eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, FILTER: tl.constexpr,
    TMA: tl.constexpr, TMA_W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z (capacity, columns_held) ← dL/d(raw logits) of the columns from `first` on, one tile a step, in the order
    of `tiles.grouped`.

    With p the softmax: slope · (A (p − [v = y]) + (A − B) [v = y] − E c_v), A, B, E (capacity) the factors given:
    p − 1 is made first, so that nothing cancels as p_y → 1. FILTER drops entries with |p − [v = y]| < filter_eps.
    """
    rows_live = live_rows(info, chunk)
    live_blocks = tl.cdiv(rows_live, M)
    across = tl.cdiv(columns_held, N)
    total = live_blocks * across
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        m, column = grouped(index, live_blocks, across, group)
        column *= N
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, hidden, K):
            a = load_tile(x, m * M, k, capacity, hidden, x_stride, M, K, TMA)
            b = load_tile(w, first + column, k, vocab, hidden, w_stride, N, K, TMA_W)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        rows = m * M + tl.arange(0, M)
        columns = first + column + tl.arange(0, N)
        z2, slope = finish_logits(acc, columns, bias, vocab, softcap, BIAS, SOFTCAP)
        hit = columns[None, :] == tl.load(target + rows)[:, None]
        shift = tl.load(offset + rows, mask=rows < rows_live, other=NEVER)
        p = tl.exp2((z2 - shift[:, None]) - tl.load(log_total + rows)[:, None])
        p = tl.where(hit, p - 1.0, p)
        by_p = tl.load(softmax_factor + rows)
        gradient = p * by_p[:, None] + tl.where(hit, (by_p - tl.load(target_factor + rows))[:, None], 0.0)
        if EVEN:
            even = tl.load(even_factor + rows, mask=rows < rows_live, other=0.0)[:, None]
            if WEIGHTED:
                even = even * tl.load(class_weight + columns, mask=columns < vocab, other=0.0)[None, :]
            gradient -= even
        if SOFTCAP:
            gradient *= slope
        if FILTER:
            gradient = tl.where((p < filter_eps) & (p > -filter_eps), 0.0, gradient)
        store_tile(z, m * M, column, capacity, columns_held, z_stride, gradient, False, 1, TMA)
