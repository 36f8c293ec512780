"""The logits of a chunk on Hopper, in Gluon: one warp copies tiles in, two warpgroups multiply and finish them.

A tile of M × N is two halves of rows, one for each warpgroup. Nothing but the ring of copied operands ties the two
together: while one finishes its half (exponentials, rounding, the way out), the other one multiplies. The kernel does
what `kernels.logits.logits` does on any GPU; arguments as there. Operands and results are of 16 bits and come by
descriptor, in boxes: half a tile's rows, a quarter of its columns for results.
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

from t1lib.heads.kernels import tiles
from t1lib.heads.kernels.logits import HEADROOM, NEVER

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
def _copy_tiles(x, w, ring, work, group, first, hidden, N: gl.constexpr, S: gl.constexpr, GRADIENT: gl.constexpr):
    """Copy the operands of this program's tiles, step after step: x's two halves of rows, and w."""
    m, _, begin, end, stride, blocks, across = work
    a0, a1, b0, full, empty = ring
    it = 0
    for index in range(begin, end, stride):
        n = index
        if GRADIENT:
            m, n = tiles.grouped(index, blocks, across, group)
        for k in range(0, hidden, 64):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [m * 128, k], bar, a0.index(s))
            tma.async_copy_global_to_shared(x, [m * 128 + 64, k], bar, a1.index(s))
            tma.async_copy_global_to_shared(w, [first + n * N, k], bar, b0.index(s))
            it += 1


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
    """As `tiles.finish_logits`, the logits in units that all share, so what these multiply can wait."""
    if BIAS:
        acc += gl.expand_dims(gl.convert_layout(ahead, gl.SliceLayout(0, acc.type.layout)).to(gl.float32), 0)
    if SOFTCAP > 0:
        t = 1.0 - 2.0 * _reciprocal(gl.exp2(acc * (2.0 * tiles.LOG2E / softcap)) + 1.0)
        if SOFTCAP == 2:
            small = acc * (1.0 / softcap)
            t = gl.where(gl.maximum(small, -small) < 0.4, tiles.small_tanh(small), t)
        return t, 1.0 - t * t
    else:
        return acc, acc


@gluon.jit
def _multiply_tiles(
    a, ring, buffers, z, bias, class_weight, row, target, flag, sums, half,
    work, sizes, softcap, filter_eps, N: gl.constexpr, S: gl.constexpr, GRADIENT: gl.constexpr, STORE: gl.constexpr,
    REDO: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_SHARE: gl.constexpr, WEIGHTED: gl.constexpr,
    RAGGED: gl.constexpr, FILTER: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of each of this program's tiles, finished as `logits` says."""
    m, split, begin, end, stride, blocks, across = work
    tokens, start, live, capacity, vocab, hidden, first, group, splits = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    unit = softcap * tiles.LOG2E if SOFTCAP > 0 else 1.0 * tiles.LOG2E
    rows = m * 128 + half + gl.arange(0, 64, gl.SliceLayout(1, layout))
    shift = gl.load(row + tiles.OFFSET * tokens + start + rows, mask=rows < live, other=NEVER)
    if REDO:
        highest = gl.full((64,), -float("inf"), gl.float32, gl.SliceLayout(1, layout))
        for part in range(splits):
            highest = gl.maximum(highest, gl.load(sums + (splits + part) * capacity + rows))
        shift = gl.where(highest - shift > HEADROOM, highest, shift)
    total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, layout))
    pull = gl.zeros((64,), gl.float32, gl.SliceLayout(1, layout))
    top = gl.full((64,), -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    it = 0
    for index in range(begin, end, stride):
        n = index
        if GRADIENT:  # all that is loaded, before the product
            m, n = tiles.grouped(index, blocks, across, group)
            rows = m * 128 + half + gl.arange(0, 64, gl.SliceLayout(1, layout))
            here = row + start + rows
            y = gl.load(target + rows)
            shift = gl.load(here + tiles.OFFSET * tokens, mask=rows < live, other=NEVER)
            log_total = gl.load(here + tiles.LOG_TOTAL * tokens, mask=rows < live, other=0.0)
            by_p = gl.load(here + tiles.SOFTMAX * tokens, mask=rows < live, other=0.0)
            fix = by_p - gl.load(here + tiles.TARGET * tokens, mask=rows < live, other=0.0)
        ahead = _bias_ahead(bias, first + n * N, vocab, N, BIAS)
        acc, it = _multiply(it, gl.cdiv(hidden, 64), a, ring[2], ring[3], ring[4], N, S)
        columns = first + n * N + gl.arange(0, N, gl.SliceLayout(0, layout))
        logits, slope = _finish_logits(acc, ahead, softcap, BIAS, SOFTCAP)
        if GRADIENT:
            hit = gl.expand_dims(columns, 0) == gl.expand_dims(y, 1)
            p = gl.exp2((logits * unit - gl.expand_dims(shift, 1)) - gl.expand_dims(log_total, 1))
            p = gl.where(hit, p - 1.0, p)
            gradient = p * gl.expand_dims(by_p, 1) + gl.where(hit, gl.expand_dims(fix, 1), 0.0)
            if EVEN_SHARE:
                even = gl.expand_dims(gl.load(here + tiles.EVEN * tokens, mask=rows < live, other=0.0), 1)
                if WEIGHTED:
                    weight = gl.load(class_weight + columns, mask=columns < vocab, other=0.0)
                    even = even * gl.expand_dims(weight, 0)
                gradient -= even
            if SOFTCAP > 0:
                gradient *= slope
            if FILTER:
                gradient = gl.where((p < filter_eps) & (p > -filter_eps), 0.0, gradient)
            _put_tile(z, m * 128 + half, n * N, buffers, gradient)
        else:
            inside = gl.expand_dims(columns < vocab, 0)
            if EVEN_SHARE:
                pulled = logits
                if WEIGHTED:
                    weight = gl.load(class_weight + columns, mask=columns < vocab, other=0.0)
                    pulled = pulled * gl.expand_dims(weight, 0)
                if RAGGED:
                    pulled = gl.where(inside, pulled, 0.0)
                pull += gl.sum(pulled, 1)
            if RAGGED:
                logits = gl.where(inside, logits, -float("inf"))
            top = gl.maximum(top, gl.max(logits, 1))
            p = gl.exp2(logits * unit - gl.expand_dims(shift, 1))
            total += gl.sum(p, 1)
            if STORE:
                if SOFTCAP > 0:
                    p *= slope
                _put_tile(z, m * 128 + half, n * N, buffers, p)
    if not GRADIENT:
        top *= unit
        out = sums + split * capacity + rows
        gl.store(out, total)
        gl.store(out + splits * capacity, top)
        if EVEN_SHARE:
            gl.store(out + 2 * splits * capacity, pull * unit)
        if not REDO:
            over = gl.max((top - shift > HEADROOM).to(gl.int32), 0)
            if over > 0:
                gl.store(flag + m, over)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=tiles.VARYING)
