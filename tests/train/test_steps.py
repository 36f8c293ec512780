"""Micro-batches, clipping, schedules, non-finite gradients, frozen parameters, evaluation."""

import math

import pytest
import torch
from test_parity import OPTIMIZERS, assert_same, batches, model, run

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy, next_token_targets
from t1lib.train import OptimizerSpec, Schedule, make_trainer, recompute, slide_step

SPEC = OPTIMIZERS["adamw"]
EVERYTHING = {"micro_batch": 2, "max_grad_norm": 0.5, "schedule": Schedule("cosine", warmup=2, total=10, least=0.1)}


def ragged(count: int = 10) -> list[dict]:
    """Batches of five rows, each row with a different number of ignored tokens."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        ids = torch.randint(97, (5, 9), generator=generator)
        labels = ids.clone()
        for row in range(5):
            labels[row, : row * 2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "gemma2"])
@pytest.mark.parametrize("mode", ["ckpt", "slide", "fsdp"])
def test_same_bits_with_accumulation_clipping_and_schedule(mode, kind):
    if mode == "fsdp" and kind != "qwen3-untied":
        pytest.skip("a weight that is embedding and head adds up in another order: micro-batch after micro-batch")
    losses, state = run(make_trainer(model(kind), "gpu", optimizer=SPEC, **EVERYTHING), ragged())
    other_losses, other = run(make_trainer(model(kind), mode, optimizer=SPEC, **EVERYTHING), ragged())
    assert other_losses == losses
    assert_same(state, other)


@pytest.mark.parametrize("mode", ["gpu", "slide"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mean_square"])
def test_micro_batches_add_up_to_the_batch(mode, loss):
    options = {"optimizer": OptimizerSpec("sgd", lr=1.0), "loss": loss, "train": "layers"}
    whole = make_trainer(model("qwen3"), mode, **options)
    parts = make_trainer(model("qwen3"), mode, micro_batch=2, **options)
    for batch in ragged(3):
        one, other = whole.step(batch), parts.step(batch)
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    weights, others = whole.state_dict()["model"], parts.state_dict()["model"]
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_clipping_is_that_of_pytorch(mode):
    """One SGD step moves each weight by lr times the gradient that `clip_grad_norm_` leaves."""
    plain, batch = model("qwen3"), batches(1)[0]
    ids = batch["input_ids"]
    hidden = plain.base_model(ids).last_hidden_state
    linear_cross_entropy(hidden, plain.lm_head.weight, next_token_targets(ids)).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
    trainer = make_trainer(model("qwen3"), mode, optimizer=OptimizerSpec("sgd", lr=1.0), max_grad_norm=0.25)
    record = trainer.step(batch)
    assert norm > 0.25 and record.grad_norm == pytest.approx(float(norm), rel=1e-5)
    after = trainer.state_dict()["model"]
    for name, param in plain.named_parameters():
        torch.testing.assert_close(after[name], param.detach() - param.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide", "fsdp"])
def test_a_gradient_that_is_no_number_is_raised(mode, options):
    trainer = make_trainer(model("qwen3"), mode, optimizer=SPEC, **options)
    trainer.step(batches(1)[0])
    with torch.no_grad():
        trainer.parts.norm.weight[0] = math.nan
    with pytest.raises(T1Error, match="step 2: a gradient is not finite"):
        trainer.step(batches(1)[0])
    assert trainer.steps == 1


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("gpu", {}),
        ("ckpt", {}),
        ("slide", {}),
        ("fsdp", {}),
        ("slide", {"update": "device"}),
        *(("slide", {"update": place, "overlap_update": False}) for place in ("device", "both")),
    ],
    ids=str,
)
def test_a_gradient_that_is_no_number_is_skipped_and_counted(mode, options):
    trainer = make_trainer(model("qwen3"), mode, optimizer=SPEC, nonfinite="skip", **options)
    first, second = batches(2)
    trainer.step(first)
    before = trainer.state_dict()
    weight = trainer.parts.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] = math.inf
    record = trainer.step(second)
    with torch.no_grad():
        weight.copy_(kept)
    after = trainer.state_dict()
    assert record.skipped and after["skipped"] == 1 and after["step"] == 2
    assert_same(before, after)
    assert not trainer.step(second).skipped


def test_schedules():
    line = Schedule("linear", warmup=2, total=6, least=0.5)
    assert [line(s) for s in range(8)] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    cosine = Schedule("cosine", total=4)
    assert [round(cosine(s), 6) for s in range(5)] == [1.0, 0.853553, 0.5, 0.146447, 0.0]
    assert [Schedule(warmup=4)(s) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_the_learning_rate_follows_the_schedule(mode):
    """At a factor of 0 no weight changes."""
    trainer = make_trainer(model("qwen3"), mode, optimizer=SPEC, schedule=lambda step: float(step == 1))
    states = [trainer.state_dict()["model"] for batch in batches(3) if trainer.step(batch)]
    start = dict(model("qwen3").named_parameters())
    assert all(torch.equal(states[0][n], start[n]) for n in states[0])
    assert not all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert all(torch.equal(states[1][n], states[2][n]) for n in states[0])


@pytest.mark.parametrize("which", [("layers.2.", "layers.4."), ("mlp",), ("embed", "layers.0.")], ids=str)
def test_frozen_parameters(which):
    """Only what is marked trains, in all modes alike; slide sends no gradient of the rest."""

    def marked():
        found = model("qwen3")
        for name, param in found.named_parameters():
            param.requires_grad_(any(part in name for part in which))
        return found

    losses, state = run(make_trainer(marked(), "gpu", optimizer=SPEC, train="marked"))
    with pytest.raises(T1Error, match="update='device' is for layers that are trained as a whole; take 'host'"):
        make_trainer(marked(), "slide", optimizer=SPEC, train="marked", update="device")
    trainer = make_trainer(marked(), "slide", optimizer=SPEC, train="marked")
    sent = sum(s.numel() for s in trainer.pipeline.grad_layout.shapes.values())
    assert sent < trainer.pipeline.layout.numel or which[0] != "mlp"
    other_losses, other = run(trainer)
    assert other_losses == losses
    assert_same(state, other)
    start = model("qwen3").state_dict()
    for name, weight in state["model"].items():
        assert torch.equal(weight, start[name]) != any(part in name for part in which), name


@pytest.mark.parametrize("mode", ["ckpt", "slide", "fsdp"])
def test_the_output_layer_alone(mode):
    def marked():
        found = model("qwen3-untied")
        for name, param in found.named_parameters():
            param.requires_grad_("lm_head" in name)
        return found

    losses, _ = run(make_trainer(marked(), "gpu", optimizer=SPEC, train="marked"))
    assert losses[-1] < losses[0]
    assert run(make_trainer(marked(), mode, optimizer=SPEC, train="marked"))[0] == losses


@pytest.mark.parametrize("options", [{}, {"update": "device"}, {"outer": "host"}, {"outer": "parked"}], ids=str)
def test_after_a_step_that_was_given_up_the_next_is_as_if_it_had_not_been(options, monkeypatch):
    """With clipping, it has updated nothing. (The host has few gradient buffers: one not returned would hang.)"""
    clipped = {"optimizer": SPEC, "max_grad_norm": 0.5}
    trainer, first = make_trainer(model("qwen3"), "slide", **clipped, **options), batches(3)
    losses = [trainer.step(first[0]).loss]
    run_piece = trainer._piece_backward

    def failing(index, *rest):
        if index == 1:
            raise KeyboardInterrupt
        return run_piece(index, *rest)

    for _ in range(2):
        monkeypatch.setattr(trainer, "_piece_backward", failing)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(first[1])
        monkeypatch.undo()
    losses += [trainer.step(batch).loss for batch in first[1:]]
    expected, state = run(make_trainer(model("qwen3"), "gpu", **clipped), first)
    assert losses == expected
    assert_same(state, trainer.state_dict())


@pytest.mark.parametrize("mode", ["gpu", "ckpt"])
def test_evaluation_drops_nothing_out(mode):
    trainer = make_trainer(model("qwen3", attention_dropout=0.5), mode, optimizer=SPEC)
    plain = make_trainer(model("qwen3"), mode, optimizer=SPEC)
    batch = ragged(1)[0]
    assert trainer.evaluate(batch) == trainer.evaluate(batch) == plain.evaluate(batch)
    assert trainer.step(batch).loss != plain.step(batch).loss  # training does


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}], ids=str)
@pytest.mark.parametrize("mode", ["gpu", "ckpt", "slide", "fsdp"])
def test_evaluation_changes_nothing(mode, options):
    trainer = make_trainer(model("qwen3"), mode, optimizer=SPEC, **options)
    batch = ragged(1)[0]
    trainer.step(batch)
    before = trainer.state_dict()
    loss = trainer.evaluate(batch)
    assert_same(before, trainer.state_dict())
    assert trainer.step(batch).loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("first, second", [("slide", "slide"), ("gpu", "slide"), ("slide", "gpu"), ("there", "there")])
def test_resume_with_everything_on(first, second, tmp_path):
    def trainer(kind: str):
        there = {"update": "both"} if kind == "there" else {}
        return make_trainer(model("qwen3"), "slide" if there else kind, optimizer=SPEC, **EVERYTHING, **there)

    data = ragged()
    losses, state = run(make_trainer(model("qwen3"), "slide", optimizer=SPEC, **EVERYTHING), data)
    begun, saved = run(trainer(first), data[:4])
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed = trainer(second)
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    rest, final = run(resumed, data[4:])
    assert begun + rest == losses
    assert_same(state, final)


@pytest.mark.parametrize("kind, skipped", [("qwen3", "mlp.down_proj"), ("llama", "mlp.down_proj"), ("gemma2", "")])
def test_the_last_product_is_not_computed_again_where_nothing_needs_it(kind, skipped, monkeypatch):
    """Gemma 2 normalizes the result of its last product, which is therefore needed."""
    made, forward = [], recompute._Unread.forward
    monkeypatch.setattr(recompute._Unread, "forward", lambda *a: (made.append(1), forward(*a))[1])
    slide, held = make_trainer(model(kind), "slide", optimizer=OPTIMIZERS["sgd"]), []
    again = slide._recomputation.run

    def watched(*arguments):
        out = again(*arguments)
        held.append(out.untyped_storage().nbytes())
        return out

    slide._recomputation.run = watched
    slide.step(batches(1)[0])
    layers = len(slide.parts.layers)
    assert slide._recomputation._last == skipped
    assert all(held[:1]) and any(held[1:]) == (not skipped)  # what is not computed takes no memory
    assert len(made) == (layers - 1 if skipped else 0)  # the first layer was computed in full, to find out
    assert all("forward" not in vars(m) for layer in slide.parts.layers for m in layer.mlp.children())


@pytest.mark.parametrize("changed, asked", [(False, 3), (True, 5)], ids=["handed on", "changed"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_model_is_asked_once_for_what_its_layers_get_with_inputs_of_one_shape(kind, changed, asked, monkeypatch):
    """Unless it changes the embeddings first."""
    calls, arguments = [], slide_step.layer_arguments

    def noted(parts, embedded):
        calls.append(embedded.shape)
        first, own = arguments(parts, embedded)
        return first.clone() if changed else first, own

    monkeypatch.setattr(slide_step, "layer_arguments", noted)
    slide = make_trainer(model(kind), "slide", optimizer=OPTIMIZERS["sgd"])
    plain = make_trainer(model(kind), "gpu", optimizer=OPTIMIZERS["sgd"])
    whole = batches(1)[0]
    for batch in (whole, whole, {"input_ids": whole["input_ids"][:, :-1]}, whole, whole):
        assert slide.step(batch).loss == plain.step(batch).loss
    assert len(calls) == asked
