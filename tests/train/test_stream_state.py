"""A streamed model's weights, gradients and state are whole whenever one looks; nothing stays of what is dropped."""

import copy
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import stream_cases
import torch
from copies import wait_for
from stream_cases import MIXTURES, all_freed, assert_same_state, assert_same_weights, six_steps, streaming, weights
from stream_loops import RATES, adamw, grouped, model_loss, own_clip, sgd, train
from stream_models import LAYERS, blocks, data, layers_of, llama, qwen3
from torch import nn

from t1lib.measure.probes import AllocatorTimeline
from t1lib.plan.cost import Choice
from t1lib.train import activations, stream
from t1lib.train.outer import OuterParam
from t1lib.train.schedule import Schedule
from t1lib.train.travel import Travel
from t1lib.train.update import update

pytestmark = pytest.mark.usefixtures("quick_collection")

CLIPPED = partial(train, clip=own_clip)
BATCHES = data(6)
FIRST, SECOND = BATCHES[:3], BATCHES[3:]


def placed(place: dict[str, Any] | None, model: nn.Module, optimizer: Any) -> Any:
    """The model and its optimizer, streamed or, for None, as they are."""
    return nullcontext((model, optimizer)) if place is None else streaming(model, optimizer, **place)


KINDS = {"plain": None, **{place.id: place.values[0] for place in MIXTURES}}
WAYS = ["plain mixed", "mixed plain", "plain host", "host plain", "streamed mixed", "plain resident", "host streamed"]


@pytest.mark.parametrize("optimizer", [sgd, grouped], ids=["sgd", "adamw"])
@pytest.mark.parametrize("source, target", [way.split() for way in WAYS])
def test_a_run_goes_on_elsewhere(source, target, optimizer):
    """From files in a fresh model or (AdamW) in one that was trained on something else; or with its own optimizer."""
    plain, usual, expected = six_steps(llama, optimizer)
    first, second = llama(), llama()
    used, other = optimizer(first), optimizer(second)
    with placed(KINDS[source], first, used) as (model, own):
        CLIPPED(model, own, FIRST)
        file = io.BytesIO()  # so that nothing is shared with what runs on
        torch.save((model.state_dict(), own.state_dict()), file)
    file.seek(0)
    saved, state = torch.load(file, weights_only=True)
    for each, begun in [(second, other), (first, used)][: 2 if source == "plain" else 1]:
        with placed(KINDS[target], each, begun) as (model, own):
            if each is second:
                train(model, own, SECOND[:2] if optimizer is grouped else [])
                model.load_state_dict(saved)
                own.load_state_dict(state)
            assert CLIPPED(model, own, SECOND) == expected[6:]
            assert_same_weights(model, plain)
            assert_same_state(own, usual)


@pytest.mark.parametrize("place", [*MIXTURES, {"update_in_backward": True}])
def test_a_cell_that_streams_a_model_runs_again(place):
    """As in a notebook, where nobody holds the first optimizer any more: plain PyTorch would go on from the weights."""
    plain, model, batches = llama(), llama(), data(3)
    expected = [train(plain, adamw(plain), batches) for _ in range(2)]
    for losses in expected:
        optimizer = adamw(model)
        gc.collect()
        model, optimizer = stream(model, optimizer, **place)
        assert train(model, optimizer, batches) == losses
    engine = weakref.ref(optimizer._engine)
    if "update_in_backward" not in place:
        (_loss := model_loss(model, batches[0])).backward()  # whoever keeps this loss keeps no state
        optimizer.zero_grad()
    with streaming(model):
        del optimizer
        assert_same_weights(model, plain)
        gc.collect()
        assert engine() is None


