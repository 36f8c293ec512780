"""What is decided before anything moves: whether a model can be streamed, and what a budget keeps where."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from t1lib.errors import choose, is_number, is_whole, require, shown
from t1lib.heads import DEFAULT_HEAD, parse_bytes
from t1lib.heads.fused_plan import DEFAULT_WORKSPACE
from t1lib.memory import GIB, LiveBytes, host_available
from t1lib.models import first_trained, split, trial
from t1lib.plan.choose import choose_plan
from t1lib.plan.cost import Choice
from t1lib.plan.rates import this_machine
from t1lib.plan.work import Work, saved_by, saved_by_layer, with_head, work_of
from t1lib.train.activations import Piece, split_rows

if TYPE_CHECKING:
    from t1lib.train.engine import Engine

SAMPLE = 8192  # tokens on which a layer with adapters runs, so that its activations outweigh copies of its weights


def refuse_shared(model: nn.Module, stack: Sequence[nn.Module], streamed: list[str]) -> None:
    """Raise `T1Error` if a parameter that streams is used elsewhere, too: streaming would untie the two."""
    inside = {module for layer in stack for module in layer.modules()}
    others = [p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)]
    # By memory, which two parameters can share: `b.weight.data = a.weight.data`. (Empty ones have none.)
    uses = Counter(p.data_ptr() for p in (*others, *(p for layer in stack for p in layer.parameters())))
    for index, layer in enumerate(stack):
        for name, param in layer.named_parameters():
            shared = f"{name!r} of layer {index} is used elsewhere, too: stream would untie the two"
            require(name not in streamed or uses[param.data_ptr()] == 1 or param.numel() == 0, shared)


def refuse_recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the model's forward: raise `T1Error` if router logits or attention weights are asked for with
    gradients. Layers record these on the way, but only a layer's output has a gradient."""
    for name in ("output_router_logits", "output_attentions"):
        asked = kwargs.get(name)
        asked = getattr(model.config, name, False) if asked is None else asked
        lost = f"{name}=True: a loss of them would have no gradient; allowed when streamed: within torch.no_grad()"
        require(not (asked and torch.is_grad_enabled()), lost)


def require_host_memory(engine: "Engine", choice: Choice | None) -> None:
    """Raise `T1Error` unless the host can hold the layers with their state."""
    layout, like = engine.layout, torch.empty(0, dtype=engine.layout.dtype)
    dtypes = engine.precision.state_dtypes(like, *engine.optimizer.rules())
    waits = not engine.in_backward or (choice is not None and choice.host_share > 0)  # whether gradients wait there
    each = sum(dtype.itemsize for dtype in dtypes.values()) + layout.dtype.itemsize * waits
    if "low" in dtypes and choice is not None and choice.host_share < 1:
        each += 2 * choice.host_share  # the CPU has whole masters, see `host_bytes`
    trained = sum(any(dict(layer.named_parameters())[n].requires_grad for n in layout.shapes) for layer in engine.stack)
    # Weights move layer by layer, so that only one layer's are held twice.
    need, free = layout.numel * (layout.dtype.itemsize + trained * each), host_available()
    require(need <= free, f"the host has {free / GIB:.1f} GiB to give; streaming needs {need / GIB:.1f} GiB more")


def check_choice(choice: Any, layers: int) -> None:
    """Raise `T1Error` unless it is a `Choice` for a stack of so many layers."""
    require(isinstance(choice, Choice), f"choice={shown(choice)}; allowed: a t1lib.plan.cost.Choice")
    some, all_or_fewer = (1, None, "1 or more"), (0, layers, f"0 to {layers}, the model's layers")
    limits = {"resident": all_or_fewer, "keep": all_or_fewer, "slots": some}
    for name, (least, most, allowed) in limits.items():
        value = getattr(choice, name)
        require(is_whole(value, least, most), f"choice of {name}={shown(value)}; allowed: {allowed}")
    share = choice.host_share
    fits = is_number(share) and 0 <= share <= 1
    require(fits, f"choice of host_share={shown(share)}; allowed: a number from 0 to 1")
    for name in ("inputs", "outer", "grads"):
        choose(f"choice of {name}", getattr(choice, name), ("device", "host"))


