"""Operations of head `chunked` on one block of logits: buffers, softmax statistics, the gradient, in few passes.

With logits z (after the softcap), p = softmax z, ζ = z_loss and the symbols of `full`, a token's loss is
    l = t [ −(1−α) c_y log p_y + α/V Σ_v c_v (lse − z_v) + ζ lse² ].
With r = t · dL/dl and C = Σ_v c_v, its gradient is
    dL/dz_v = A p_v − B [v = y] − E c_v,   A = B + r (α C/V + 2 ζ lse),   B = r (1−α) c_y,   E = r α / V,
which the softcap multiplies by 1 − (z_v / s)².
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.heads.contract import Options


@dataclass
class Buffers:
    """Memory for blocks of logits, allocated once and reused.

    raw     gradients in the operands' dtype (and before them the logits, where no product can write float32)
    work    logits and p in float32; the same memory as `raw` for float32 operands
    slope   the softcap's derivative
    """

    raw: Tensor
    work: Tensor
    slope: Tensor | None

    @classmethod
    def allocate(cls, entries: int, like: Tensor, opts: Options, gradients: bool, blocks: int = 1) -> "Buffers":
        """Flat buffers for `entries` logits, `raw` for `blocks` times as many; `slope` only if a softcap needs it."""
        raw = like.new_empty(entries * blocks)
        work = raw if raw.dtype == opts.dtype else like.new_empty(entries, dtype=opts.dtype)
        slope = like.new_empty(entries, dtype=opts.dtype) if gradients and opts.softcap is not None else None
        return cls(raw, work, slope)

    def view(self, rows: int, columns: int, first: int = 0) -> "Buffers":
        """The buffers as contiguous rows × columns matrices; that of `raw` begins at its row `first`."""
        raw = self.rows(first, first + rows, columns)
        work = raw if self.work is self.raw else self.work[: rows * columns].view(rows, columns)
        slope = None if self.slope is None else self.slope[: rows * columns].view(rows, columns)
        return Buffers(raw, work, slope)

    def rows(self, start: int, stop: int, columns: int) -> Tensor:
        """Rows `start` to `stop` of `raw`, as a contiguous matrix."""
        return self.raw[start * columns : stop * columns].view(stop - start, columns)


def entry_bytes(dtype: torch.dtype, opts: Options, gradients: bool, blocks: int = 1) -> int:
    """Bytes of workspace per logit of a block: the buffers, and what filtering's comparisons allocate."""
    size = dtype.itemsize * blocks
    if dtype != opts.dtype:
        size += opts.dtype.itemsize
    if gradients and opts.softcap is not None:
        size += opts.dtype.itemsize
    return size + (3 if gradients and opts.filter_eps is not None else 0)


class Rows(NamedTuple):
    """Statistics per token, (N, 1) in float32 or float64, from which loss and gradient follow.

    The log-sum-exp is kept as two terms, because subtracting them one by one loses less precision at large logits.
    """

    top: Tensor  # the largest logit
    total: Tensor  # Σ_v exp(z_v − top)
    at_target: Tensor
    pull: Tensor  # Σ_v c_v z_v under label smoothing, else 0

    @property
    def lse(self) -> Tensor:
        return self.top + self.total.log()

    @property
    def logprob(self) -> Tensor:
        return (self.at_target - self.top) - self.total.log()


def logits(e: Tensor, w: Tensor, b: Tensor | None, block: Buffers, opts: Options) -> Tensor:
    """work ← e wᵀ + b, softcapped; slope ← 1 − tanh². Returns work, (rows, columns).

    On CUDA a 16-bit product without a bias writes its float32 sums directly, with no rounding and no widening pass.
    Otherwise the product is rounded to the operands' dtype, as in `F.linear`, and then widened.
    """
    work = block.work
    if b is None and e.is_cuda and work is not block.raw:
        torch.mm(e, w.t(), out_dtype=opts.dtype, out=work)
    else:
        torch.mm(e, w.t(), out=block.raw) if b is None else torch.addmm(b, e, w.t(), out=block.raw)
        if work is not block.raw:
            work.copy_(block.raw)
    if opts.softcap is not None:
        work.div_(opts.softcap).tanh_()
        if block.slope is not None:
            torch.mul(work, work, out=block.slope).neg_().add_(1.0)
        work.mul_(opts.softcap)
    return work


