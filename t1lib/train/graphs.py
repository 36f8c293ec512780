"""Layers as CUDA graphs: for few tokens, one launch per layer instead of a hundred that keep the host busy."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device, tuple)  # tuples: keys, and types with lengths
OWN = ("forward", "training", "layer_idx")  # attributes that each streamed layer has for itself
SMALL = 2**20  # bytes; see `_Input.take`
LIMIT = 32  # graphs; beyond this, batches of new shapes run eagerly


class LayerGraphs:
    """Runs functions of layers that are alike and take turns in the same few places on the device. A call runs eagerly
    the first time, is captured the second time, and is replayed from then on. All graphs share their memory: they run
    one after the other, and none needs anything that another one left there.

    layers   those that may be run; their modules' settings tell which of them are alike
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        kinds: dict[Any, int] = {}
        self.kinds = [kinds.setdefault(_kind(layer, i), len(kinds)) for i, layer in enumerate(layers)]
        self._graphs: dict[Any, _Graph] = {}
        self._inputs: dict[Any, _Input] = {}  # by layout, and by number among a call's inputs of this layout
        self._outputs: dict[Any, Tensor] = {}  # by layout
        self._seen: set[Any] = set()
        self._refused = False  # a capture failed: none is tried again

    def run(self, index: int, place: Any, function: Callable[..., Tensor | None], *inputs: Any) -> Tensor | None:
        """Return function(*inputs) for layer `index`.

        place    a key: what the function does, and where on the device everything lies that it uses beside its inputs
        inputs   tensors, and dicts, tuples and lists of tensors, numbers, strings and dtypes; calls with other objects
                 run eagerly

        What cannot be captured, because it waits for the device, runs eagerly, with a warning.
        """
        tensors, rest = [], []
        _take_apart(inputs, tensors, rest)
        key = self.kinds[index], place, tuple(rest), tuple(map(_layout, tensors))
        if not all(isinstance(value, SIMPLE) or value is Tensor for value in rest):  # such as a cache, or a mask object
            return function(*inputs)
        if key in self._graphs:
            return self._graphs[key].replay(tensors)
        if self._refused or key not in self._seen or len(self._graphs) == LIMIT:
            self._seen.add(key)
            return function(*inputs)
        other = next(iter(self._graphs.values()), None)
        try:
            graph = _Graph(function, inputs, self._places_of(tensors), self._outputs, other)
        except RuntimeError as error:
            warnings.warn(f"layers run without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
            self._refused = True
            return function(*inputs)
        self._graphs[key] = graph
        return graph.replay(tensors)

    def _places_of(self, tensors: Sequence[Tensor]) -> list["_Input"]:
        found, count = [], Counter()
        for tensor in tensors:
            layout = _layout(tensor)
            key, count[layout] = (layout, count[layout]), count[layout] + 1
            if key not in self._inputs:
                self._inputs[key] = _Input(tensor)
            found.append(self._inputs[key])
        return found


class _Input:
    """A place from which graphs read an input."""

    def __init__(self, like: Tensor) -> None:
        self.tensor = like.detach().clone()
        self._holds: tuple[Tensor, int] | None = None

    def take(self, given: Tensor) -> None:
        """Copy `given` to this place unless it is there already."""
        if self._holds is None or self._holds[0] is not given or self._holds[1] != given._version:
            self.tensor.copy_(given)
            small = given.nbytes <= SMALL  # larger ones are new each time; holding them would cost memory
            self._holds = (given, given._version) if small else None


class _Graph:
    """A captured call, which reads its inputs from `places` and leaves its result in one of `outputs`."""

    def __init__(
        self, function: Callable[..., Tensor | None], inputs: Any, places: list[_Input], outputs: dict[Any, Tensor],
        other: "_Graph | None",
    ) -> None:  # fmt: skip
        arguments = _put_together(inputs, iter([place.tensor for place in places]))

        def call() -> Tensor | None:
            made = function(*arguments)
            if made is None:
                return None
            if _layout(made) not in outputs:
                outputs[_layout(made)] = torch.empty_like(made)
            return outputs[_layout(made)].copy_(made.detach())

        self._places = places
        with torch.cuda.device(places[0].tensor.device):
            self._graph, self._made = capture(call, None if other is None else other._graph)

    def replay(self, tensors: list[Tensor]) -> Tensor | None:
        for place, given in zip(self._places, tensors, strict=True):
            place.take(given)
        self._graph.replay()
        return None if self._made is None else self._made.clone()


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def capture(
    function: Callable[[], Tensor | None], other: "torch.cuda.CUDAGraph | None"
) -> tuple["torch.cuda.CUDAGraph", Tensor | None]:
    """Capture the function's work. Returns the graph and the tensor that every replay fills; nothing is computed yet.

    Other threads may go on using the device meanwhile. other: a graph whose memory pool is shared with the new one.
    """
    device = torch.cuda.current_device()
    graph = torch.cuda.CUDAGraph()
    pool = None if other is None else other.pool()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection may free graphs or pinned memory, which must not happen during a capture
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # restores the stream, even if the capture fails
            torch.cuda.graph(graph, pool=pool, stream=_capturing(device), capture_error_mode="thread_local"),
        ):
            made = function()
    finally:
        if collecting:
            gc.enable()
    return graph, made


@cache
def _capturing(device: int) -> "torch.cuda.Stream":
    """One stream for all captures on a device. Of high priority: PyTorch hands out the others round-robin, also to
    lanes."""
    return torch.cuda.Stream(device, priority=-1)


def _kind(layer: nn.Module, index: int) -> Any:
    """A key that is equal for layers that differ only in their weights. A layer with buffers is like no other."""
    if any(True for _ in layer.buffers()):
        return index
    return tuple((name, type(m), tuple(_settings(m))) for name, m in layer.named_modules())


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What makes the module compute what it does, apart from its weights; objects by their identity."""
    for name, value in vars(module).items():
        if isinstance(value, SIMPLE[:5]) and name not in ("layer_idx", "training"):
            yield name, value
        elif name not in OWN and not name.startswith("_") and not isinstance(value, SIMPLE[:5]):
            yield name, id(value)


def _take_apart(value: Any, tensors: list[Tensor], rest: list[Any]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
        rest.append(Tensor)
    elif isinstance(value, dict):
        rest.append(tuple(value))
        for each in value.values():
            _take_apart(each, tensors, rest)
    elif isinstance(value, tuple | list):
        rest.append((type(value), len(value)))
        for each in value:
            _take_apart(each, tensors, rest)
    else:
        rest.append(value)


def _put_together(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with its tensors replaced, in the order in which `_take_apart` found them."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {k: _put_together(v, tensors) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_put_together(v, tensors) for v in value)
    return value
