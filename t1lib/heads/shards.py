"""The vocabulary dealt to the processes of a group: who holds which rows of the weight, and what they exchange."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from t1lib.heads.logits import Rows

# the older names, deprecated in PyTorch 2.13, are the only ones before it
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shards:
    """One process's view: rows `first` … `first + rows[rank]` of the weight are here.

    rows        of the weight that each process of `group` holds, in the order of ranks
    sequence    the tokens are dealt to the processes, too: as many to each, in the order of ranks
    """

    group: ProcessGroup
    rank: int
    rows: tuple[int, ...]
    sequence: bool

    @cached_property
    def first(self) -> int:
        return sum(self.rows[: self.rank])

    @cached_property
    def vocab(self) -> int:
        """Classes in the whole vocabulary."""
        return sum(self.rows)

    @property
    def size(self) -> int:
        return len(self.rows)

    def gather(self, mine: Tensor) -> Tensor:
        """(size · n, …) from (n, …) of each process."""
        every = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        self.gather_into(every, mine.contiguous())
        return every

    def gather_into(self, every: Tensor, mine: Tensor) -> None:
        """The same into given memory; both are contiguous."""
        all_gather(every, mine, group=self.group)

    def tokens(self, mine: Tensor) -> Tensor:
        """(N, …): all tokens' values, from those of this process's tokens where they are dealt."""
        return self.gather(mine) if self.sequence else mine

    def flat_tokens(self, mine: Tensor) -> Tensor:
        """(N): the same of values of any shape."""
        return self.tokens(mine.flatten())

    def own(self, every: Tensor) -> Tensor:
        """The values of this process's tokens among those of all, (N, …)."""
        return every.chunk(self.size)[self.rank] if self.sequence and len(every) else every

    def combine(self, rows: Rows, hit: Tensor) -> tuple[Rows, Tensor]:
        """Statistics over the whole vocabulary, and (n, 1) how much of a token's softmax is here: one collective.

        rows, hit: statistics over the columns here, and (n, 1) whether the token's target is one of them.
        """
        mine = torch.cat([rows.top, rows.total, torch.where(hit, rows.at_target, 0.0), rows.pull], 1)
        top, total, at_target, pull = self.gather(mine).view(self.size, -1, 4).unbind(-1)
        highest = top.amax(0)
        shares = total * torch.exp(top - highest)
        whole = shares.sum(0)
        columns = (highest, whole, at_target.sum(0), pull.sum(0), shares[self.rank] / whole)
        *combined, share = (x[:, None] for x in columns)
        return Rows(*combined), share

    def sum_of(self, partial: Tensor) -> "InputSum":
        """dE from this shard's part of it."""
        return InputSum(self, partial)


class InputSum:
    """dE on its way to the sum over the shards. `partial` (N, D): this shard's part, in float32 or float64."""

    def __init__(self, shards: Shards, partial: Tensor) -> None:
        self._shards, self._out, self.partial = shards, partial, partial
        self._ready, self._pending = 0, []

    def start(self, part: slice) -> None:
        """These rows of `partial` are complete: their sum begins, beside what the device computes next.

        Where each process keeps its own tokens alone, it begins with the last of them.
        """
        shards, rows = self._shards, self.partial[part]
        self._ready += len(rows)
        if not shards.sequence:
            self._pending.append(dist.all_reduce(rows, group=shards.group, async_op=True))
        elif self._ready == len(self.partial):
            self._out = rows.new_empty(self._ready // shards.size, *rows.shape[1:])
            self._pending.append(reduce_scatter(self._out, self.partial, group=shards.group, async_op=True))

    def result(self, dtype: torch.dtype) -> Tensor:
        """(N, D), or the rows of this process's tokens where they are dealt."""
        for work in self._pending:
            work.wait()
        return self._out.to(dtype)
