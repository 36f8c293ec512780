"""Two gloo processes train a model under FSDP2 and DDP: the gradients are those of one process on the whole batch."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from huggingface_models import assert_close, batch, build, gradients
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from t1lib.heads.huggingface import patch_head

CASES = {  # (modules with a group of their own, family, whether the patch comes first)
    "own group": (("lm_head",), "Qwen3", False),
    "with the norm": (("model.norm", "lm_head"), "Gemma2", True),
    "tied": ((), "Mistral", False),
}


def check(rank: int, case: str) -> None:
    names, family, first = CASES[case]
    model = build(family, num_hidden_layers=1, tie_word_embeddings=case == "tied")
    whole = batch(rows=4)
    loss = model(**whole).loss
    expected = gradients(model, loss)

    sharded = copy.deepcopy(model)
    if first:
        patch_head(sharded, head="chunked")
    fully_shard(sharded.model.layers[0])
    if names:
        fully_shard([sharded.get_submodule(name) for name in names])
    fully_shard(sharded)
    if not first:
        patch_head(sharded, head="chunked")

    mine = {name: values[2 * rank : 2 * rank + 2] for name, values in whole.items()}
    for _ in range(2):  # a second step meets what the first one left
        sharded.zero_grad()
        # FSDP2 takes the mean over processes, and this is the sum over the two halves
        count = (whole["labels"][:, 1:] != -100).sum()
        part = sharded(**mine, num_items_in_batch=count / 2)
        part.loss.backward()
        total = part.loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 2, loss.detach(), rtol=1e-6, atol=0.0)
        assert part.logits is None
        grads = [parameter.grad for parameter in sharded.parameters()]
        assert all(isinstance(grad, DTensor) for grad in grads)
        assert_close(expected, [grad.full_tensor() for grad in grads])


def check_ddp(rank: int) -> None:
    model = build("Qwen3", num_hidden_layers=1)
    whole = batch(rows=4)
    expected = gradients(model, model(**whole).loss)
    wrapped = patch_head(DistributedDataParallel(model), head="chunked")
    count = (whole["labels"][:, 1:] != -100).sum()
    mine = {name: values[2 * rank : 2 * rank + 2] for name, values in whole.items()}
    wrapped(**mine, num_items_in_batch=count / 2).loss.backward()
    assert_close(expected, [parameter.grad for parameter in model.parameters()])


def work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for case in CASES:
        check(rank, case)
        if rank == 0:
            print(case, "passed", flush=True)
    check_ddp(rank)
    print("DDP passed" if rank == 0 else "", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's may abort a process that shuts its interpreter down


if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]),), nprocs=2)
