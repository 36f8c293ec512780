"""Head `chunked`: the loss and its gradients from blocks of logits, by the sequence or by the vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.errors import T1Error, choose, require
from t1lib.heads import checks, sweeps
from t1lib.heads.contract import HeadStats, Options, as_head, need_workspace, refuse_create_graph
from t1lib.heads.logits import Rows, entry_bytes, token_losses
from t1lib.heads.scale import scale_

DEFAULT_CHUNKS = 8  # by sequence
DEFAULT_COLUMNS = 8192  # by vocabulary, columns a chunk
TOKEN_BYTES = 128  # of the vectors over tokens: targets, masks, statistics, coefficients
SLACK = 2**20  # by which CUDA's caching allocator may hand out a larger block than asked for; three buffers at most


class Plan(NamedTuple):
    """`size`: tokens or columns a chunk. `needs`: which of input, linear_weight, linear_bias want a gradient."""

    size: int
    needs: tuple[bool, bool, bool]


@as_head("chunked")
def chunked(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, *, by: str = "sequence", chunks: int | None = None
) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs that never holds more than a chunk of the logits.

    by="sequence" (default; what T1M3's text describes): chunks of tokens, `chunks` of them (default 8). Under "mean"
    and "sum" the forward makes the gradients too, three matrix products in all, and the backward scales them in
    place: a second backward is refused. Under "none" the backward makes the logits again: four products.
    The weight gradient adds up in the weight's own dtype, two chunks a product, so no float32 V × D buffer exists; in
    16 bits that is one rounding a product: at 8 chunks its rounding error is up to 1.6 times that of a single one.

    by="vocabulary" (what T1M3's code does): chunks of columns of the logits, `chunks` of them (default: of 8192
    columns). The forward keeps an online log-sum-exp; the backward makes the logits again from it: four products.
    The input's gradient adds up in float32, N × D; each slice of the weight's gradient is written once.

    workspace picks the chunk size in place of `chunks`: the largest whose buffers fit (on a GPU; outside the count
    are cuBLAS's own buffers and, on the CPU, casts that PyTorch buffers).

    Frozen operands cost no product. Nothing waits for the device. The equation: `full`; the gradient: `logits`.
    float16 under a loss scaler: by="sequence" makes gradients before the scale is known, so those below 6e-8 are
    lost; take by="vocabulary" there. Raises `T1Error` for a bad option, chunks and workspace both, a workspace
    too small (saying the least that works), a second backward by sequence, and create_graph=True.
    """
    choose("by", by, FUNCTIONS)
    tensors = (e, w, b)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    plan = Plan(_chunk_size(e, opts, by, chunks, needs), needs)
    loss, lse, logprob, correct = FUNCTIONS[by].apply(e, w, b, opts, plan)
    return loss, opts.stats(lse, logprob, correct) if opts.return_stats else None


