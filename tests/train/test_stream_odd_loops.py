"""Loops that do something unusual around forward, backward and step: the numbers of plain PyTorch, or an error."""

import copy
from functools import partial

import pytest
import torch
from stream_cases import compare, refused, streaming, weights
from stream_loops import adamw, sgd
from stream_models import Blocks, data, qwen3
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, MixtralConfig

from t1lib.plan.cost import Choice

OUTER = {"device": Choice(), "host": Choice(outer="host")}
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def loss_of(model, batch):
    return model(**batch).loss


def thrice(step):
    """A loop that calls `step(model, optimizer, batch)`, and gives a number for each weight."""

    def loop(model, optimizer):
        for batch in data(3):
            step(model, optimizer, batch)
        return [weight.double().sum().item() for weight in weights(model).values()]

    return loop


def cached(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("choice", [Choice(), Choice(keep=2)], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        GPTNeoXConfig(**SMALL, intermediate_size=48),
    ],
    ids=["by position", "by another name"],
)
def test_a_cache_is_left_out_however_it_comes(config, choice):
    """A recomputation would attend to what the forward has left there."""
    plain, model, batch = cached(config), cached(config), data(1)[0]
    loss_of(plain, batch).backward()
    with streaming(model, choice=choice) as (streamed, _):
        loss_of(streamed, batch).backward()
        for (name, param), other in zip(streamed.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad.cpu(), other.grad), name
    plain.eval(), model.eval()
    with streaming(model, micro_batch=1) as (streamed, _), torch.no_grad():
        assert loss_of(streamed, batch) == loss_of(plain, batch)


@pytest.mark.parametrize("asked", ["in the configuration", "in the call"])
def test_a_router_loss_is_refused(asked):
    config = MixtralConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=2)
    config.output_router_logits = asked == "in the configuration"
    model = cached(config)
    more = {} if config.output_router_logits else {"output_router_logits": True}
    with streaming(model) as (streamed, _):
        refused(lambda: streamed(**data(1)[0], **more), "output_router_logits")
        with torch.no_grad():
            streamed(**data(1)[0], **more)


def test_gradients_of_some_tensors_only():
    """Layers send off their gradients as they go, so nothing less than a whole backward is right."""
    with streaming(qwen3()) as (streamed, _):
        weight = streamed.get_input_embeddings().weight
        refused(lambda: torch.autograd.grad(loss_of(streamed, data(1)[0]), weight), "backward()")
        refused(lambda: loss_of(streamed, data(1)[0]).backward(inputs=[weight]), "backward()")
        assert all(param.grad is None for param in streamed.parameters())


def test_a_copy_of_a_streamed_model():
    model = qwen3()
    with streaming(model) as (streamed, _):
        refused(lambda: copy.deepcopy(streamed), "copy")
    assert loss_of(copy.deepcopy(model), data(1)[0]) == loss_of(model, data(1)[0])


def weights_written(model, optimizer, batch):
    loss_of(model, batch).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def gradients_zeroed(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    for param in model.parameters():
        param.grad.zero_()


def gradients_halved(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    for param in model.parameters():
        param.grad.mul_(0.5)


def evaluated_before_the_step(model, optimizer, batch):
    loss_of(model, batch).backward()
    with torch.inference_mode():
        loss_of(model, batch)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("loop", [weights_written, gradients_zeroed, gradients_halved, evaluated_before_the_step])
@pytest.mark.parametrize("outer", OUTER)
def test_writes_between_backward_and_the_next_forward(outer, loop):
    compare(qwen3, adamw, thrice(loop), choice=OUTER[outer])


def test_an_evaluation_while_gradients_wait_on_the_device():
    compare(qwen3, adamw, thrice(evaluated_before_the_step), choice=Choice(grads="device"))


def test_gradients_that_somebody_keeps():
    """They stay what they were, and clipping and norms see what is done to them."""

    def loop(model, optimizer, batch):
        loss_of(model, batch).backward()
        kept = [param.grad for param in model.parameters()]
        held.append([grad.clone() for grad in kept])
        clip(model, optimizer)
        for grad in kept:
            grad.mul_(3.0)
        clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        still.append((kept, [grad.clone() for grad in kept]))

    def clip(model, optimizer):
        own = getattr(optimizer, "clip_grad_norm_", None)
        own(0.5) if own else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    held, still = [], []
    compare(qwen3, sgd, thrice(loop))
    assert all(torch.equal(grad, then) for kept, copies in still for grad, then in zip(kept, copies, strict=True))


def test_hooks_that_would_not_see_whole_gradients():
    model = qwen3()
    weight = model.model.layers[1].mlp.up_proj.weight
    hook = weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with streaming(model, micro_batch=1) as (streamed, _):
        refused(lambda: loss_of(streamed, data(1)[0]).backward(), "hook", "micro_batch")
    with streaming(model) as (streamed, _):
        loss_of(streamed, data(1)[0]).backward()
        assert weight.grad.abs().max() <= 1e-3
    hook.remove()
    with streaming(model) as (streamed, _):
        weight.register_post_accumulate_grad_hook(lambda param: None)
        refused(lambda: loss_of(streamed, data(1)[0]).backward(), "hook")


def test_as_many_rows_as_tokens():
    """Whose the dimensions of a mask are, nobody can tell."""
    model = Blocks()
    batch = {"input_ids": torch.arange(16).view(4, 4), "labels": torch.arange(16).view(4, 4)}
    with streaming(model, micro_batch=2) as (streamed, _):
        refused(lambda: loss_of(streamed, batch), "(4, 4)", "micro_batch")
        batch["attention_mask"] = torch.ones(4, 4)
        loss_of(streamed, batch).backward()


LATE = (adamw, {"amsgrad": True}), (partial(sgd, momentum=0.0), {"momentum": 0.9})


@pytest.mark.parametrize(("make", "option"), LATE)
def test_options_that_come_too_late(make, option):
    model = qwen3()
    with streaming(model, make(model)) as (streamed, own):
        loss_of(streamed, data(1)[0]).backward()
        own.param_groups[0].update(option)
        refused(own.step, next(iter(option)))
