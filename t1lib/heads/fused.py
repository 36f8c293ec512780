"""Head `fused`: Triton kernels that never hold the whole logits and run at the speed of the matrix products. PyTorch
sees one operator, and a second one for a backward that recomputes the logits: its compiler knows what shapes and what
gradients they give. Both take six tensors (`Tensors`), numbers, sizes, words and flags (`Packed`)."""

import os
import threading
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from t1lib.errors import choose, require
from t1lib.heads import fused_plan, options
from t1lib.heads.chunked import chunked as chunked_head
from t1lib.heads.full import full
from t1lib.heads.fused_plan import Packed
from t1lib.heads.kernels import scale_, triton
from t1lib.heads.options import HeadStats, Settings, Tensors

TIGHT = 1.0  # with a softcap below this, the logits that matter lie where tanh is flat
INTERPRETER = threading.Lock()  # Triton's interpreter serves one thread at a time
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? token_weight, "
    "float[] numbers, SymInt[] sizes, str words, bool[] flags"
)


def fused(
    tensors: Tensors, settings: Settings, *, chunks: int | None = None, tail: str | None = None
) -> tuple[Tensor, HeadStats | None]:
    """Cross-entropy of a linear layer's outputs by Triton kernels; how it works is in docs/heads.md.

    workspace   default: 1.5 GiB (loss alone: 16 MiB) plus 192 bytes per token and copies. A weight is copied, and the
                copy counts, if its dtype is not the products' (float32 under autocast) or its columns' stride not 1;
                likewise an input whose tokens are not evenly spaced in memory, such as `hidden[:, :-1]`
    chunks      instead of workspace: number of chunks of tokens, rounded to whole row tiles. In 16 bits dW is rounded
                once per chunk; where the forward computes the gradients, the targets' own terms and the rows of at most
                1024 frequent targets (of four tokens or more) only once
    tail        "fp8": where the forward computes the gradients on a Hopper GPU, the products for dE and dW take the
                small entries of the logits' gradient in FP8 (docs/fp8.md lists what it refuses). No effect on a CPU or
                another GPU with FP8, under "none", without tokens, and if the weight is below 2048 × 64 or not in rows
                on 16-byte boundaries

    Runs on CUDA with bfloat16, float16 and float32 operands; tuned for Hopper. Elsewhere, for float64, and for bfloat16
    in Triton's interpreter, head `chunked` takes over (with filter_eps, `full`). Raises `T1Error` for a bad argument, a
    workspace too small (stating the least that works), create_graph=True, and a second backward where the forward
    computed the gradients."""
    options.check_chunks(chunks, settings)
    if tail is not None:
        choose("tail", tail, ("fp8",))
        _check_tail(tensors, settings, chunks)
    if not kernels_run(tensors.input):
        if settings.filter_eps is not None and settings.shards is None:  # `full` does not know of shards
            return full(tensors, settings)
        return chunked_head(tensors, settings, chunks=chunks)
    packed = _packed(tensors, settings, chunks, tail is not None)
    loss, *stats = forward_op(*tensors, *packed.lists())[:4]
    return loss, HeadStats(*stats) if settings.return_stats else None


def _check_tail(tensors: Tensors, s: Settings, chunks: int | None) -> None:
    """Raise `T1Error` for operands and options that tail="fp8" excludes, and for a GPU without FP8."""
    device, dtypes = tensors.input.device, (tensors.input.dtype, tensors.linear_weight.dtype)
    compute = options.autocast_dtype(tensors.input) or dtypes[0]
    wrong = {
        f"products in {compute}": compute != torch.bfloat16, "float16 parameters": torch.float16 in dtypes,
        "a GPU without FP8": device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9),
        "linear_bias": tensors.linear_bias is not None, "label_smoothing": s.label_smoothing > 0,
        "a softcap below 1": (s.softcap or TIGHT) < TIGHT, "filter_eps": s.filter_eps is not None,
        "a group": s.shards is not None, "chunks": chunks is not None,
    }  # fmt: skip
    found = ", ".join([what for what, is_so in wrong.items() if is_so])
    require(not found, f'tail="fp8" does not work with {found}; allowed: bfloat16 products on a GPU with FP8')


