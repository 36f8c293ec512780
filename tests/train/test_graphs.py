"""Which layers run as CUDA graphs, as far as a CPU can tell, what is left out of others, and what plans count."""

from functools import partial

import pytest
import torch
from stream_cases import in_pieces, streaming
from stream_loops import adamw, model_loss, own_clip, sgd, train
from stream_models import SHAPE, adapted, blocks, data, layers_of, llama, made, qwen3
from torch import Tensor, nn
from transformers import LlamaConfig

from t1lib.heads import patch_head, unpatch_head
from t1lib.measure.probes import AllocatorTimeline, storage_bytes
from t1lib.memory import LiveBytes
from t1lib.models import layer_arguments, split
from t1lib.plan.cost import Choice, device_bytes
from t1lib.plan.work import saved_by
from t1lib.train import activations, placing, stream
from t1lib.train.graphs import LayerGraphs


def test_layers_with_hooks_inside_or_adapters_run_without_graphs():
    """A replay would not call them, nor a replaced forward, nor follow adapters that are switched or disabled, trained
    or not. Hooks of the layer itself are called outside of it."""
    layer = nn.Sequential(nn.Linear(4, 4))
    graphs = LayerGraphs([layer], {0})
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        getattr(layer, f"register_{kind}")(lambda *_: None)
        assert graphs.allow(0)
        hook = getattr(layer[0], f"register_{kind}")(lambda *_: None)
        assert not graphs.allow(0)
        hook.remove()
    layer[0].forward = layer[0].forward
    assert not graphs.allow(0)
    assert not LayerGraphs(layers_of(adapted().requires_grad_(False)), {0}).allow(0)


@pytest.mark.parametrize("rows", [None, 3])
def test_what_graphs_would_capture_computes_the_same(rows):
    """On a CPU it runs eagerly, each time."""
    model, plain, calls = llama(), llama(), []
    if rows is not None:
        in_pieces(layers_of(plain), rows)
    with streaming(model, micro_batch=rows) as (streamed, own):
        passes = own._engine.passes
        passes._graph_tokens = 1000
        passes._graphs.run = lambda index, place, call, *inputs: calls.append(place) or call(*inputs)
        assert train(streamed, own, data(3), clip=own_clip) == train(plain, adamw(plain), data(3), clip=own_clip)
    assert len(calls) == 3 * 4 * 2 * (1 if rows is None else 2)


def test_layers_that_compute_otherwise_share_no_graph_and_what_a_capture_would_read_is_not_captured():
    different, alike = ([nn.Linear(4, 4) for _ in range(2)] for _ in range(2))
    config = object()
    for layer, window in zip(different, ("64", "32"), strict=True):
        layer.window = tuple(int(n) for n in window)  # tuples that are not the same object
    for layer in alike:
        layer.config = config
    assert [len(set(LayerGraphs(layers, set()).kinds)) for layers in (different, alike)] == [2, 1]
    graphs, calls = LayerGraphs([nn.Linear(4, 4)], {0}), []
    for _ in range(3):
        for given in (object(), torch.ones((), device="meta")):  # as a number on the CPU beside a GPU's tensors
            graphs.run(0, "place", lambda x, other: calls.append(other) or x, torch.ones(2, 4), given)
    assert len(calls) == 6 and not graphs._seen


@pytest.mark.parametrize("planned_for", [None, (2, 6)])
def test_a_budget_counts_what_adapters_save(monkeypatch, planned_for):
    """In bfloat16, adapters save their inputs once more, in float32. A patched head's plan is made within a call."""
    seen = []
    monkeypatch.setattr(placing, "choose_plan", lambda work, *rest: seen.append(work) or Choice())
    patched = lambda dtype: patch_head(adapted(dtype, base=llama), workspace="16MiB")  # noqa: E731
    for build in (llama, partial(adapted, base=llama), patched):
        model = build(torch.bfloat16)
        with streaming(model, gpu_memory="1GiB", plan_for=planned_for) as (streamed, own):
            train(streamed, own, data(2))
    plain, with_adapters, _ = (work.saved for work in seen)
    own = sum(m.lora_A["default"].in_features * 4 for m in layers_of(model)[0].modules() if hasattr(m, "lora_A"))
    assert plain + own <= with_adapters <= plain + 2.5 * own


