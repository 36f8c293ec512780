"""Head `fused`: launches of the large products, with the kernels for any GPU or those for Hopper."""

from typing import Any

from torch import Tensor

from t1lib.heads.fused_chunks import Chunks, Operands, tile
from t1lib.heads.fused_memory import wrap
from t1lib.heads.kernels import forward, products, recompute

try:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from t1lib.heads.kernels import hopper
except ImportError:  # Gluon is part of Triton from 3.6 on, and its names may still change
    hopper = None

STAGES = 4  # pipeline stages of `hopper`'s kernels, 48 KiB of shared memory each
CACHED = 10 * 2**20  # bytes of hidden states that stay in a 50 MB L2 cache while the weight streams through it
HALF, STEP, QUARTER = 64, 64, 64  # rows of a half tile, step along D, columns of a quarter tile


def _apart(o: Operands, *written: Tensor | None) -> bool:
    """Whether the kernels in `kernels.hopper` take these operands: 16 bits, copied by TMA, on Hopper."""
    fits = all(t is None or (t.element_size() == 2 and o.tma(t)) for t in (o.w, *written))
    return hopper is not None and o.device.kind == "hopper" and o.compute.itemsize == 2 and fits


def _box(matrix: Tensor | None, height: int, width: int) -> Any:
    if matrix is None:
        return None
    layout = NVMMASharedLayout.get_default_for([height, width], bfloat16)  # any 16 bits
    return TensorDescriptor.from_tensor(matrix, [height, width], layout)