def kernels_run(input: Tensor) -> bool:
    """Whether the kernels take this input: not empty, at most 32 bits per element, on CUDA or in Triton's interpreter;
    not products of bfloat16 (also from autocast) in the interpreter, which gets them wrong. Warns without Triton."""
    empty = not torch.compiler.is_compiling() and input.numel() == 0  # the compiler may not know the number of tokens
    compute = options.autocast_dtype(input) or input.dtype
    there = compute != torch.bfloat16 if os.environ.get("TRITON_INTERPRET") == "1" else input.is_cuda
    runs = there and not empty and input.dtype != torch.float64
    if runs and triton is None:
        warnings.warn("head 'fused' needs Triton, which is not installed; 'chunked' computes instead", stacklevel=4)
    return runs and triton is not None


def _packed(tensors: Tensors, s: Settings, chunks: int | None, tail: bool) -> Packed:
    """The operators' other arguments. Shapes and tensors' values are checked inside the operator: the compiler cannot
    trace that."""
    input, w, _, b, *_ = tensors
    autocast = options.autocast_dtype(input)
    compute = autocast or input.dtype
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (input, w, b)]
    hopper = input.is_cuda and fused_plan.device_of(input.device).kind == "hopper"
    tail = tail and hopper and s.reduction != "none" and w.dim() == 2 and w.shape[0] >= 2048 and w.shape[1] >= 64
    if tail:  # the FP8 kernels take rows on 16-byte boundaries, as those of copies are
        tail = w.shape[1] % 8 == 0 and (fused_plan.is_copied(w, compute) or w.stride(0) % 8 == 0)
    early = any(needs) and (tail or _is_early(tensors, s, compute))
    return Packed(s, chunks, DTYPES[autocast] if autocast else "-", needs, early, tail)


def _is_early(tensors: Tensors, s: Settings, compute: torch.dtype) -> bool:
    """Whether the forward computes the gradients: if it knows their factors, no dtype is too narrow for gradients
    before these are applied, it need not filter, what it keeps gives the softcap's slope, and recomputing is slower."""
    input, w = tensors.input, tensors.linear_weight
    steep = s.softcap is not None and (s.label_smoothing > 0 or s.softcap < TIGHT)
    narrow = torch.float16 in (compute, input.dtype, w.dtype)
    if steep or narrow or s.reduction == "none" or s.filter_eps is not None:
        return False
    if s.workspace is None or w.dim() != 2:
        return True
    rows, hidden = w.shape if s.shards is None else (max(s.shards.rows), w.shape[1])
    tokens = 0 if torch.compiler.is_compiling() else tensors.target.numel()  # the compiler may not know their number
    if s.shards is not None and s.shards.sequence:
        tokens *= s.shards.size
    needed = fused_plan.early_from(tokens, rows, hidden, compute.itemsize, input.is_cuda)
    return s.workspace >= needed + fused_plan.copies(tensors, compute, rows)


@torch.library.custom_op(
    "t1lib::linear_cross_entropy", mutates_args=(), schema=f"({ARGUMENTS}) -> ({7 * 'Tensor, '}Tensor)"
)
def forward_op(*call):
    """(loss, lse, logprob, correct, saved, dE, dW, dBias); some may be empty. saved: whether any token counts,
    () bool, if the gradients are among these (`early`), else offset and log_total, (2, N)."""
    from t1lib.heads import fused_launch, fused_run  # need Triton

    tensors, given = Tensors(*call[:6]), Packed.of(*call[6:])
    with torch.cuda.device_of(tensors.input) if tensors.input.is_cuda else INTERPRETER:  # where Triton launches
        o = fused_plan.Operands(tensors, given, check=True)
        if any(given.needs) and not given.early:  # a workspace too small for the backward is refused here already
            o.plan("late")
        if given.early and given.tail and len(o.e) and fused_launch.aligned(o.w):
            from t1lib.heads import fused_tail

            done = fused_tail.early(o)
        else:
            done = fused_run.early(o) if given.early else fused_run.loss_only(o)
        loss, stats = done.results()
        # operators return no views
        stats = [tensors.input.new_empty(0) for _ in range(3)] if stats is None else [x.clone() for x in stats]
        saved = done.number > 0 if given.early else torch.stack([done.fields["offset"], done.fields["log_total"]])
        return loss, *stats, saved, *_filled(tensors, done.gradients())


