"""The output layer of mode `slide` with its weight on the host: loss and gradients by pieces of the vocabulary.

The softmax over the vocabulary is assembled from those of the pieces: with log-sum-exp L_p of a piece and L of the
whole, the piece holds the share P_p = exp(L_p − L) of a token's probability. Any head can process a piece, as a loss of
its own with upstream gradient g P_p. If the target is in the piece, this lacks the term g (P_p − 1) at the target,
which is added. If it is not, the token's target is an extra row of zeros, which is then removed from the log-sum-exp.
The two terms at a target have the same sign, so nothing cancels.

A piece's weight comes in once for the loss and once more for the gradients; its gradient leaves once.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from t1lib.heads import linear_cross_entropy
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.batch import Piece
from t1lib.train.narrow import wide
from t1lib.train.pipeline import Pipeline
from t1lib.train.streams import send

PIECE_BYTES = 64 * 2**20  # bytes of weight per piece
NEVER = -1e4  # bias of the extra row of zeros
IGNORED = -100


@dataclass
class _Rows:
    """Tokens of a micro-batch: hidden states (N, D), targets and whether they count (N), and the divisor of the loss;
    log-sum-exp and the target's logit (N) over the pieces so far."""

    hidden: Tensor
    target: Tensor
    valid: Tensor
    total: Tensor | float
    lse: Tensor
    logit: Tensor

    @property
    def loss(self) -> Tensor:
        return torch.where(self.valid, self.lse - self.logit, 0.0).sum() / self.total

    def gradient(self, share: Tensor) -> Tensor:
        """(N): `share` times dL / d(token's loss); 0 for tokens that do not count."""
        return torch.where(self.valid, share / self.total, 0.0)


@dataclass
class _Part:
    """The loss of one micro-batch over one piece, with its autograd graph: input (a leaf), per-token loss, log-sum-exp
    and target row in the piece (N each), and whether the target is inside the piece (N)."""

    input: Tensor
    loss: Tensor
    lse: Tensor
    target: Tensor
    inside: Tensor


class Forward(NamedTuple):
    """Result of `StreamedHead.forward`: hidden states' shape and tokens of each micro-batch, and the parts by piece."""

    shapes: list[torch.Size]
    tokens: list[_Rows]
    parts: dict[int, list[_Part]]

    @property
    def losses(self) -> list[Tensor]:
        """Each micro-batch's share of the loss."""
        return [t.loss for t in self.tokens]


