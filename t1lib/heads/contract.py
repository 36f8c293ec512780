"""The contract that every head shares: options, validation, and the wrapper that applies both.

A head is written as `compute(e, w, b, opts, *, own options) -> (loss, HeadStats | None)` on flat operands
e (N, D), w (V, D), b (V) or None. `as_head` gives it the public signature and checks every argument once.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from t1lib.errors import T1Error, require
from t1lib.heads import checks

if TYPE_CHECKING:
    from t1lib.heads.shards import Shards


class HeadStats(NamedTuple):
    """Detached statistics per token, each of the target's shape; 0, 0 and False at ignored tokens.

    `lse`: log-sum-exp of the token's logits. `logprob`: log-probability of the target, not weighted.
    `correct`: whether no logit exceeds the target's (ties count as correct; so does, with head `fused`, a logit that is
    higher by 1e-6 of its size, or of 1, because it comes from another product than the target's).
    """

    lse: Tensor
    logprob: Tensor
    correct: Tensor


@dataclass(frozen=True)
class Options:
    """The validated arguments of one call except the operands. Vectors over tokens are flat (N), over classes (V).

    vocab       number of rows of the weight on this process
    shards      which process holds which rows of the weight (`t1lib.heads.parallel`); None: this one holds them all
    """

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    shape: torch.Size
    vocab: int
    dtype: torch.dtype  # of the loss and of all arithmetic on logits: float32, or float64 for float64 operands
    reduction: str
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    workspace: int | None
    filter_eps: float | None
    return_stats: bool
    shards: "Shards | None" = None

    @property
    def classes(self) -> int:
        """V: classes of the whole vocabulary, on all processes together."""
        return self.vocab if self.shards is None else self.shards.vocab

    @property
    def widest(self) -> int:
        """The largest number of weight rows on any process; all processes plan their chunks for it."""
        return self.vocab if self.shards is None else max(self.shards.rows)

    @cached_property
    def local_target(self) -> Tensor:
        """(N): the target as an index into this process's weight rows; outside [0, vocab) if another one holds it."""
        return self.target if self.shards is None else self.target - self.shards.first

    @property
    def local_class_weight(self) -> Tensor | None:
        """(vocab): the class weights of this process's weight rows; None without class weights."""
        if self.shards is None or self.class_weight is None:
            return self.class_weight
        return self.class_weight[self.shards.first : self.shards.first + self.vocab]

    def tokens(self, mine: Tensor) -> Tensor:
        """(N, …): the values of all tokens, from those of the tokens that this process was given."""
        return mine if self.shards is None else self.shards.tokens(mine)

    def own(self, every: Tensor) -> Tensor:
        """Select from the values of all tokens, (N, …), those of the tokens that this process was given."""
        return every if self.shards is None else self.shards.own(every)

    @property
    def plain(self) -> bool:
        """Whether the gradient of the logits is p − one-hot, up to a factor per token."""
        return not (self.label_smoothing or self.z_loss or self.softcap or self.filter_eps)

    @property
    def uniform(self) -> bool:
        """Whether that factor is the same for all valid tokens."""
        return self.reduction != "none" and self.class_weight is None and self.token_weight is None

    @cached_property
    def valid(self) -> Tensor:
        """(N) bool: tokens that are not ignored."""
        return self.target != self.ignore_index

    @cached_property
    def safe_target(self) -> Tensor:
        """(N) int64 in [0, V): the target, with 0 at ignored tokens, so that it is a valid index."""
        return self.target.masked_fill(~self.valid, 0)

    @cached_property
    def target_weight(self) -> Tensor | None:
        """(N): the class weight of each token's target, 0 at ignored tokens; None without class weights."""
        if self.class_weight is None:
            return None
        return _masked(self.class_weight[self.safe_target], self.target, self.ignore_index)

    @cached_property
    def class_sum(self) -> Tensor | float:
        """Sum of the class weights over the vocabulary; V without class weights."""
        return float(self.classes) if self.class_weight is None else self.class_weight.sum()

    @cached_property
    def denominator(self) -> Tensor:
        """Scalar that `mean` divides by: the sum over valid tokens of token weight times the target's class weight."""
        weight = self.valid.to(self.dtype)
        for factor in (self.token_weight, self.target_weight):
            weight = weight if factor is None else weight * factor
        return weight.sum()

    def mask(self, losses: Tensor) -> Tensor:
        """Multiply (N) per-token losses by the token weight and set them to 0 at ignored tokens."""
        weighted = losses if self.token_weight is None else losses * self.token_weight
        return torch.where(self.valid, weighted, 0.0)

    def token_gradient(self, upstream: Tensor | float) -> Tensor:
        """(N): dL / d(the token's loss before its token weight), given dL / d(what `reduce` returns)."""
        if self.reduction == "mean":
            upstream = upstream / self.denominator
        elif self.reduction == "none":
            upstream = self.tokens(upstream)
        # mask last: if every token is ignored, upstream / denominator is infinite, but the gradient must be 0
        return self.mask(upstream * torch.ones_like(self.target, dtype=self.dtype))

    def reduce(self, losses: Tensor) -> Tensor:
        """Reduce masked (N) losses to what the call returns, flat: (N) under `none`, a scalar otherwise."""
        if self.reduction == "none":
            return self.own(losses)
        return losses.sum() if self.reduction == "sum" else losses.sum() / self.denominator

    def stats(self, lse: Tensor, logprob: Tensor, correct: Tensor) -> HeadStats:
        """`HeadStats` from flat (N) values, cleared at ignored tokens."""
        cleared = (torch.where(self.valid, lse, 0.0), torch.where(self.valid, logprob, 0.0), correct & self.valid)
        return HeadStats(*map(self.own, cleared))


