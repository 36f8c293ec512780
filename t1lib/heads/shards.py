"""The vocabulary sharded over a process group: who holds which rows of the weight, and what the processes exchange."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from t1lib.heads.logits import Rows

# the older names are deprecated in PyTorch 2.13 but the only ones in earlier versions
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shards:
    """One process's view of the sharding: it holds the rows `first` … `first + rows[rank]` of the weight.

    rows        number of weight rows on each process of `group`, in rank order
    sequence    whether the tokens are sharded, too: the same number on every process, in rank order
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
        """(size · n, …): the values (n, …) of every process, in rank order."""
        every = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        self.gather_into(every, mine.contiguous())
        return every

    def gather_into(self, every: Tensor, mine: Tensor) -> None:
        """The same, into the tensor `every`; both tensors are contiguous."""
        all_gather(every, mine, group=self.group)

    def tokens(self, mine: Tensor) -> Tensor:
        """(N, …): the values of all tokens, gathered from those of each process's tokens if the tokens are sharded."""
        return self.gather(mine) if self.sequence else mine

    def flat_tokens(self, mine: Tensor) -> Tensor:
        """(N): the same for values of any shape, flattened."""
        return self.tokens(mine.flatten())

    def own(self, every: Tensor) -> Tensor:
        """The values of this process's tokens, selected from those of all tokens, (N, …)."""
        return every.chunk(self.size)[self.rank].clone() if self.sequence and len(every) else every

    def combine(self, rows: Rows, hit: Tensor) -> tuple[Rows, Tensor]:
        """Statistics over the whole vocabulary, and (n, 1) this shard's share of each token's softmax: one collective.

        rows, hit: statistics over this shard's columns, and (n, 1) whether the token's target is one of them.
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
        """The sum of dE over the shards, given this shard's part; see `InputSum`."""
        return InputSum(self, partial)


class InputSum:
    """The asynchronous sum of dE over the shards. `partial` (N, D): this shard's part, in float32 or float64."""

    def __init__(self, shards: Shards, partial: Tensor) -> None:
        self._shards, self._out, self.partial = shards, partial, partial
        self._ready, self._pending = 0, []

    def start(self, part: slice) -> None:
        """Start the sum of these rows of `partial`, which are complete; it overlaps what the device computes next.

        If the tokens are sharded, one reduce-scatter of all rows starts when the last of them are complete.
        """
        shards, rows = self._shards, self.partial[part]
        self._ready += len(rows)
        if not shards.sequence:
            self._pending.append(dist.all_reduce(rows, group=shards.group, async_op=True))
        elif self._ready == len(self.partial):
            self._out = rows.new_empty(self._ready // shards.size, *rows.shape[1:])
            self._pending.append(reduce_scatter(self._out, self.partial, group=shards.group, async_op=True))

    def result(self, dtype: torch.dtype) -> Tensor:
        """Wait for the sums; return dE (N, D), or the rows of this process's tokens if the tokens are sharded."""
        for work in self._pending:
            work.wait()
        return self._out.to(dtype)
