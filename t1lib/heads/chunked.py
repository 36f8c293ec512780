"""Head `chunked`: loss and gradients from blocks of tokens or of classes, in plain PyTorch but for two scalings.

With logits z (after the softcap), p = softmax z, ζ = z_loss and the symbols of `full`, a token's loss is
    l = t [ −(1−α) c_y log p_y + α/V Σ_v c_v (lse − z_v) + ζ lse² ].
With r = t · dL/dl and C = Σ_v c_v, its gradient is
    dL/dz_v = A p_v − B [v = y] − E c_v,   A = B + r (α C/V + 2 ζ lse),   B = r (1−α) c_y,   E = r α / V.
The gradient of the raw logits is this times the softcap's slope, 1 − (z_v / s)²."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.errors import choose, require
from t1lib.heads import options
from t1lib.heads.full import ALIGN
from t1lib.heads.kernels import scale_, scale_rows
from t1lib.heads.options import HeadStats, Options, Tensors

DEFAULT_CHUNKS = 8  # by sequence
DEFAULT_COLUMNS = 8192  # by vocabulary: columns per chunk
PAIR = 2  # chunks per product for the weight gradient, so that the V × D sum is read and written half as often
TOKEN_BYTES = 128  # per token, in vectors over tokens: targets, masks, statistics, coefficients
SLACK = 2**20  # bytes by which CUDA's caching allocator may exceed a request, for each of at most three buffers

Needs = tuple[bool, bool, bool]


@torch._disable_dynamo  # torch.compile gets products into slices of reused memory wrong (2.13, backend aot_eager)
@options.on_flat_operands
def chunked(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, *, by: str = "sequence", chunks: int | None = None
) -> tuple[Tensor, HeadStats]:
    """Cross-entropy of a linear layer's outputs, computed in chunks so that the whole logits never exist at once.

    by="sequence" (default; what T1M3's text describes): splits the tokens into `chunks` chunks (default 8). The forward
    computes the gradients and the backward scales them: three products. Under "none" the backward recomputes the
    logits: four products. dW accumulates in the weight's own dtype, rounded once per two chunks (docs/drift.md). In
    float16 with a loss scaler, gradients below 6e-8 are lost: use by="vocabulary".
    by="vocabulary" (what T1M3's code does): splits the columns of the logits into `chunks` chunks (default: of 8192
    columns), four products. dE accumulates in an N × D float32 buffer; each slice of dW is written once.
    workspace, instead of `chunks`: the largest chunks whose buffers fit into it on a GPU, cuBLAS's not counted. Raises
    `T1Error` for a bad option, filter_eps, chunks and workspace together, a workspace too small (stating the least that
    works), a second backward by sequence (except under "none"), and create_graph=True."""
    choose("by", by, ("sequence", "vocabulary"))
    options.check_chunks(chunks, opts.settings)
    require(opts.settings.filter_eps is None, "head 'chunked' has no filter_eps; heads that take it: full, fused")
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (e, w, b))
    workspace, length = opts.settings.workspace, len(opts.target) if by == "sequence" else opts.vocab
    size = _chunk(length, by, chunks)
    if workspace is not None:
        fixed, unit = _costs(e, opts, by, needs)
        options.need_workspace(workspace, fixed + unit, f"chunked by {by}")
        size = (workspace - fixed) // unit
    target = opts.target - opts.first if opts.first else opts.target  # as rows of this process's weight
    tensors = Tensors(e, w, target, b, opts.local_class_weight)
    loss, *stats = _Chunked.apply(*tensors, opts, by, max(1, min(length, size)), needs)
    return loss, opts.stats(*stats)


def _chunk(length: int, by: str, chunks: int | None) -> int:
    """Tokens, or columns, of a chunk."""
    return DEFAULT_COLUMNS if by == "vocabulary" and chunks is None else -(-length // (chunks or DEFAULT_CHUNKS))


def bytes_held(
    tokens: int, vocab: int, hidden: int, size: int, by: str, chunks: int | None, capped: bool = False
) -> int:
    """For the planner: bytes of the logits, and by vocabulary of dE's sum, for operands of `size` bytes per element."""
    wide = 4 * (size < 4) + 4 * capped  # the logits in float32, if not in the gradients' memory; the softcap's slope
    if by == "vocabulary":
        return tokens * (min(_chunk(vocab, by, chunks), vocab) * (size + wide) + 2 * 4 * hidden)
    rows = _chunk(tokens, by, chunks)
    return vocab * (wide * rows + size * min(PAIR * rows, tokens))


def _costs(e: Tensor, opts: Options, by: str, needs: Needs) -> tuple[int, int]:
    """Bytes of workspace: those of any chunk size, and those per token (or column) of a chunk."""
    tokens, size, wide = len(opts.target), e.dtype.itemsize, opts.dtype.itemsize
    grouped = opts.settings.shards is not None
    wide_rows = needs[0] * (2 if by == "vocabulary" else grouped)  # dE's sum; by vocabulary, also what is added
    fixed = TOKEN_BYTES * tokens + 3 * SLACK * e.is_cuda + 2 * wide * opts.most * needs[2]
    fixed += (size + wide * wide_rows) * tokens * e.shape[1]  # the wrapper holds a copy of the hidden states
    entry = (0 if size == wide else wide) + (wide if any(needs) and opts.settings.softcap is not None else 0)
    if by == "vocabulary":
        return fixed + ALIGN * (entry + size) * tokens, max(1, (entry + size) * tokens)
    return fixed, (entry + size * (PAIR if any(needs) else 1)) * (opts.most + ALIGN)


class Chunk(NamedTuple):
    """All logits of some tokens, or some columns of those of all tokens."""

    tokens: slice
    columns: slice
    index: Tensor  # (tokens, 1): the target among these columns, clamped to them
    hit: Tensor  # (tokens, 1): 1.0 if it lies among them, else 0.0


class Rows(NamedTuple):
    """Statistics per token, (N, 1) each. lse is kept as two terms: subtracting them in turn keeps more digits."""

    top: Tensor  # the largest logit
    total: Tensor  # Σ_v exp(z_v − top)
    at_target: Tensor
    pull: Tensor  # Σ_v c_v z_v under label smoothing, else 0

    lse = property(lambda self: self.top + self.total.log())

    @classmethod
    def joined(cls, parts: Tensor) -> "Rows":
        """Join the statistics of parts of the vocabulary, (parts, N, 4). at_target is 0 in parts without the target."""
        top, total, at_target, pull = parts.unbind(-1)
        highest = top.amax(0)
        finite = highest.clamp(min=torch.finfo(top.dtype).min)  # as −inf − (−inf) would be nan
        total = (total * torch.exp(top - finite)).sum(0)
        return cls(*(x[:, None] for x in (highest, total, at_target.sum(0), pull.sum(0))))


class Block:
    """Memory for the logits of a chunk, reused. Rows are padded with −inf to a multiple of `ALIGN` elements.

    memory  gradients in the operands' dtype, of one chunk after another, until it is `full`: `held` rows so far, whose
            last ones are the current chunk's (`raw`, which first takes the logits, where no product can write float32)
    work    logits, then p, in `opts.dtype`; the same memory as `raw` if operands have that dtype. z: without padding
    slope   the softcap's derivative; None where it is not needed"""

    full = property(lambda self: self.held == len(self.memory))

    def __init__(self, e: Tensor, opts: Options, by: str, size: int, gradients: bool) -> None:
        rows, columns = (size, opts.vocab) if by == "sequence" else (len(e), size)
        width, self.opts, self.held = -(-columns // ALIGN) * ALIGN, opts, 0
        self.memory = e.new_empty(min(PAIR * rows, max(rows, len(e))) if gradients else rows, width)
        self._work = self.memory if e.dtype == opts.dtype else e.new_empty(rows, width, dtype=opts.dtype)
        sloped = gradients and opts.settings.softcap is not None
        self._slope = e.new_empty(rows, width, dtype=opts.dtype) if sloped else None

    def fill(self, x: Tensors, chunk: Chunk) -> None:
        """z ← e wᵀ + b, softcapped; slope ← 1 − tanh². On CUDA a product of 16-bit operands is kept in float32;
        elsewhere it is rounded first, as in `F.linear`."""
        self.chunk, e, w = chunk, x.input[chunk.tokens], x.linear_weight[chunk.columns]
        b, self.weight = (None if t is None else t[chunk.columns] for t in (x.linear_bias, x.weight))
        rows, columns, softcap = len(e), len(w), self.opts.settings.softcap
        start = 0 if self.full else self.held
        self.held = start + rows
        self.raw = self.memory[start : self.held]
        self.work = self.raw if self._work is self.memory else self._work[:rows]
        self.z, self.slope = self.work[:, :columns], None if self._slope is None else self._slope[:rows, :columns]
        wide = {"out_dtype": self.opts.dtype} if e.is_cuda and self.work is not self.raw else {}
        out = self.z if wide else self.raw[:, :columns]
        for part in _parts(columns):
            if wide or b is None:
                torch.mm(e, w[part].t(), out=out[:, part], **wide)
            else:
                torch.addmm(b[part], e, w[part].t(), out=out[:, part])
        if out.dtype != self.z.dtype:
            self.z.copy_(out)
        if wide and b is not None:
            self.z.add_(b)
        if softcap is not None:
            self.z.div_(softcap).tanh_()
            if self.slope is not None:
                torch.mul(self.z, self.z, out=self.slope).neg_().add_(1.0)
            self.z.mul_(softcap)
        self.work[:, columns:] = -math.inf

    def softmax(self, partial: bool) -> Rows:
        """Turn the logits into p and return their statistics. partial: these are not all columns. The softmax's
        denominator follows from its largest entry, p_top = 1 / total, which saves a pass. If the vocabulary is sharded,
        a collective makes statistics and p those over all of it."""
        z, weight, shards = self.z, self.weight, self.opts.settings.shards
        where = z.argmax(-1, keepdim=True)
        top, at_target = z.gather(1, where), z.gather(1, self.chunk.index)
        if not self.opts.settings.label_smoothing:
            pull = z.new_zeros(len(z), 1)
        else:
            pull = z.sum(-1, keepdim=True) if weight is None else (z @ weight)[:, None]
        if partial:  # a row's logits may all be −inf here: with one of them finite, p is one-hot, not nan
            z.scatter_(1, where, top.clamp(min=torch.finfo(z.dtype).min))
            at_target = torch.where(self.chunk.hit > 0, at_target, 0.0)
        torch.softmax(self.work, -1, out=self.work)
        rows = Rows(top, z.gather(1, where).reciprocal(), at_target, pull)
        if shards is None:
            return rows
        every = Rows.joined(shards.gather(torch.cat(rows, 1)).view(shards.size, -1, 4))
        self.work.mul_(rows.total * torch.exp(rows.top - every.top) / every.total)
        return every

    def gradient(self, factors: list[Tensor], rows: Rows) -> Tensor:
        """Compute dL/d(raw logits) from p, which `work` holds, into `raw`; return it without padding. factors: of all
        tokens, r, A without its z-loss part, B and E, (N, 1) each."""
        smooth, z_loss = self.opts.settings.label_smoothing, self.opts.settings.z_loss
        tokens, _, index, hit = self.chunk
        r, a, b, even = (factor[tokens] for factor in factors)
        x, columns = self.work.scatter_add_(1, index, -hit), self.z.shape[1]  # p − one-hot: no cancellation as p_y → 1
        if not (smooth or z_loss or self.slope is not None):  # then A is B
            return scale_rows(x, a, self.raw)[:, :columns]  # scale and rounding in one pass
        a = a + 2.0 * z_loss * rows.lse * r if z_loss else a
        x.mul_(a).scatter_add_(1, index, (a - b) * hit)
        if smooth and self.weight is None:
            self.z.sub_(even)
        elif smooth:
            self.z.addr_(even[:, 0], self.weight, alpha=-1)
        if self.slope is not None:
            self.z.mul_(self.slope)
        return (x if x is self.raw else self.raw.copy_(x))[:, :columns]


def _parts(columns: int) -> list[slice]:
    """Split the columns at the last multiple of `ALIGN`, up to which cuBLAS is fast; no part is empty."""
    whole = columns // ALIGN * ALIGN
    return [part for part in (slice(0, whole), slice(whole, columns)) if part.start < part.stop]


def _local(target: Tensor, columns: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the target's index within these columns, clamped to them; 1.0 if it lies among them, else 0.0."""
    index, last = (target - columns.start)[:, None], columns.stop - columns.start - 1
    return index.clamp(0, last), ((index >= 0) & (index <= last)).to(dtype)


def _chunks(target: Tensor, opts: Options, by: str, size: int) -> Iterator[Chunk]:
    """Chunks of `size` tokens or columns; at least one, so that an empty batch gets zero gradients."""
    length = len(target) if by == "sequence" else opts.vocab
    parts = [slice(start, min(start + size, length)) for start in range(0, max(1, length), size)]
    if by == "sequence":
        columns = slice(0, opts.vocab)
        index, hit = _local(target, columns, opts.dtype)
        for tokens in parts:
            yield Chunk(tokens, columns, index[tokens], hit[tokens])
    else:
        for columns in parts:
            yield Chunk(slice(0, len(target)), columns, *_local(target, columns, opts.dtype))


class Gradients:
    """dE, dW and dBias, None where not needed, to which one chunk after another adds its part."""

    def __init__(self, x: Tensors, opts: Options, needs: Needs, partial: bool) -> None:
        """partial: as in `Block.softmax`; then dE, too, is a sum"""
        (e, w, _, b, *_), (de, dw, db) = x, needs
        self.x, self.opts, self.partial, self.collectives = x, opts, partial, []
        self.de = None if not de else e.new_zeros(e.shape, dtype=opts.dtype) if partial else e.new_empty(e.shape)
        self.dw = w.new_empty(w.shape) if dw else None
        self.db = b.new_zeros(b.shape, dtype=opts.dtype) if db else None

    def add(self, block: Block, dz: Tensor) -> None:
        """Add a chunk's part. dz: dL/d(raw logits). dW waits until the block is full, and then gets that of all chunks
        in it, by one product."""
        (tokens, columns, *_), e = block.chunk, self.x.input
        if self.de is not None:
            self._add_to_de(self.de[tokens], dz, self.x.linear_weight[columns])
        if self.db is not None:
            self.db[columns].add_(dz.sum(0, dtype=self.opts.dtype))
        if self.dw is not None and (block.full or tokens.stop == len(e)):
            held = slice(tokens.stop - block.held, tokens.stop)
            for part in _parts(dz.shape[1]):  # beta=0 ignores the uninitialised dw
                dz_held, beta = block.memory[: block.held, part], 0 if held.start == 0 else 1
                self.dw[columns][part].addmm_(dz_held.t(), e[held], beta=beta)

    def _add_to_de(self, de: Tensor, dz: Tensor, w: Tensor) -> None:
        main, *rest = _parts(len(w))
        if self.partial:  # rounding the product to 16 bits would lose what the float32 sum keeps
            narrow, shards = w.is_cuda and w.dtype != de.dtype, self.opts.settings.shards
            de.add_(torch.mm(dz, w, out_dtype=de.dtype) if narrow else dz.to(de.dtype) @ w.to(de.dtype))
            if shards is not None:
                self.collectives.append(dist.all_reduce(de, group=shards.group, async_op=True))
        elif rest:
            torch.addmm(dz[:, rest[0]] @ w[rest[0]], dz[:, main], w[main], out=de)
        else:
            torch.mm(dz, w, out=de)

    def finished(self) -> list[Tensor | None]:
        for work in self.collectives:
            work.wait()
        de = None if self.de is None else self.opts.own_tokens(self.de).to(self.x.input.dtype)
        return [de, self.dw, None if self.db is None else self.db.to(self.x.linear_bias.dtype)]


def _in_chunks(
    x: Tensors, opts: Options, by: str, size: int, needs: Needs, upstream: Tensor | float, rows: Rows | None = None
) -> tuple[Rows, list[Tensor | None]]:
    """Statistics, or `rows` if given, and gradients for `upstream`, from chunks of `size` tokens or columns. x: with
    targets as rows of this process's weight, and class weights for these rows"""
    x, partial = x._replace(input=opts.tokens(x.input)), by == "vocabulary" or opts.settings.shards is not None
    block, gradients = Block(x.input, opts, by, size, any(needs)), Gradients(x, opts, needs, partial)
    factors = [f[:, None] for f in opts.factors(upstream)] if any(needs) else []
    found: list[Rows] = []
    for chunk in _chunks(x.target, opts, by, size):
        block.fill(x, chunk)
        if rows is None:
            here = block.softmax(partial)
            found.append(here)
            if by == "vocabulary" and len(found) == 2:
                found = [Rows.joined(torch.stack([torch.cat(part, 1) for part in found]))]
        else:
            here = rows
            block.work.sub_(rows.top).sub_(rows.total.log()).exp_()
        if any(needs):
            gradients.add(block, block.gradient(factors, here))
    made = gradients.finished()
    return Rows(*map(torch.cat, zip(*found, strict=True))) if rows is None else rows, made


class _Chunked(torch.autograd.Function):
    """Takes tensors, options, and what `_in_chunks` takes next; returns (loss, lse, logprob, correct). By sequence,
    except under "none", the forward computes the gradients."""

    @staticmethod
    def forward(ctx, *call):
        x, (opts, by, size, needs) = Tensors(*call[:6]), call[6:]
        ctx.early = by == "sequence" and opts.settings.reduction != "none" and any(needs)
        ctx.rest = opts, by, size, needs
        if not ctx.early:  # these may share the caller's memory; autograd reports it if that has changed
            ctx.save_for_backward(*x)
        rows, ctx.gradients = _in_chunks(x, opts, by, size, needs if ctx.early else (False,) * 3, 1.0)
        ctx.rows = rows if by == "vocabulary" else None
        top, total, at_target, pull = (x[:, 0] for x in rows)
        lse, logprob, correct = top + total.log(), (at_target - top) - total.log(), at_target >= top
        ctx.mark_non_differentiable(lse, logprob, correct)
        ctx.set_materialize_grads(False)
        return opts.reduce(opts.losses(lse, logprob, pull)), lse, logprob, correct

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):
        opts = ctx.rest[0]
        options.require_plain_backward("chunked", upstream, opts.settings.shards is not None)
        if upstream is None:
            return (None,) * 10
        if not ctx.early:
            with torch.autocast(upstream.device.type, enabled=False):  # as in the forward
                _, gradients = _in_chunks(Tensors(*ctx.saved_tensors), *ctx.rest, upstream, ctx.rows)
        elif ctx.gradients is None:
            raise options.spent("chunked", 'by="vocabulary" or reduction="none"')
        else:
            upstream = upstream.where(opts.valid.any(), 0.0)  # if all are ignored, even an infinite one gives 0
            gradients, ctx.gradients = [None if g is None else scale_(g, upstream) for g in ctx.gradients], None
        de, dw, db = gradients
        return de, dw, None, db, *(None,) * 6
