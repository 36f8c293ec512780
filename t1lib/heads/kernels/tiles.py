"""Tiles of matrices, through descriptors (Hopper's TMA) or through pointers, and the arithmetic on one logit."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
VARYING = ("tokens", "start", "size", "group", "group_de", "group_dw", "splits", "parts")  # no kernel for each value
PRECISE_FROM = 64.0  # from this softcap on, tanh(z / softcap), which it multiplies, must be right to its last digits

# Of a token: z2 of its target; offset of its exponentials 2^(z2 − offset), log2 of their sum (its log-sum-exp is ln 2 ·
# (offset + log_total)); log-probability of the target; 1 if no logit exceeds the target's; Σ c_v z_v under label
# smoothing; r, A without z-loss, B and E as in `chunked`; A / Σ 2^(z2 − offset); the gradient of the target's logit
FIELDS = "at offset log_total logprob correct pull token softmax target even scale tau"
AT, OFFSET, LOG_TOTAL, LOGPROB, CORRECT, PULL, TOKEN, SOFTMAX, TARGET, EVEN, SCALE, TAU = map(tl.constexpr, range(12))


@triton.jit
def live_rows(number, start, size):
    """Rows of the chunk of `size` rows from position `start` on that hold a token that counts."""
    return tl.maximum(tl.minimum(tl.load(number) - start, size), 0)


@triton.jit
def grouped(index, blocks, across, group):
    """(row block, column block) of a tile: `group` row blocks, which stay in the L2 cache, go through all columns."""
    first = index // (group * across) * group
    inside = index - first * across
    high = tl.minimum(blocks - first, group)
    return first + inside % high, inside // high


@triton.jit
def load_tile(source, row, column, rows, columns, row_stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """(HEIGHT, WIDTH) at (row, column), zero outside the matrix; `source` is a descriptor or a pointer."""
    if isinstance(source, tl.tensor_descriptor):
        return source.load([row, column])
    else:
        r = row + tl.arange(0, HEIGHT)
        c = column + tl.arange(0, WIDTH)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = r.to(tl.int64)[:, None] * row_stride + c[None, :]
        return tl.load(source + at, mask=inside, other=0.0)


@triton.jit
def store_tile(target, row, column, rows, columns, row_stride, value, ADD: tl.constexpr, PIECES: tl.constexpr):
    """Write `value` at (row, column), or add it (ADD). Nobody else touches the tile, so adding is deterministic. A
    descriptor takes it in PIECES (1, 2 or 4), each of which needs shared memory of its size."""
    if isinstance(target, tl.tensor_descriptor):
        if PIECES == 1:
            if ADD:  # the copy engine's reduction: summed in the L2 cache, and nothing waits for it
                target.atomic_add([row, column], value.to(target.dtype))
            else:
                target.store([row, column], value.to(target.dtype))
        else:
            half: tl.constexpr = value.shape[1] // 2
            pairs = tl.permute(tl.reshape(value, (value.shape[0], 2, half)), (0, 2, 1))
            left, right = tl.split(pairs)
            store_tile(target, row, column, rows, columns, row_stride, left, ADD, PIECES // 2)
            store_tile(target, row, column + half, rows, columns, row_stride, right, ADD, PIECES // 2)
    else:
        r = row + tl.arange(0, value.shape[0])
        c = column + tl.arange(0, value.shape[1])
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = target + r.to(tl.int64)[:, None] * row_stride + c[None, :]
        if ADD:
            value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def reciprocal(x):
    return 1.0 / x


@triton.jit
def capped(z, softcap, PRECISE: tl.constexpr, RECIPROCAL: tl.constexpr):
    """tanh(z / softcap) and its slope, 1 − tanh²; without a softcap z itself. The error is a few float32
    roundings of 1 or, if PRECISE, of the tanh itself; saturates without overflow."""
    if softcap is not None:
        t = 1.0 - 2.0 * RECIPROCAL(tl.exp2(z * (2.0 * LOG2E / softcap)) + 1.0)
        if PRECISE:
            x = z * (1.0 / softcap)
            s = x * x  # the series of tanh, to the last float32 digits
            series = -0.0539682540 + s * (0.0218694885 - s * 0.00886323553)
            series = x + x * s * (-0.333333333 + s * (0.133333333 + s * series))
            t = tl.where(tl.maximum(x, -x) < 0.4, series, t)
        return t, 1.0 - t * t
    else:
        return z, z