class StreamedHead:
    """Loss and gradients for `weight` (V, D) on the host; its gradient goes to `grad`, also on the host (None: frozen).

    rows      vocabulary rows per piece (default: `PIECE_BYTES` of weight)
    options   of `linear_cross_entropy` for all pieces: head, softcap, workspace, …
    """

    def __init__(
        self, weight: Tensor, grad: Tensor | None, pipeline: Pipeline, options: dict[str, Any],
        trace: Callable[[], Trace | NoTrace], rows: int | None = None,
    ) -> None:  # fmt: skip
        self.weight, self.grad, self._pipeline, self._options, self._trace = weight, grad, pipeline, options, trace
        self._softcap = softcap = options.get("softcap")
        self._never = softcap * math.tanh(NEVER / softcap) if softcap else NEVER  # the extra row's logit
        rows = rows or max(1, PIECE_BYTES // (weight.shape[1] * weight.element_size()))
        self._spans = [(a, min(a + rows, len(weight))) for a in range(0, len(weight), rows)]
        shape, device = (min(rows, len(weight)) + 1, weight.shape[1]), pipeline.device
        self._slots = [torch.zeros(shape, dtype=weight.dtype, device=device) for _ in range(2)]
        self._grads = [torch.zeros_like(slot) for slot in self._slots if grad is not None]
        self._filled: list[torch.cuda.Event | None] = [None] * 2
        self._freed: list[torch.cuda.Event | None] = [None] * 2
        self._left: list[torch.cuda.Event | None] = [None] * 2

    # -- pieces of the weight --------------------------------------------------------------------------------------

    def _visit(self, order: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield each piece in this order with its weight and the extra row of zeros, while the next one comes in."""
        for piece in order[:2]:
            self._fetch(piece)
        for at, piece in enumerate(order):
            slot = piece % 2
            self._pipeline.compute.after(self._filled[slot])
            # `.data`, so that later copies into the slot do not change the view's version
            yield piece, self._slots[slot].data[: self._size(piece) + 1]
            self._freed[slot] = self._pipeline.compute.mark()
            if at + 2 < len(order):
                self._fetch(order[at + 2])

    def _size(self, piece: int) -> int:
        start, stop = self._spans[piece]
        return stop - start

    def _fetch(self, piece: int) -> None:
        slot, lane, size = piece % 2, self._pipeline.inward, self._size(piece)
        lane.after(self._freed[slot])
        with lane.active(), self._trace().span("in", "head", -1, lane.stream):
            self._slots[slot][:size].copy_(self.weight[slice(*self._spans[piece])], non_blocking=True)
            self._slots[slot][size].zero_()
        self._filled[slot] = lane.mark()

    def _send(self, piece: int) -> None:
        slot, lane, size = piece % 2, self._pipeline.outward, self._size(piece)
        lane.after(self._pipeline.compute.mark())
        with lane.active(), self._trace().span("out", "head", -1, lane.stream):
            self.grad[slice(*self._spans[piece])].copy_(self._grads[slot][:size], non_blocking=True)
        self._left[slot] = lane.mark()

    # -- the loss --------------------------------------------------------------------------------------------------

    def forward(self, hidden: list[Tensor], pieces: list[Piece]) -> "Forward":
        """The loss of micro-batches `hidden`, (B, S, D) each, and, if grad is enabled, what `gradients` needs."""
        found = Forward([h.shape for h in hidden], self._tokens(hidden, pieces), {})
        for piece, weight in self._visit(list(range(len(self._spans)))):
            parts = found.parts.setdefault(piece, [])
            for t in found.tokens:
                part, logprob = self._piece_loss(piece, weight, t)
                without = part.lse + torch.log1p(-torch.exp(self._never - part.lse))  # without the extra row
                t.lse = torch.logaddexp(t.lse, without)
                t.logit = torch.where(part.inside, logprob + part.lse, t.logit)
                if torch.is_grad_enabled():
                    parts.append(part)
        return found

    def gradients(
        self, found: "Forward", take: Callable[[int, int, Tensor], None] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients of the hidden states, in float32 or wider, and norms of the weight gradient's pieces.

        take(start, stop, grad) is called with each piece's gradient (stop − start, D) on the device before its norm is
        computed.
        """
        made = [torch.zeros_like(t.hidden, dtype=t.lse.dtype) for t in found.tokens]
        norms = []
        for piece, weight in self._visit(list(reversed(range(len(self._spans))))):
            slot = piece % 2
            if self.grad is not None:
                self._pipeline.compute.after(self._left[slot])
                self._grads[slot].zero_()
            for t, out, part in zip(found.tokens, made, found.parts.pop(piece), strict=True):
                self._backward(piece, weight, t, part, out)
            if self.grad is not None:
                rows = self._grads[slot][: self._size(piece)]
                if take is not None:
                    take(*self._spans[piece], rows)
                norms.append(torch.linalg.vector_norm(rows, dtype=wide(rows.dtype)))
                self._send(piece)
        return [m.view(shape) for m, shape in zip(made, found.shapes, strict=True)], norms

    def _tokens(self, hidden: list[Tensor], pieces: list[Piece]) -> list[_Rows]:
        found = []
        for x, piece in zip(hidden, pieces, strict=True):
            x = x.detach().reshape(-1, x.shape[-1])
            target = send(piece.targets.reshape(-1), x.device)
            valid = target != IGNORED
            total = valid.sum() if piece.total is None else piece.total or math.nan
            zeros = torch.zeros(len(x), dtype=wide(x.dtype), device=x.device)
            found.append(_Rows(x, target, valid, total, zeros - math.inf, zeros))
        return found

    def _piece_loss(self, piece: int, weight: Tensor, t: _Rows) -> tuple[_Part, Tensor]:
        start, stop = self._spans[piece]
        inside = (t.target >= start) & (t.target < stop)
        target = torch.where(inside, t.target - start, stop - start)
        bias = torch.zeros(stop - start + 1, dtype=weight.dtype, device=weight.device)
        bias[-1:].fill_(NEVER)  # assigning by index would make the host wait
        x, grad = t.hidden.detach(), torch.is_grad_enabled()
        x.requires_grad_(grad)
        weight.requires_grad_(grad and self.grad is not None)
        if weight.requires_grad:
            weight.grad = self._grads[piece % 2][: stop - start + 1]
        loss, stats = linear_cross_entropy(
            x, weight, target.masked_fill(~t.valid, IGNORED), linear_bias=bias, reduction="none", return_stats=True,
            **self._options,
        )  # fmt: skip
        lse = torch.where(t.valid, stats.lse, 0.0)
        return _Part(x, loss, lse, target, inside), stats.logprob

    def _backward(self, piece: int, weight: Tensor, t: _Rows, part: _Part, out: Tensor) -> None:
        """Add a piece's contribution to the gradients of its weight and of the hidden states (`out`)."""
        share = part.lse - t.lse
        torch.autograd.backward(part.loss, t.gradient(share.exp()))
        slope = 1 - (t.logit / self._softcap) ** 2 if self._softcap else 1
        lacking = torch.where(part.inside, t.gradient(share.expm1()) * slope, 0.0)[:, None]
        with torch.enable_grad():
            picked = F.embedding(part.target, weight.requires_grad_(self.grad is not None))
        out += part.input.grad
        out += lacking * picked.detach()
        if self.grad is not None:
            weight.grad = self._grads[piece % 2][: len(weight)]
            torch.autograd.backward(picked, (lacking * t.hidden).to(picked.dtype))

    def device_tensors(self) -> list[Tensor]:
        return [*self._slots, *self._grads]
