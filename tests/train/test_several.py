"""Mode `fsdp` on two and three processes, which run this file, against mode `gpu` in one, within rounding."""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from loop_cases import CLIPPED, OPTIMIZERS, assert_same, even, model, of_layers, ragged
from processes import SIZES, Cases, Outcomes, work
from refusals import refused
from torch.distributed.tensor import DTensor

from t1lib.train import OptimizerSpec, Trainer, make_trainer
from t1lib.train.checkpoint import save_checkpoint

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the worker forks, and gloo listens on lo")
pytestmark = [pytest.mark.slow, LINUX]
SGD = OPTIMIZERS["momentum"]  # a step is proportional to its gradient; AdamW would hide a wrong factor
ADAM = {"rel": 1e-6, "abs": 1e-8, "norm": 1e-9}
TWO = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
UNTIED = {"tie_word_embeddings": False}
DOUBLE, SINGLE = {"rel": 1e-9, "abs": 1e-12, "norm": 1e-9}, {"rel": 1e-4, "abs": 2e-6, "norm": 2e-5}


def tiny(dtype: torch.dtype = torch.float64, **changes: Any):
    return model(dtype=dtype, **{**TWO, **changes})


def cases(size: int, folder: Path) -> Cases:
    """All cases with two processes; with three, those that depend on the number of processes."""
    plain = {"optimizer": SGD, "head": "full"}
    every, resident = {"micro_batch": 2, **CLIPPED, **plain}, {"offload": False}
    ignored = [batch | {"labels": batch["input_ids"].index_fill(0, torch.arange(1, 6), -100)} for batch in even(2)]
    found: Cases = {
        "everything, untied": partial(agrees, ragged(3), DOUBLE, UNTIED, own=resident, **every),
        "fewer rows in a weight than ranks": partial(agrees, even(2), DOUBLE, {"head_dim": 4}, **plain),
        "a rank without a token that counts": partial(agrees, ignored, DOUBLE, {}, **plain),
        "gradients are reduced once": partial(reduced_once, size),
        "refused: batches": bad_batches,
    }
    if size > 2:
        return found
    single = {"dtype": torch.float32, "vocab_size": 97}
    return found | {
        "everything, tied": partial(agrees, ragged(3), DOUBLE, {}, **every),
        "AdamW": partial(agrees, even(), ADAM, {}, optimizer=OPTIMIZERS["adamw"], head="full"),
        "head fused, float32": partial(agrees, even(1, 2), SINGLE, single, own={"head": "fused"}, **plain),
        "layers alone": partial(agrees, even(1), DOUBLE, partial(of_layers, dtype=torch.float64, **TWO), **plain),
        "16 bits": sixteen_bits,
        "a gradient that is no number on one rank": no_number,
        "refused: a state": partial(no_state, folder / "state"),
        "refused: what differs, and what cannot be": bad_arguments,
    }