def planned(engine: "Engine", piece: Piece | None, rows: int, seq: int) -> Choice:
    """What to keep where for batches of `rows` × `seq` tokens within the budget. piece: as in `work_in`"""
    held = len(engine.stack) * engine.layout.numel * engine.layout.dtype.itemsize  # is on the host already
    work = work_in(engine, piece, rows, seq)
    return choose_plan(work, engine.budget, this_machine(), host_available() * 9 // 10 + held)


def work_in(engine: "Engine", piece: Piece | None, rows: int, seq: int) -> Work:
    """What a step of `rows` × `seq` tokens needs. piece: the first batch on its way into the first layer, if known"""
    inner = engine.model.get_base_model() if hasattr(engine.model, "get_base_model") else engine.model
    groups = engine.optimizer.param_groups
    trained = [p for g in groups for p in g["params"] if p.requires_grad]
    found = [m._t1_head for m in engine.model.modules() if hasattr(m, "_t1_head")]
    patches = [patch["options"] for patch in found if patch["active"]]
    given = [engine.head] if engine.head is not None else patches
    head = {"head": DEFAULT_HEAD} | (given[0] if given else {"head": "full"})
    if head.get("workspace") is not None:
        head["workspace"] = parse_bytes(head["workspace"])
    drawn_from = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(drawn_from):  # running a layer to see what it saves must not change dropout's draws
        work = work_of(
            inner, lambda p: engine.precision.state_dtypes(p, *groups), rows=rows, seq=seq,
            micro_batch=engine.micro_batch, workspace=DEFAULT_WORKSPACE, together=not engine.in_backward,
            layers=engine.stack, trained=trained, cuda=engine.device.type == "cuda",
            accumulates=engine.accumulate, streamed=engine.layout.shapes, travelling=engine.may_travel(),
            **_measured(engine, piece, inner, rows, seq),
        )  # fmt: skip
    if not work.vocabulary:  # the model does not tell its output layer
        return replace(work, workspace=head.get("workspace") or 0)
    work = with_head(work, **head)
    logits = work.tokens * work.vocabulary * work.itemsize * (not given)  # a model's own loss returns them, too
    return replace(work, workspace=work.workspace + logits)


def _measured(engine: "Engine", piece: Piece | None, inner: nn.Module, rows: int, seq: int) -> dict[str, int]:
    """Arguments `hidden`, `saved`, `beside` and `wide` of `work_of` if the configuration does not tell: measured by
    running a layer on as many rows as it computes at a time (the first two) or, for a decoder of transformers with
    adapters or under autocast, on fewer tokens (all but the first)."""
    trained = first_trained(engine.stack)
    wanted = dict(engine.stack[trained].named_parameters())
    adapted = len(engine.layout.shapes) < len(wanted)
    more = adapted or torch.is_autocast_enabled(engine.device.type)  # than the configuration says
    base, kinds = getattr(inner, "base_model", None), MODEL_FOR_CAUSAL_LM_MAPPING
    known = [*getattr(base, "layers", ())] == engine.stack and hasattr(base, "norm") and type(base.config) in kinds
    if known and more:  # `saved_by_layer` takes the model itself apart
        head = inner.get_output_embeddings()
        known = isinstance(getattr(head, "layer", head), nn.Linear)  # a stand-in while a patched model is called
    if known and not more:
        return {}
    early = "plan_for is for decoders such as Llama of transformers; leave it out: the first batch decides"
    require(piece is not None or known, early)
    index = trained if known else 0  # elsewhere, later layers may need other arguments
    with _ready(engine, index, wanted, train=piece is None):
        if known:
            micro, dtype = min(engine.micro_batch or rows, rows), engine.layout.dtype
            fixed, most, wide = _held_by_layer(inner, dtype, micro, seq)
            saved = saved_by_layer(inner, dtype, seq) + -(-fixed // (micro * seq))
            return {"saved": saved, "beside": max(most - micro * seq * saved, 0), "wide": wide}
        part = split_rows(piece, engine.micro_batch)[0]
        hidden = part.hidden.detach().requires_grad_(part.hidden.is_floating_point())
        call = partial(engine.forwards[0], hidden, *part.args, **part.kwargs)
        saved = saved_by(call, engine.stack[0].parameters())
    return {"hidden": hidden.shape[-1], "saved": saved // hidden.shape[:-1].numel()}


@contextmanager
def _ready(engine: "Engine", index: int, trained: dict[str, nn.Parameter], train: bool) -> Iterator[None]:
    """Let layer `index` run as in a step, on the device, and leave it as it was. trained: parameters of a layer whose
    like are trained here, too; train: in training mode, where dropout saves its masks"""
    layer, held, kind = engine.stack[index], engine.host[index] if engine.host else None, engine.device.type
    before = [(module, module.training, dict(module._buffers)) for module in layer.modules()]
    values = [(buffer, buffer.clone()) for buffer in layer.buffers()]  # such as running means, which a run changes
    like = {name for name, param in trained.items() if param.requires_grad}
    frozen = [p for name, p in layer.named_parameters() if name in like and not p.requires_grad]
    dtype, casts = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    if held is not None:
        held.accept_writes()
        held.bind({n: view.to(engine.device) for n, view in held.views.items()})
    try:
        for module, training, _ in before:  # not by `train()`, which a class may have merge weights
            module.training = training or train
        for param in frozen:
            param.requires_grad_(True)
        with torch.autocast(kind, dtype, casts, cache_enabled=False):  # a cache would keep what the first try makes
            yield
    finally:
        for param in frozen:
            param.requires_grad_(False)
        for module, training, buffers in before:
            module.training = training
            module._buffers.update(buffers)
        for buffer, value in values:
            buffer.copy_(value)
        if held is not None:
            held.unbind()


def _held_by_layer(model: PreTrainedModel, dtype: torch.dtype, rows: int, seq: int) -> tuple[int, int, int]:
    """Bytes that a layer saves however few its tokens are, such as copies of weights; the most that its forward and
    backward hold over so many rows, beside the gradients of its input and output; and those of the largest tensor. The
    first trained layer runs on as many rows as `SAMPLE` tokens make, and on half (of one row, on half its tokens); the
    bytes are extrapolated."""
    parts, counts, saved, held, largest = split(model), [], [], [], []
    layer = parts.layers[first_trained(parts.layers)]
    params = [p for p in layer.parameters() if p.requires_grad]
    length = max(2, min(seq, SAMPLE, parts.base.config.max_position_embeddings))
    some = min(rows, max(SAMPLE // length, 1))
    half = (some // 2, length) if some > 1 else (1, length // 2)
    for shape in (half, (some, length)):
        hidden, call = trial(parts, layer, dtype, *shape)
        with LiveBytes() as live, torch.enable_grad():
            out = call()
            saved.append(live.now)
            torch.autograd.grad(out, [hidden, *params], torch.zeros_like(out), allow_unused=True)
        held.append(live.peak - 2 * hidden.nbytes)
        largest.append(live.largest)
        counts.append(math.prod(shape))

    def over(tokens: int, found: list[int]) -> int:
        small, large = found
        return round(large + (tokens - counts[1]) * (large - small) / (counts[1] - counts[0]))

    return max(over(0, saved), 0), over(rows * seq, held), over(rows * seq, largest)
