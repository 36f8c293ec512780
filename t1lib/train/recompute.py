"""Recomputing a layer for its gradients without its last matrix product: most layers end by adding that product to the
residual, so no gradient depends on its result. (PyTorch's checkpoint also stops there, but needs a graph kept since the
forward.)"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Recomputation:
    """Recomputes layers of one kind; observes on the first one whether gradients need the last product.

    whole   always compute the last product as well
    """

    def __init__(self, whole: bool) -> None:
        self._last: str | None = "" if whole else None  # its name in a layer; "": needed; None: not known yet

    def run(self, layer: nn.Module, call: Callable[[], Tensor]) -> Tensor:
        """Run the layer through call() and return its output, for its graph only: the values may be missing."""
        if self._last is None:
            out, self._last = _watched(layer, call)
            return out
        product = layer.get_submodule(self._last)
        if not _plain(product):  # the layer itself, or somebody looks at the product by now
            return call()
        with _unread(product):
            out = call()
        if out._base is None:
            out.untyped_storage().resize_(0)  # never read, but alive for the whole backward
        return out


def _watched(layer: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, str]:
    """What call() returns, and the name of the last product if nothing is saved for the backward after it, else ""."""
    last = ""

    def computed(name: str, *_: Any) -> None:
        nonlocal last
        last = name

    def saved(tensor: Tensor) -> Tensor:
        nonlocal last
        last = ""
        return tensor

    products = [(n, m) for n, m in layer.named_modules() if _plain(m)]
    hooks = [module.register_forward_hook(partial(computed, name)) for name, module in products]
    try:
        with saved_tensors_hooks(saved, lambda tensor: tensor):
            out = call()
    finally:
        for hook in hooks:
            hook.remove()
    return out, last


def _plain(module: nn.Module) -> bool:
    """Whether the module is a bare matrix product: a `Linear` with no bias, no replaced forward, no forward hooks."""
    own = "forward" not in vars(module) and not module._forward_hooks
    return type(module) is nn.Linear and module.bias is None and own


@contextmanager
def _unread(product: nn.Module) -> Iterator[None]:
    product.forward = lambda x: _Unread.apply(_narrowed(x), _narrowed(product.weight))
    try:
        yield
    finally:
        del product.forward


def _narrowed(tensor: Tensor) -> Tensor:
    """As autocast gives a tensor to a matrix product."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Unread(torch.autograd.Function):
    """The product of x (…, K) and the transposed weight (N, K), never read: only its gradients are computed."""

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
