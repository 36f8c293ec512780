"""Head `fused` as registered operators, so that PyTorch's compiler sees one call with known shapes and gradients."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from t1lib.errors import T1Error, require
from t1lib.heads import checks, fused_chunks, fused_plan, fused_run, fused_search
from t1lib.heads.contract import HeadStats, Options, prepare, refuse_create_graph
from t1lib.heads.logits import token_losses
from t1lib.heads.scale import scale_

if TYPE_CHECKING:
    from t1lib.heads.shards import Shards

TIGHT = 1.0  # softcap, below which the logits that matter lie where tanh is flat
SHARDS: dict[str, "Shards"] = {}
"""By name, because an operator cannot take a process group."""


def call(input: Tensor, linear_weight: Tensor, target: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, HeadStats]:
    """What `fused` returns. Types are checked here, values of tensors in the operator, which is not traced."""
    optional = {k: kwargs[k] for k in ("linear_bias", "weight", "token_weight")}
    checks.tensors(input=input, linear_weight=linear_weight, target=target, **optional)
    numbers = ("reduction", "label_smoothing", "softcap", "z_loss", "filter_eps")
    checks.scalars(*(kwargs[k] for k in numbers))
    stats = kwargs.pop("return_stats")
    device = input.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (input, linear_weight, optional["linear_bias"])]
    index = kwargs.pop("ignore_index")
    workspace, shards = kwargs.pop("workspace"), kwargs.pop("shards")
    budget = None if workspace is None else str(checks.parse_bytes(workspace))
    _check_beyond(index, compute, input, linear_weight, optional["linear_bias"])
    loss, lse, logprob, correct, *_ = forward_op(
        input, linear_weight, target, kwargs["linear_bias"], kwargs["weight"], kwargs["token_weight"],
        kwargs["reduction"], -100 if index is None else index, float(kwargs["label_smoothing"]), kwargs["softcap"],
        float(kwargs["z_loss"]), budget, kwargs["filter_eps"], kwargs["chunks"], kwargs["accumulate"] is not None,
        _name_of(shards), compute, needs,
    )  # fmt: skip
    loss = loss.reshape(target.shape) if kwargs["reduction"] == "none" else loss
    return (loss, HeadStats(lse, logprob, correct)) if stats else loss


def _check_beyond(index: int | None, compute: torch.dtype | None, *operands: Tensor | None) -> None:
    """Raise `T1Error` for what the operator would take silently or refuse with an error of its own."""
    if index is not None:
        checks.index(index)
    for value in (t for t in operands if t is not None):
        known = compute is None or value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        require(known, f"operands under autocast must be float32, float16 or bfloat16, got {value.dtype}")
        if not torch.compiler.is_compiling():
            plain = torch.autograd.forward_ad.unpack_dual(value).tangent is None
            require(plain, 'head "fused" has no forward-mode derivative; allowed: head="full"')


def _name_of(shards: "Shards | None") -> str | None:
    if shards is None:
        return None
    name = f"{shards.group.group_name} {shards.rank} {shards.rows} {shards.sequence}"
    SHARDS[name] = shards
    return name


def _operands(
    input: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None,
    token_weight: Tensor | None, settings: tuple, shards: str | None, compute: torch.dtype | None,
) -> fused_chunks.Operands:  # fmt: skip
    """Check all arguments, flatten the operands, and cast weight and bias."""
    names = ("reduction", "ignore_index", "label_smoothing", "softcap", "z_loss", "workspace", "filter_eps")
    with torch.autocast(input.device.type, enabled=False):  # the forward's state counts, also in the backward
        e, w, b, opts = prepare(
            input, linear_weight, target, linear_bias=bias, weight=weight, token_weight=token_weight,
            **dict(zip(names, settings, strict=True)), shards=None if shards is None else SHARDS[shards],
            cast=compute is None,
        )  # fmt: skip
    compute = compute or e.dtype
    if w.dtype != compute or w.stride(1) != 1:
        w = w.detach().to(compute).contiguous()
    b = None if b is None else b.detach().to(compute).contiguous()
    device = fused_plan.device_of(e.device)
    tiles = fused_plan.TILES[device.kind, compute.itemsize]
    return fused_chunks.Operands(opts.tokens(e.detach()), w, b, opts, compute, device, tiles)


class _Traced(NamedTuple):
    """The options that decide when gradients are computed, for the compiler's trace, which knows shapes only."""

    reduction: str
    filter_eps: float | None
    softcap: float | None
    label_smoothing: float
    workspace: int | None