def logits(
    x, w, z, bias, class_weight, row, target, flag, sums,
    number, tokens, start, size, capacity, hidden, vocab, first, held, group, splits, softcap, filter_eps,
    N: gl.constexpr, S: gl.constexpr, GRADIENT: gl.constexpr, STORE: gl.constexpr, REDO: gl.constexpr,
    BIAS: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_SHARE: gl.constexpr, WEIGHTED: gl.constexpr,
    RAGGED: gl.constexpr, FILTER: gl.constexpr,
):  # fmt: skip
    """As `kernels.logits.logits`."""
    live = tiles.live_rows(number, start, size)
    across = gl.cdiv(held, N)
    m, split = tiles.grouped(gl.program_id(0), gl.cdiv(size, 128), splits, group)
    blocks = gl.cdiv(live, 128)
    begin = split * across // splits
    end = (split + 1) * across // splits
    stride = 1
    needed = m * 128 < live
    if REDO:
        needed = needed & (gl.load(flag + m) != 0)
    if GRADIENT:
        begin = gl.program_id(0)
        end = blocks * across
        stride = gl.num_programs(0)
        needed = begin < end
    work = (m, split, begin, end, stride, blocks, across)
    sizes = (tokens, start, live, capacity, vocab, hidden, first, group, splits)
    if needed:
        ring = _ring(x, w, S)
        if STORE:
            c0 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
            c1 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
        else:
            c0 = ring[3]
            c1 = ring[3]
        gl.warp_specialize([
            (_multiply_tiles, (
                ring[0], ring, c0, z, bias, class_weight, row, target, flag, sums, 0,
                work, sizes, softcap, filter_eps,
                N, S, GRADIENT, STORE, REDO, BIAS, SOFTCAP, EVEN_SHARE, WEIGHTED, RAGGED, FILTER,
            )),
            (_multiply_tiles, (
                ring[1], ring, c1, z, bias, class_weight, row, target, flag, sums, 64,
                work, sizes, softcap, filter_eps,
                N, S, GRADIENT, STORE, REDO, BIAS, SOFTCAP, EVEN_SHARE, WEIGHTED, RAGGED, FILTER,
            )),
            (_copy_tiles, (x, w, ring, work, group, first, hidden, N, S, GRADIENT)),
        ], [4, 1], [240, 24])  # fmt: skip
