"""Head `fused`: the kernels' launches, for the chunk of tokens at hand."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from t1lib.heads.fused_plan import TILES, Buffer, Device, Plan, Shape, Tiles, ceil, layout, splits_of, up
from t1lib.heads.kernels import logits, products, rows
from t1lib.heads.kernels.tiles import FIELDS, LN2, PRECISE
from t1lib.heads.options import Options

try:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Boxes

    from t1lib.heads.kernels import hopper
except ImportError:  # Gluon is part of Triton from 3.6 on, and its names may still change
    hopper = None

BLOCK = 1024  # columns per step in kernels where a program handles one row
STAGES = 4  # pipeline stages of `hopper`'s kernel, 48 KiB of shared memory each
CACHED = 10 * 2**20  # bytes of hidden states that stay in a 50 MB L2 cache while the weight streams through it
HALF, STEP, QUARTER = 64, 64, 64  # of `hopper`'s boxes: rows of a half tile, step along D, columns of a quarter tile


class Operands(NamedTuple):
    """e (N, D), of any strides; w (V, D) with unit column stride and b (V) or None, both in the products' dtype.

    tma, tma_w       whether the device has TMA, and whether it can copy w
    softcap, capped  1 and 0 without one; otherwise the softcap and how to apply it, `tiles.finish_logits`
    """

    e: Tensor
    w: Tensor
    b: Tensor | None
    opts: Options
    device: Device
    tiles: Tiles
    tma: bool
    tma_w: bool
    softcap: float
    capped: int
    precision: str

    @classmethod
    def of(cls, e: Tensor, w: Tensor, b: Tensor | None, opts: Options, device: Device) -> "Operands":
        cap, tma = opts.settings.softcap, device.kind == "hopper"
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 and e.is_cuda else "ieee"
        capped = 0 if cap is None else 2 if cap >= PRECISE else 1
        tiles = TILES[device.kind, w.element_size()]
        return cls(e, w, b, opts, device, tiles, tma, tma and aligned(w), cap or 1.0, capped, precision)


def aligned(matrix: Tensor) -> bool:
    """Whether TMA can copy a matrix: unit stride within rows, and every row starts on a 16-byte boundary."""
    starts = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return matrix.stride(1) == 1 and starts


class Tokens:
    """The tokens in the order in which chunks take them: those that count first, the ignored ones last.

    by_target     whether the tokens that count are sorted by target
    order, key    (N): the token at each position, and what they are sorted by
    target        (N) int32: the target as a row of this process's weight, −1 if it has none
    number        () int32: how many tokens count
    row           (fields, N) float32: what is known of each token; `fields` are its rows by name
    """

    def __init__(self, opts: Options, by_target: bool) -> None:
        if by_target:
            key = torch.where(opts.valid, opts.target.clamp(0, opts.classes - 1), opts.classes).int()
        else:
            key = (~opts.valid).to(torch.uint8)  # one pass of the radix sort instead of four
        self.key, self.order = torch.sort(key, stable=True)
        local = torch.where(opts.valid, opts.local_target, -1)  # a target out of range is reported elsewhere
        self.target = torch.where((local >= 0) & (local < opts.vocab), local, -1).int()[self.order]
        self.number = opts.valid.sum(dtype=torch.int32)
        self.row = torch.zeros(len(FIELDS), len(key), device=key.device)
        self.fields = dict(zip(FIELDS, self.row.unbind(), strict=True))

    def results(self) -> tuple[Tensor, ...]:
        """(N) each: lse, logprob, correct and pull by token; and (2, N): offset and log_total in order, for `late`."""
        f = self.fields
        found = torch.stack([(f["offset"] + f["log_total"]) * LN2.value, f["logprob"], f["correct"], f["pull"]])
        return *torch.empty_like(found).index_copy_(1, self.order, found), torch.stack([f["offset"], f["log_total"]])


class Frequent(NamedTuple):
    """The most frequent targets, each of two tokens or more: their rows of dW accumulate in float32.

    These rows carry most of dW and grow with every chunk: in 16 bits each chunk would round them once more.

    target, number  (H) int32: classes, of which only the first `number` () are used
    slot            (V + 1) int16: position of a class in `target`, −1 if it is not there; the last entry is unused
    sums            (H, D) float32: their rows of dW, at first what label smoothing takes from them: −c ⊗ `even_sum`
    """

    target: Tensor
    number: Tensor
    slot: Tensor
    sums: Tensor

    @classmethod
    def find(
        cls, tokens: Tokens, segment_end: Tensor, opts: Options, sums: Tensor, even_sum: Tensor | None
    ) -> "Frequent":
        key, device, vocab, weight = tokens.key, sums.device, opts.vocab, opts.local_class_weight
        length = segment_end - torch.arange(len(key), dtype=torch.int32, device=device)
        length[1:].masked_fill_(key[1:] == key[:-1], 0)  # each run is counted at its first token
        most = length.masked_fill_(tokens.target < 0, 0).sort(descending=True, stable=True)  # half the time of `topk`
        count, at = (x[: len(sums)] for x in most)
        repeated, target = count > 1, tokens.target[at]
        slot = torch.full((vocab + 1,), -1, dtype=torch.int16, device=device)
        place = torch.arange(len(at), dtype=torch.int16, device=device)
        slot.scatter_(0, torch.where(repeated, target, vocab).long(), place)
        if even_sum is None:
            sums.zero_()
        else:
            per_class = -torch.ones(len(at), device=device) if weight is None else -weight[target.clamp(min=0)]
            torch.outer(per_class, even_sum, out=sums)
        return cls(target, repeated.sum(dtype=torch.int32), slot, sums)


def allocate(device: torch.device, buffers: dict[str, Buffer]) -> dict[str, Tensor]:
    """The buffers by name, uninitialised, in a single allocation."""
    memory = torch.empty(sum(b.nbytes for b in buffers.values()), dtype=torch.uint8, device=device)
    found, start = {}, 0
    for name, b in buffers.items():
        at = start // b.dtype.itemsize
        found[name] = memory.view(b.dtype).as_strided((b.height, b.width), (b.stride, 1), at)
        start += b.nbytes
    return found


class Chunk:
    """Launches of the kernels on one chunk of tokens after another: those from position `start` on, `size` of them.

    `memory` holds the plan's buffers by name (`fused_plan.layout`); `here`, what every kernel is told of the chunk.
    """

    def __init__(self, o: Operands, shape: Shape, plan: Plan, *, by_target: bool, early: bool) -> None:
        self.o, self.plan, self.tokens = o, plan, Tokens(o.opts, by_target)
        self.memory = memory = allocate(o.e.device, layout(shape, plan, early))
        self.x, self.z, self.capacity, self.hidden = memory["x"], memory.get("z"), plan.capacity, shape.hidden
        self.above = len(self.x) - self.capacity  # rows of scaled copies, which come before the packed hidden states

    def _tile(self, matrix: Tensor | None, height: int, width: int) -> Any:
        """The kernel argument for a matrix: a descriptor of its tiles with TMA, else the tensor, as a pointer."""
        if matrix is None or not self.o.tma or not aligned(matrix):
            return matrix
        return TensorDescriptor.from_tensor(matrix, [height, width])

    def target_logits(self) -> None:
        """at ← the targets' logits, offset ← a first guess of the exponentials' offsets, of all tokens."""
        o, t = self.o, self.tokens
        m = 64 if o.e.is_cuda else o.tiles.m
        logits.target_logits[(ceil(len(t.order), m),)](
            o.e, o.w, o.b, t.order, t.target, t.row, t.number, len(t.order), self.hidden, *o.e.stride(), o.w.stride(0),
            o.softcap, M=m, K=o.tiles.k, BIAS=o.b is not None, SOFTCAP=o.capped, PRECISION=o.precision,
            num_warps=4, num_stages=3,
        )  # fmt: skip

    def pack(self, start: int, size: int) -> None:
        """Gather the hidden states and targets of the chunk, which is the one at hand from here on."""
        o, t, m = self.o, self.tokens, self.o.tiles.m
        self.start, self.size, self.height = start, size, up(size, m)
        self.here = t.number, len(t.order), start, size, self.capacity, self.hidden
        self.splits = splits_of(self.height // m, ceil(o.opts.vocab, o.tiles.n), o.device.units)
        rows.pack[(self.height,)](
            o.e, self.x, t.order, t.target, self.memory["target"], self.memory["flag"], *self.here,
            self.above, *o.e.stride(), self.x.stride(0), M=m, BLOCK=BLOCK,
        )  # fmt: skip

    def logits(self, z: Tensor | None, first: int = 0, *, gradient: bool = False, redo: bool = False) -> None:
        """z ← exponentials or gradients (`gradient`) of the logits of the columns from `first` on; None: sums alone."""
        o, s, t, m, x = self.o, self.o.opts.settings, self.o.tiles, self.memory, self.x[self.above :]
        splits, vocab = 1 if gradient else self.splits, o.opts.vocab
        group = max(1, CACHED // (t.m * self.hidden * o.w.element_size()))
        vectors = o.b, o.opts.local_class_weight, self.tokens.row, m["target"], m["flag"], m["sums"]
        sizes = vocab, first, vocab if z is None else z.shape[1], group, splits
        flags = logits.Flags(
            gradient, z is not None, redo, o.b is not None, o.capped, bool(s.label_smoothing),
            o.opts.class_weight is not None, vocab % t.n != 0, s.filter_eps is not None,
        )  # fmt: skip
        numbers = o.softcap, s.filter_eps or 0.0
        grid = (o.device.units if gradient else ceil(self.size, t.m) * splits,)
        if hopper is not None and o.tma_w and o.w.element_size() == 2:
            hopper.logits[grid](
                _boxes(x, HALF, STEP), _boxes(o.w, t.n, STEP), _boxes(z, HALF, QUARTER), *vectors, *self.here, *sizes,
                *numbers, FLAGS=flags, N=t.n, S=STAGES, num_warps=4,
            )  # fmt: skip
            return
        logits.logits[grid](
            self._tile(x, t.m, t.k), self._tile(o.w, t.n, t.k), self._tile(z, t.m, t.n), *vectors, *self.here, *sizes,
            *numbers, x.stride(0), o.w.stride(0), 0 if z is None else z.stride(0), FLAGS=flags,
            M=t.m, N=t.n, K=t.k, TMA=o.tma, TMA_W=o.tma_w, PRECISION=o.precision,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip

    def finish_rows(self) -> None:
        """Combine the sums over the parts of the vocabulary to the tokens' statistics."""
        rows.finish_rows[(self.size,)](
            self.tokens.row, self.memory["sums"], *self.here, self.splits,
            SPLITS=triton.next_power_of_2(self.splits), PULLED=bool(self.o.opts.settings.label_smoothing),
        )  # fmt: skip

    def scale_rows(self, frequent: Frequent | None) -> None:
        """Turn the chunk's exponentials into gradients, up to a factor per row."""
        o, s, columns = self.o, self.o.opts.settings, self.memory.get("columns")
        found = (None, None) if frequent is None else (frequent.target, frequent.number)
        rows.scale_rows[(self.height,)](
            self.z, self.x, self.tokens.row, self.memory["target"], *found, columns, *self.here,
            self.z.stride(0), self.x.stride(0), 0 if columns is None else columns.stride(0), o.softcap, s.z_loss,
            BLOCK=BLOCK, DW=self.above > 0, SOFTCAP=o.capped > 0, Z_LOSS=bool(s.z_loss),
        )  # fmt: skip

    def products(self, z: Tensor, first: int, dw: Tensor | None, even_sum: Tensor | None = None) -> None:
        """dE's partial sums and dW (V, D) from z, whose columns are w's rows from `first` on. The first chunk writes
        dW, without label smoothing's even share, and the others add to it."""
        o, t, x, de = self.o, self.o.tiles, self.x, self.memory.get("de")
        pieces = 1 if dw is None else dw.element_size()
        products.products[(o.device.units,)](
            self._tile(z, t.m, t.k), self._tile(z, t.k, t.m), self._tile(o.w, t.k, t.n), self._tile(x, t.k, t.n),
            self._tile(de, t.m, t.n // 4), self._tile(dw, t.m, t.n // pieces),
            even_sum, o.opts.local_class_weight, *self.here, o.opts.vocab, first, z.shape[1], len(x), self.plan.parts,
            z.stride(0), o.w.stride(0), x.stride(0), *(0 if m is None else m.stride(0) for m in (de, dw)),
            M=t.m, N=t.n, K=t.k, DE=de is not None, DW=dw is not None, ADD_DE=first > 0, ADD_DW=self.start > 0,
            EVEN_SHARE=even_sum is not None, WEIGHTED=o.opts.class_weight is not None, TMA=o.tma, TMA_W=o.tma_w,
            TMA_DW=o.tma and dw is not None and aligned(dw), PIECES_DE=4, PIECES_DW=pieces, PRECISION=o.precision,
            num_warps=t.warps, num_stages=t.product_stages,
        )  # fmt: skip

    def finish_input(self, out: Tensor, scaled: bool, even_vector: Tensor | None, packed: bool) -> None:
        """Write the chunk's dE to the tokens' own rows of `out`, or, `packed`, to its first rows in order.

        scaled: apply the rows' factors and the targets' own terms; even_vector: Σ_v c_v w_v under label smoothing.
        """
        o, de = self.o, self.memory["de"]
        rows.finish_input_gradient[(self.size, ceil(self.hidden, BLOCK))](
            de, out, o.w, self.tokens.row, self.tokens.order, self.memory["target"], even_vector, *self.here,
            self.plan.parts, de.stride(0), out.stride(0), o.w.stride(0),
            BLOCK=BLOCK, SCALED=scaled, EVEN_SHARE=even_vector is not None, PACKED=packed,
        )  # fmt: skip

    def add_frequent(self, f: Frequent) -> None:
        """Add the chunk's contribution to the frequent targets' rows of dW."""
        o, x, columns, (height, _), k = self.o, self.x, self.memory["columns"], f.sums.shape, self.o.tiles.k
        m, n = (64, 128) if o.e.is_cuda else (16, 32)
        products.frequent_rows[(ceil(height, m), ceil(self.hidden, n))](
            self._tile(columns, k, m), self._tile(x, k, n), f.sums, f.number, *self.here,
            height, len(x), columns.stride(0), x.stride(0), f.sums.stride(0),
            M=m, N=n, K=k, TMA=o.tma, PRECISION=o.precision, num_warps=4, num_stages=4,
        )  # fmt: skip

    def add_targets(self, segment_end: Tensor, f: Frequent | None, dw: Tensor | None, db: Tensor | None) -> None:
        """After all chunks, add the targets' own terms to dW and dBias, rounded once."""
        o, t = self.o, self.tokens
        sums, slot = (None, None) if f is None else (f.sums, f.slot)
        products.target_rows[(len(t.order), 1 if dw is None else ceil(self.hidden, BLOCK))](
            dw, db, sums, o.e, t.order, t.target, segment_end, t.row, slot, t.number, len(t.order), self.hidden,
            *o.e.stride(), *(0 if m is None else m.stride(0) for m in (sums, dw)),
            HEIGHT=4, BLOCK=BLOCK, DW=dw is not None, DB=db is not None, num_warps=4,
        )  # fmt: skip


def sum_rows(out: Tensor, x: Tensor, number: Tensor, start: int, size: int, factor: Tensor | None) -> None:
    """out (parts, columns) float32 += partial sums of factor_i · x[i] over the rows of x that hold a token."""
    parts, columns = out.shape
    rows.sum_rows[(ceil(columns, 256), parts)](
        x, factor, out, number, start, size, columns, *x.stride(),
        BLOCK=256, HEIGHT=16, WEIGHED=factor is not None, num_warps=2,
    )  # fmt: skip


def _boxes(matrix: Tensor | None, height: int, width: int) -> Any:
    """A descriptor of a matrix's boxes for `hopper`."""
    if matrix is None:
        return None
    return Boxes.from_tensor(matrix, [height, width], NVMMASharedLayout.get_default_for([height, width], bfloat16))
