"""The large products on Hopper, in Gluon: one warp copies tiles in, two warpgroups multiply and finish them.

A tile of M × N is two halves of rows, one for each warpgroup. Nothing but the ring of copied operands ties the two
together: while one finishes its half (exponentials, rounding, the way out), the other one multiplies. The kernels do
what those of the same names in `forward`, `recompute` and `products` do on any GPU; arguments as there. Operands and
results are of 16 bits and come by descriptor, in boxes: half a tile's rows, a quarter of its columns for results.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from t1lib.heads.kernels.forward import HEADROOM, NEVER
from t1lib.heads.kernels.tiles import LOG2E, first_row, grouped, live_rows, place

# -- the ring of operands: stages of two halves of A and one B, each with a barrier for full and one for empty --------


@gluon.jit
def _ring(a, b, S: gl.constexpr):
    """Shared memory for S boxes of the descriptors: A twice, B once; and their barriers."""
    a0 = gl.allocate_shared_memory(a.dtype, [S] + a.block_shape, a.layout)
    a1 = gl.allocate_shared_memory(a.dtype, [S] + a.block_shape, a.layout)
    b0 = gl.allocate_shared_memory(b.dtype, [S] + b.block_shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    return a0, a1, b0, full, empty


@gluon.jit
def _fill(it, ring, a, row0, column0, row1, column1, b, row, column, S: gl.constexpr):
    """Copy the next stage: A's halves from (row0, column0) and (row1, column1), B from (row, column)."""
    a0, a1, b0, full, empty = ring
    s = it % S
    mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
    bar = full.index(s)
    mbarrier.expect(bar, 2 * a.block_type.nbytes + b.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [row0, column0], bar, a0.index(s))
    tma.async_copy_global_to_shared(a, [row1, column1], bar, a1.index(s))
    tma.async_copy_global_to_shared(b, [row, column], bar, b0.index(s))
    return it + 1


