"""`patch_head`: a Hugging Face causal language model computes its loss through one of the kit's heads.

During a call with labels, the model's own forward finds a `StandIn` in place of its output layer; what that returns,
and how the model's own loss then comes from a head, is in `huggingface_logits`."""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from t1lib import heads
from t1lib.errors import require
from t1lib.heads.huggingface_logits import Logits, StandIn, instead

DECIDED = "input linear_weight target linear_bias weight reduction ignore_index softcap token_weight return_stats"
LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # by output layer: one call at a time


def patch_head(model: nn.Module, *, return_logits: bool = False, **options: Any) -> nn.Module:
    """Make a Hugging Face causal language model compute its loss through a head of the kit; return `model` itself.

    model          a causal language model, alone or in PEFT, DDP, FSDP or `torch.compile`, which may also come later
    return_logits  also return the logits (B, S, V) of calls with labels; otherwise they are None, also in a tuple
    options        of `linear_cross_entropy`: head, workspace, filter_eps, label_smoothing, z_loss and the head's own

    Calls with `labels` (or `shift_labels` alone) then return the model's own loss and gradients; others stay the same.
    Raises `T1Error` for a model without a plain linear output layer, with a loss other than `ForCausalLMLoss`, with an
    encoder, or already patched, and for a bad option; `UnavailableError` for a head that cannot run here. A call raises
    `T1Error` if the model does something to its logits that no head can follow."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    lm, name, patch = _language_model(model)
    require(not patch or not patch["active"], f"{name} is already patched; call unpatch_head first")
    decided = ", ".join(set(DECIDED.split()) & set(options))
    require(not decided, f"patch_head does not take {decided}: the model or the call decides it")
    heads.check_options(options)
    require(not getattr(lm.config, "is_encoder_decoder", False), f"{name} has an encoder; patch_head takes a decoder")
    _output_layer(lm)
    loss = getattr(lm.loss_function, "__name__", type(lm.loss_function).__name__)
    require(lm.loss_function is ForCausalLMLoss, f"{name}'s loss is {loss}; patch_head replaces ForCausalLMLoss only")
    if not patch:
        patch = lm._t1_head = {"previous": lm.__dict__.get("forward"), "loss": ForCausalLMLoss}
        lm.forward = MethodType(_patched(type(lm).forward), lm)
        lm._replicate_for_data_parallel = MethodType(_replicate_for_data_parallel, lm)
    patch.update(active=True, options=options, return_logits=return_logits)
    return model


def unpatch_head(model: nn.Module) -> nn.Module:
    """Undo `patch_head`; return `model`. Raises `T1Error` if it is not patched."""
    lm, name, patch = _language_model(model)
    require(bool(patch and patch["active"]), f"{name} is not patched, so there is nothing to undo")
    patch["active"] = False
    # if others have wrapped our forward since, as accelerate does for bfloat16, it stays and only calls the original
    if getattr(lm.forward, "__func__", lm.forward) is getattr(lm.forward, "t1_head", None):
        del lm._t1_head, lm._replicate_for_data_parallel, lm.forward
        if patch["previous"] is not None:
            lm.forward = patch["previous"]
    return model


def _language_model(model: Any) -> tuple[nn.Module, str, dict | None]:
    """The Hugging Face model within wrappers (DDP, FSDP, `torch.compile`, PEFT), its name, and its patch if any."""
    from transformers import PreTrainedModel

    lm = model
    while isinstance(lm, nn.Module) and not isinstance(lm, PreTrainedModel):
        inner = [lm._modules[key] for key in ("_orig_mod", "module", "_fsdp_wrapped_module") if key in lm._modules]
        lm = inner[0] if inner else getattr(lm, "get_base_model", lambda: None)()
    require(isinstance(lm, nn.Module), f"model is a {type(model).__name__}; allowed: one of transformers, also wrapped")
    pickled = getattr(lm.forward, "__func__", None) is type(lm).forward  # a copy from pickle has its own forward
    return lm, type(lm).__name__, None if pickled else lm.__dict__.get("_t1_head")


def _patched(original: Callable) -> Callable:
    """The function that becomes `model.forward`: through the head if there are labels, otherwise as before."""
    signature = inspect.signature(original)
    names = [*signature.parameters][1:]  # but for self

    @wraps(original, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patch = self._t1_head
        call = patch["previous"] or partial(type(self).forward, self)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        labels = next((given[name] for name in ("labels", "shift_labels") if given.get(name) is not None), None)
        # TRL's trainers ask by `fused_lm_head` for log-probabilities that TRL computes itself
        other = labels is None or given.get("fused_lm_head") or self.loss_function is not patch["loss"]
        with _lock(self):
            if other or not patch["active"]:
                return call(*args, **kwargs)
            if given.get("labels") is None:  # a model computes a loss only if it is given labels
                args, kwargs = (), {**given, "labels": labels}
            return _call_with_head(self, patch, partial(call, *args, **kwargs), given.get("num_items_in_batch"))

    del forward.__wrapped__  # accelerate follows it to take its own wrappers off, and would take this one off, too
    forward.__signature__, forward.t1_head = signature, forward  # `functools.wraps` gives wrappers both
    return forward


def _lock(lm: nn.Module) -> Any:
    """The lock of the output layer, which models may share, or of the model itself if it has lost its layer."""
    if torch.compiler.is_compiling():  # it traces no lock; a compiled call runs no Python that others could disturb
        return nullcontext()
    layer = lm.get_output_embeddings()
    layer = layer.layer if isinstance(layer, StandIn) else layer  # of a call in another thread
    return LOCKS.setdefault(layer if isinstance(layer, nn.Module) else lm, threading.RLock())


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """As in `nn.Module`, whose copy of __dict__ would hold a forward that is bound to the original."""
    replica = type(self)._replicate_for_data_parallel(self)
    replica.forward = MethodType(self.forward.__func__, replica)
    return replica


def _call_with_head(lm: nn.Module, patch: dict, call: Callable, items: Any) -> Any:
    """Run the model's forward, `call`, with a `StandIn` as output layer. items: what it divides a sum of losses by."""
    from transformers.utils import ModelOutput

    name, (parent, key, linears) = type(lm).__name__, _output_layer(lm)
    stand_in = StandIn(name, parent._modules[key], linears, patch["options"], items)
    with instead((parent, key, stand_in), (lm, "_loss_function", patch["loss"])):  # torch.compile guards on the latter
        outputs = call()
    require(stand_in.asked, f"{name} asks for no cross-entropy of what its output layer returns")
    parts = outputs if isinstance(outputs, dict) else dict(enumerate(outputs))
    within = [part for part in parts.values() if isinstance(part, ModelOutput)]  # InstructBLIP's language model's
    for found, place in [(o, place) for o in (parts, *within) for place in o if isinstance(o[place], Logits)]:
        found[place] = found[place].compute() if patch["return_logits"] else None  # of a ModelOutput, also the field
        if found[place] is None and isinstance(found, ModelOutput):  # which has no entries of None
            OrderedDict.__delitem__(found, place)  # its own method forbids that
    return parts if parts is outputs else tuple(parts.values())