def _is_early(
    opts: Options | _Traced, shape: fused_plan.Shape, operands: tuple[Tensor, Tensor], exact_sum: bool,
    needs: list[bool],
) -> bool:  # fmt: skip
    """Whether the forward computes the gradients.

    It does if their factors are already known and no dtype is too narrow for exponentials or gradients before the
    factors, unless the workspace is so small that recomputing the logits in the backward is faster. A tight softcap
    saturates: then its slope does not follow from what the first pass keeps.
    """
    even_slope = opts.softcap is not None and (opts.label_smoothing or opts.softcap < TIGHT)
    late = opts.reduction == "none" or opts.filter_eps is not None or even_slope or exact_sum
    if late or not any(needs) or torch.float16 in (shape.compute, *(t.dtype for t in operands)):
        return False
    if opts.workspace is None:
        return True
    kind = fused_plan.device_of(operands[0].device)
    tiles = fused_plan.TILES[kind.kind, shape.compute.itemsize]
    return fused_search.early_is_faster(shape, opts.workspace, kind, tiles)


def _shapes(
    tokens: int, compute: torch.dtype, needs: list[bool], linear_weight: Tensor, shards: "Shards | None"
) -> tuple[fused_plan.Shape, fused_plan.Shape]:
    """(the shape on this process, the shape to plan for), for all tokens of a call.

    All shards of the vocabulary must split the tokens into the same chunks, so they plan for the largest shard. If
    shards differ in size, no dW lends its memory, because the room in its last panel depends on the size.
    """
    vocab, hidden = map(int, linear_weight.shape)
    room = hidden * linear_weight.element_size() // compute.itemsize * needs[1]
    shape = fused_plan.Shape(tokens, vocab, hidden, compute, needs[0], needs[1], room)
    if shards is None:
        return shape, shape
    shape = shape._replace(ranks=shards.size)
    equal = len(set(shards.rows)) == 1
    return shape, shape._replace(vocab=max(shards.rows), room=room * equal)