@forward_op.register_fake
def _(*call):
    tensors, given = Tensors(*call[:6]), Packed.of(*call[6:])
    shape, new, s = tensors.target.shape, tensors.input.new_empty, given.settings
    tokens = tensors.target.numel() * (s.shards.size if s.shards and s.shards.sequence else 1)
    loss = new(shape if s.reduction == "none" else (), dtype=torch.float32)
    dtypes = torch.float32, torch.float32, torch.bool
    stats = [new(shape, dtype=t) if s.return_stats else new(0) for t in dtypes]
    saved = new((), dtype=torch.bool) if given.early else new((2, tokens), dtype=torch.float32)
    return loss, *stats, saved, *_filled(tensors, [needed and given.early for needed in given.needs])


@torch.library.custom_op(
    "t1lib::linear_cross_entropy_backward", mutates_args=(),
    schema=f"(Tensor upstream, Tensor lse, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def backward_op(upstream, lse, *call):
    """(dE, dW, dBias) from recomputed logits and the saved log-sum-exp; empty where not needed."""
    from t1lib.heads import fused_run

    tensors = Tensors(*call[:6])
    with torch.cuda.device_of(lse) if lse.is_cuda else INTERPRETER:
        o = fused_plan.Operands(tensors, Packed.of(*call[6:]), check=False)
        return _filled(tensors, fused_run.late(o, lse, upstream))


@backward_op.register_fake
def _(upstream, lse, *call):
    return _filled(Tensors(*call[:6]), Packed.of(*call[6:]).needs)


def _filled(tensors: Tensors, gradients: Sequence[Tensor | bool | None]) -> tuple[Tensor, ...]:
    """Gradients like their operands: uninitialised for True, empty for None, because operators return tensors. The
    weight's is no view: autograd adds the embedding's to it in place only if nothing else refers to its memory."""
    found = []
    for t, g in zip((tensors.input, tensors.linear_weight, tensors.linear_bias), gradients, strict=True):
        if isinstance(g, Tensor):
            found.append((g if g.shape == t.shape else g.reshape(t.shape)).to(t.dtype))
        else:
            found.append(t.new_empty(t.shape) if g else tensors.input.new_empty(0))
    return tuple(found)


def _setup(ctx, inputs, output) -> None:
    ctx.given, ctx.spent = Packed.of(*inputs[6:]), False
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[4], *(output[5:] if ctx.given.early else inputs[:6]))


def _backward(ctx, upstream: Tensor | None, *_) -> tuple[Tensor | None, ...]:
    given = ctx.given
    options.require_plain_backward("fused", upstream, grouped=given.settings.shards is not None)
    if upstream is None:
        return (None,) * 10
    if ctx.spent:
        raise options.spent("fused", 'reduction="none"')
    saved, *made = ctx.saved_tensors
    # if all tokens are ignored, even an infinite upstream gradient gives 0
    upstream = upstream.where(saved, 0.0) if given.early else upstream
    if not given.early:
        made = backward_op(upstream, saved, *made, *given.lists())
    elif type(upstream) is not Tensor:  # traced by the compiler, which reuses memory itself and would copy for `scale_`
        made = [(g.float() * upstream).to(g.dtype) for g in made]
    else:
        ctx.spent = True
        for g in filter(Tensor.numel, made):
            scale_(g, upstream)
    de, dw, db = (g if needed else None for g, needed in zip(made, given.needs, strict=True))
    return de, dw, None, db, *(None,) * 6


forward_op.register_autograd(_backward, setup_context=_setup)