def _group(o: Operands) -> int:
    """Number of row blocks that go through the vocabulary together (`tiles.grouped`)."""
    return max(1, CACHED // (o.tiles.m * o.hidden * o.compute.itemsize))


def _number(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def exponentials(
    chunks: Chunks, chunk: int, splits: int, z: Tensor | None, room: int, offset: Tensor, parts: Tensor, redo: bool
) -> None:
    """Launch `forward.exponentials` on a packed chunk; its sums go to parts (3, splits · capacity)."""
    o, opts, t, x = chunks.operands, chunks.operands.opts, chunks.operands.tiles, chunks.hidden_states
    blocks = chunks.capacity // t.m
    vectors = (o.b, opts.local_class_weight, offset, chunks.flag, *parts, chunks.info)
    z_rows, z_columns = (1, 1) if z is None else z.shape
    sizes = (chunk, chunks.capacity, opts.vocab, o.hidden, blocks, _group(o), splits)
    panels = (z_columns, room, wrap(opts.vocab, z_columns, room))
    flags = dict(
        STORE=z is not None, BIAS=o.b is not None, SOFTCAP=opts.softcap is not None, PULL=bool(opts.label_smoothing),
        WEIGHTED=opts.class_weight is not None, RAGGED=opts.vocab % t.n != 0, REDO=redo,
    )  # fmt: skip
    if _apart(o, z):
        hopper.exponentials[(blocks * splits,)](
            _box(x, HALF, STEP), _box(o.w, t.n, STEP), _box(z, HALF, QUARTER), *vectors, *sizes,
            *panels, _number(opts.softcap),
            N=t.n, S=STAGES, **flags, num_warps=4,
        )  # fmt: skip
        return
    tma_w = o.tma(o.w)
    forward.exponentials[(blocks * splits,)](
        tile(x, t.m, t.k, o.device.tma), tile(o.w, t.n, t.k, tma_w),
        None if z is None else tile(z, t.m, t.n, o.device.tma), *vectors, *sizes,
        z_rows, *panels, x.stride(0), o.w.stride(0), 0 if z is None else z.stride(0), _number(opts.softcap),
        M=t.m, N=t.n, K=t.k, **flags, TMA=o.device.tma, TMA_W=tma_w, PRECISION=o.precision,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


def products_of(
    chunks: Chunks, chunk: int, z: Tensor, first: int, de: Tensor | None, dw: Tensor | None, *,
    db: Tensor | None = None, parts: int = 1, add_de: bool = False, add_dw: bool = False,
    even_sum: Tensor | None = None,
) -> None:  # fmt: skip
    """dE (parts · capacity, D) and dW (V, D) from a chunk's logit gradients z, whose columns are w's rows from `first`.

    db (V) float32, only together with dW: zᵀ times the rows' factors is added to it.
    """
    o, t, x = chunks.operands, chunks.operands.tiles, chunks.x
    vectors = (even_sum, o.opts.local_class_weight, chunks.info)
    sizes = (chunk, chunks.capacity, o.opts.vocab, o.hidden, first, z.shape[1])
    flags = dict(
        DE=de is not None, DW=dw is not None, DB=db is not None, ADD_DE=add_de, ADD_DW=add_dw,
        EVEN=even_sum is not None, WEIGHTED=o.opts.class_weight is not None,
    )  # fmt: skip
    strides = tuple(0 if m is None else m.stride(0) for m in (de, dw))
    tma, tma_w, tma_dw = o.device.tma, o.tma(o.w), dw is not None and o.tma(dw)
    pieces = 1 if dw is None else dw.element_size()
    products.products[(o.device.units,)](
        tile(z, t.m, t.k, tma), tile(z, t.k, t.m, tma), tile(o.w, t.k, t.n, tma_w), tile(x, t.k, t.n, tma),
        None if db is None else tile(chunks.memory["factors"], t.k, 16, tma),
        None if de is None else tile(de, t.m, t.n // 4, tma),
        None if dw is None else tile(dw, t.m, t.n // pieces, tma_dw),
        db, *vectors, *sizes, z.shape[0], x.shape[0], parts, z.stride(0), o.w.stride(0), x.stride(0), *strides,
        M=t.m, N=t.n, K=t.k, BIAS_STAGES=t.bias_stages, **flags, TMA=tma, TMA_W=tma_w, TMA_DW=tma_dw, PIECES_DE=4,
        PIECES_DW=pieces, PRECISION=o.precision, num_warps=t.warps, num_stages=t.product_stages,
    )  # fmt: skip


def gradients(chunks: Chunks, chunk: int, z: Tensor, first: int, packed: list[Tensor]) -> None:
    """z ← dL / d(raw logits) of a packed chunk, for as many columns from `first` on as z has."""
    o, opts, t, x = chunks.operands, chunks.operands.opts, chunks.operands.tiles, chunks.hidden_states
    vectors = (o.b, opts.local_class_weight, *packed, chunks.target, chunks.info)
    numbers = (_number(opts.softcap), _number(opts.filter_eps))
    flags = dict(
        BIAS=o.b is not None, SOFTCAP=opts.softcap is not None, EVEN=bool(opts.label_smoothing),
        WEIGHTED=opts.class_weight is not None, FILTER=opts.filter_eps is not None,
    )  # fmt: skip
    if _apart(o, z):
        hopper.logit_gradients[(o.device.units,)](
            _box(x, HALF, STEP), _box(o.w, t.n, STEP), _box(z, HALF, QUARTER), *vectors,
            chunk, opts.vocab, o.hidden, first, z.shape[1], _group(o), *numbers, N=t.n, S=STAGES, **flags, num_warps=4,
        )  # fmt: skip
        return
    tma_w = o.tma(o.w)
    recompute.logit_gradients[(o.device.units,)](
        tile(x, t.m, t.k, o.device.tma), tile(o.w, t.n, t.k, tma_w), tile(z, t.m, t.n, o.device.tma), *vectors,
        chunk, chunks.capacity, opts.vocab, o.hidden, first, z.shape[1], _group(o),
        x.stride(0), o.w.stride(0), z.stride(0), *numbers,
        M=t.m, N=t.n, K=t.k, **flags, TMA=o.device.tma, TMA_W=tma_w, PRECISION=o.precision,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
