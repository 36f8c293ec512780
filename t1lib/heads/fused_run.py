"""Head `fused` on a device: the loops over chunks of tokens. A training step (`early`): order the tokens → logits of
the targets → for each chunk: pack → exponentials and their sums → statistics → scale → dE and dW in one launch → dE to
its tokens → after all chunks: the targets' own terms."""

import torch
import torch.distributed as dist
from torch import Tensor
from triton import next_power_of_2

from t1lib.heads.fused_launch import Pass, sum_rows
from t1lib.heads.fused_plan import Operands, ceil, up
from t1lib.heads.kernels import logits, rows
from t1lib.heads.kernels.logits import LEAD, NEVER
from t1lib.heads.kernels.tiles import LN2, LOG_TOTAL, OFFSET
from t1lib.heads.options import Shards


def targets(c: Pass) -> None:
    """For all tokens: at ← the target's logit, offset ← a first guess at that of the token's exponentials."""
    m = 64 if c.o.e.is_cuda else c.tiles.m
    c.launch(logits.target_logits, ceil(len(c.order), m), M=m, num_warps=4, num_stages=3)
    if c.opts.settings.shards is not None:
        at, offset = c.fields["at"], c.fields["offset"]
        dist.all_reduce(at, group=c.opts.settings.shards.group)
        empty = torch.arange(len(at), device=at.device) >= c.number
        torch.floor(at, out=offset).add_(LEAD.value).masked_fill_(empty, NEVER.value)


def statistics(c: Pass, z: Tensor | None) -> None:
    """Compute a chunk's tokens' statistics, and write its exponentials to z if that is given."""
    for redo in (False, True):  # in the second launch, programs without an overflow end at once
        c.logits(z, redo=redo)
    c.launch(rows.finish_rows, c.size, splits=c.splits, SPLITS=next_power_of_2(c.splits))
    if c.opts.settings.shards is not None:
        _combine(c, c.opts.settings.shards)


def _combine(c: Pass, shards: Shards) -> None:
    """Turn statistics over this shard's columns into those over the whole vocabulary, in one collective. All is taken
    relative to the largest offset: nearly always the shards' are equal, and no digit of these large numbers is lost."""
    here = {name: field[c.start : c.start + c.size] for name, field in c.fields.items()}
    mine = torch.stack([here[name] for name in ("offset", "log_total", "correct", "pull")])
    offset, log_total, correct, pull = shards.gather(mine).view(-1, *mine.shape).unbind(1)
    common = offset.amax(0)
    # the sum of a shard far below the others is 0, and its logarithm −inf: it counts for nothing
    whole = ((log_total + (offset - common)) * LN2.value).logsumexp(0) / LN2.value
    here["log_total"].copy_(whole + (common - here["offset"]))
    here["logprob"].copy_(((here["at"] - common) - whole) * LN2.value)
    here["correct"].copy_(correct.amin(0))
    here["pull"].copy_(pull.sum(0))


def _sum_of_all(x: Tensor, factor: Tensor | None) -> Tensor:
    """(columns) float32: Σ factor_i x[i]. A narrow x is summed in parts, so that many programs share the work."""
    out = torch.zeros(max(1, min(64, 128 * 1024 // x.shape[1])), x.shape[1], dtype=torch.float32, device=x.device)
    sum_rows(out, x, torch.full((), len(x), dtype=torch.int32, device=x.device), 0, len(x), factor)
    return out.sum(0)


def early(o: Operands) -> Pass:
    """Statistics, and gradients for an upstream gradient of 1, one chunk of tokens after another: three products."""
    c, opts, even_sum = Pass(o, "early"), o.opts, None
    targets(c)
    if opts.settings.label_smoothing:  # for dE: Σ_v c_v w_v; for dW: Σ_n E_n e_n
        even = opts.factors(1.0)[3]
        c.even_vector, even_sum = _sum_of_all(o.w, opts.local_class_weight), _sum_of_all(o.e, even)
    z = c.z[:, : opts.vocab]
    for _ in c.each():
        statistics(c, z)
        if c.start == 0:  # only now, while the device is busy
            c.find_frequent(even_sum)
        c.launch(rows.scale_rows, up(c.size, c.tiles.m))
        c.products(z, 0, even_sum if c.start == 0 else None)
        c.add_bias(z, 0, c.fields["scale"][c.start :])
    c.add_targets()
    if c.db is not None and even_sum is not None:  # smoothing's even share is the same for all tokens up to a factor
        c.db -= even.sum() * (1.0 if opts.class_weight is None else opts.local_class_weight)
    return c


def loss_only(o: Operands) -> Pass:
    c = Pass(o, "loss")
    targets(c)
    for _ in c.each():
        statistics(c, None)
    return c


def late(o: Operands, lse: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients from recomputed logits, one range of columns at a time: three products. lse (2, N): offset and
    log_total of the tokens, in order, as `loss_only` left them."""
    c = Pass(o, "late", upstream)
    vocab, z_loss = o.opts.vocab, o.opts.settings.z_loss
    c.row[OFFSET.value : LOG_TOTAL.value + 1].copy_(lse)
    if z_loss:
        c.fields["softmax"] += 2.0 * z_loss * LN2.value * (lse[0] + lse[1]) * c.fields["token"]
    for _ in c.each():
        launches = ()
        for first in range(0, vocab, c.plan.columns):
            z = c.z[:, : min(c.plan.columns, vocab - first)]
            if first > c.plan.columns and z.shape[1] == c.plan.columns:
                for again in launches:
                    again(first)
            else:  # launches that differ: the first writes dE, the second adds to it, the last may be narrower
                launches = c.logits(z, first, gradient=True), c.products(z, first)
            c.add_bias(z, first)
    return c.gradients()
