"""One loop for all modes: the same bits on a CPU in float32, whatever lies where; and what a step promises."""

import math

import pytest
import torch
from loop_cases import CLIPPED, OPTIMIZERS, assert_same, model, of_layers, ragged, run
from torch import nn

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy, next_token_targets
from t1lib.optimizers import OptimizerSpec
from t1lib.plan.cost import Choice
from t1lib.timing import NoTrace, Trace
from t1lib.train import MODES, make_trainer

ADAMW = OPTIMIZERS["adamw"]
ON_CPU = [mode for mode in MODES if mode != "gpu-graph"]
OTHERS = [mode for mode in ON_CPU if mode != "gpu"]


def assert_agree(build, mode: str, options: dict) -> dict:
    """Assert that `mode` has the losses, norms and state of mode gpu; return the state."""
    found, expected = (run(make_trainer(build(), m, **options)) for m in (mode, "gpu"))
    assert found[0] == expected[0] and len(set(found[0])) == len(found[0])
    assert_same(found[1], expected[1])
    return found[1]


KINDS = [("qwen3", "adamw", CLIPPED), ("qwen3-untied", "momentum", {}), ("gemma2", "sgd", CLIPPED)]
MORE = [("ckpt", KINDS[2]), ("fsdp", KINDS[1]), ("slide", KINDS[1]), ("slide", KINDS[2])]


@pytest.mark.parametrize("mode, case", [*((mode, KINDS[0]) for mode in OTHERS), *MORE], ids=str)
def test_same_bits_as_gpu(mode, case):
    kind, optimizer, options = case
    assert_agree(lambda: model(kind), mode, {"optimizer": OPTIMIZERS[optimizer], **options})


@pytest.mark.parametrize("mode", OTHERS)
def test_same_bits_in_float64_and_with_masters(mode):
    for dtype, spec in ((torch.float64, ADAMW), (torch.bfloat16, OptimizerSpec("adamw", lr=1e-2, master_weights=True))):
        assert_agree(lambda dtype=dtype: model(dtype=dtype), mode, {"optimizer": spec})


def test_a_plain_loop_gives_the_same_bits():
    """Written with PyTorch, transformers and a head alone."""
    plain, data = model(), ragged()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=ADAMW.lr, weight_decay=ADAMW.weight_decay)
    expected = []
    for step, batch in enumerate(data):
        hidden = plain.model(input_ids=batch["input_ids"]).last_hidden_state
        loss = linear_cross_entropy(hidden, plain.lm_head.weight, next_token_targets(batch["labels"]), head="full")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = ADAMW.lr * CLIPPED["schedule"](step)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), norm.item()))
    found, state = run(make_trainer(model(), "gpu", optimizer=ADAMW, head="full", **CLIPPED), data)
    assert found == expected
    assert all(torch.equal(p, state["model"][n]) for n, p in plain.named_parameters())


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
    weights, others = whole.state_dict()["model"], parts.state_dict()["model"]
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    whole.close()
    parts.close()


def test_a_budget_chooses_what_is_kept_where():
    options = {"optimizer": ADAMW, "head_options": {"chunks": 2}}
    trainer = make_trainer(model(), "slide", gpu_memory="256MiB", plan_for=(5, 9), **options)
    assert trainer.engine.choice != Choice()
    assert run(trainer)[0] == run(make_trainer(model(), "gpu", **options))[0]


@pytest.mark.parametrize(
    "first, second, optimizer",
    [("gpu", "slide", "adamw"), ("slide", "gpu", "momentum"), ("ckpt", "fsdp", "adamw")],
)
def test_a_run_goes_on_in_another_mode(first, second, optimizer):
    data, options = ragged(4), {"optimizer": OPTIMIZERS[optimizer], **CLIPPED}
    losses, state = run(make_trainer(model(), "gpu", **options), data)
    begun, saved = run(make_trainer(model(), first, **options), data[:2])
    resumed = make_trainer(model(seed=4), second, **options)
    resumed.step(data[3])  # leaves state that must be overwritten
    resumed.load_state_dict(saved)
    rest, final = run(resumed, data[2:])
    assert begun + rest == losses
    assert_same(state, final)


