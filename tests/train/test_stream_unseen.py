"""What usual loops on a CPU do not meet: gradients and methods that a loop sets itself, graphs, budgets of adapters."""

import gc
import weakref
from functools import partial

import pytest
import torch
from stream_cases import compare, in_pieces, refused, streaming, weights
from stream_loops import adamw, loop, own_clip, sgd, train
from stream_models import VOCABULARY, adapted, adapters_of, blocks, data, layers_of, llama, qwen3
from torch import nn

from t1lib.heads import patch_head
from t1lib.plan.cost import Choice
from t1lib.train import placing, stream
from t1lib.train.graphs import LayerGraphs
from t1lib.train.layers import HostLayer, Layout

FEW = data(4)
OUTSIDE = Choice(outer="host")


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}], ids=["", "at once"])
def test_matrices_before_the_layers_are_there_for_their_backward(options):
    """The gradient of a narrow embedding is made of the projections' weights, after the backward of all layers."""

    def projected() -> nn.Module:
        model = blocks()
        model.embed = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
        return model

    compare(projected, loop=loop(batches=FEW), choice=OUTSIDE, **options)
    compare(projected, sgd, loop(batches=FEW, accumulate=1 if options else 2), choice=OUTSIDE, **options)


def test_gradients_from_before_are_added_to():
    def begun() -> nn.Module:
        model = qwen3()
        model(**FEW[0]).loss.backward()
        return model

    compare(begun, loop=loop(batches=FEW))
    compare(begun, loop=loop(batches=FEW), choice=Choice(resident=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_written_between_backward_and_step(dtype):
    """The update starts from them, as without streaming: also where a master stands behind them."""

    def run(model, optimizer):
        for batch in data(2):
            model(**batch).loss.backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.abs().max().item() for name, value in weights(model).items()}

    model, plain = blocks().to(dtype), blocks().to(dtype)
    with streaming(model, adamw(model, lr=1e-3)) as (streamed, own):
        found = run(streamed, own)
    assert found == pytest.approx(run(plain, adamw(plain, lr=1e-3)), rel=1e-2)


def test_gradients_that_an_update_still_reads_are_not_taken_for_somebodys():
    """`zero_grad` right after `step` waits for no update, and makes no new buffer."""
    with streaming(blocks(), choice=Choice(host_share=1.0)) as (streamed, own):
        train(streamed, own, data(2))
        layer = own._engine.host[0]
        buffer, read = layer.grads, layer.grads[:4]
        own.zero_grad()
        assert layer.grads is buffer and read.data_ptr() == buffer.data_ptr()


def test_what_is_refused_while_a_model_streams():
    model = qwen3()
    layers_of(model)[0].requires_grad_(False)
    with streaming(model, torch.optim.AdamW(model.parameters())) as (streamed, own):
        train(streamed, own, FEW[:1])
        layers_of(model)[0].requires_grad_(True)
        refused(lambda: train(streamed, own, FEW[1:]), "layer 0", "unfrozen")
    model = qwen3()
    with streaming(model, sgd(model), update_in_backward=True) as (streamed, own):
        train(streamed, own, FEW[:1])
        param = next(layers_of(model)[0].parameters())
        refused(lambda: setattr(param, "grad", torch.zeros_like(param)), "update_in_backward")
        param.grad = None


def test_closing_gives_back_methods_and_buffers():
    model = qwen3()
    modules = [*layers_of(model), model.model.embed_tokens]
    for module in modules:
        module.forward = module.forward  # in the module's own dictionary
    before = [vars(module)["forward"] for module in modules]
    streamed, own = stream(model, adamw(model), choice=Choice(resident=1, outer="host"))
    train(streamed, own, FEW[:2])
    buffers = [weakref.ref(tensor) for tensor in own._engine.schedule.device_tensors()]
    own.close()
    gc.collect()
    assert [vars(module)["forward"] for module in modules] == before
    assert buffers and not any(buffer() is not None for buffer in buffers)


# -- graphs ------------------------------------------------------------------------------------------------------------


def held_of(module: nn.Module) -> HostLayer:
    params = dict(module.named_parameters())
    groups, counts = dict.fromkeys(map(id, params.values()), 0), dict.fromkeys(params.values(), 0)
    return HostLayer(module, 0, Layout(params), torch.device("cpu"), groups, counts)


def test_an_update_covers_no_parameter_between_two_others():
    held = held_of(nn.Sequential(*(nn.Linear(size, size, bias=False) for size in (16, 4, 16))))
    held._device, held.absent = torch.device("cuda"), {"1.weight"}
    inside = held.layout.span("1.weight")
    assert all(span.at.stop <= inside.start or span.at.start >= inside.stop for span in held.spans([{}]))
    assert not held.whole
    held.absent = set()
    assert held.whole


def test_gradients_of_replayed_layers_are_those_of_eager_ones():
    """A replay calls no hooks that tell which parameters were reached: it is all of them, or graphs are given up."""
    module = nn.Linear(4, 4)
    held, graphs = held_of(module), LayerGraphs([module], {0})
    graphs.note_gradients(held, replayed=True)
    assert held.reached == {"weight", "bias"} and graphs.allow(0)
    held.reached = {"weight"}
    graphs.note_gradients(held, replayed=False)
    assert held.reached == {"weight"} and not graphs.allow(0)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_layers_with_hooks_inside_run_without_graphs(kind):
    """A replay would not call them. Hooks of the layer itself are called outside of it."""
    register = f"register_{kind}"
    layer = nn.Sequential(nn.Linear(4, 4))
    graphs = LayerGraphs([layer], {0})
    getattr(layer, register)(lambda *_: None)
    assert graphs.allow(0)
    hook = getattr(layer[0], register)(lambda *_: None)
    assert not graphs.allow(0)
    hook.remove()
    assert graphs.allow(0)


@pytest.mark.parametrize("rows", [None, 3])
def test_what_graphs_would_capture_computes_the_same(rows):
    """On a CPU it runs eagerly, each time."""
    model, plain, calls = llama(), llama(), []
    if rows is not None:
        in_pieces(layers_of(plain), rows)
    with streaming(model, micro_batch=rows) as (streamed, own):
        passes = own._engine.passes
        passes._graphs = LayerGraphs(passes.stack, passes.for_graphs)
        passes._graphs.run = lambda index, place, call, *inputs: calls.append(place) or call(*inputs)
        assert train(streamed, own, data(3), clip=own_clip) == train(plain, adamw(plain), data(3), clip=own_clip)
    assert len(calls) == 3 * 4 * 2 * (1 if rows is None else 2)


def test_a_hook_that_comes_later_sees_what_its_module_computes():
    """Also in the recomputation, which leaves out a layer's last product if nobody looks at it."""
    model, seen = llama(), []
    with streaming(model) as (streamed, own):
        train(streamed, own, data(1))
        layer = layers_of(model)[1]
        layer.mlp.down_proj.register_forward_hook(lambda module, given, out: seen.append(out.detach().clone()))
        train(streamed, own, data(1))
    assert len(seen) == 2 and torch.equal(*seen)


def test_layers_that_compute_otherwise_share_no_graph():
    different, alike = ([nn.Linear(4, 4) for _ in range(2)] for _ in range(2))
    config = object()
    for layer, window in zip(different, ("64", "32"), strict=True):
        layer.window = tuple(int(n) for n in window)  # tuples that are not the same object
    for layer in alike:
        layer.config = config
    assert [len(set(LayerGraphs(layers, set()).kinds)) for layers in (different, alike)] == [2, 1]


def test_calls_with_unknown_objects_are_not_captured():
    graphs, calls = LayerGraphs([nn.Linear(4, 4)], {0}), []
    for _ in range(3):
        graphs.run(0, "place", lambda x, cache: calls.append(cache) or x, torch.ones(2, 4), object())
    assert len(calls) == 3 and not graphs._seen


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_layers_with_adapters_run_without_graphs():
    """A graph would read one layer's adapters for all."""
    with streaming(adapted(dropout=0.0)) as (streamed, own):
        train(streamed, own, data(1))
        assert not own._engine.passes.for_graphs


@pytest.mark.parametrize("planned_for", [None, (2, 6)])
def test_a_budget_counts_what_adapters_save(monkeypatch, planned_for):
    """In bfloat16, adapters save their inputs once more, in float32."""
    seen = []
    monkeypatch.setattr(placing, "choose_plan", lambda work, *rest: seen.append(work) or Choice())
    for build in (llama, partial(adapted, base=llama)):
        model = build(torch.bfloat16)
        with streaming(model, gpu_memory="1GiB", plan_for=planned_for) as (streamed, own):
            train(streamed, own, data(2))
    plain, with_adapters = (work.saved for work in seen)
    own = sum(m.lora_A["default"].in_features * 4 for m in adapters_of(model)[0].modules() if hasattr(m, "lora_A"))
    assert plain + own <= with_adapters <= plain + 2.5 * own


def test_a_budget_for_adapters_under_a_patched_head():
    """It is planned within a call, in which a stand-in takes the output layer's place."""
    model = adapted(torch.bfloat16, base=llama)
    patch_head(model, workspace="16MiB")
    with streaming(model, gpu_memory="1GiB") as (streamed, own):
        train(streamed, own, data(2))
