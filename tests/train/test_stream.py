"""A streamed model under any loop, whatever of it is frozen, left out, dropped out or kept in 16 bits, and whatever a
loop looks at or changes in between, has the bits of a plain PyTorch model, in float32 on a CPU."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import stream_models
import stream_odd as odd
import torch
from stream_cases import PLACES, Masters, assert_same_weights, case, compare, masters, pieces, streaming
from stream_loops import RATES, adamw, evaluated, grouped, model_loss, own_clip, sgd, torch_clip, train, two_forwards
from stream_models import MODELS, adapted, blocks, changed, data, frozen, llama, partly_used, qwen3
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from t1lib.plan.cost import Choice
from t1lib.train.layers import Gradients
from t1lib.train.travel import Travel

OUTER = Choice(outer="host")
FROZEN = {
    "embedding": "embed", "lower layers": r"embed|\.0\.|\.1\.", "upper layers": r"\.2\.|\.3\.",
    "norms inside layers": "blocks.*norm", "all of a layer but its norms": r"blocks\.\d\.(?!norm)",
    "all but the layers": "^(?!blocks)", "all but the head": "^(?!head)",
}  # fmt: skip


def adding(late: Callable[..., Tensor], clip: Callable[..., None] | None = None) -> dict[str, Any]:
    own = {"before": partial(odd.step_again, late), "clip": clip and partial(clip, late)}
    return case(blocks, **own, zero=lambda model: None)


sizes = zip(data(6), [(4, 7), (1, 7), (4, 2), (2, 5), (1, 2), (4, 7)], strict=True)
shapes = [{name: value[:rows, :length] for name, value in batch.items()} for batch, (rows, length) in sizes]
square = [{name: value[:, :4] for name, value in batch.items()} for batch in data(padded=True)]
half_decay = partial(adamw, weight_decay=0.5)
dropping, padded = partial(blocks, dropout=0.3), data(padded=True)
CASES: dict[str, dict[str, Any]] = {
    **{kind: case(build) for kind, build in MODELS.items()},
    "groups under a schedule, clipped by PyTorch": case(llama, grouped, schedule=RATES, clip=torch_clip),
    "a schedule and hooks from before": case(qwen3, odd.hooked_optimizer),
    "a schedule that changes betas, too": case(qwen3, schedule=partial(OneCycleLR, max_lr=0.02, total_steps=11)),
    "a rate that is a tensor": case(qwen3, lambda model: adamw(model, lr=torch.tensor(0.01)), schedule=RATES),
    "maximize": case(qwen3, partial(adamw, lr=1e-3, maximize=True)),
    "nesterov": case(qwen3, partial(sgd, nesterov=True)),
    "dampening": case(qwen3, partial(sgd, dampening=0.3)),
    "no momentum": case(qwen3, partial(sgd, momentum=0.0)),
    "one micro-batch": case(blocks, **pieces(9)),
    "as many rows as tokens": case(blocks, batches=square, **pieces(2)),
    "batches of other shapes": case(MODELS["gemma3"], batches=shapes, choice=Choice(outer="host", inputs="host")),
    "sparse gradients, all on the host": case(odd.sparse, partial(sgd, momentum=0.0, weight_decay=0.0), choice=OUTER),
    "an embedding of bounded rows, all on the host": case(
        partial(changed, blocks, lambda m: setattr(m.embed, "max_norm", 5.0)), choice=OUTER
    ),
    "no tokens before others, all on the host": case(
        qwen3, before=lambda m, o, batch: m.get_input_embeddings()(batch["input_ids"][:0]), choice=OUTER
    ),
    "a head without gradients, all on the host": case(
        blocks, clip=lambda m, o: setattr(m.head.weight, "grad", None), choice=OUTER
    ),
    "positions before tokens, all on the host": case(odd.placed, choice=OUTER),
    "evaluation without dropout": case(partial(blocks, dropout=0.2), sgd, after=evaluated, clip=own_clip),
    "evaluation while gradients wait on the device": case(qwen3, clip=odd.inferred, choice=Choice(grads="device")),
    "generation, kept": case(qwen3, after=odd.generated, choice=Choice(resident=1, keep=4)),
    "inference mode": case(llama, after=lambda model: odd.inferred(model).item()),
    "gradients seen in inference mode": case(llama, clip=odd.looked_at_in_inference),
    "inference mode first, with a budget": case(llama, loss=odd.beside_inferred, gpu_memory="1GiB"),
    "moved to where it is": case(qwen3, after=lambda m: float(m.to("cpu").float().train().training)),
    # which `make_trainer` refuses; here the loss is the model's own
    "a model that scales its logits, with a budget": case(odd.GRANITE, gpu_memory="1GiB"),
    "other names of a model's parts, with a budget": case(odd.NEOX, gpu_memory="1GiB"),
    "a mask that is not cut by rows, with a budget": case(odd.masked_by_head, gpu_memory="1GiB"),
    "adapters of the output layer, with a budget": case(
        partial(adapted, dropout=0.0, base=llama, target_modules=["q_proj", "lm_head"]), gpu_memory="1GiB"
    ),
    "sparse adapters, with a budget": case(odd.with_sparse_adapters, gpu_memory="1GiB"),
    # a recomputation would attend to what the forward has left in a cache, however it comes
    # the biases' gradients are zero but for rounding
    "a cache by position, by rows": case(
        partial(frozen, "attn.bias", odd.GPT2), after=lambda m: odd.inferred(m).item(), micro_batch=1, rel=1e-5
    ),
    "a cache by position, kept": case(odd.GPT2, choice=Choice(keep=2)),
    "buffers that a forward changes, with a budget that keeps activations": case(odd.spectral, gpu_memory="1GiB"),
    "a layer that writes to an argument, kept": case(
        partial(changed, blocks, stream_models.write_masks), choice=Choice(keep=4)
    ),
    "masters, inference before the first update": masters(blocks, after=odd.inferred_once, choice=OUTER),
    "16 bits without masters": case(partial(qwen3, torch.bfloat16), sgd, master_weights=None),
    "16 bits, clipped": case(partial(qwen3, torch.bfloat16), clip=torch_clip, master_weights=None),
    **{f"frozen: {what}": case(partial(frozen, names), clip=own_clip) for what, names in FROZEN.items()},
    "frozen: a tied embedding": case(partial(frozen, "embed", qwen3)),
    # parameters without a gradient do not decay
    "without a gradient": case(partly_used, half_decay),
    "without a gradient, masters": masters(partly_used, half_decay),
    "adapters": case(partial(adapted, dropout=0.0), **pieces(None)),
    # dropout draws the same numbers again
    "adapters, dropout": case(adapted, clip=own_clip, **pieces(None)),
    "adapters, much dropout": case(partial(adapted, dropout=0.5), clip=torch_clip, **pieces(None)),
    "adapters, padded rows": case(adapted, batches=padded, **pieces(2)),
    "adapters in float32, others for reference": case(odd.two_adapters, loss=odd.beside_reference),
    "adapters in float32": case(partial(adapted, torch.bfloat16, base=llama)),
    "dropout in attention": case(partial(qwen3, attention_dropout=0.3), loss=two_forwards, **pieces(None)),
    "dropout, some rows at a time": case(dropping, **pieces(3)),
}
EVERYWHERE: dict[str, dict[str, Any]] = {  # wherever layers, state, gradients and inputs lie
    "a loss on the weights of embedding and head, computed before": case(llama, loss=odd.penalised_before),
    "masters": masters(qwen3),
    "masters, momentum": masters(blocks, sgd),
    "masters, clipped": masters(llama, clip=own_clip),
    "dropout": case(dropping, loss=two_forwards, **pieces(None)),
    "a cache by another name": case(odd.NEOX),
    # the first forward's output layer reads its weight when layers of the second have run their backward
    "two forwards": case(qwen3, loss=two_forwards, clip=own_clip),
    # one backward may add up gradients
    "two forwards, without accumulation": case(qwen3, sgd, loss=two_forwards) | {"accumulate": False},
    "layers that do not do the same every time": case(odd.moody),
    "a checkpoint around the embedding": case(qwen3, loss=odd.embedding_again),
    "gradients of inputs alone": case(qwen3, loss=odd.of_inputs_alone, clip=lambda m, o: m.t1_given.grad.norm()),
    "a weight that is frozen before the backward": case(qwen3, loss=odd.freezing),
    "sparse adapters": case(odd.with_sparse_adapters),
    "adapters of two kinds, in turns": case(
        odd.of_two_kinds, before=lambda m, o, b: m.set_adapter("default" if m.active_adapter == "other" else "other")
    ),
    # updates of which the weights, in 16 bits, see none for a while
    "weights swapped for an average": masters(qwen3, partial(adamw, lr=1e-5), after=odd.of_average),
    "weights perturbed for the gradient": masters(llama, partial(adamw, lr=1e-5), loss=odd.perturbed),
    "weights that are assigned": case(llama, after=odd.of_assigned),
    "decoding by hand": case(qwen3, after=odd.decoded_by_hand),
    "decoding by hand, by rows": case(qwen3, after=odd.decoded_by_hand, micro_batch=1, rel=1e-5),
    "modules whose forward is replaced": case(qwen3, before=odd.replace_forwards),
    "weights that are pruned": case(qwen3, before=odd.prune_once),
    "gradients clipped again and again": case(qwen3, clip=odd.clip_often),
    "a second step with the same gradients, unseen": case(
        blocks, before=lambda m, optimizer, b: optimizer.step(), zero=lambda m: None
    ),
    "gradients dropped unseen": case(blocks, loss=odd.drop_between),
    "gradients zeroed through what is held": case(
        qwen3, clip=odd.hold_once, zero=lambda m: [g.zero_() for g in m.t1_held]
    ),
    "gradients held once, while more accumulate": case(qwen3, sgd, accumulate=2, clip=odd.hold_once, zero=False),
    "weights of layers written through aliases": case(blocks, before=odd.write_layers),
    "weights of embedding and head written through aliases": case(blocks, before=odd.hold_outer, clip=odd.write_outer),
    # as a signal's handler may
    "a look at the state within a layer": case(
        blocks, before=lambda m, o, b: m.blocks[1].up.register_forward_hook(lambda *_: o.state_dict() and None)
    ),
    # gradients that come after a step count in the next one, as do those of a forward before the step
    **{f"gradients of {what} after a step": adding(odd.LATE[what]) for what in odd.LATE},
    **{
        f"gradients of {what} after a step, of a forward before it": adding(odd.LATE[what], odd.keep_late)
        for what in ("the embedding", "the head")  # not those of a layer: refused, as in plain PyTorch
    },
    **{f"changed in between: {k}": case(blocks, before=partial(odd.refused_late, v)) for k, v in odd.CHANGES.items()},
    "a parameter that is the optimizer's alone": case(
        odd.with_scale, loss=odd.scaled, clip=odd.clip_all_of_the_optimizer
    ),
    "clipped gradients to which more are added": case(qwen3, sgd, clip=own_clip, zero=lambda m: None),
    "a gradient that is kept": case(qwen3, clip=odd.keep_first),
    "a gradient that is kept, dropped by layers": case(qwen3, clip=odd.keep_first, zero=lambda m: m.model.zero_grad()),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", [*CASES, *EVERYWHERE])
def test_same_bits_as_plain_pytorch(name, monkeypatch):
    """Memory that nobody has written to holds nan."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    places = PLACES.values() if name in EVERYWHERE else [{}]
    try:
        compare(**(CASES | EVERYWHERE)[name], places=places)
    finally:
        torch.use_deterministic_algorithms(False)


