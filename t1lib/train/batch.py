"""The processes that train a model together: how they find each other, compare facts, and sum tensors. And a batch of
token ids: checked against the model, divided among the processes, and split into micro-batches."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from t1lib.errors import T1Error, require, shown
from t1lib.heads import next_token_targets
from t1lib.heads.parallel import SAME, difference

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Ranks:
    """The processes of the process group, which train one model together, seen from one of them.

    Every rank must call the methods, in the same order. With a single process `sum` costs nothing.
    """

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise `T1Error` on every rank unless all have the same facts."""
        every: list[dict[str, Any]] = [{}] * self.size
        dist.all_gather_object(every, facts)
        if len(set(map(repr, every))) > 1:
            raise T1Error(f"{difference(every)}; {SAME}")

    def sum(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The sum of a tensor over ranks, computed on `device`. The result is bitwise equal on all."""
        if self.alone:
            return tensor
        total = tensor.to(device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)


def launched() -> int:
    """How many processes torchrun, or another launcher that sets its variables, started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def take_gpu() -> None:
    """With several processes, make the CUDA device of this one's local rank, if it exists, the current device. Call it
    before anything, such as weights, is allocated on the first device."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if launched() > 1 and number < torch.cuda.device_count():
        torch.cuda.set_device(number)


def join() -> None:
    """Create a process group that lasts as long as this process: of all processes that torchrun started, or of this one
    alone. It takes tensors in host memory, such as metadata, and on GPUs if there are any. Raises `T1Error` if the
    launcher's variables are incomplete."""
    size = launched()
    on_one_host = size in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if on_one_host else ():
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")  # the host's name may not resolve
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **alone)
    except ValueError as error:
        raise T1Error(f"WORLD_SIZE is {size}, but its processes cannot find each other: {error}") from None


@dataclass(frozen=True)
class Piece:
    """A micro-batch: ids (b, S) and targets (b, S). If the batch has several pieces, the sum of their losses is to be
    divided by `total`, the number of its targets that count; None: the piece is the whole batch."""

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
    shape, found = getattr(ids, "shape", None), []
    for name, given in {"input_ids": ids, "labels": batch.get("labels", ids)}.items():
        tensor = isinstance(given, Tensor)
        of = f"{given.dtype} of shape {tuple(given.shape)}" if tensor else shown(given)
        fits = tensor and given.dtype in INTEGERS and given.dim() == 2 and given.numel() > 0 and given.shape == shape
        require(fits, f"{name}: {of}; allowed: integers of shape (batch, sequence), with tokens, for labels the same")
        tokens = given.long()
        odd = tokens[((tokens < 0) | (tokens >= vocabulary)) & ((tokens != -100) | (name == "input_ids"))]
        held = f"{name} hold {odd[:1].tolist()}"
        require(odd.numel() == 0, f"{held}; allowed: 0 to {vocabulary - 1}, or -100 for a label to ignore")
        found.append(tokens)
    require(shape[1] <= positions, f"sequence of {shape[1]} tokens; the model has {positions} positions")
    targets = next_token_targets(found[1])
    require(bool((targets != -100).any()), "no label counts: all that a token is to predict are -100")
    return found[0], targets


def pieces_of(ids: Tensor, targets: Tensor, rows: int | None, device: torch.device, ranks: Ranks) -> list[Piece]:
    """This rank's share of a batch, consecutive rows, as micro-batches of at most `rows` rows. All ranks get equally
    many rows: where the batch cannot be divided evenly, the last ranks are padded with rows that have no target."""
    rows, each = rows or len(ids), -(-len(ids) // ranks.size)
    if ranks.alone and rows >= len(ids):
        return [Piece(ids.to(device), targets.to(device))]
    if not ranks.alone:
        ranks.agree({"the whole batch": digest_of({"input_ids": ids, "labels": targets})})
    total = int((targets != -100).sum())
    ids, targets = (t.tensor_split(ranks.size)[ranks.rank] for t in (ids, targets))
    missing = (0, 0, 0, each - len(ids))
    shares = pad(ids, missing).split(rows), pad(targets, missing, value=-100).split(rows)
    return [Piece(*(part.to(device) for part in parts), total) for parts in zip(*shares, strict=True)]


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Digest of names, dtypes, shapes, whether a gradient is required, and values bit by bit."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]
