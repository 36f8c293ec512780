"""Operands of an output layer, with a flat or a peaked softmax or a real model's, and how sparse their softmax is."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from t1lib.errors import choose

DATA = ("flat", "peaked", "real")
PEAKED_STD = 6.0  # of the logits; for a trained model it is 5 to 8
TILE = (128, 256)  # tokens × columns: the block that a kernel computes or skips as a whole


def operands(
    data: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Hidden states (N, D), weight (V, D) and targets (N); sizes: N, V, D. data:

    flat    both normal, logits of standard deviation 0.02·√D: all probabilities near 1/V, as before training
    peaked  logits of standard deviation 6, each hidden state moved towards its target's row until that logit is
            about as large as the log-sum-exp of the others: a loss of 2 to 3 nats, many probabilities near 0 or 1
    real    what a session of `t1lib.measure.language` has written to `path`
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


@torch.no_grad()
def sparsity(
    e: Tensor, w: Tensor, y: Tensor, eps: float, points: int = 60
) -> tuple[dict[int, float], dict[str, float]]:
    """Facts of p = softmax(e wᵀ) over N tokens, from float32 logits (Cut Cross-Entropy's Figure 3 and section 4.3): the
    mean over tokens of the k-th largest probability, for about `points` ranks k; and

    mass_below     share of the probability that lies in entries below `eps`; `entries_below`: share of such entries
    tiles          share of 128 × 256 tiles of the logits' gradient, p − one-hot, with an entry of magnitude `eps` or
                   more: those that a filter has to compute
    tiles_sorted   the same with the vocabulary ordered by mean logit, as in the paper
    """
    tokens, vocabulary = len(e), len(w)
    wide = w.float()
    order = (e.float().mean(0) @ wide.T).argsort(descending=True)  # the mean logit is the logit of the mean state
    by_rank = torch.zeros(vocabulary, dtype=torch.float64, device=e.device)
    mass = entries = kept = kept_sorted = 0.0
    for start in range(0, tokens, TILE[0]):
        rows = slice(start, start + TILE[0])
        p = torch.softmax(e[rows].float() @ wide.T, dim=-1)
        by_rank += p.sort(dim=-1, descending=True).values.sum(0, dtype=torch.float64)
        small = p < eps
        mass += float(p[small].sum(dtype=torch.float64))
        entries += float(small.sum())
        p[torch.arange(len(p), device=p.device), y[rows]] -= 1
        large = (p.abs() >= eps).any(0)
        kept, kept_sorted = kept + _tiles(large), kept_sorted + _tiles(large[order])
    ranks = np.unique(np.geomspace(1, vocabulary, points).round().astype(int))
    mean = (by_rank / tokens).cpu().numpy()
    blocks = -(-tokens // TILE[0]) * -(-vocabulary // TILE[1])
    facts = {"mass_below": mass / tokens, "entries_below": entries / (tokens * vocabulary)}
    facts |= {"tiles": kept / blocks, "tiles_sorted": kept_sorted / blocks}
    return dict(zip(ranks.tolist(), mean[ranks - 1].tolist(), strict=True)), facts


def _tiles(large: Tensor) -> float:
    """The number of tiles, spans of `TILE[1]` columns, in which any column is set."""
    padded = torch.nn.functional.pad(large, (0, -len(large) % TILE[1]))
    return float(padded.view(-1, TILE[1]).any(1).sum())
