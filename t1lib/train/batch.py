"""A batch of token ids: checked against the model, and split into micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from t1lib.errors import T1Error, require
from t1lib.heads import next_token_targets
from t1lib.train.ranks import Ranks

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Piece:
    """A micro-batch: ids (b, S) and targets (b, S). If the batch has several pieces, the sum of their losses is to be
    divided by `total`; None: the piece is the whole batch."""

    ids: Tensor
    targets: Tensor
    total: int | None = None


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
    require(ids.shape[1] <= positions, f"sequence of {ids.shape[1]} tokens; the model has {positions} positions")
    _check_tokens("input_ids", ids, vocabulary, "the model's vocabulary")
    labels = batch.get("labels", ids)
    _check_tokens("labels", labels, vocabulary, "or -100 for a token to ignore", ignored=-100)
    require(labels.shape == ids.shape, f"labels {tuple(labels.shape)} do not match input_ids {tuple(ids.shape)}")
    targets = next_token_targets(labels.long())
    require(bool((targets != -100).any()), "no label counts: all that a token is to predict are -100")
    return ids.long(), targets


def _check_tokens(name: str, tokens: Tensor, vocabulary: int, of: str, ignored: int | None = None) -> None:
    kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
    require(kind in INTEGERS, f"{name} of {kind}; allowed: a tensor of integers")
    tokens = tokens.long()
    odd = tokens[((tokens < 0) | (tokens >= vocabulary)) & (tokens != ignored)]
    if odd.numel():
        raise T1Error(f"{name} hold {int(odd[0])}; allowed: 0 to {vocabulary - 1}, {of}")


def pieces_of(ids: Tensor, targets: Tensor, rows: int | None, device: torch.device, ranks: Ranks) -> list[Piece]:
    """This rank's share of a batch, consecutive rows, as micro-batches of at most `rows` rows. All ranks have as many
    rows: the last ones are filled up with rows that have no target."""
    rows, each = rows or len(ids), -(-len(ids) // ranks.size)
    if ranks.alone and rows >= len(ids):
        return [Piece(ids.to(device), targets.to(device))]
    total = int((targets != -100).sum())
    ids, targets = (t.tensor_split(ranks.size)[ranks.rank] for t in (ids, targets))
    missing = (0, 0, 0, each - len(ids))
    shares = pad(ids, missing).split(rows), pad(targets, missing, value=-100).split(rows)
    return [Piece(*(part.to(device) for part in parts), total) for parts in zip(*shares, strict=True)]
