"""One loop for all modes: the same bits on a CPU in float32, whatever lies where; and what a step promises."""

import math
import os
from functools import partial
from types import MethodType
from unittest.mock import patch

import pytest
import torch
from loop_cases import CLIPPED, OPTIMIZERS, assert_same, model, of_layers, ragged, run
from refusals import refused
from stream_loops import adamw, own_clip, train
from stream_models import frozen
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from t1lib.heads import linear_cross_entropy, next_token_targets
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace, Trace
from t1lib.train import MODES, make_trainer
from t1lib.train.modes import WORKSPACE, FsdpTrainer

ADAMW, SGD, MOMENTUM = (OPTIMIZERS[name] for name in ("adamw", "sgd", "momentum"))
MASTERS = OptimizerSpec("adamw", lr=1e-2)
SPLIT = OptimizerSpec("adamw", lr=1e-2, master_weights="split")
ON_CPU = [mode for mode in MODES if mode != "gpu-graph"]
OTHERS = [mode for mode in ON_CPU if mode != "gpu"]
UNTIED = partial(model, tie_word_embeddings=False)
REPORTS = partial(of_layers, tie_word_embeddings=False)
GEMMA2 = partial(model, "gemma-2-2b", num_attention_heads=4, sliding_window=4)
CASES = {  # the modes that are held against gpu, and what is trained
    "clipped": (OTHERS, model, {"optimizer": ADAMW, **CLIPPED}),
    "float64": (OTHERS, partial(model, dtype=torch.float64), {"optimizer": ADAMW, **CLIPPED}),
    "masters": (OTHERS, partial(model, dtype=torch.bfloat16), {"optimizer": MASTERS}),
    "dropout": (["ckpt", "slide"], partial(model, attention_dropout=0.5), {"optimizer": ADAMW}),
    "untied": (["fsdp", "slide"], UNTIED, {"optimizer": MOMENTUM}),
    "gemma2": (["ckpt", "slide"], GEMMA2, {"optimizer": SGD, **CLIPPED}),
    "trained head": (["ckpt"], partial(frozen, "^(?!lm_head)", UNTIED), {"optimizer": ADAMW}),
    "trained layers": (["fsdp"], REPORTS, {"optimizer": ADAMW}),
    "some trained layers": (["slide"], partial(frozen, r"^(?!model\.layers\.[24])", UNTIED), {"optimizer": ADAMW}),
    "the reports' setting": (["slide"], REPORTS, {"loss": "mean_square", "optimizer": SGD}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_gpu(name):
    """Losses, norms and state; and parameters move if they are trained."""
    modes, build, options = CASES[name]
    found = {}
    for mode in ("gpu", *modes):
        torch.manual_seed(3)
        found[mode] = run(make_trainer(build(), mode, **options))
    expected, other = found["gpu"]
    for mode in modes:
        losses, state = found[mode]
        assert losses == expected and len(set(losses)) == len(losses), mode
        assert_same(state, other)
        assert all(torch.equal(p, state["model"][n]) != p.requires_grad for n, p in build().named_parameters()), mode


def with_head(plain: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden = plain.model(input_ids=batch["input_ids"]).last_hidden_state
    return linear_cross_entropy(hidden, plain.lm_head.weight, next_token_targets(batch["labels"]), head="full")


def test_a_plain_loop_gives_the_same_bits():
    """Written with PyTorch, transformers and a head alone."""
    plain, schedule = model(), partial(LambdaLR, lr_lambda=CLIPPED["schedule"])
    expected = train(plain, adamw(plain), ragged(), loss=with_head, clip=partial(own_clip, most=0.5), schedule=schedule)
    found, state = run(make_trainer(model(), "gpu", optimizer=ADAMW, head="full", **CLIPPED))
    assert [number for record in found for number in record] == expected
    assert_same(state["model"], dict(plain.named_parameters()))


@pytest.mark.parametrize("mode", ON_CPU)
def test_micro_batches_add_up_to_the_batch(mode):
    """The mean is over all tokens that count, however many of them a micro-batch has."""
    head = "full" if mode in ("gpu", "slide") else "fused"
    options = {"optimizer": OptimizerSpec("sgd", lr=0.1), "head": head}
    whole, parts = (make_trainer(model(), mode, micro_batch=rows, **options) for rows in (None, 2))
    for batch in ragged(3):
        one, other = whole.step(batch), parts.step(batch)
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert parts.evaluate(batch) == pytest.approx(whole.evaluate(batch), rel=1e-5)
    assert_same(parts.state_dict()["model"], whole.state_dict()["model"], rtol=1e-4, atol=1e-5)


def test_a_budget_chooses_what_is_kept_where():
    """Head `fused` gets a workspace, unless it has a bound of its own. In the reports' own setting embedding and head
    stay on the host."""
    bounds: list[dict] = [{}, {"workspace": 2**20}, {"chunks": 2}]
    budget = partial(make_trainer, mode="slide", gpu_memory="256MiB", plan_for=(5, 9))
    found = [budget(model(), head_options=own).head_options for own in bounds]
    assert found == [{"workspace": WORKSPACE}, *bounds[1:]]
    options = {"optimizer": ADAMW, "head_options": {"chunks": 2}}
    trainer = budget(model(), **options)
    assert trainer.engine.choice != Choice()
    assert run(trainer)[0] == run(make_trainer(model(), "gpu", **options))[0]
    reports = make_trainer(REPORTS(), "slide", loss="mean_square", optimizer="sgd")
    unused = {reports.parts.embed.weight.data_ptr(), reports.parts.head.weight.data_ptr()}
    assert not unused & {tensor.data_ptr() for tensor in reports.device_tensors()}


WAYS = [("gpu", "slide", ADAMW), ("slide", "gpu", MOMENTUM), ("ckpt", "fsdp", ADAMW)]
WAYS += [("gpu", "slide", SPLIT), ("slide", "gpu", MASTERS), ("slide", "fsdp", MASTERS)]
WAYS += [("fsdp", "fsdp", SPLIT), ("fsdp", "slide", MASTERS)]


@pytest.mark.parametrize("first, second, spec", WAYS, ids=str)
def test_a_run_goes_on_in_another_mode(first, second, spec):
    """With whole masters, also in the layout that splits them, which rounds those halfway between two weights its own
    way."""
    narrow = spec in (MASTERS, SPLIT)
    data, clipped = ragged(4), {} if narrow else CLIPPED
    build = partial(model, dtype=torch.bfloat16 if narrow else torch.float32)
    before = {"optimizer": MASTERS if spec is SPLIT else spec, **clipped}
    losses, state = run(make_trainer(build(), "gpu", **before), data)
    begun, saved = run(make_trainer(build(), first, **before), data[:2])
    resumed = make_trainer(build(seed=4), second, optimizer=spec, **clipped)
    resumed.step(data[3])  # leaves state that must be overwritten
    resumed.load_state_dict(saved)
    shown = resumed.state_dict()
    halfway = {"rtol": 2**-7, "atol": 0.0} if spec is SPLIT else {}
    assert_same(saved["model"], shown["model"], **halfway)
    assert_same({**saved, "model": {}}, {**shown, "model": {}})
    rest, final = run(resumed, data[2:])
    if spec is not SPLIT:
        assert begun + rest == losses
        assert_same(state, final)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide"])
def test_a_gradient_that_is_no_number(mode, options):
    trainer, batch = make_trainer(model(), mode, optimizer=ADAMW, **options), ragged(1)[0]
    trainer.step(batch)
    before, weight = trainer.state_dict(), trainer.parts.norm.weight.data
    kept = weight.clone()
    weight.fill_(math.inf)  # so that gradients are no numbers
    done = "updates had begun" if mode == "slide" and not options else "nothing was updated"
    refused(lambda: trainer.step(batch), "step 2: a gradient is not finite", done)
    assert trainer.steps == 1
    if "slide" not in mode or options:
        weight.copy_(kept)
        assert_same(before, trainer.state_dict())
        assert math.isfinite(trainer.step(batch).loss)


@pytest.mark.parametrize("within", ["forward", "full_backward"])
@pytest.mark.parametrize("mode", ["ckpt", "slide"])
def test_an_aborted_step_leaves_nothing(mode, within):
    options, batches = {"optimizer": ADAMW, **CLIPPED}, ragged(3)
    trainer, plain = (make_trainer(model(), m, **options) for m in (mode, "gpu"))
    hook = getattr(trainer.parts.layers[2].mlp, f"register_{within}_hook")(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.step(batches[0])
    hook.remove()
    assert [trainer.step(batch).loss for batch in batches] == [plain.step(batch).loss for batch in batches]
    assert_same(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("within", ["forward", "full_backward", "last moment", "evaluation"])
def test_after_an_aborted_step_fsdp_does_not_go_on(within, monkeypatch):
    """It holds sums, or gathered weights, and not every version of PyTorch's can be made to forget them."""
    trainer, batch = make_trainer(model(), "fsdp", optimizer=ADAMW, **CLIPPED), ragged(1)[0]
    trainer.step(batch)
    for bad in (trainer.evaluate, trainer.step):
        refused(partial(bad, {}), "input_ids: None")  # before anything has begun
    state = trainer.state_dict()
    refused(partial(trainer.load_state_dict, state | {"optimizer": {}}), "optimizer")
    trainer.load_state_dict(state)
    if within == "last moment":
        monkeypatch.setattr("t1lib.train.modes._local", lambda _: 1 / 0)
    else:
        kind = "full_backward" if within == "full_backward" else "forward"
        getattr(trainer.parts.layers[2].mlp, f"register_{kind}_hook")(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (trainer.evaluate if within == "evaluation" else trainer.step)(batch)
    for again, given in ((trainer.step, batch), (trainer.evaluate, batch), (trainer.load_state_dict, state)):
        refused(partial(again, given), "aborted, of which FSDP2 may hold parts: make a new trainer")


@pytest.mark.parametrize("mode", ON_CPU)
def test_evaluation_drops_nothing_out(mode):
    """And leaves no weights behind, such as those that fsdp has gathered for it, when others are loaded."""
    trainer, batch = make_trainer(model(attention_dropout=0.5), mode, optimizer=ADAMW), ragged(1)[0]
    for seed in (0, 5):
        other = make_trainer(model(seed=seed), "gpu", optimizer=ADAMW)
        trainer.load_state_dict(other.state_dict())
        loss = other.step(batch).loss
        assert trainer.evaluate(batch) == trainer.evaluate(batch) == pytest.approx(loss, rel=1e-6)
    assert all(module.training for module in trainer.model.modules())


@pytest.mark.parametrize("mode", ON_CPU)
def test_a_traced_step_shows_every_layer(mode):
    """And changes nothing, no more than an evaluation."""
    (trainer, plain), batch = (make_trainer(model(), mode, optimizer=ADAMW) for _ in range(2)), ragged(1)[0]
    trainer.step(batch)
    trainer.evaluate(batch)
    trainer.trace = Trace(trainer.device)
    record, trace = trainer.step(batch), trainer.trace
    trainer.trace = NoTrace()
    trainer.drain()
    assert list(record.phases) == ["forward", "head_forward", "head_backward", "backward", "optimizer"]
    layers = {}
    for span in trace.spans():
        assert span.end >= span.start
        layers.setdefault((span.lane, span.phase), []).append(span.layer)
    every, updates = list(range(5)), ("update", "device update") if mode == "slide" else ("compute", "update")
    assert layers["compute", "forward"] == every and layers["compute", "backward"] == every[::-1]
    assert layers["compute", "head"] == [-1] and set(layers[updates]) >= set(every)
    assert layers.get(("compute", "recompute"), every[::-1]) == every[::-1]
    assert (("compute", "recompute") in layers) == (mode != "gpu")
    plain.step(batch)
    assert plain.step(batch).loss == record.loss
    assert_same(plain.state_dict(), trainer.state_dict())


def test_a_cell_that_makes_a_trainer_runs_again_in_any_mode():
    """As in a notebook, where nobody closes the first one; layers are wrapped once."""
    found = []
    for modes in (["gpu"] * 6, ["slide", "slide", "gpu", "ckpt", "ckpt", "slide"], ["ckpt"] * 5 + ["gpu"]):
        one, losses = model(), []
        for mode in modes:
            trainer = make_trainer(one, mode, optimizer=ADAMW)
            losses += [trainer.step(batch).loss for batch in ragged(2)]
        found.append(losses)
        assert "slide" in modes or type(one.model.layers[0].forward.args[1]) is MethodType
    assert found[0] == found[1] == found[2]


def test_of_two_trainers_of_a_model_the_second_is_right():
    """Whatever loss the first one had, and if it is closed later."""
    batch, losses = ragged(1)[0], []
    for first in ({"mode": "gpu"}, {"mode": "slide"}, {"mode": "gpu", "loss": "mean_square"}):
        one = REPORTS()
        earlier = make_trainer(one, **first)
        trainer = make_trainer(one, "slide" if "loss" not in first else "gpu")
        if "loss" not in first:
            earlier.close()
        losses.append(trainer.step(batch).loss)
    assert len(set(losses)) == 1


@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide"])
def test_a_closed_trainer_gives_the_model_back(mode):
    one, plain, batch = model(), model(), ragged(1)[0]
    trainer = make_trainer(one, mode, optimizer=ADAMW)
    loss = trainer.evaluate(batch)
    trainer.close()
    trainer.close()
    assert not [n for n, m in one.named_modules() if "forward" in m.__dict__]
    assert torch.equal(one(batch["input_ids"]).logits, plain(batch["input_ids"]).logits)
    refused(lambda: trainer.step(batch), "the trainer was closed")
    assert make_trainer(one, "slide").evaluate(batch) == loss


def test_each_of_several_processes_has_a_gpu_of_its_own(monkeypatch):
    """In a script that says nothing about devices; as torchrun starts it."""
    one, current = model(), [0]
    monkeypatch.setattr(FsdpTrainer, "_place", lambda self: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    gpus = {"is_available": lambda: True, "device_count": lambda: 2}
    gpus |= {"current_device": lambda: current[-1], "set_device": current.append}
    with patch.multiple(torch.cuda, **gpus), patch.dict(os.environ, WORLD_SIZE="2", LOCAL_RANK="1"):
        assert make_trainer(one, "fsdp").device == torch.device("cuda", 1)
