"""The loops of head `chunked`: over chunks of tokens, and over chunks of the vocabulary's columns.

Gradients are returned as (input, linear_weight, linear_bias), with None for those not in `needs`.
"""

import torch
from torch import Tensor

from t1lib.heads.contract import Options
from t1lib.heads.logits import (
    Buffers,
    Rows,
    coefficients,
    local_targets,
    logit_gradient,
    logits,
    pull_of,
    softmax_rows,
    unscaled_gradient,
    wide_product,
)

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


PAIR = 2  # chunks per product for the weight gradient, so that the V × D sum is read and written half as often


def by_sequence(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, needs: Needs, gradient: Tensor | None
) -> tuple[Rows, Gradients]:
    """Loop over chunks of `size` tokens; compute the statistics and the gradients in `needs`.

    `gradient` (N): dL / d(token's loss), including its token weight; None if no gradient is needed. If `opts` is plain
    and uniform and there is no bias, each entry must be 0 or the same power of two: it then multiplies the small
    operands (rows of e and of dE), which is exact, instead of the logits' gradient.
    """
    e = opts.tokens(e)
    tokens, folded = len(e), opts.plain and opts.uniform and b is None
    held = min(PAIR * size, max(size, tokens)) if any(needs) else size
    buffers = Buffers.allocate(size * opts.vocab, e, opts, any(needs), blocks=-(-held // size))
    factor = gradient[:, None].to(e.dtype) if folded and any(needs) else None
    de = _InputGradient(e, opts, factor) if needs[0] else None
    dw = w.new_empty(w.shape) if needs[1] else None
    db = b.new_zeros(b.shape, dtype=opts.dtype) if needs[2] else None
    index, hit = _targets(opts)
    found = []
    for start in range(0, max(1, tokens), size):  # at least once, so that an empty batch gets zero gradients
        part = slice(start, min(start + size, tokens))
        first, place = start % held, (index[part], hit[part])
        block = buffers.view(len(place[0]), opts.vocab, first)
        rows, share = _rows(logits(e[part], w, b, block, opts), *place, opts)
        found.append(rows)
        if not any(needs):
            continue
        if share is not None:
            block.work.mul_(share)
        dz = unscaled_gradient(block, *place) if folded else _scaled_gradient(block, *place, rows, part, gradient, opts)
        if de is not None:
            de.add(part, dz, w)
        if db is not None:
            db.add_(dz.sum(0, dtype=opts.dtype))
        last = part.stop == tokens
        if dw is not None and (last or first + size == held):
            since = slice(start - first, part.stop)
            small = e[since] * factor[since] if folded else e[since]
            dz = buffers.rows(0, since.stop - since.start, opts.vocab)
            dw.addmm_(dz.t(), small, beta=0 if since.start == 0 else 1)  # beta=0 ignores the uninitialised dw
    rows = Rows(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    return rows, (None if de is None else de.result(), dw, None if db is None else db.to(b.dtype))


class _InputGradient:
    """dE from chunks of tokens; with a sharded weight, the sum over the shards overlaps the next product."""

    def __init__(self, e: Tensor, opts: Options, factor: Tensor | None) -> None:
        self._dtype, self._factor = e.dtype, None if factor is None else opts.own(factor)
        self._sum = None if opts.shards is None else opts.shards.sum_of(e.new_empty(e.shape, dtype=opts.dtype))
        self._de = e.new_empty(e.shape) if self._sum is None else self._sum.partial

    def add(self, part: slice, dz: Tensor, w: Tensor) -> None:
        if self._sum is None:
            torch.mm(dz, w, out=self._de[part])
        else:
            self._de[part] = wide_product(dz, w, self._de.dtype)
            self._sum.start(part)

    def result(self) -> Tensor:
        """dE, multiplied by each token's factor if there is one."""
        de = self._de if self._sum is None else self._sum.result(self._dtype)
        return de if self._factor is None else de.mul_(self._factor)


def _targets(opts: Options) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the target's column on this process, and 1.0 if this process holds the target, else 0.0."""
    if opts.shards is None:
        index = opts.safe_target[:, None]
        return index, torch.ones_like(index, dtype=opts.dtype)
    index, hit = local_targets(opts.local_target, slice(0, opts.vocab))
    return index, hit.to(opts.dtype)


def _scaled_gradient(
    block: Buffers, index: Tensor, hit: Tensor, rows: Rows, part: slice, gradient: Tensor, opts: Options
) -> Tensor:
    """`logit_gradient` for the tokens in `part`."""
    target_weight = None if opts.target_weight is None else opts.target_weight[part]
    coef = coefficients(rows.lse, gradient[part], target_weight, opts)
    return logit_gradient(block, index, hit, coef, opts.local_class_weight, opts)


def _rows(z: Tensor, index: Tensor, hit: Tensor, opts: Options) -> tuple[Rows, Tensor | None]:
    """Statistics over the whole vocabulary from logits z, which are overwritten by p (by p / share on a shard).

    The second result is that share of each token's softmax; None without shards.
    """
    rows = softmax_rows(z, index, opts)
    return (rows, None) if opts.shards is None else opts.shards.combine(rows, hit > 0)


def columns_forward(e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int) -> Rows:
    """Loop over chunks of `size` columns: an online log-sum-exp, the target's logit and the smoothing term."""
    e = opts.tokens(e)
    buffers = Buffers.allocate(len(e) * size, e, opts, gradients=False)
    top = e.new_full((len(e), 1), float("-inf"), dtype=opts.dtype)
    total, at_target, pull = (torch.zeros_like(top) for _ in range(3))
    for columns, block in _columns(e, w, b, opts, size, buffers):
        z = block.work
        index, hit = local_targets(opts.local_target, columns)
        at_target = torch.where(hit, z.gather(1, index), at_target)
        pull += pull_of(z, _part(opts.local_class_weight, columns), opts)
        higher = torch.maximum(top, z.amax(-1, keepdim=True))
        floor = higher.clamp(min=torch.finfo(z.dtype).min)  # finite, as −inf − (−inf) would be nan
        rescaled = total * torch.exp(top - floor)
        total = rescaled + z.sub_(floor).exp_().sum(-1, keepdim=True)
        top = higher
    rows = Rows(top, total, at_target, pull)
    if opts.shards is None:
        return rows
    return opts.shards.combine(rows, local_targets(opts.local_target, slice(0, opts.vocab))[1])[0]


def columns_backward(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, needs: Needs, gradient: Tensor, rows: Rows
) -> Gradients:
    """Loop over chunks of `size` columns again: p from recomputed logits and saved statistics, then the products."""
    e = opts.tokens(e)
    buffers = Buffers.allocate(len(e) * size, e, opts, gradients=True)
    de = e.new_zeros(e.shape, dtype=opts.dtype) if needs[0] else None
    dw = w.new_empty(w.shape) if needs[1] else None
    db = b.new_empty(b.shape) if needs[2] else None
    coef = coefficients(rows.lse, gradient, opts.target_weight, opts)
    for columns, block in _columns(e, w, b, opts, size, buffers):
        block.work.sub_(rows.top).exp_().div_(rows.total)
        index, hit = local_targets(opts.local_target, columns)
        dz = logit_gradient(block, index, hit.to(opts.dtype), coef, _part(opts.local_class_weight, columns), opts)
        if de is not None:
            _add_product(de, dz, w[columns])
        if dw is not None:
            torch.mm(dz.t(), e, out=dw[columns])
        if db is not None:
            db[columns] = dz.sum(0, dtype=opts.dtype)
    if de is not None and opts.shards is not None:
        sums = opts.shards.sum_of(de)
        sums.start(slice(None))
        return sums.result(e.dtype), dw, db
    return None if de is None else de.to(e.dtype), dw, db


def _columns(e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, buffers: Buffers):
    """Yield (columns, block) with the logits of those columns in `block.work`."""
    for start in range(0, opts.vocab, size):
        columns = slice(start, min(start + size, opts.vocab))
        block = buffers.view(len(e), columns.stop - start)
        logits(e, w[columns], _part(b, columns), block, opts)
        yield columns, block


def _part(vector: Tensor | None, columns: slice) -> Tensor | None:
    return None if vector is None else vector[columns]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to 16 bits, which would lose what the float32 sum keeps."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(wide_product(a, b, total.dtype))