@gluon.jit
def _multiply(it, steps, a, b, full, empty, N: gl.constexpr, S: gl.constexpr):
    """(64, N) float32: the sum over `steps` stages of a half of A times B transposed."""
    acc = gl.zeros((64, N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    for k in range(steps):
        s = it % S
        mbarrier.wait(full.index(s), it // S & 1)
        acc = warpgroup_mma(a.index(s), b.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((it + S - 1) % S), count=1, pred=k > 0)
        it += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((it + S - 1) % S), count=1, pred=steps > 0)
    return acc, it


@gluon.jit
def _put(target, row, column, buffer, value):
    tma.store_wait(1)  # the piece before the last has left this buffer
    buffer.store(value.to(target.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [row, column], buffer)


@gluon.jit
def _put_tile(target, row, column, buffers, value):
    """Write a (64, N) tile, in four pieces that take turns in two buffers."""
    Q: gl.constexpr = value.shape[1] // 4
    left, right = value.reshape((64, 2, 2 * Q)).permute((0, 2, 1)).split()
    p0, p1 = left.reshape((64, 2, Q)).permute((0, 2, 1)).split()
    p2, p3 = right.reshape((64, 2, Q)).permute((0, 2, 1)).split()
    _put(target, row, column, buffers.index(0), p0)
    _put(target, row, column + Q, buffers.index(1), p1)
    _put(target, row, column + 2 * Q, buffers.index(0), p2)
    _put(target, row, column + 3 * Q, buffers.index(1), p3)


@gluon.jit
def _bias_ahead(bias, column, vocab, N: gl.constexpr, BIAS: gl.constexpr):
    """A tile's bias, asked for before its product: afterwards each thread would wait for 64 loads of its own."""
    columns = column + gl.arange(0, N, gl.BlockedLayout([N // 128], [32], [4], [0]))
    if BIAS:
        return gl.load(bias + columns, mask=columns < vocab, other=0.0)
    else:
        return columns


@gluon.jit
def _reciprocal(x):
    """Of numbers from 1 to infinity, to the last bit but one: a plain division also looks at how large they are."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _finish_logits(acc, ahead, softcap, BIAS: gl.constexpr, SOFTCAP: gl.constexpr):
    """As `tiles.finish_logits`, the logits in `_unit`s: all have the same, so what it multiplies can wait."""
    if BIAS:
        acc += gl.expand_dims(gl.convert_layout(ahead, gl.SliceLayout(0, acc.type.layout)).to(gl.float32), 0)
    if SOFTCAP:
        t = 1.0 - 2.0 * _reciprocal(gl.exp2(acc * (2.0 * LOG2E / softcap)) + 1.0)
        return t, 1.0 - t * t
    else:
        return acc, acc


@gluon.jit
def _unit(softcap, SOFTCAP: gl.constexpr):
    return softcap * LOG2E if SOFTCAP else 1.0 * LOG2E


# -- exponentials -----------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_exponentials(x, w, ring, row, begin, end, hidden, N: gl.constexpr, S: gl.constexpr):
    it = 0
    for tile in range(begin, end):
        for k in range(0, hidden, 64):
            it = _fill(it, ring, x, row, k, row + 64, k, w, tile * N, k, S)


@gluon.jit
def _make_exponentials(
    a, ring, buffers, z, bias, class_weight, offset, flag, total, top, pull,
    row, live, start, m, begin, end, at, capacity, vocab, hidden, splits, z_columns, room, wrap, softcap,
    N: gl.constexpr, S: gl.constexpr, STORE: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr,
    PULL: gl.constexpr, WEIGHTED: gl.constexpr, RAGGED: gl.constexpr, REDO: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    shift = gl.load(offset + start + rows, mask=rows < live, other=NEVER)
    if REDO:
        highest = gl.full((64,), -float("inf"), gl.float32, gl.SliceLayout(1, layout))
        for part in range(splits):
            highest = gl.maximum(highest, gl.load(top + part * capacity + rows))
        shift = gl.where(highest - shift > HEADROOM, highest, shift)
    sums = gl.zeros((64,), gl.float32, gl.SliceLayout(1, layout))
    pulls = gl.zeros((64,), gl.float32, gl.SliceLayout(1, layout))
    tops = gl.full((64,), -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    unit = _unit(softcap, SOFTCAP)
    it = 0
    for tile in range(begin, end):
        ahead = _bias_ahead(bias, tile * N, vocab, N, BIAS)
        acc, it = _multiply(it, gl.cdiv(hidden, 64), a, ring[2], ring[3], ring[4], N, S)
        columns = tile * N + gl.arange(0, N, gl.SliceLayout(0, layout))
        inside = gl.expand_dims(columns < vocab, 0)
        logits, slope = _finish_logits(acc, ahead, softcap, BIAS, SOFTCAP)
        if PULL:
            pulled = logits
            if WEIGHTED:
                weight = gl.load(class_weight + columns, mask=columns < vocab, other=0.0)
                pulled = pulled * gl.expand_dims(weight, 0)
            if RAGGED:
                pulled = gl.where(inside, pulled, 0.0)
            pulls += gl.sum(pulled, 1)
        if RAGGED:
            logits = gl.where(inside, logits, -float("inf"))
        tops = gl.maximum(tops, gl.max(logits, 1))
        p = gl.exp2(logits * unit - gl.expand_dims(shift, 1))
        sums += gl.sum(p, 1)
        if STORE:
            if SOFTCAP:
                p *= slope
            above, column = place(row, tile * N, z_columns, room, wrap)
            _put_tile(z, above, column, buffers, p)
    tops *= unit
    gl.store(total + at + rows, sums)
    gl.store(top + at + rows, tops)
    if PULL:
        gl.store(pull + at + rows, pulls * unit)
    if not REDO:
        over = gl.max((tops - shift > HEADROOM).to(gl.int32), 0)
        if over > 0:
            gl.store(flag + m, over)
    tma.store_wait(0)


@gluon.jit
def exponentials(
    x, w, z, bias, class_weight, offset, flag, total, top, pull, info,
    chunk, capacity, vocab, hidden, row_blocks, group, splits, z_columns, room, wrap, softcap,
    N: gl.constexpr, S: gl.constexpr, STORE: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr,
    PULL: gl.constexpr, WEIGHTED: gl.constexpr, RAGGED: gl.constexpr, REDO: gl.constexpr,
):  # fmt: skip
    """As `forward.exponentials`."""
    m, split = grouped(gl.program_id(0), row_blocks, splits, group)
    live = live_rows(info, chunk)
    tiles = gl.cdiv(vocab, N)
    begin = split * tiles // splits
    end = (split + 1) * tiles // splits
    needed = m * 128 < live
    if REDO:
        needed = needed & (gl.load(flag + m) != 0)
    if needed:
        ring = _ring(x, w, S)
        if STORE:
            c0 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
            c1 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
        else:
            c0 = ring[3]
            c1 = ring[3]
        row = m * 128
        start = first_row(info, chunk)
        at = split * capacity
        gl.warp_specialize([
            (_make_exponentials, (
                ring[0], ring, c0, z, bias, class_weight, offset, flag, total, top, pull,
                row, live, start, m, begin, end, at, capacity, vocab, hidden, splits,
                z_columns, room, wrap, softcap,
                N, S, STORE, BIAS, SOFTCAP, PULL, WEIGHTED, RAGGED, REDO,
            )),
            (_make_exponentials, (
                ring[1], ring, c1, z, bias, class_weight, offset, flag, total, top, pull,
                row + 64, live, start, m, begin, end, at, capacity, vocab, hidden, splits,
                z_columns, room, wrap, softcap,
                N, S, STORE, BIAS, SOFTCAP, PULL, WEIGHTED, RAGGED, REDO,
            )),
            (_copy_exponentials, (x, w, ring, row, begin, end, hidden, N, S)),
        ], [4, 1], [240, 24])  # fmt: skip


# -- gradients of the logits, once the log-sum-exp is known -----------------------------------------------------------


@gluon.jit
def _copy_gradients(x, w, ring, blocks, across, group, first, hidden, N: gl.constexpr, S: gl.constexpr):
    it = 0
    for index in range(gl.program_id(0), blocks * across, gl.num_programs(0)):
        m, n = grouped(index, blocks, across, group)
        for k in range(0, hidden, 64):
            it = _fill(it, ring, x, m * 128, k, m * 128 + 64, k, w, first + n * N, k, S)


@gluon.jit
def _make_gradients(
    a, ring, buffers, z, bias, class_weight, offset, log_total, softmax_factor, target_factor, even_factor, target,
    half, live, blocks, across, group, first, vocab, hidden, softcap, filter_eps,
    N: gl.constexpr, S: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, EVEN: gl.constexpr,
    WEIGHTED: gl.constexpr, FILTER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    it = 0
    for index in range(gl.program_id(0), blocks * across, gl.num_programs(0)):
        m, n = grouped(index, blocks, across, group)
        row = m * 128 + half
        column = n * N
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        ahead = _bias_ahead(bias, first + column, vocab, N, BIAS)  # all that is loaded, before the product
        y = gl.load(target + rows)
        shift = gl.load(offset + rows, mask=rows < live, other=NEVER)
        norm = gl.load(log_total + rows)
        by_p = gl.load(softmax_factor + rows)
        fix = by_p - gl.load(target_factor + rows)
        acc, it = _multiply(it, gl.cdiv(hidden, 64), a, ring[2], ring[3], ring[4], N, S)
        columns = first + column + gl.arange(0, N, gl.SliceLayout(0, layout))
        logits, slope = _finish_logits(acc, ahead, softcap, BIAS, SOFTCAP)
        hit = gl.expand_dims(columns, 0) == gl.expand_dims(y, 1)
        z2 = logits * _unit(softcap, SOFTCAP)
        p = gl.exp2((z2 - gl.expand_dims(shift, 1)) - gl.expand_dims(norm, 1))
        p = gl.where(hit, p - 1.0, p)
        gradient = p * gl.expand_dims(by_p, 1) + gl.where(hit, gl.expand_dims(fix, 1), 0.0)
        if EVEN:
            even = gl.expand_dims(gl.load(even_factor + rows, mask=rows < live, other=0.0), 1)
            if WEIGHTED:
                weight = gl.load(class_weight + columns, mask=columns < vocab, other=0.0)
                even = even * gl.expand_dims(weight, 0)
            gradient -= even
        if SOFTCAP:
            gradient *= slope
        if FILTER:
            gradient = gl.where((p < filter_eps) & (p > -filter_eps), 0.0, gradient)
        _put_tile(z, row, column, buffers, gradient)
    tma.store_wait(0)


@gluon.jit
def logit_gradients(
    x, w, z, bias, class_weight, offset, log_total, softmax_factor, target_factor, even_factor, target, info,
    chunk, vocab, hidden, first, columns_held, group, softcap, filter_eps,
    N: gl.constexpr, S: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, EVEN: gl.constexpr,
    WEIGHTED: gl.constexpr, FILTER: gl.constexpr,
):  # fmt: skip
    """As `recompute.logit_gradients`."""
    live = live_rows(info, chunk)
    blocks = gl.cdiv(live, 128)
    across = gl.cdiv(columns_held, N)
    ring = _ring(x, w, S)
    c0 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
    c1 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
    gl.warp_specialize([
        (_make_gradients, (
            ring[0], ring, c0, z, bias, class_weight, offset, log_total, softmax_factor, target_factor, even_factor,
            target, 0, live, blocks, across, group, first, vocab, hidden, softcap, filter_eps,
            N, S, BIAS, SOFTCAP, EVEN, WEIGHTED, FILTER,
        )),
        (_make_gradients, (
            ring[1], ring, c1, z, bias, class_weight, offset, log_total, softmax_factor, target_factor, even_factor,
            target, 64, live, blocks, across, group, first, vocab, hidden, softcap, filter_eps,
            N, S, BIAS, SOFTCAP, EVEN, WEIGHTED, FILTER,
        )),
        (_copy_gradients, (x, w, ring, blocks, across, group, first, hidden, N, S)),
    ], [4, 1], [240, 24])  # fmt: skip
