"""From a batch to its loss and gradients, one piece at a time if it is split into micro-batches."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.heads import linear_cross_entropy
from t1lib.measure.timing import NoTrace, PhaseTimer, Trace
from t1lib.train.batch import Piece, check, pieces_of
from t1lib.train.models import Parts
from t1lib.train.streams import send


class Losses:
    """The part of a trainer that computes losses and gradients."""

    model: PreTrainedModel
    parts: Parts
    device: torch.device
    loss: str
    head: str
    head_options: dict[str, Any]
    micro_batch: int | None
    trace: Trace | NoTrace
    closed: bool
    _in_backward: bool

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> float:
        """The batch's loss, without training on it, and without dropout."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            return float(sum(self._losses(self._pieces(batch), PhaseTimer(self.device))))
        finally:
            for module in training:
                module.training = True

    def _pieces(self, batch: dict[str, Tensor]) -> list[Piece]:
        return pieces_of(*self._checked(batch), self.micro_batch, self._width)

    def _checked(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(input_ids, targets) of a batch, checked to fit the model."""
        require(not self.closed, "the trainer was closed: make another one")
        return check(batch, self.parts.embed.num_embeddings, self.model.config.max_position_embeddings)

    @property
    def _width(self) -> int | None:
        return self.model.config.hidden_size if self.loss == "mean_square" else None

    def _losses(self, pieces: list[Piece], timer: PhaseTimer) -> Iterator[Tensor]:
        """Each piece's share of the loss."""
        for piece in pieces:
            hidden = self._hidden(self._embed(piece))
            timer.mark("forward")
            yield self._loss(hidden, piece, timer)

    def _backward(self, pieces: list[Piece], timer: PhaseTimer) -> Tensor:
        """Compute the gradients of the batch's loss, and return the loss. The embedding's come last, piece by piece.

        Mode `slide` does the same, so that a weight shared by embedding and head sums its gradients in the same order.
        """
        total, embeddings = torch.zeros((), device=self.device), []
        for piece in pieces:
            embedded = self._embed(piece)
            leaf = embedded.detach().requires_grad_(embedded.requires_grad)
            embeddings.append((embedded, leaf))
            hidden = self._hidden(leaf)
            timer.mark("forward")
            if hidden.requires_grad:
                hidden.register_hook(lambda _: timer.mark("head_backward"))
            loss = self._loss(hidden, piece, timer)
            total += self._back(loss)
            self.trace.end("compute", "backward", 0)
            timer.mark("backward")
        self._embeddings_backward(embeddings)
        timer.mark("backward")
        return total

    def _back(self, loss: Tensor) -> Tensor:
        """Run the backward of a piece's loss, and return the loss."""
        self._in_backward = True
        try:
            loss.backward()
        finally:
            self._in_backward = False
        return loss.detach()

    def _embeddings_backward(self, embeddings: list[tuple[Tensor, Tensor]]) -> None:
        for embedded, leaf in embeddings:
            if embedded.requires_grad:
                embedded.backward(leaf.grad)

    def _embed(self, piece: Piece) -> Tensor:
        embed = self.parts.embed
        return send(embed(send(piece.ids, embed.weight.device)), self.device)

    def _hidden(self, embedded: Tensor) -> Tensor:
        """The model's output before the head: the last layer's output after the norm."""
        return self.parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def _loss(self, hidden: Tensor, piece: Piece, timer: PhaseTimer) -> Tensor:
        """The piece's share of the batch's loss."""
        reduction = "mean" if piece.total is None else "sum"
        if self.loss == "mean_square":
            squares = hidden.float().pow(2)
            loss = squares.mean() if piece.total is None else squares.sum()
        else:
            head = self.parts.head
            loss = linear_cross_entropy(
                hidden, head.weight, send(piece.targets, self.device), head=self.head, linear_bias=head.bias,
                softcap=self.parts.softcap, reduction=reduction, **self.head_options,
            )  # fmt: skip
        timer.mark("head_forward")
        return loss if piece.total is None else loss / (piece.total or math.nan)
