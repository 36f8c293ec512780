"""The logits of a chunk on Hopper, in Gluon: one warp copies tiles in; two warpgroups multiply and finish them, each
half of a tile's rows. While one finishes its half (exponentials, rounding, the copy out), the other one multiplies.
Operands have 16 bits. x and z move in boxes of half a tile's rows (16-bit z: a quarter of its columns), w in tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

try:  # from Triton 3.8 on; in 3.9 the older names raise an error
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load, async_store
except ImportError:
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_shared_to_global as async_store

from t1lib.heads.kernels import tiles
from t1lib.heads.kernels.logits import exponentials, gradients, load_factors, offsets_of, store_sums, work_of

FROM = gl.constexpr(432.0)  # from here on e4m3 rounds to 448, its largest number


@gluon.jit
def ring_of(a, b, S: gl.constexpr):
    """A ring of S stages in shared memory: boxes for A's halves and for B, and the barriers `full` and `empty`."""
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
def _copy_tiles(x, w, ring, work, group, first, hidden, N: gl.constexpr, S: gl.constexpr, FLAGS: gl.constexpr):
    """Copy the operands of this program's tiles, step after step: x's two halves of rows, and w."""
    m, _, begin, end, stride, blocks, across = work
    a0, a1, b0, full, empty = ring
    it = 0
    for index in range(begin, end, stride):
        n = index
        if FLAGS.gradient:
            m, n = tiles.grouped(index, blocks, across, group)
        for k in range(0, hidden, 64):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * x.block_type.nbytes + w.block_type.nbytes)
            async_load(x, [m * 128, k], bar, a0.index(s))
            async_load(x, [m * 128 + 64, k], bar, a1.index(s))
            async_load(w, [first + n * N, k], bar, b0.index(s))
            it += 1


@gluon.jit
def _multiply(it, steps, a, ring, N: gl.constexpr, S: gl.constexpr):
    """(64, N) float32: the sum over `steps` stages of a half of A times B transposed."""
    b, full, empty = ring[2:]
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
    async_store(target, [row, column], buffer)


@gluon.jit
def _put_tile(target, row, column, buffers, value):
    """Write a (64, N) tile in four pieces, which take turns in two buffers; in 8 bits (`tail`), in two pieces, with
    every 16 columns in the order of `tail.place_of`."""
    Q: gl.constexpr = value.shape[1] // 4
    if target.dtype == gl.float8e4nv:
        value = value.reshape((64, Q // 4, 2, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((64, 4 * Q))
    left, right = value.reshape((64, 2, 2 * Q)).permute((0, 2, 1)).split()
    if target.dtype == gl.float8e4nv:
        _put(target, row, column, buffers.index(0), left)
        _put(target, row, column + 2 * Q, buffers.index(1), right)
    else:
        p0, p1 = left.reshape((64, 2, Q)).permute((0, 2, 1)).split()
        p2, p3 = right.reshape((64, 2, Q)).permute((0, 2, 1)).split()
        _put(target, row, column, buffers.index(0), p0)
        _put(target, row, column + Q, buffers.index(1), p1)
        _put(target, row, column + 2 * Q, buffers.index(0), p2)
        _put(target, row, column + 3 * Q, buffers.index(1), p3)


@gluon.jit
def _reciprocal(x):
    """1 / x for x from 1 to infinity, right to the last bit but one; a plain division also checks how large x is."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _multiply_tiles(
    a, ring, buffers, half, out, vectors, work, sizes, softcap, filter_eps,
    N: gl.constexpr, S: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of each of this program's tiles, finished as `logits` says."""
    z, marks = out
    bias, class_weight, row, packed_target, flag, sums = vectors
    m, split, begin, end, stride, blocks, across = work
    tokens, start, live, capacity, vocab, hidden, first, group, splits = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    unit = softcap * tiles.LOG2E if softcap is not None else 1.0 * tiles.LOG2E
    rows = m * 128 + half + gl.arange(0, 64, by_row)
    nothing = gl.full((64,), -float("inf"), gl.float32, by_row)
    shift = offsets_of(rows, nothing, row, sums, tokens, start, live, splits, capacity, FLAGS)
    found = (gl.zeros((64,), gl.float32, by_row), nothing, gl.zeros((64,), gl.float32, by_row))
    it = 0
    for index in range(begin, end, stride):
        n = index
        if FLAGS.gradient:  # all that is loaded, before the product
            m, n = tiles.grouped(index, blocks, across, group)
            rows = m * 128 + half + gl.arange(0, 64, by_row)
            here = row + start + rows
            y = gl.load(packed_target + rows)
            factors = load_factors(here, tokens, rows < live)
        if bias is not None:  # before the product: afterwards each thread would wait for 64 loads of its own
            at = first + n * N + gl.arange(0, N, gl.BlockedLayout([N // 128], [32], [4], [0]))
            ahead = gl.load(bias + at, mask=at < vocab, other=0.0)
        acc, it = _multiply(it, gl.cdiv(hidden, 64), a, ring, N, S)
        columns = first + n * N + gl.arange(0, N, gl.SliceLayout(0, layout))
        if bias is not None:
            acc += gl.expand_dims(gl.convert_layout(ahead, gl.SliceLayout(0, layout)).to(gl.float32), 0)
        z2, slope = tiles.capped(acc, softcap, FLAGS.precise, _reciprocal)
        if FLAGS.gradient:
            even = gl.load(here + tiles.EVEN * tokens, mask=rows < live, other=0.0)
            p = gradients(z2 * unit, softcap, slope, columns, y, factors, even, class_weight, vocab, filter_eps, FLAGS)
        else:
            p, found = exponentials(z2, softcap, slope, unit, columns, shift, found, class_weight, vocab, FLAGS)
        if z is not None:
            _put_tile(z, m * 128 + half, n * N, buffers, p)
        if marks is not None:
            gl.store(marks + rows * across + n, (gl.max(p, 1) >= FROM).to(gl.int8))
    if not FLAGS.gradient:
        store_sums(sums + split * capacity + rows, splits * capacity, found, unit, shift, flag + m, FLAGS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=tiles.VARYING)
def logits(
    x, w, z, marks, bias, class_weight, row, packed_target, flag, sums,
    number, tokens, start, size, capacity, hidden, vocab, first, held, group, splits, softcap, filter_eps,
    FLAGS: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """As `kernels.logits.logits`. marks (capacity, tiles of N columns) ← whether a row has an exponential in this tile
    that is 448, the largest number, in FP8."""
    live = tiles.live_rows(number, start, size)
    needed, work = work_of(live, size, held, splits, group, flag, 128, N, FLAGS)
    vectors = (bias, class_weight, row, packed_target, flag, sums)
    sizes = (tokens, start, live, capacity, vocab, hidden, first, group, splits)
    if needed:
        ring = ring_of(x, w, S)
        if z is not None:
            c0 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
            c1 = gl.allocate_shared_memory(z.dtype, [2] + z.block_shape, z.layout)
        else:
            c0 = ring[3]  # never used
            c1 = ring[3]
        out = (z, marks)
        gl.warp_specialize([
            (_multiply_tiles, (ring[0], ring, c0, 0, out, vectors, work, sizes, softcap, filter_eps, N, S, FLAGS)),
            (_multiply_tiles, (ring[1], ring, c1, 64, out, vectors, work, sizes, softcap, filter_eps, N, S, FLAGS)),
            (_copy_tiles, (x, w, ring, work, group, first, hidden, N, S, FLAGS)),
        ], [4, 1], [240, 24])  # fmt: skip
