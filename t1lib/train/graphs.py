"""Layers as CUDA graphs: for few tokens, one launch per layer instead of a hundred that keep the host busy."""

import gc
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from t1lib.train.layers import HostLayer

SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)
OWN = ("forward", "training", "layer_idx")  # attributes that each streamed layer has for itself
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ADAPTERS = "_active_adapter"  # which of PEFT's adapters a module uses
LIMIT = 32  # graphs; beyond this, batches of new shapes run eagerly


class LayerGraphs:
    """Runs functions of layers as CUDA graphs. Layers that are alike and take turns in a slot share a graph: a call
    runs eagerly the first time, is captured the second time, and is replayed from then on. Graphs share their memory,
    as they run one after the other, none needing what another left. allowed: indices of layers that may run this way"""

    def __init__(self, layers: Sequence[nn.Module], allowed: set[int]) -> None:
        kinds: dict[Any, int] = {}  # a number for each
        self.kinds = [kinds.setdefault(_kind(layer, i), len(kinds)) for i, layer in enumerate(layers)]
        self.allowed, self._inner = allowed, [list(layer.modules())[1:] for layer in layers]
        self._graphs: dict[Any, tuple[Any, list[Tensor], Tensor | None]] = {}  # with its inputs and its result
        self._buffers: dict[int, list[Tensor]] = {}  # bytes, by number among a call's tensors; -1: its result
        self._seen: set[Any] = set()
        self._pool: Any = None

    def allow(self, index: int) -> bool:
        """Whether the layer may run as a graph: not if modules inside it have hooks or replaced forwards, which a
        replay would not call, or adapters, whose switching it would not follow."""
        odd = (vars(m).get(name) for m in self._inner[index] for name in (*HOOKS, ADAPTERS, "forward"))
        return index in self.allowed and not any(odd)

    def stop(self) -> None:
        """Run no more graphs: a layer does something that a replay would not. Their memory may be in use: it stays."""
        self.allowed.clear()

    def note_gradients(self, layer: HostLayer, replayed: bool) -> None:
        """Call after a layer's backward. A replay does not tell which parameters received a gradient. So graphs run
        only as long as every eager backward gives one to all trained parameters."""
        trained = {name for name, param in layer.params.items() if param.requires_grad}
        if replayed and not layer.grads.reached:
            layer.grads.reached = trained
        elif layer.grads.reached != trained:
            self.stop()

    def run(self, index: int, where: Any, function: Callable[..., Tensor | None], *inputs: Any) -> Tensor | None:
        """Return function(*inputs) for layer `index`. What cannot be captured, because it waits for the device, runs
        eagerly, with a warning.

        where    a key: what the function does, and where on the device everything lies that it uses beside its inputs
        inputs   tensors of one device, `SIMPLE` objects, and dicts, tuples and lists of them; with others, such as a
                 cache, a mask object, or a number on the CPU, which a capture would read, it runs eagerly
        """
        leaves, structure = tree_flatten(inputs)
        tensors = [value for value in leaves if isinstance(value, Tensor)]
        apart = len({tensor.device for tensor in tensors}) > 1
        if apart or not all(isinstance(value, (Tensor, *SIMPLE)) for value in leaves):
            return function(*inputs)
        shape = tuple(_layout(value) if isinstance(value, Tensor) else value for value in leaves)
        key = self.kinds[index], where, str(structure), shape
        if key not in self._graphs:
            if key not in self._seen or len(self._graphs) == LIMIT:
                self._seen.add(key)
                return function(*inputs)
            try:
                self._graphs[key] = self._captured(function, inputs, tensors)
            except RuntimeError as error:
                warnings.warn(f"layers run without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
                self.stop()
                return function(*inputs)
        graph, own, made = self._graphs[key]
        for held, given in zip(own, tensors, strict=True):
            held.copy_(given)
        graph.replay()
        return None if made is None else made.clone()

    def _captured(self, function: Callable[..., Tensor | None], inputs: Any, tensors: list[Tensor]) -> Any:
        """Capture a call. Nothing is computed yet; other threads may go on using the device."""
        own = [self._held(number, tensor) for number, tensor in enumerate(tensors)]  # what the graph reads as inputs
        left = iter(own)
        arguments = tree_map(lambda value: next(left) if isinstance(value, Tensor) else value, inputs)
        graph, device, collecting = torch.cuda.CUDAGraph(), tensors[0].device, gc.isenabled()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        gc.collect()
        gc.disable()  # a collection may free graphs or pinned memory, which must not happen during a capture
        try:
            with (
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.current_stream(device)),  # restores the stream, even if the capture fails
                torch.cuda.graph(graph, self._pool, _capturing(device), capture_error_mode="thread_local"),
            ):
                made = function(*arguments)
                if made is not None:
                    made = self._held(-1, made).copy_(made.detach())
        finally:
            if collecting:
                gc.enable()
        return graph, own, made

    def _held(self, number: int, tensor: Tensor) -> Tensor:
        """A tensor like this one in a buffer that graphs share: batches of other shapes need no more than the largest,
        unless they come in the order of their sizes."""
        like = torch.empty_like(tensor, device="meta")  # dense, also where the tensor repeats its values
        nbytes, buffers = like.untyped_storage().nbytes(), self._buffers.setdefault(number, [])
        if not any(len(buffer) >= nbytes for buffer in buffers):
            buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=tensor.device))
        buffer = next(buffer for buffer in buffers if len(buffer) >= nbytes)
        return buffer[:nbytes].view(tensor.dtype).as_strided(like.shape, like.stride())


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@cache
def _capturing(device: torch.device) -> "torch.cuda.Stream":
    """One stream for all captures on a device. It has high priority, as all lanes but the urgent one have normal
    priority: PyTorch hands out the streams of one priority in turn, so that a lane could have got the same one."""
    return torch.cuda.Stream(device, priority=-1)


def _kind(layer: nn.Module, index: int) -> Any:
    """A key that is equal for layers that differ only in their weights. A layer with buffers is like no other."""
    if any(True for _ in layer.buffers()):
        return index
    settings = []  # all that determines what a module computes; objects count by their identity
    for path, module in layer.named_modules():
        settings.append((path, type(module)))
        for name, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | None)
            if name not in OWN and (plain or not name.startswith("_")):
                settings.append((name, value if plain else id(value)))
    return tuple(settings)