def planned_and_held(
    monkeypatch, model: nn.Module, rows: int, length: int, early: bool = False
) -> tuple[list[int], list[int]]:
    """Bytes that the last layer saves, that its forward and backward hold (gradients of input and output apart: those
    count elsewhere), and of its largest tensor. All as planned and as measured. early: with `plan_for`"""
    seen = []
    monkeypatch.setattr(placing, "choose_plan", lambda work, *rest: seen.append(work) or Choice())
    modes = [module.training for module in model.modules()]
    with streaming(model, gpu_memory="1GiB", plan_for=(rows, length) if early else None) as (streamed, own):
        assert [module.training for module in model.modules()] == modes
        ids = torch.arange(rows * length).view(rows, length) % 61
        train(streamed.train(), own, [{"input_ids": ids, "labels": ids}])
    layer, parts = layers_of(model)[-1], split(model.get_base_model() if hasattr(model, "peft_config") else model)
    width, dtype = parts.base.config.hidden_size, next(layer.parameters()).dtype
    hidden = torch.randn(rows, length, width, dtype=dtype, requires_grad=True)
    given, named = layer_arguments(parts, hidden)
    now = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", *now, cache_enabled=False):
        saved = saved_by(partial(layer, *given, **named), layer.parameters())
        with AllocatorTimeline(hidden.device) as timeline, LiveBytes() as live:
            out = layer(*given, **named)
            out.backward(torch.zeros_like(out))
    (work,) = seen
    in_layer = rows * length * work.saved
    held = timeline.peak - 2 * hidden.nbytes
    return [in_layer, work.beside + in_layer, work.wide], [saved, held, live.largest]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.0}, {"use_dora": True}], ids=["dropout", "plain", "DoRA"])
@pytest.mark.parametrize("early", [False, True], ids=["first batch", "plan_for"])
def test_a_budget_counts_what_a_backward_with_adapters_holds(monkeypatch, options, early):
    """Beside what is saved: in bfloat16, adapters compute in float32, DoRA with copies of the weights. A model that
    comes in evaluation mode, as from `from_pretrained`, is planned for training."""
    model = adapted(torch.bfloat16, base=llama, **options).train(not early)
    planned, held = planned_and_held(monkeypatch, model, 4, 64, early)
    assert planned == pytest.approx(held, rel=0.1)


def test_a_budget_counts_rows_as_long_as_they_are(monkeypatch):
    """Attention that keeps its matrix takes memory by the square of a row's length."""
    model = adapted(torch.bfloat16, base=partial(llama, attn_implementation="eager"))
    planned, held = planned_and_held(monkeypatch, model, 32, 16)
    assert planned == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("frozen, compiled", [(0, False), (2, False), (0, True)])
def test_a_budget_under_autocast_counts_copies_of_weights_once(monkeypatch, frozen, compiled):
    """Autocast's cache would keep those that the first try makes. Frozen layers, which save less, do not count."""
    model = llama()
    layers = layers_of(model)
    layers[:frozen].requires_grad_(False)
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend="eager") if compiled else layer
    with torch.autocast("cpu", torch.bfloat16):
        planned, held = planned_and_held(monkeypatch, model, 32, 4)
    assert planned[0] == pytest.approx(held[0], rel=0.05)
    assert planned[1] == pytest.approx(held[1], rel=0.15)  # a CPU's operators have temporary tensors of their own


