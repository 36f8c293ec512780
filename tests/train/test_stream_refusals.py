"""Bad input of `stream`: one clear error, and the model is as it was."""

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from copies import wait_for
from refusals import refused
from stream_cases import assert_same_weights, going_on, streamed_with, streaming, weights
from stream_loops import adamw, model_loss, own_clip, sgd, torch_clip, train
from stream_models import SHAPE, adapted, blocks, data, frozen, last_hidden, layers_of, llama, made, qwen3, write_masks
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils import parametrize
from transformers import MixtralConfig

from t1lib.plan.cost import Choice
from t1lib.train import placing, stream

BATCHES = data(4)
SQUARE = {name: value[:, :4] for name, value in BATCHES[0].items()}  # as many rows as tokens
VALUES: dict[str, tuple] = {
    "micro_batch": (0, True, "2"),
    "gpu_memory": ("lots", "16", 0, True),
    "device": ("gpu", "cuda:99", "meta"),
    "master_weights": ("both",),
    "moments": ("fp8",),
    "choice": ({"slots": 2},),
    "plan_for": ((4,), (4, 0)),
}
CHOICES: dict[str, tuple] = {
    "slots": (0,), "resident": (5,), "keep": (5,), "inputs": ("disk",), "outer": ("parked",),
    "grads": ("parked",), "host_share": (2.0, "half"),
}  # fmt: skip
ARGUMENTS = [({name: value}, str(value)) for name, values in VALUES.items() for value in values]
ARGUMENTS += [({"gpu_memory": "9" * 400 + "GiB"}, "999"), ({"gpu_memory": 1000, "plan_for": (4, 7)}, "")]
HEADS = {"head": "fast", "chunks": 0, "tail": "fp9", "filter_eps": 3.0, "workspace": "lots"}
ARGUMENTS += [({"head": {name: value}}, str(value)) for name, value in HEADS.items()]
ARGUMENTS += [({"head": {name: 1}}, str(name)) for name in ("input", "target", 1)]
ARGUMENTS += [({"head": "full"}, "full"), ({"head": {"by": "sequence"}}, "unknown option of head 'fused': 'by'")]
ARGUMENTS += [({"choice": Choice(**{n: v})}, str(v)) for n, values in CHOICES.items() for v in values]


def untouched(model: nn.Module, call: Callable[[], object], *parts: str) -> None:
    """Assert that `call` is refused, and that model and threads are what they would have been."""
    before, start, running = looks(model), weights(model), {*threading.enumerate()}
    refused(call, *parts)
    assert looks(model) == before
    assert_same_weights(model, start)
    assert wait_for(lambda: running.issuperset(threading.enumerate()))


