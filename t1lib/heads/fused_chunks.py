"""Head `fused`: the operands of a call, and its tokens dealt to chunks that are packed one at a time."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from t1lib.heads.contract import Options
from t1lib.heads.fused_plan import FREQUENT, Device, Tiles, up
from t1lib.heads.kernels import forward, rows

BLOCK = 1024  # columns a step where a program handles one row


class Operands(NamedTuple):
    """e (N, D) and w (V, D), b (V) or None, in the strides they come in; w, b and all products in `compute`."""

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
        """Whether the copy engine takes it: unit stride along rows, the rest on 16-byte boundaries."""
        size = matrix.element_size()
        aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0
        return self.device.tma and matrix.stride(1) == 1 and aligned


def buffer(height: int, width: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised (height, width), each row on a 16-byte boundary."""
    stride = up(width, 16 // dtype.itemsize)
    return torch.empty(height, stride, dtype=dtype, device=like.device)[:, :width]


def tile(matrix: Tensor, height: int, width: int, tma: bool) -> Any:
    """What a kernel takes for a matrix: a descriptor of its tiles, or the matrix for its pointer."""
    return TensorDescriptor.from_tensor(matrix, [height, width]) if tma else matrix


class Chunks:
    """Tokens that count, dealt to chunks of equal length, in each sorted by target; one chunk is packed at a time.

    Sizes that depend on how many tokens count stay on the device, in `info`.
    """

    def __init__(self, operands: Operands, capacity: int, count: int, scaled: bool, by_target: bool) -> None:
        opts, tiles = operands.opts, operands.tiles
        self.operands, self.capacity, self.count, self.scaled = operands, capacity, count, scaled
        valid = opts.valid
        rank = valid.cumsum(0)
        number = rank[-1]
        used = torch.clamp((number + capacity - 1) // capacity, min=1)
        length = torch.clamp((((number + used - 1) // used) + tiles.m - 1) // tiles.m * tiles.m, min=tiles.m)
        self.info = torch.stack([number, length]).int()
        last = (count + 1) * opts.vocab
        key = torch.where(valid, (rank - 1) // length * opts.vocab + opts.target, last)
        key, self.order = torch.sort(key, stable=True)
        # where the run of rows with the same target ends, in the order of all chunks
        self.segment_end = torch.searchsorted(key, key, right=True, out_int32=True) if by_target else None
        self.x = buffer(capacity * (1 + scaled), operands.hidden, operands.e, operands.compute)
        ints = {"dtype": torch.int32, "device": key.device}
        self.target = torch.empty(capacity, **ints)
        self.flag = torch.empty(capacity // tiles.m, **ints)

    @property
    def hidden_states(self) -> Tensor:
        """The packed rows as they are (the scaled ones lie above them)."""
        return self.x[self.capacity :] if self.scaled else self.x

    def pack(self, chunk: int) -> None:
        """Gather the chunk's hidden states and targets."""
        o = self.operands
        rows.pack[(self.capacity,)](
            o.e, self.x, self.order, o.opts.target, self.target, self.flag, self.info,
            chunk, self.capacity * self.scaled, o.hidden, o.opts.vocab, *o.e.stride(), self.x.stride(0),
            M=o.tiles.m, BLOCK=BLOCK,
        )  # fmt: skip

    def target_logits(self) -> tuple[Tensor, Tensor]:
        """(N) each, in order: logits of the targets in units of log 2, and a guess of the exponentials' offsets."""
        o = self.operands
        n, m = len(self.order), 64 if o.e.is_cuda else o.tiles.m
        at, offset = (torch.empty(n, device=o.e.device) for _ in range(2))
        forward.target_logits[(triton.cdiv(n, m),)](
            o.e, o.w, o.b, self.order, o.opts.target, self.info, at, offset, o.hidden, o.opts.vocab,
            *o.e.stride(), o.w.stride(0), o.opts.softcap or 0.0,
            M=m, K=o.tiles.k, BIAS=o.b is not None, SOFTCAP=o.opts.softcap is not None, PRECISION=o.precision,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        return at, offset

    def take(self, values: Tensor, chunk: int) -> Tensor:
        """(capacity) of a vector over tokens, in the packed order; rows without a token hold anything finite."""
        at = self.info[1].long() * chunk + torch.arange(self.capacity, device=values.device)
        return values[self.order[at.clamp(max=len(values) - 1)]]


class Frequent:
    """The most frequent targets, at most `FREQUENT`, each of two tokens or more: their rows of dW add up in float32.

    They carry most of dW, and grow with every chunk: in 16 bits each chunk would round them once more.

    target, number  (H) int32, of which the first `number` (1) count
    is_frequent     (V) int8: whether a row of dW is one of them
    columns         (capacity, H): a chunk's exponentials at these targets
    sums            (H, D) float32
    """

    def __init__(self, chunks: Chunks) -> None:
        o, vocab = chunks.operands, chunks.operands.opts.vocab
        valid, target = o.opts.valid, o.opts.target
        real = valid & (target >= 0) & (target < vocab)
        counts = torch.zeros(vocab + 1, dtype=torch.int32, device=target.device)
        counts.index_add_(0, torch.where(real, target, vocab), torch.ones_like(target, dtype=torch.int32))
        height = min(FREQUENT, vocab)
        count, target = counts[:vocab].topk(height)
        repeated = count > 1
        self.number = repeated.sum(dtype=torch.int32)
        self.target = target.int()
        self.is_frequent = torch.zeros(vocab, dtype=torch.int8, device=target.device)
        self.is_frequent.scatter_(0, target, repeated.to(torch.int8))
        self.columns = buffer(chunks.capacity, height, o.e, o.compute)
        self.sums = torch.empty(height, o.hidden, device=target.device)
