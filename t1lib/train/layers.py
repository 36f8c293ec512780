"""Layers on the host: flat pinned buffers, parameters that are views of them, and gradients; and device buffers of the
same layout."""

import weakref
from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack, to_dlpack
from torch.utils.hooks import RemovableHandle

from t1lib.errors import T1Error, require
from t1lib.memory import pinned_zeros
from t1lib.optimizers import Rule
from t1lib.train.lanes import Mark, wait_for
from t1lib.train.travel import Span, Traveller, Update
from t1lib.train.update import follow, norms_of

if TYPE_CHECKING:
    from t1lib.train.engine import Engine

ALIGN = 128  # elements; each parameter begins at a multiple of this in a flat buffer, which suits the device's loads


class Streamed(nn.Parameter):
    """A parameter that updates or copies may still be about to fill: one of a streamed layer that is not computing (a
    view of host memory), or one of `Outer`. Whatever looks at its values or gradient waits for these first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in SHAPES:
            for param in [value for value in tree_leaves((args, kwargs)) if isinstance(value, Streamed)]:
                home = param.__dict__.get("_home")
                if home is None:
                    continue
                if func not in (GET_GRADIENT, SET_GRADIENT, DELETE_GRADIENT):
                    home.visit()
                elif isinstance(home, HostLayer):
                    given = None if func == DELETE_GRADIENT else args[-1]
                    with home.engine.alone():
                        return home.gradient(param) if func == GET_GRADIENT else home.set_gradient(param, given)
                elif func == GET_GRADIENT:
                    home.visit_gradient()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


GET_GRADIENT, SET_GRADIENT = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__
DELETE_GRADIENT = torch.Tensor.grad.__delete__
PROPERTIES = "shape device dtype requires_grad is_cuda ndim layout is_leaf grad_fn is_meta is_sparse"
METHODS = "numel size dim stride element_size is_contiguous is_floating_point is_complex nelement"
SHAPES = {getattr(torch.Tensor, name).__get__ for name in PROPERTIES.split()}  # these read no values
SHAPES |= {getattr(torch.Tensor, name) for name in METHODS.split()}


def unwatched(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method use streamed parameters without counting as somebody who looks at them."""

    @wraps(method)
    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args)

    return run


class Layout:
    """Where each parameter of a layer lies in one flat buffer, by name and in the order of `params`."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self.shapes = {n: p.shape for n, p in params.items()}
        self.dtype = next((p.dtype for p in params.values()), torch.float32)
        self.slices, self.numel = {}, 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(self.numel, self.numel + shape.numel())
            self.numel += -(-shape.numel() // ALIGN) * ALIGN

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views into a flat buffer of `numel` elements."""
        return {name: flat[at].view(self.shapes[name]) for name, at in self.slices.items()}

    def weights(self, flat: Tensor) -> dict[str, Tensor]:
        """As `views`, but each with a storage of its own, in the same memory. accelerate's `save_state` treats tensors
        that share a storage as tied, and would save only one per layer."""
        return {name: from_dlpack(to_dlpack(view)) for name, view in self.views(flat).items()}


class Slot:
    """A flat device buffer that holds one layer at a time."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.views = layout.views(self.flat)
        self.holds: HostLayer | None = None
        self.filled: Mark = None  # when the content is complete
        self.freed: Mark = None  # when the content is no longer needed


def streamed_names(layers: Sequence[nn.Module], groups: Container[int]) -> list[str]:
    """Names of the parameters that stream, the same in all layers (else a `T1Error`). Where a layer has both trained
    and frozen parameters, those with fewer bytes in all, such as adapters, stay on the device in every layer; so do
    frozen ones of another dtype, such as reference adapters. groups: ids of the optimizer's parameters"""
    few: set[str] = set()
    for layer in layers:
        params = dict(layer.named_parameters())
        parts = [[n for n, p in params.items() if p.requires_grad == kind] for kind in (True, False)]
        if all(parts):
            few.update(min(parts, key=lambda names: sum(params[n].nbytes for n in names)))
        rest = {n: p for n, p in params.items() if n not in few}
        dtype = max(rest.values(), key=lambda p: p.nbytes).dtype if rest else None
        few.update(n for n, p in rest.items() if p.dtype != dtype and not p.requires_grad)
    first = {n: p for n, p in layers[0].named_parameters() if n not in few}
    dtype = next((p.dtype for p in first.values()), None)
    for index, layer in enumerate(layers):
        own = {n: p for n, p in layer.named_parameters() if n not in few}
        odd = [n for n in {**first, **own} if n not in first or n not in own or own[n].shape != first[n].shape]
        if odd:
            raise T1Error(f"layer {index} differs from layer 0 at {odd[0]!r}: stream takes layers that are alike")
        for name, param in own.items():
            found = f"{name!r} of layer {index} is {param.dtype}, other parameters are {dtype}"
            require(param.dtype == dtype, f"{found}; allowed: one dtype for all that streams")
            alone = f"{name!r} of layer {index} is trained, but in no group of the optimizer: freeze it, or add it"
            require(id(param) in groups or not param.requires_grad, alone)
    return list(first)


