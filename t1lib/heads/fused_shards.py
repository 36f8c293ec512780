"""Head `fused`: dE from chunks of tokens, and what the chunks exchange between shards of the vocabulary."""

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from t1lib.heads.fused_chunks import BLOCK, Chunks, Operands
from t1lib.heads.fused_rows import Found, finish_input
from t1lib.heads.kernels import forward, shards

ROWS = 128  # per program


class InputGradient:
    """dE (N, D), into which chunks of tokens write their rows."""

    def __init__(self, o: Operands) -> None:
        self.out = torch.zeros_like(o.e, memory_format=torch.contiguous_format)

    def add(
        self, chunks: Chunks, chunk: int, parts: int = 1, per_row: Tensor | None = None, tau: Tensor | None = None,
        even_vector: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the chunk's rows: the sums of products in its memory, completed by `finish_input`."""
        finish_input(chunks, chunk, chunks.memory["de"], self.out, parts, per_row, tau, even_vector)

    def finish(self) -> None:
        """Complete `out`; here nothing is ever pending."""


class SummedInputGradient(InputGradient):
    """dE summed over the shards in float32; a chunk's rows are all-reduced while the device computes the next chunk.

    With sequence parallelism `out` holds only this process's tokens. The rows of a chunk may belong to any process's
    tokens, so they are all-reduced there as well. Since that happens chunk by chunk, no (N, D) float32 buffer has to
    be held until the end.
    """

    def __init__(self, o: Operands) -> None:
        self._shards = o.opts.shards
        self.out = torch.zeros_like(self._shards.own(o.e), memory_format=torch.contiguous_format)
        self._pending: tuple[dist.Work, Chunks, int] | None = None

    def add(
        self, chunks: Chunks, chunk: int, parts: int = 1, per_row: Tensor | None = None, tau: Tensor | None = None,
        even_vector: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.finish()
        rows = chunks.memory["sum"]
        finish_input(chunks, chunk, chunks.memory["de"], rows, parts, per_row, tau, even_vector, packed=True)
        self._pending = dist.all_reduce(rows, group=self._shards.group, async_op=True), chunks, chunk

    def finish(self) -> None:
        if self._pending is None:
            return
        work, chunks, chunk = self._pending
        self._pending, hidden, first = None, self.out.shape[1], self._shards.rank * len(self.out)
        work.wait()
        shards.place_rows[(chunks.capacity, triton.cdiv(hidden, BLOCK))](
            chunks.memory["sum"], self.out, chunks.order, chunks.info, chunk, first if self._shards.sequence else 0,
            len(self.out), hidden, chunks.memory["sum"].stride(0), self.out.stride(0), BLOCK=BLOCK,
        )  # fmt: skip


def input_gradient(o: Operands) -> InputGradient:
    """The kind of `InputGradient` that these operands need."""
    return InputGradient(o) if o.opts.shards is None else SummedInputGradient(o)


def finished(gradient: InputGradient | None) -> Tensor | None:
    """The complete dE, or None if it is not wanted."""
    if gradient is None:
        return None
    gradient.finish()
    return gradient.out


def share_targets(chunks: Chunks, at: Tensor, offset: Tensor) -> None:
    """Send each target's logit from the shard that holds the target to all, and derive the offsets from it."""
    dist.all_reduce(at, group=chunks.operands.opts.shards.group)
    empty = torch.arange(len(at), device=at.device) >= chunks.info[0]
    torch.floor(at, out=offset).add_(forward.LEAD.value).masked_fill_(empty, forward.NEVER.value)


def combine(chunks: Chunks, chunk: int, at: Tensor, found: Found) -> None:
    """Replace the statistics of a chunk's tokens over this shard's columns by those over the whole vocabulary."""
    group, memory, rows = chunks.operands.opts.shards, chunks.memory["shares"], (triton.cdiv(chunks.capacity, ROWS),)
    mine, every = memory[:4], memory[4:]
    shards.take_rows[rows](
        found.offset, found.log_total, found.correct, found.pull, chunks.order, chunks.info, mine,
        chunk, chunks.capacity, BLOCK=ROWS,
    )  # fmt: skip
    group.gather_into(every, mine)
    shards.combine_rows[rows](
        every, at, chunks.order, chunks.info, *found, chunk, chunks.capacity, group.size, BLOCK=ROWS
    )