@pytest.mark.parametrize("first, second", [("gpu", "slide"), ("slide", "gpu"), ("slide", "fsdp")])
def test_masters_go_with_the_state_in_either_layout(first, second):
    layout = {"split_master": first == "gpu"}
    spec, data = {"name": "adamw", "lr": 1e-2, "master_weights": True}, ragged(4)
    one = make_trainer(model(dtype=torch.bfloat16), first, optimizer=OptimizerSpec(**spec))
    _, saved = run(one, data[:2])
    other = make_trainer(model(dtype=torch.bfloat16, seed=4), second, optimizer=OptimizerSpec(**spec, **layout))
    other.load_state_dict(saved)
    assert_same(saved, other.state_dict())
    assert saved["optimizer"]["model.norm.weight"]["master"].dtype == torch.float32
    other.close()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide"])
def test_a_gradient_that_is_no_number(mode, options):
    trainer, batch = make_trainer(model(), mode, optimizer=ADAMW, **options), ragged(1)[0]
    trainer.step(batch)
    before, weight = trainer.state_dict(), trainer.parts.norm.weight.data
    kept = weight.clone()
    weight.fill_(math.inf)  # so that gradients are no numbers
    done = "updates had begun" if mode == "slide" and not options else "nothing was updated"
    with pytest.raises(T1Error, match=f"step 2: a gradient is not finite .*{done}"):
        trainer.step(batch)
    assert trainer.steps == 1
    if "slide" not in mode or options:
        weight.copy_(kept)
        assert_same(before, trainer.state_dict())
        assert math.isfinite(trainer.step(batch).loss)
    trainer.close()


@pytest.mark.parametrize("mode", ON_CPU)
def test_evaluation_changes_nothing(mode):
    trainer, batch = make_trainer(model(), mode, optimizer=ADAMW), ragged(1)[0]
    trainer.step(batch)
    before, loss = trainer.state_dict(), trainer.evaluate(batch)
    assert_same(before, trainer.state_dict())
    assert trainer.step(batch).loss == pytest.approx(loss, rel=1e-6)
    trainer.close()


def test_all_modes_drop_the_same_out_and_nothing_in_evaluation():
    batch, found = ragged(1)[0], []
    loss = make_trainer(model(), "gpu", optimizer=ADAMW).evaluate(batch)
    for mode in ("gpu", "ckpt", "slide"):
        torch.manual_seed(3)
        trainer = make_trainer(model(attention_dropout=0.5), mode, optimizer=ADAMW)
        assert trainer.evaluate(batch) == trainer.evaluate(batch) == loss
        found.append(run(trainer, ragged(3))[0])
    assert found[0] == found[1] == found[2] and found[0][0][0] != loss


TRAINED = {"layers": ["layers"], "head": ["lm_head"], "some layers": ["layers.2.", "layers.4."]}


@pytest.mark.parametrize("mode, which", [("ckpt", "head"), ("fsdp", "layers"), ("slide", "some layers")])
def test_frozen_parts(mode, which):
    def frozen():
        one = model("qwen3-untied")
        for name, param in one.named_parameters():
            param.requires_grad_(any(part in name for part in TRAINED[which]))
        return one

    state = assert_agree(frozen, mode, {"optimizer": ADAMW})
    moved = {n for n, p in model("qwen3-untied").named_parameters() if not torch.equal(p, state["model"][n])}
    assert moved == {n for n, p in frozen().named_parameters() if p.requires_grad}


def test_the_reports_own_setting_leaves_embedding_and_head_on_the_host():
    options = {"loss": "mean_square", "optimizer": "sgd"}
    trainer = make_trainer(of_layers("qwen3-untied"), "slide", **options)
    unused = {trainer.parts.embed.weight.data_ptr(), trainer.parts.head.weight.data_ptr()}
    assert not unused & {tensor.data_ptr() for tensor in trainer.device_tensors()}
    trainer.close()
    assert_agree(lambda: of_layers("qwen3-untied"), "slide", options)


@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide", "fsdp"])
def test_a_traced_step_shows_every_layer(mode):
    trainer, batch = make_trainer(model(), mode, optimizer=ADAMW), ragged(1)[0]
    plain = make_trainer(model(), mode, optimizer=ADAMW)
    trainer.step(batch)
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
    trainer.close()
    plain.close()


@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide"])
def test_a_closed_trainer_gives_the_model_back(mode):
    one, batch = model(), ragged(1)[0]
    plain = model()
    trainer = make_trainer(one, mode, optimizer=ADAMW)
    loss = trainer.evaluate(batch)
    trainer.close()
    trainer.close()
    assert not [n for n, m in one.named_modules() if "forward" in m.__dict__]
    assert torch.equal(one(batch["input_ids"]).logits, plain(batch["input_ids"]).logits)
    with pytest.raises(T1Error, match="the trainer was closed"):
        trainer.step(batch)
    assert make_trainer(one, "slide").evaluate(batch) == loss
