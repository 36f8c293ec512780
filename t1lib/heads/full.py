"""Head `full`: the specification that every other head is tested against. Plain autograd on the whole logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from t1lib.heads.contract import HeadStats, Options, as_head, need_workspace


@as_head("full")
def full(e: Tensor, w: Tensor, b: Tensor | None, opts: Options) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs, holding all N × V logits at once.

    For token n with target y, class weights c (1 if not given), smoothing α, token weight t (1 if not given):

        z     = e wᵀ + b          in the operands' dtype, then float32 (float64 stays float64)
        z     ← s · tanh(z / s)   with softcap s
        lse   = log Σ_v exp z_v
        l_n   = t_n · [ (1−α) c_y (lse − z_y)  +  α/V Σ_v c_v (lse − z_v)  +  z_loss · lse² ]
        mean  = Σ_n l_n / Σ_n t_n c_y,   sum = Σ_n l_n,   none = l_n    (n over tokens that are not ignored)

    The first two terms in the bracket are `torch.nn.functional.cross_entropy`. The loss is float32 for 16-bit operands
    (PyTorch's `linear_cross_entropy` rounds it to their dtype). If all tokens are ignored, mean is nan, sum is 0 and
    the gradient is 0.

    `filter_eps` (Cut Cross-Entropy, section 4.3): with p = softmax z, entries with |p_v − [v = y]| < eps are set to 0
    in dL/dz. A head may drop any subset of these entries; this one drops each of them.

    Memory: `entry_bytes` for each of the N × V logits; `workspace` is only checked against that and changes nothing.
    Raises `T1Error` for a workspace below it. Source: T1M3, section 2 (the standard output layer).
    """
    need_workspace(opts.workspace, e.shape[0] * opts.vocab * entry_bytes(opts), "full")
    z = F.linear(e, w, b).to(opts.dtype)
    if opts.softcap is not None:
        z = opts.softcap * torch.tanh(z / opts.softcap)
    if opts.filter_eps is not None and z.requires_grad:
        small = _small(z.detach(), opts)
        z.register_hook(lambda gradient: gradient.masked_fill(small, 0.0))
    losses = F.cross_entropy(
        z,
        opts.target,
        weight=opts.class_weight,
        reduction="none",
        ignore_index=opts.ignore_index,
        label_smoothing=opts.label_smoothing,
    )
    if opts.z_loss:
        losses = losses + opts.z_loss * torch.logsumexp(z, -1).square()
    return opts.reduce(opts.mask(losses)), _stats(z.detach(), opts) if opts.return_stats else None


def entry_bytes(opts: Options) -> int:
    """Bytes per logit at the peak, in the backward: log-probabilities and two gradients (12 for 16-bit operands).

    This is an estimate; options add saved copies (softcap two, z_loss or statistics one, filtering one).
    """
    copies = 3 + 2 * (opts.softcap is not None) + bool(opts.z_loss or opts.return_stats) + (opts.filter_eps is not None)
    return copies * opts.dtype.itemsize


def _small(z: Tensor, opts: Options) -> Tensor:
    """(N, V) bool: entries of softmax − one-hot below `filter_eps` in magnitude."""
    delta = torch.softmax(z, -1)
    delta[torch.arange(len(z), device=z.device), opts.safe_target] -= 1.0
    return delta.abs() < opts.filter_eps


def _stats(z: Tensor, opts: Options) -> HeadStats:
    lse = torch.logsumexp(z, -1)
    at_target = z.gather(1, opts.safe_target[:, None])[:, 0]
    return opts.stats(lse, at_target - lse, at_target >= z.amax(-1))