class LowRank(nn.Module):
    """A layer with trained low-rank weights beside frozen ones, and a buffer that it assigns. Later layers need what
    the first one returned."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.norm, self.up, self.down = first, nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(32, 2, bias=False), nn.Linear(2, 128, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, earlier: Tensor | None) -> Tensor:
        assert (earlier is None) == self.first
        self.calls = self.calls + 1
        normed = self.norm(x)
        return x + self.down(torch.tanh(self.up(normed) + self.high(self.low(normed))))


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_budget_of_own_layers_counts_what_a_trained_one_saves(monkeypatch, frozen):
    """Also for the gradient of its input, and where the first layers are frozen."""
    seen, model = [], nn.Module()
    monkeypatch.setattr(placing, "choose_plan", lambda work, *rest: seen.append(work) or Choice())
    model.blocks = nn.ModuleList(LowRank(index == 0) for index in range(4))
    model.blocks[:frozen].requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        earlier = None
        for block in model.blocks:
            x = block(x, earlier)
            earlier = x.detach() if earlier is None else earlier
        return x.mean()

    model.forward, given = run, torch.randn(4, 16, 32)
    _, own = stream(model, adamw(model), layers=model.blocks, device="cpu", gpu_memory="1GiB")
    model(given).backward()
    calls = [int(block.calls) for block in model.blocks]
    assert calls == [1] * frozen + [2] * (4 - frozen)  # forward and recomputation
    own.close()
    assert [p.requires_grad for p in model.blocks[0].parameters()] == [False] * 6 + [not frozen] * 2
    layer, hidden = model.blocks[-1], given.clone().requires_grad_()
    assert seen[0].saved * 64 == saved_by(partial(layer, hidden, hidden), layer.parameters())


class Merging(nn.Linear):
    """As some adapters' layers: their mode changes the weights."""

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        self.weight.data += 1.0 if mode else -1.0
        return self


def test_planning_leaves_weights_that_a_mode_changes():
    model = adapted(base=llama).eval()
    layer = layers_of(model)[0].mlp
    plain = layer.gate_proj
    layer.gate_proj = Merging(plain.in_features, plain.out_features, bias=False).requires_grad_(False)
    before = layer.gate_proj.weight.clone()
    with streaming(model, gpu_memory="1GiB", plan_for=(2, 6)):
        assert torch.equal(layer.gate_proj.weight, before)


def test_a_budget_counts_the_head_with_its_options(monkeypatch):
    """That of `patch_head`, unless it was undone; or of the argument `head`, of which a model that does not tell its
    output layer leaves the workspace."""
    seen, own = [], {"head": "chunked", "chunks": 1}
    monkeypatch.setattr(placing, "choose_plan", lambda work, *rest: seen.append(work.workspace) or Choice())
    wrapped = patch_head(llama(), **own)
    wrapped.forward = partial(wrapped.forward)  # stays when the patch is undone
    for model, head in [
        (llama(), None), (unpatch_head(wrapped), None), (patch_head(llama(), **own), None), (llama(), own),
        (patch_head(llama()), None), (llama(), {"tail": "fp8"}),
    ]:  # fmt: skip
        with streaming(model, gpu_memory="1GiB", plan_for=(2, 6), head=head):
            pass
    given = {"workspace": "3MiB", "weight": torch.ones(61)}
    with streaming(blocks(), gpu_memory="1GiB", head=given) as (streamed, own):
        given["workspace"] = "9MiB"  # too late
        train(streamed, own, data(1))
    assert seen.pop() == 3 * 2**20
    full, undone, patched, given, eight, in_fp8 = seen
    assert full == undone and patched == given > eight == in_fp8


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "make, options",
    [(adamw, {}), (sgd, {"update_in_backward": True}), (partial(sgd, momentum=0.0), {"update_in_backward": True})],
    ids=["clipped", "at once", "without state"],
)
def test_a_plan_counts_the_pieces_in_which_state_travels(make, options, wide):
    """Also those of an embedding and a head that are larger than a layer."""
    model = made(LlamaConfig(**SHAPE | {"vocab_size": 4000 if wide else 61}))
    with streaming(model, make(model), choice=Choice(host_share=1.0, outer="host"), **options) as (streamed, own):
        train(streamed, own, data(1))
        own.drain()
        work = placing.work_in(own._engine, None, *data(1)[0]["input_ids"].shape)
        held, planned = storage_bytes(own.device_tensors()), device_bytes(work, own._engine.choice)
        assert held <= planned <= 1.2 * held


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