def looks(model: nn.Module) -> list[object]:
    params = [(name, id(p), type(p), p.data_ptr(), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    return [params, type(model), *[(type(m), set(vars(m)), list(m._forward_hooks)) for m in model.modules()]]


@pytest.mark.parametrize("options, shown", ARGUMENTS, ids=str)
def test_arguments(options, shown):
    model = blocks()
    options = {"gpu_memory": "1GiB", **options} if "plan_for" in options else options
    untouched(model, lambda: streamed_with(model, **options), shown)


COUPLED = {"decoupled_weight_decay": False}
WRONG: dict[str, Callable[[nn.Module], Any]] = {  # what changes the model, or gives arguments of `stream`
    "wider": lambda model: setattr(model.blocks[2], "up", nn.Linear(32, 80)),
    "biased": lambda model: setattr(model.blocks[2], "down", nn.Linear(64, 32, bias=True)),
    "in 16 bits": lambda model: model.blocks[3].up.bfloat16() and None,
    "all with norms in 16 bits": lambda model: [block.norm.bfloat16() for block in model.blocks] and None,
    "shared": lambda model: setattr(model.blocks[3].up, "weight", model.blocks[1].up.weight),
    "tied by its memory": lambda model: setattr(model.blocks[3].up.weight, "data", model.blocks[1].up.weight.data),
    "shared with what is in no layer": lambda model: setattr(model.norm, "weight", model.blocks[0].norm.weight),
    "repeated": lambda model: model.blocks.__setitem__(3, model.blocks[0]),
    "a name": lambda model: {"layers": "blocks"},
    "none of its own": lambda model: {"layers": nn.ModuleList(blocks().blocks)},
    "a new list of its own layers": lambda model: {"layers": nn.ModuleList(model.blocks)},
    "without parameters": lambda model: setattr(model, "idle", nn.ModuleList([nn.ReLU()])) or {"layers": model.idle},
    "Adam": lambda model: {"optimizer": torch.optim.Adam(model.parameters())},
    "an optimizer's name": lambda model: {"optimizer": "adamw"},
    "SGD's momentum in 16 bits": lambda model: {"optimizer": sgd(model), "moments": "bfloat16"},
    "amsgrad": lambda model: {"optimizer": adamw(model, amsgrad=True)},
    "coupled": lambda model: {"optimizer": torch.optim.AdamW([{"params": [model.norm.weight], **COUPLED}])},
    "of more than the model": lambda model: {"optimizer": adamw(nn.ModuleList([model, nn.Linear(2, 2)]))},
    "of some": lambda model: {"optimizer": adamw(model.head)},
}
SHOWN = dict.fromkeys(["in 16 bits", "all with norms in 16 bits"], "one dtype for all that streams")
SHOWN["of some"] = "in no group"
SHOWN |= {"Adam": "Adam", "amsgrad": "amsgrad", "coupled": "decoupled_weight_decay", "of more than the model": "(2, 2)"}


@pytest.mark.parametrize("name", WRONG)
def test_layers_and_optimizers(name):
    model = blocks()
    given = WRONG[name](model) or {}
    untouched(model, lambda: streamed_with(model, **given), SHOWN.get(name, ""))


def test_models_that_are_refused():
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())):
        untouched(model, lambda model=model: stream(model, adamw(model)))
    refused(lambda: streamed_with(blocks().to("meta")), "'meta'")
    for model in (None, "qwen3-8b", blocks):
        refused(lambda model=model: stream(model, adamw(blocks())))
    model = llama()
    model.gradient_checkpointing_enable()  # `stream` recomputes already
    untouched(model, lambda: streamed_with(model))
    model.gradient_checkpointing_disable()
    first_backward(model)
    untouched(model, lambda: streamed_with(model), "has gradients")
    for options in ({}, {"update_in_backward": True}):  # the latter leaves only gradients of embedding, norm and head
        with streaming(llama(), **options) as (model, _):
            first_backward(model)
            refused(lambda model=model: streamed_with(model), "has gradients")


def test_what_layers_return_and_take():
    hidden, needy = torch.zeros(4, 7, 32), torch.ones(7, 7, requires_grad=True)
    with going_on() as (model, _), streaming(blocks(), gpu_memory="1GiB") as (unplanned, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.blocks[0], "result", lambda out: (out,))
            refused(lambda: first_backward(model), "layer 0 returns a tuple")
        for layer in (unplanned.blocks[0], model.blocks[0]):
            refused(partial(layer, hidden, needy), "layer 0 is given an argument that needs a gradient")
            refused(partial(layer, hidden, scale=needy), "layer 0 is given an argument that needs a gradient")


@torch.no_grad()
def test_what_is_not_cut_by_rows_although_the_batch_is():
    """Else a scale of each row, given in one dimension, would make of every row as many as there are."""
    with streaming(blocks(), micro_batch=1) as (model, _):
        scales = torch.rand(4)
        model.blocks[0].result = lambda out: out * scales[:, None, None]
        refused(lambda: model.blocks[0](torch.zeros(4, 7, 32)), "returns (4, 7, 32) for (1, 7, 32)")


def test_a_host_without_room_for_the_whole_masters_of_layers_that_the_cpu_updates(monkeypatch):
    numel = sum(p.numel() for p in layers_of(llama())[0].parameters())
    room = 1.04 * numel * (2 + SHAPE["num_hidden_layers"] * (8 + 2 + 2))  # weights; moments, split masters, gradients
    monkeypatch.setattr(placing, "host_available", lambda: room)
    for share in (0.0, 1.0):
        with streaming(llama(torch.bfloat16), master_weights="split", choice=Choice(host_share=share)):
            pass
    options = {"master_weights": "split", "choice": Choice(host_share=0.5)}
    refused(lambda: streamed_with(llama(torch.bfloat16), **options), "the host has")


def test_a_budget_that_is_too_small_for_the_first_batch():
    """The model stays, and can be closed. Announced, such a batch is refused at once."""
    model = qwen3(vocab_size=8000)  # whose embedding alone takes 1 MB
    start = weights(model)
    with streaming(model, gpu_memory="1MiB") as (streamed, _):
        refused(lambda: first_backward(streamed))
        assert_same_weights(streamed, start)
    assert_same_weights(model, start)
    untouched(model, lambda: streamed_with(model, gpu_memory="1MiB", plan_for=(4, 7)))


