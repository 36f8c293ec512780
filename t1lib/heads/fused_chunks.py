"""Head `fused`: the operands of a call, and its tokens split into chunks, which are packed one at a time."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from t1lib.heads.contract import Options
from t1lib.heads.fused_plan import Device, Tiles
from t1lib.heads.kernels import forward, rows

BLOCK = 1024  # columns per step in kernels where a program handles one row


class Operands(NamedTuple):
    """e (N, D), w (V, D) and b (V) or None, of any row stride; w, b and all products have dtype `compute`."""

    e: Tensor
    w: Tensor
    b: Tensor | None
    opts: Options
    compute: torch.dtype
    device: Device
    tiles: Tiles

    @property
    def hidden(self) -> int:
        return self.e.shape[1]

    @property
    def precision(self) -> str:
        tf32 = torch.backends.cuda.matmul.allow_tf32 and self.e.is_cuda
        return "tf32" if tf32 else "ieee"

    def tma(self, matrix: Tensor) -> bool:
        """Whether TMA can copy it: unit stride within rows, and every row starts on a 16-byte boundary."""
        size = matrix.element_size()
        aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0
        return self.device.tma and matrix.stride(1) == 1 and aligned


def tile(matrix: Tensor, height: int, width: int, tma: bool) -> Any:
    """The kernel argument for a matrix: a descriptor of its tiles with TMA, else the tensor, passed as a pointer."""
    return TensorDescriptor.from_tensor(matrix, [height, width]) if tma else matrix


class Order:
    """The order in which chunks take the tokens: those that count first, the ignored ones last.

    by_target     whether the tokens that count are sorted by target
    order         (N): the token at each position
    key           (N): its sort key. With by_target: the target as a row of this process's weight, `vocab` for ignored
                  tokens, and −1 or `vocab` for targets on other shards (all shards have the tokens in the same order).
                  Without by_target: 0 for tokens that count, 1 for ignored ones
    number        () int32: how many tokens count
    first         class of the first weight row on this process
    """

    def __init__(self, opts: Options, by_target: bool) -> None:
        if by_target:
            key = torch.where(opts.valid, opts.target.clamp(0, opts.classes - 1), opts.classes).int()
        else:
            key = (~opts.valid).to(torch.uint8)  # one pass of the radix sort instead of four
        self.key, self.order = torch.sort(key, stable=True)
        self.first = 0 if opts.shards is None else opts.shards.first
        if by_target and opts.shards is not None:
            self.key = (self.key - self.first).clamp_(-1, opts.vocab)
        self.number = opts.valid.sum(dtype=torch.int32)

    @cached_property
    def segment_end(self) -> Tensor:
        """(N) int32: for each position, the end of the run of tokens with the same target."""
        return torch.searchsorted(self.key, self.key, right=True, out_int32=True)


class Chunks:
    """Tokens start … stop of `Order`, split in order into chunks of nearly equal length; one is packed at a time.

    order, number   as in `Order`, for these tokens
    info            sizes that depend on how many tokens count; they stay on the device (`kernels.rows.deal`)
    memory          the plan's buffers, from `fused_memory.allocate`
    """

    def __init__(
        self, operands: Operands, tokens: Order, memory: dict[str, Tensor], start: int = 0, stop: int | None = None
    ) -> None:
        self.operands, self.memory = operands, memory
        self.x, self.target, self.flag = memory["x"], memory["target"], memory["flag"]
        self.capacity = self.target.shape[1]
        self.scaled = self.x.shape[0] > self.capacity
        self.order = tokens.order[start:stop]
        whole = len(self.order) == len(tokens.order)
        self.number = tokens.number if whole else (tokens.number - start).clamp(0, len(self.order))
        self.info = torch.empty(4, dtype=torch.int32, device=self.order.device)
        rows.deal[(1,)](self.number, self.info, self.capacity // operands.tiles.m, M=operands.tiles.m)

    @property
    def hidden_states(self) -> Tensor:
        """The packed rows, unscaled (if there are scaled copies, those come first in `x`)."""
        return self.x[self.capacity :] if self.scaled else self.x

    def pack(self, chunk: int) -> None:
        """Gather the chunk's hidden states and targets."""
        o = self.operands
        rows.pack[(self.capacity,)](
            o.e, self.x, self.order, o.opts.local_target, self.target, self.flag, self.info,
            chunk, self.capacity * self.scaled, o.hidden, o.opts.vocab, *o.e.stride(), self.x.stride(0),
            M=o.tiles.m, BLOCK=BLOCK,
        )  # fmt: skip

    def target_logits(self) -> tuple[Tensor, Tensor]:
        """(N) each, in order: the targets' logits in units of log 2, and a first guess of the exponentials' offsets."""
        o = self.operands
        n, m = len(self.order), 64 if o.e.is_cuda else o.tiles.m
        at, offset = (torch.empty(n, device=o.e.device) for _ in range(2))
        forward.target_logits[(triton.cdiv(n, m),)](
            o.e, o.w, o.b, self.order, o.opts.local_target, self.info, at, offset, o.hidden, o.opts.vocab,
            *o.e.stride(), o.w.stride(0), o.opts.softcap or 0.0,
            M=m, K=o.tiles.k, BIAS=o.b is not None, SOFTCAP=o.opts.softcap is not None, PRECISION=o.precision,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        return at, offset

    def tokens(self, chunk: int) -> Tensor:
        """(capacity): the token in each row of the chunk; an arbitrary one in rows without a token."""
        start = chunk * self.info[1] + self.info[2].clamp(max=chunk) * self.info[3]
        at = start + torch.arange(self.capacity, device=self.order.device)
        return self.order[at.clamp(max=len(self.order) - 1)]


class Frequent:
    """The most frequent targets, each of two tokens or more: their rows of dW accumulate in float32.

    These rows carry most of dW and grow with every chunk: in 16 bits each chunk would round them once more.

    target, number  (H) int32: classes, of which only the first `number` () are used
    slot            (V + 1) int16: position of a class in `target`, −1 if it is not there; the last entry is unused
    sums            (H, D) float32: their rows of dW
    """

    def __init__(self, tokens: Order, vocab: int, sums: Tensor) -> None:
        key, self.sums = tokens.key, sums.zero_()
        length = tokens.segment_end - torch.arange(len(key), dtype=torch.int32, device=key.device)
        length[1:].masked_fill_(key[1:] == key[:-1], 0)  # each run is counted at its first token
        outside = (key == vocab) | (key < 0) if tokens.first else key == vocab
        most = length.masked_fill_(outside, 0).sort(descending=True, stable=True)  # takes half the time of `topk`
        count, at = (x[: self.sums.shape[0]] for x in most)
        repeated = count > 1
        self.number = repeated.sum(dtype=torch.int32)
        self.target = key[at]
        place = torch.arange(len(at), dtype=torch.int16, device=key.device)
        self.slot = torch.full((vocab + 1,), -1, dtype=torch.int16, device=key.device)
        self.slot.scatter_(0, torch.where(repeated, self.target, vocab).long(), place)
