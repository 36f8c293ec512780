"""The tail of the logits' gradient in FP8, on Hopper, in Gluon: dE and dW of it, and the copies of operands it takes.

z holds exponentials as e4m3, with 448, the largest number, for all that are larger. Hopper multiplies FP8 matrices only
if both are contiguous along the sum; but its first operand may come from registers, and two bytes side by side are read
there as one number of 16 bits, transposed, and taken apart by one instruction for four of them. So one copy of z serves
both products: as the first operand of dW = zᵀ x, and as the second one of dEᵀ = wᵀ zᵀ. What this does to the order of
rows and sums is undone where operands are written (`place_of`) and results are stored."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from t1lib.heads.kernels import tiles
from t1lib.heads.kernels.hopper import async_load, ring_of

LARGEST = tl.constexpr(448.0)  # of e4m3
MARK = tl.constexpr(0x7E)  # its code, which all exponentials as large or larger get

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))  # of a (64, 64) product
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 4))
# the layouts below name what registers, lanes and warps hold by powers of two of (row, column)
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
        [32, 128],
    )
)  # fmt: skip
BY_CLASS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]], [[0, 16], [0, 32], [8, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
BY_TOKEN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip


@triton.jit
def place_of(i):
    """The place of index i of a sum among its 16: bit 3 moves to bit 1; bits 1 and 2 move up."""
    return (i & ~14) | ((i >> 2) & 2) | ((i & 6) << 1)


@triton.jit
def index_at(place):
    """The inverse of `place_of`."""
    return (place & ~14) | ((place & 2) << 2) | ((place >> 1) & 6)


@triton.jit
def narrow_weight(
    w, w8, gain, first, count, vocab, hidden, w_stride, w8_stride, HEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """w8 (count, hidden) ← gain · w's rows from `first` on, zero beyond the vocabulary."""
    r = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < count)[:, None] & (d < hidden)[None, :]
    at = w + (first + r).to(tl.int64)[:, None] * w_stride + d[None, :]
    value = tl.load(at, mask=inside & (first + r < vocab)[:, None], other=0.0).to(tl.float32) * tl.load(gain)
    at = w8 + r.to(tl.int64)[:, None] * w8_stride + d[None, :]
    tl.store(at, value.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=tiles.VARYING)
def narrow_hidden(
    x, x8, row, gain, number, tokens, start, size, capacity, hidden, x_stride, x8_stride,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x8 (hidden, capacity) ← gain · scale · x, transposed, as the product takes it: tokens in the order of `place_of`,
    and each 64 hidden columns in an order that gives each thread the results of 16 consecutive ones."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    live = i < tiles.live_rows(number, start, size)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + i.to(tl.int64)[:, None] * x_stride + d[None, :]
    value = tl.load(at, mask=live[:, None] & (d < hidden)[None, :], other=0.0).to(tl.float32)
    scale = tl.load(row + tiles.SCALE * tokens + start + i, mask=live, other=0.0) * tl.load(gain)
    value *= scale[:, None]
    value = tl.where(tl.abs(value) < float("inf"), value, float("nan"))  # e4m3 has no infinity
    line = (d & ~63) | ((d & 14) << 2) | ((d & 48) >> 3) | (d & 1)
    at = x8 + line.to(tl.int64)[None, :] * x8_stride + place_of(i)[:, None]
    tl.store(at, value.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=(i < capacity)[:, None])


@gluon.jit
def _unit(index, work, BY_ROW: gl.constexpr):
    """Of a unit: A's tile, B's tile, its part of the sum, and that part's steps as a range."""
    _, down, across, part_steps, steps = work
    part = index // (down * across)
    if BY_ROW:  # A's tiles vary fastest
        m = index % down
        n = index // down % across
    else:
        m = index // across % down
        n = index % across
    return m, n, part, part * part_steps, gl.minimum((part + 1) * part_steps, steps)


@gluon.jit
def _copy_tiles(a, b, ring, work, first, BY_ROW: gl.constexpr, S: gl.constexpr):
    a0, a1, b0, full, empty = ring
    it = 0
    for index in range(gl.program_id(0), work[0], gl.num_programs(0)):
        m, n, _, begin, end = _unit(index, work, BY_ROW)
        for k in range(begin, end):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * a.block_type.nbytes + b.block_type.nbytes)
            async_load(a, [k * 128, m * 64], bar, a0.index(s))
            async_load(a, [k * 128, m * 64 + 32], bar, a1.index(s))
            async_load(b, [n * 256, first + k * 128], bar, b0.index(s))
            it += 1


