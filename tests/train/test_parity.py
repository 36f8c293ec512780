"""All modes compute the same thing: bit for bit on the CPU in float32."""

import pytest
import torch

from t1lib.measure.timing import PhaseTimer
from t1lib.train import OptimizerSpec, ahead, build_model, make_trainer, outer_travel, travel
from t1lib.train.spec import Schedule

STEPS = 5
SMALL = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 5, "vocab_size": 97}
SHAPES = {
    "qwen3": ("tiny", {**SMALL, "head_dim": 8}),
    "qwen3-untied": ("tiny", {**SMALL, "head_dim": 8, "tie_word_embeddings": False}),
    "llama": ("llama-3.2-1b", {**SMALL, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gemma2": ("gemma-2-2b", {**SMALL, "head_dim": 8, "num_attention_heads": 4, "sliding_window": 4}),
    "mistral": ("llama-3.2-1b", {
        **SMALL, "model_type": "mistral", "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 4,
    }),
}  # fmt: skip
OPTIMIZERS = {
    "sgd": OptimizerSpec("sgd", lr=0.1),
    "momentum": OptimizerSpec("sgd", lr=0.1, momentum=0.9),
    "adamw": OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1),
}


def model(kind: str, dtype: torch.dtype = torch.float32, **more):
    preset, changes = SHAPES[kind]
    return build_model(preset, dtype=dtype, **(changes | more))


def batches(count: int = STEPS, vocabulary: int = 97):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(vocabulary, (2, 11), generator=generator)} for _ in range(count)]


def run(trainer, data=None) -> tuple[list[float], dict]:
    losses = [trainer.step(batch).loss for batch in data or batches()]
    state = trainer.state_dict()
    trainer.close()
    return losses, state


def assert_same(state, other) -> None:
    assert state.keys() == other.keys()
    for name, weight in state["model"].items():
        assert torch.equal(weight, other["model"][name]), name
    for name, slots in state["optimizer"].items():
        assert slots.keys() == other["optimizer"][name].keys()
        for key, value in slots.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["optimizer"][name][key])), (name, key)


