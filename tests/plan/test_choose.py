"""The cost model: budgets are kept, more memory is never slower, activations are counted."""

import dataclasses
from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn

from t1lib.models import build_model, layer_arguments, split
from t1lib.optimizers import MASTERS, OptimizerSpec
from t1lib.plan import choose
from t1lib.plan.choose import choose_plan
from t1lib.plan.cost import Choice, choice_of, device_bytes, host_bytes, reserved_bytes, step_ms, which_stay
from t1lib.plan.rates import H200, Machine
from t1lib.plan.work import MODES, Work, in_mode, saved_by, saved_bytes, work_of
from t1lib.train import stream
from t1lib.train.placing import work_in

WORK = Work(
    layers=28, layer=50_000_000, outer=311_000_000, hidden=2048, itemsize=2, saved=113_000, state=12, tokens=16384,
    micro_tokens=16384, workspace=2**28, together=False, head=311_000_000, largest=311_000_000,
    inner=6144, attention=2 * 3072 * 2048, masters=True,
)  # fmt: skip
TOGETHER = dataclasses.replace(WORK, together=True)
FEW = dataclasses.replace(WORK, tokens=256, micro_tokens=256, graphed=True)
SPLIT = dataclasses.replace(WORK, masters=False, state=10)
LORA = dataclasses.replace(WORK, frozen=28, outer=0, aside=2**27)
DTYPES = OptimizerSpec("adamw").state_dtypes


@pytest.mark.parametrize("work", [WORK, TOGETHER, FEW, SPLIT, LORA, dataclasses.replace(TOGETHER, frozen=10)])
def test_budgets_from_the_least_on_are_kept_and_more_memory_is_never_slower(work):
    message = f"the least that works for {work.tokens} tokens per step, {work.micro_tokens} at a time, is "
    least = int(refused(lambda: choose_plan(work, 2**30), message).split(message)[1].split("MiB")[0])
    refused(lambda: choose_plan(work, (least - 1) * 2**20))
    assert choose_plan(work, least * 2**20).outer == ("host" if work.outer else "device")
    times, found = [], []
    for mib in [least, *range(least - least % 500 + 500, 8000, 500), *range(8000, 100_000, 12000)]:
        choice = choose_plan(work, mib * 2**20)
        allocated = device_bytes(work, choice)
        assert reserved_bytes(work, allocated, choice) <= mib * 2**20
        found.append(reserved_bytes(work, allocated, choice, most=True) <= mib * 2**20)
        times.append(float(step_ms(work, choice, H200)))
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert all(found[3:])  # the smallest choices may use up what little more than they need there is


def test_only_streamed_layers_run_as_graphs():
    for mode in MODES:
        graphed, eager = (in_mode(dataclasses.replace(FEW, graphed=to), mode, "full") for to in (True, False))
        assert (graphed == eager) == (mode != "slide"), mode
        choice = choice_of(mode, eager)
        assert (device_bytes(graphed, choice) > device_bytes(eager, choice)) == (mode == "slide")


def test_clipped_updates_are_shared_between_link_and_cpu():
    """In 16 GiB: layers stay on the device, and of the others the CPU updates some, as far as it is quick."""
    shares = {}
    for update in (5e9, 20e9, 80e9):
        choice = choose_plan(TOGETHER, 16 * 2**30, Machine(update=update))
        shares[update] = choice.host_share
        assert choice.resident > 0
    assert shares[5e9] == 0 and shares[5e9] <= shares[20e9] <= shares[80e9] and shares[80e9] > 0
    assert choose_plan(TOGETHER, 16 * 2**30, Machine(link=5e9)).host_share > 0


def test_frozen_layers_need_no_state_no_gradients_and_no_updates():
    for share in (0.0, 1.0):
        trained, frozen = (step_ms(w, Choice(host_share=share), Machine(update=1e9)) for w in (TOGETHER, LORA))
        assert frozen < trained
    assert host_bytes(LORA, Choice()) == 28 * LORA.layer * 2
    assert device_bytes(LORA, Choice(resident=1)) - device_bytes(LORA, Choice()) == LORA.layer * 2
    assert {choice.host_share for choice in choose.alternatives(LORA)} == {0.0}
    some = dataclasses.replace(WORK, frozen=10)
    assert host_bytes(some, Choice()) == WORK.layer * (28 * 2 + 18 * 12)


def test_the_host_holds_what_a_choice_places_there():
    """Beside streamed layers: the layers' inputs; weights and state of embedding and head."""
    inputs, outer = (host_bytes(WORK, choice) for choice in (Choice(inputs="host"), Choice(outer="host")))
    assert inputs - host_bytes(WORK, Choice()) == 28 * 16384 * 2048 * 2
    assert outer - host_bytes(WORK, Choice()) >= WORK.outer * WORK.state