def test_a_closed_model_its_copy_and_the_model_streamed_again_train_on():
    """After `close()` nothing is left of the streaming: not in the model, not in a copy of it, not on the device, nor
    of the weights in pinned memory, though nothing collects garbage, and losses are kept."""
    plain, _, expected = six_steps(qwen3)
    model = qwen3()
    embedding = model.model.embed_tokens
    embedding.forward = own_forward = embedding.forward  # in the module's own dictionary
    kind, names, start = type(model), [set(vars(m)) for m in model.modules()], weights(model)
    with streaming(model) as (_, own):
        own.close()  # unused; and again at the end
    assert_same_weights(model, start)
    with streaming(model, choice=Choice(resident=1, inputs="host", outer="host")) as (streamed, own):
        assert streamed is model
        CLIPPED(streamed, own, FIRST)
        saved = copy.deepcopy(own.state_dict())
        kept = [model_loss(streamed, batch) for batch in data(2)]
        kept[1].backward()
        own.zero_grad()
        with all_freed(own):
            own.close()
    assert type(model) is kind and embedding.forward is own_forward
    assert [set(vars(m)) for m in model.modules()] == names
    for one, place in ((copy.deepcopy(model), None), (copy.deepcopy(model), KINDS["mixed"]), (model, None)):
        with placed(place, one, adamw(one)) as (found, optimizer):
            optimizer.load_state_dict(copy.deepcopy(saved))
            assert CLIPPED(found, optimizer, SECOND) == expected[6:]
            assert_same_weights(found, plain)


@pytest.mark.parametrize("options", MIXTURES)
def test_close_leaves_the_gradients_that_are_there(options):
    plain, model = blocks(), blocks()
    with streaming(model, **options) as (streamed, own):
        for one, optimizer in ((plain, None), (streamed, own)):
            model_loss(one, BATCHES[0]).backward()
            own_clip(one, optimizer)
            one.head.weight.grad = one.blocks[0].up.weight.grad = None
    for mine, usual in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is usual.grad is None or torch.equal(mine.grad, usual.grad)


@pytest.mark.parametrize("options", MIXTURES[:3])
@pytest.mark.parametrize("masters", ["whole", "split"])
def test_weights_written_by_hand_are_saved_with_their_masters_and_train_on(masters, options):
    """Also what was written, or assigned, last before `close()`."""

    def masters_have_followed() -> None:
        saved = own.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            master, weight = saved[number]["master"].cpu(), param.detach().cpu().float()
            torch.testing.assert_close(master, weight, rtol=4e-3, atol=1e-37)

    model = qwen3(torch.bfloat16)
    optimizer = adamw(model, weight_decay=0.0)
    with streaming(model, optimizer, master_weights=masters, **options) as (streamed, own):
        train(streamed, own, data(3))
        with torch.no_grad():
            for param in streamed.parameters():
                param.add_(0.25)
            up = [layer.mlp.up_proj.weight for layer in model.model.layers]
            zeroed = [streamed.lm_head.weight, up[1]]
            zeroed[1].zero_()
        zeroed[0].data = torch.zeros_like(zeroed[0])
        streamed.model.norm.weight.data = torch.full_like(streamed.model.norm.weight, 0.5)
        masters_have_followed()
        train(streamed, own, data(3))
        assert all((param == 0).float().mean() < 0.05 for param in zeroed)
        up[1].data.fill_(0.5)
        for weight in (up[0], up[2]):
            weight.data = torch.full_like(weight.detach(), 0.5)
        own.close()
        masters_have_followed()
        assert all((weight == 0.5).all() for weight in up[:3])


def test_hooks_of_loading_are_called():
    """As PyTorch calls them: one before may change what is given, or return something else."""
    with streaming(blocks()) as (streamed, own):
        train(streamed, own, FIRST[:1])
        state, loaded = own.state_dict(), []
        own.register_load_state_dict_pre_hook(lambda _, given: given.pop("extra"))
        own.register_load_state_dict_pre_hook(lambda _, given: given | {"param_groups": copy.deepcopy(rates)})
        own.register_load_state_dict_post_hook(lambda optimizer: loaded.append(optimizer.param_groups[0]["lr"]))
        rates = [{**group, "lr": 0.5} for group in state["param_groups"]]
        own.load_state_dict(given := {**state, "extra": None})
        assert loaded == [0.5] and "extra" in given


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_loading_forgets_an_earlier_schedule_and_leaves_what_is_loaded_to_the_user(rate):
    """The next schedule begins with the loaded rate, and none writes to it."""

    def schedules(model: nn.Module, optimizer: Any) -> list[float]:
        found, saved = [], copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] *= 0.5
        for _ in range(3):
            found += train(model, optimizer, FIRST, schedule=RATES)
            optimizer.load_state_dict(saved)
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    stream_cases.compare(llama, lambda model: adamw(model, lr=copy.deepcopy(rate)), schedules)