def agrees(data: list[dict], bound: dict[str, float], build: Any, own: dict | None = None, **options: Any) -> None:
    """Compare losses, norms and tokens for each batch of `data`, then evaluations and weights. build: a model, or
    changes of the tiny one. own: options of fsdp only"""
    build = partial(tiny, **build) if isinstance(build, dict) else build
    one, many = make_trainer(build(), "gpu", **options), make_trainer(build(), "fsdp", **{**options, **(own or {})})
    for batch in data:
        expected, found = one.step(batch), many.step(batch)
        assert found.loss == pytest.approx(expected.loss, rel=2e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=bound["norm"])
        assert (found.step, found.tokens) == (expected.step, expected.tokens)
    for rows in (1, 2, 5):  # fewer rows than ranks, too
        batch = {"input_ids": even(1)[0]["input_ids"][:rows]}
        assert many.evaluate(batch) == pytest.approx(one.evaluate(batch), rel=2e-6)
    assert_same(weights(many), weights(one), rtol=bound["rel"], atol=bound["abs"])


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole copies."""
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in trainer.model.named_parameters()}


def reduced_once(size: int) -> None:
    """Without offload, ranks get their gradient shards only after the last micro-batch; with it, after each one."""
    for offload in (False, True):
        many, held = make_trainer(tiny(), "fsdp", head="full", micro_batch=1, offload=offload), []
        params = list(many.model.parameters())

        def noting(lane, phase, layer, params=params, held=held):
            if phase == "backward":
                held.append(sum(p.grad is not None for p in params))

        with patch.object(many.trace, "end", noting):
            many.step(even(1)[0])
        assert held == ([len(params)] if offload else [0]) * (6 // size - 1) + [len(params)], held


def sixteen_bits() -> None:
    """With masters, the update is that of one process up to the rounding of 16-bit gradients and weights."""
    spec = OptimizerSpec("sgd", lr=0.5)
    exact = make_trainer(tiny(torch.bfloat16).float(), "gpu", optimizer=spec, head="full")
    one, many = (make_trainer(tiny(torch.bfloat16), mode, optimizer=spec, head="full") for mode in ("gpu", "fsdp"))
    losses = [[t.step(batch).loss for batch in even(3)] for t in (exact, one, many)]
    assert losses[2] == pytest.approx(losses[1], rel=0.01)
    wide = weights(exact)
    usual, found = (math.sqrt(sum(float((weights(t)[n] - wide[n]).square().sum()) for n in wide)) for t in (one, many))
    assert found < 1.5 * usual, (found, usual)


def no_number() -> None:
    """Only rank 0 holds the spoiled weight, but no rank updates anything."""
    many = make_trainer(tiny(), "fsdp", optimizer=SGD, head="full")
    many.step(even(1)[0])
    before = weights(many)
    local = many.parts.norm.weight.to_local().detach()
    kept = local.clone()
    if dist.get_rank() == 0:
        local[0] = math.inf
    refused(lambda: many.step(even(1)[0]), "step 2: a gradient is not finite")
    local.copy_(kept)
    assert_same(weights(many), before)


ADAMW = {"optimizer": OPTIMIZERS["adamw"], "head": "full"}


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def trainer(**options: Any) -> Trainer:
    return make_trainer(tiny(), "fsdp", **ADAMW, **options)


def no_state(folder: Path) -> None:
    many = trainer()
    for call in (many.state_dict, partial(many.load_state_dict, {}), partial(save_checkpoint, many, folder)):
        refused(call, "the state of a model in 2 processes; allowed: one process, or `torch.distributed")
    assert not folder.exists()


def bad_batches() -> None:
    """Batches of the other ranks and of the last one, with the error they cause; none changes anything."""
    ids, every = even(1)[0]["input_ids"], "ranks disagree about the whole batch"
    batches = [
        (ids, (ids + 1) % 97, every),
        (ids, ids[:5], every),
        (ids, ids.T.contiguous(), every),
        (ids + 90, ids + 90, r"^input_ids hold \[\d+\]; allowed: 0 to 96"),
    ]
    many = trainer()
    before = weights(many)
    for others, last, message in batches:
        batch = last if is_last() else others
        refused(partial(many.step, {"input_ids": batch}), match=message)
    assert_same(before, weights(many))
    many.step(even(1)[0])


def bad_arguments() -> None:
    many = partial(trainer, micro_batch=2 if is_last() else None)
    refused(many, match="disagree about micro_batch: None.*every rank of the group must pass the same")
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[50, 3] += dist.get_rank()  # in the midst
    refused(partial(make_trainer, model, "fsdp", **ADAMW), "ranks disagree about the model's weights")
    many = partial(make_trainer, of_layers(**TWO), "fsdp", **ADAMW, loss="mean_square")
    refused(many, "'mean_square' in 2 processes; allowed: one process")
    with patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        refused(trainer, "tensors are on cpu, but the group's backend is nccl for cuda; use gloo for cpu")


NAMES = [(size, name) for size in SIZES for name in cases(size, Path())]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), tmp_path_factory.mktemp("several"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


if __name__ == "__main__":
    work(Path(sys.argv[1]), cases)
