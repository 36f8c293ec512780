"""The cost model: budgets are kept, more memory is never slower, activations are counted, slide uses the plan."""

import dataclasses
import re

import pytest
import torch
from t1lib.machine import Machine
from t1lib.train.models import layer_arguments, split
from t1lib.work import Work, saved_bytes, work_of
from torch.autograd.graph import saved_tensors_hooks

from t1lib import plan
from t1lib.errors import T1Error
from t1lib.plan.cost import Choice, choose_plan, device_bytes, host_bytes, reserved_bytes, step_ms
from t1lib.train import OptimizerSpec, build_model, make_trainer, placement

WORK = Work(
    layers=28, layer=50_000_000, outer=311_000_000, hidden=2048, itemsize=2, saved=113_000, state=12, tokens=16384,
    micro_tokens=4096, workspace=2**28, together=False, head=311_000_000,
)  # fmt: skip
ADAMW = OptimizerSpec("adamw", lr=1e-2)


def test_budgets_are_kept_and_more_memory_is_never_slower():
    times = []
    for gib in (3, 4, 6, 8, 12, 16, 24, 32, 64, 128):
        choice = choose_plan(WORK, gib * 2**30)
        assert reserved_bytes(WORK, device_bytes(WORK, choice)) <= gib * 2**30
        times.append(step_ms(WORK, choice, Machine()))
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_from_pure_streaming_to_fully_resident():
    least = choose_plan(WORK, 5 * 2**29)
    assert (least.resident, least.inputs) == (0, "host") and least.outer != "device"
    slow_link = Machine(link_in=1e7, link_out=1e7)
    most = choose_plan(WORK, 2**40, slow_link)
    assert most.resident == most.keep == WORK.layers


def test_frozen_parts_and_a_loss_without_head_take_no_room():
    """T1M1's setting: outside the layers, only the norm is on the device, and nothing has a gradient."""
    model = build_model("tiny")
    own = work_of(model, OptimizerSpec(), rows=1, seq=8, train="layers", loss="mean_square")
    assert (own.outer, own.still, own.head, own.workspace) == (0, 64, 0, 0)
    lookup = work_of(model, OptimizerSpec(), rows=1, seq=8, train="layers", loss="mean_square", embedding="device")
    assert lookup.still == 64 + 512 * 64
    full = work_of(model, OptimizerSpec(), rows=1, seq=8)
    assert (full.outer, full.still, full.head) == (64 + 512 * 64, 0, 512 * 64)
    assert device_bytes(own, Choice()) < device_bytes(lookup, Choice()) < device_bytes(full, Choice())


def test_parked_weights_leave_the_device_to_the_backward():
    work = dataclasses.replace(WORK, on_device=1.0, micro_tokens=16384)
    there, parked = Choice(outer="host"), Choice(outer="parked")
    assert device_bytes(work, there) - device_bytes(work, parked) == 2 * work.outer
    assert host_bytes(work, parked) - host_bytes(work, there) == 2 * (work.outer + 16384 * work.hidden)
    assert step_ms(work, parked, Machine()) >= step_ms(work, there, Machine())
    whole = dataclasses.replace(work, masters=True)
    assert device_bytes(whole, there) == device_bytes(work, parked)


def test_graphs_take_the_place_of_kept_activations_where_launches_take_the_time():
    few = dataclasses.replace(WORK, tokens=256, micro_tokens=256, outer=0, state=0)
    with_graphs = dataclasses.replace(few, graphed=True)
    machine = Machine(update=1e12)
    assert step_ms(with_graphs, Choice(), machine) < step_ms(few, Choice(keep=28), machine)
    assert device_bytes(with_graphs, Choice()) > device_bytes(few, Choice())


def test_gradients_with_a_place_let_computing_run_ahead_of_the_link():
    """State is transferred beside a backward that recomputes nothing; lower layers are resident and need no link."""
    travels = dataclasses.replace(WORK, on_device=1.0, micro_tokens=16384, masters=True)
    few, many = (Choice(resident=4, keep=28, grad_slots=slots) for slots in (2, 8))
    assert step_ms(travels, many, Machine()) < step_ms(travels, few, Machine())
    assert device_bytes(travels, many) - device_bytes(travels, few) == 6 * travels.layer * travels.itemsize
    assert choose_plan(travels, 60 * 2**30).grad_slots > 2
    assert choose_plan(dataclasses.replace(travels, together=True), 60 * 2**30).grad_slots == 2


