"""Which parameters a trainer trains, and how it has the layers called: compiled, traced, recomputed."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from t1lib.errors import require
from t1lib.models import Parts
from t1lib.timing import NoTrace, Trace

TRAINABLE = ("all", "layers", "marked")


def mark_trainable(model: nn.Module, parts: Parts, train: str, loss: str) -> None:
    """Mark "all" parameters, only those of the "layers", or leave the marks as they are ("marked").

    Raises `T1Error` if nothing is marked, or something that this loss gives no gradient.
    """
    in_layers = {id(p) for p in parts.layers.parameters()}
    for param in model.parameters() if train != "marked" else ():
        param.requires_grad_(train == "all" or id(param) in in_layers)
    require(any(p.requires_grad for p in model.parameters()), "no parameter of the model is marked")
    behind = {*parts.norm.parameters(), *parts.head.parameters()} - {parts.embed.weight}
    lost = [n for n, p in model.named_parameters() if p.requires_grad and p in behind]
    require(
        loss != "mean_square" or not lost,
        f"loss 'mean_square' ends before norm and head: with train={train!r} {lost[:1]} would get no gradient; "
        "allowed: train='layers', or marks on layers and embedding alone",
    )


def compile_alike(layers: Sequence[nn.Module]) -> None:
    """Compile the layers by class, not one by one: like layers share the code, and weights are only its inputs."""
    compiled = cache(lambda kind: torch.compile(kind.forward))
    for layer in layers:
        layer.forward = partial(compiled(type(layer)), layer)


def wrap_layers(layers: Sequence[nn.Module], trace: Callable[[], Trace | NoTrace], recompute: bool) -> None:
    """Have the layers' calls traced, and recomputed in the backward."""
    for index, layer in enumerate(layers):
        layer.forward = partial(_call, index, layer.forward, trace)
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _call(
    index: int, forward: Callable[..., Tensor], trace: Callable[[], Trace | NoTrace], *args: Any, **kwargs: Any
) -> Tensor:
    again = torch._C._current_graph_task_id() != -1  # within a backward
    with trace().span("compute", "recompute" if again else "forward", index):
        out = forward(*args, **kwargs)
    if isinstance(trace(), Trace) and out.requires_grad and not again:
        out.register_hook(partial(_begin_backward, index, trace()))
    return out


def _begin_backward(index: int, trace: Trace, _: Tensor) -> None:
    # Called when the gradient of this layer's output is ready: the layer above is done, this one begins.
    trace.end("compute", "backward", index + 1)
    trace.begin("compute", "backward", index)
