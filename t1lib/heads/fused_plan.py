"""The tuning parameters of head `fused` and the types of its plans: tile sizes by architecture, shapes, chunks."""

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Tile of a product (m × n, in steps of k), warps per program, pipeline stages for logits and other products."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    product_stages: int

    @property
    def bias_stages(self) -> int:
        """Pipeline stages of the narrow product for dBias, (m × k) by (k × 16), in the same amount of memory."""
        return self.product_stages * (self.m + self.n) // (self.m + 16)


TILES: dict[tuple[str, int], Tiles] = {
    ("hopper", 2): Tiles(128, 256, 64, 8, 3, 4),  # measured: H200
    ("hopper", 4): Tiles(128, 128, 32, 8, 3, 3),  # correct, not tuned
    ("other", 2): Tiles(128, 128, 32, 4, 3, 3),  # 48 KiB of shared memory: Ampere, Ada, Blackwell; not measured
    ("other", 4): Tiles(64, 64, 32, 4, 2, 2),
    ("interpreter", 2): Tiles(32, 64, 32, 4, 1, 1),
    ("interpreter", 4): Tiles(32, 64, 32, 4, 1, 1),
}
"""By architecture and bytes per element. Only Hopper could be measured; the others are safe choices."""


class Device(NamedTuple):
    """What a plan needs to know of a device: its key in `TILES` and the number of its multiprocessors."""

    kind: str
    units: int

    @property
    def tma(self) -> bool:
        """Whether tiles are copied by TMA descriptors."""
        return self.kind == "hopper"


def device_of(device: torch.device) -> Device:
    """Describe a CUDA device; any other device means Triton's interpreter."""
    if device.type != "cuda":
        return Device("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    kind = "hopper" if properties.major == 9 else "other"
    return Device(kind, properties.multi_processor_count)


class Shape(NamedTuple):
    """Tokens N, vocabulary V, hidden size D, dtype of the products, and whether input and weight need a gradient.

    room: how many numbers of dtype `compute` fit in a row of dW; 0 if dW may not lend its memory.
    ranks: number of processes over which the vocabulary is sharded; 0 if it is not.
    """

    tokens: int
    vocab: int
    hidden: int
    compute: torch.dtype
    de: bool
    dw: bool
    room: int = 0
    ranks: int = 0


class Work(NamedTuple):
    """How a chunk's products are divided: the logits' columns into `splits` ranges, dE into `parts` partial sums."""

    splits: int
    parts: int


class Lent(NamedTuple):
    """A first chunk of at most `capacity` tokens whose exponentials are stored in memory that dW lends.

    As one matrix they would be overwritten by dW's first rows while they are still needed. They are therefore split
    into panels of `width` columns: each lies where the next panel's rows of dW will be, and the last one, which lies
    where the first panel's will be, is copied to the workspace before any product.
    """

    capacity: int
    width: int
    work: Work


class Early(NamedTuple):
    """Gradients in the forward: first `lent`, then the other tokens in `chunks` chunks of at most `capacity` each.

    If no token is ignored, the first `longer` of these chunks are one row block longer than the others.
    """

    capacity: int
    chunks: int
    longer: int
    long: Work
    short: Work
    lent: Lent | None = None

    def work(self, chunk: int) -> Work:
        return self.long if chunk < self.longer or not self.longer else self.short


NO_CHUNKS = Early(0, 0, 0, Work(1, 1), Work(1, 1))


class Late(NamedTuple):
    """Gradients in the backward: `chunks` chunks of at most `capacity` tokens, `columns` of the vocabulary at a time.

    For the loss alone `columns` is 0 and the vocabulary is divided into `splits` parts.
    """

    capacity: int
    chunks: int
    columns: int
    splits: int = 0


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
