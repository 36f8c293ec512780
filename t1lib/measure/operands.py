"""Operands of an output layer, with a flat or a peaked softmax or a real model's."""

from pathlib import Path

import torch
from torch import Tensor

from t1lib.errors import choose

DATA = ("flat", "peaked", "real")
PEAKED_STD = 6.0  # of the logits; for a trained model it is 5 to 8


def operands(
    data: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Hidden states (N, D), weight (V, D) and targets (N); sizes: N, V, D. data:

    flat    both normal, logits of standard deviation 0.02·√D: all probabilities near 1/V, as before training
    peaked  logits of standard deviation 6, each hidden state moved towards its target's row until that logit is
            about as large as the log-sum-exp of the others: a loss of 2 to 3 nats, many probabilities near 0 or 1
    real    what `LanguageSession.held_out` (`t1lib.text.session`) has written to `path`
    """
    choose("data", data, DATA)
    if data == "real":
        saved = torch.load(Path(path or ""), map_location=device, weights_only=True)
        return saved["e"].to(dtype), saved["w"].to(dtype), saved["y"]
    torch.manual_seed(seed)
    tokens, vocabulary, hidden = sizes
    y = torch.randint(vocabulary, (tokens,), device=device)
    e = torch.randn(tokens, hidden, device=device)
    w = torch.randn(vocabulary, hidden, device=device)
    if data == "flat":
        w = w * 0.02
    else:  # rows of length 1: adding a multiple of its target's row to a hidden state raises mainly that target's logit
        w = w / w.norm(dim=1, keepdim=True)
        e = PEAKED_STD * e
        e = e + torch.logsumexp(e[:64] @ w.T, dim=1).mean() * w[y]
    return e.to(dtype), w.to(dtype), y