def test_a_host_that_is_short_of_memory_leaves_more_on_the_device():
    free, budget = choose_plan(WORK, 16 * 2**30), 16 * 2**30
    short = host_bytes(WORK, free) - 2**30
    tight = choose_plan(WORK, budget, host=short)
    assert host_bytes(WORK, tight) <= short < host_bytes(WORK, free)
    assert step_ms(WORK, tight, Machine()) >= step_ms(WORK, free, Machine())
    for device, host in ((budget, 2**30), (3 * 2**30, short)):  # nothing fits: as little beyond as can be
        needs = [host_bytes(WORK, choose_plan(WORK, device, host=limit)) for limit in (host, 1, None)]
        assert host < needs[0] == needs[1] <= needs[2]


def test_a_budget_too_small_says_the_least_that_works():
    with pytest.raises(T1Error, match="the least that works for 16384 tokens a step, 4096 at a time, is") as raised:
        choose_plan(WORK, 2**30)
    least = int(re.search(r"is (\d+)MiB", str(raised.value))[1])
    assert choose_plan(WORK, least * 2**20) == Choice(slots=2, inputs="host", outer="streamed")


@pytest.mark.parametrize("preset", ["tiny", "gemma-2-2b"])
def test_activations_are_those_that_the_layer_saves(preset):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97, "head_dim": 16}
    model = build_model(preset, dtype=torch.float32, **small)
    parts, found = split(model), {}
    weights = {p.untyped_storage().data_ptr() for p in parts.layers[0].parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden, arguments = layer_arguments(parts, torch.randn(1, 64, 64, requires_grad=True))
    with saved_tensors_hooks(pack, lambda t: t):
        out = parts.layers[0](hidden, **arguments[0])
    assert out.requires_grad
    real = sum(t.untyped_storage().nbytes() for t in found.values()) / 64
    assert saved_bytes(model.config, torch.float32, 64) == pytest.approx(real, rel=0.1)


def test_slide_takes_the_choice_and_changes_no_bits():
    batches = [{"input_ids": torch.randint(512, (4, 9), generator=torch.Generator().manual_seed(i))} for i in range(3)]
    plain = make_trainer(build_model("tiny", dtype=torch.float32), "gpu", optimizer=ADAMW)
    planned = make_trainer(
        build_model("tiny", dtype=torch.float32), "slide", optimizer=ADAMW, gpu_memory="1GiB", plan_for=(4, 9)
    )
    work = work_of(planned.model, ADAMW, rows=4, seq=9, graph_tokens=0, cuda=False)
    assert planned.chosen == choose_plan(work, 2**30)
    assert planned.keep == 4
    assert [planned.step(b).loss for b in batches] == [plain.step(b).loss for b in batches]


@pytest.mark.parametrize(
    "options, part",
    [
        ({"gpu_memory": "1GiB"}, "plan_for"),
        ({"gpu_memory": "1GiB", "plan_for": (1, 8), "keep": 1}, "give it or them"),
        ({"gpu_memory": "1MiB", "plan_for": (1, 8)}, "the least that works"),
        ({"gpu_memory": "lots", "plan_for": (1, 8)}, "lots"),
    ],
)
def test_bad_budgets(options, part):
    with pytest.raises(T1Error, match=part):
        make_trainer(build_model("tiny", dtype=torch.float32), "slide", **options)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}, {"filter_eps": 1e-3}], ids=str)
def test_a_head_that_cannot_be_made_in_pieces_is_left_whole(options, monkeypatch):
    """A plan for a memory budget does not stream it either."""
    found = []
    monkeypatch.setattr(plan, "choose_plan", lambda work, *_: found.append(work) or Choice())
    head = {"head_options": options | {"workspace": "4MiB"}}
    make_trainer(build_model("tiny", dtype=torch.float32), "slide", gpu_memory="1GiB", plan_for=(4, 8), **head)
    assert {"streamed" in {choice.outer for choice in plan.choices(work)} for work in found} == {not options}


@pytest.mark.parametrize("options", [{"overlap_update": False}, {"train": "marked"}, {}], ids=str)
def test_a_plan_updates_layers_where_the_trainer_does(options, monkeypatch):
    monkeypatch.setattr(placement, "best_place", lambda *_: "device")
    model = build_model("tiny", dtype=torch.float32)
    counts = []
    monkeypatch.setattr(plan, "choose_plan", lambda work, *_: counts.append(work.on_device) or Choice())
    trainer = make_trainer(model, "slide", optimizer=ADAMW, gpu_memory="1GiB", plan_for=(4, 8), **options)
    assert counts == [len(trainer._on_device) / len(trainer.parts.layers)]


def test_places_for_gradients_never_cost_time_where_all_but_one_layer_stay():
    few = dataclasses.replace(WORK, layers=4, on_device=1.0, micro_tokens=16384)
    times = [step_ms(few, Choice(resident=3, grad_slots=slots), Machine()) for slots in (2, 4, 8)]
    assert times == sorted(times, reverse=True)
