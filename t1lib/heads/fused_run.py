"""Head `fused` on a device: pack chunks of tokens, and launch the kernels that compute loss and gradients of each."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from t1lib.heads import fused_launch as launch
from t1lib.heads import fused_shards
from t1lib.heads.contract import Options
from t1lib.heads.fused_chunks import Chunks, Frequent, Operands, Order
from t1lib.heads.fused_memory import allocate, early_layout, late_layout, lent_layout, lent_panels
from t1lib.heads.fused_plan import Early, Late, Lent, Shape
from t1lib.heads.fused_rows import (
    Factors,
    Found,
    add_frequent,
    add_targets,
    finish_rows,
    scale_rows,
    sum_of_rows,
)
from t1lib.heads.fused_shards import InputGradient, finished, input_gradient
from t1lib.heads.kernels import rows


def nothing_found(like: Tensor) -> Found:
    """Zeroed statistics to be filled in, (N) each."""
    offset, log_total, logprob, pull = (torch.zeros(len(like), device=like.device) for _ in range(4))
    return Found(offset, log_total, logprob, torch.zeros(len(like), dtype=torch.bool, device=like.device), pull)


class Sweep:
    """The forward over one chunk after another. It holds the buffers for partial sums and the resulting statistics."""

    def __init__(self, chunks: Chunks, found: Found) -> None:
        self.chunks, self.found = chunks, found
        self.parts = chunks.memory["parts"].view(3, -1)
        self.at, self.offset = chunks.target_logits()
        if chunks.operands.opts.shards is not None:
            fused_shards.share_targets(chunks, self.at, self.offset)

    def run(self, chunk: int, splits: int, z: Tensor | None, room: int = 0) -> None:
        """Compute a packed chunk's statistics, and write its exponentials to z if that is given (`tiles.place`)."""
        c = self.chunks
        for redo in (False, True):  # in the second launch, programs without an overflow end at once
            launch.exponentials(c, chunk, splits, z, room, self.offset, self.parts, redo)
        finish_rows(c, chunk, splits, self.parts, self.at, self.offset, self.found)
        if c.operands.opts.shards is not None:
            fused_shards.combine(c, chunk, self.at, self.found)


def factors_of(opts: Options, upstream: Tensor | float) -> Factors:
    """The gradient's factors, given dL / d(what the head returns)."""
    r = opts.token_gradient(upstream).to(torch.float32)
    weighted = r if opts.target_weight is None else r * opts.target_weight
    if not opts.label_smoothing:
        return Factors(weighted, weighted, torch.zeros_like(r), r)
    target, even = weighted * (1.0 - opts.label_smoothing), r * (opts.label_smoothing / opts.classes)
    return Factors(target + even * opts.class_sum, target, even, r)


def sum_of_all_rows(x: Tensor, factor: Tensor) -> Tensor:
    """(columns) float32: Σ factor_i x[i]."""
    one_chunk = torch.full((4,), len(x), dtype=torch.int32, device=x.device)
    return sum_of_rows(x, one_chunk, 0, factor)


def class_sums(o: Operands) -> Tensor:
    """(D) float32: Σ_v c_v w_v over the weight rows on this process; dE needs it under label smoothing."""
    c = o.opts.local_class_weight
    return sum_of_all_rows(o.w, torch.ones(o.opts.vocab, device=o.w.device) if c is None else c)


def finish_bias(db: Tensor, f: Factors, opts: Options) -> Tensor:
    """Subtract label smoothing's even share from dL / d(bias); it is the same for all tokens up to a factor."""
    if not opts.label_smoothing:
        return db
    even = f.even.sum()
    return db - even if opts.class_weight is None else db - even * opts.local_class_weight


class Made(NamedTuple):
    """The gradients being computed, None where not wanted; terms of label smoothing; tau as in `kernels.rows`.

    frequent: finds the frequent targets on its first call and returns the same ones afterwards. The first call comes
    after the launch of the first chunk's exponentials, so that the host's part of the search overlaps them.
    """

    de: InputGradient | None
    dw: Tensor | None
    db: Tensor | None
    even_vector: Tensor | None
    even_sum: Tensor | None
    frequent: Callable[[], Frequent | None]
    tau: Tensor


def lent(sweep: Sweep, plan: Lent, f: Factors, made: Made) -> None:
    """Process the first chunk, with its exponentials in memory that dW lends (see `Lent`).

    Panels of columns are multiplied one after another. Each lies where the next panel's rows of dW will be, except the
    last, which is copied to the workspace first.
    """
    c, o = sweep.chunks, sweep.chunks.operands
    z, room = lent_panels(made.dw, plan, o.compute)
    c.pack(0)
    sweep.run(0, plan.work.splits, z, room)
    scale_rows(c, sweep.found, f, z, room, made.tau, 0, made.frequent())
    c.memory["z"].copy_(z[: plan.capacity])
    for panel, first in enumerate(range(0, o.opts.vocab, plan.width), start=1):
        last = first + plan.width >= o.opts.vocab
        part = c.memory["z"] if last else z[panel * room : panel * room + plan.capacity]
        part = part[:, : o.opts.vocab - first]
        multiply(c, 0, part, first, made, plan.work.parts, add_de=first > 0, add_dw=False, even_sum=made.even_sum)
    finish_chunk(c, 0, made, plan.work.parts, made.even_sum)
    if made.de is not None:
        made.de.finish()  # the other chunks reuse the memory that a pending sum reads