SPLIT, NARROW = {"master_weights": "split"}, {"moments": "bfloat16"}


@pytest.mark.parametrize("make, layout", [(grouped, SPLIT), (sgd, SPLIT), (grouped, NARROW)])
def test_smaller_state_is_close(make, layout):
    """Split masters are rounded with ties away from zero, 16-bit moments with noise."""
    model, plain = (llama(torch.bfloat16) for _ in range(2))
    reference, moment = Masters(make(plain)), "momentum_buffer" if make is sgd else "exp_avg"
    expected = train(plain, reference, data(10))
    with streaming(model, make(model), **layout) as (streamed, own):
        assert train(streamed, own, data(10)) == pytest.approx(expected, rel=1e-2)
        state = own.state_dict()["state"]
    for index, slots in reference.state_dict()["state"].items():
        master, first, moved = slots["master"], slots[moment], 10 * 0.003 * math.sqrt(slots["master"].numel())
        assert state[index]["master"].dtype == torch.float32
        assert (state[index]["master"] - master).norm() < 0.05 * moved, index
        assert (state[index][moment].float() - first).norm() < 0.25 * first.norm(), index


def test_the_allocator_is_asked_for_expandable_segments_unless_the_environment_says_otherwise():
    for given, expected in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
    ):
        plain = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
        with patch.dict(os.environ, plain | given, clear=True), streaming(blocks()):
            assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == expected