def test_what_comes_too_early_for_a_plan():
    """A step would be lost, with the gradients of a penalty; a batch without rows says nothing. Evaluation runs, and
    plans nothing, either."""
    model, none = llama(), {name: value[:0] for name, value in BATCHES[0].items()}
    with torch.no_grad():
        plain = first_loss(model)
    with streaming(model, gpu_memory="1GiB") as (streamed, own):
        assert own.device_tensors()  # nothing is placed yet
        with torch.no_grad():
            assert torch.equal(first_loss(streamed), plain)
        streamed.lm_head.weight.square().sum().backward()
        refused(own.step, "before the first forward")
        refused(lambda: model_loss(streamed, none), "(0, 7, 32)")


def first_loss(model: nn.Module) -> Tensor:
    return model_loss(model, BATCHES[0])


def first_backward(model: nn.Module, **options: Any) -> None:
    first_loss(model).backward(**options)


frozen_layer = partial(frozen, r"layers\.0\.", qwen3)


def change_later(model: nn.Module, optimizer: Any, **changes: Any) -> None:
    optimizer.param_groups[0].update(changes)
    train(model, optimizer, BATCHES)


def merged_and_disabled(model: nn.Module, optimizer: Any) -> None:
    model.merge_adapter()
    with model.disable_adapter(), torch.no_grad():
        first_loss(model)


def hooked_for_one_call(model: nn.Module, optimizer: Any) -> None:
    """As PEFT does for aLoRA: a recomputation would lack what the hook does."""
    doubled = lambda module, args, kwargs: ((2 * args[0],), kwargs)  # noqa: E731
    hook = layers_of(model)[0].mlp.down_proj.register_forward_pre_hook(doubled, with_kwargs=True)
    loss = first_loss(model)
    hook.remove()
    loss.backward()


def late_backward(model: nn.Module, optimizer: Any) -> None:
    """Through layers alone: through a norm or a head that was updated, PyTorch itself refuses it."""
    late = last_hidden(model, BATCHES[0])
    train(model, optimizer, BATCHES[:1])
    late.sum().backward()


def given_blocks(model: nn.Module, optimizer: Any) -> None:
    mask = create_block_mask(lambda row, head, q, k: q >= k, 4, None, 7, 7, device="cpu")
    model.blocks[0](model.embed(BATCHES[0]["input_ids"]), mask)


def closed_within(model: nn.Module, optimizer: Any) -> None:
    """By a hook in the middle of a layer, which goes on as an ordinary one."""
    handle = layers_of(model)[1].mlp.register_forward_hook(lambda *_: optimizer.close())
    loss = first_loss(model)
    handle.remove()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    loss.backward()


def closed_in_between(model: nn.Module, optimizer: Any) -> None:
    late, before = first_loss(model), looks(model)
    optimizer.close()
    plain = looks(model)
    try:
        late.backward()
    finally:
        assert looks(model) == plain != before


def in_torch_func(model: nn.Module, optimizer: Any) -> None:
    embedded = model.get_input_embeddings()(BATCHES[0]["input_ids"]).detach()
    torch.func.grad(lambda inputs: model(inputs_embeds=inputs, labels=BATCHES[0]["labels"]).loss)(embedded)


def within(context: Callable[[], Any], model: nn.Module, optimizer: Any) -> None:
    with context(), torch.no_grad():
        first_loss(model)


def set_gradient(model: nn.Module, optimizer: Any) -> None:
    first_backward(model)
    weight = layers_of(model)[2].mlp.up_proj.weight
    before = weight.grad.clone()
    weight.grad *= 2  # which Python sets to the same
    assert torch.equal(weight.grad, 2 * before)
    weight.grad = before


def assign(model: nn.Module, optimizer: Any, then: Callable[..., object]) -> None:
    """Nothing is updated, not even what does not stream, and weights stay assigned."""
    first_backward(model)
    for layer in layers_of(model)[1:]:
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 0.9
    before = weights(model)
    try:
        then(model, optimizer)
    finally:
        optimizer.close()
        assert_same_weights(model, before)


def trained_in_frozen(model: nn.Module, optimizer: Any) -> None:
    """By a hook, without being a parameter of the layer; and nothing below it trains."""
    model.get_input_embeddings().requires_grad_(False)
    added = torch.zeros(32, requires_grad=True)
    layers_of(model)[0].mlp.register_forward_hook(lambda module, args, out: out + added)
    first_loss(model)


