"""Head `chunked`: loss and gradients from blocks of logits, in plain PyTorch, split by sequence or by vocabulary.

With logits z (after the softcap), p = softmax z, ζ = z_loss and the symbols of `full`, a token's loss is
    l = t [ −(1−α) c_y log p_y + α/V Σ_v c_v (lse − z_v) + ζ lse² ].
With r = t · dL/dl and C = Σ_v c_v, its gradient is
    dL/dz_v = A p_v − B [v = y] − E c_v,   A = B + r (α C/V + 2 ζ lse),   B = r (1−α) c_y,   E = r α / V,
which the softcap multiplies by 1 − (z_v / s)².
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.errors import choose, require
from t1lib.heads import options
from t1lib.heads.full import ALIGN
from t1lib.heads.options import HeadStats, Options
from t1lib.heads.scale import scale_, scale_rows

DEFAULT_CHUNKS = 8  # by sequence
DEFAULT_COLUMNS = 8192  # by vocabulary: columns per chunk
PAIR = 2  # chunks per product for the weight gradient, so that the V × D sum is read and written half as often
TOKEN_BYTES = 128  # per token, in vectors over tokens: targets, masks, statistics, coefficients
SLACK = 2**20  # by how much a block of CUDA's caching allocator may exceed the request; at most three buffers

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@torch.compiler.disable  # which gets products into slices of reused memory wrong (2.13, backend aot_eager)
@options.on_flat_operands
def chunked(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, *, by: str = "sequence", chunks: int | None = None
) -> tuple[Tensor, HeadStats]:
    """Cross-entropy of a linear layer's outputs, computed in chunks so that the whole logits never exist at once.

    by="sequence" (default; what T1M3's text describes): the tokens in `chunks` chunks (default 8), three products; the
    backward only scales the gradients in place, and a second one is refused. Under "none" it recomputes the logits:
    four products. dW accumulates in the weight's own dtype, two chunks per product; in 16 bits that rounds once per
    product (docs/drift.md). In float16 with a loss scaler, gradients below 6e-8 are lost: use by="vocabulary".

    by="vocabulary" (what T1M3's code does): the columns of the logits in `chunks` chunks (default: of 8192 columns),
    four products. dE accumulates in an N × D float32 buffer, each slice of dW is written once.

    workspace: instead of `chunks`, the largest chunks whose buffers fit on a GPU, without cuBLAS's own buffers. Frozen
    operands cost no product, and nothing waits for the device. Raises `T1Error` for a bad option, for filter_eps, for
    chunks and workspace together, for a workspace too small (saying the least that works), for a second backward where
    the forward computed the gradients, and for create_graph=True.
    """
    choose("by", by, ("sequence", "vocabulary"))
    options.check_chunks(chunks, opts.settings)
    require(opts.settings.filter_eps is None, "head 'chunked' has no filter_eps; heads that take it: full, fused")
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (e, w, b))
    workspace, length = opts.settings.workspace, len(opts.target) if by == "sequence" else opts.vocab
    size = DEFAULT_COLUMNS if by == "vocabulary" and chunks is None else -(-length // (chunks or DEFAULT_CHUNKS))
    if workspace is not None:
        fixed, unit = _costs(e, opts, by, needs)
        options.need_workspace(workspace, fixed + unit, f"chunked by {by}")
        size = (workspace - fixed) // unit
    loss, *stats = _Chunked.apply(e, w, b, opts, by, max(1, min(length, size)), needs)
    return loss, opts.stats(*stats)


def _costs(e: Tensor, opts: Options, by: str, needs: Needs) -> tuple[int, int]:
    """(fixed bytes, bytes per token or column of a chunk)."""
    tokens, (size, wide), shards = len(opts.target), (e.dtype.itemsize, opts.dtype.itemsize), opts.settings.shards
    rows = tokens * e.shape[1]  # elements of the hidden states, of which the wrapper holds a copy
    fixed = TOKEN_BYTES * tokens + (3 * SLACK if e.is_cuda else 0) + size * rows
    entry = (0 if size == wide else wide) + (wide if any(needs) and opts.settings.softcap is not None else 0)
    if by == "vocabulary":
        fixed += (2 * wide * rows if needs[0] else 0) + ALIGN * (entry + size) * tokens
        return fixed, max(1, (entry + size) * tokens)
    widest = opts.vocab if shards is None else max(shards.rows)
    fixed += 2 * wide * widest * needs[2] + (0 if shards is None else wide * rows * needs[0])
    return fixed, (entry + size * (PAIR if any(needs) else 1)) * (widest + ALIGN)


class Block:
    """Memory for blocks of logits, reused. Rows start on `ALIGN` elements; what is beyond the last column is −inf.

    raw     gradients in the operands' dtype, of `held` blocks (and before them the logits, where no product can write
            float32)
    work    logits and p in float32; the same memory as `raw` for float32 operands. z: the same without padding
    slope   the softcap's derivative; None where it is not needed
    """

    def __init__(self, rows: int, columns: int, like: Tensor, opts: Options, gradients: bool, held: int = 1) -> None:
        width, self.opts = -(-columns // ALIGN) * ALIGN, opts
        self._raw = like.new_empty(held * rows, width)
        self._work = self._raw if like.dtype == opts.dtype else like.new_empty(rows, width, dtype=opts.dtype)
        sloped = gradients and opts.settings.softcap is not None
        self._slope = like.new_empty(rows, width, dtype=opts.dtype) if sloped else None

    def fill(self, e: Tensor, w: Tensor, b: Tensor | None, first: int = 0) -> None:
        """z ← e wᵀ + b, softcapped; slope ← 1 − tanh². `raw` begins at row `first` of its memory.

        On CUDA a 16-bit product writes its float32 sums directly, with no rounding and no widening pass. Elsewhere it
        is rounded to the operands' dtype, as in `F.linear`, and then widened.
        """
        rows, columns, softcap = len(e), len(w), self.opts.settings.softcap
        self.raw = self._raw[first : first + rows]
        self.work = self.raw if self._work is self._raw else self._work[:rows]
        self.z, raw = self.work[:, :columns], self.raw[:, :columns]
        self.slope = None if self._slope is None else self._slope[:rows, :columns]
        wide = e.is_cuda and self.work is not self.raw
        for part in _parts(columns):
            if wide:
                torch.mm(e, w[part].t(), out_dtype=self.opts.dtype, out=self.z[:, part])
            elif b is None:
                torch.mm(e, w[part].t(), out=raw[:, part])
            else:
                torch.addmm(b[part], e, w[part].t(), out=raw[:, part])
        if wide and b is not None:
            self.z.add_(b)
        elif not wide and self.work is not self.raw:
            self.z.copy_(raw)
        if softcap is not None:
            self.z.div_(softcap).tanh_()
            if self.slope is not None:
                torch.mul(self.z, self.z, out=self.slope).neg_().add_(1.0)
            self.z.mul_(softcap)
        self.work[:, columns:] = -math.inf

    def pull(self, class_weight: Tensor | None) -> Tensor:
        """Σ_v c_v z_v of each row under label smoothing, else 0, (rows, 1)."""
        if not self.opts.settings.label_smoothing:
            return self.z.new_zeros(len(self.z), 1)
        return self.z.sum(-1, keepdim=True) if class_weight is None else (self.z @ class_weight)[:, None]

    def gradient(
        self, index: Tensor, hit: Tensor, factors: tuple[Tensor, ...], lse: Tensor, weight: Tensor | None
    ) -> Tensor:
        """dL/d(raw logits) where `work` holds p, written to `raw`; returned without padding.

        index, hit (rows, 1)   the target's column in this block, and 1.0 if the target lies in the block, else 0.0
        factors                r, A without its z-loss part, B, E: (rows, 1) each
        weight                 the class weights of the block's columns
        """
        smooth, z_loss = self.opts.settings.label_smoothing, self.opts.settings.z_loss
        r, a, target, even = factors
        x, columns = self.work.scatter_add_(1, index, -hit), self.z.shape[1]  # p − one-hot: no cancellation as p_y → 1
        if not (smooth or z_loss or self.slope is not None):  # then A is B
            return scale_rows(x, a, self.raw)[:, :columns]  # scale and rounding in one pass
        a = a + 2.0 * z_loss * lse * r if z_loss else a
        x.mul_(a).scatter_add_(1, index, (a - target) * hit)
        if smooth and weight is None:
            self.z.sub_(even)
        elif smooth:
            self.z.addr_(even[:, 0], weight, alpha=-1)
        if self.slope is not None:
            self.z.mul_(self.slope)
        return (x if x is self.raw else self.raw.copy_(x))[:, :columns]

    def held(self, rows: int) -> Tensor:
        """The first `rows` rows of gradients, of as many blocks."""
        return self._raw[:rows, : self.z.shape[1]]


def _parts(columns: int) -> list[slice]:
    """The columns up to a multiple of `ALIGN`, and the rest: cuBLAS is fast only with sizes of such multiples."""
    whole = columns // ALIGN * ALIGN
    return [part for part in (slice(0, whole), slice(whole, columns)) if part.start < part.stop]


def _input_gradient(dz: Tensor, w: Tensor, out: Tensor) -> None:
    """out ← dz w, rounded to out's dtype once, but for the few terms of the rest of `_parts`."""
    main, *rest = _parts(len(w))
    if rest:
        torch.addmm(dz[:, rest[0]] @ w[rest[0]], dz[:, main], w[main], out=out)
    else:
        torch.mm(dz, w, out=out)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`, without rounding to 16 bits in between."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


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


def _local(target: Tensor, columns: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the target's index within these columns, clamped to them; 1.0 if it lies among them, else 0.0."""
    index, last = (target - columns.start)[:, None], columns.stop - columns.start - 1
    return index.clamp(0, last), ((index >= 0) & (index <= last)).to(dtype)


def _softmax(block: Block, index: Tensor, hit: Tensor) -> Rows:
    """Statistics of a block of complete rows of logits, which become p; its targets as in `_local`.

    The softmax's denominator is recovered from its largest entry, p_top = 1 / total, which saves a pass. On a shard the
    statistics, and p, are those over the whole vocabulary: one collective. If all logits of a row are −inf there, its
    share of the softmax is zero.
    """
    z, work, shards = block.z, block.work, block.opts.settings.shards
    where = z.argmax(-1, keepdim=True)
    top, at_target, pull = z.gather(1, where), z.gather(1, index), block.pull(block.opts.local_class_weight)
    if shards is not None:
        z.scatter_(1, where, top.clamp(min=torch.finfo(z.dtype).min))  # finite, so that p becomes one-hot and not nan
    torch.softmax(work, -1, out=work)
    rows = Rows(top, z.gather(1, where).reciprocal(), at_target, pull)
    if shards is None:
        return rows
    mine = torch.cat([*rows[:2], torch.where(hit > 0, at_target, 0.0), pull], 1)
    top, total, at_target, pull = shards.gather(mine).view(shards.size, -1, 4).unbind(-1)
    highest = top.amax(0)
    parts = total * torch.exp(top - highest)
    whole = parts.sum(0)
    work.mul_((parts[shards.rank] / whole)[:, None])
    return Rows(*(x[:, None] for x in (highest, whole, at_target.sum(0), pull.sum(0))))


def _by_sequence(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, needs: Needs, upstream: Tensor | float | None
) -> tuple[Rows, Gradients]:
    """Loop over chunks of `size` tokens: the statistics, and the gradients in `needs`, for this upstream gradient."""
    shards, wide = opts.settings.shards, opts.dtype
    e = e if shards is None else shards.tokens(e)
    tokens, held = len(e), min(PAIR if any(needs) else 1, max(1, -(-len(e) // size)))
    block = Block(size, opts.vocab, e, opts, any(needs), held)
    de = e.new_empty(e.shape, dtype=e.dtype if shards is None else wide) if needs[0] else None
    dw = w.new_empty(w.shape) if needs[1] else None
    db = b.new_zeros(b.shape, dtype=wide) if needs[2] else None
    targets, found, sums = _local(opts.local_target, slice(0, opts.vocab), wide), [], []
    factors = [x[:, None] for x in opts.factors(upstream)] if any(needs) else []
    for start in range(0, max(1, tokens), size):  # at least once, so that an empty batch gets zero gradients
        part, first = slice(start, min(start + size, tokens)), start % (held * size)
        index, hit = (x[part] for x in targets)
        block.fill(e[part], w, b, first)
        found.append(_softmax(block, index, hit))
        if not any(needs):
            continue
        dz = block.gradient(index, hit, tuple(x[part] for x in factors), found[-1].lse, opts.local_class_weight)
        if de is not None and shards is None:
            _input_gradient(dz, w, de[part])
        elif de is not None:
            de[part] = _wide_product(dz, w, wide)
            sums.append(shards.start_sum(de[part]))
        if db is not None:
            db.add_(dz.sum(0, dtype=wide))
        if dw is not None and (part.stop == tokens or first + size == held * size):
            since = slice(start - first, part.stop)
            dz = block.held(since.stop - since.start)
            for p in _parts(opts.vocab):  # beta=0 ignores the uninitialised dw
                dw[p].addmm_(dz[:, p].t(), e[since], beta=0 if since.start == 0 else 1)
    for work in sums:
        work.wait()
    de = None if de is None else opts.own(de).to(e.dtype)
    return Rows(*map(torch.cat, zip(*found, strict=True))), (de, dw, None if db is None else db.to(b.dtype))


def _ranges(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, gradients: bool
) -> Iterator[tuple[Block, slice, Tensor | None, Tensor, Tensor]]:
    """Ranges of `size` columns: a block of their logits, the columns, their class weights, and what `_local` says."""
    block, weight = Block(len(e), size, e, opts, gradients), opts.class_weight
    for start in range(0, len(w), size):
        columns = slice(start, min(start + size, len(w)))
        block.fill(e, w[columns], None if b is None else b[columns])
        yield block, columns, None if weight is None else weight[columns], *_local(opts.target, columns, opts.dtype)


def _vocabulary_forward(e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int) -> Rows:
    """Loop over chunks of `size` columns: an online log-sum-exp, the target's logit and the smoothing term."""
    top = e.new_full((len(e), 1), -math.inf, dtype=opts.dtype)
    total, at_target, pull = (torch.zeros_like(top) for _ in range(3))
    for block, _, weight, index, hit in _ranges(e, w, b, opts, size, gradients=False):
        z = block.z
        at_target = torch.where(hit > 0, z.gather(1, index), at_target)
        pull += block.pull(weight)
        higher = torch.maximum(top, z.amax(-1, keepdim=True))
        floor = higher.clamp(min=torch.finfo(z.dtype).min)  # finite, as −inf − (−inf) would be nan
        total = total * torch.exp(top - floor) + z.sub_(floor).exp_().sum(-1, keepdim=True)
        top = higher
    return Rows(top, total, at_target, pull)


def _vocabulary_backward(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, size: int, needs: Needs, upstream: Tensor, rows: Rows
) -> Gradients:
    """Gradients from recomputed logits, a chunk of `size` columns at a time."""
    factors = tuple(x[:, None] for x in opts.factors(upstream))
    de = e.new_zeros(e.shape, dtype=opts.dtype) if needs[0] else None
    dw = w.new_empty(w.shape) if needs[1] else None
    db = b.new_empty(b.shape) if needs[2] else None
    log_total = rows.total.log()
    for block, columns, weight, index, hit in _ranges(e, w, b, opts, size, gradients=True):
        block.work.sub_(rows.top).sub_(log_total).exp_()
        dz = block.gradient(index, hit, factors, rows.lse, weight)
        if de is not None:  # rounding the product to 16 bits would lose what the float32 sum keeps
            de.add_(_wide_product(dz, w[columns], de.dtype))
        if dw is not None:
            torch.mm(dz.t(), e, out=dw[columns])
        if db is not None:
            db[columns] = dz.sum(0, dtype=opts.dtype)
    return None if de is None else de.to(e.dtype), dw, db


class _Chunked(torch.autograd.Function):
    """(loss, lse, logprob, correct). By sequence and with a known upstream gradient the forward makes the gradients."""

    @staticmethod
    def forward(ctx, e: Tensor, w: Tensor, b: Tensor | None, opts: Options, by: str, size: int, needs: Needs):
        ctx.early = by == "sequence" and opts.settings.reduction != "none" and any(needs)
        ctx.call = opts, by, size, needs
        if not ctx.early:  # the options' tensors come along only so that a change is noticed
            ctx.save_for_backward(e, w, b, opts.target, opts.class_weight, opts.token_weight)
        if by == "sequence":
            rows, ctx.found = _by_sequence(e, w, b, opts, size, needs if ctx.early else (False,) * 3, 1.0)
        else:
            rows = ctx.found = _vocabulary_forward(e, w, b, opts, size)
        logprob = (rows.at_target - rows.top) - rows.total.log()
        correct = rows.at_target >= rows.top
        lse, logprob, pull, correct = (x[:, 0] for x in (rows.lse, logprob, rows.pull, correct))
        ctx.mark_non_differentiable(lse, logprob, correct)
        ctx.set_materialize_grads(False)
        return opts.reduce(opts.losses(lse, logprob, pull)), lse, logprob, correct

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):
        opts, by, *call = ctx.call
        options.refuse_create_graph("chunked", opts.settings.shards is not None)
        if upstream is None:
            return (None,) * 7
        if by == "vocabulary":
            gradients = _vocabulary_backward(*ctx.saved_tensors[:3], opts, *call, upstream, ctx.found)
        elif not ctx.early:
            _, gradients = _by_sequence(*ctx.saved_tensors[:3], opts, *call, upstream)
        elif ctx.found is None:
            raise options.spent("chunked", 'by="vocabulary" or reduction="none"')
        else:
            gradients, ctx.found = [None if g is None else scale_(g, upstream) for g in ctx.found], None
        return *gradients, *(None,) * 4
