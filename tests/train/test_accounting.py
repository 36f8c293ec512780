"""What mode `slide` reports about itself: bytes over the link, bytes that updates move, bytes on the host."""

import pytest
import torch
from test_parity import batches, model

from t1lib.measure.memory import storage_bytes
from t1lib.plan.cost import Choice, host_bytes
from t1lib.plan.work import work_of
from t1lib.train import OptimizerSpec, build_model, make_trainer
from t1lib.train.streams import ALIGN

MASTERS = OptimizerSpec("adamw", master_weights=True)
NARROW = OptimizerSpec("adamw", master_weights=True, split_master=True, moments="bfloat16")


def layer_numbers(whole, align: int = 1) -> int:
    return sum(-(-p.numel() // align) * align for p in whole.model.layers[0].parameters())


@pytest.mark.parametrize(
    ("options", "forward", "backward", "out"),
    [
        # in units of a layer's weights: in before the backward, in during it, and out; a layer's state is six units
        ({"update": "host", "slots": 2}, 6, 4, 6),
        ({"update": "host", "slots": 3}, 6, 3, 6),
        ({"update": "host", "slots": 2, "resident": 1}, 5, 3, 5),
        ({"update": "device", "slots": 2}, 4, 4 + 36, 6 + 36),
        ({"update": "device", "slots": 3}, 3, 3 + 36, 6 + 36),
    ],
    ids=str,
)
def test_bytes_over_the_link(options, forward, backward, out):
    whole = model("qwen3", torch.bfloat16, num_hidden_layers=6)
    weights = 2 * layer_numbers(whole, ALIGN)
    trainer = make_trainer(whole, "slide", optimizer=MASTERS, **options)
    trainer.step(batches(1)[0])
    assert trainer.pipeline.link_bytes() == (forward * weights, backward * weights, out * weights)
    trainer.close()


@pytest.mark.parametrize(("spec", "each"), [(MASTERS, 28), (NARROW, 18), (OptimizerSpec("sgd"), 6)], ids=str)
def test_bytes_that_updates_move(spec, each):
    """Gradients, weights and state; weights are not read where they are rounded from masters."""
    whole = model("qwen3", torch.bfloat16, num_hidden_layers=6)
    numbers = layer_numbers(whole)
    trainer = make_trainer(whole, "slide", optimizer=spec, update="host", resident=1)
    assert trainer.pipeline.update_bytes() == 5 * numbers * each
    trainer.close()
    whole = model("qwen3", torch.bfloat16, num_hidden_layers=6)
    trainer = make_trainer(whole, "slide", optimizer=spec, update="device")
    assert trainer.pipeline.update_bytes() == 0
    trainer.close()


def held(trainer) -> int:
    """Bytes that the trainer holds on the host."""
    pipeline, outer, store = trainer.pipeline, trainer._outer, trainer._activations._store
    found = [*pipeline.host_flat.values(), *pipeline._host_grads.buffers]
    found += [t for updater in pipeline.updaters.values() for t in updater.state_tensors()]
    found += [t for flat in pipeline._flat_state.values() for t in flat.values()]
    if outer is not None:
        found += outer.updater.state_tensors()
        for kind in ("weights", "grads", "_parked"):
            found += getattr(outer, kind, {}).values()
        rows = getattr(outer, "_rows", None)
        found += [t for gathered in rows.gathered for t in gathered.buffers.values()] if rows is not None else []
    found += store._buffers.values() if store is not None else []
    return storage_bytes(t for t in found if t.numel())


@pytest.mark.parametrize("clipped", [None, 1.0])
@pytest.mark.parametrize("outer", ["device", "host", "parked", "streamed"])
@pytest.mark.parametrize("update", ["host", "device", "both"])
@pytest.mark.parametrize(("layers", "spec"), [(1, MASTERS), (6, MASTERS), (6, NARROW)], ids=str)
def test_bytes_on_the_host_are_those_that_were_counted_before(layers, spec, update, outer, clipped):
    """Counted by the trainer, on top of the model as built, and by the cost model; the vocabulary has few rows."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "vocab_size": 4096}
    whole = build_model("tiny", dtype=torch.bfloat16, num_hidden_layers=layers, **shape)
    trainer = make_trainer(whole, "slide", optimizer=spec, update=update, outer=outer, max_grad_norm=clipped)
    counted = trainer._host_bytes()
    trainer.step({"input_ids": torch.randint(4096, (2, 16))})
    trainer.drain()
    flat = [t.nbytes for t in trainer.pipeline.host_flat.values()]
    assert counted == pytest.approx(held(trainer) - sum(flat) + flat[0], rel=0.1)
    work = work_of(whole, spec, rows=2, seq=16, together=clipped is not None)
    share = {"device": 0.0, "both": 1 / 3, "host": 1.0}[update]
    kept = "parked" if spec.split_master else "host"  # what "host" means to the cost model
    if layers > 1 and update != "host" and outer in ("device", kept):
        choice = Choice(outer="device" if outer == "device" else "host", host_share=share)
        assert host_bytes(work, choice) == pytest.approx(held(trainer), rel=0.12)
    trainer.close()
