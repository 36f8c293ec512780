"""Head `fused` on a device: the loops over chunks of tokens. A training step (`early`): order the tokens → logits of
the targets → for each chunk: pack → exponentials and their sums → statistics → scale → dE and dW in one launch → dE to
its tokens, frequent targets' rows of dW → after all chunks: the targets' own terms.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from t1lib.heads import fused_launch as launch
from t1lib.heads.fused_launch import Chunk, Operands, Tokens
from t1lib.heads.kernels.logits import LEAD, NEVER
from t1lib.heads.kernels.tiles import LN2, TOKEN

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def targets(c: Chunk) -> None:
    """Every token's target logit, and the offset that follows from it."""
    c.target_logits()
    if c.opts.settings.shards is not None:
        at, offset = c.tokens.fields["at"], c.tokens.fields["offset"]
        dist.all_reduce(at, group=c.opts.settings.shards.group)
        empty = torch.arange(len(at), device=at.device) >= c.tokens.number
        torch.floor(at, out=offset).add_(LEAD.value).masked_fill_(empty, NEVER.value)


def statistics(c: Chunk, z: Tensor | None) -> None:
    """Compute a chunk's tokens' statistics, and write its exponentials to z if that is given."""
    for redo in (False, True):  # in the second launch, programs without an overflow end at once
        c.logits(z, redo=redo)
    c.finish_rows()
    if c.opts.settings.shards is not None:
        combine(c)


def combine(c: Chunk) -> None:
    """Replace a chunk's statistics over this shard's columns by those over the whole vocabulary: one collective.

    The offset stays what the exponentials here were made with; with it, log_total gives the whole log-sum-exp. All is
    taken relative to the largest offset: nearly always they are one, and no digit of the large number is lost.
    """
    here = {name: field[c.start : c.start + c.size] for name, field in c.tokens.fields.items()}
    mine = torch.stack([here[name] for name in ("offset", "log_total", "correct", "pull")])
    offset, log_total, correct, pull = c.opts.settings.shards.gather(mine).view(-1, *mine.shape).unbind(1)
    common = offset.amax(0)
    # finite: a shard far below the others sums up to 0, and to −inf
    parts = (log_total + (offset - common)).clamp_(min=-NEVER.value) * LN2.value
    whole = parts.logsumexp(0) / LN2.value
    here["log_total"].copy_(whole + (common - here["offset"]))
    here["logprob"].copy_(((here["at"] - common) - whole) * LN2.value)
    here["correct"].copy_(correct.amin(0))
    here["pull"].copy_(pull.sum(0))


class InputGradient:
    """dE (N, D), into which chunks write their rows; summed over the shards in float32 while the next chunk computes.

    With sequence parallelism `out` holds only this process's tokens. The rows of a chunk may belong to any process's
    tokens, so they are all-reduced there as well, which needs no (N, D) float32 buffer until the end.
    """

    def __init__(self, c: Chunk) -> None:
        self.c, self.shards, self._pending = c, c.opts.settings.shards, None
        tokens = c.opts.shape.numel()
        spare = self.shards is not None  # a last row for those that are not of this process's tokens
        self._rows = c.o.e.new_zeros(tokens + spare, c.hidden)
        self.out = self._rows[:tokens]

    def add(self) -> None:
        """Write the rows of the chunk at hand: the sums of products in its memory, completed by `finish_input`."""
        c, shards = self.c, self.shards
        if shards is None:
            c.finish_input(self.out)
            return
        self.finish()
        rows = c.memory["rows"][: c.size]
        c.finish_input(rows)
        place = c.tokens.order[c.start : c.start + c.size] - shards.rank * len(self.out) * shards.sequence
        place = torch.where((place >= 0) & (place < len(self.out)), place, len(self.out))
        self._pending = shards.start_sum(rows), rows, place

    def finish(self) -> Tensor:
        """Complete the chunk that is still being summed; returns dE."""
        if self._pending is not None:
            (work, rows, place), self._pending = self._pending, None
            work.wait()
            self._rows.index_copy_(0, place, rows.to(self._rows.dtype))
        return self.out


