"""What a tester found in loops of real users. Each case is a loop of numbers that plain PyTorch gives, too, or what is
refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from refusals import refused
from stream_cases import going_on, streaming
from stream_loops import adamw, model_loss, own_clip
from stream_models import Block, blocks, data, llama, qwen3
from torch import nn

from t1lib.plan.cost import Choice

BATCHES = data()
PLACES = {"streamed": None, "on the host": Choice(outer="host"), "waiting": Choice(host_share=0.5, grads="device")}
by_place = pytest.mark.parametrize("place", PLACES)


def in_both(body: Callable[[nn.Module, Any], list[float]], place: str, build=qwen3, **options: Any) -> None:
    """Assert that a streamed model gives what the plain one does."""
    plain, model = build(), build()
    torch.manual_seed(1)
    expected = body(plain, adamw(plain))
    with streaming(model, adamw(model), choice=PLACES[place], **options) as own:
        torch.manual_seed(1)
        assert body(*own) == expected


def step(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> float:
    loss = model_loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def up(model: nn.Module) -> nn.Parameter:
    return model.model.layers[0].mlp.up_proj.weight


@by_place
def test_weights_that_are_swapped_for_an_average_and_back(place):
    def body(model, optimizer):
        average = {name: param.data.clone() for name, param in model.model.layers.named_parameters()}
        seen, trained = [step(model, optimizer, batch) for batch in BATCHES[:3]], {}
        for name, param in model.model.layers.named_parameters():
            trained[name], param.data = param.data, average[name]
        with torch.no_grad():
            seen.append(model_loss(model, BATCHES[0]).item())
        for name, param in model.model.layers.named_parameters():
            param.data = trained[name]
        return [*seen, *(step(model, optimizer, batch) for batch in BATCHES[2:5])]

    in_both(body, place)


@by_place
@pytest.mark.parametrize("matrix", ["embed", "head"])
def test_a_penalty_that_was_computed_before_the_forward(matrix, place):
    def body(model, optimizer):
        seen = []
        for batch in BATCHES[:3]:
            penalty = 0.01 * dict(embed=model.get_input_embeddings(), head=model.lm_head)[matrix].weight.square().sum()
            loss = model_loss(model, batch) + penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    in_both(body, place, llama)


@by_place
def test_a_soft_prompt_by_the_embedding_s_matrix(place):
    def body(model, optimizer):
        seen, ids = [], BATCHES[0]["input_ids"]
        for _ in range(3):
            chosen = nn.functional.one_hot(ids, model.config.vocab_size).float().requires_grad_()
            loss = model(inputs_embeds=chosen @ model.get_input_embeddings().weight, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), chosen.grad.norm().item()]
        return seen

    in_both(body, place)


@by_place
@pytest.mark.parametrize("clear", ["one by one", "a part of the model"])
def test_gradients_that_are_kept_while_others_come(clear, place):
    def body(model, optimizer):
        kept = []
        for batch in BATCHES[:2]:
            if clear == "one by one":
                for param in model.parameters():
                    param.grad = None
            else:
                model.model.layers.zero_grad()
            model_loss(model, batch).backward()
            kept.append(up(model).grad)
        up(model).grad = kept[0] + kept[1]
        optimizer.step()
        return [*(grad.norm().item() for grad in kept), up(model).norm().item()]

    in_both(body, place)


@by_place
def test_evaluation_mode_between_forward_and_backward(place):
    def body(model, optimizer):
        loss = model_loss(model, BATCHES[0])
        model.eval()
        loss.backward()
        model.train()
        return [param.grad.norm().item() for param in model.parameters()]

    in_both(body, place, partial(blocks, dropout=0.3))


@by_place
def test_clipped_gradients_of_parameters_in_no_group(place):
    plain, model = qwen3(), qwen3()
    found = []
    for one in (plain, model):
        others = [p for name, p in one.named_parameters() if "up_proj" not in name]
        optimizer = torch.optim.AdamW(others, lr=1e-2)
        if one is model:
            with streaming(model, optimizer, choice=PLACES[place]) as (_, own):
                found.append(clipped(model, own))
        else:
            found.append(clipped(plain, optimizer))
    assert found[0] == found[1]


def clipped(model: nn.Module, optimizer: Any) -> list[float]:
    model_loss(model, BATCHES[0]).backward()
    norm = own_clip(model, optimizer)
    optimizer.step()
    return [norm.item(), up(model).grad.norm().item()]


@by_place
def test_gradients_of_inputs_of_a_frozen_model(place):
    def body(model, optimizer):
        model.requires_grad_(False)
        embeds = model.get_input_embeddings()(BATCHES[0]["input_ids"]).detach().requires_grad_()
        loss = model(inputs_embeds=embeds, labels=BATCHES[0]["input_ids"]).loss
        return [loss.item(), torch.autograd.grad(loss, embeds)[0].norm().item()]

    in_both(body, place)


class Skipped(Block):
    def forward(self, hidden, *given, **named):
        return hidden if torch.rand(()) < 0.5 else super().forward(hidden, *given, **named)


@by_place
def test_a_layer_that_is_skipped_below_all_that_trains(place):
    def build():
        model = blocks()
        model.embed.requires_grad_(False)
        model.blocks[0].__class__ = Skipped
        return model

    in_both(lambda model, optimizer: [step(model, optimizer, batch) for batch in BATCHES], place, build)


def test_what_is_refused_changes_nothing():
    with going_on(qwen3) as (model, optimizer):
        refused(lambda: model.bfloat16(), "bfloat16", "before `stream`")
        refused(lambda: torch.save(model, "/dev/null"), "state_dict()")
        others = {name: param.detach() for name, param in model.named_parameters()}
        refused(lambda: torch.func.functional_call(model, others, kwargs=BATCHES[0]), "layer 0", "another")
        model.eval()
        found = model(BATCHES[0]["input_ids"][:1], use_cache=True)
        refused(lambda: model(BATCHES[0]["input_ids"][:1, :1], past_key_values=found.past_key_values), "no_grad()")
        model.train()
        hook = up(model).register_hook(lambda grad: grad)
        two = model_loss(model, BATCHES[0]) + model_loss(model, BATCHES[1])
        refused(two.backward, "a hook", "parts")
        hook.remove()
        optimizer.zero_grad()


def test_a_backward_after_the_step_that_its_forward_did_not_see():
    model = qwen3()
    with streaming(model, adamw(model)) as (_, optimizer):
        late = model_loss(model, BATCHES[1])
        step(model, optimizer, BATCHES[0])
        refused(late.backward, "layer 3", "step()")
