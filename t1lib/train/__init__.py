"""Streaming of a model's layers under any training loop (`stream`), and one loop that runs it and plain PyTorch alike.

A streamed model's layers live on the host, and come to the device one at a time. Each becomes one autograd function of
the whole batch (`t1lib.train.passes`), so that weights cross the link once per pass however many rows there are. The
rest of the model, and the user's loop, loss and schedule, stay as they are. Copies and updates are scheduled in
`t1lib.train.schedule` (T1M1 §3.1; SlideFormer, arXiv:2603.16428).
"""

from typing import Any

import torch
from torch import nn

from t1lib.errors import T1Error, is_whole, require, shown
from t1lib.heads import check_options, parse_bytes
from t1lib.memory import grow_segments
from t1lib.models import PRESETS, build_model
from t1lib.optimizers import OptimizerSpec, Precision, Schedule
from t1lib.plan.cost import Choice
from t1lib.train.engine import Engine, engine_of
from t1lib.train.optimizer import StreamOptimizer, check_optimizer
from t1lib.train.placing import check_choice

__all__ = ["MODES", "PRESETS", "OptimizerSpec", "Schedule", "StepRecord", "StreamOptimizer", "Trainer"]
__all__ += ["build_model", "load_checkpoint", "make_trainer", "save_checkpoint", "stream"]


def stream(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, gpu_memory: str | int | None = None,
    micro_batch: int | None = None, layers: nn.ModuleList | None = None, device: torch.device | str | None = None,
    master_weights: str | None = "whole", moments: str = "float32", update_in_backward: bool = False,
    accumulate: bool = True, plan_for: tuple[int, int] | None = None, choice: Choice | None = None,
    head: dict[str, Any] | None = None, overlap: bool = True,
) -> tuple[nn.Module, StreamOptimizer]:  # fmt: skip
    """Stream a model's layers through the device, under any training loop. Returns the model and the optimizer to use.

        model, optimizer = stream(model, torch.optim.AdamW(model.parameters(), lr=1e-4), gpu_memory="15GiB")
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    model              on the CPU or the device; its layers move to pinned host memory, the rest to the device. If it
                       streams already, that ends first, as by its optimizer's `close()`
    optimizer          `torch.optim.AdamW` or `SGD` with any groups, the model's only optimizer; its state is taken over
    gpu_memory         the most to reserve on the device, in bytes or as "15GiB", planned for the first training batch
                       or, for decoders such as Llama, for `plan_for`: (rows, tokens per row). None: two layers at a
                       time, all layers' inputs, and embedding, norm and head with their state: not the least
    micro_batch        rows that a layer computes at a time (default: the whole batch)
    layers             the stack of layers, for a model that is not a decoder of transformers; each is called with a
                       tensor (B, …) first and returns one of the same shape
    device             default: a GPU if there is one
    master_weights     for 16-bit parameters: "whole" keeps a float32 master of each beside it, "split" only the bits
                       that bfloat16 lacks; None keeps all state in the parameter's own dtype, as plain PyTorch would
    moments            "float32", or "bfloat16" with stochastic rounding: for AdamW's, beside masters
    update_in_backward update each layer as soon as its gradients are complete; for one backward per step, unclipped
    accumulate         False: one backward per step; another is refused while gradients are there. Those of layers on
                       the device then take memory only at the end of the backward, so gpu_memory holds more layers
    choice             a `t1lib.plan.cost.Choice` of what is kept where, instead of a plan
    head               what the plan must know of the loss: "head" of its `linear_cross_entropy`, and the options that
                       its memory depends on: "workspace", "chunks", "by", "tail", "filter_eps" (default: as set by
                       `patch_head`; for a model that is not patched, head "full")
    overlap            False: copies and updates do not run beside the computation (to measure what that is worth)

    Updates begin at `step()` and go on during the next forward. Results are those of plain PyTorch with each layer
    under `torch.utils.checkpoint`; in float32 on a CPU, bit for bit. Every backward sends the weights again, so prefer
    a large batch with `micro_batch` to accumulation. `p.grad` and the weights are complete whenever they are looked at.
    Change weights in place under `torch.no_grad()`, not through `p.data`: such a write may go unnoticed outside the
    layers, and in those that a plan keeps on the device; in a streamed layer assigning `p.data` is refused.
    Unless the environment says otherwise, PyTorch's allocator is told to use expandable segments, which it can only if
    nothing is on the GPU yet: so leave the model on the CPU.
    Hooks see a layer as under checkpointing; a loss on tensors that they caught inside a layer has no gradient there.

    Raises `T1Error`, before anything is changed, for a bad argument, for an optimizer or a model that cannot stream,
    and for a host without enough memory. A budget that is too small raises when the plan is made; the other things
    that docs/streaming.md lists as refused raise when they happen.
    """
    require(isinstance(model, nn.Module), f"model of type {type(model).__name__}; allowed: a torch.nn.Module")
    # An engine gives the model and its layers an `_apply` of their own.
    former, streams = engine_of(model), any("_apply" in vars(module) for module in model.modules())
    require(former is not None or not streams, "a part of the model is streamed; call its optimizer's `close()` first")
    if former is not None and former.failed:
        former.close()  # which tells why
    empty = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    require(not empty, "the model is on device 'meta', in whole or in part; allowed: on the CPU, not offloaded to disk")
    whole = micro_batch is None or is_whole(micro_batch, 1)
    require(whole, f"micro_batch={shown(micro_batch)}; allowed: 1 or more, whole numbers, or None")
    check_optimizer(optimizer, model)
    kept = former.unstreamed() if former is not None and former.in_backward else model.parameters()
    begun = any(param.grad is not None for param in kept)
    require(not begun, "the model has gradients; allowed: a model without, as after zero_grad()")
    require(head is None or isinstance(head, dict), f"head={shown(head)}; allowed: a dict, or None")
    if head is not None:
        check_options(head := {**head})  # a copy: the plan may be made later
    budget = None if gpu_memory is None else parse_bytes(gpu_memory, least=2**20)
    pair = isinstance(plan_for, tuple | list) and len(plan_for) == 2 and all(is_whole(n, 1) for n in plan_for)
    require(plan_for is None or pair, f"plan_for={shown(plan_for)}; allowed: (rows, tokens per row), each 1 or more")
    stack = stack_of(model) if layers is None else layers
    own = isinstance(stack, nn.ModuleList) and any(m is stack for m in model.modules())
    some = own and any(True for _ in stack.parameters())
    require(some, f"layers={type(layers).__name__}; allowed: an nn.ModuleList of the model's, with parameters")
    recomputes = any(getattr(layer, "gradient_checkpointing", False) for layer in stack)
    require(not recomputes, "the model's gradient checkpointing is on; stream recomputes layers itself: turn it off")
    if choice is not None:
        check_choice(choice, len(stack))
        require(budget is None, "gpu_memory and choice: give one of them")
    grow_segments()
    engine = Engine(
        model, optimizer, stack, device=usable(device), precision=Precision(master_weights, moments),
        micro_batch=micro_batch, in_backward=update_in_backward, accumulate=accumulate, overlap=overlap, budget=budget,
        plan_for=plan_for, choice=choice, head=head, former=former,
    )  # fmt: skip
    return model, engine.optimizer