def test_what_is_trained_and_what_streams_follow_from_the_parameters():
    model = build_model("tiny")
    buffers, table = sum(buffer.nbytes for buffer in model.buffers()), model.model.embed_tokens.weight
    full = work_of(model, DTYPES, rows=1, seq=8)
    assert (full.outer, full.head, full.frozen, full.aside) == (64 + 512 * 64, 512 * 64, 0, buffers)
    table.requires_grad_(False)
    own = work_of(model.model, DTYPES, rows=1, seq=8, layers=model.model.layers)  # whose loss needs no logits
    assert (own.outer, own.aside, own.head, own.workspace) == (64, buffers + table.nbytes, 0, 0)
    assert device_bytes(own, Choice()) < device_bytes(full, Choice())
    table.requires_grad_(True)
    some = {"travelling": [], "trained": {*model.parameters()} - {table}}  # a gradient, but neither updates nor state
    assert work_of(model, DTYPES, rows=1, seq=8, **some).aside == buffers + 2 * table.nbytes + 64 * (2 + 2 + 12)


def in_float32(model):
    model.model.embed_tokens.float()


def with_adapters(model, reference=False):
    model.model.layers.requires_grad_(False)
    for layer in model.model.layers:
        layer.extra = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
        if reference:
            layer.other = nn.Linear(4, 2, bias=False, dtype=torch.float32).requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "outer", "aside", "frozen"),
    [
        (in_float32, -512 * 64, 512 * 64 * (4 + 4 + 8), 0),
        (lambda model: model.model.embed_tokens.requires_grad_(False), -512 * 64, 512 * 64 * 2, 0),
        (lambda model: setattr(model.model.embed_tokens, "sparse", True), -512 * 64, 512 * 64 * (2 + 2 + 12), 0),
        (lambda model: model.register_buffer("extra", torch.zeros(100)), 0, 400, 0),
        (with_adapters, 0, 4 * 8 * (2 + 2 + 12), 4),
        (partial(with_adapters, reference=True), 0, 4 * 8 * (2 + 2 + 12) + 4 * 8 * 4, 4),
    ],
    ids=["another dtype", "frozen", "sparse", "buffer", "adapters", "reference"],
)
def test_what_neither_streams_nor_travels_stays_on_the_device(change, outer, aside, frozen):
    """That is what `stream` does, and so what its plan must count."""
    found = []
    for each in (lambda model: None, change):
        model = build_model("tiny", tie_word_embeddings=False)
        each(model)
        trained = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        _, optimizer = stream(model, trained, device="cpu", gpu_memory="1GiB")
        found.append(work_in(optimizer._engine, None, 1, 8))
        optimizer.close()
    plain, other = found
    assert (plain.outer, plain.frozen, other.frozen, other.layer) == (2 * 512 * 64, 0, frozen, plain.layer)
    assert (other.outer - plain.outer, other.aside - plain.aside) == (outer, aside)


@pytest.mark.parametrize("shape", [(96, 8, 3), (4, 8, 96)], ids=["convolution", "experts"])
def test_layers_may_be_widest_in_three_dimensions(shape):
    layer = nn.Linear(8, 8)
    layer.wide = nn.Parameter(torch.zeros(shape))
    options = {"rows": 1, "seq": 8, "layers": [layer], "hidden": 8, "saved": 0}
    assert work_of(nn.Sequential(layer), DTYPES, **options).inner == 96


def test_a_host_that_is_short_of_memory_leaves_more_on_the_device():
    free, budget = choose_plan(WORK, 16 * 2**30), 16 * 2**30
    short = host_bytes(WORK, free) - 2**30
    tight = choose_plan(WORK, budget, host=short)
    assert host_bytes(WORK, tight) <= short < host_bytes(WORK, free)
    assert step_ms(WORK, tight, H200) >= step_ms(WORK, free, H200)
    needs = [host_bytes(WORK, choose_plan(WORK, budget, host=limit)) for limit in (2**30, 1, None)]
    assert 2**30 < needs[0] == needs[1] <= needs[2]  # nothing fits: as little beyond as can be


def test_layers_that_the_cpu_updates_beside_the_device_have_whole_masters():
    shared = dataclasses.replace(SPLIT, together=True, split=True)
    some, none, every = (host_bytes(shared, Choice(host_share=share)) for share in (0.25, 0.0, 1.0))
    assert some - none == 7 * shared.layer * 2 and none == every
    model = build_model("tiny")
    kept = [work_of(model, OptimizerSpec("adamw", master_weights=m).state_dtypes, rows=1, seq=8) for m in MASTERS]
    assert [(work.masters, work.split) for work in kept] == [(True, False), (False, True)]


@pytest.mark.parametrize("tokens", [64, 1024])
@pytest.mark.parametrize("preset", ["tiny", "gemma-2-2b"])
def test_activations_are_those_that_the_layer_saves(preset, tokens):
    """Gemma's attention keeps its matrix, and its norms keep sums of their weights."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97, "head_dim": 16}
    model = build_model(preset, dtype=torch.float32, **small)
    parts = split(model)
    given, named = layer_arguments(parts, torch.randn(1, tokens, 64, requires_grad=True))
    real = saved_by(lambda: parts.layers[0](*given, **named), parts.layers[0].parameters()) / tokens
    assert saved_bytes(model.config, torch.float32, tokens) == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    ("frozen", "resident", "stay"),
    [(0, 0, ""), (0, 3, "024"), (0, 4, "0235"), (6, 2, "03"), (2, 1, "0"), (2, 4, "0124")],
)
def test_resident_layers_are_spread_and_frozen_ones_come_first(frozen, resident, stay):
    found = which_stay([False] * frozen + [True] * (6 - frozen), resident)
    assert "".join(str(index) for index, here in enumerate(found) if here) == stay
