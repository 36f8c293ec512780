"""Tiles of matrices, through descriptors (Hopper's TMA) or through pointers, and the arithmetic on one logit."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_row(info, chunk):
    """Where this chunk begins among the tokens in order: `extra` chunks are one row block longer than the others."""
    return chunk * tl.load(info + 1) + tl.minimum(chunk, tl.load(info + 2)) * tl.load(info + 3)


@triton.jit
def live_rows(info, chunk):
    """Rows of this chunk that hold a token."""
    longer = tl.where(chunk < tl.load(info + 2), tl.load(info + 3), 0)
    return tl.maximum(tl.minimum(tl.load(info) - first_row(info, chunk), tl.load(info + 1) + longer), 0)


@triton.jit
def place(row, column, width, room, wrap):
    """Where (row, column) of z lies: panels of `width` columns one below the other, `room` rows apart, of `wrap` rows.

    The last panel comes first: so no panel's products are written over a panel that is yet to be read.
    """
    return (column // width + 1) * room % wrap + row, column % width


@triton.jit
def grouped(index, blocks, across, group):
    """(row block, column block) of a tile: `group` row blocks go through all columns before the next ones do, and stay
    in the L2 cache as long."""
    first = index // (group * across) * group
    inside = index - first * across
    high = tl.minimum(blocks - first, group)
    return first + inside % high, inside // high


@triton.jit
def load_tile(
    source, row, column, rows, columns, row_stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """(HEIGHT, WIDTH) at (row, column), zero outside the matrix; `source` is a descriptor if TMA, else a pointer."""
    if TMA:
        return source.load([row, column])
    else:
        r = row + tl.arange(0, HEIGHT)
        c = column + tl.arange(0, WIDTH)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = r.to(tl.int64)[:, None] * row_stride + c[None, :]
        return tl.load(source + at, mask=inside, other=0.0)


@triton.jit
def store_tile(
    target, row, column, rows, columns, row_stride, value, ADD: tl.constexpr, PIECES: tl.constexpr, TMA: tl.constexpr
):
    """Write `value` at (row, column), or add it (ADD). Nobody else touches the tile, so adding is deterministic.

    PIECES (1, 2 or 4): a descriptor takes the tile in so many parts, each of which needs shared memory of its size.
    """
    if TMA:
        if PIECES == 1:
            if ADD:  # the copy engine's reduction: summed in the L2 cache, and nothing waits for it
                target.atomic_add([row, column], value.to(target.dtype))
            else:
                target.store([row, column], value.to(target.dtype))
        else:
            half: tl.constexpr = value.shape[1] // 2
            pairs = tl.permute(tl.reshape(value, (value.shape[0], 2, half)), (0, 2, 1))
            left, right = tl.split(pairs)
            store_tile(target, row, column, rows, columns, row_stride, left, ADD, PIECES // 2, TMA)
            store_tile(target, row, column + half, rows, columns, row_stride, right, ADD, PIECES // 2, TMA)
    else:
        r = row + tl.arange(0, value.shape[0])
        c = column + tl.arange(0, value.shape[1])
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = target + r.to(tl.int64)[:, None] * row_stride + c[None, :]
        if ADD:
            value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def even_share(even_sum, class_weight, classes, inside, d, hidden, WEIGHTED: tl.constexpr):
    """(classes, d): c ⊗ even_sum, what label smoothing takes evenly from these rows of dW; c is 1 unless WEIGHTED."""
    share = tl.load(even_sum + d, mask=d < hidden, other=0.0)[None, :]
    per_class = tl.full(classes.shape, 1.0, tl.float32)
    if WEIGHTED:
        per_class *= tl.load(class_weight + classes, mask=inside, other=0.0)
    return per_class[:, None] * share


@triton.jit
def tanh(x):
    """Exact to a few float32 roundings of 1; saturates without overflow."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def finish_logits(acc, columns, bias, vocab, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """From a tile of products to logits in units of log 2; and 1 − tanh² of the softcap."""
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < vocab, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        t = tanh(acc * (1.0 / softcap))
        slope = 1.0 - t * t
        z2 = t * (softcap * LOG2E)
    else:
        slope = acc
        z2 = acc * LOG2E
    return z2, slope
