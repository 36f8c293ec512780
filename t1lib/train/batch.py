"""A batch of token ids: checked against the model, and split into micro-batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import T1Error, require
from t1lib.heads import next_token_targets

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Piece:
    """A micro-batch: ids (b, S) and targets (b, S). If the batch has several pieces, the sum of their losses is to be
    divided by `total`; None: the piece is the whole batch."""

    ids: Tensor
    targets: Tensor
    total: int | None = None

    def to(self, device: torch.device) -> "Piece":
        return Piece(self.ids.to(device), self.targets.to(device), self.total)


def check(batch: dict[str, Tensor], vocabulary: int, positions: int) -> tuple[Tensor, Tensor]:
    """(input_ids, targets) of a batch, (B, S) each. Raises `T1Error` if the batch does not fit the model."""
    known = isinstance(batch, Mapping)
    require(known, f"a batch of type {type(batch).__name__}; allowed: {{'input_ids': (B, S), 'labels': (B, S)}}")
    unknown = ", ".join(map(repr, batch.keys() - {"input_ids", "labels"}))
    require(not unknown, f"a batch has {unknown}; allowed: input_ids, and labels with -100 where no token counts")
    ids = batch.get("input_ids")
    found = tuple(ids.shape) if isinstance(ids, Tensor) else ids
    whole = isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() > 0
    require(whole, f"a batch needs `input_ids` of shape (batch, sequence), with tokens; found {found}")
    for name, tokens in batch.items():
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        require(kind in INTEGERS, f"{name} of {kind}; allowed: a tensor of integers")
    ids = ids.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise T1Error(f"input_ids hold {bad}; allowed: 0 to {vocabulary - 1}, the model's vocabulary")
    require(ids.shape[1] <= positions, f"sequence of {ids.shape[1]} tokens; the model has {positions} positions")
    labels = batch.get("labels", ids).long()
    require(labels.shape == ids.shape, f"labels {tuple(labels.shape)} do not match input_ids {tuple(ids.shape)}")
    valid = labels[labels != -100]
    if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= vocabulary):
        bad = int(valid.min()) if int(valid.min()) < 0 else int(valid.max())
        raise T1Error(f"labels hold {bad}; allowed: 0 to {vocabulary - 1}, or -100 for a token to ignore")
    targets = next_token_targets(labels)
    require(bool((targets != -100).any()), "no label counts: all that a token is to predict are -100")
    return ids, targets


def pieces_of(
    ids: Tensor, targets: Tensor, rows: int | None, width: int | None = None, total: int | None = None
) -> list[Piece]:
    """Split a batch into micro-batches of at most `rows` rows.

    width   values per token that the loss averages over; None: it averages over the tokens with a target
    total   how many values (or such tokens) the whole batch has, if other ranks hold more of it
    """
    rows = rows or len(ids)
    if total is None and rows >= len(ids):
        return [Piece(ids, targets)]
    total = counted(targets, width) if total is None else total
    return [Piece(*part, total) for part in zip(ids.split(rows), targets.split(rows), strict=True)]


def counted(targets: Tensor, width: int | None) -> int:
    """How many values a batch's loss averages over; see `pieces_of`."""
    return int((targets != -100).sum()) if width is None else targets.numel() * width


def dealt(ids: Tensor, targets: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The rows of one of `size` ranks: consecutive rows in the batch's order, the same number on every rank.

    If the rows do not divide evenly, the last ranks are padded with a row that has no target.
    """
    each = -(-len(ids) // size)
    ids, targets = (t.tensor_split(size)[rank] for t in (ids, targets))
    missing = each - len(ids)
    filling = ids.new_zeros(missing, ids.shape[1]), targets.new_full((missing, ids.shape[1]), -100)
    return torch.cat([ids, filling[0]]), torch.cat([targets, filling[1]])


def loss_in_pieces(loss: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, targets: Tensor, rows: int) -> Tensor:
    """The mean loss of hidden states (B, S, D), `rows` rows at a time. The gradients of a piece are made together with
    its loss, so that only its own logits exist; those of parameters are added to their `grad` at once.

    loss   the sum of the losses of some rows, given their targets
    """
    return _InPieces.apply(hidden, loss, targets, rows)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Any, targets: Tensor, rows: int) -> Tensor:
        count, total, grads = (targets != -100).sum(), hidden.new_zeros((), dtype=torch.float32), []
        for x, y in zip(hidden.split(rows), targets.split(rows), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                part = loss(x, y) / count
                part.backward()
            total += part.detach()
            grads.append(x.grad)
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.saved_tensors[0] * grad, None, None, None