def test_accelerate_saves_all_weights(tmp_path):
    """It takes tensors of one storage for tied ones."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(*stream(model, adamw(model)))
    train(model, optimizer, data(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path)
    train(model, optimizer, data(2))
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0.0, atol=0.0)


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Leave what was made before these tests out of every collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_gradient_in_another_layout_is_copied_before_the_update_may_read_it(monkeypatch):
    seen, by_piece = [], Travel.by_piece

    def note(self, held, given, **options):
        seen.append(given.grads is held.update.grads)
        return by_piece(self, held, given, **options)

    monkeypatch.setattr(Travel, "by_piece", note)
    with streaming(model := llama(), adamw(model), choice=Choice(outer="host", resident=4)) as (model, own):
        model_loss(model, BATCHES[0]).backward()
        model.lm_head.weight.grad = model.lm_head.weight.grad.t().contiguous().t()
        own.step()
        own.drain()
    assert seen and all(seen)


def test_an_update_rebuilds_embedding_and_head_so_that_they_need_not_come_back():
    with streaming(blocks(), choice=Choice(outer="host")) as both, patch.object(OuterParam, "refill") as refill:
        train(*both, BATCHES[:3])
        both[1].drain()
    refill.assert_not_called()


def test_an_update_in_the_backward_begins_with_weights_that_were_written():
    """Not with the masters from before."""
    model = llama(torch.bfloat16)
    with streaming(model, adamw(model, lr=1e-6), update_in_backward=True) as (streamed, own):
        train(streamed, own, BATCHES[:1])
        with torch.no_grad():
            for param in layers_of(streamed).parameters():
                param.fill_(0.25)
        train(streamed, own, BATCHES[:1])
        for param in layers_of(streamed).parameters():
            torch.testing.assert_close(param, torch.full_like(param, 0.25))


def test_an_evaluation_sends_no_layer_twice():
    """Three layers in two slots: the second stays; the first and the third take turns in the other slot."""
    with streaming(blocks(layers=3)) as (streamed, _), torch.no_grad():
        model_loss(streamed, BATCHES[0])
        with patch.object(Schedule, "_copy_in", autospec=True, side_effect=Schedule._copy_in) as copy_in:
            model_loss(streamed, BATCHES[0])
    assert [call.args[1].index for call in copy_in.call_args_list] == [2, 0]


def leave(options: dict[str, Any], end: str) -> list[weakref.ref]:
    """Train, and let go of model and optimizer; `end` says in which state."""
    model = blocks()
    streamed, own = stream_cases.streamed_with(model, **options)
    train(streamed, own, FIRST)
    if end == "broken":
        model.blocks[2].fault.arm(ArithmeticError())
        with pytest.raises(ArithmeticError):
            model_loss(streamed, BATCHES[0])
    elif end == "in the middle":
        model_loss(streamed, BATCHES[0]).backward()
    elif end == "closed":
        own.close()
    return [weakref.ref(model), weakref.ref(own), weakref.ref(model.blocks[1].up.weight)]


@pytest.mark.parametrize("end", ["after a step", "in the middle", "broken", "closed"])
@pytest.mark.parametrize("options", [*MIXTURES[:3], {"update_in_backward": True}, {"gpu_memory": "1GiB"}])
def test_what_is_dropped_is_gone(options, end):
    """Threads end, and host memory is given back, with and without `close()`."""
    leave({}, "closed")  # what is made once in a process
    before, running = stream_cases.held_bytes(), {*threading.enumerate()}
    references = leave(options, end)
    assert wait_for(lambda: gc.collect() >= 0 and not any(each() for each in references))
    assert wait_for(lambda: running.issuperset(threading.enumerate())), {*threading.enumerate()} - running
    assert stream_cases.held_bytes() <= before


def test_many_steps_without_growth():
    """Nor by forwards in vain, of which activations are kept."""
    with streaming(blocks(layers=2, hidden=16), choice=Choice(host_share=0.5, keep=1)) as (streamed, own):
        sizes = []
        for _ in range(3):
            for start in range(40):
                train(streamed, own, [BATCHES[start % 6]], clip=lambda _, optimizer: optimizer.clip_grad_norm_(0.1))
            model_loss(streamed, BATCHES[0])
            own.drain()
            gc.collect()
            sizes.append((stream_cases.held_bytes(), threading.active_count(), len(gc.get_objects())))
    assert sizes[2][:2] == sizes[1][:2] and sizes[2][2] <= sizes[1][2] + 50


def test_a_loss_that_is_kept_keeps_nothing_of_its_batch():
    """Such as a sum of losses that is logged later: masks and positions are freed by the backward, too."""
    with streaming(llama(), choice=Choice(outer="host", keep=1)) as (streamed, own):
        total, sizes, batches = torch.zeros(()), [], data(6, padded=True)
        for batch in batches:
            loss = model_loss(streamed, batch)
            loss.backward()
            total = total + loss
            own.step()
            own.zero_grad()
            del loss
            own.drain()
            sizes.append(stream_cases.held_bytes())
    assert total.requires_grad and sizes[5] - sizes[2] < 64, sizes


def test_gradients_that_are_zeroed_need_none_themselves():
    """They were changed where graphs are recorded, as by a penalty; their graph would grow with every step."""
    with streaming(qwen3()) as (streamed, own):
        model_loss(streamed, BATCHES[0]).backward()
        params = [streamed.model.norm.weight, streamed.model.layers[0].mlp.up_proj.weight]
        for param in params:
            param.grad.add_(param * 0.1)
        own.zero_grad(set_to_none=False)
        assert not any(param.grad.requires_grad or param.grad.any() for param in params)


def test_the_models_zero_grad_is_for_all_its_parameters_the_optimizers_for_its_own():
    model = qwen3(tie_word_embeddings=False)
    with streaming(model, adamw(model.model)) as (streamed, own):
        model_loss(streamed, BATCHES[0]).backward()
        own.zero_grad()
        assert [name for name, param in model.named_parameters() if param.grad is not None] == ["lm_head.weight"]
        model.zero_grad()
        assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_the_first_update_with_momentum_has_pytorchs_bits_and_takes_no_second_buffer(kind):
    """Also of a gradient of −0."""
    rule = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.0} | kind
    weight, grad = nn.Parameter(torch.randn(2**16)), torch.randn(2**16)
    grad[:8] = -0.0
    plain, state = nn.Parameter(weight.detach().clone()), {"momentum_buffer": torch.zeros(2**16)}
    reference = torch.optim.SGD([plain], **rule)
    for count in (1, 2):
        plain.grad = grad.clone()
        reference.step()
        with AllocatorTimeline(torch.device("cpu"), 0) as timeline:
            update([weight.data], [grad], [state], reference.param_groups[0], count)
        assert timeline.peak < grad.nbytes / 2
        pairs = (weight, plain), (state["momentum_buffer"], reference.state[plain]["momentum_buffer"])
        assert all(torch.equal(*(t.detach().view(torch.int32) for t in pair)) for pair in pairs)


@pytest.mark.parametrize("alive", [1, 6])
def test_batches_of_ever_other_lengths_take_no_more_of_the_host_than_the_longest(alive):
    """Beside what so many graphs of the shortest took, all alive at once."""
    plain, model, made = qwen3(), qwen3(), weakref.WeakSet()

    def noted(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.add(buffer := torch.zeros(numel, dtype=dtype))
        return buffer

    (batch,) = data(1)
    batches = [{name: value[:, :length] for name, value in batch.items()} for length in (2, 6, 3, 7, 4, 5, 7)]
    with streaming(model, choice=Choice(inputs="host")) as (_, own), patch.object(activations, "pinned_zeros", noted):
        graphs = [model_loss(model, batches[0]) for _ in range(alive)]
        del graphs
        assert train(model, own, batches) == train(plain, adamw(plain), batches)
        shortest, longest = (LAYERS * batch["input_ids"][:, :n].numel() * model.config.hidden_size * 4 for n in (2, 7))
        assert sum(buffer.nbytes for buffer in made) == longest + (alive - 1) * shortest
