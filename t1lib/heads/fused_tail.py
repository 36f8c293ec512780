"""Head `fused` with tail="fp8": the forward computes the gradients, with products for dE and dW that take the small
entries of the logits' gradient in FP8; the mathematics is in docs/fp8.md. Per chunk: a sample of the logits → offsets →
exponentials in FP8 → again where the offset was wrong → statistics → scale → dE, dW → what large exponentials lack."""

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton import next_power_of_2

from t1lib.heads import fused_plan
from t1lib.heads.fused_launch import STAGES, Pass, boxes
from t1lib.heads.fused_plan import FREQUENT, Buffer, Operands, Plan, Shape, ceil, up
from t1lib.heads.fused_run import targets
from t1lib.heads.kernels import large, rows, tail
from t1lib.heads.kernels.large import SLOTS
from t1lib.heads.options import need_workspace

SAMPLE = 128  # one of so many columns, or of fewer, is looked at for a row's offset
BLOCK = 256  # tokens of a tile of dE
SPLITS = 64  # the most ranges that the vocabulary is divided into for the exponentials
PARTS = 8  # the most partial sums of dE
RANGES = 8  # the most ranges of classes in which dE is made: each takes a launch, and a copy of its part of the weight
UNIT = 4  # steps to finish a tile; this and the next two were measured on an H100
LAUNCH = 30
COPY = 1.3e-6  # steps per element of the weight
LARGE_BYTES = 32 * SLOTS.value  # per row: a sort's keys, order, and copies of both


def layout(shape: Shape, plan: Plan) -> dict[str, Buffer]:
    """The buffers of a plan; `plan.columns`: classes whose rows of the weight are in FP8 at a time."""
    high, hidden, byte = plan.capacity, shape.hidden, torch.uint8
    found = fused_plan.layout(shape, plan._replace(columns=0), early=False)  # those of any pass
    found |= {"z": Buffer(high, up(shape.vocab, 16), byte), "large": Buffer(high, SLOTS.value, torch.int32)}
    found |= {"marks": Buffer(1, high * ceil(up(shape.vocab, 16), 256), torch.int8)}
    found |= {"excess": Buffer(high, SLOTS.value), "count": Buffer(1, high, torch.int32)}
    if shape.de:
        found |= {"w8": Buffer(plan.columns, hidden, byte), "de": Buffer(plan.parts * high, hidden)}
    if shape.dw:
        found["x8"] = Buffer(up(hidden, 64), high, byte)
        found["frequent_sums"] = Buffer(min(FREQUENT, shape.tokens), hidden)
    return found


