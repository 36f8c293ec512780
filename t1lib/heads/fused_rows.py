"""Head `fused`: launches of the kernels that work once per token or once per target."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from t1lib.heads.fused_chunks import BLOCK, Chunks, Frequent, Operands, Order, tile
from t1lib.heads.fused_memory import wrap
from t1lib.heads.kernels import rows, targets


class Found(NamedTuple):
    """Statistics of all tokens, (N) each, in the tokens' original order; 0 at ignored ones.

    lse = ln 2 · (offset + log_total).
    """

    offset: Tensor
    log_total: Tensor
    logprob: Tensor
    correct: Tensor
    pull: Tensor

    @property
    def lse(self) -> Tensor:
        return (self.offset + self.log_total) * rows.LN2.value


class Factors(NamedTuple):
    """Factors of the gradient's equation (`logits`), (N) float32 each: A without its z-loss part, B, E, and r."""

    softmax: Tensor
    target: Tensor
    even: Tensor
    token: Tensor


def finish_rows(
    chunks: Chunks, chunk: int, splits: int, parts: Tensor, at: Tensor, offset: Tensor, found: Found
) -> None:
    """Combine a chunk's sums over the parts of the vocabulary, and write its tokens' statistics to `found`."""
    total, top, pull = parts
    rows.finish_rows[(chunks.capacity,)](
        total, top, pull, at, offset, chunks.order, chunks.info, *found, chunk, chunks.capacity, splits,
        SPLITS=triton.next_power_of_2(splits), PULL=bool(chunks.operands.opts.label_smoothing),
    )  # fmt: skip


def finish_input(
    chunks: Chunks, chunk: int, de: Tensor, out: Tensor, parts: int, per_row: Tensor | None, tau: Tensor | None,
    even_vector: Tensor | None, packed: bool = False,
) -> None:  # fmt: skip
    """Write a chunk's dE to the tokens' own rows of `out`; per_row (2, capacity): scale and even share.

    `packed`: write it to the first rows of `out` instead, in the chunk's order.
    """
    o = chunks.operands
    scale, even = (None,) * 2 if per_row is None else per_row
    rows.finish_input_gradient[(chunks.capacity, triton.cdiv(o.hidden, BLOCK))](
        de, out, o.w, chunks.order, chunks.info, chunks.target, scale, even, tau, even_vector,
        chunk, chunks.capacity, o.hidden, parts, de.stride(0), out.stride(0), o.w.stride(0),
        BLOCK=BLOCK, SCALED=per_row is not None, EVEN=even_vector is not None, PACKED=packed,
    )  # fmt: skip


def sum_of_rows(
    x: Tensor, info: Tensor, chunk: int, factor: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """(columns) float32: Σ factor_i x[i] over the chunk's rows.

    With `onto`, a vector, the sums are added to it in place. Otherwise a narrow x is summed in parts, so that many
    programs share the work.
    """
    columns = x.shape[1]
    parts = 1 if onto is not None else max(1, min(64, 128 * 1024 // columns))
    out = torch.empty(parts, columns, device=x.device) if onto is None else onto
    rows.sum_rows[(triton.cdiv(columns, 256), parts)](
        x, factor, out, info, chunk, columns, *x.stride(),
        BLOCK=256, HEIGHT=16, WEIGHED=factor is not None, ADD=onto is not None, num_warps=2,
    )  # fmt: skip
    return out.sum(0) if onto is None else out


def scale_rows(
    chunks: Chunks, found: Found, f: Factors, z: Tensor, room: int, tau: Tensor, chunk: int,
    frequent: Frequent | None,
) -> None:  # fmt: skip
    """Turn a chunk's exponentials into gradients, up to a factor per row (`kernels.rows.scale_rows`)."""
    o, opts = chunks.operands, chunks.operands.opts
    copies, factors, per_row = (chunks.memory.get(name) for name in ("columns", "factors", "per_row"))
    columns = (None, None, None) if frequent is None else (frequent.target, frequent.number, copies)
    rows.scale_rows[(chunks.capacity,)](
        z, chunks.x, found.offset, found.log_total, found.logprob, chunks.order, chunks.info, chunks.target,
        f.token, f.target, f.softmax, f.even, *columns, factors, *per_row, tau,
        chunk, chunks.capacity, o.hidden, z.shape[1], room, wrap(opts.vocab, z.shape[1], room),
        z.stride(0), chunks.x.stride(0), 0 if copies is None else copies.stride(0), opts.softcap or 0.0, opts.z_loss,
        BLOCK=BLOCK, DW=chunks.scaled, DB=chunks.scaled and o.b is not None, SOFTCAP=opts.softcap is not None,
        Z_LOSS=bool(opts.z_loss), EVEN=bool(opts.label_smoothing),
    )  # fmt: skip


def add_frequent(chunks: Chunks, chunk: int, h: Frequent, even_sum: Tensor | None) -> None:
    """Add a chunk's contribution to the frequent targets' rows of dW."""
    o, c, tma = chunks.operands, chunks, chunks.operands.device.tma
    columns = c.memory["columns"]
    m, n = (64, 128) if o.e.is_cuda else (16, 32)
    height = h.target.shape[0]
    targets.frequent_rows[(triton.cdiv(height, m), triton.cdiv(o.hidden, n))](
        tile(columns, o.tiles.k, m, tma), tile(c.x, o.tiles.k, n, tma), h.sums, h.target, h.number, even_sum,
        o.opts.local_class_weight, c.info, chunk, c.capacity, o.hidden, height, c.x.shape[0],
        columns.stride(0), c.x.stride(0), h.sums.stride(0),
        M=m, N=n, K=o.tiles.k, EVEN=even_sum is not None, WEIGHTED=o.opts.class_weight is not None, TMA=tma,
        PRECISION=o.precision, num_warps=4, num_stages=4,
    )  # fmt: skip


def add_targets(
    o: Operands, tokens: Order, tau: Tensor, frequent: Frequent | None, dw: Tensor | None, db: Tensor | None
) -> None:
    """After all chunks, add the targets' own terms to dW and dBias, rounded once."""
    sums, slot = (None, None) if frequent is None else (frequent.sums, frequent.slot)
    targets.target_rows[(len(tokens.key), 1 if dw is None else triton.cdiv(o.hidden, BLOCK))](
        dw, db, sums, o.e, tokens.order, tokens.key, tokens.segment_end, tau, slot, tokens.number,
        o.opts.vocab, o.hidden, *o.e.stride(), *(0 if m is None else m.stride(0) for m in (sums, dw)),
        HEIGHT=4, BLOCK=BLOCK, DW=dw is not None, DB=db is not None, num_warps=4,
    )  # fmt: skip