def _sum_of_all(x: Tensor, factor: Tensor | None) -> Tensor:
    """(columns) float32: Σ factor_i x[i]. A narrow x is summed in parts, so that many programs share the work."""
    out = torch.zeros(max(1, min(64, 128 * 1024 // x.shape[1])), x.shape[1], device=x.device)
    launch.sum_rows(out, x, torch.full((), len(x), dtype=torch.int32, device=x.device), 0, len(x), factor)
    return out.sum(0)


def early(o: Operands) -> tuple[Tokens, Gradients]:
    """Statistics, and gradients for an upstream gradient of 1, one chunk of tokens after another: three products."""
    c = Chunk(o, "early")
    tokens, opts, smooth, segment_end, even_sum = c.tokens, o.opts, o.opts.settings.label_smoothing, None, None
    factors = torch.stack(opts.factors(1.0))
    tokens.row[TOKEN.value : TOKEN.value + 4] = factors[:, tokens.order]
    targets(c)
    if smooth:  # for dE: Σ_v c_v w_v; for dW: Σ_n E_n e_n
        c.known["even_vector"], even_sum = _sum_of_all(o.w, opts.local_class_weight), _sum_of_all(o.e, factors[3])
    de, z = InputGradient(c) if o.needs[0] else None, c.memory["z"]
    for _ in c.each():
        statistics(c, z)
        if segment_end is None and (o.needs[1] or o.needs[2]):  # now that the device is busy
            segment_end = torch.searchsorted(tokens.key, tokens.key, right=True, out_int32=True)
            if o.needs[1]:
                sums = c.memory["frequent_sums"]
                c.known |= launch.frequent_targets(tokens, segment_end, opts, sums, even_sum)
        c.scale_rows()
        c.products(z, 0, even_sum if c.start == 0 else None)
        c.add_bias(z, 0, tokens.fields["scale"][c.start :])
        if de is not None:
            de.add()
        if o.needs[1]:
            c.add_frequent()
    if segment_end is not None:
        c.add_targets(segment_end)
    if c.db is not None and smooth:  # label smoothing's even share is the same for all tokens up to a factor
        c.db -= factors[3].sum() * (1.0 if opts.class_weight is None else opts.local_class_weight)
    return tokens, (None if de is None else de.finish(), c.dw, c.db)


def loss_only(o: Operands) -> Tokens:
    """Statistics of all tokens: one product."""
    c = Chunk(o, "loss")
    targets(c)
    for _ in c.each():
        statistics(c, None)
    return c.tokens


def late(o: Operands, lse: Tensor, upstream: Tensor) -> Gradients:
    """Gradients from recomputed logits, one range of columns at a time: three products.

    lse (2, N): offset and log_total of the tokens, in order, as `loss_only` left them.
    """
    c = Chunk(o, "late")
    tokens, vocab, z_loss = c.tokens, o.opts.vocab, o.opts.settings.z_loss
    tokens.fields["offset"].copy_(lse[0])
    tokens.fields["log_total"].copy_(lse[1])
    factors = torch.stack(o.opts.factors(upstream))[:, tokens.order]
    if z_loss:
        factors[1] += 2.0 * z_loss * LN2.value * (lse[0] + lse[1]) * factors[0]
    tokens.row[TOKEN.value : TOKEN.value + 4] = factors
    de = InputGradient(c) if o.needs[0] else None
    for _ in c.each():
        for first in range(0, vocab, c.plan.columns):
            z = c.memory["z"][:, : min(c.plan.columns, vocab - first)]
            c.logits(z, first, gradient=True)
            c.products(z, first)
            c.add_bias(z, first)
        if de is not None:
            de.add()
    return None if de is None else de.finish(), c.dw, c.db
