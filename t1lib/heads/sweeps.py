"""The loops of head `chunked`: over chunks of tokens, and over chunks of the vocabulary's columns.

Each returns gradients as (input, linear_weight, linear_bias), None for those that `needs` leaves out.
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


PAIR = 2  # chunks whose weight gradient is one product: the V × D sum is read and written half as often


def by_sequence(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, needs: Needs, gradient: Tensor | None
) -> tuple[Rows, Gradients]:
    """Chunks of `size` tokens. `gradient` (N): dL / d(token's loss), token weight included, if any gradient is made.

    Where `opts` is plain and uniform, `gradient` must be 0 or one power of two: it then multiplies the small operands
    (rows of e and of dE, exactly) instead of the logits' gradient.
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
    for start in range(0, max(1, tokens), size):  # at least once: no tokens at all still make zero gradients
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
            dw.addmm_(dz.t(), small, beta=0 if since.start == 0 else 1)  # 0 writes over uninitialised memory
    rows = Rows(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    return rows, (None if de is None else de.result(), dw, None if db is None else db.to(b.dtype))


class _InputGradient:
    """dE from chunks of tokens; the sums of shards of the weight are on their way while the next product is made."""

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
        """dE, times the factor of each token."""
        de = self._de if self._sum is None else self._sum.result(self._dtype)
        return de if self._factor is None else de.mul_(self._factor)


def _targets(opts: Options) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the target's column, and 1.0 where it is one of those here."""
    if opts.shards is None:
        index = opts.safe_target[:, None]
        return index, torch.ones_like(index, dtype=opts.dtype)
    index, hit = local_targets(opts.local_target, slice(0, opts.vocab))
    return index, hit.to(opts.dtype)


def _scaled_gradient(
    block: Buffers, index: Tensor, hit: Tensor, rows: Rows, part: slice, gradient: Tensor, opts: Options
) -> Tensor:
    """`logit_gradient` of the tokens `part`."""
    target_weight = None if opts.target_weight is None else opts.target_weight[part]
    coef = coefficients(rows.lse, gradient[part], target_weight, opts)
    return logit_gradient(block, index, hit, coef, opts.local_class_weight, opts)


def _rows(z: Tensor, index: Tensor, hit: Tensor, opts: Options) -> tuple[Rows, Tensor | None]:
    """Statistics over the whole vocabulary from logits z, which become p, or p / share where z is a part of it."""
    rows = softmax_rows(z, index, opts)
    return (rows, None) if opts.shards is None else opts.shards.combine(rows, hit > 0)


def columns_forward(e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int) -> Rows:
    """Chunks of `size` columns: an online log-sum-exp, the target's logit and the smoothing term."""
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
        floor = higher.clamp(min=torch.finfo(z.dtype).min)  # −inf − −inf where all logits so far are −inf
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
    """Chunks of `size` columns again: p from the saved statistics, then the products."""
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
    """total += a @ b without rounding the product to 16 bits: partial sums would lose what float32 keeps."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(wide_product(a, b, total.dtype))
