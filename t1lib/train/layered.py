"""How a trainer makes the model run its layers through the trainer, and which parameters it trains."""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from t1lib.errors import require
from t1lib.measure.timing import NoTrace, Trace
from t1lib.train.models import Parts


class Layered:
    """The part of a trainer between the model's own forward and its layers."""

    _hooks_backward = True  # spans of the layers' backward are traced by hooks on their outputs

    model: PreTrainedModel
    parts: Parts
    train: str
    loss: str
    trace: Trace | NoTrace
    _in_backward: bool
    _layer_forward: Any  # takes a layer's class; returns its forward, compiled or not

    def _run_layer(self, index: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run decoder layer `index`; by default, as the model itself would."""
        return self._compute(index, hidden, kwargs)

    def _mark_trainable(self) -> None:
        if self.train == "marked":
            require(any(p.requires_grad for p in self.model.parameters()), "no parameter of the model is marked")
            return
        in_layers = {id(p) for p in self.parts.layers.parameters()}
        for param in self.model.parameters():
            param.requires_grad_(self.train == "all" or id(param) in in_layers)

    def _intercept(self) -> None:
        """Make the model's own forward call `_run_layer` for each layer; masks, rotations and scalings stay its own."""
        for index, layer in enumerate(self.parts.layers):
            layer.forward = partial(self._run_layer, index)
        if self.loss == "mean_square":
            self.parts.norm.forward = lambda hidden: hidden

    def _compute(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The layer's own computation, traced as forward, or as recomputation if it runs within the backward."""
        again = self._in_backward
        with self.trace.span("compute", "recompute" if again else "forward", index):
            out = self._call_layer(index, hidden, kwargs)
        if self._hooks_backward and not isinstance(self.trace, NoTrace) and not again and out.requires_grad:
            out.register_hook(partial(self._trace_backward, index))
        return out

    def _call_layer(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        layer = self.parts.layers[index]
        return self._layer_forward(type(layer))(layer, hidden, **kwargs)

    def _trace_backward(self, index: int, _: Tensor) -> None:
        # Called when the gradient of this layer's output is ready: the layer above is done, this one begins.
        self.trace.end("compute", "backward", index + 1)
        self.trace.begin("compute", "backward", index)
