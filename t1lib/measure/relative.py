"""The error of a result against one of higher precision."""

from torch import Tensor


def relative_error(found: Tensor, wanted: Tensor, rows: int = 8192) -> float:
    """‖found − wanted‖ / ‖wanted‖ (Frobenius) in float64, a block of rows at a time to avoid a float64 copy of all.

    0 if nothing differs.
    """
    if wanted.dim() == 0:
        found, wanted = found.reshape(1), wanted.reshape(1)
    above = below = 0.0
    for a, b in zip(found.split(rows), wanted.split(rows), strict=True):
        a, b = a.double(), b.double()
        above, below = above + (a - b).square().sum(), below + b.square().sum()
    return float((above / below).sqrt()) if above != 0 else 0.0
