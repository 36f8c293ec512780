"""Output layers (heads): one contract, `linear_cross_entropy`, and several ways to compute it, `HEADS`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import T1Error, choose, require, shown
from t1lib.heads.chunked import chunked
from t1lib.heads.full import full, native
from t1lib.heads.fused import fused
from t1lib.heads.huggingface import patch_head, unpatch_head
from t1lib.heads.options import HeadStats, Settings, Tensors, check_settings, check_tensors, own_options, parse_bytes

__all__ = [
    "DEFAULT_HEAD", "HEADS", "HeadStats", "linear_cross_entropy", "next_token_targets", "parse_bytes", "patch_head",
    "unpatch_head",
]  # fmt: skip

# by name: head(Tensors, Settings, **own options) -> (loss, HeadStats | None)
HEADS: dict[str, Callable] = {"full": full, "chunked": chunked, "fused": fused, "torch": native}
DEFAULT_HEAD = "fused"


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, head: str = DEFAULT_HEAD,
    linear_bias: Tensor | None = None, weight: Tensor | None = None, reduction: str = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    token_weight: Tensor | None = None, workspace: int | str | None = None, filter_eps: float | None = None,
    return_stats: bool = False, **own: Any,
) -> Tensor | tuple[Tensor, HeadStats]:  # fmt: skip
    """Cross-entropy loss of the logits z = `input @ linear_weight.T + linear_bias`; the equation is in `full`. Names,
    order and semantics follow `torch.nn.functional.linear_cross_entropy` (2.13) with class-index targets.

    input           (…, D), floating point; under autocast the operands are cast as `F.linear` casts them
    linear_weight   (V, D), same dtype as input
    target          (…) integer class indices in [0, V), or `ignore_index` (None means −100). Nothing in an ignored
                    token's row of input, not even nan, reaches a result
    head            a name in `HEADS`; `own` are options of that head alone, listed in its docstring
    linear_bias     (V), same dtype as input
    weight          (V) class weights, constant (must not require a gradient)
    reduction       "mean", "sum" or "none"
    label_smoothing in [0, 1]
    softcap         s in [1e-30, 1e30]: caps the logits, z ← s · tanh(z / s)
    z_loss          ≥ 0: adds z_loss · lse² to each valid token's loss; class weights do not scale this term
    token_weight    (…) factor on each token's loss and, under "mean", on its share of the denominator; constant
    workspace       bytes, or a string such as "256MiB": the most memory the head may use beyond inputs and gradients;
                    None: the head's own default
    filter_eps      in (0, 1), full and fused only: zero the logits' gradient where |softmax − one-hot| is smaller (CCE:
                    only whole blocks)
    return_stats    also return `HeadStats`, whose fields have the target's shape

    Returns the loss in float32 (float64 for float64 operands), of shape (…) under "none" and a scalar otherwise; with
    `return_stats` the pair (loss, HeadStats). Raises `T1Error` for a bad argument and `UnavailableError` if the head
    cannot run here. A target out of range is a `T1Error` on the CPU and an asynchronous device assertion on CUDA."""
    choose("head", head, HEADS)
    if own:
        own_options(head, HEADS[head], own)
    tensors = Tensors(input, linear_weight, target, linear_bias, weight, token_weight)
    check_tensors(tensors)
    given = Settings(reduction, ignore_index, label_smoothing, softcap, z_loss, workspace, filter_eps, return_stats)
    loss, stats = HEADS[head](tensors, check_settings(given), **own)
    return (loss, stats) if return_stats else loss


def check_options(options: dict[str, Any]) -> None:
    """Raise as `linear_cross_entropy` does unless it takes these options, tried on small bfloat16 operands on the CPU.
    Neither tensors among them nor whether a workspace suffices is checked, as both depend on the operands."""
    for name in options:
        known = isinstance(name, str) and name not in ("input", "linear_weight", "target")
        require(known, f"option {shown(name)}; allowed: those of linear_cross_entropy, without its operands")
    zeros = partial(torch.zeros, dtype=torch.bfloat16, device="cpu")
    others = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
    if others.get("workspace") is not None:  # whether it suffices depends on the operands, too
        others["workspace"] = max(parse_bytes(others["workspace"]), 2**20)
    linear_cross_entropy(zeros(2, 4), zeros(8, 4), zeros(2).long(), **others)


def next_token_targets(ids: Tensor, ignore_index: int = -100) -> Tensor:
    """Next-token targets of a language model: (B, S) or (S) token ids shifted left by one, the last position ignored;
    int64, of the same shape. Raises `T1Error` for other ids."""
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not (whole and ids.layout == torch.strided and ids.dim() in (1, 2)):
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise T1Error(f"ids must be integers in a dense tensor of shape (B, S) or (S), got {got}")
    targets = torch.full_like(ids, ignore_index, dtype=torch.int64)
    targets[..., :-1] = ids[..., 1:]
    return targets