def trained_prefix(model: nn.Module, optimizer: Any) -> None:
    """As in prefix tuning: layers are frozen, and only the keys that they find need gradients."""
    model.requires_grad_(False).eval()
    found = model(BATCHES[0]["input_ids"], use_cache=True).past_key_values
    for layer in found.layers:
        layer.keys.requires_grad_()
    model(BATCHES[0]["input_ids"], past_key_values=found)


def written_input(model: nn.Module, optimizer: Any) -> None:
    """As nothing below the layer is trained, PyTorch allows it."""
    model.get_input_embeddings().requires_grad_(False)
    layers_of(model)[0].input_layernorm.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.9),))
    first_loss(model)


def written_argument(model: nn.Module, optimizer: Any) -> None:
    write_masks(model)
    first_loss(model)


@torch.no_grad()
def written_weight(model: nn.Module, optimizer: Any) -> None:
    """In an evaluation, whose writes would be lost."""
    up = layers_of(model)[0].mlp.up_proj
    up.register_forward_pre_hook(lambda *_: torch._foreach_mul_([up.weight], 0.9) and None)
    first_loss(model)


def hooked(model: nn.Module, optimizer: Any, kind: str = "register_hook") -> None:
    """Nothing is updated before."""
    getattr(model.model.layers[1].mlp.up_proj.weight, kind)(lambda *_: None)
    before = weights(model)
    try:
        first_backward(model)
    finally:
        assert_same_weights(model, before)


def hooked_in_between(model: nn.Module, optimizer: Any) -> None:
    loss = first_loss(model)
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: 2 * grad)
    loss.backward()


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * layers_of(model)[0].mlp.up_proj.weight.square().sum()


def during(call: Callable[..., object], shown: str = "", build=qwen3, make=adamw, **options: Any) -> tuple:
    return call, shown, build, make, options


