"""The vocabulary-parallel heads and `patch_head` against one process: on two, on three, and on two CUDA devices."""

import copy
import importlib
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")
import torch
import torch.distributed as dist
from head_cases import REDUCTIONS, options, problem
from huggingface_models import assert_close, batch, build, gradients
from parallel_cases import CHUNKED, SIZE, agrees, groups_made_anew, manners, own_rows, refusals, sixteen_bits, values
from processes import SIZES, Cases, Outcomes, work
from refusals import refused
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from t1lib.heads import patch_head
from t1lib.heads.parallel import linear_cross_entropy
from t1lib.measure.parallel import measure_ranks
from t1lib.measure.records import Records

WRAPPED = {  # (modules with a group of FSDP2 of their own, family, whether the patch comes first)
    "FSDP2, own group": (("lm_head",), "Granite", False),  # a bias, and scaled logits
    "FSDP2, with the norm": (("model.norm", "lm_head"), "Gemma2", True),
    "FSDP2, tied": ((), "Mistral", False),
    "DDP": ((), "Qwen3", False),
}
HEADS = (CHUNKED, {"head": "fused", "chunks": 2})


def wrapped(case: str) -> None:
    """Each rank computes half of the losses of four rows, whose mean, as FSDP2 and DDP take it, is the whole's."""
    names, family, first = WRAPPED[case]
    model, whole = build(family, num_hidden_layers=1, tie_word_embeddings="tied" in case), batch(rows=4)
    expected = gradients(model, model(**whole).loss)
    mine = {name: values[2 * dist.get_rank() :][:2] for name, values in whole.items()}
    mine["num_items_in_batch"] = (whole["labels"][:, 1:] != -100).sum() / 2
    found = copy.deepcopy(model)
    if first:
        patch_head(found, head="chunked")
    if case == "DDP":
        found = DistributedDataParallel(found)
    else:
        fully_shard(found.model.layers[0])
        if names:
            fully_shard([found.get_submodule(name) for name in names])
        fully_shard(found)
    if not first:
        patch_head(found, head="chunked")
    for _ in range(2):  # a second step meets what the first one left
        found.zero_grad()
        part = found(**mine)
        part.loss.backward()
        total = part.loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 2, model(**whole).loss.detach(), rtol=1e-6, atol=0.0)
        grads = [parameter.grad for parameter in found.parameters()]
        assert part.logits is None
        assert_close(expected, grads if case == "DDP" else [grad.full_tensor() for grad in grads])


def cases(size: int, folder: Path) -> Cases:
    if size != SIZE:
        return {f"patch_head, {name}": partial(wrapped, name) for name in WRAPPED}
    return {**values(), **manners(), **refusals(), "groups made anew": partial(groups_made_anew, folder)}  # last


NAMES = [(size, name) for size in SIZES for name in cases(size, Path())]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


def compare_all(records: Records, device: torch.device, phase: str, tokens: int, rows: list[int], hidden: int) -> None:
    """The task of each rank. Calls are made twice, because the ranks compare only the first. Then one that differs."""
    sizes, rows = {"n": tokens, "v": sum(rows), "d": hidden, "device": device}, tuple(rows)
    single, half = (problem(**sizes, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    more = options("softcap", single) | options("token_weight", single) | {"sequence_parallel": True}
    for own, reduction, changes, _ in product(HEADS, REDUCTIONS, ({}, more), range(2)):
        agrees(single, rows, 3e-5, **own, reduction=reduction, **changes)
        sixteen_bits(half, rows, own, reduction=reduction, **changes)
    last = dist.get_rank() == len(rows) - 1
    call = dict(group=dist.group.WORLD, softcap=3.0 if last else 2.0)
    differs = partial(linear_cross_entropy, single.e, single.w[own_rows(rows)], single.target, **call)
    refused(differs, "ranks disagree about softcap: ")
    records.put("all", phase, {"done": 1.0})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_two_cuda_devices():
    records, sizes = Records(), {"tokens": 512, "rows": [5001, 4000], "hidden": 256}
    measure_ranks(records, compare_all, sizes, 2, name="heads", variants=[], device="cuda", limit=240.0)
    assert [row["metric"] for row in records.rows] == ["done"]


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # once, not in each process
    work(Path(sys.argv[1]), cases)
