"""What is done once per call for all tokens; it would be some seventy launches if PyTorch's operations did it."""

import triton
import triton.language as tl

from t1lib.heads.kernels import tiles


@triton.jit(do_not_specialize=("tokens", "ignore_index"))
def sort_keys(
    token_target, token_weight, whole_class_weight, key, number, denominator, in_range, tokens, ignore_index, classes,
    BY_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. key (tokens) ← what tokens are sorted by, so that ignored ones come last: BY_TARGET their target, or
    `classes` if ignored; else 0, or 1. number ← how many tokens count; denominator ← the sum of their weights, times
    those of their targets' classes; in_range ← whether their targets are classes."""
    count = 0
    total = 0.0
    wrong = 0
    for begin in range(0, tokens, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        y = tl.load(token_target + n, mask=n < tokens, other=0)
        valid = (n < tokens) & (y != ignore_index)
        wrong += tl.sum((valid & ((y < 0) | (y >= classes))).to(tl.int32), 0)
        y = tl.minimum(tl.maximum(y, 0), classes - 1)
        weight = valid.to(tl.float32)
        if token_weight is not None:
            weight *= tl.load(token_weight + n, mask=valid, other=0.0)
        if whole_class_weight is not None:
            weight *= tl.load(whole_class_weight + y, mask=valid, other=0.0)
        count += tl.sum(valid.to(tl.int32), 0)
        total += tl.sum(weight, 0)
        by = tl.where(valid, y, classes) if BY_TARGET else 1 - valid.to(tl.int32)
        tl.store(key + n, by.to(key.dtype.element_ty), mask=n < tokens)
    tl.store(number, count)
    tl.store(denominator, total)
    tl.store(in_range, (wrong == 0).to(tl.int8))


@triton.jit(do_not_specialize=("tokens", "first", "upstream_stride"))
def fill_rows(
    order, token_target, token_weight, whole_class_weight, class_sum, upstream, denominator, number, target, row,
    tokens, first, vocab, classes, smooth, upstream_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program per BLOCK tokens in order: target ← the target as a row of this process's weight, −1 if it has none;
    row ← r, A without its z-loss part (everything), B (own) and E (even) of the gradient's equation in `chunked`."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = n < tl.load(number)
    token = tl.load(order + n, mask=live, other=0)
    y = tl.load(token_target + token, mask=live, other=-1)
    local = y - first
    local = tl.where(live & (local >= 0) & (local < vocab), local, -1)
    tl.store(target + n, local.to(tl.int32), mask=n < tokens)
    r = tl.full([BLOCK], 1.0, tl.float32)
    if upstream is not None:
        r = tl.load(upstream + token * upstream_stride, mask=live, other=0.0)
    if token_weight is not None:
        r *= tl.load(token_weight + token, mask=live, other=0.0)
    if denominator is not None:
        r /= tl.load(denominator)
    r = tl.where(live, r, 0.0)  # last, as the division is by 0 if all are ignored
    own = r
    if whole_class_weight is not None:
        own *= tl.load(whole_class_weight + y, mask=live & (y >= 0) & (y < classes), other=0.0)
    even = tl.zeros([BLOCK], tl.float32)
    everything = own
    if smooth is not None:
        own *= 1.0 - smooth
        even = r * (smooth / classes)
        everything = own + even * (classes if class_sum is None else tl.load(class_sum))
    inside = n < tokens
    tl.store(row + tiles.TOKEN * tokens + n, r, mask=inside)
    tl.store(row + tiles.SOFTMAX * tokens + n, everything, mask=inside)
    tl.store(row + tiles.TARGET * tokens + n, own, mask=inside)
    tl.store(row + tiles.EVEN * tokens + n, even, mask=inside)


@triton.jit
def _run_length(n, key, target, segment_end, tokens):
    """Where the tokens of one of this process's targets begin, their number; elsewhere 0."""
    inside = n < tokens
    first = inside & (tl.load(target + n, mask=inside, other=-1) >= 0)
    mine = tl.load(key + n, mask=inside, other=-1)
    first = first & (mine != tl.load(key + n - 1, mask=inside & (n > 0), other=-1))
    return tl.where(first, tl.load(segment_end + n, mask=first, other=0) - n, 0)


@triton.jit(do_not_specialize=("tokens",))
def find_frequent(
    key, target, segment_end, frequent, place, slot, frequent_number, tokens, most,
    LEAST: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. frequent, place, slot ← the `most` targets with the most tokens, LEAST or more; those of BINS − 1
    tokens and more count as equal, and of equals the lower class comes first."""
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, tokens, BLOCK):
        length = _run_length(begin + tl.arange(0, BLOCK), key, target, segment_end, tokens)
        counts += tl.histogram(tl.minimum(length, BINS - 1), BINS)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # targets with so many tokens or more
    least = tl.min(tl.where((at_least <= most) & (bins >= LEAST), bins, BINS), 0)  # from here on all are taken
    room = most - tl.sum(tl.where(bins == least, at_least, 0), 0)  # for those with one token less
    taken = 0
    for begin in range(0, tokens, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        length = tl.minimum(_run_length(n, key, target, segment_end, tokens), BINS - 1)
        short = ((length == least - 1) & (least > LEAST)).to(tl.int32)
        take = (length >= least) | ((short > 0) & (tl.cumsum(short, 0) <= room))
        index = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        y = tl.load(target + n, mask=take, other=0)
        tl.store(frequent + index, y, mask=take)
        tl.store(place + index, n, mask=take)
        tl.store(slot + y, index.to(tl.int16), mask=take)
        room -= tl.sum(short, 0)
        taken += tl.sum(take.to(tl.int32), 0)
    tl.store(frequent_number, taken)