def _chunk_size(e: Tensor, opts: Options, by: str, chunks: int | None, needs: tuple[bool, bool, bool]) -> int:
    """Tokens or columns a chunk, from `chunks`, the workspace, or the default."""
    require(chunks is None or opts.workspace is None, "give chunks or workspace, not both: each sets the chunk size")
    length = len(opts.target) if by == "sequence" else opts.vocab
    if opts.workspace is not None:
        fixed, unit = _costs(e, opts, by, needs)
        need_workspace(opts.workspace, fixed + unit, f"chunked by {by}")
        return max(1, min(length, (opts.workspace - fixed) // unit))
    if chunks is not None:
        checks.count("chunks", chunks)
    elif by == "vocabulary":
        return min(length, DEFAULT_COLUMNS)
    return max(1, -(-length // (chunks or DEFAULT_CHUNKS)))


def _costs(e: Tensor, opts: Options, by: str, needs: tuple[bool, bool, bool]) -> tuple[int, int]:
    """(fixed bytes, bytes a token or column of a chunk)."""
    tokens, hidden = len(opts.target), e.shape[1]
    wide = opts.dtype.itemsize if e.dtype != opts.dtype else 0
    summed = max(wide, opts.dtype.itemsize if opts.shards is not None and opts.shards.sequence else 0)
    fixed = TOKEN_BYTES * tokens + (3 * SLACK if e.is_cuda else 0)
    if by == "sequence":
        unit = entry_bytes(e.dtype, opts, any(needs), blocks=sweeps.PAIR) * opts.widest
        fixed += 2 * opts.dtype.itemsize * opts.widest if needs[2] else 0
        fixed += summed * tokens * hidden if needs[0] and opts.shards is not None else 0
        return fixed + (e.dtype.itemsize * tokens * hidden if needs[1] else 0), unit
    entry = entry_bytes(e.dtype, opts, any(needs))
    return fixed + ((wide + summed) * tokens * hidden if needs[0] else 0), max(1, entry * tokens)


def _outputs(ctx, rows: Rows, opts: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What both functions return: the loss, and lse, logprob and correct, which have no gradient."""
    lse, logprob, pull = (x[:, 0] for x in (rows.lse, rows.logprob, rows.pull))
    loss = opts.reduce(opts.mask(token_losses(lse, logprob, pull, opts)))
    stats = (lse, logprob, (rows.at_target >= rows.top)[:, 0])
    ctx.mark_non_differentiable(*stats)
    ctx.set_materialize_grads(False)
    return loss, *stats


def _early_gradient(opts: Options, b: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """(gradient (N) to make in the forward, factor left for the backward); their product is that of upstream 1.

    The plain case takes only a power of two in the forward, which `by_sequence` can multiply into the small operands
    without rounding: 1 / denominator = 2^−k / mantissa. The rest joins upstream's factor, a pass that is due anyway.
    """
    if not (opts.plain and opts.uniform and b is None):
        return opts.token_gradient(1.0), 1.0
    valid = opts.valid.to(opts.dtype)
    if opts.reduction == "sum":
        return valid, 1.0
    total = opts.denominator.clamp(min=1.0)  # with every token ignored the gradient is 0, whatever divides it
    mantissa, _ = torch.frexp(total)
    return valid * (mantissa / total), mantissa.reciprocal()


class _BySequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e: Tensor, w: Tensor, b: Tensor | None, opts: Options, plan: Plan):
        ctx.early, ctx.dealt = opts.reduction != "none" and any(plan.needs), opts.shards is not None
        if ctx.early:
            gradient, ctx.rest = _early_gradient(opts, b)
            rows, ctx.gradients = sweeps.by_sequence(e, w, b, opts, plan.size, plan.needs, gradient)
        else:
            rows, _ = sweeps.by_sequence(e, w, b, opts, plan.size, (False,) * 3, None)
            ctx.save_for_backward(e, w, b)
            ctx.opts, ctx.plan = opts, plan
        return _outputs(ctx, rows, opts)

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):
        refuse_create_graph("chunked", ctx.dealt)
        if upstream is None:
            return (None,) * 5
        if not ctx.early:
            opts, plan = ctx.opts, ctx.plan
            gradient = opts.token_gradient(upstream)
            _, gradients = sweeps.by_sequence(*ctx.saved_tensors, opts, plan.size, plan.needs, gradient)
            return *gradients, None, None
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise T1Error(
                'second backward through head "chunked" by sequence: its gradients were made in the forward and '
                'given away by the first; call it again, or use by="vocabulary" or reduction="none"'
            )
        factor = upstream * ctx.rest
        return *(None if g is None else scale_(g, factor) for g in gradients), None, None


class _ByVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e: Tensor, w: Tensor, b: Tensor | None, opts: Options, plan: Plan):
        rows = sweeps.columns_forward(e, w, b, opts, plan.size)
        ctx.save_for_backward(e, w, b)
        ctx.opts, ctx.plan, ctx.rows = opts, plan, rows
        return _outputs(ctx, rows, opts)

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):
        refuse_create_graph("chunked", ctx.opts.shards is not None)
        if upstream is None:
            return (None,) * 5
        opts, plan = ctx.opts, ctx.plan
        gradient = opts.token_gradient(upstream)
        gradients = sweeps.columns_backward(*ctx.saved_tensors, opts, plan.size, plan.needs, gradient, ctx.rows)
        return *gradients, None, None


FUNCTIONS = {"sequence": _BySequence, "vocabulary": _ByVocabulary}
