"""What surrounds a streamed model: losses on its weights, moody layers, the user's own checkpoints, threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import PLACES, case, compare, masters, streaming
from stream_loops import adamw, evaluated, model_loss, own_clip, sgd, train, two_forwards
from stream_models import Block, adapted, blocks, data, layers_of, llama, qwen3
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, prune
from torch.utils.checkpoint import checkpoint

from t1lib.train import activations


def penalised_before(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Computed before the forward, of the two matrices whose memory the backward of the layers may take."""
    before = 0.01 * sum(m.weight.square().sum() for m in (model.get_input_embeddings(), model.lm_head))
    return model_loss(model, batch) + before


def embedding_again(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    embedded = checkpoint(model.get_input_embeddings(), batch["input_ids"], use_reentrant=False)
    return model(inputs_embeds=embedded, labels=batch["labels"]).loss


def of_inputs_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Nothing of the model is trained. The embedding is given its input by name."""
    model.requires_grad_(False)
    model.t1_given = model.get_input_embeddings()(input=batch["input_ids"]).requires_grad_()
    return model(inputs_embeds=model.t1_given, labels=batch["labels"]).loss


def freezing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A weight is frozen between forward and backward."""
    up_weight(model, -1).requires_grad_(True)
    loss = model_loss(model, batch)
    up_weight(model, -1).requires_grad_(False)
    return loss


def up_weight(model: nn.Module, layer: int = 0) -> nn.Parameter:
    return layers_of(model)[layer].mlp.up_proj.weight


def of_two_kinds() -> nn.Module:
    """Adapters to choose from: those of DoRA, the active ones, need the values of a layer's last product."""
    model = adapted(dropout=0.0, target_modules=["q_proj"])
    config = type(model.peft_config["default"])(r=2, use_dora=True, target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", config)
    model.set_adapter("other")
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name or "embed" in name)
    return model


def of_average(model: nn.Module) -> float:
    """What is found with other weights, which are swapped in and out."""
    params = list(layers_of(model).parameters())
    trained = [param.detach().clone() for param in params]
    with torch.no_grad():
        torch._foreach_mul_(params, 0.5)
    found = evaluated(model)
    with torch.no_grad():
        torch._foreach_copy_(params, trained)
    return found


def decoded_by_hand(model: nn.Module) -> float:
    """From a prompt that was run where gradients are possible."""
    model.eval()
    found = model(data()[0]["input_ids"], use_cache=True)
    with torch.no_grad():
        found = model(data()[1]["input_ids"][:, :1], past_key_values=found.past_key_values)
    model.train()
    return found.logits.norm().item()


def of_assigned(model: nn.Module) -> float:
    """Weights of embedding and head are assigned for good, and then looked at in inference mode."""
    for param in (model.get_input_embeddings().weight, model.lm_head.weight):
        param.data = param.data * 0.9
    with torch.inference_mode():
        return evaluated(model)


def clip_often(model: nn.Module, optimizer: Any) -> Tensor:
    """Its gradients have another norm every time: without one, clipped already, changed through what is held."""
    layers_of(model)[2].mlp.up_proj.weight.grad = None
    norms, held = [own_clip(model, optimizer, most) for most in (0.3, 0.2)], up_weight(model).grad
    if hasattr(optimizer, "grad_norm"):
        optimizer.grad_norm()
    held.mul_(3)
    return torch.stack([*norms, own_clip(model, optimizer, most=0.1)]).sum()


def prune_later(model: nn.Module, optimizer: Any, batch: Any) -> None:
    if not hasattr(model, "t1_pruned"):
        model.t1_pruned = prune.l1_unstructured(layers_of(model)[1].mlp.up_proj, "weight", 0.3)


def replace_forwards(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Of a module each in two layers, after some steps: one's product is needed, the other's runs twice."""
    model.t1_steps = getattr(model, "t1_steps", 0) + 1
    if model.t1_steps == 3:
        squared, repeated = layers_of(model)[1].mlp, layers_of(model)[2].mlp
        squared.forward = lambda x: type(squared).forward(squared, x).square()
        repeated.forward = lambda x: type(repeated).forward(repeated, type(repeated).forward(repeated, x))


def keep_first(model: nn.Module, optimizer: Any) -> Tensor:
    return vars(model).setdefault("t1_kept", up_weight(model).grad).norm()


def give_other_data(model: nn.Module, optimizer: Any) -> Tensor:
    """What is held from the step before has them, too, as it is the same tensor."""
    weight, kept = up_weight(model), vars(model).setdefault("t1_kept", up_weight(model).grad)
    weight.grad.data = weight.grad.data * 2
    assert weight.grad is weight.grad
    return kept.norm()


def hold_once(model: nn.Module, optimizer: Any) -> Tensor:
    """What is held from the first step on has the later gradients, too."""
    held = vars(model).setdefault("t1_held", [param.grad for param in model.parameters()])
    torch._foreach_mul_(held, 2.0)
    return own_clip(model, optimizer) + sum(grad.norm() for grad in held)


def write_layers(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Through aliases that were taken once, after each `drain()`."""
    if not hasattr(model, "t1_held"):
        model.t1_held = [param.detach() for param in layers_of(model).parameters()]
    getattr(optimizer, "drain", lambda: None)()
    torch._foreach_mul_(model.t1_held, 0.9)


def hold_outer(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """While somebody holds an alias, the memory is not released, and what is there counts."""
    if not hasattr(model, "t1_held"):
        model.t1_held = [model.embed.weight.detach(), model.head.weight.detach()]


def write_outer(model: nn.Module, optimizer: Any) -> None:
    torch._foreach_mul_(model.t1_held, 0.9)


def save_within(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Within a layer's call, as a hook or a signal's handler may."""
    model.blocks[1].up.register_forward_hook(lambda *_: optimizer.state_dict() and None)


LATE: dict[str, Callable[[nn.Module], Tensor]] = {
    "the embedding": lambda model: model.embed(data()[3]["input_ids"]),
    "a layer": lambda model: model.blocks[0](model.embed(data()[3]["input_ids"])),
    "the head": lambda model: model.head(torch.ones(4, 32)),
}


def step_again(late: Callable[[nn.Module], Tensor], model: nn.Module, optimizer: Any, batch: Any) -> None:
    """With gradients that are added while the last step's update waits for a forward through the last layer."""
    found = vars(model).pop("t1_late", None)
    (late(model) if found is None else found).square().sum().backward()
    optimizer.step()


def late_gradients() -> dict[str, dict[str, Any]]:
    """That come after a step count in the next one, as do those of a forward before the step."""
    found = {}
    for what, late in LATE.items():
        own = {"before": partial(step_again, late), "zero": lambda model: None}
        found[f"gradients of {what} after a step"] = case(blocks, **own)
        if what != "a layer":  # refused, as in plain PyTorch
            keep = lambda model, optimizer, late=late: vars(model).update(t1_late=late(model))  # noqa: E731
            found[f"gradients of {what} after a step, of a forward before it"] = case(blocks, clip=keep, **own)
    return found


def with_scale() -> nn.Module:
    """A parameter of the optimizer's that soon is none of the model's."""
    model = qwen3()
    model.t1_scale = nn.Parameter(torch.tensor(0.5))
    return model


def scaled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if not hasattr(model, "t1_taken"):
        model.t1_taken = [model._parameters.pop("t1_scale")]
    return model_loss(model, batch) * model.t1_taken[0].exp()


def clip_all_of_the_optimizer(model: nn.Module, optimizer: Any) -> Tensor:
    own = getattr(optimizer, "clip_grad_norm_", None)
    return own(0.05) if own else clip_grad_norm_([*model.parameters(), *model.t1_taken], 0.05)


class Moody(Block):
    """By chance or by its number it is skipped, or leaves its rest out; looks at its output, and keeps it."""

    number = 0

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        if self.number == 0 and torch.rand(()) < 0.5:
            return hidden
        out = super().forward(hidden, mask, scale=scale)
        if self.number == 1 or (self.number == 2 and torch.rand(()) < 0.5):
            return hidden + 0.1 * (out - hidden).square()
        self.last = out.detach()
        return out if out.detach().abs().max() < 1e3 else out.clamp(-1e3, 1e3)


def moody() -> nn.Module:
    """Nothing below the layer that is skipped trains."""
    model = blocks()
    model.embed.requires_grad_(False)
    for number, block in enumerate(model.blocks):
        block.__class__, block.number = Moody, number
    return model


def test_another_thread_evaluates_meanwhile():
    plain, model, stop = qwen3(), qwen3(), threading.Event()

    def evaluate() -> None:
        while not stop.is_set():
            with torch.no_grad():
                model_loss(model, data()[0])

    with streaming(model) as both, ThreadPoolExecutor(1) as pool:
        evaluating = pool.submit(evaluate)
        try:
            assert train(*both) == train(plain, adamw(plain))
        finally:
            stop.set()
        evaluating.result()


@pytest.mark.parametrize("place", sorted(PLACES.keys() - {"all resident"}))
@pytest.mark.parametrize("masters", ["whole", "split"])
def test_weights_written_by_hand_are_saved_with_their_masters_and_train_on(masters, place):
    """Also what was written, or assigned, last before `close()`."""

    def masters_have_followed() -> None:
        saved = own.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            master, weight = saved[number]["master"].cpu(), param.detach().cpu().float()
            torch.testing.assert_close(master, weight, rtol=4e-3, atol=1e-37)

    model = qwen3(torch.bfloat16)
    with streaming(model, adamw(model, weight_decay=0.0), master_weights=masters, **PLACES[place]) as (streamed, own):
        train(streamed, own, data(3))
        with torch.no_grad():
            for param in streamed.parameters():
                param.add_(0.25)
            zeroed = [streamed.lm_head.weight, streamed.model.layers[1].mlp.up_proj.weight]
            zeroed[1].zero_()
        zeroed[0].data = torch.zeros_like(zeroed[0])
        streamed.model.norm.weight.data = torch.full_like(streamed.model.norm.weight, 0.5)
        masters_have_followed()
        train(streamed, own, data(3))
        assert all((param == 0).float().mean() < 0.05 for param in zeroed)
        up_weight(model, 1).data.fill_(0.5)
        up_weight(model, 2).data = torch.full_like(up_weight(model, 2).detach(), 0.5)
        own.close()
        masters_have_followed()
        assert all((up_weight(model, layer) == 0.5).all() for layer in (1, 2))


CASES: dict[str, dict[str, Any]] = {
    "a loss on the weights of embedding and head, computed before": case(llama, loss=penalised_before),
    # one backward may add up gradients
    "two forwards, without accumulation": case(qwen3, sgd, loss=two_forwards) | {"accumulate": False},
    "layers that do not do the same every time": case(moody),
    "a checkpoint around the embedding": case(qwen3, loss=embedding_again),
    "gradients of inputs alone": case(qwen3, loss=of_inputs_alone, clip=lambda m, o: m.t1_given.grad.norm()),
    "a weight that is frozen before the backward": case(qwen3, loss=freezing),
    "adapters of two kinds, in turns": case(
        of_two_kinds, before=lambda m, o, b: m.set_adapter("default" if m.active_adapter == "other" else "other")
    ),
    # updates of which the weights, in 16 bits, see none for a while
    "weights swapped for an average": masters(qwen3, partial(adamw, lr=1e-5), after=of_average),
    "weights that are assigned": case(llama, after=of_assigned),
    "decoding by hand": case(qwen3, after=decoded_by_hand),
    "decoding by hand, by rows": case(qwen3, after=decoded_by_hand, micro_batch=1, rel=1e-5),
    "modules whose forward is replaced": case(qwen3, before=replace_forwards),
    "weights that are pruned": case(qwen3, before=prune_later),
    "gradients clipped again and again": case(qwen3, clip=clip_often),
    "gradients zeroed through what is held": case(qwen3, clip=hold_once, zero=lambda m: [g.zero_() for g in m.t1_held]),
    "gradients held once, while more accumulate": case(qwen3, sgd, accumulate=2, clip=hold_once, zero=False),
    "weights of layers written through aliases": case(blocks, before=write_layers),
    "weights of embedding and head written through aliases": case(blocks, before=hold_outer, clip=write_outer),
    "a look at the state within a layer": case(blocks, before=save_within),
    **late_gradients(),
    "a parameter that is the optimizer's alone": case(with_scale, loss=scaled, clip=clip_all_of_the_optimizer),
    "gradients whose data is assigned": case(qwen3, clip=give_other_data, zero=False),
    "a gradient that is kept": case(qwen3, clip=keep_first),
    "a gradient that is kept, dropped by layers": case(qwen3, clip=keep_first, zero=lambda m: m.model.zero_grad()),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_plain_pytorch(name, monkeypatch):
    """Memory that nobody has written to holds nan."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        compare(**CASES[name], places=PLACES.values())
    finally:
        torch.use_deterministic_algorithms(False)


def test_hidden_states_are_cut_by_rows_whatever_their_shape():
    """Of the layer's other arguments, a matrix like this one would be refused."""
    pieces = activations.split_rows(activations.Piece(torch.zeros(4, 4), (), {}), 3)
    assert [piece.hidden.shape for piece in pieces] == [(3, 4), (1, 4)]


def test_the_last_product_is_left_out_of_known_layers_unless_somebody_looks(monkeypatch):
    left_out, seen = [], []
    apply = activations._Unread.apply
    monkeypatch.setattr(activations._Unread, "apply", lambda *given: left_out.append(1) or apply(*given))
    with streaming(qwen3()) as (model, _):
        for looking in (False, True):
            if looking:
                note = lambda module, given, out: seen.append(float(out.detach().abs().max()))  # noqa: E731
                model.model.layers[2].mlp.register_forward_hook(note)
            model_loss(model, data()[0]).backward()
            assert len(left_out) == 3 + 3 * looking  # of four layers, the first is watched; then one has a hook
    assert len(seen) == 2 and seen[0] == seen[1]
