"""Triton kernels. Those of this file multiply large tensors by factors that only the device knows, rounding once;
PyTorch's own, used without Triton or on a CPU, take three to four times as long where 16 and 32 bits are mixed (622 MB
on an H200: 1.2 ms, not 0.3).

The other files hold head `fused`'s. Tokens are taken **in order**, those that count first, in **chunks** of at most
`capacity` rows; the current one begins at `start`. A chunk's hidden states are **packed**, with zero rows after
the last token that counts, up to a whole tile. Only the device knows how many count (`number`): the host never waits
for it. `row` (fields, tokens) float32 holds what is known of each token, in order (`tiles.FIELDS`). Logits are in units
of log 2 (`z2` = z / ln 2), so that an exponential is one instruction."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for Windows and macOS
    triton = None

# Options of every launch: multiply and add in one operation, which is the default until Triton 3.10.
FMA = {"enable_fp_fusion": True}
BLOCK, PROGRAMS = 4096, 4096  # more programs would only take longer to find that there is nothing to do

if triton is not None:

    @triton.jit
    def _scale_kernel(x, factor, numel, BLOCK: tl.constexpr):
        f = tl.load(factor)
        if f != 1.0:  # it is 1 after a plain loss.backward(): nothing is read or written then
            for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                inside = at < numel
                value = tl.load(x + at, mask=inside).to(f.dtype)
                tl.store(x + at, (value * f).to(x.dtype.element_ty), mask=inside)

    @triton.jit
    def _scale_rows_kernel(x, factor, out, columns, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + c, mask=c < columns)
        tl.store(out + row * columns + c, (value * tl.load(factor + row)).to(out.dtype.element_ty), mask=c < columns)


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x ← x · factor in place, in the factor's precision. x: contiguous; factor: a 32- or 64-bit scalar."""
    if triton is not None and x.is_cuda:
        with torch.cuda.device_of(x):
            _scale_kernel[(min(PROGRAMS, triton.cdiv(x.numel(), BLOCK)),)](x, factor, x.numel(), BLOCK, **FMA)
        return x
    # Shape (1), not (): PyTorch would round a zero-dimensional float32 factor to x's dtype before the product.
    return torch.mul(x, factor.reshape(1), out=x)


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out ← x · factor, (rows, columns), contiguous; factor (rows, 1) in x's dtype. Returns out."""
    if triton is None or not x.is_cuda or x.dtype == torch.float64:
        return torch.mul(x, factor, out=out)
    with torch.cuda.device_of(x):
        _scale_rows_kernel[(len(x), triton.cdiv(x.shape[1], BLOCK))](x, factor, out, x.shape[1], BLOCK, **FMA)
    return out