at_once = partial(during, make=sgd, update_in_backward=True)
ONGOING: dict[str, tuple] = {
    # the norm comes too late for updates in the backward
    "clipped, at once": at_once(lambda m, o: train(m, o, BATCHES, clip=own_clip)),
    "clipped by PyTorch, at once": at_once(lambda m, o: train(m, o, BATCHES, clip=torch_clip)),
    "accumulated, at once": at_once(lambda m, o: train(m, o, BATCHES, accumulate=2)),
    "converted": during(lambda m, o: first_backward(m.half()), build=llama),  # at once or in the next forward
    "unfrozen": during(lambda m, o: first_backward(m.requires_grad_(True)), "0 was unfrozen", frozen_layer),
    "trained within what is frozen": during(trained_in_frozen, "layer 0 is frozen", frozen_layer),
    "a trained prefix": during(trained_prefix, "past_key_values"),
    "a layer that writes to its input": during(written_input, "layer 0 writes to its input"),
    "a layer that writes to an argument": during(written_argument, "layer 0 writes to an argument", build=blocks),
    "a layer that writes to its weights": during(written_weight, "to its weights"),
    # layers send off their gradients as they go, so nothing less than a whole backward is right
    "gradients of some": during(lambda m, o: torch.autograd.grad(first_loss(m), m.lm_head.weight), "backward()"),
    "backward to some": during(lambda m, o: first_backward(m, inputs=[m.lm_head.weight]), "backward()"),
    "a graph of the gradients": during(lambda m, o: first_backward(m, create_graph=True), "create_graph"),
    "in torch.func": during(in_torch_func, "torch.func"),
    "in forward mode": during(partial(within, forward_ad.dual_level), "forward-mode"),
    "parametrizations that are cached": during(partial(within, parametrize.cached), "parametrize.cached()"),
    "a backward in another mode": during(lambda m, o: (loss := first_loss(m), m.eval(), loss.backward()), "mode"),
    "a backward after a step": during(late_backward, "has been updated since"),
    "a backward after a step, of adapters": during(late_backward, "changed in place", adapted),
    "a backward after a step, at once": at_once(late_backward, "has been updated since"),
    "the same, without state": at_once(late_backward, "has been updated since", make=partial(sgd, momentum=0.0)),
    "the same, by the CPU": at_once(late_backward, "has been updated since", choice=Choice(host_share=1.0)),
    "a backward after closing": during(closed_in_between, "close()", choice=Choice(outer="host")),
    "the same, in the middle of a layer": during(closed_within, "close()"),
    "a second backward": during(lambda m, o: (loss := first_loss(m)).backward(retain_graph=True) or loss.backward()),
    "accumulated, announced otherwise": during(
        lambda m, o: train(m, o, BATCHES, accumulate=2), "zero_grad", make=sgd, accumulate=False
    ),
    "a loss on the weights": during(lambda m, o: penalty(m).backward(), "from elsewhere"),
    "a loss on the weights and others": during(lambda m, o: (first_loss(m) + penalty(m)).backward(), "from elsewhere"),
    "a loss on the weights, at once": at_once(lambda m, o: (first_loss(m) + penalty(m)).backward(), "from elsewhere"),
    "weights assigned": during(partial(assign, then=lambda m, o: first_loss(m)), "p.copy_"),
    "weights assigned, step": during(partial(assign, then=lambda m, o: o.step()), "p.copy_"),
    "weights assigned, state": during(partial(assign, then=lambda m, o: o.state_dict()), "p.copy_"),
    "a gradient that is set": during(set_gradient, "p.grad.copy_"),
    "a hook on a weight": at_once(hooked, "hooks of modules"),
    "a hook that may change weights": during(
        partial(hooked, kind="register_post_accumulate_grad_hook"), "hooks of modules"
    ),
    "a hook between forward and backward": during(hooked_in_between, "hooks of modules"),
    "a mask of rows or of tokens": during(lambda m, o: model_loss(m, SQUARE), "(4, 4)", build=blocks, micro_batch=2),
    "a mask of flex_attention": during(given_blocks, "a BlockMask", build=blocks, micro_batch=2),
    "amsgrad later": during(partial(change_later, amsgrad=True), "amsgrad"),
    "momentum later": during(partial(change_later, momentum=0.9), "momentum", make=partial(sgd, momentum=0.0)),
    "no momentum for now": during(partial(change_later, momentum=0.0), "momentum=0.0", make=sgd),
    "state that is emptied": during(lambda m, o: (o.state.clear(), train(m, o, BATCHES)), "state was emptied"),
    "parameters taken from a group": during(
        lambda m, o: (o.param_groups[0]["params"].clear(), train(m, o, BATCHES)), "use requires_grad_"
    ),
    "adapters, merged and disabled": during(merged_and_disabled, "unmerge_adapter", partial(adapted, dropout=0.0)),
    "a hook for one call": during(hooked_for_one_call, "hooks inside layer 0"),
    "closed": during(lambda m, o: (o.close(), o.step())),
    "closed, a state": during(lambda m, o: (o.close(), o.load_state_dict(o.state_dict())), "stream again"),
    **{f"norm {n}": during(lambda m, o, n=n: o.clip_grad_norm_(n), repr(n)) for n in (-1.0, "1", True, None, math.nan)},
}


@pytest.mark.parametrize("name", ONGOING)
def test_refused_while_it_streams(name):
    call, shown, build, make, options = ONGOING[name]
    model = build()
    with streaming(model, make(model), **options) as (streamed, own):
        train(streamed, own, BATCHES[:1])
        refused(lambda: call(streamed, own), shown)


def test_an_input_that_has_left_for_the_host_may_change():
    """At other times that is refused, as plain PyTorch refuses it."""
    with streaming(blocks(), choice=Choice(inputs="host")) as (model, own):
        grads = []
        for factor in (1.0, 2.0):
            hidden = out = model.embed(BATCHES[0]["input_ids"]) * 1.0
            for block in model.blocks:
                out = block(out)
            hidden.mul_(factor)
            out.square().sum().backward()
            grads.append([param.grad.clone() for param in model.blocks.parameters()])
            own.zero_grad()
    assert all(map(torch.equal, *grads))


def test_a_layer_that_is_called_within_another():
    with streaming(blocks(), choice=Choice(slots=1)) as (model, _):
        model.blocks[1].up.register_forward_hook(lambda *_: model.blocks[2](torch.ones(1, 2, 32)) and None)
        refused(lambda: model_loss(model, BATCHES[0]), "layer 2 is called within the call of layer 1")


def test_weights_assigned_before_the_first_batch_are_refused():
    with streaming(blocks(), gpu_memory="1GiB") as (streamed, _):
        streamed.blocks[0].up.weight.data = torch.zeros_like(streamed.blocks[0].up.weight)
        refused(lambda: first_loss(streamed), "p.copy_")


