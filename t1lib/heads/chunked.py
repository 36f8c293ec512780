"""Head `chunked`: the loss and its gradients from blocks of logits, split by sequence or by vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.errors import T1Error, choose, require
from t1lib.heads import checks, sweeps
from t1lib.heads.contract import HeadStats, Options, as_head, need_workspace, refuse_create_graph
from t1lib.heads.logits import Rows, entry_bytes, token_losses
from t1lib.heads.scale import scale_

DEFAULT_CHUNKS = 8  # by sequence
DEFAULT_COLUMNS = 8192  # by vocabulary: columns per chunk
TOKEN_BYTES = 128  # per token, in vectors over tokens: targets, masks, statistics, coefficients
SLACK = 2**20  # by how much a block of CUDA's caching allocator may exceed the request; at most three buffers


class Plan(NamedTuple):
    """`size`: tokens or columns per chunk. `needs`: which of input, linear_weight, linear_bias need a gradient."""

    size: int
    needs: tuple[bool, bool, bool]


@as_head("chunked")
def chunked(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, *, by: str = "sequence", chunks: int | None = None
) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs, computed in chunks so that the whole logits never exist at once.

    by="sequence" (default; what T1M3's text describes): the tokens are split into `chunks` chunks (default 8). Under
    "mean" and "sum" the forward also computes the gradients, with three matrix products in all; the backward only
    scales them in place, so a second backward is refused. Under "none" the backward recomputes the logits: four
    products. The weight gradient accumulates in the weight's own dtype, two chunks per product, so there is no float32
    V × D buffer. In 16 bits it is rounded once per product; at 8 chunks its rounding error is up to 1.6 times that of
    a single product.

    by="vocabulary" (what T1M3's code does): the columns of the logits are split into `chunks` chunks (default: of 8192
    columns each). The forward keeps an online log-sum-exp; the backward recomputes the logits and takes their softmax
    with it: four products. The input's gradient accumulates in an N × D float32 buffer; each slice of the weight's
    gradient is written once.

    With `workspace` in place of `chunks`, the chunk size is the largest whose buffers fit. This budget is for a GPU; it
    excludes cuBLAS's own buffers and, on the CPU, the copies that PyTorch makes for casts.

    Frozen operands cost no product, and nothing waits for the device. The equation of the loss is in `full`, that of
    the gradient in `logits`. In float16 with a loss scaler use by="vocabulary": by="sequence" computes the gradients
    before the scale is known, so those below 6e-8 are lost. Raises `T1Error` for a bad option, for chunks and workspace
    together, for a workspace too small (saying the least that works), for a second backward where the forward computed
    the gradients, and for create_graph=True.
    """
    choose("by", by, FUNCTIONS)
    tensors = (e, w, b)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    plan = Plan(_chunk_size(e, opts, by, chunks, needs), needs)
    loss, lse, logprob, correct = FUNCTIONS[by].apply(e, w, b, opts, plan)
    return loss, opts.stats(lse, logprob, correct) if opts.return_stats else None


def _chunk_size(e: Tensor, opts: Options, by: str, chunks: int | None, needs: tuple[bool, bool, bool]) -> int:
    """Tokens or columns per chunk, from `chunks`, the workspace, or the default."""
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
    """(fixed bytes, bytes per token or column of a chunk)."""
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


def _save(ctx, e: Tensor, w: Tensor, b: Tensor | None, opts: Options) -> None:
    """For a backward that computes; the options' tensors come after the operands only so that a change is noticed."""
    ctx.save_for_backward(e, w, b, opts.target, opts.class_weight, opts.token_weight)


def _outputs(ctx, rows: Rows, opts: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What both autograd functions return: the loss, and lse, logprob and correct, which are not differentiable."""
    lse, logprob, pull = (x[:, 0] for x in (rows.lse, rows.logprob, rows.pull))
    loss = opts.reduce(opts.mask(token_losses(lse, logprob, pull, opts)))
    stats = (lse, logprob, (rows.at_target >= rows.top)[:, 0])
    ctx.mark_non_differentiable(*stats)
    ctx.set_materialize_grads(False)
    return loss, *stats


def _early_gradient(opts: Options, b: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """(per-token gradient (N) for the forward, factor left for the backward); their product is for upstream 1.

    In the plain case the forward applies only a power of two, which `by_sequence` can multiply into the small operands
    without rounding: 1 / denominator = 2^−k / mantissa. The backward applies the rest together with the upstream
    gradient, in a pass that it makes anyway.
    """
    if not (opts.plain and opts.uniform and b is None):
        return opts.token_gradient(1.0), 1.0
    valid = opts.valid.to(opts.dtype)
    if opts.reduction == "sum":
        return valid, 1.0
    total = opts.denominator.clamp(min=1.0)  # if all tokens are ignored, the gradient is 0 for any divisor
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
            _save(ctx, e, w, b, opts)
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
            _, gradients = sweeps.by_sequence(*ctx.saved_tensors[:3], opts, plan.size, plan.needs, gradient)
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
        _save(ctx, e, w, b, opts)
        ctx.opts, ctx.plan, ctx.rows = opts, plan, rows
        return _outputs(ctx, rows, opts)

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):
        refuse_create_graph("chunked", ctx.opts.shards is not None)
        if upstream is None:
            return (None,) * 5
        opts, plan = ctx.opts, ctx.plan
        gradient = opts.token_gradient(upstream)
        gradients = sweeps.columns_backward(*ctx.saved_tensors[:3], opts, plan.size, plan.needs, gradient, ctx.rows)
        return *gradients, None, None


FUNCTIONS = {"sequence": _BySequence, "vocabulary": _ByVocabulary}