def usable(device: torch.device | str | None) -> torch.device:
    """The CPU or GPU asked for (default: a GPU if any). Raises `T1Error` for others, and for a GPU if there is none."""
    there = torch.cuda.is_available()
    try:
        found = torch.device(("cuda" if there else "cpu") if device is None else device)
    except (RuntimeError, TypeError):
        raise T1Error(f"device {shown(device)}; allowed: 'cpu', 'cuda', 'cuda:1', …") from None
    require(found.type in ("cpu", "cuda"), f"device {str(found)!r}; allowed: 'cpu', 'cuda', 'cuda:1', …")
    count = torch.cuda.device_count() if there else 0
    here = f"'cuda:0' to 'cuda:{count - 1}'" if there else "'cpu', as there is no CUDA device"
    require(found.type != "cuda" or (found.index or 0) < count, f"device {str(found)!r}; allowed here: {here}")
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def stack_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a Hugging Face model, adapted or not: its largest `nn.ModuleList` (else `T1Error`)."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = getattr(inner, "base_model", inner)
    found = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    known = bool(found) and hasattr(inner, "config")
    require(known, f"no stack of layers found in a {type(inner).__name__}; give it as layers=")
    return max(found, key=lambda m: sum(p.numel() for p in m.parameters()))


# Last, as these import from here.
from t1lib.train.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from t1lib.train.loop import StepRecord, Trainer  # noqa: E402
from t1lib.train.modes import MODES, make_trainer  # noqa: E402