@gluon.jit
def _first_operand(a):
    """(64, 128) e4m3 in registers from (128, 32) pairs: rows 16 w + 8 b + g for byte b of pair 8 w + g."""
    pairs = a.permute((1, 0)).load(PAIRS)
    low, high = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip
    both = gl.join(low, high).reshape((4, 8, 128, 2)).permute((0, 3, 1, 2))
    both = both.reshape((64, 8, 2, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((64, 128))  # `place_of`
    return gl.convert_layout(both, OPERAND).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _product(a, b, j: gl.constexpr, into, add):
    """(64, 64): a times B's j-th 64 rows, over one stage: few enough terms for the tensor cores' sums of 14 bits. The
    result takes the registers of `into`; `add` is always false, though the compiler may not know it."""
    return warpgroup_mma(a, b.slice(64 * j, 64, dim=0).permute((1, 0)), into, use_acc=add, is_async=True)


@gluon.jit
def _multiply(it, steps, a, ring, HALF: gl.constexpr, S: gl.constexpr):
    """Four (64, 64) sums over `steps` stages, or the first two of them (HALF), in float32 registers. Two products are
    under way at a time. The third takes the first one's registers once that has been added to c0, and the fourth the
    second one's: the waits on c0 and c1 are for that."""
    b, full, empty = ring[2:]
    c0 = gl.zeros((64, 64), gl.float32, SUMS)
    c1 = gl.zeros((64, 64), gl.float32, SUMS)
    c2 = gl.zeros((64, 64), gl.float32, SUMS)
    c3 = gl.zeros((64, 64), gl.float32, SUMS)
    never = steps < 0
    for _ in range(steps):
        s = it % S
        mbarrier.wait(full.index(s), it // S & 1)
        x = _first_operand(a.index(s))
        y = b.index(s)
        p0 = _product(x, y, 0, gl.zeros((64, 64), gl.float32, SUMS), False)
        p1 = _product(x, y, 1, gl.zeros((64, 64), gl.float32, SUMS), False)
        p0 = warpgroup_mma_wait(num_outstanding=1, deps=(p0,))
        c0 += p0
        if HALF:
            p1 = warpgroup_mma_wait(num_outstanding=0, deps=(p1,))
            mbarrier.arrive(empty.index(s), count=1)
            c1 += p1
        else:
            c0 = warpgroup_mma_wait(num_outstanding=1, deps=(c0,))
            p2 = _product(x, y, 2, p0, never)
            p1 = warpgroup_mma_wait(num_outstanding=1, deps=(p1,))
            c1 += p1
            c1 = warpgroup_mma_wait(num_outstanding=1, deps=(c1,))
            p3 = _product(x, y, 3, p1, never)
            p2 = warpgroup_mma_wait(num_outstanding=1, deps=(p2,))
            c2 += p2
            p3 = warpgroup_mma_wait(num_outstanding=0, deps=(p3,))
            mbarrier.arrive(empty.index(s), count=1)
            c3 += p3
        it += 1
    return (c0, c1, c2, c3), it


@gluon.jit
def _put_input(de, sums, d, i, rows, hidden, stride, unit, ADD: gl.constexpr):
    """de[i + column, d + row] ← or += unit · sums."""
    sums = gl.convert_layout(sums.reshape((4, 2, 8, 64)).permute((0, 2, 1, 3)).reshape((64, 64)), BY_TOKEN)
    columns = d + gl.arange(0, 64, gl.SliceLayout(1, BY_TOKEN))
    tokens = i + gl.arange(0, 64, gl.SliceLayout(0, BY_TOKEN))
    inside = (columns < hidden)[:, None] & (tokens < rows)[None, :]
    at = de + tokens.to(gl.int64)[None, :] * stride + columns[:, None]
    sums *= unit
    if ADD:  # so that nothing waits for the old value; no other program adds to it
        gl.atomic_add(at, sums, mask=inside, sem="relaxed")
    else:
        gl.store(at, sums, mask=inside)


@gluon.jit
def _put_weight(dw, sums, v, d, vocab, hidden, stride, unit, frequent, ADD: gl.constexpr):
    """dw[v + row, d + column] ← or += unit · sums, whose rows and columns `BY_CLASS` puts into order. Rows of frequent
    targets are added to frequent_sums instead, at their `place`."""
    place, often, frequent_sums, frequent_sums_stride = frequent
    sums = sums.reshape((4, 2, 2, 2, 2, 8, 4, 2)).permute((0, 4, 2, 3, 1, 6, 5, 7)).reshape((64, 64))
    sums = gl.convert_layout(sums, BY_CLASS)
    classes = v + gl.arange(0, 64, gl.SliceLayout(1, BY_CLASS))
    columns = d + gl.arange(0, 64, gl.SliceLayout(0, BY_CLASS))
    inside = (classes < vocab)[:, None] & (columns < hidden)[None, :]
    at = dw + classes.to(gl.int64)[:, None] * stride + columns[None, :]
    sums *= unit
    if ADD:
        gl.atomic_add(at, sums.to(dw.dtype.element_ty), mask=inside & (place < 0)[:, None], sem="relaxed")
    else:
        gl.store(at, sums.to(dw.dtype.element_ty), mask=inside)
    if often:
        apart = frequent_sums + place.to(gl.int64)[:, None] * frequent_sums_stride + columns[None, :]
        gl.atomic_add(apart, sums, mask=inside & (place >= 0)[:, None], sem="relaxed")


@gluon.jit
def _multiply_tiles(
    ring, a, half, out, frequent, work, sizes, unit, BY_ROW: gl.constexpr, ADD: gl.constexpr, S: gl.constexpr
):
    height, hidden, stride, width = sizes
    slot, frequent_sums, frequent_sums_stride = frequent
    it = 0
    for index in range(gl.program_id(0), work[0], gl.num_programs(0)):
        m, n, part, begin, end = _unit(index, work, BY_ROW)
        row = m * 128 + half
        column = n * 256
        if not BY_ROW:  # looked up here, since nobody waits for it before the product
            classes = row + gl.arange(0, 64, gl.SliceLayout(1, BY_CLASS))
            place = gl.load(slot + classes, mask=classes < height, other=-1)
            apart = (place, gl.max(place.to(gl.int32), 0) >= 0, frequent_sums, frequent_sums_stride)
        if width - column > 128:
            sums, it = _multiply(it, end - begin, a, ring, False, S)
        else:
            sums, it = _multiply(it, end - begin, a, ring, True, S)
        for j in gl.static_range(4):
            if BY_ROW:
                to = out + part.to(gl.int64) * height * stride
                _put_input(to, sums[j], row, column + 64 * j, height, hidden, stride, unit, ADD)
            else:
                _put_weight(out, sums[j], row, column + 64 * j, height, hidden, stride, unit, apart, ADD)


@gluon.jit(do_not_specialize=(*tiles.VARYING, "columns"))
def products(
    a, b, out, slot, frequent_sums, gain, number, start, size, height, hidden, first, columns, parts, stride,
    frequent_sums_stride,
    BY_ROW: gl.constexpr, ADD: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Persistent programs, tile after tile; results are divided by `gain`.
    BY_ROW: dE. a (columns, hidden / 2) pairs of w8; b (capacity, columns) z; out (parts · height, hidden) float32: one
    sum for each of `parts` ranges of the `columns` from `first` on.
    Else dW. a (capacity, classes / 2) pairs of z; b (hidden, capacity) x8; out (height, hidden)."""
    rows = tiles.live_rows(number, start, size)
    unit = 1.0 / gl.load(gain)
    if BY_ROW:
        down = gl.cdiv(hidden, 128)
        across = gl.cdiv(rows, 256)
        steps = gl.cdiv(columns, 128)
        width = rows
    else:
        down = gl.cdiv(height, 128)
        across = gl.cdiv(hidden, 256)
        steps = gl.cdiv(rows, 128)
        width = hidden
    work = (down * across * parts, down, across, gl.cdiv(steps, parts), steps)
    sizes = (height, hidden, stride, width)
    ring = ring_of(a, b, S)
    frequent = (slot, frequent_sums, frequent_sums_stride)
    gl.warp_specialize([
        (_multiply_tiles, (ring, ring[0], 0, out, frequent, work, sizes, unit, BY_ROW, ADD, S)),
        (_multiply_tiles, (ring, ring[1], 64, out, frequent, work, sizes, unit, BY_ROW, ADD, S)),
        (_copy_tiles, (a, b, ring, work, first, BY_ROW, S)),
    ], [4, 1], [240, 24])  # fmt: skip
