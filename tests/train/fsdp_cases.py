"""Cases of mode `fsdp` on several processes against mode `gpu` in one: what each process does (test_several.py).

Sums over ranks and sums over a batch differ in order, so weights agree within rounding. Losses are float32.
"""

import math
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from loop_cases import EVERYTHING, OPTIMIZERS, model, of_layers, ragged
from processes import Cases

from t1lib.errors import T1Error
from t1lib.train import OptimizerSpec, Trainer, make_trainer

SGD = OPTIMIZERS["momentum"]  # a step is proportional to its gradient; AdamW would hide a wrong factor
ADAM = {"rel": 1e-6, "abs": 1e-8, "norm": 1e-9}
LARGE = OptimizerSpec("sgd", lr=0.5)
TWO = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
UNTIED = {"tie_word_embeddings": False}
DOUBLE, SINGLE = {"rel": 1e-9, "abs": 1e-12, "norm": 1e-9}, {"rel": 1e-4, "abs": 2e-6, "norm": 2e-5}


def even(count: int = 3, rows: int = 6) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(97, (rows, 9), generator=generator)} for _ in range(count)]


def tiny(dtype: torch.dtype = torch.float64, **changes: Any):
    return model(dtype=dtype, **{**TWO, **changes})


def numbers(size: int) -> Cases:
    """All cases with two processes; with three, those that depend on the number of processes."""
    plain = {"optimizer": SGD, "head": "full"}
    every, resident = {**EVERYTHING, **plain}, {"offload": False}
    found: Cases = {
        "everything, untied": partial(agrees, ragged(3), DOUBLE, UNTIED, own=resident, **every),
        "fewer rows in a weight than ranks": partial(agrees, even(2), DOUBLE, {"head_dim": 4}, **plain),
        "a rank without a token that counts": partial(agrees, last_rows_ignored(), DOUBLE, {}, **plain),
        "evaluation": evaluation,
        "gradients are reduced once": partial(reduced_once, size),
    }
    if size > 2:
        return found
    single = {"dtype": torch.float32, "vocab_size": 97}
    return found | {
        "everything, tied": partial(agrees, ragged(3), DOUBLE, {}, **every),
        "everything, tied, no offload": partial(agrees, ragged(3), DOUBLE, {}, own=resident, **every),
        "AdamW": partial(agrees, even(), ADAM, {}, optimizer=OPTIMIZERS["adamw"], head="full"),
        "head chunked": partial(agrees, ragged(1), DOUBLE, {}, **{**plain, "head": "chunked"}),
        "head fused, float32": partial(agrees, even(1, 2), SINGLE, single, own={"head": "fused"}, **plain),
        "clipped": partial(agrees, even(2), DOUBLE, {}, optimizer=LARGE, max_grad_norm=0.1, head="full"),
        "layers alone": partial(compare, partial(of_layers, dtype=torch.float64, **TWO), even(1), DOUBLE, **plain),
        # Gemma-2 computes its norms in float32, whatever the dtype
        "another decoder": partial(compare, partial(model, "gemma2"), even(1), SINGLE, **plain),
        "mixed precision": mixed_precision,
        "16 bits": sixteen_bits,
        "a gradient that is no number on one rank": no_number,
    }


def last_rows_ignored() -> list[dict]:
    """Batches with labels in the first row only."""
    batches = even(2)
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][1:] = -100
    return batches


def agrees(data: list[dict], bound: dict[str, float], changes: dict, own: dict | None = None, **options: Any) -> None:
    compare(lambda: tiny(**changes), data, bound, own, **options)


def compare(build: Any, data: list[dict], bound: dict[str, float], own: dict | None = None, **options: Any) -> None:
    """Compare losses, norms and tokens for each batch of `data`, then weights and state. own: options of fsdp only"""
    one, many = make_trainer(build(), "gpu", **options), make_trainer(build(), "fsdp", **{**options, **(own or {})})
    for batch in data:
        expected, found = one.step(batch), many.step(batch)
        assert found.loss == pytest.approx(expected.loss, rel=2e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=bound["norm"])
        assert (found.step, found.tokens) == (expected.step, expected.tokens)
    same_state(many, one, bound)
    many.close()


