"""Head `fused`: Triton kernels that never hold the whole logits and run at the speed of the matrix products."""

import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from t1lib.errors import choose, require
from t1lib.heads import checks
from t1lib.heads.chunked import chunked as chunked_head
from t1lib.heads.contract import HeadStats, reject_unknown
from t1lib.heads.scale import triton

if TYPE_CHECKING:
    from t1lib.heads.shards import Shards

OWN = ["chunks", "accumulate"]


def fused(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
    token_weight: Tensor | None = None, workspace: int | str | None = None, filter_eps: float | None = None,
    return_stats: bool = False, chunks: int | None = None, accumulate: str | None = None,
    shards: "Shards | None" = None, **unknown: object,
) -> Tensor | tuple[Tensor, HeadStats]:  # fmt: skip
    """Cross-entropy of a linear layer's outputs by Triton kernels; arguments as in `linear_cross_entropy`.

    Loss alone: one matrix product, with the logits in registers only. Loss and gradients under "mean" and "sum": the
    forward computes both, one chunk of tokens at a time, with three products; the backward only scales the gradients,
    and a second backward is refused. In the other cases ("none", filter_eps, float16, a softcap with label smoothing,
    accumulate="float32", a workspace so small that this is faster) the backward recomputes the logits and takes their
    softmax with the saved log-sum-exp: four products.

    Ignored tokens cost no work, and frozen operands cost no product. Results are bitwise the same on every run. Nothing
    waits for the device, so a call can be captured in a CUDA graph; `torch.compile(fullgraph=True)` sees one operator.

    workspace   bytes beyond operands and gradients; more allows fewer, larger chunks (default: 512 MiB plus 192 bytes
                per token; the loss alone needs 16 MiB)
    chunks      in place of workspace: number of chunks of tokens, rounded to whole row tiles; memory use follows
    accumulate  None: the weight gradient accumulates in the weight's dtype (float32 for a float32 weight, also under
                autocast). In 16 bits the large product is rounded once per chunk, but the targets' own terms, and the
                complete rows of the 1024 most frequent targets, accumulate in float32 and are rounded once.
                "float32": every entry is one float32 sum, computed by the path with four products
    shards      passed by `t1lib.heads.parallel`

    Runs on CUDA with bfloat16, float16 and float32 operands; tuned for Hopper (`fused_plan.TILES`). Head `chunked`
    computes instead on other devices, for float64, and for bfloat16 in Triton's interpreter. Raises `T1Error` for a bad
    argument, a workspace too small (saying the least that works), a second backward where the forward computed the
    gradients, and create_graph=True.
    """
    reject_unknown("fused", OWN, unknown)
    shared = dict(
        linear_bias=linear_bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
        label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, token_weight=token_weight,
        workspace=workspace, filter_eps=filter_eps, return_stats=return_stats, shards=shards,
    )  # fmt: skip
    _check_own(chunks, accumulate, workspace)
    if not runs_on(input):
        own = {"by": "vocabulary"} if accumulate else {"chunks": chunks}
        return chunked_head(input, linear_weight, target, **shared, **own)
    from t1lib.heads.fused_op import call  # needs Triton

    return call(input, linear_weight, target, **shared, chunks=chunks, accumulate=accumulate)


def _check_own(chunks: int | None, accumulate: str | None, workspace: int | str | None) -> None:
    if chunks is not None:
        checks.count("chunks", chunks)
        require(workspace is None, "give chunks or workspace, not both: each sets the chunk size")
    if accumulate is not None:
        choose("accumulate", accumulate, ("float32",))


def runs_on(input: Tensor) -> bool:
    """Whether the kernels take this input: on CUDA, or on a CPU in Triton's interpreter, up to 32 bits per element.

    The interpreter is not used for bfloat16, whether from the input or from autocast: it does not support bfloat16
    products, but raises no error.
    """
    if not isinstance(input, Tensor) or input.numel() == 0 or input.dtype == torch.float64:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        device = input.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if compute == torch.bfloat16:
            return False
    elif not input.is_cuda:
        return False
    if triton is None:
        warnings.warn("head 'fused' needs Triton, which is not installed; 'chunked' computes instead", stacklevel=4)
        return False
    return True
