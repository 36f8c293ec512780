"""How a trainer has the layers called: traced, recomputed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from t1lib.timing import NoTrace, Trace


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