@pytest.mark.parametrize("outer", ["host", "parked", "streamed"])
def test_a_frozen_embedding_with_its_trained_head_elsewhere(outer):
    found = []
    for mode, own in (("gpu", {}), ("slide", {"outer": outer})):
        one = model("qwen3-untied")
        for name, param in one.named_parameters():
            param.requires_grad_("embed" not in name)
        found.append(run(make_trainer(one, mode, optimizer=OPTIMIZERS["adamw"], train="marked", **own)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6 if outer == "streamed" else 0)
    if outer != "streamed":
        assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("outer", ["device", "host", "parked"])
def test_sgd_with_masters_has_no_state_in_float32(outer):
    spec = OptimizerSpec("sgd", lr=0.1, master_weights=True)
    expected, state = run(make_trainer(model("qwen3"), "gpu", optimizer=spec))
    losses, other = run(make_trainer(model("qwen3"), "slide", optimizer=spec, update="device", outer=outer))
    assert losses == expected
    assert_same(state, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize("outer", ["device", "streamed"])
def test_tokens_of_any_integers(outer, dtype):
    losses = []
    for kind in (torch.int64, dtype):
        trainer = make_trainer(model("qwen3"), "slide", outer=outer)
        losses.append([trainer.step({"input_ids": b["input_ids"].to(kind)}).loss for b in batches(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("clipped", [None, 0.5], ids=["plain", "clipped"])
def test_float64_trains_in_slide_as_in_gpu(clipped):
    options = {"optimizer": OPTIMIZERS["adamw"], "max_grad_norm": clipped}
    losses, state = run(make_trainer(model("qwen3", torch.float64), "slide", **options))
    expected, other = run(make_trainer(model("qwen3", torch.float64), "gpu", **options))
    assert losses == expected
    assert_same(state, other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
@pytest.mark.parametrize("mode", ["ckpt", "slide", "fsdp"])
def test_same_bits_as_gpu(mode, kind, optimizer):
    spec = OPTIMIZERS[optimizer]
    losses, state = run(make_trainer(model(kind), "gpu", optimizer=spec))
    assert losses[-1] != losses[0]
    other_losses, other = run(make_trainer(model(kind), mode, optimizer=spec))
    assert other_losses == losses
    assert_same(state, other)


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "ckpt"},
        {"mode": "slide", "outer": "host", "inputs": "host"},
        {"mode": "slide", "update": "device"},
        {"mode": "slide", "update": "both", "resident": 1},
        {"mode": "slide", "outer": "streamed"},
    ],
    ids=str,
)
def test_a_device_need_not_be_named_as_its_tensors_name_it(options, clipped):
    """The device "cpu:0" is the CPU, though its tensors say "cpu", just as "cuda" and "cuda:0" are one device."""
    shared = {"optimizer": OPTIMIZERS["adamw"], "micro_batch": 1, "max_grad_norm": 1.0 if clipped else None}
    losses, _ = run(make_trainer(model("qwen3"), "gpu", **shared))
    other_losses, _ = run(make_trainer(model("qwen3"), device="cpu:0", **shared, **options))
    assert other_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_any_decoder(kind):
    """Slide runs the layers as the model does: masks, windows, caps and scalings stay the model's own."""
    spec = OPTIMIZERS["adamw"]
    losses, state = run(make_trainer(model(kind), "gpu", optimizer=spec))
    other_losses, other = run(make_trainer(model(kind), "slide", optimizer=spec))
    assert other_losses == losses
    assert_same(state, other)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_in": False},
        {"overlap_out": False},
        {"overlap_update": False},
        {"overlap_in": False, "overlap_out": False, "overlap_update": False, "slots": 1},
        {"slots": 3, "grad_slots": 1, "host_grads": 1},
        {"slots": 5},
        {"slots": 8, "grad_slots": 8, "host_grads": 8},
        {"keep": 2},
        {"keep": 5, "slots": 3},
        {"inputs": "host"},
        {"inputs": "host", "keep": 1, "overlap_in": False},
        {"outer": "host"},
        {"resident": 2},
        {"resident": 4, "keep": 3, "outer": "host", "inputs": "host"},
        {"resident": 5},
        {"outer": "host", "keep": 2, "overlap_update": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [{}, {"micro_batch": 1, "max_grad_norm": 1.0}], ids=["plain", "clipped"])
def test_schedule_changes_no_bits(options, shared):
    shared = {"optimizer": OPTIMIZERS["adamw"], **shared}
    losses, state = run(make_trainer(model("qwen3"), "gpu", **shared))
    other_losses, other = run(make_trainer(model("qwen3"), "slide", **shared, **options))
    assert other_losses == losses
    assert_same(state, other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_clipped_steps_of_micro_batches_change_no_bits(optimizer):
    shared = {"optimizer": OPTIMIZERS[optimizer], "micro_batch": 1, "max_grad_norm": 0.5}
    losses, state = run(make_trainer(model("qwen3-untied"), "gpu", **shared), batches(10))
    other_losses, other = run(make_trainer(model("qwen3-untied"), "slide", **shared), batches(10))
    assert other_losses == losses
    assert_same(state, other)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"update": "device", "overlap_in": False}, {"update": "device", "overlap_update": False, "slots": 3},
        {"update": "host"}, {"slots": 5, "grad_slots": 1}, {"keep": 2, "outer": "host"}, {"resident": 2},
        {"micro_batch": 1},
    ],
    ids=str,
)  # fmt: skip
def test_sgd_on_host_or_device_changes_no_bits(options):
    shared = {"optimizer": OptimizerSpec("sgd", lr=0.1, weight_decay=0.1), "schedule": Schedule("linear", total=9)}
    shared |= {"micro_batch": options.pop("micro_batch", None)}
    losses, state = run(make_trainer(model("qwen3"), "gpu", **shared))
    trainer, others = make_trainer(model("qwen3"), "slide", **shared, **options), []
    for batch in batches():
        others.append(trainer.step(batch).loss)
        trainer.evaluate(batch)
    assert others == losses
    assert_same(state, trainer.state_dict())
    on_host = options.get("update") == "host"
    assert bool(trainer.pipeline.update_bytes()) == on_host


TRAVELLERS = {
    "momentum": (OPTIMIZERS["momentum"], torch.float32),
    "adamw": (OPTIMIZERS["adamw"], torch.float32),
    "masters": (OptimizerSpec("adamw", lr=1e-2, master_weights=True), torch.bfloat16),
    "split": (OptimizerSpec("adamw", lr=1e-2, master_weights=True, split_master=True), torch.bfloat16),
    "narrow": (
        OptimizerSpec("adamw", lr=1e-2, master_weights=True, moments="bfloat16", split_master=True), torch.bfloat16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("shared", [{}, {"micro_batch": 1, "max_grad_norm": 0.5}], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    "options",
    [
        {"update": "device"},
        {"update": "both", "slots": 5},
        {"update": "device", "resident": 2, "outer": "host"},
        {"update": "device", "slots": 3},
        {"update": "device", "slots": 1, "overlap_in": False},
        {"update": "device", "slots": 3, "outer": "parked"},
        {"update": "both", "host_share": 0.5, "outer": "host", "inputs": "host", "overlap_update": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", TRAVELLERS)
def test_state_that_travels_changes_no_bits(kind, options, shared, monkeypatch):
    """However state is cut into pieces; the last is shorter. Two exceptions: 16-bit moments are rounded with noise,
    piece by piece; with update "both", ties round to even in whole masters (on the host), in split ones away from 0."""
    monkeypatch.setattr(travel, "PIECE", 1000)
    spec, dtype = TRAVELLERS[kind]
    shared = {"optimizer": spec, "schedule": Schedule("linear", total=9), **shared}
    losses, state = run(make_trainer(model("qwen3", dtype), "gpu", **shared))
    trainer, others = make_trainer(model("qwen3", dtype), "slide", **shared, **options), []
    for batch in batches():
        others.append(trainer.step(batch).loss)
        trainer.evaluate(batch)
    assert bool(trainer.pipeline.update_bytes()) == (options["update"] == "both")
    assert trainer.pipeline.travel.bytes_a_step() > 0
    if kind == "narrow" or (kind == "split" and options["update"] == "both"):
        assert others == pytest.approx(losses, rel=1e-3)
        return
    assert others == losses
    assert_same(state, trainer.state_dict())


def test_the_host_keeps_masters_whole_beside_the_device():
    spec, dtype = TRAVELLERS["split"]
    for update, expected in (("both", "LWLWL"), ("host", "LLLLL"), ("device", "LLLLL")):
        trainer = make_trainer(model("qwen3", dtype), "slide", optimizer=spec, update=update, host_share=0.5)
        assert "".join("W" if "master" in trainer.pipeline.flat_state(i) else "L" for i in range(5)) == expected
        trainer.close()


def test_weights_that_were_updated_on_the_device_are_not_sent_again():
    trainer = make_trainer(model("qwen3"), "slide", optimizer=OPTIMIZERS["sgd"])
    fetched, fetch = [], trainer.pipeline.fetch
    trainer.pipeline.fetch = lambda index, *rest: (fetched.append(index), fetch(index, *rest))
    for expected in ([0, 1, 2, 3, 4, 2, 1, 0], [2, 3, 4, 2, 1, 0]):
        trainer.step(batches(1)[0])
        assert fetched == expected
        fetched.clear()


@pytest.mark.parametrize("options", [{}, {"resident": 2}], ids=["streamed", "resident"])
def test_clipped_weights_come_of_their_update_on_the_device(options):
    """They do not come from the host, unless a resident layer leaves time to update another one ahead of its turn."""
    common = {"optimizer": OPTIMIZERS["adamw"], "update": "device", "max_grad_norm": 0.5, "host_grads": 1}
    trainer = make_trainer(model("qwen3"), "slide", **common, **options)
    trainer.step(batches(1)[0])
    came, copy_in = [], trainer.pipeline._copy_in
    trainer.pipeline._copy_in = lambda index, phase, *rest: (came.append((phase, index)), copy_in(index, phase, *rest))
    trainer.step(batches(1)[0])
    first = options.get("resident", 0)
    assert [i for phase, i in came if phase == "weights"] == ([4] if first else [])
    assert [i for phase, i in came if phase == "weights again"] == list(reversed(range(first, 3)))


def test_outer_state_travels_a_share_beside_each_layer(monkeypatch):
    monkeypatch.setattr(travel, "PIECE", 25)
    trainer = make_trainer(model("qwen3"), "slide", optimizer=OPTIMIZERS["adamw"], update="device", outer="host")
    trainer.step(batches(1)[0])
    layers, pieces = len(trainer.parts.layers), [-(-97 * 32 // 25), -(-32 // 25)]  # embedding and norm
    seen, compute, bring = [], trainer._compute, trainer.pipeline.travel._bring

    def watched(index, few, *rest):
        seen.append(("." if index >= layers else "x") * len(few))
        return bring(index, few, *rest)

    trainer._compute = lambda index, *rest: (seen.append("|"), compute(index, *rest))[1]
    trainer.pipeline.travel._bring = watched
    trainer.evaluate(batches(1)[0])
    shares = "".join(seen).split("|")[1:]
    assert "".join(shares) == "." * sum(pieces)  # and no state of the layers
    assert max(map(len, shares)) - min(map(len, shares[:-1])) <= 1  # as even as possible
    assert not shares[-1]  # none is left for the head


def test_outer_state_travels_in_pieces_that_fit_beside_layers_smaller_than_it():
    few = {"vocab_size": 4000, "num_hidden_layers": 2}
    data = batches(3, vocabulary=4000)
    losses, state = run(make_trainer(model("qwen3", **few), "gpu", optimizer=OPTIMIZERS["adamw"]), data)
    options = {"outer": "host", "update": "device"}
    trainer = make_trainer(model("qwen3", **few), "slide", optimizer=OPTIMIZERS["adamw"], **options)
    assert trainer.parts.embed.weight.numel() > 3 * trainer.pipeline.layout.numel
    others, found = run(trainer, data)
    assert others == losses
    assert_same(state, found)


@pytest.mark.parametrize("announced", ["nothing", "what comes", "another", "what does not fit"])
@pytest.mark.parametrize("update, outer", [("host", "host"), ("device", "host"), ("device", "parked")])
@pytest.mark.parametrize("kind", ["qwen3-untied", "gemma2"])
def test_outer_state_on_the_host_changes_no_bits(kind, update, outer, announced, monkeypatch):
    """Whatever is announced as the next step's batch."""
    monkeypatch.setattr(ahead, "ROWS", 4)
    losses, state = run(make_trainer(model(kind), "gpu", optimizer=OPTIMIZERS["adamw"]))
    options = {"outer": outer, "update": update}
    trainer, others = make_trainer(model(kind), "slide", optimizer=OPTIMIZERS["adamw"], **options), []
    assert isinstance(trainer._outer, outer_travel.TravellingOuter) == (update == "device")
    assert bool(getattr(trainer._outer, "_spare", {})) == (outer == "parked")  # without masters
    data = batches()
    said = {"what comes": data[1:] + data[:1], "another": data, "what does not fit": [{"input_ids": 7}] * len(data)}
    for k, batch in enumerate(data):
        others.append(trainer.step(batch, upcoming=said[announced][k] if announced in said else None).loss)
        if k % 2:
            trainer.evaluate(batch)  # must find the updated weights
    assert others == losses
    assert_same(state, trainer.state_dict())


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_rows_of_a_batch_that_was_announced_are_there_when_it_comes(micro_batch, monkeypatch):
    monkeypatch.setattr(ahead, "ROWS", 97)
    options = {"update": "device", "outer": "host", "micro_batch": micro_batch}
    trainer = make_trainer(model("qwen3"), "slide", optimizer=OPTIMIZERS["adamw"], **options)
    filled, fill = [], ahead._Gathered.fill
    monkeypatch.setattr(ahead._Gathered, "fill", lambda *a: (filled.append(a[1]), fill(*a)))
    one, other = batches(2)
    trainer.step(one, upcoming=other)
    trainer._outer.begin()  # waits for the gathering thread
    looked_up = [torch.unique(ids) for ids in other["input_ids"].split(micro_batch or 97)]
    assert all(map(torch.equal, filled, looked_up)) and len(filled) == len(looked_up)
    trainer.step(other)
    assert len(filled) == len(looked_up)
    trainer.step(one)  # was not announced
    assert len(filled) == 2 * len(looked_up)
    trainer.close()


def test_rows_that_were_announced_and_did_not_come_are_forgotten(monkeypatch):
    """When they do come, in a later step, what was gathered for them predates an update."""
    monkeypatch.setattr(ahead, "ROWS", 4)
    one, other = batches(2)
    few = {"input_ids": one["input_ids"][:, :3]}
    data, said = [one, few, other], [other, None, None]
    losses, state = run(make_trainer(model("qwen3"), "gpu", optimizer=OPTIMIZERS["adamw"]), data)
    trainer = make_trainer(model("qwen3"), "slide", optimizer=OPTIMIZERS["adamw"], outer="host", update="device")
    assert [trainer.step(*pair).loss for pair in zip(data, said, strict=True)] == losses
    assert_same(state, trainer.state_dict())
    trainer.close()


def test_weights_that_a_master_holds_are_away_during_the_backward(monkeypatch):
    """The update brings them back; after a skipped or aborted step, they are restored from the masters."""
    spec = OptimizerSpec("adamw", lr=1e-2, master_weights=True)
    shared = {"optimizer": spec, "nonfinite": "skip"}
    plain = make_trainer(model("qwen3", torch.bfloat16), "gpu", **shared)
    slide = make_trainer(model("qwen3", torch.bfloat16), "slide", outer="host", update="device", **shared)
    weight, norm, backward = slide.parts.embed.weight, slide.parts.norm.weight, slide._layer_backward

    def seen(*args):
        assert weight.untyped_storage().nbytes() == 0
        return backward(*args)

    monkeypatch.setattr(slide, "_layer_backward", seen)
    one, other = batches(2)
    assert slide.step(one).loss == plain.step(one).loss
    assert slide.evaluate(other) == plain.evaluate(other)
    kept = norm.detach().clone()
    for trainer in (plain, slide):
        with torch.no_grad():
            trainer.parts.norm.weight[0] = torch.inf
        assert trainer.step(other).skipped
        with torch.no_grad():
            trainer.parts.norm.weight.copy_(kept)
    assert slide.evaluate(other) == plain.evaluate(other)
    monkeypatch.setattr(slide, "_layer_backward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        slide.step(one)
    monkeypatch.setattr(slide, "_layer_backward", seen)
    assert slide.evaluate(other) == plain.evaluate(other)
    assert slide.step(one).loss == plain.step(one).loss
    assert_same(plain.state_dict(), slide.state_dict())


@pytest.mark.parametrize("options", [{}, {"embedding": "device"}], ids=["host", "device"])
def test_reports_setting(options):
    """Only decoder layers train, with a mean-square loss: it falls, and nothing outside the layers changes."""
    setting = {"optimizer": OptimizerSpec("sgd", lr=5.0), "loss": "mean_square", "train": "layers"}
    losses, state = run(make_trainer(model("qwen3"), "gpu", **setting))
    other_losses, other = run(make_trainer(model("qwen3"), "slide", **setting, **options))
    assert losses == other_losses and losses[-1] < losses[0]
    assert_same(state, other)
    assert torch.equal(state["model"]["model.embed_tokens.weight"], model("qwen3").model.embed_tokens.weight)


@pytest.mark.parametrize("head", ["full", "chunked"])
@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_loss_is_the_models_own(mode, head):
    """The first loss, and its gradient, are those of the Hugging Face model called as its users call it."""
    plain, batch = model("gemma2"), batches(1)[0]
    expected = plain(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    expected.backward()
    trainer = make_trainer(model("gemma2"), mode, head=head, optimizer=OptimizerSpec("sgd", lr=1.0))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    assert trainer.step(batch).loss == pytest.approx(expected.item(), rel=1e-6)
    after = trainer.state_dict()["model"]
    for name, param in plain.named_parameters():
        torch.testing.assert_close(before[name] - after[name], param.grad, rtol=2e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_master_weights(mode):
    """bf16 parameters are the rounded copies of float32 masters, which accumulate updates smaller than a bf16 step."""
    spec = OptimizerSpec("adamw", lr=1e-5, master_weights=True)
    trainer = make_trainer(model("qwen3", torch.bfloat16), mode, optimizer=spec)
    _, state = run(trainer)
    for name, slots in state["optimizer"].items():
        assert slots["master"].dtype == slots["exp_avg"].dtype == torch.float32
        assert torch.equal(slots["master"].bfloat16(), state["model"][name])
    start = model("qwen3").state_dict()
    assert any(not torch.equal(slots["master"], start[name]) for name, slots in state["optimizer"].items())
    if mode == "slide":
        _, other = run(make_trainer(model("qwen3", torch.bfloat16), "gpu", optimizer=spec))
        assert_same(other, state)


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_sgd_in_16_bits_is_the_rounded_update(mode):
    """Every weight becomes round(w − lr g): PyTorch's fused SGD leaves 16-bit CPU tensors unchanged."""
    lr = 0.125  # a power of two, so it adds no rounding
    trainer = make_trainer(model("qwen3", torch.bfloat16), mode, optimizer=OptimizerSpec("sgd", lr=lr))
    plain, batch = model("qwen3", torch.bfloat16), batches(1)[0]
    trainer.step(batch)
    after = trainer.state_dict()["model"]
    reference = make_trainer(plain, "gpu")
    reference._backward(reference._pieces(batch), PhaseTimer(reference.device))
    for name, param in plain.named_parameters():
        expected = (param.detach().float() - lr * param.grad.float()).bfloat16()
        torch.testing.assert_close(after[name], expected, rtol=2**-8, atol=0, msg=name)
        assert param.dim() == 1 or not torch.equal(after[name], param), name


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_compiled_layers(kind):
    """Gemma-2 has two kinds of layers. Compiled layers sum in another order."""
    spec, data = OptimizerSpec("sgd", lr=0.1), batches(2)
    losses, state = run(make_trainer(model(kind), "gpu", optimizer=spec), data)
    for mode, own in (("gpu", {}), ("ckpt", {}), ("slide", {}), ("slide", {"keep": 3, "slots": 3})):
        others, other = run(make_trainer(model(kind), mode, optimizer=spec, compile_layers=True, **own), data)
        assert others == pytest.approx(losses, rel=1e-5)
        for name, weight in state["model"].items():
            torch.testing.assert_close(other["model"][name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("first, second", [("slide", "slide"), ("gpu", "slide"), ("slide", "gpu")])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_resume_equals_unbroken(first, second, optimizer, tmp_path):
    spec, data = OPTIMIZERS[optimizer], batches()
    losses, state = run(make_trainer(model("qwen3"), "slide", optimizer=spec), data)
    begun, saved = run(make_trainer(model("qwen3"), first, optimizer=spec), data[:2])
    torch.save(saved, tmp_path / "checkpoint.pt")
    preset, changes = SHAPES["qwen3"]
    other = build_model(preset, dtype=torch.float32, seed=9, **changes)
    resumed = make_trainer(other, second, optimizer=spec)
    resumed.step(data[4])  # state that the checkpoint must overwrite
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    rest, final = run(resumed, data[2:])
    assert begun + rest == losses
    assert_same(state, final)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "gemma2"])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.1, "micro_batch": 1}, {"resident": 2, "keep": 1, "inputs": "host"}], ids=str
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_streamed_output_layer_agrees(optimizer, options, kind, monkeypatch):
    """Its softmax is assembled from pieces, so the bits differ."""
    monkeypatch.setattr("t1lib.train.vocabulary.PIECE_BYTES", 32 * 4 * 40)  # 40 rows of 97
    shared = {k: v for k, v in options.items() if k in ("max_grad_norm", "micro_batch")}
    spec = OPTIMIZERS[optimizer]
    losses, state = run(make_trainer(model(kind), "gpu", optimizer=spec, **shared))
    slide = make_trainer(model(kind), "slide", optimizer=spec, outer="streamed", head="chunked", **options)
    streamed, other = run(slide)
    assert streamed == pytest.approx(losses, rel=1e-5)
    for name, weight in state["model"].items():
        assert torch.allclose(weight, other["model"][name], rtol=1e-3, atol=1e-4), name


def test_a_streamed_output_layer_evaluates_freezes_and_resumes():
    spec, data = OPTIMIZERS["adamw"], batches()
    plain = make_trainer(model("qwen3"), "gpu", optimizer=spec, train="layers")
    frozen = make_trainer(model("qwen3"), "slide", optimizer=spec, train="layers", outer="streamed")
    assert [frozen.step(b).loss for b in data] == pytest.approx([plain.step(b).loss for b in data], rel=1e-5)
    assert frozen.evaluate(data[0]) == pytest.approx(plain.evaluate(data[0]), rel=1e-5)

    def streamed():
        return make_trainer(model("qwen3"), "slide", optimizer=spec, outer="streamed")

    whole, first = streamed(), streamed()
    losses = [whole.step(b).loss for b in data]
    before = [first.step(b).loss for b in data[:2]]
    value = first.evaluate(data[4])
    assert first.evaluate(data[4]) == value
    again = streamed()
    again.load_state_dict(first.state_dict())
    assert before + [again.step(b).loss for b in data[2:]] == losses
