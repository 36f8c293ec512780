"""Public implementations of the same loss, behind one table: what the kit's heads are compared with.

Liger never chooses its version for Hopper by itself. Where N, V or D is no multiple of 8, QuACK's module computes all
logits at once; tuning would take minutes and affect only the product for dW, since PyTorch does the other two.
cut-cross-entropy 25.1.1, the version on PyPI, accumulates its gradients in 16 bits, even without the filter;
`cce_exact` in its repository accumulates in float32 with compensation. Neither is bit for bit what the paper measured.
"""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from t1lib.errors import UnavailableError, choose
from t1lib.heads import HEADS, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden states (N, D), weight (V, D), targets (N) → mean loss
LIGER_SM90 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"


def need(module: str, cuda: bool = True) -> Any:
    """Import an optional package; cuda: it needs a GPU. Raises `UnavailableError` if it cannot be used here."""
    if cuda and not torch.cuda.is_available():
        raise UnavailableError(f"{module} needs a CUDA device")
    try:
        return importlib.import_module(module)
    except Exception as error:  # an old kernel package with a new Triton fails in many ways
        raise UnavailableError(f"{module} cannot be imported here: {error}") from None


def _compiled() -> Loss:
    if not torch.cuda.is_available():
        raise UnavailableError("torch.compile is compared on a CUDA device only")
    torch.compiler.reset()  # after eight shapes in a process torch.compile would silently stop compiling
    return torch.compile(lambda e, w, y: F.cross_entropy((e @ w.T).float(), y), dynamic=False, fullgraph=True)


def _cce_exact() -> Loss:
    """CCE without its filter: the implementation "cce_exact" if this version has it."""
    module = need("cut_cross_entropy")
    known = {name.lower() for name in module.LinearCrossEntropyImpl.__members__}
    chosen = {"impl": "cce_exact"} if "cce_exact" in known else {"impl": "cce", "filter_eps": None}
    return partial(module.linear_cross_entropy, **chosen)


def _liger() -> Loss:
    function = need("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    return lambda e, w, y: function.apply(e, w, y)[0]


def _quack(rows: int) -> Loss:
    """QuACK, not tuned, with `rows` rows per chunk."""
    module = need("quack.linear_cross_entropy")

    @cache
    def head(vocabulary: int, hidden: int) -> torch.nn.Module:
        """QuACK's module, which decides itself whether to chunk. Its weight is replaced in each call."""
        return module.LinearCrossEntropy(hidden, vocabulary, chunk_size=rows, tuned=False, device="meta")

    return lambda e, w, y: torch.func.functional_call(head(*w.shape), {"weight": w}, (e, y))


def _trl() -> Loss:
    """As its trainers call it: tiles of 4096 × 32768, computed again in the backward."""
    function = need("trl.kernels.chunked_logprob", cuda=False).ChunkedLogProbFunction
    # bias; temperature, columns of a tile, softcap, scale of the logits, further outputs
    return lambda e, w, y: -function.apply(e, w, None, y, 1.0, 32768, None, 1.0, ())[0].mean()


def _torch_rows(rows: int) -> Loss:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise UnavailableError(f"needs torch.nn.functional.linear_cross_entropy (2.13); this is {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return lambda e, w, y: F.linear_cross_entropy(e, w, y, options=options)


PEERS: dict[str, Callable[[], Loss]] = {
    "compile": _compiled,  # the plain head, logits widened inside the graph
    # by default, gradients below 2⁻¹² (16 bits) are left out
    "cce": lambda: partial(need("cut_cross_entropy").linear_cross_entropy, impl="cce"),
    "cce-exact": _cce_exact,
    "liger": _liger,
    # for Hopper: all logits at once; N a multiple of 128, V of 256
    "liger-sm90": lambda: need(LIGER_SM90).LigerFusedLinearCrossEntropySM90Function.apply,
    "quack": partial(_quack, 4096),
    "quack-1024": partial(_quack, 1024),
    "trl": _trl,
    "torch-1024": partial(_torch_rows, 1024),  # PyTorch's operator, which in head `torch` chooses the rows itself
}


def loss_function(method: str, **settings: Any) -> Callable[..., Any]:
    """The loss of a head of the kit (with its `settings`) or of a peer, as a function of e, w, y. Raises `T1Error` for
    an unknown name, `UnavailableError` if the method cannot run here."""
    choose("method", method, [*HEADS, *PEERS])
    return PEERS[method]() if method in PEERS else partial(linear_cross_entropy, head=method, **settings)
