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
    logit_gradient,
    logits,
    pull_of,
    softmax_rows,
    unscaled_gradient,
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
    tokens, folded = len(e), opts.plain and opts.uniform and b is None
    held = min(PAIR * size, max(size, tokens)) if any(needs) else size
    buffers = Buffers.allocate(size * opts.vocab, e, opts, any(needs), blocks=-(-held // size))
    de = e.new_empty(e.shape) if needs[0] else None
    dw = w.new_empty(w.shape) if needs[1] else None
    db = b.new_zeros(b.shape, dtype=opts.dtype) if needs[2] else None
    found = []
    for start in range(0, max(1, tokens), size):  # at least once: no tokens at all still make zero gradients
        part = slice(start, min(start + size, tokens))
        target, first = opts.safe_target[part], start % held
        block = buffers.view(len(target), opts.vocab, first)
        rows = softmax_rows(logits(e[part], w, b, block, opts), target, opts)
        found.append(rows)
        if not any(needs):
            continue
        if folded:
            dz = unscaled_gradient(block, target)
        else:
            target_weight = None if opts.target_weight is None else opts.target_weight[part]
            coef = coefficients(rows.lse, gradient[part], target_weight, opts)
            dz = logit_gradient(block, target[:, None], torch.ones_like(rows.top), coef, opts.class_weight, opts)
        if de is not None:
            torch.mm(dz, w, out=de[part])
        if db is not None:
            db.add_(dz.sum(0, dtype=opts.dtype))
        last = part.stop == tokens
        if dw is not None and (last or first + size == held):
            since = slice(start - first, part.stop)
            small = e[since] * gradient[since, None].to(e.dtype) if folded else e[since]
            dz = buffers.rows(0, since.stop - since.start, opts.vocab)
            dw.addmm_(dz.t(), small, beta=0 if since.start == 0 else 1)  # 0 writes over uninitialised memory
    if de is not None and folded:
        de.mul_(gradient[:, None].to(e.dtype))
    rows = Rows(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    return rows, (de, dw, None if db is None else db.to(b.dtype))


def columns_forward(e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int) -> Rows:
    """Chunks of `size` columns: an online log-sum-exp, the target's logit and the smoothing term."""
    buffers = Buffers.allocate(len(e) * size, e, opts, gradients=False)
    top = e.new_full((len(e), 1), float("-inf"), dtype=opts.dtype)
    total, at_target, pull = (torch.zeros_like(top) for _ in range(3))
    for columns, block in _columns(e, w, b, opts, size, buffers):
        z = block.work
        index, hit = _local(opts.safe_target, columns)
        at_target = torch.where(hit, z.gather(1, index), at_target)
        pull += pull_of(z, _part(opts.class_weight, columns), opts)
        higher = torch.maximum(top, z.amax(-1, keepdim=True))
        rescaled = total * torch.exp(top - higher)
        total = rescaled + z.sub_(higher).exp_().sum(-1, keepdim=True)
        top = higher
    return Rows(top, total, at_target, pull)


def columns_backward(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, needs: Needs, gradient: Tensor, rows: Rows
) -> Gradients:
    """Chunks of `size` columns again: p from the saved statistics, then the products."""
    buffers = Buffers.allocate(len(e) * size, e, opts, gradients=True)
    de = e.new_zeros(e.shape, dtype=opts.dtype) if needs[0] else None
    dw = w.new_empty(w.shape) if needs[1] else None
    db = b.new_empty(b.shape) if needs[2] else None
    coef = coefficients(rows.lse, gradient, opts.target_weight, opts)
    for columns, block in _columns(e, w, b, opts, size, buffers):
        block.work.sub_(rows.top).exp_().div_(rows.total)
        index, hit = _local(opts.safe_target, columns)
        dz = logit_gradient(block, index, hit.to(opts.dtype), coef, _part(opts.class_weight, columns), opts)
        if de is not None:
            _add_product(de, dz, w[columns])
        if dw is not None:
            torch.mm(dz.t(), e, out=dw[columns])
        if db is not None:
            db[columns] = dz.sum(0, dtype=opts.dtype)
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


def _local(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the target's place among these columns, clamped, and whether it lies there."""
    index = (target - columns.start)[:, None]
    last = columns.stop - columns.start - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to 16 bits: partial sums would lose what float32 keeps."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