def same_state(trainer: Trainer, expected: Trainer, bound: dict[str, float]) -> None:
    found, wanted = trainer.state_dict(), expected.state_dict()
    close = partial(torch.testing.assert_close, rtol=bound["rel"], atol=bound["abs"])
    for name, weight in wanted["model"].items():
        close(found["model"][name], weight, msg=lambda text, name=name: f"{name}: {text}")
    assert found["optimizer"].keys() == wanted["optimizer"].keys()
    for name, state in wanted["optimizer"].items():
        assert state.keys() == found["optimizer"][name].keys()
        for key, value in state.items():
            close(found["optimizer"][name][key], value, msg=lambda text, at=(name, key): f"{at}: {text}")


def evaluation() -> None:
    one, many = (make_trainer(tiny(), m, optimizer=SGD, head="full", micro_batch=2) for m in ("gpu", "fsdp"))
    for rows in (1, 2, 5):  # fewer rows than ranks, too
        batch = {"input_ids": even(1)[0]["input_ids"][:rows]}
        assert many.evaluate(batch) == pytest.approx(one.evaluate(batch), rel=2e-6)
    same_state(many, one, {"rel": 0, "abs": 0})
    other = make_trainer(tiny(seed=5), "gpu", optimizer=SGD, head="full")
    many.load_state_dict(other.state_dict())  # what FSDP gathered is now stale
    assert many.evaluate(even(1)[0]) == pytest.approx(other.evaluate(even(1)[0]), rel=2e-6)
    many.close()


def reduced_once(size: int) -> None:
    """Without offload, ranks get their gradient shards only after the last micro-batch; with it, after each one."""
    for offload in (False, True):
        trainer, held = make_trainer(tiny(), "fsdp", head="full", micro_batch=1, offload=offload), []

        def noting(lane, phase, layer, trainer=trainer, held=held):
            if phase == "backward":
                held.append(sum(p.grad is not None for p in trainer.model.parameters()))

        with patch.object(trainer.trace, "end", noting):
            trainer.step(even(1)[0])
        every = len(list(trainer.model.parameters()))
        assert held == ([every] if offload else [0]) * (6 // size - 1) + [every], held
        trainer.close()


def mixed_precision() -> None:
    """Weights are kept and updated, and gradients summed, in float32; the model computes in bfloat16."""
    options = {"optimizer": SGD, "head": "full"}
    one, many = make_trainer(tiny(torch.float32), "gpu", **options), tiny(torch.float32)
    many = make_trainer(many, "fsdp", compute_dtype="bfloat16", **options)
    seen = set()
    many.parts.norm.register_forward_hook(lambda _, args, out: seen.add(out.dtype))
    for batch in even(2):
        expected, found = one.step(batch), many.step(batch)
        assert 0 < abs(found.loss - expected.loss) < 0.02 * expected.loss
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert seen == {torch.bfloat16}
    assert all(w.dtype == torch.float32 for w in many.state_dict()["model"].values())
    many.close()


def sixteen_bits() -> None:
    """With masters, the update is that of one process up to the rounding of 16-bit gradients."""
    spec = OptimizerSpec("sgd", lr=0.5, master_weights=True)
    exact = make_trainer(tiny(torch.float32), "gpu", optimizer=spec, head="full")
    exact.load_state_dict(make_trainer(tiny(torch.bfloat16).float(), "gpu", optimizer=spec, head="full").state_dict())
    one, many = (make_trainer(tiny(torch.bfloat16), mode, optimizer=spec, head="full") for mode in ("gpu", "fsdp"))
    losses = [[t.step(batch).loss for batch in even(3)] for t in (exact, one, many)]
    assert losses[2] == pytest.approx(losses[1], rel=0.01)
    wide = exact.state_dict()["model"]
    masters = [{n: s["master"] for n, s in t.state_dict()["optimizer"].items()} for t in (one, many)]
    usual, found = (math.sqrt(sum(float((m[n] - wide[n]).square().sum()) for n in wide)) for m in masters)
    assert found < 1.5 * usual, (found, usual)
    many.close()


def no_number() -> None:
    """Only rank 0 holds the spoiled weight, but no rank updates anything."""
    trainer = make_trainer(tiny(), "fsdp", optimizer=SGD, head="full")
    trainer.step(even(1)[0])
    before = trainer.state_dict()
    local = trainer.parts.norm.weight.to_local().detach()
    kept = local.clone()
    if dist.get_rank() == 0:
        local[0] = math.inf
    with pytest.raises(T1Error, match="step 2: a gradient is not finite"):
        trainer.step(even(1)[0])
    local.copy_(kept)
    after = trainer.state_dict()
    assert all(torch.equal(w, after["model"][n]) for n, w in before["model"].items())
    trainer.close()