def _output_layer(lm: nn.Module) -> tuple[nn.Module, str, list[nn.Linear]]:
    """The module that holds the output layer, its name there, and the layer itself, or those that PEFT's
    `modules_to_save` chooses from. `T1Error` for a layer that does more, such as LoRA's, or has hooks."""
    name, layer = type(lm).__name__, lm.get_output_embeddings()
    require(not isinstance(layer, StandIn), f"{name} is called with labels within its own call with labels")
    paths = [path for path, module in lm.named_modules(remove_duplicate=False) if module is layer]
    require(bool(paths), f"{name} has no output layer; patch_head takes a causal language model")
    peft = type(layer).__name__ == "ModulesToSaveWrapper"
    linears = [layer.original_module, *layer.modules_to_save.values()] if peft else [layer]
    for linear in linears:
        plain = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
        hook = getattr(linear, "_hf_hook", None)
        moves = all(type(h).__module__.startswith("accelerate.") for h in getattr(hook, "hooks", [hook]))
        plain &= "forward" not in linear.__dict__ or moves  # accelerate's own hooks only move tensors
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        require(plain, f"{name}'s output layer is a {kind} that may do more than a product; allowed: a plain nn.Linear")
    *outer, key = sorted((path.split(".") for path in paths), key=len)[0]  # parts may hold it, too, as draft heads do
    around = [lm.get_submodule(".".join(outer[:n])) for n in range(len(outer) + 1)]  # from the model itself on
    _require_no_hooks(name, [layer, *linears], around[1:])
    return around[-1], key, linears


def _require_no_hooks(name: str, itself: list[nn.Module], around: list[nn.Module]) -> None:
    """Raise `T1Error` for hooks on what the output layer, `itself`, or all modules get or return. Forward hooks of the
    modules `around` it still run, and those of torch.nn.utils only change weights."""
    every = nn.modules.module
    found = [every._global_forward_pre_hooks, every._global_forward_hooks]
    found += [every._global_backward_hooks, every._global_backward_pre_hooks]
    found += [hooks for module in itself for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    found += [hooks for m in (*itself, *around) for hooks in (m._backward_hooks, m._backward_pre_hooks)]
    allowed = ("torch.distributed.", "torch.utils.", "torch.nn.utils.", "deepspeed.")
    hooks = [h for hooks in found for h in hooks.values() if not getattr(h, "__module__", "").startswith(allowed)]
    seen = "(tokens, hidden size) for (batch, length, hidden size) and a loss for logits"
    require(not hooks, f"{name}'s output layer has a hook, which would see {seen}")
