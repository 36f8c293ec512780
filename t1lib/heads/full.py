"""Head `full`, the specification that every other head is tested against; and head `torch`, PyTorch's own operator."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from t1lib.errors import UnavailableError, require
from t1lib.heads.options import HeadStats, Options, need_workspace, on_flat_operands, require_plain_backward, spent

ALIGN = 8  # elements; if rows of logits do not start on multiples of it, cuBLAS takes five times as long


@on_flat_operands
def full(e: Tensor, w: Tensor, b: Tensor | None, opts: Options) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs, holding all N × V logits at once, by plain autograd.

    For token n with target y, class weights c (1 if not given), smoothing α, token weight t (1 if not given):

        z     = e wᵀ + b          in the operands' dtype, then float32 (float64 stays float64)
        z     ← s · tanh(z / s)   with softcap s
        lse   = log Σ_v exp z_v
        l_n   = t_n · [ (1−α) c_y (lse − z_y)  +  α/V Σ_v c_v (lse − z_v)  +  z_loss · lse² ]
        mean  = Σ_n l_n / Σ_n t_n c_y,   sum = Σ_n l_n,   none = l_n    (n over tokens that are not ignored)

    The first two terms in the bracket are `torch.nn.functional.cross_entropy`. If all tokens are ignored, mean is nan,
    sum is 0 and the gradient is 0. `filter_eps` (Cut Cross-Entropy, section 4.3): with p = softmax z, entries with
    |p_v − [v = y]| < eps are set to 0 in dL/dz. A head may drop any subset of these entries; this one drops them all.
    `workspace` limits nothing here: if the 3 to 8 arrays of N × V logits and gradients that the backward takes exceed
    it, also for the loss alone, that is a `T1Error`. Source: T1M3, section 2 (the standard output layer)."""
    s = opts.settings
    # N × V arrays at the peak, in the backward (an estimate): log-probabilities, two gradients, copies
    copies = 3 + 2 * (s.softcap is not None) + (2 if s.z_loss else bool(s.return_stats)) + (s.filter_eps is not None)
    need_workspace(s.workspace, e.shape[0] * opts.vocab * copies * opts.dtype.itemsize, "full")
    z = _logits(e, w, b).to(opts.dtype)
    if s.softcap is not None:
        z = s.softcap * torch.tanh(z / s.softcap)
    if s.filter_eps is not None and z.requires_grad:
        delta = torch.softmax(z.detach(), -1)
        delta[torch.arange(len(z), device=z.device), opts.target_or_0] -= 1.0
        small = delta.abs_() < s.filter_eps
        z.register_hook(lambda gradient: gradient.masked_fill(small, 0.0))
    losses = F.cross_entropy(
        z, opts.target, weight=opts.class_weight, reduction="none", ignore_index=s.ignore_index,
        label_smoothing=s.label_smoothing,
    )  # fmt: skip
    if s.z_loss:
        losses = losses + s.z_loss * torch.logsumexp(z, -1).square()
    if not s.return_stats:
        return opts.reduce(opts.mask(losses)), None
    z = z.detach()
    lse, at_target = torch.logsumexp(z, -1), z.gather(1, opts.target_or_0[:, None])[:, 0]
    return opts.reduce(opts.mask(losses)), opts.stats(lse, at_target - lse, at_target >= z.amax(-1))


def _logits(e: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """`F.linear`; on CUDA with zero rows added to the weight, so that rows of logits start on `ALIGN` elements."""
    missing = -len(w) % ALIGN if e.is_cuda else 0
    if not missing:
        return F.linear(e, w, b)
    return F.linear(e, F.pad(w, (0, 0, 0, missing)), None if b is None else F.pad(b, (0, missing)))[:, : len(w)]


@torch._disable_dynamo  # torch.compile cannot trace the hooks (`torch.compiler.disable` imports the compiler: 2 s)
@on_flat_operands
def native(e: Tensor, w: Tensor, b: Tensor | None, opts: Options) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs by `torch.nn.functional.linear_cross_entropy` (PyTorch 2.13), on its
    memory-saving path, with the op's own choice of chunk and precision. The loss of 16-bit operands comes rounded to
    their dtype, cast to float32. With `token_weight` the op runs with reduction "none". Raises `UnavailableError` on a
    PyTorch without the op; `T1Error` for options it lacks, for label_smoothing, with which it holds all logits, for a
    second backward, and for create_graph=True."""
    if not hasattr(F, "linear_cross_entropy"):
        missing = "torch.nn.functional.linear_cross_entropy (PyTorch 2.13)"
        raise UnavailableError(f"head 'torch' needs {missing}; this is {torch.__version__}")
    s = opts.settings
    for name in ("softcap", "z_loss", "filter_eps", "workspace", "return_stats", "label_smoothing"):
        others = "full, fused" if name == "filter_eps" else "full, chunked, fused"
        left_out = getattr(s, name) in (None, 0)  # False is 0
        require(left_out, f"head 'torch' has no {name}; heads that take it: {others}")
    composed = opts.token_weight is not None
    e, w, b = (None if t is None else t.view_as(t) for t in (e, w, b))
    for operand in (e, w, b):
        if operand is not None and operand.requires_grad:  # without valid tokens PyTorch divides by 0
            operand.register_hook(lambda gradient: gradient.masked_fill_(~opts.valid.any(), 0.0))
    losses = F.linear_cross_entropy(
        e, w, opts.target, linear_bias=b,
        weight=None if opts.class_weight is None else opts.class_weight.to(e.dtype),
        reduction="none" if composed else s.reduction, ignore_index=s.ignore_index,
        options=torch.nn.LinearCrossEntropyOptions(),
    ).to(opts.dtype)  # fmt: skip
    if losses.requires_grad:
        losses.register_hook(partial(_once, []))
    if composed:
        return opts.reduce(opts.mask(losses)), None
    return losses.reshape(opts.shape) if s.reduction == "none" else losses, None


def _once(calls: list[None], upstream: Tensor) -> None:
    """A hook that refuses a second backward, a second derivative and a batch of gradients in the kit's words."""
    require_plain_backward("torch", upstream)
    if calls:
        raise spent("torch", 'head "full"')
    calls.append(None)