def multiply(
    c: Chunks, chunk: int, z: Tensor, first: int, made: Made, parts: int, *, add_de: bool, add_dw: bool,
    even_sum: Tensor | None,
) -> None:  # fmt: skip
    """Compute the chunk's sums for dE and dW, and dBias, from the exponentials z of the columns from `first` on."""
    de = None if made.de is None else c.memory["de"]
    db_alone = made.db is not None and made.dw is None
    if made.de is not None or made.dw is not None:
        db = None if db_alone else made.db
        launch.products_of(
            c, chunk, z, first, de, made.dw, db=db, parts=parts, add_de=add_de, add_dw=add_dw, even_sum=even_sum
        )
    if db_alone:
        sum_of_rows(z, c.info, chunk, c.memory["per_row"][0], onto=made.db[first : first + z.shape[1]])


def finish_chunk(c: Chunks, chunk: int, made: Made, parts: int, even_sum: Tensor | None) -> None:
    """After the products: write dE to its tokens, and add the chunk to the frequent targets' rows of dW."""
    if made.de is not None:
        made.de.add(c, chunk, parts, c.memory["per_row"], made.tau, made.even_vector)
    frequent = made.frequent()
    if frequent is not None:
        add_frequent(c, chunk, frequent, even_sum)


def early(
    o: Operands, shape: Shape, plan: Early, needs: tuple[bool, bool, bool], w_like: Tensor, b_like: Tensor | None
) -> tuple[Found, tuple[Tensor | None, ...]]:
    """Statistics, and gradients for an upstream gradient of 1, one chunk of tokens after another: three products."""
    opts, like = o.opts, o.e
    memory, memory_lent = allocate(like.device, early_layout(shape, plan), lent_layout(shape, plan.lent))
    tokens = Order(opts, by_target=needs[1] or needs[2])
    found, f, tau = nothing_found(like), factors_of(opts, 1.0), torch.empty(len(like), device=like.device)
    made = Made(
        de=input_gradient(o) if needs[0] else None,
        dw=torch.empty_like(w_like, memory_format=torch.contiguous_format) if needs[1] else None,
        db=torch.zeros(opts.vocab, device=like.device) if needs[2] else None,
        even_vector=class_sums(o) if opts.label_smoothing else None,
        even_sum=sum_of_all_rows(o.e, f.even) if opts.label_smoothing else None,
        frequent=cache(lambda: Frequent(tokens, opts.vocab, memory["sums"]) if needs[1] else None),
        tau=tau,
    )
    start = 0
    if plan.lent:
        start = plan.lent.capacity
        lent(Sweep(Chunks(o, tokens, memory_lent, 0, start), found), plan.lent, f, made)
    if plan.chunks:
        sweep = Sweep(Chunks(o, tokens, memory, start), found)
        rest = made._replace(tau=tau[start:])
        for chunk in range(plan.chunks):
            c, z, work, first = sweep.chunks, memory["z"], plan.work(chunk), start + chunk == 0
            even_sum = made.even_sum if first else None
            c.pack(chunk)
            sweep.run(chunk, work.splits, z)
            scale_rows(c, found, f, z, 0, rest.tau, chunk, made.frequent())
            multiply(c, chunk, z, 0, rest, work.parts, add_de=False, add_dw=not first, even_sum=even_sum)
            finish_chunk(c, chunk, rest, work.parts, even_sum)
    if needs[1] or needs[2]:
        add_targets(o, tokens, tau, made.frequent(), made.dw, made.db)
    db = finish_bias(made.db, f, opts).to(b_like.dtype) if needs[2] else None
    return found, (finished(made.de), made.dw, db)


def loss_only(o: Operands, shape: Shape, plan: Late) -> Found:
    """Statistics of all tokens: one product."""
    (memory,) = allocate(o.e.device, late_layout(shape, plan))
    chunks = Chunks(o, Order(o.opts, by_target=False), memory)
    sweep = Sweep(chunks, nothing_found(o.e))
    for chunk in range(plan.chunks):
        chunks.pack(chunk)
        sweep.run(chunk, plan.splits, None)
    return sweep.found


def late(
    o: Operands, shape: Shape, plan: Late, needs: tuple[bool, bool, bool], offset: Tensor, log_total: Tensor,
    upstream: Tensor, w_like: Tensor, b_like: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients from the saved log-sum-exp and recomputed logits, one range of columns at a time: three products."""
    opts, like = o.opts, o.e
    (memory,) = allocate(like.device, late_layout(shape, plan))
    chunks = Chunks(o, Order(opts, by_target=False), memory)
    z, de = memory["z"], memory.get("de")
    f = factors_of(opts, upstream)
    softmax = f.softmax
    if opts.z_loss:
        softmax = softmax + 2.0 * opts.z_loss * rows.LN2.value * (offset + log_total) * f.token
    per_token = torch.stack([offset, log_total, softmax, f.target, f.even])
    out = input_gradient(o) if needs[0] else None
    dw = torch.empty_like(w_like, memory_format=torch.contiguous_format) if needs[1] else None
    db = torch.zeros(opts.vocab, device=like.device) if needs[2] else None
    for chunk in range(plan.chunks):
        chunks.pack(chunk)
        packed = list(per_token[:, chunks.tokens(chunk)])
        for first in range(0, opts.vocab, plan.columns):
            part = z[:, : min(plan.columns, opts.vocab - first)]
            launch.gradients(chunks, chunk, part, first, packed)
            if needs[0] or needs[1]:
                launch.products_of(chunks, chunk, part, first, de, dw, add_de=first > 0, add_dw=chunk > 0)
            if needs[2]:
                sum_of_rows(part, chunks.info, chunk, onto=db[first : first + plan.columns])
        if needs[0]:
            out.add(chunks, chunk)
    return finished(out), dw, None if db is None else db.to(b_like.dtype)