class Gradients:
    """The gradients of one layer, from the backwards that make them to the update that reads them.

    Each backward sums them in `slot`, on the device; from there they go to `flat`, on the host, or to `waiting`, on the
    device. Once somebody has looked at one, copies of all count instead (`seen`): whoever holds those may change
    them. Parameters named in `absent` have none, whatever lies in these buffers; `forget` makes that all of them.
    """

    def __init__(self, layer: "HostLayer") -> None:
        self._layer, self._layout = weakref.proxy(layer), layer.layout
        self.slot: Slot | None = None  # set by the schedule if the layer is trained
        self.flat: Tensor | None = None  # made when it is first needed
        self.waiting: Tensor | None = None  # a copy of the slot's
        self.seen: dict[str, Tensor] | None = None  # on the host, by name; none of those in `absent`
        self.absent = set(self._layout.shapes)  # parameters whose gradient is None
        self.scale: Tensor | None = None  # clipping's factor, by which gradients have yet to be multiplied
        self.norms: dict[str, Tensor] | None = None  # of gradients that are not None, by name; None: not known
        self.arrived: Mark = None  # when `flat` or `waiting` is complete and, if an update reads it, has been read
        self.reached: set[str] = set()  # parameters that the last backward gave a gradient
        self.backward: int | None = None  # autograd's number of the layer's last backward since the last step

    @property
    def any(self) -> bool:
        return len(self.absent) < len(self._layout.shapes)

    def forget(self) -> None:
        """Make all gradients None. An update that is under way goes on."""
        self.absent, self.seen, self.scale, self.norms = set(self._layout.shapes), None, None, None

    def buffer(self) -> Tensor:
        """`flat`, made if it is not there yet."""
        if self.flat is None:
            with torch.inference_mode(False):  # an evaluation may come between backward and step
                self.flat = pinned_zeros(self._layout.numel, self._layout.dtype, self._layer.device)
        return self.flat

    def complete(self) -> dict[str, Tensor]:
        """Bring the gradients to the host, multiply them by `scale`, and return those that are not None, by name. A
        pending update reads them first. As the caller may change them, their norms are no longer known."""
        if not self.any:
            return {}
        with self._layer.engine.alone():
            self._layer.finish_update()
            wait_for(self.arrived)
            if self.waiting is not None:
                self.buffer().copy_(self.waiting)
                self.waiting = None
            found = self.seen
            if found is None:
                found = {name: view for name, view in self._layout.views(self.flat).items() if name not in self.absent}
            if self.scale is not None:
                torch._foreach_mul_(list(found.values()), self.scale.to("cpu"))
            self.arrived = self.scale = self.norms = None
        return found

    def gather(self) -> Tensor:
        """`flat`, with the copies that somebody may have changed (`seen`) written back to it."""
        if self.seen is not None:
            wait_for(self.arrived)  # an update may still be reading what is there
            views = self._layout.views(self.buffer())
            for name, grad in self.seen.items():
                views[name].copy_(grad)
        return self.flat

    def update_seen(self, sums: dict[str, Tensor]) -> None:
        """Copy sums over several backwards from the device into `seen`, where somebody may hold the earlier sums."""
        for name in self._layout.shapes.keys() - self.absent:
            if name in self.seen:
                self.seen[name].copy_(sums[name])
            else:
                self.seen[name] = sums[name].to("cpu", copy=True)

    def multiply(self, factor: Tensor) -> None:
        """Multiply the gradients: when somebody looks or the update reads them; at once if somebody may hold some. Look
        at their norms first, which completes an earlier multiplication."""
        if self.any:
            self.scale, self.norms = factor, None
            if self.seen is not None:
                self.complete()

    def norms_by_name(self) -> dict[str, Tensor]:
        """Euclidean norms of the gradients that are not None. With `update_in_backward` those of the last backward,
        whose gradients are gone."""
        if self.any and (self.norms is None or self.seen is not None):  # whoever has seen some may have changed them
            found = self.complete()
            norms = norms_of(list(found.values()), exact=self._layer.device.type == "cpu")
            self.norms = dict(zip(found, norms, strict=True))
        return self.norms or {}