def pull_of(z: Tensor, class_weight: Tensor | None, opts: Options) -> Tensor:
    """Σ_v c_v z_v of each row of a block, (rows, 1)."""
    if not opts.label_smoothing:
        return z.new_zeros(len(z), 1, dtype=opts.dtype)
    return z.sum(-1, keepdim=True) if class_weight is None else (z @ class_weight)[:, None]


def softmax_rows(z: Tensor, index: Tensor, opts: Options) -> Rows:
    """Statistics of complete rows of logits z, which is overwritten by p; index (rows, 1): the target's column.

    The softmax's denominator is recovered from its largest entry, p_top = 1 / total, which saves a pass. If all logits
    of a row are −inf on a shard, p becomes one-hot instead of nan, and `Shards.combine` gives it a share of zero.
    """
    where = z.argmax(-1, keepdim=True)
    top, at_target = z.gather(1, where), z.gather(1, index)
    pull = pull_of(z, opts.local_class_weight, opts)
    if opts.shards is not None:
        z.scatter_(1, where, top.clamp(min=torch.finfo(z.dtype).min))
    torch.softmax(z, -1, out=z)
    return Rows(top, z.gather(1, where).reciprocal(), at_target, pull)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`, without rounding to 16 bits in between."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def local_targets(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the target's index within these columns, clamped to them, and whether it lies among them."""
    index = (target - columns.start)[:, None]
    last = columns.stop - columns.start - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def token_losses(lse: Tensor, logprob: Tensor, pull: Tensor, opts: Options) -> Tensor:
    """(N) losses before the token weight, by the equation above, from (N) vectors of per-token statistics."""
    smooth = opts.label_smoothing
    losses = -(1.0 - smooth) * logprob
    if opts.target_weight is not None:
        losses = losses * opts.target_weight
    if smooth:
        losses = losses + smooth / opts.classes * (opts.class_sum * lse - pull)
    return losses + opts.z_loss * lse.square() if opts.z_loss else losses


class Coefficients(NamedTuple):
    """A, B and E of the gradient's equation, (N, 1)."""

    softmax: Tensor
    target: Tensor
    even: Tensor


def coefficients(lse: Tensor, gradient: Tensor, target_weight: Tensor | None, opts: Options) -> Coefficients:
    """The coefficients from lse (N, 1) and `gradient` (N), the equation's r, which is 0 at ignored tokens."""
    r = gradient[:, None]
    smooth = opts.label_smoothing
    target = r * (1.0 - smooth)
    if target_weight is not None:
        target = target * target_weight[:, None]
    softmax = target
    if smooth or opts.z_loss:
        softmax = target + r * (smooth / opts.classes * opts.class_sum + 2.0 * opts.z_loss * lse)
    return Coefficients(softmax, target, r * (smooth / opts.classes))


def unscaled_gradient(block: Buffers, index: Tensor, hit: Tensor) -> Tensor:
    """p − one-hot of a block whose `work` holds p, written to `raw`, which is returned. The only pass is the rounding.

    index, hit: as in `logit_gradient`.
    """
    x = block.work.scatter_add_(1, index, -hit)
    return x if x is block.raw else block.raw.copy_(x)


def logit_gradient(
    block: Buffers, index: Tensor, hit: Tensor, coef: Coefficients, class_weight: Tensor | None, opts: Options
) -> Tensor:
    """dL/d(raw logits) of a block whose `work` holds p, written to `raw`, which is returned.

    index, hit (rows, 1): the target's column in this block, and 1.0 if the target lies in the block, else 0.0.
    """
    x = block.work.scatter_add_(1, index, -hit)  # p − one-hot, in float32: no cancellation as p_y → 1
    if opts.plain:
        return torch.mul(x, coef.softmax, out=block.raw)  # scale and rounding in one pass
    small = None if opts.filter_eps is None else (x < opts.filter_eps).logical_and_(x > -opts.filter_eps)
    x.mul_(coef.softmax).scatter_add_(1, index, (coef.softmax - coef.target) * hit)
    if opts.label_smoothing and class_weight is None:
        x.sub_(coef.even)
    elif opts.label_smoothing:
        x.addr_(coef.even[:, 0], class_weight, alpha=-1)
    if block.slope is not None:
        x.mul_(block.slope)
    if small is not None:
        x.masked_fill_(small, 0.0)
    return x if x is block.raw else block.raw.copy_(x)