def test_another_thread_begins_an_update_meanwhile():
    """It evaluates, and is in the middle of an update that was pending; whoever looks must not begin it once more."""
    plain, model, begun = blocks(), blocks(), threading.Event()
    train(plain, adamw(plain), data(1))

    def slowly(travel: Travel, layer: Any, *given: Any) -> Any:
        yield from by_piece(travel, layer, *given)
        if layer.index == 2 and not begun.is_set():
            begun.set()
            time.sleep(0.2)

    by_piece = Travel.by_piece
    with streaming(model) as (streamed, own), ThreadPoolExecutor(1) as pool:
        train(streamed, own, data(1))
        weight = streamed.blocks[2].up.weight
        with patch.object(Travel, "by_piece", slowly):
            evaluating = pool.submit(evaluated, streamed)
            begun.wait()
            weight.norm()
            evaluating.result()
        assert_same_weights(streamed, plain)


@contextmanager
def evaluated_beside(model: nn.Module) -> Iterator[Callable[..., None]]:
    """A function that, when it is first called, lets another thread begin an evaluation; in the end that has ended."""
    begun: list[Future] = []

    def begin(*_: Any) -> None:
        if not begun:
            begun.append(pool.submit(evaluated, model))
            time.sleep(0.2)

    with ThreadPoolExecutor(1) as pool:
        yield begin
        begun[0].result()


