"""What a Hugging Face model finds in place of its output layer during a call with labels, `StandIn`, and what that
returns: `Logits`, a record of the hidden states, which notes what the model does to its logits (scales, softcap, shift)
until the model's own loss asks for their cross-entropy. Whatever else a model does to its logits is refused by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from t1lib import heads
from t1lib.errors import T1Error, is_number, require


@contextmanager
def instead(*entries: tuple[nn.Module, str, Any]) -> Iterator[None]:
    """Within the block, shadow modules' attributes by entries in __dict__; registered modules stay registered."""
    before = [module.__dict__.get(name) for module, name, _ in entries]
    for module, name, value in entries:
        module.__dict__[name] = value
    try:
        yield
    finally:
        for (module, name, _), value in zip(entries, before, strict=True):
            module.__dict__[name] = value
            if value is None:
                del module.__dict__[name]


@dataclass(eq=False)
class StandIn:
    """What a model finds in place of its output layer, for one call."""

    model: str  # its name
    layer: nn.Module
    linears: list[nn.Linear]
    options: dict
    items: Any  # what the model divides a sum of losses by
    asked: bool = False  # whether the model has asked for a cross-entropy

    rows = property(lambda self: self.linears[0].out_features)  # PEFT's copy of a tied layer has its sizes swapped

    def __call__(self, hidden: Tensor) -> "Logits":
        unversioned = torch.compiler.is_compiling() or hidden.is_inference()
        version = None if unversioned else hidden._version
        kind = "cpu" if hidden.is_meta else hidden.device.type  # meta has no autocast
        autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return Logits(self, hidden, self.rows, (hidden, version, torch.is_grad_enabled(), autocast))

    def __getattr__(self, name: str) -> Any:  # Mamba casts to the weight's dtype
        return getattr(self.layer, name)


