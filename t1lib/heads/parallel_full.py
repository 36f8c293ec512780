"""Head `full` on a shard of the vocabulary: the specification of `parallel`, in plain autograd and collectives."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from t1lib.heads.contract import HeadStats, Options, as_head, need_workspace, refuse_create_graph
from t1lib.heads.full import entry_bytes
from t1lib.heads.logits import local_targets, pull_of, token_losses, wide_product
from t1lib.heads.shards import Shards


@as_head("full")
def full(e: Tensor, w: Tensor, b: Tensor | None, opts: Options) -> tuple[Tensor, HeadStats | None]:
    """The equation of `t1lib.heads.full`, holding all N × (this process's weight rows) logits at once.

    One collective gives every process the largest logit of each token; then Σ_v exp(z_v − top), z_y and Σ_v c_v z_v are
    sums over the shards, taken by a second one. All processes compute the same from there. dE takes a third collective.
    There is no second derivative.
    """
    shards, least = opts.shards, len(opts.target) * opts.widest * (entry_bytes(opts) + opts.dtype.itemsize)
    need_workspace(opts.workspace, least, "full")
    z = _Linear.apply(e, w, b, opts).to(opts.dtype)
    if opts.softcap is not None:
        z = opts.softcap * torch.tanh(z / opts.softcap)
    index, hit = local_targets(opts.local_target, slice(0, opts.vocab))
    top = z.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=shards.group)
    at_target = torch.where(hit, z.gather(1, index), 0.0)[:, 0]
    pull = pull_of(z, opts.local_class_weight, opts)[:, 0]
    exponentials = torch.exp(z - top[:, None])
    total, at_target, pull = _Sum.apply(torch.stack([exponentials.sum(-1), at_target, pull]), shards)
    if opts.filter_eps is not None and z.requires_grad:
        delta = (exponentials.detach() / total.detach()[:, None]).scatter_add_(1, index, -hit.to(opts.dtype))
        z.register_hook(lambda gradient: gradient.masked_fill(delta.abs() < opts.filter_eps, 0.0))
    lse, logprob = top + total.log(), (at_target - top) - total.log()
    losses = opts.mask(token_losses(lse, logprob, pull, opts))
    losses = _Own.apply(losses, shards) if opts.reduction == "none" else opts.reduce(losses)
    return losses, opts.stats(lse, logprob, at_target >= top) if opts.return_stats else None


class _Linear(torch.autograd.Function):
    """`F.linear` of all tokens; dE is summed over the shards while the weight's gradient is computed."""

    @staticmethod
    def forward(ctx, e: Tensor, w: Tensor, b: Tensor | None, opts: Options) -> Tensor:
        ctx.save_for_backward(e, w)
        ctx.opts = opts
        return F.linear(opts.tokens(e), w, b)

    @staticmethod
    def backward(ctx, dz: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("full", dealt=True)  # every gradient passes through here
        (e, w), opts, needs = ctx.saved_tensors, ctx.opts, ctx.needs_input_grad
        de = opts.shards.sum_of(wide_product(dz, w, opts.dtype)) if needs[0] else None
        if de is not None:
            de.start(slice(None))
        dw = dz.t() @ opts.tokens(e) if needs[1] else None
        db = dz.sum(0) if needs[2] else None
        return None if de is None else de.result(e.dtype), dw, db, None


class _Sum(torch.autograd.Function):
    """The sum over the shards. All compute the same loss from it, so the gradient of a part is that of the sum."""

    @staticmethod
    def forward(ctx, parts: Tensor, shards: Shards) -> Tensor:
        total = parts.clone()
        dist.all_reduce(total, group=shards.group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Own(torch.autograd.Function):
    """The losses of this process's tokens; the backward gathers the gradients of all tokens from their processes."""

    @staticmethod
    def forward(ctx, losses: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.own(losses).clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.tokens(gradient), None