Compute = Callable[..., tuple[Tensor, HeadStats | None]]


def as_head(name: str) -> Callable[[Compute], Callable]:
    """Decorator: give `compute`, which takes checked, flat, cast operands, the signature of `linear_cross_entropy`."""

    def decorate(compute: Compute) -> Callable:
        own = list(defaults(compute))

        @functools.wraps(compute)
        def head(input: Tensor, linear_weight: Tensor, target: Tensor, **kwargs):
            options = {key: kwargs.pop(key) for key in list(kwargs) if key not in SHARED}
            reject_unknown(name, own, options)
            e, w, b, opts = prepare(input, linear_weight, target, **kwargs)
            with torch.autocast(e.device.type, enabled=False):  # operands are already cast, the rest is float32
                loss, stats = compute(e, w, b, opts, **options)
            loss = loss.reshape(opts.shape) if opts.reduction == "none" else loss
            if not opts.return_stats:
                return loss
            return loss, HeadStats(*(value.detach().reshape(opts.shape) for value in stats))

        return head

    return decorate


def defaults(function: Callable) -> dict[str, Any]:
    """Defaults of the function's keyword-only arguments, by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def reject_unknown(name: str, own: list[str], options: dict) -> None:
    """Raise a `T1Error`, listing the options of head `name`, if `options` holds any other."""
    for key in options:
        allowed = ", ".join(own) or "none of its own"
        require(key in own, f"unknown option {key!r} for head {name!r}; its options: {allowed}")


def _masked(values: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """(N) values of the tokens, 0 at ignored ones: whatever is there must not matter, infinities included."""
    return values.masked_fill(target == ignore_index, 0.0)


def prepare(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    workspace: int | str | None = None,
    filter_eps: float | None = None,
    return_stats: bool = False,
    shards: "Shards | None" = None,
    cast: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Options]:
    """Check every argument of `linear_cross_entropy`; return flat operands and `Options`.

    `shards`: linear_weight and linear_bias are this process's rows only, target that of the tokens given to it.
    `cast`: apply autocast to the operands. If False they may differ in dtype, because the head casts them itself.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    tensors = {"linear_bias": linear_bias, "weight": weight, "token_weight": token_weight}
    checks.tensors(input=input, linear_weight=linear_weight, target=target, **tensors)
    if cast:
        input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    checks.operands(input, linear_weight, linear_bias, same_dtype=cast)
    vocab = linear_weight.shape[0]
    classes = vocab if shards is None else shards.vocab
    flatten = torch.flatten if shards is None else shards.flat_tokens
    flat = checks.targets(target, input, classes, ignore_index, flatten)
    checks.weights(weight, token_weight, classes, target.shape)
    checks.scalars(reduction, label_smoothing, softcap, z_loss, filter_eps)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    opts = Options(
        target=flat,
        class_weight=None if weight is None else weight.to(dtype).contiguous(),
        token_weight=None if token_weight is None else _masked(flatten(token_weight).to(dtype), flat, ignore_index),
        shape=target.shape,
        vocab=vocab,
        dtype=dtype,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
        softcap=softcap,
        z_loss=float(z_loss),
        workspace=None if workspace is None else checks.parse_bytes(workspace),
        filter_eps=filter_eps,
        return_stats=return_stats,
        shards=shards,
    )
    return input.reshape(-1, input.shape[-1]), linear_weight, linear_bias, opts


SHARED = frozenset(inspect.signature(prepare).parameters) - {"cast"}


def _autocast(*operands: Tensor | None) -> list[Tensor | None]:
    """Cast the operands as `torch.nn.functional.linear` does under autocast: floating-point ones except float64."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(operands)
    dtype = torch.get_autocast_dtype(device)
    keep = (None, torch.float64)
    return [
        t if t is None or t.dtype in keep or not t.is_floating_point() else t.to(dtype)  # None: an absent bias
        for t in operands
    ]


def need_workspace(workspace: int | None, least: int, head: str) -> None:
    """Raise a `T1Error` that states the least that works if the call's workspace is below `least` bytes."""
    if workspace is not None and workspace < least:
        raise T1Error(
            f"workspace of {workspace} bytes is too small for head {head!r} here; "
            f"the least that works is {least} bytes ({least / 2**20:.2f}MiB)"
        )


def refuse_create_graph(head: str, dealt: bool) -> None:
    """For use in a backward: raise a `T1Error` under create_graph=True, the only case in which grad mode is on there.

    Otherwise the gradients would be taken for constants, and second derivatives would be silently wrong.
    `dealt`: the vocabulary is sharded over a group.
    """
    advice = "nor has any other under a group" if dealt else 'use head "full"'
    require(not torch.is_grad_enabled(), f'head "{head}" has no second derivative (create_graph=True); {advice}')
