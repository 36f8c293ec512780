"""Operands of an output layer: random ones with a flat or a peaked softmax, or a real model's from a file."""

from pathlib import Path

import torch
from torch import Tensor

from t1lib.errors import choose
from t1lib.measure.head_cases import Shape

DATA = ("flat", "peaked", "real")
PEAKED_STD = 6.0  # of the logits; for a trained model it is 5 to 8


def operands(
    data: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, path: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (N, D) and weight (V, D), both requiring gradients, and targets (N).

    flat    both normal, logits of standard deviation 0.02·√D: all probabilities near 1/V, as before training
    peaked  logits of standard deviation 6, each hidden state moved towards its target's row until that logit is
            about as large as the log-sum-exp of the others: a loss of 2 to 3 nats, many probabilities near 0 or 1
    real    what `save_operands` wrote to `path`
    """
    choose("data", data, DATA)
    if data == "real":
        saved = torch.load(Path(path or ""), map_location=device, weights_only=True)
        e, w, y = saved["e"].to(dtype), saved["w"].to(dtype), saved["y"]
    else:
        torch.manual_seed(seed)
        y = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
        e = torch.randn(shape.tokens, shape.hidden, device=device)
        w = torch.randn(shape.vocabulary, shape.hidden, device=device)
        e, w = (e, w * 0.02) if data == "flat" else _peak(e, w, y)
        e, w = e.to(dtype), w.to(dtype)
    return e.requires_grad_(), w.requires_grad_(), y


def _peak(e: Tensor, w: Tensor, y: Tensor, sample: int = 64) -> tuple[Tensor, Tensor]:
    """Scale the rows of w to length 1, so that adding a multiple of its target's row to a hidden state raises mainly
    that target's logit; then add it."""
    w = w / w.norm(dim=1, keepdim=True)
    e = PEAKED_STD * e
    level = torch.logsumexp(e[:sample] @ w.T, dim=1).mean()
    return e + level * w[y], w


def save_operands(path: str, e: Tensor, w: Tensor, y: Tensor) -> None:
    """Write operands for `operands("real", …)` in other processes."""
    torch.save({"e": e.detach().cpu(), "w": w.detach().cpu(), "y": y.cpu()}, Path(path))