def test_another_thread_evaluates_while_gradients_are_looked_at():
    """It needs their room on the device, and so would bring them to the host, too."""
    plain, model, buffer = blocks(), blocks(), Gradients.buffer
    with streaming(model, choice=Choice(grads="device")) as both, evaluated_beside(model) as begin:
        for one, optimizer in (both, (plain, adamw(plain))):
            model_loss(one, data(1)[0]).backward()
            own_clip(one, optimizer)
        with patch.object(Gradients, "buffer", lambda grads: begin() or buffer(grads)):
            found = {name: param.grad for name, param in model.named_parameters()}
        for name, param in plain.named_parameters():
            assert torch.equal(found[name], param.grad), name


def test_another_thread_evaluates_while_gradients_are_clipped():
    """It brings gradients to the host, whose norms are forgotten with that; they must not be left out."""
    plain, model = blocks(), blocks()
    with streaming(model, choice=Choice(grads="device")) as (_, own), evaluated_beside(model) as begin:
        for one in (model, plain):
            model_loss(one, data(1)[0]).backward()
        seen = property(begin, lambda grads, value: None)  # nobody has seen any
        with patch.object(Gradients, "seen", seen, create=True):
            norm = own_clip(model, own)
        assert norm == torch_clip(plain, None)


@pytest.mark.parametrize("name", ["embed", "blocks.1"])
def test_a_call_that_finds_the_model_closed_runs_the_ordinary_module(name):
    plain, model = blocks(), blocks()
    with streaming(model, choice=OUTER) as (_, own):
        model.get_submodule(name).register_forward_pre_hook(lambda *_: own.close())
        assert evaluated(model) == evaluated(plain)


@pytest.mark.parametrize("name", ["embed", "blocks.1"])
def test_a_forward_that_was_wrapped_while_the_model_streamed_and_is_put_back_after_close(name):
    model = blocks()
    module = model.get_submodule(name)
    with streaming(model, choice=OUTER) as (_, own):
        before = module.forward
        module.forward = lambda *args, **kwargs: before(*args, **kwargs)
        own.close()
        module.forward = before
        assert evaluated(model) == evaluated(blocks())


def test_the_model_is_closed_while_another_thread_evaluates():
    """The layer that runs keeps the weights of its slot until it ends; the rest run as ordinary ones."""
    plain, model, within, places = blocks(), blocks(), threading.Event(), []

    def wait(module: Any, *_: Any) -> None:
        places.append(module.weight.data_ptr())
        if not within.is_set():
            within.set()
            time.sleep(0.2)
            places.append(module.weight.data_ptr())

    with streaming(model) as (_, own), ThreadPoolExecutor(1) as pool:
        model.blocks[1].up.register_forward_pre_hook(wait)
        evaluating = pool.submit(evaluated, model)
        within.wait()
        own.close()
        assert evaluating.result() == evaluated(plain)
        assert places[0] == places[1]


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