@lru_cache(maxsize=1024)
def plan(shape: Shape, workspace: int | None, units: int) -> Plan:
    """The fastest plan of those that fit and have one of the three largest capacities among them; `T1Error` with the
    least workspace if none fits."""
    budget = fused_plan.default_workspace(shape) if workspace is None else workspace
    blocks = max(ceil(shape.tokens, BLOCK), 1)
    fit = []
    for capacity in sorted({ceil(blocks, n) * BLOCK for n in range(1, blocks + 1)}, reverse=True):
        for ranges in range(1, RANGES + 1 if shape.de else 2):
            for parts in range(1, PARTS + 1 if shape.de else 2):
                columns = up(ceil(shape.vocab, ranges), 128)
                found = Plan(capacity, ceil(blocks, capacity // BLOCK), columns, SPLITS, parts)
                if bytes_needed(shape, found) > budget:
                    break
                fit.append((cost(shape, found, ranges, units), found))
        if len({found.capacity for _, found in fit}) == 3:
            break
    if not fit:
        least = Plan(BLOCK, blocks, up(ceil(shape.vocab, RANGES), 128), SPLITS)
        need_workspace(workspace, bytes_needed(shape, least), "fused")
        return least
    return min(fit)[1]


def cost(shape: Shape, found: Plan, ranges: int, units: int) -> float:
    """Time of dE, dW and the weight's copies, in steps: a product of 128 × 256 × 128 on one multiprocessor."""
    blocks = ceil(shape.hidden, 128) * (found.capacity // BLOCK)
    unit = ceil(ceil(found.columns, 128), found.parts) + UNIT
    de = ranges * (ceil(blocks * found.parts, units) * unit + LAUNCH) * shape.de
    tiles = ceil(shape.vocab, 128) * ceil(shape.hidden, 128) / 2  # half ones take half the time
    dw = math.ceil(tiles / units) * (found.capacity // 128 + UNIT) * shape.dw
    copies = shape.vocab * shape.hidden * COPY * shape.de * (1 if ranges > 1 else 1 / found.chunks)
    return found.chunks * (de + dw + copies)


def bytes_needed(shape: Shape, found: Plan) -> int:
    return fused_plan.bytes_with(layout(shape, found), shape, found) + LARGE_BYTES * found.capacity


class Tail(Pass):
    """A pass with exponentials in FP8. gain_w: what the weight is multiplied by before it is rounded to FP8."""

    splits_from = 16  # so that the few blocks that are computed again keep enough programs busy

    def __init__(self, o: Operands) -> None:
        found = plan(o.shape, o.opts.settings.workspace, o.device.units)
        super().__init__(o, "early", own=(found, layout(o.shape, found)))
        self.e4m3, self.width = self.z.view(torch.float8_e4m3fn), self.z.shape[1]
        self.columns = None  # the product itself looks up which classes are frequent
        self.gain_w = gain_of(torch.linalg.vector_norm(o.w, torch.inf)) if o.needs[0] else None

    def offsets(self, splits: int, every: int) -> None:
        given = dict(splits=splits, every=every, SPLITS=next_power_of_2(splits), GUESS=every > 0)
        self.launch(large.offsets, self.size, **given)

    def exponentials(self) -> None:
        """z, and the tokens' statistics."""
        every = max(1, min(SAMPLE, self.opts.vocab // 1024))  # a guess from some of the columns
        self.logits(None, every=every)
        self.offsets(min(self.splits, ceil(ceil(self.opts.vocab, every), self.tiles.n)), every)
        self.flag.zero_()
        self.logits(self.e4m3)
        self.launch(large.find, self.size, TILES=8, REDO=False)
        for _ in range(2):  # rows with a wrong offset; twice, as after an overflow the first correction is rough
            self.offsets(self.splits, 0)
            self.logits(self.e4m3, redo=True)
            self.launch(large.find, self.size, TILES=8, REDO=True)
            self.flag.zero_()
        self.launch(rows.finish_rows, self.size, splits=self.splits, SPLITS=next_power_of_2(self.splits))
        # targets by their place in z; −1 stays −1
        self.launch(rows.scale_rows, self.size, packed_target=tail.place_of.fn(self.packed_target))

    def input_gradient(self) -> None:
        w8, hidden, vocab = self.w8, self.hidden, self.opts.vocab
        for first in range(0, vocab, len(w8)):
            count = min(len(w8), vocab - first)
            if self.start == 0 or len(w8) < vocab:
                grid = ceil(up(count, 16), 32), ceil(hidden, 128)
                given = dict(gain=self.gain_w, first=first, count=up(count, 16), HEIGHT=32, BLOCK=128)
                self.launch(tail.narrow_weight, *grid, **given, num_warps=4)
            self._product(
                w8[: up(count, 16)], self.e4m3, self.de, self.gain_w, first=first, columns=count,
                height=self.plan.capacity, BY_ROW=True, ADD=first > 0, parts=self.plan.parts,
            )  # fmt: skip

    def weight_gradient(self) -> None:
        x8, scale = self.x8, self.fields["scale"][self.start : self.start + self.size]
        top = torch.linalg.vector_norm(self.x[: self.size], torch.inf, dim=1)
        gain = gain_of((top * scale).abs().amax())
        grid = ceil(self.plan.capacity, 64), ceil(len(x8), 64)
        self.launch(tail.narrow_hidden, *grid, gain=gain, M=64, BLOCK=64, num_warps=4)
        self._product(
            self.z, x8.view(torch.float8_e4m3fn), self.dw, gain, first=0, columns=0,
            height=self.opts.vocab, BY_ROW=False, ADD=self.start > 0, parts=1,
        )  # fmt: skip

    def _product(self, a: Tensor, b: Tensor, out: Tensor, gain: Tensor, **given) -> None:
        """a: bytes, which the kernel reads in pairs, as numbers of 16 bits; b: e4m3"""
        given |= dict(a=boxes(a.view(torch.int16), 128, 64), b=boxes(b, 256), out=out, stride=out.stride(0), gain=gain)
        self.launch(tail.products, self.o.device.units, S=STAGES, num_warps=4, **given)

    def large_entries(self) -> None:
        size, found = self.size, self.large
        self.count.bitwise_and_(large.OVER.value - 1)  # clear OVER, which only rows that are not numbers still have
        self.launch(large.row_terms, size, BLOCK=next_power_of_2(self.hidden), num_warps=4)
        if self.dw is not None:
            classes, order = torch.sort(found[:size].view(-1), stable=True)
            entries = self.count[0, :size].sum()
            given = dict(classes=classes, order=order, entries=entries, HEIGHT=16, MORE=32, BLOCK=64)
            self.launch(large.class_terms, 64 * self.o.device.units, **given, num_warps=2)


def early(o: Operands) -> Tail:
    """As `fused_run.early`."""
    c = Tail(o)
    targets(c)
    for _ in c.each(BLOCK):
        c.exponentials()
        if c.start == 0:
            c.find_frequent()
        if c.out is not None:
            c.input_gradient()
        if c.dw is not None:
            c.weight_gradient()
        c.large_entries()
    c.add_targets()
    return c


def gain_of(top: Tensor) -> Tensor:
    """The factor that scales the largest number to 448; finite even if all are 0."""
    return tail.LARGEST.value / top.float().clamp(min=1e-30)