def _where_they_are(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Make `operator` run with its first tensor's device as the current one, because Triton launches there."""

    @functools.wraps(operator)
    def there(first: Tensor, *rest: Any) -> Any:
        with torch.cuda.device_of(first):
            return operator(first, *rest)

    return there


@torch.library.custom_op("t1lib::linear_cross_entropy", mutates_args=())
@_where_they_are
def forward_op(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    token_weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float, softcap: float | None,
    z_loss: float, workspace: str | None, filter_eps: float | None, chunks: int | None, exact_sum: bool,
    shards: str | None, compute: torch.dtype | None, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, lse, logprob, correct, offset, log_total, dE, dW, dBias); gradients are empty unless computed here."""
    settings = (reduction, ignore_index, label_smoothing, softcap, z_loss, workspace, filter_eps)
    o = _operands(input, linear_weight, target, linear_bias, weight, token_weight, settings, shards, compute)
    shape, planned = _shapes(len(o.e), o.compute, needs, linear_weight, o.opts.shards)
    early = _is_early(o.opts, planned, (input, linear_weight), exact_sum, needs)
    gradients: tuple[Tensor | None, ...] = (None,) * 3
    if early:
        plan = fused_search.plan_early(planned, o.opts.workspace, o.device, o.tiles, chunks)
        found, gradients = fused_run.early(o, shape, plan, tuple(needs), linear_weight, linear_bias)
    else:
        if any(needs):  # refuse a workspace too small for the backward already in the forward
            fused_search.plan_late(planned, o.opts.workspace, o.device, o.tiles, 1 if exact_sum else chunks)
        found = fused_run.loss_only(o, shape, fused_search.plan_loss(planned, o.opts.workspace, o.device, o.tiles))
    opts, lse = o.opts, found.lse
    loss = opts.reduce(opts.mask(token_losses(lse, found.logprob, found.pull, opts)))
    stats = (opts.own(x).reshape(opts.shape) for x in (lse, found.logprob, found.correct))
    made = _filled(gradients, (input, linear_weight, linear_bias))
    return loss, *stats, found.offset, found.log_total, *made


@forward_op.register_fake
def _(
    input, linear_weight, target, linear_bias, weight, token_weight, reduction, ignore_index, label_smoothing, softcap,
    z_loss, workspace, filter_eps, chunks, exact_sum, shards, compute, needs,
):  # fmt: skip
    size = None if workspace is None else checks.parse_bytes(workspace)
    opts = _Traced(reduction, filter_eps, softcap, label_smoothing, size)
    known = None if shards is None else SHARDS[shards]
    tokens = target.numel() * (known.size if known and known.sequence else 1)
    _, planned = _shapes(tokens, compute or input.dtype, needs, linear_weight, known)
    early = _is_early(opts, planned, (input, linear_weight), exact_sum, needs)
    rows = input.new_empty(target.shape, dtype=torch.float32)
    flat = input.new_empty(tokens, dtype=torch.float32)
    operands = (input, linear_weight, linear_bias)
    made = (
        t.new_empty(t.shape) if early and needed else input.new_empty(0)
        for t, needed in zip(operands, needs, strict=True)
    )
    loss = rows.flatten() if reduction == "none" else input.new_empty((), dtype=torch.float32)
    correct = input.new_empty(target.shape, dtype=torch.bool)
    stats = torch.empty_like(rows), torch.empty_like(rows), correct
    return loss, *stats, flat, torch.empty_like(flat), *made


@torch.library.custom_op("t1lib::linear_cross_entropy_backward", mutates_args=())
@_where_they_are
def backward_op(
    upstream: Tensor, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None,
    weight: Tensor | None, token_weight: Tensor | None, offset: Tensor, log_total: Tensor, reduction: str,
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float, workspace: str | None,
    filter_eps: float | None, chunks: int | None, exact_sum: bool, shards: str | None, compute: torch.dtype | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dE, dW, dBias) from recomputed logits and the saved log-sum-exp; empty where not needed."""
    settings = (reduction, ignore_index, label_smoothing, softcap, z_loss, workspace, filter_eps)
    o = _operands(input, linear_weight, target, linear_bias, weight, token_weight, settings, shards, compute)
    shape, planned = _shapes(len(o.e), o.compute, needs, linear_weight, o.opts.shards)
    count = 1 if exact_sum else chunks
    plan = fused_search.plan_late(planned, o.opts.workspace, o.device, o.tiles, count)
    flat = upstream.reshape(-1) if reduction == "none" else upstream
    gradients = fused_run.late(o, shape, plan, tuple(needs), offset, log_total, flat, linear_weight, linear_bias)
    return _filled(gradients, (input, linear_weight, linear_bias))


def _filled(gradients: tuple[Tensor | None, ...], operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Gradients in their operands' shapes; None becomes an empty tensor, because operators return tensors only."""
    empty = operands[0].new_empty
    return tuple(empty(0) if g is None else g.reshape(t.shape) for g, t in zip(gradients, operands, strict=True))


@backward_op.register_fake
def _(upstream, input, linear_weight, target, linear_bias, *rest):
    operands, needs = (input, linear_weight, linear_bias), rest[-1]
    return tuple(t.new_empty(t.shape) if n else input.new_empty(0) for t, n in zip(operands, needs, strict=True))


@torch.library.custom_op("t1lib::scale_", mutates_args=("x",))
def scale_op(x: Tensor, factor: Tensor) -> None:
    """x ← x · factor, as in `scale_`."""
    scale_(x, factor)


def _setup(ctx, inputs, output) -> None:
    ctx.settings = inputs[6:]
    *_, shards, _, ctx.needs = inputs
    ctx.dealt = shards is not None
    offset, log_total, *gradients = output[4:]
    ctx.early = any(g.numel() for g in gradients)
    ctx.spent = False
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    if ctx.early:
        ctx.save_for_backward(*gradients)
    elif any(ctx.needs):
        ctx.save_for_backward(*inputs[:6], offset, log_total)


def _backward(ctx, upstream: Tensor | None, *_) -> tuple[Tensor | None, ...]:
    refuse_create_graph("fused", ctx.dealt)
    rest = (None,) * 14
    if upstream is None:
        return (None,) * 18
    if ctx.early:
        if ctx.spent:
            raise T1Error(
                'second backward through head "fused": its gradients were made in the forward and given away by the '
                'first; call it again, or use reduction="none"'
            )
        ctx.spent = True
        made = ctx.saved_tensors
        for g, needed in zip(made, ctx.needs, strict=True):
            if needed:
                scale_op(g, upstream)
    else:
        *tensors, offset, log_total = ctx.saved_tensors
        made = backward_op(upstream, *tensors, offset, log_total, *ctx.settings)
    de, dw, db = (g if needed else None for g, needed in zip(made, ctx.needs, strict=True))
    return de, dw, None, db, *rest


forward_op.register_autograd(_backward, setup_context=_setup)