@dataclass(eq=False)
class Logits:
    """Logits not yet computed: the first `columns` of z = `scale` · layer(`hidden`), or of `cap` · tanh(z)."""

    source: StandIn
    hidden: Tensor
    columns: int
    call: tuple[Tensor, int | None, bool, tuple]  # of the layer: hidden states, their version, if gradients, autocast
    scale: float = 1.0
    cap: float | None = None
    cast: torch.dtype | None = None  # what the model casts them to: applied only to logits for the caller
    shared: bool = False  # another may be the same memory, so that what is done in place would concern both

    shape = property(lambda self: torch.Size((*self.hidden.shape[:-1], self.columns)))

    def compute(self) -> Tensor:
        with self._as_called():
            logits = self.source.layer(self.hidden)[..., : self.columns] * self.scale
        logits = logits if self.cap is None else self.cap * torch.tanh(logits)
        return logits if self.cast is None else logits.to(self.cast)

    @contextmanager
    def _as_called(self) -> Iterator[None]:
        hidden, version, gradients, autocast = self.call
        same = version is None or hidden._version == version
        require(same, f"{self.source.model} changes its hidden states in place after its output layer has read them")
        with torch.set_grad_enabled(gradients and torch.is_grad_enabled()), torch.autocast(*autocast):
            yield

    def cross_entropy(self, target: Tensor, weight: Tensor | None = None, **given: Any) -> Tensor:
        # within a call of the layer, because its hooks gather its weight (FSDP2, ZeRO)
        source, loss = self.source, partial(self._loss, target, {"weight": weight, **given, **self.source.options})
        source.asked = True
        with instead(*((linear, "forward", partial(loss, linear)) for linear in source.linears)), self._as_called():
            return source.layer(self.hidden)

    def _loss(self, target: Tensor, options: dict, linear: nn.Linear, hidden: Tensor) -> Tensor:
        weight, bias, items = linear.weight, linear.bias, self.source.items
        plain = len(weight) == self.source.rows and not (weight.is_meta or is_traceable_wrapper_subclass(weight))
        found = f"{type(weight).__name__} of {len(weight)} rows on {weight.device}"
        require(plain, f"the output layer's weight is a {found}; allowed: a plain tensor of out_features rows")
        if self.columns < len(weight):
            weight, bias = weight[: self.columns], None if bias is None else bias[: self.columns]
        factor = self.scale * (1.0 if self.cap is None else self.cap)
        hidden = hidden.to(weight.device)
        if abs(factor - 1.0) >= 1e-12:  # the model scales what the layer returns, its bias included
            hidden, bias = hidden * factor, None if bias is None else bias * factor
        options, target = {"linear_bias": bias, "softcap": self.cap, **options}, target.to(weight.device)
        if items is None or options.get("reduction") != "sum":
            return heads.linear_cross_entropy(hidden, weight, target, **options)
        # divide through token_weight, so that gradients are divided before rounding to 16 bits; undo it in the loss
        number = torch.as_tensor(items, dtype=torch.float32, device=weight.device)
        share = number.reciprocal().expand(target.shape)
        return heads.linear_cross_entropy(hidden, weight, target, token_weight=share, **options) * number

    def _derived(self, shared: bool = True, **changes: Any) -> "Logits":
        """shared: whether the new one may be the same memory"""
        self.shared |= shared
        return replace(self, shared=shared, **changes)

    def _become(self, other: "Logits") -> "Logits":
        if self.shared:
            self._refuse("a change in place")
        vars(self).update(vars(other))
        return self

    def __mul__(self, factor: Any) -> "Logits":
        if not is_number(factor):
            self._refuse("scaling")
        name = "scale" if self.cap is None else "cap"
        return self._derived(shared=False, **{name: getattr(self, name) * factor})

    def __truediv__(self, divisor: Any) -> "Logits":
        return self * (1 / divisor) if is_number(divisor) and divisor else self._refuse("division")

    def __imul__(self, factor: Any) -> "Logits":
        return self._become(self * factor)

    def __itruediv__(self, divisor: Any) -> "Logits":
        return self._become(self / divisor)

    def tanh(self) -> "Logits":
        return self._derived(shared=False, cap=1.0) if self.cap is None else self._refuse("tanh twice")

    def to(self, *args: Any, **kwargs: Any) -> "Logits":
        """Noted only for `compute`: a head computes in float32, and where the weight is."""
        dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), self.cast)
        return self._derived(cast=dtype)

    def float(self) -> "Logits":
        return self.to(torch.float32)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: int) -> "Logits":
        return self._derived(hidden=self.hidden.flatten(0, -2)) if shape == (-1, self.columns) else self._refuse("view")

    def __getitem__(self, key: Any) -> "Logits":
        """Slices, or the tokens that a mask selects: a model with padding may take its loss over those."""
        dims = self.hidden.dim()
        if isinstance(key, Tensor) and key.dtype == torch.bool and key.dim() < dims:
            return self._derived(hidden=self.hidden[key], shared=False)
        key = key if isinstance(key, tuple) else (key,)
        if not all(part is Ellipsis or isinstance(part, slice) for part in key):
            self._refuse("indexing")
        at = key.index(...) if ... in key else len(key)
        rows = (*key[:at], *[slice(None)] * (dims - len(key) + (... in key)), *key[at + 1 :])
        columns = range(self.columns)[rows[-1]]
        if not columns or columns != range(len(columns)):
            self._refuse("indexing")
        return self._derived(hidden=self.hidden[(*rows[:-1], slice(None))], columns=len(columns))

    def _refuse(self, what: Any = None, *_: Any) -> NoReturn:
        what = what if isinstance(what, str) else "arithmetic, comparison or assignment"
        allowed = "scaling by a number, softcap, cross-entropy"
        raise T1Error(f"{self.source.model} does to its logits what no head can follow: {what}. Allowed: {allowed}")

    contiguous, reshape = to, view
    __rmul__ = __mul__
    __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __matmul__ = __neg__ = __abs__ = _refuse
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _refuse
    __eq__ = __ne__ = __gt__ = __lt__ = __ge__ = __le__ = __setitem__ = __iter__ = __len__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.hidden, name) if name in ("dtype", "device") else self._refuse(name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        parts = [part for v in (*args, *kwargs.values()) for part in (v if isinstance(v, list | tuple) else [v])]
        note = next(part for part in parts if isinstance(part, cls))
        if function is nn.functional.cross_entropy:
            given = {name: v for name, v in kwargs.items() if name != "input" and v is not None}
            return note.cross_entropy(*args[1:], **given)
        return note.tanh() if function in (torch.tanh, nn.functional.tanh) else note._refuse(function.__name__)
