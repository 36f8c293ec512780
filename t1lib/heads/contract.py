"""The contract that every head shares: options, validation, and the wrapper that applies both.

A head is written as `compute(e, w, b, opts, *, own options) -> (loss, HeadStats | None)` on flat operands
e (N, D), w (V, D), b (V) or None; `as_head` gives it the public signature and checks every argument once.
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
    """Detached facts per token, each of the target's shape; 0, 0 and False at ignored tokens.

    `lse`: log-sum-exp of the token's logits. `logprob`: log-probability of the target, without weights.
    `correct`: whether no logit is larger than the target's (ties count as correct).
    """

    lse: Tensor
    logprob: Tensor
    correct: Tensor


@dataclass(frozen=True)
class Options:
    """One validated call, without the operands. Vectors over tokens are flat (N), over classes (V).

    shards      who holds which rows of the weight (`t1lib.heads.parallel`), None where they are all here
    vocab       rows of the weight that are here
    """

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    shape: torch.Size
    vocab: int
    dtype: torch.dtype  # of the loss and of everything made from logits: float32, or float64 for float64 operands
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
        """V, wherever they are."""
        return self.vocab if self.shards is None else self.shards.vocab

    @property
    def widest(self) -> int:
        """The most rows of the weight that a process holds: what all of them plan their chunks for."""
        return self.vocab if self.shards is None else max(self.shards.rows)

    @cached_property
    def local_target(self) -> Tensor:
        """(N): the target as a row of the weight here; outside [0, vocab) where another process holds it."""
        return self.target if self.shards is None else self.target - self.shards.first

    @property
    def local_class_weight(self) -> Tensor | None:
        """(vocab): the class weights of the rows here."""
        if self.shards is None or self.class_weight is None:
            return self.class_weight
        return self.class_weight[self.shards.first : self.shards.first + self.vocab]

    def tokens(self, mine: Tensor) -> Tensor:
        """(N, …): all tokens' values, from those that this process was given."""
        return mine if self.shards is None else self.shards.tokens(mine)

    def own(self, every: Tensor) -> Tensor:
        """Of all tokens' values, (N, …), those of the tokens that this process was given."""
        return every if self.shards is None else self.shards.own(every)

    @property
    def plain(self) -> bool:
        """Whether the gradient of the logits is p − one-hot, up to a factor a token."""
        return not (self.label_smoothing or self.z_loss or self.softcap or self.filter_eps)

    @property
    def uniform(self) -> bool:
        """Whether that factor is one and the same for all valid tokens."""
        return self.reduction != "none" and self.class_weight is None and self.token_weight is None

    @cached_property
    def valid(self) -> Tensor:
        """(N) bool: tokens that are not ignored."""
        return self.target != self.ignore_index

    @cached_property
    def safe_target(self) -> Tensor:
        """(N) int64 in [0, V): the target, 0 at ignored tokens, so that it can index."""
        return self.target.masked_fill(~self.valid, 0)

    @cached_property
    def target_weight(self) -> Tensor | None:
        """(N): the class weight of each token's target; None without class weights."""
        return None if self.class_weight is None else self.class_weight[self.safe_target]

    @cached_property
    def class_sum(self) -> Tensor | float:
        """Sum of the class weights over the vocabulary; V without class weights."""
        return float(self.classes) if self.class_weight is None else self.class_weight.sum()

    @cached_property
    def denominator(self) -> Tensor:
        """Scalar by which `mean` divides: the sum over valid tokens of token weight times the target's class weight."""
        weight = self.valid.to(self.dtype)
        for factor in (self.token_weight, self.target_weight):
            weight = weight if factor is None else weight * factor
        return weight.sum()

    def mask(self, losses: Tensor) -> Tensor:
        """Multiply (N) per-token losses by the token weight and make them 0 at ignored tokens."""
        weighted = losses if self.token_weight is None else losses * self.token_weight
        return torch.where(self.valid, weighted, 0.0)

    def token_gradient(self, upstream: Tensor | float) -> Tensor:
        """(N): dL / d(loss of the token before its token weight), given dL / d(what `reduce` returns)."""
        if self.reduction == "mean":
            upstream = upstream / self.denominator
        elif self.reduction == "none":
            upstream = self.tokens(upstream)
        # masked last: with every token ignored the mean's upstream gradient is infinite, the gradient is still 0
        return self.mask(upstream * torch.ones_like(self.target, dtype=self.dtype))

    def reduce(self, losses: Tensor) -> Tensor:
        """Masked (N) losses to what the call returns, flat: (N) under `none`, a scalar otherwise."""
        if self.reduction == "none":
            return self.own(losses)
        return losses.sum() if self.reduction == "sum" else losses.sum() / self.denominator

    def stats(self, lse: Tensor, logprob: Tensor, correct: Tensor) -> HeadStats:
        """`HeadStats` from flat (N) values: ignored tokens cleared."""
        cleared = (torch.where(self.valid, lse, 0.0), torch.where(self.valid, logprob, 0.0), correct & self.valid)
        return HeadStats(*map(self.own, cleared))


Compute = Callable[..., tuple[Tensor, HeadStats | None]]


def as_head(name: str) -> Callable[[Compute], Callable]:
    """Decorator: give `compute` the signature of `linear_cross_entropy`, checked, flat, outside autocast."""

    def decorate(compute: Compute) -> Callable:
        own = list(defaults(compute))

        @functools.wraps(compute)
        def head(input: Tensor, linear_weight: Tensor, target: Tensor, **kwargs):
            options = {key: kwargs.pop(key) for key in list(kwargs) if key not in SHARED}
            reject_unknown(name, own, options)
            e, w, b, opts = prepare(input, linear_weight, target, **kwargs)
            with torch.autocast(e.device.type, enabled=False):  # operands are cast already, the rest is float32
                loss, stats = compute(e, w, b, opts, **options)
            loss = loss.reshape(opts.shape) if opts.reduction == "none" else loss
            if not opts.return_stats:
                return loss
            return loss, HeadStats(*(value.detach().reshape(opts.shape) for value in stats))

        return head

    return decorate


def defaults(function: Callable) -> dict[str, Any]:
    """Those of the arguments that are given by name alone."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def reject_unknown(name: str, own: list[str], options: dict) -> None:
    """Raise a `T1Error` that lists what head `name` takes if `options` holds anything else."""
    for key in options:
        allowed = ", ".join(own) or "none of its own"
        require(key in own, f"unknown option {key!r} for head {name!r}; its options: {allowed}")


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

    `shards`: the weight and the bias are this process's rows of them; the target is that of the tokens given.
    `cast`: apply autocast to the operands. Without it they may differ in dtype: the head casts them itself.
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
        class_weight=None if weight is None else weight.to(dtype),
        token_weight=None if token_weight is None else flatten(token_weight).to(dtype),
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
    """Cast the operands as `torch.nn.functional.linear` does under autocast: floating ones, float64 excepted."""
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
    """Raise a `T1Error` that says the least that works if the call's workspace is below `least` bytes."""
    if workspace is not None and workspace < least:
        raise T1Error(
            f"workspace of {workspace} bytes is too small for head {head!r} here; "
            f"the least that works is {least} bytes ({least / 2**20:.2f}MiB)"
        )


def refuse_create_graph(head: str, dealt: bool) -> None:
    """Raise a `T1Error` in a backward under create_graph=True, where alone grad mode is on: constants there would be
    silently wrong. `dealt`: the vocabulary is dealt to a group."""
    advice = "nor has any other under a group" if dealt else 'use head "full"'
    require(not torch.is_grad_enabled(), f'head "{head}" has no second derivative (create_graph=True); {advice}')