class HostLayer(Traveller):
    """One streamed layer of an engine: its parameters, the flat host buffers that hold them, and its gradients."""

    def __init__(self, engine: "Engine", index: int) -> None:
        layout, device, groups = engine.layout, engine.device, engine.optimizer.groups
        super().__init__(index, pinned_zeros(layout.numel, layout.dtype, device))
        self.layout, self.counts, self.device = layout, engine.optimizer.counts, device
        own = dict(engine.stack[index].named_parameters())
        self.params = {n: own[n] for n in layout.shapes}
        self.groups = {n: groups[id(p)] for n, p in self.params.items() if id(p) in groups}
        self.trained = any(p.requires_grad for p in self.params.values())  # all of them, or none
        self.grads = Gradients(self)
        self.views = layout.weights(self.flat)
        self.bound = False  # whether the parameters, or some of them, point at the device: see `bind`
        self.read: Mark = None  # when the copies queued so far have read the host's weights
        self.touched = False  # somebody may have written to the host's weights
        self.written = False  # somebody did, as far as is known, and the master has yet to follow
        self.version = 0  # how many updates have begun
        self.update: Update | None = None  # waits to be queued on the device
        self.keeps_gradients, self.engine = not engine.in_backward, engine
        # Set by the schedule: whether state travels to the device for updates, or the CPU makes them; and the layer's
        # slot on the device.
        self.travels = False
        self.slot: Slot | None = None
        self._hooks: list[RemovableHandle] = []
        for name, param in self.params.items():
            self.views[name].copy_(param.data)
            param.data = self.views[name]
            if param.requires_grad:
                # The hook must not refer to the layer: autograd would keep that, and with it the model, alive.
                came = param.register_post_accumulate_grad_hook(lambda param: param._home.gradient_came(param))
                self._hooks.append(came)
            param._home, param._name = self, name
            param.__class__ = Streamed  # whoever looks at it waits for what is still under way
        self._known = self._versions()

    @property
    def in_slot(self) -> bool:
        """Whether the slot holds the layer's weights, or is about to, as they are after all updates so far."""
        return self.slot.holds is self and self.update is None

    def count_update(self, rules: list[Rule]) -> list[Span]:
        """What the next update covers: parameters that have a gradient, with the rules of their groups. Adds 1 to their
        counts and to the weights' version. On a GPU neighbours of one rule and count are joined; on a CPU each is
        alone, as PyTorch updates it."""
        found: list[Span] = []
        for name, group in self.groups.items():
            if name in self.grads.absent:
                continue
            param, rule, at = self.params[name], rules[group], self.layout.slices[name]
            self.counts[param] = count = self.counts[param] + 1
            near = found and found[-1][1:] == (rule, count) and at.start - found[-1].at.stop < ALIGN
            if near and self.device.type == "cuda":
                at = slice(found.pop().at.start, at.stop)
            found.append(Span(at, rule, count))
        self.version += bool(found)
        return found

    def finish_update(self) -> None:
        """Queue the update that is pending, or wait for the CPU's."""
        schedule = self.engine.schedule
        if schedule is not None:
            schedule.finish_update(self)

    def visit(self) -> None:
        """Somebody looks at the weights, and may change them: finish the update, and wait for all copies."""
        self.finish_update()
        wait_for(self.read)
        wait_for(self.left)
        self.touched = True

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """`p.grad`: complete, on the host."""
        gone = f"p.grad of {param._name!r}: with update_in_backward=True no gradients are kept"
        require(self.keeps_gradients, gone)
        if param._name in self.grads.absent:
            return None
        found = self.grads.complete()
        if self.grads.seen is None:
            with torch.inference_mode(False):
                self.grads.seen = {name: grad.clone() for name, grad in found.items()}
        return self.grads.seen[param._name]

    def gradient_came(self, param: nn.Parameter) -> None:
        """A hook: autograd has added to `p.grad`. Raises `T1Error` unless that was in the layer's own backward; a
        penalty on the weight itself, for example, adds to it elsewhere."""
        if not param.requires_grad:  # frozen since its forward: autograd has added nothing
            return
        name, slot = param._name, self.grads.slot
        with torch._C.DisableTorchFunctionSubclass():
            if slot is None or param.grad is not slot.views[name]:
                param.grad = None
                found = f"a gradient of {name!r} of layer {self.index} from elsewhere than the layer's own call"
                raise T1Error(f"{found}; allowed: losses on what the model returns, and weight_decay")
        self.grads.reached.add(name)

    def set_gradient(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Set `p.grad` to None. Raises `T1Error` for any other value but the present one, which `p.grad *= 2` sets."""
        name, grads = param._name, self.grads
        if value is None:
            grads.norms = None
            grads.absent.add(name)
            if grads.seen is not None:
                grads.seen.pop(name, None)
            if not grads.any:
                grads.forget()
            return
        own = grads.seen is not None and grads.seen.get(name) is value
        found = f"p.grad of {name!r} of layer {self.index}, a streamed parameter, was set"
        require(own, f"{found}; allowed: None, or writing to what it is, as by p.grad.copy_(…)")

    def refuse_hooks(self) -> None:
        """Raise `T1Error` for hooks on parameters: they would see parts of gradients, or weights that are elsewhere."""
        for name, param in self.params.items():
            hooked = param._backward_hooks or len(param._post_accumulate_grad_hooks or ()) > 1  # one is ours
            found = f"a hook on {name!r} of layer {self.index}, a streamed parameter"
            require(not hooked, f"{found}; allowed: hooks of modules, and a look at p.grad after backward()")

    def bind(self, views: dict[str, Tensor]) -> None:
        """Point the parameters at weights on the device; autograd sees ordinary parameters."""
        self.bound = True
        for name, param in self.params.items():
            param.__class__ = nn.Parameter
            param.data = views[name]

    def unbind(self) -> None:
        """Point the parameters back at the host."""
        for name, param in self.params.items():
            param.data, param.grad = self.views[name], None
            param.__class__ = Streamed
        self.bound = False

    def give_back(self, device: torch.device | None = None) -> None:
        """Make the parameters ordinary ones, gradients included. Updates must be finished."""
        grads = self.grads.complete() if self.keeps_gradients else {}
        for hook in self._hooks:
            hook.remove()
        for name, param in self.params.items():
            param.__class__ = nn.Parameter
            param.__dict__.pop("_home", None), param.__dict__.pop("_name", None)  # may be called again
            param.data = param.data.to(device, copy=True)
            param.grad = grads[name].to(device, copy=True) if name in grads else None
        # Slots hold the layer: in a cycle, its memory would wait for Python's garbage collector.
        self.bound, self.slot, self.grads.slot = False, None, None

    def accept_writes(self, assigned: bool = False) -> None:
        """Let what may have been written to the host's weights count: a copy in the slot is stale. Where `p.data` was
        assigned, raise `T1Error` or, if `assigned` (before the layer becomes an ordinary one), take the values over."""
        versions = self._versions()
        if not self.touched and versions == self._known:
            return
        self._known = versions
        if self.slot is not None and self.slot.holds is self:
            self.slot.holds = None
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self.params.items():
                if assigned and param.data.shape == self.views[name].shape:
                    self.views[name].copy_(param.data)
                found = f"p.data of {name!r} of layer {self.index}, a streamed parameter, was assigned"
                allowed = "writing to it within torch.no_grad(), as by p.copy_(…); close() gives back what was assigned"
                require(assigned or self.views[name].is_set_to(param.data), f"{found}; allowed: {allowed}")
        self.touched, self.written = False, True

    @unwatched
    def _versions(self) -> list[int]:
        """Of the parameters; one changes if somebody writes to it, even by an earlier `p.detach()`, not by `p.data`."""
        return [param._version for param in self.params.values()]

    def update_master(self) -> None:
        """Let the master follow weights that somebody wrote. (Not at each write: they may be an average that is swapped
        in for an evaluation only.)"""
        if self.written and "master" in self.state:
            follow(self.state["master"], self.flat)
        self.written = False

    def __reduce__(self) -> Any:  # `pickle` comes here, from the parameters
        raise T1Error("a streamed model cannot be pickled: save its state_dict()")
