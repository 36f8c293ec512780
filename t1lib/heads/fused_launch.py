"""Head `fused`: the kernels' launches, for the chunk of tokens at hand."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from t1lib.heads.fused import Operands
from t1lib.heads.fused_plan import TILES, WHOLE, Buffer, Plan, ceil, splits_of, up
from t1lib.heads.kernels import logits, products, rows
from t1lib.heads.kernels.tiles import FIELDS, LARGE, LN2
from t1lib.heads.options import Options

try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Boxes

    from t1lib.heads.kernels import hopper
except ImportError:  # Gluon is part of Triton from 3.6 on, and its names may still change
    hopper = None

BLOCK = 1024  # columns per step in kernels where a program handles one row
STAGES = 4  # pipeline stages of `hopper`'s kernel, 48 KiB of shared memory each
CACHED = 10 * 2**20  # bytes of hidden states that stay in a 50 MB L2 cache while the weight streams through it


class Tokens:
    """The tokens in the order in which chunks take them: those that count first, the ignored ones last.

    order, key    (N): the token at each position, and what they are sorted by
    target        (N) int32: the target as a row of this process's weight, −1 if it has none
    number        () int32: how many tokens count
    row           (fields, N) float32: what is known of each token; `fields` are its rows by name"""

    def __init__(self, opts: Options, by_target: bool) -> None:
        """by_target: whether the tokens that count are sorted by target."""
        if by_target:
            key = torch.where(opts.valid, opts.target.clamp(0, opts.classes - 1), opts.classes).int()
        else:
            key = (~opts.valid).to(torch.uint8)  # one pass of the radix sort instead of four
        self.key, self.order = torch.sort(key, stable=True)
        local = torch.where(opts.valid, opts.local_target, -1)  # a target out of range is reported elsewhere
        self.target = torch.where((local >= 0) & (local < opts.vocab), local, -1).int()[self.order]
        self.number = opts.valid.sum(dtype=torch.int32)
        self.row = torch.zeros(len(FIELDS.split()), len(key), dtype=torch.float32, device=key.device)
        self.fields = dict(zip(FIELDS.split(), self.row.unbind(), strict=True))

    def results(self) -> tuple[Tensor, ...]:
        """(N) each: lse, logprob, correct and pull by token; and (2, N): offset and log_total in order, for `late`."""
        f = self.fields
        found = torch.stack([(f["offset"] + f["log_total"]) * LN2.value, f["logprob"], f["correct"], f["pull"]])
        return *torch.empty_like(found).index_copy_(1, self.order, found), torch.stack([f["offset"], f["log_total"]])


def allocate(device: torch.device, buffers: dict[str, Buffer]) -> dict[str, Tensor]:
    memory = torch.empty(sum(b.nbytes for b in buffers.values()), dtype=torch.uint8, device=device)
    found, start = {}, 0
    for name, b in buffers.items():
        found[name] = memory.view(b.dtype).as_strided((b.height, b.width), (b.stride, 1), start // b.dtype.itemsize)
        start += b.nbytes
    return found


class Chunk:
    """Launches of the kernels on one chunk of tokens after another: those from position `start` on, `size` of them.

    memory   the plan's buffers by name (`fused_plan.layout`)
    dw, db   gradients to be filled, (V, D) and (V) float32
    known    what kernels may ask for, by the names of their arguments: whatever a launch does not give itself"""

    splits_from = 1  # parts of the vocabulary, see `splits_of`

    def __init__(self, o: Operands, kind: str, own: tuple[Plan, dict[str, Buffer]] | None = None) -> None:
        """own: a plan and its buffers, in place of those for passes of this `kind`."""
        _, dw, db = o.needs if kind != "loss" else (False,) * 3
        self.o, self.opts = o, o.opts
        self.plan, layout = own or o.plan(kind)
        self.tokens = Tokens(o.opts, by_target=kind == "early" and (dw or db))
        self.dw = torch.empty(o.w.shape, dtype=o.dw_dtype, device=o.e.device) if dw else None
        self.db = torch.zeros(o.opts.vocab, dtype=torch.float32, device=o.e.device) if db else None
        self.tiles, self.tma = TILES[o.device.kind, o.w.element_size()], o.device.kind == "hopper"
        self.memory = memory = allocate(o.e.device, layout)
        self.x, self.hidden, s, t = memory["x"], o.shape.hidden, o.opts.settings, self.tokens
        self.above = len(self.x) - self.plan.capacity  # rows of scaled copies; the packed hidden states come below them
        missing = "z", "marks", "de", "frequent_sums", "frequent", "frequent_number", "slot", "even_vector"
        matrices = dict.fromkeys(missing) | memory | {"w": o.w, "dw": self.dw}  # some are found later
        beyond = up(o.opts.vocab, WHOLE)
        matrices["columns"] = memory["z"][:, beyond:] if kind == "early" and "frequent_sums" in memory else None
        self.known = {f"{name}_stride": 0 if m is None else m.stride(0) for name, m in matrices.items()} | matrices
        self.known |= dict(
            e=o.e, e_row=o.e.stride(0), e_column=o.e.stride(1), bias=o.b, class_weight=o.opts.local_class_weight,
            order=t.order, target=t.target, row=t.row, number=t.number, tokens=len(t.order), start=0, beyond=beyond,
            capacity=self.plan.capacity, hidden=self.hidden, vocab=o.opts.vocab, above=self.above, x_rows=len(self.x),
            db=self.db, parts=self.plan.parts, softcap=s.softcap, z_loss=s.z_loss or None, filter_eps=s.filter_eps,
            M=self.tiles.m, N=self.tiles.n, K=self.tiles.k, BLOCK=BLOCK, EVEN_SHARE=bool(s.label_smoothing),
            SCALED=kind == "early", PACKED=s.shards is not None, PRECISE=(s.softcap or 0.0) >= LARGE,
            PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 and o.e.is_cuda else "ieee",
        )  # fmt: skip

    def each(self, block: int | None = None) -> Iterator[None]:
        t = self.tiles
        for start, size in self.plan.bounds(len(self.tokens.order), block or t.m):
            self.start, self.size, height = start, size, up(size, t.m)
            self.known |= {"start": start, "size": size}
            tiles = ceil(self.opts.vocab, t.n)
            self.splits = splits_of(height // t.m, tiles, self.o.device.units, self.splits_from)
            self.launch(rows.pack, height)
            yield

    def find_frequent(self, segment_end: Tensor, even_sum: Tensor | None) -> None:
        """The most frequent targets, each of two tokens or more: their rows of dW add up in float32 over the chunks, in
        `frequent_sums` (H, D), at first what label smoothing takes: −c ⊗ `even_sum`. `frequent` (H) int32: classes, the
        first `frequent_number` () of which are used; `place` (H): the position at which the tokens of each begin;
        `slot` (V + 1) int16: a class's index among them, or −1."""
        key, target, vocab, weight = self.tokens.key, self.tokens.target, self.opts.vocab, self.opts.local_class_weight
        sums, device = self.memory["frequent_sums"], key.device
        length = segment_end - torch.arange(len(key), dtype=torch.int32, device=device)
        length[1:].masked_fill_(key[1:] == key[:-1], 0)  # each run is counted at its first token
        most = length.masked_fill_(target < 0, 0).sort(descending=True, stable=True)  # half the time of `topk`
        count, at = (x[: len(sums)] for x in most)
        repeated, frequent = count > 1, target[at]
        slot = torch.full((vocab + 1,), -1, dtype=torch.int16, device=device)
        place = torch.arange(len(at), dtype=torch.int16, device=device)
        slot.scatter_(0, torch.where(repeated, frequent, vocab).long(), place)
        if even_sum is None:
            sums.zero_()
        else:
            per_class = even_sum.new_ones(len(at)) if weight is None else weight[frequent.clamp(min=0)]
            torch.outer(-per_class, even_sum, out=sums)
        self.known |= dict(frequent=frequent, frequent_number=repeated.sum(dtype=torch.int32), slot=slot, place=at)

    def launch(self, kernel: Any, *grid: int, **given: Any) -> None:
        kernel[grid](**{name: self.known[name] for name in kernel.arg_names if name not in given}, **given)

    def _tile(self, matrix: Tensor | None, height: int, width: int) -> Any:
        """The kernel argument for a matrix: a descriptor of its tiles with TMA, else the tensor, as a pointer."""
        descriptor = matrix is not None and self.tma and len(matrix) > 0 and aligned(matrix)
        return TensorDescriptor.from_tensor(matrix, [height, width]) if descriptor else matrix

    def logits(self, z: Tensor | None, first: int = 0, *, gradient: bool = False, redo: bool = False) -> None:
        """z ← exponentials or gradients (`gradient`) of the logits of the columns from `first` on; None: sums alone."""
        o, known, t, x = self.o, self.known, self.tiles, self.x[self.above :]
        splits, vocab = 1 if gradient else self.splits, o.opts.vocab
        flags = logits.Flags(gradient, redo, known["PRECISE"], known["EVEN_SHARE"], vocab % t.n != 0)
        group = max(1, CACHED // (t.m * self.hidden * o.w.element_size()))
        given = dict(first=first, held=vocab if z is None else z.shape[1], group=group, splits=splits, FLAGS=flags)
        grid = o.device.units if gradient else ceil(self.size, t.m) * splits
        if hopper is not None and self.tma and aligned(o.w) and o.w.element_size() == 2:
            operands = dict(x=boxes(x, 64), w=boxes(o.w, t.n), z=boxes(z, 64))
            self.launch(hopper.logits, grid, **operands, **given, S=STAGES, num_warps=4)
        else:
            tiles = dict(x=self._tile(x, t.m, t.k), w=self._tile(o.w, t.n, t.k), z=self._tile(z, t.m, t.n))
            self.launch(logits.logits, grid, **tiles, **given, num_warps=t.warps, num_stages=t.stages)

    def products(self, z: Tensor, first: int, even_sum: Tensor | None = None) -> None:
        """dE's partial sums and dW from z, whose columns are w's rows from `first` on; frequent targets' rows from the
        copies beyond them. The first chunk writes dW, less label smoothing's even share, the others add to it."""
        (m, n, k, warps, _, stages), tile, units = self.tiles, self._tile, self.o.device.units
        de, dw, sums = self.known["de"], self.dw, self.known["frequent_sums"]
        whole = z if sums is None else self.memory["z"]
        pieces = 1 if dw is None else dw.element_size()
        narrow = 0 < self.hidden % n <= n // 2
        w_end, x_end = (tile(matrix if narrow else None, k, n // 2) for matrix in (self.o.w, self.x))
        self.launch(
            products.products, units, z=tile(z, m, k), zt=tile(whole, k, m), w=tile(self.o.w, k, n), w_end=w_end,
            x=tile(self.x, k, n), x_end=x_end, de=tile(de, m, n // 4), dw=tile(dw, m, n // pieces),
            frequent_sums=tile(sums, m, n // 4), even_sum=even_sum, first=first, held=z.shape[1],
            z_width=whole.shape[1], ENDS=1 + narrow, ADD_DE=first > 0, ADD_DW=self.start > 0, PIECES_DE=4,
            PIECES_DW=pieces, PROGRAMS=next_power_of_2(units), num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def add_bias(self, z: Tensor, first: int, factor: Tensor | None = None) -> None:
        """Add the chunk's contribution to dBias, from z as in `products`, whose rows lack `factor`."""
        if self.db is not None:
            out = self.db[None, first : first + z.shape[1]]
            sum_rows(out, z, self.tokens.number, self.start, self.size, factor)

    def add_targets(self, segment_end: Tensor) -> None:
        """After all chunks, add the targets' own terms to dW and dBias, rounded once. Frequent targets have programs of
        another shape: one shape for all takes 2 to 8 times as long, as most targets have one token."""
        kernel, given, dw = products.target_rows, dict(segment_end=segment_end, num_warps=2), self.dw is not None
        height, width = 1 if dw else 32, ceil(self.hidden, 1024)
        self.launch(kernel, len(self.tokens.order), width, place=None, HEIGHT=height, BLOCK=1024, **given)
        if dw:
            grid, number = (len(self.known["place"]), ceil(self.hidden, 128)), self.known["frequent_number"]
            self.launch(kernel, *grid, number=number, HEIGHT=32, BLOCK=128, **given)


def sum_rows(out: Tensor, x: Tensor, number: Tensor, start: int, size: int, factor: Tensor | None) -> None:
    """out (parts, columns) float32 += partial sums of factor_i · x[i] over the rows of x that hold a token."""
    parts, columns = out.shape
    rows.sum_rows[(ceil(columns, 256), parts)](
        x, factor, out, number, start, size, columns, *x.stride(), BLOCK=256, HEIGHT=16, num_warps=2
    )


def aligned(matrix: Tensor) -> bool:
    """Whether TMA can copy a matrix: unit stride within rows, and every row starts on a 16-byte boundary."""
    return matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def boxes(matrix: Tensor | None, height: int) -> Any:
    """A descriptor of so many rows and 128 bytes of columns, as `hopper` takes them."""
    if matrix is None:
        return None
    box = [height, 128 // matrix.element_size()]
    return Boxes.from_tensor(matrix, box, NVMMASharedLayout(128, 8 * matrix.element_size(), 2))