@pytest.mark.parametrize("name", ["output_router_logits", "output_attentions"])
def test_a_loss_of_what_layers_record_is_refused(name):
    """Asked for in the call or in the configuration."""
    model = made(MixtralConfig(**SHAPE, num_local_experts=2), attn_implementation="eager")
    with streaming(model) as (streamed, _):
        refused(lambda: streamed(**BATCHES[0], **{name: True}), name)
        setattr(model.config, name, True)
        refused(lambda: streamed(**BATCHES[0]), name)
        with torch.no_grad():
            streamed(**BATCHES[0])


@pytest.mark.parametrize("keep", [0, 4])
def test_a_loss_of_what_layers_leave_in_attributes_is_refused(keep):
    """It shows when the layer is recomputed, or at once; to look at one, or to change it in place, is allowed."""
    model = blocks()
    block = model.blocks[0]
    block.recorded = torch.zeros(())
    block.result = lambda out: setattr(block, "recorded", block.recorded.add_(out.mean())) or out
    with streaming(model, choice=Choice(keep=keep)) as (streamed, own):
        train(streamed, own, BATCHES, after=lambda _: block.recorded.item())
        refused(lambda: (first_loss(streamed) + block.recorded).backward(), "'recorded' of layer 0")


def test_a_loss_that_layers_leave_in_training_alone_is_refused_though_a_backward_in_evaluation_came_first():
    model = blocks()
    block = model.blocks[0]
    block.result = lambda out: setattr(block, "recorded", out.mean() if block.training else None) or out
    with streaming(model) as (streamed, own):
        first_loss(streamed.eval()).backward()
        own.zero_grad()
        first_loss(streamed.train()).backward()
        own.zero_grad()
        refused(lambda: (first_loss(streamed) + block.recorded).backward(), "'recorded' of layer 0")


SPOILT: list[Callable[[dict], object]] = [
    lambda state: state.pop("param_groups"),
    lambda state: state["param_groups"].append({**state["param_groups"][0], "params": [99]}),
    lambda state: state["state"][5].update(exp_avg=torch.zeros(3, 3)),
    lambda state: state["state"][0].update(momentum_buffer=torch.zeros(61, 32)),  # another optimizer's
    lambda state: state["state"][0].pop("exp_avg"),
    lambda state: state["state"].update({1000: dict(state["state"][0])}),
]


def test_a_state_that_does_not_fit_changes_nothing():
    late = blocks()
    with going_on() as (_, own), streaming(late, gpu_memory="1GiB") as (_, unplanned):  # before its first batch
        for spoil in SPOILT:
            spoil(state := copy.deepcopy(own.state_dict()))
            refused(partial(own.load_state_dict, state))
            refused(partial(unplanned.load_state_dict, state))
    plain = blocks()
    used = adamw(plain)
    train(plain, used, BATCHES[:1])
    used.state[plain.head.weight]["exp_avg"] = torch.zeros(3, 3)
    refused(lambda: streamed_with(plain, used), "exp_avg of 'head.weight' has shape (3, 3)")
    assert all(type(param) is nn.Parameter for param in plain.parameters())


def test_what_is_refused_changes_nothing():
    with going_on(qwen3, choice=Choice(outer="host")) as (model, optimizer):
        for again in (model.model, nn.ModuleList([model])):
            refused(lambda again=again: streamed_with(again), "a part of the model is streamed")
        refused(lambda: streamed_with(qwen3(), optimizer))  # which streams another model
        for again in (
            {"moments": "fp8"},
            {"master_weights": "half"},
            {"device": "cuda:99"},
            {"optimizer": sgd(qwen3())},
        ):
            refused(lambda again=again: streamed_with(model, **again))  # and it goes on streaming
        refused(lambda: copy.deepcopy(model), "copy its state_dict()")
        refused(lambda: model.bfloat16(), "bfloat16", "before `stream`")
        refused(lambda: torch.save(model, "/dev/null"), "state_dict()")
        refused(lambda: copy.deepcopy(optimizer), "state_dict()")
        others = {name: param.detach() for name, param in model.named_parameters()}
        refused(lambda: torch.func.functional_call(model, others, kwargs=BATCHES[0]), "layer 0", "another")
        model.eval()
        ids = BATCHES[0]["input_ids"][:1]
        found = model(ids, use_cache=True)
        refused(lambda: model(ids[:, :1], past_key_values=found.past_key_values), "past_key_values")
        model.train()
