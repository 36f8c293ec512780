"""Head `fused`: the kernels' launches, for the chunk of tokens at hand."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from t1lib.heads.fused_plan import TILES, WHOLE, Buffer, Operands, Plan, ceil, splits_of, up
from t1lib.heads.kernels import FMA, logits, products, rows
from t1lib.heads.kernels.tiles import FIELDS, LN2, PRECISE_FROM
from t1lib.heads.options import HeadStats, check_range

try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Boxes

    from t1lib.heads.kernels import hopper
except ImportError:  # Gluon is part of Triton from 3.6 on, and its names may still change
    hopper = None

FREQUENT_FROM = 4  # tokens: targets that have as many or more count as frequent
BLOCK = 1024  # columns per step in kernels where a program handles one row
STAGES = 4  # pipeline stages of the kernels of `hopper` and `tail`, 48 KiB of shared memory each
CACHED = 10 * 2**20  # bytes of hidden states that stay in a 50 MB L2 cache while the weight streams through it
TOGETHER = 16, 4  # most row blocks of dE, and least bound on column blocks of dW, that go through V together


def allocate(device: torch.device, buffers: dict[str, Buffer]) -> dict[str, Tensor]:
    memory = torch.empty(sum(b.nbytes for b in buffers.values()), dtype=torch.uint8, device=device)
    found, start = {}, 0
    for name, b in buffers.items():
        found[name] = memory.view(b.dtype).as_strided((b.height, b.width), (b.stride, 1), start // b.dtype.itemsize)
        start += b.nbytes
    return found


class Pass:
    """One pass over a call's tokens in order (those that count first), chunk by chunk: the current chunk holds the
    `size` tokens from position `start` on.

    order, key  (N): the token at each position, and what they are sorted by
    number      () int32: how many tokens count
    row         (fields, N) float32: what is known of each token, in order; `fields` are its rows by name
    x, z, …     the plan's buffers by name (`fused_plan.layout`)
    out, dw, db gradients to be filled, (N, D), (V, D) and (V) float32, or None. Rows of `out` are summed over shards in
                float32 while the next chunk computes. Under sequence parallelism `out` holds only this process's
                tokens, while a chunk may hold those of any process

    A kernel's argument that is not given to `launch` is the attribute of that name: so most attributes are arguments.
    Those that are not: o, opts, plan, tiles, tma, fields, exchange, and what begins with _."""

    splits_from = 1  # parts of the vocabulary, see `splits_of`

    def __init__(
        self, o: Operands, kind: str, upstream: Tensor | None = None, own: tuple[Plan, dict[str, Buffer]] | None = None
    ) -> None:  # fmt: skip
        """upstream: dL / d(loss), None for 1. own: a plan and its buffers instead of those for passes of this `kind`"""
        _, dw, db = o.needs if kind != "loss" else (False,) * 3
        self.o, self.opts, s, device = o, o.opts, o.opts.settings, o.e.device
        self.plan, layout = own or o.plan(kind)
        make = torch.empty if len(o.e) else torch.zeros  # the first chunk writes all of dW
        self.dw = make(o.w.shape, dtype=o.dw_dtype, device=device) if dw else None
        self.db = torch.zeros(o.opts.vocab, dtype=torch.float32, device=device) if db else None
        self.tiles, self.tma = TILES[o.device.kind, o.w.element_size()], o.device.kind == "hopper"
        self.segment_end = self.frequent = self.frequent_number = self.slot = self.even_vector = None  # until found
        absent = dict.fromkeys(("z", "marks", "de", "frequent_sums"))  # not in every layout
        matrices = absent | allocate(device, layout) | {"w": o.w, "dw": self.dw}
        beyond = up(o.opts.vocab, WHOLE)
        matrices["columns"] = None if matrices["frequent_sums"] is None else matrices["z"][:, beyond:]
        vars(self).update(matrices | {f"{n}_stride": 0 if m is None else m.stride(0) for n, m in matrices.items()})
        vars(self).update(
            e=o.e, e_row=o.e.stride(0), e_column=o.e.stride(1), bias=o.b, class_weight=o.opts.local_class_weight,
            tokens=len(o.opts.target), start=0, beyond=beyond, capacity=self.plan.capacity, hidden=o.shape.hidden,
            vocab=o.opts.vocab, parts=self.plan.parts, softcap=s.softcap, z_loss=s.z_loss or None,
            filter_eps=s.filter_eps, M=self.tiles.m, N=self.tiles.n, K=self.tiles.k, SCALED=kind == "early",
            EVEN_SHARE=bool(s.label_smoothing), PACKED=s.shards is not None, PRECISE=(s.softcap or 0.0) >= PRECISE_FROM,
            BLOCK=BLOCK, PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 and o.e.is_cuda else "ieee",
        )  # fmt: skip
        self._put_in_order(kind == "early" and (dw or db), upstream)

    def _put_in_order(self, by_target: bool, upstream: Tensor | None) -> None:
        """Sort the tokens, those that count first, and note in `row` what is known of each before there is a logit.
        by_target: whether those that count are sorted by target. upstream: as in `__init__`"""
        opts, s, size, new = self.opts, self.opts.settings, self.tokens, self.opts.target.new_empty
        self.number, opts.denominator = new((), dtype=torch.int32), new((), dtype=torch.float32)  # both by a kernel
        self.row = torch.zeros(len(FIELDS.split()), size, dtype=torch.float32, device=opts.target.device)
        in_range = new((), dtype=torch.bool)
        self.fields = dict(zip(FIELDS.split(), self.row.unbind(), strict=True))
        self.target = new(size, dtype=torch.int32)
        key = new(size, dtype=torch.int32 if by_target else torch.uint8)  # sorted in four passes, or in one
        given = dict(token_target=opts.target, token_weight=opts.token_weight)
        given |= dict(whole_class_weight=opts.class_weight, classes=opts.classes)
        smooth = s.label_smoothing or None
        class_sum = opts.class_sum if smooth and opts.class_weight is not None else None
        self.launch(
            rows.sort_keys, 1, **given, key=key, denominator=opts.denominator, in_range=in_range.view(torch.int8),
            ignore_index=s.ignore_index, BY_TARGET=by_target, BLOCK=8192, num_warps=16,
        )  # fmt: skip
        if self.o.check:
            check_range(opts, in_range)
        self.key, self.order = torch.sort(key, stable=True)
        each = upstream is not None and s.reduction == "none"
        upstream = opts.tokens(upstream.flatten()) if each else upstream
        self.launch(
            rows.fill_rows, ceil(size, BLOCK), **given, first=opts.first, smooth=smooth, class_sum=class_sum,
            denominator=opts.denominator if s.reduction == "mean" else None,
            upstream=upstream, upstream_stride=upstream.stride(0) if each else 0,
        )  # fmt: skip

    def results(self) -> tuple[Tensor, HeadStats | None]:
        """The loss as the call returns it, and its statistics, if it wants them."""
        opts, f, s = self.opts, self.fields, self.opts.settings
        weighted = any(x is not None for x in (opts.class_weight, opts.token_weight))
        if not (s.return_stats or weighted or s.label_smoothing or s.z_loss or s.shards or s.reduction == "none"):
            loss = (-f["logprob"]).sum()  # 0 at ignored tokens
            return loss / opts.denominator if s.reduction == "mean" else loss, None
        found = torch.stack([(f["offset"] + f["log_total"]) * LN2.value, f["logprob"], f["correct"], f["pull"]])
        lse, logprob, correct, pull = torch.empty_like(found).index_copy_(1, self.order, found)  # by token
        loss = opts.reduce(opts.losses(lse, logprob, pull))
        return loss, opts.stats(lse, logprob, correct > 0) if s.return_stats else None

    def each(self, block: int | None = None) -> Iterator[None]:
        """Iterate over the chunks: each is packed before its turn, and its rows of dE are written afterwards.
        block: chunks are made of whole blocks of `block` tokens (default: a tile's rows)."""
        t, tokens, de = self.tiles, self.opts.shape.numel(), self.o.needs[0] and self.plan.columns > 0
        spare = self.opts.settings.shards is not None  # one more row, to take those of other processes' tokens
        self._rows, self._pending = self.o.e.new_empty(tokens + spare, self.hidden) if de else None, None
        self.out = self._rows[:tokens] if de else None  # need not be zeroed: every token is in a chunk
        for start, size in self.plan.bounds(len(self.order), block or t.m):
            self.start, self.size, height = start, size, up(size, t.m)
            tiles = ceil(self.opts.vocab, t.n)
            self.splits = splits_of(height // t.m, tiles, self.o.device.units, self.splits_from)
            self.launch(rows.pack, height)
            yield
            if self.out is not None:
                self._add_rows()

    def _add_rows(self) -> None:
        """Write the chunk's rows of dE to their tokens' rows; under a group, into a buffer that the ranks sum."""
        self._place_rows()
        out, shards, number = self.out, self.opts.settings.shards, len(self.out)
        if shards is not None:
            out = self.exchange[0, : self.size * self.hidden].view(self.size, self.hidden)
        self.launch(rows.finish_input_gradient, self.size, ceil(self.hidden, BLOCK), out=out, out_stride=out.stride(0))
        if shards is not None:
            place = self.order[self.start : self.start + self.size] - shards.rank * number * shards.sequence
            place = torch.where((place >= 0) & (place < number), place, number)
            self._pending = dist.all_reduce(out, group=shards.group, async_op=True), out, place

    def _place_rows(self) -> None:
        if self._pending is not None:
            (work, sums, place), self._pending = self._pending, None
            work.wait()
            self._rows.index_copy_(0, place, sums.to(self._rows.dtype))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """dE, dW and dBias, after all chunks; None where not wanted."""
        self._place_rows()
        return self.out, self.dw, self.db

    def find_frequent(self, even_sum: Tensor | None = None) -> None:
        """Find where each target's tokens end (`segment_end`) and, for dW, which targets are most frequent. Their rows
        of dW add up in float32 over the chunks, in `frequent_sums` (H, D), which starts as what label smoothing
        subtracts, −c ⊗ `even_sum`, or 0. `frequent` (H): classes, the most frequent first (counts are capped at 255,
        ties go to the lower class); the first `frequent_number` () are used. `place` (H): the position at which the
        tokens of each begin. `slot` (V and more): a class's index in `frequent`, or −1."""
        if self.dw is None and self.db is None:
            return
        self.segment_end = torch.searchsorted(self.key, self.key, right=True, out_int32=True)
        if self.dw is None:
            return
        sums, weight, device = self.frequent_sums, self.opts.local_class_weight, self.key.device
        position = torch.arange(len(self.key), dtype=torch.int32, device=device)
        begins = (torch.searchsorted(self.key, self.key, out_int32=True) == position) & (self.target >= 0)
        tokens = torch.where(begins, self.segment_end - position, 0).clamp(max=255)
        # bytes are sorted in one pass
        tokens, place = torch.sort(tokens.to(torch.uint8), descending=True, stable=True)
        enough, self.place = tokens[: len(sums)] >= FREQUENT_FROM, place[: len(sums)]
        self.frequent, self.frequent_number = self.target[self.place], enough.sum(dtype=torch.int32)
        index = torch.arange(len(sums), device=device)
        self.slot = torch.full((self.vocab + len(sums),), -1, dtype=torch.int16, device=device)
        self.slot.scatter_(0, torch.where(enough, self.frequent, self.vocab + index), index.to(torch.int16))
        if even_sum is None:
            sums.zero_()
        else:
            per_class = even_sum.new_ones(len(sums)) if weight is None else weight[self.frequent.long()]
            torch.outer(-per_class, even_sum, out=sums)

    def launch(self, kernel: Any, *grid: int, **given: Any) -> Callable[[int], None]:
        """Launch a kernel; return a function that launches it again for another `first` that compiles to the same. That
        skips Triton's look at all arguments and new descriptors, which take longer than a small chunk on the GPU."""
        held = vars(self)
        arguments = {name: given.pop(name) if name in given else held[name] for name in kernel.arg_names}
        given |= FMA
        compiled = kernel[grid](**arguments, **given)

        def again(first: int) -> None:
            arguments["first"] = first
            if compiled is None:  # by Triton's interpreter
                kernel[grid](**arguments, **given)
            else:
                compiled[(*grid, 1, 1)[:3]](*arguments.values())

        return again

    def _tile(self, matrix: Tensor | None, height: int, width: int) -> Any:
        """The kernel argument for a matrix: a descriptor of its tiles with TMA, else the tensor, as a pointer."""
        descriptor = matrix is not None and self.tma and aligned(matrix)
        return TensorDescriptor.from_tensor(matrix, [height, width]) if descriptor else matrix

    def logits(
        self, z: Tensor | None, first: int = 0, *, gradient: bool = False, redo: bool = False, every: int = 1
    ) -> Callable[[int], None]:
        """z ← the exponentials (or, with `gradient`, gradients) of the logits in the columns from `first` on. z None:
        only the sums, from one of every `every` columns."""
        o, t = self.o, self.tiles
        w, vocab = o.w[::every], ceil(o.opts.vocab, every)
        splits = 1 if gradient else min(self.splits, ceil(vocab, t.n))
        flags = logits.Flags(gradient, redo, precise=self.PRECISE, even_share=self.EVEN_SHARE, ragged=vocab % t.n != 0)
        group = evenly(ceil(self.size, t.m), max(1, CACHED // (t.m * self.hidden * w.element_size())))
        given = dict(vocab=vocab, first=first, held=vocab if z is None else z.shape[1], group=group)
        given |= dict(splits=splits, FLAGS=flags)
        grid = o.device.units if gradient else ceil(self.size, t.m) * splits
        if hopper is not None and self.tma and aligned(w) and w.element_size() == 2:
            out = dict(z=None, marks=None) if z is None else dict(z=boxes(z, 64))
            given |= dict(x=boxes(self.x, 64), w=boxes(w, t.n), S=STAGES)
            return self.launch(hopper.logits, grid, **out, **given, num_warps=4)
        tiles = dict(x=self._tile(self.x, t.m, t.k), w=self._tile(w, t.n, t.k), z=self._tile(z, t.m, t.n))
        return self.launch(logits.logits, grid, **tiles, **given, num_warps=t.warps, num_stages=t.stages)

    def products(self, z: Tensor, first: int, even_sum: Tensor | None = None) -> Callable[[int], None]:
        """dE's partial sums and dW from z, whose columns are w's rows from `first` on; frequent targets' rows from the
        copies beyond them. The first chunk writes dW, less label smoothing's even share, the others add to it."""
        t, tile, units = self.tiles, self._tile, self.o.device.units
        m, n, k = t.m, t.n, t.k
        de, dw, sums = self.de, self.dw, self.frequent_sums
        whole = z if sums is None else self.z
        pieces = 1 if dw is None else dw.element_size()
        narrow = 0 < self.hidden % n <= n // 2
        across = max(ceil(self.hidden, n) - narrow, 1)
        together = max(CACHED // (self.size * n * self.x.element_size()), TOGETHER[1])
        w_narrow, x_narrow = (tile(matrix if narrow else None, k, n // 2) for matrix in (self.o.w, self.x))
        return self.launch(
            products.products, units, z=tile(z, m, k), zt=tile(whole, k, m), w=tile(self.o.w, k, n), w_narrow=w_narrow,
            x=tile(self.x, k, n), x_narrow=x_narrow, de=tile(de, m, n // 4), dw=tile(dw, m, n // pieces),
            frequent_sums=tile(sums, m, n // 4), even_sum=even_sum, first=first, held=z.shape[1],
            z_width=whole.shape[1], WIDTHS=1 + narrow, ADD_DE=first > 0, ADD_DW=self.start > 0, PIECES_DE=4,
            PIECES_DW=pieces, PROGRAMS=next_power_of_2(units), group_de=evenly(ceil(self.size, m), TOGETHER[0]),
            group_dw=evenly(across, together), num_warps=t.warps, num_stages=t.product_stages,
        )  # fmt: skip

    def add_bias(self, z: Tensor, first: int, factor: Tensor | None = None) -> None:
        """Add the chunk's contribution to dBias, from z as in `products`, with its rows times `factor`."""
        if self.db is not None:
            out = self.db[None, first : first + z.shape[1]]
            sum_rows(out, z, self.number, self.start, self.size, factor)

    def add_targets(self) -> None:
        """After all chunks, add the targets' own terms to dW and dBias, rounded once. Frequent targets have programs of
        another shape: one shape for all takes 2 to 8 times as long, as most targets have one token."""
        if self.segment_end is None:
            return
        kernel, dw = products.target_rows, self.dw is not None
        height, width = 1 if dw else 32, ceil(self.hidden, 1024)
        self.launch(kernel, len(self.order), width, place=None, HEIGHT=height, BLOCK=1024, num_warps=2)
        if dw:
            grid, number = (len(self.place), ceil(self.hidden, 64)), self.frequent_number
            self.launch(kernel, *grid, number=number, HEIGHT=32, BLOCK=64, num_warps=1)


def evenly(blocks: int, most: int) -> int:
    """Blocks per group when `blocks` are divided evenly into the fewest groups of at most `most` blocks."""
    return ceil(blocks, ceil(blocks, most))


def sum_rows(out: Tensor, x: Tensor, number: Tensor, start: int, size: int, factor: Tensor | None) -> None:
    """out (parts, columns) float32 += partial sums of factor_i · x[i] over the rows of x that hold a token."""
    parts, columns = out.shape
    rows.sum_rows[(ceil(columns, 256), parts)](
        x, factor, out, number, start, size, columns, *x.stride(), BLOCK=256, HEIGHT=16, num_warps=2, **FMA
    )


def aligned(matrix: Tensor) -> bool:
    """Whether TMA can copy a matrix: unit stride within rows, and every row starts on a 16-byte boundary."""
    return matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def boxes(matrix: Tensor, height: int, across: int = 128) -> Any:
    """A descriptor of boxes of `height` rows and `across` bytes of columns, as `hopper` and `tail` take them."""
    size = matrix.element_size()
    return Boxes.from_tensor(matrix, [height, across // size], NVMMASharedLayout(across, 8 * size, 2))
