"""What head `fused` is tuned by, and what its plans are: tile sizes by architecture, shapes, chunks."""

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Tile of a product (m × n, k at a time), warps a program, and stages of its pipelines: logits, other products."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    product_stages: int

    @property
    def bias_stages(self) -> int:
        """Of the narrow product for dBias, (m × k) by (k × 16), in as much memory."""
        return self.product_stages * (self.m + self.n) // (self.m + 16)


TILES: dict[tuple[str, int], Tiles] = {
    ("hopper", 2): Tiles(128, 256, 64, 8, 3, 4),  # measured: H200
    ("hopper", 4): Tiles(128, 128, 32, 8, 3, 3),  # right, not tuned
    ("other", 2): Tiles(128, 128, 32, 4, 3, 3),  # 48 KiB of shared memory: Ampere, Ada, Blackwell; not measured
    ("other", 4): Tiles(64, 64, 32, 4, 2, 2),
    ("interpreter", 2): Tiles(32, 64, 32, 4, 1, 1),
    ("interpreter", 4): Tiles(32, 64, 32, 4, 1, 1),
}
"""By architecture and bytes an element. Hopper alone could be measured; the others are a safe choice."""


class Device(NamedTuple):
    """What a plan needs to know: a key of `TILES`, and multiprocessors."""

    kind: str
    units: int

    @property
    def tma(self) -> bool:
        """Whether tiles are copied by descriptor."""
        return self.kind == "hopper"


def device_of(device: torch.device) -> Device:
    """Describe a CUDA device; any other one is Triton's interpreter."""
    if device.type != "cuda":
        return Device("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    kind = "hopper" if properties.major == 9 else "other"
    return Device(kind, properties.multi_processor_count)


class Shape(NamedTuple):
    """Tokens N, vocabulary V, hidden size D, dtype of the products, and which of input and weight want a gradient.

    room: numbers in `compute` for which a row of dW has room, where dW may lend its memory.
    ranks: processes to which the vocabulary is dealt; 0 where it is not.
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
    """How a chunk's products are dealt: the logits' columns in `splits`, dE in `parts` sums over ranges of columns."""

    splits: int
    parts: int


class Lent(NamedTuple):
    """A first chunk of at most `capacity` tokens whose exponentials lie in what will be dW.

    As (V, C) row by row they would be in the way of dW's first rows at once: they lie in panels of `width` columns,
    each where dW's rows of the same classes will be, and a panel is moved to the workspace before it is multiplied.
    """

    capacity: int
    width: int
    work: Work


class Early(NamedTuple):
    """Gradients in the forward: `lent` first, then `chunks` of the other tokens, at most `capacity` in each.

    Where every token counts the first `longer` of them are one row block longer than the others.
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
    """Gradients in the backward: `chunks` of at most `capacity` tokens, `columns` of the vocabulary at a time.

    The loss alone: no columns, the vocabulary in `splits` parts.
    """

    capacity: int
    chunks: int
    columns: int
    splits: int = 0


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
