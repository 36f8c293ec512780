"""Computing a layer again for its gradients, without its last product: most layers end by adding that to what came
before, so that no gradient depends on what it gives. (PyTorch's checkpoint stops there, too, but needs a graph that
has been kept since the forward.)"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Recomputation:
    """Runs layers that are alike; the first one is watched for what their gradients need.

    whole   compute the last product, too
    """

    def __init__(self, whole: bool) -> None:
        self._last: str | None = "" if whole else None  # its name in a layer; "": it is needed; None: not known yet

    def run(self, layer: nn.Module, call: Callable[[], Tensor]) -> Tensor:
        """What call() returns, which runs the layer: for its gradients, and not for its numbers, which it may lack."""
        if self._last is None:
            out, self._last = _watched(layer, call)
            return out
        if not self._last:
            return call()
        with _unread(layer.get_submodule(self._last)):
            out = call()
        if out._base is None:
            out.untyped_storage().resize_(0)  # nobody reads it, and it is there for all of the backward
        return out


def _watched(layer: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, str]:
    """What call() returns; and the name of the last product, if nothing is saved for the backward after it, else ""."""
    last, read = "", True

    def computed(name: str, *_: Any) -> None:
        nonlocal last, read
        last, read = name, False

    def saved(tensor: Tensor) -> Tensor:
        nonlocal read
        read = True
        return tensor

    products = [(n, m) for n, m in layer.named_modules() if _plain(m)]
    hooks = [module.register_forward_hook(partial(computed, name)) for name, module in products]
    try:
        with saved_tensors_hooks(saved, lambda tensor: tensor):
            out = call()
    finally:
        for hook in hooks:
            hook.remove()
    return out, "" if read else last


def _plain(module: nn.Module) -> bool:
    """Whether it is a product and nothing else, that nobody has changed or looks at."""
    own = "forward" not in vars(module) and not module._forward_hooks
    return type(module) is nn.Linear and module.bias is None and own


@contextmanager
def _unread(product: nn.Module) -> Iterator[None]:
    product.forward = lambda x: _Unread.apply(x, product.weight)
    try:
        yield
    finally:
        del product.forward


class _Unread(torch.autograd.Function):
    """A product x (…, K) times weight (N, K) transposed that nobody reads: only its gradients are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        dx = (flat @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return dx, flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
