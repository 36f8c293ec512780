"""Head `torch`: PyTorch's own `torch.nn.functional.linear_cross_entropy`, if this PyTorch has it (2.13)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from t1lib.errors import UnavailableError, require
from t1lib.heads.contract import HeadStats, Options, as_head


@as_head("torch")
def native(
    e: Tensor, w: Tensor, b: Tensor | None, opts: Options, *, chunked: bool = True
) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs by PyTorch's op.

    chunked=True (default) selects its memory-saving path, `LinearCrossEntropyOptions()` with the op's own choice of
    chunk and precision; chunked=False selects its reference path, which holds the whole logits.

    The op takes class weights, bias and the three reductions; `token_weight` is applied to its losses under "none".
    The op rounds the loss of 16-bit operands to their dtype; the rounded value is returned as float32.

    Raises `UnavailableError` on a PyTorch without the op; `T1Error` for softcap, z_loss, filter_eps, workspace and
    return_stats, which the op lacks, and for label_smoothing with chunked=True, where it would hold the whole logits.
    """
    if not hasattr(F, "linear_cross_entropy"):
        raise UnavailableError(
            f"head 'torch' needs torch.nn.functional.linear_cross_entropy (PyTorch 2.13); this is {torch.__version__}"
        )
    _refuse(opts, chunked)
    composed = opts.token_weight is not None
    losses = F.linear_cross_entropy(
        e,
        w,
        opts.target,
        linear_bias=b,
        weight=None if opts.class_weight is None else opts.class_weight.to(e.dtype),
        reduction="none" if composed else opts.reduction,
        ignore_index=opts.ignore_index,
        label_smoothing=opts.label_smoothing,
        options=torch.nn.LinearCrossEntropyOptions() if chunked else None,
    ).to(opts.dtype)
    return (opts.reduce(opts.mask(losses)) if composed else losses), None


def _refuse(opts: Options, chunked: bool) -> None:
    """Raise a `T1Error` for the first option that the op lacks."""
    lacking = {
        "softcap": opts.softcap is not None,
        "z_loss": opts.z_loss != 0,
        "filter_eps": opts.filter_eps is not None,
        "workspace": opts.workspace is not None,
        "return_stats": opts.return_stats,
    }
    for name, given in lacking.items():
        require(not given, f"head 'torch' has no {name}; heads that take it: full, chunked, fused")
    whole = not (chunked and opts.label_smoothing)
    require(whole, "head 'torch' has no label_smoothing with chunked=True; pass chunked=False, or use head 'chunked'")
