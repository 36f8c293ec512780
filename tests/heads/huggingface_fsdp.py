"""Cases of `patch_head` on several processes: under FSDP2 and DDP, gradients are those of one process on the batch."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from huggingface_models import assert_close, batch, build, gradients
from processes import Cases
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from t1lib.heads.huggingface import patch_head

GROUPS = {  # (modules with a group of their own, family, whether the patch comes first)
    "own group": (("lm_head",), "Granite", False),  # a bias, and scaled logits
    "with the norm": (("model.norm", "lm_head"), "Gemma2", True),
    "tied": ((), "Mistral", False),
}


def wrapped() -> Cases:
    """For two processes."""
    return {f"patch_head, FSDP2, {name}": partial(sharded, name) for name in GROUPS} | {"patch_head, DDP": replicated}


def halves(model, whole) -> tuple[dict, list]:
    """The arguments of this rank, whose mean with the other's, as FSDP2 takes it, is the whole's; its gradients."""
    expected = gradients(model, model(**whole).loss)
    mine = {name: values[2 * dist.get_rank() :][:2] for name, values in whole.items()}
    return {**mine, "num_items_in_batch": (whole["labels"][:, 1:] != -100).sum() / 2}, expected


def sharded(case: str) -> None:
    names, family, first = GROUPS[case]
    model, whole = build(family, num_hidden_layers=1, tie_word_embeddings=case == "tied"), batch(rows=4)
    mine, expected = halves(model, whole)
    found = copy.deepcopy(model)
    if first:
        patch_head(found, head="chunked")
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
        assert part.logits is None and all(isinstance(grad, DTensor) for grad in grads)
        assert_close(expected, [grad.full_tensor() for grad in grads])


def replicated() -> None:
    model = build("Qwen3", num_hidden_layers=1)
    mine, expected = halves(model, batch(rows=4))
    found = patch_head(DistributedDataParallel(model), head="chunked")
    found(**mine).loss.backward()
    assert_close(expected, [parameter.grad for parameter in model.parameters()])
