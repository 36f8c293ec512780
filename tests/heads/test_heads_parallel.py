"""The vocabulary-parallel heads and `patch_head` against one process: on two, on three, and on two CUDA devices. Their
values, how they go about it, and bad input, on which every process raises."""

import copy
import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")
import head_cases
import huggingface_models
import torch
import torch.distributed as dist
from copies import python
from head_cases import OPTION_SETS, REDUCTIONS, Problem, assert_close, least_of, options, problem, run, upstream_for
from huggingface_models import batch, build, gradients
from processes import SIZES, Cases, Outcomes, join, work
from refusals import refused
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from t1lib.heads import fused_launch, patch_head
from t1lib.heads import linear_cross_entropy as in_one
from t1lib.heads.fused_plan import early_from
from t1lib.heads.parallel import AGREED, linear_cross_entropy
from t1lib.measure.parallel import measure_ranks
from t1lib.measure.records import Records

CHUNKED = {"head": "chunked", "chunks": 3}
SIZE = 3
ROWS = (90, 7, 160)  # of the weight on each rank: 257 classes in total
FEW = (24, 4, 20)  # for the interpreter; rows of these numbers of logits need no padding
Found = dict[str, Tensor]
STATS = ("lse", "logprob", "correct")


def values() -> Cases:
    """Both heads: options, reductions, odd operands and targets; tokens replicated or sharded."""
    p, found = problem(36, 257, 16), {}
    for reduction in REDUCTIONS:
        for name in OPTION_SETS:
            found[f"{name}, {reduction}"] = {**options(name, p), "reduction": reduction}
        found[f"tokens dealt, {reduction}"] = {**found[f"all, {reduction}"], "sequence_parallel": True}
    found["no gradients"] = {"grad": (False,) * 3}
    found["no bias"] = {"p": replace(p, b=None)}
    found["no tokens"] = {"p": Problem(p.e[:0], p.w, p.b, p.target[:0]), "reduction": "sum"}
    found["all tokens ignored"] = {"p": replace(p, target=torch.full_like(p.target, -100)), "reduction": "sum"}
    found["workspace"] = {"workspace": "1MiB", "chunks": None}
    found |= {name: odd_case(name) for name in head_cases.ODD if name != "a filter"}
    common = {"p": p, "rows": ROWS, "tolerance": 1e-11, **CHUNKED}
    cases = {f"chunked, {name}": partial(agrees, **{**common, **kwargs}) for name, kwargs in found.items()}

    p, few = (problem(n, sum(FEW), 16, dtype=torch.float32) for n in (24, 9))  # 24 tokens make two chunks
    found = {name: odd_case(name) for name in ("a logit far above", "logits of -inf, the first chunk")} | {
        "no gradients": dict(grad=(False,) * 3),
        "tokens dealt": dict(p=p, chunks=2, sequence_parallel=True, **options("weighted smoothing", p)),
        "odd sizes": dict(p=problem(9, sum(FEW), 3, dtype=torch.float32)),  # rows of no whole 16 bytes
        "softcap": dict(options("softcap", few)),  # gradients made in the forward
        "tokens dealt, none": dict(reduction="none", sequence_parallel=True, **options("all", few)),
        "sum, no bias": dict(p=replace(few, b=None), reduction="sum"),
        "filter, weight alone": dict(filter_eps=1e-3, grad=(False, True, False)),
    }
    common = {"p": few, "rows": FEW, "tolerance": 3e-6, "head": "fused"}
    return cases | {f"fused, {name}": partial(agrees, **{**common, **kwargs}) for name, kwargs in found.items()}


def odd_case(name: str) -> dict[str, Any]:
    """The arguments of `agrees` for odd operands; the first rank holds a third of the weight, the second three rows."""
    p, given, tolerance = head_cases.ODD[name]()
    first = len(p.w) // 3
    return {"p": p, "rows": (first, 3, len(p.w) - first - 3), "tolerance": tolerance, **given}


def agrees(p: Problem, rows: tuple[int, ...], tolerance: float, **kwargs: Any) -> None:
    """Assert that loss, gradients and statistics agree with those of head `full` in float64 in one process."""
    want, got = expected(p, rows, **kwargs), on_shards(p, rows, **kwargs)
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    names = [name for name in want if want[name].numel()]
    assert_close([got[name] for name in names], [want[name] for name in names], tolerance)


def sixteen_bits(p: Problem, rows: tuple[int, ...], own: dict[str, Any], **kwargs: Any) -> None:
    """Errors, but of a sum, are about those of head `full` in one process: dE is not rounded per shard."""
    with patch.object(sys.modules[__name__], "upstream_for", torch.ones_like):  # other values round again
        exact, usual = (expected(p, rows, dtype=d, **kwargs) for d in (torch.float64, p.e.dtype))
        got = on_shards(p, rows, **kwargs, **own)
    bounds = head_cases.error_bounds("softcap" if "softcap" in kwargs and own["head"] == "chunked" else "plain", own)
    bounds["loss"] = bounds["loss"] if got["loss"].dim() else 1e6
    names = ("loss", "input", "linear_weight", "linear_bias")
    head_cases.assert_no_worse(*([found[name] for name in names] for found in (got, usual, exact)), bounds)


def own_rows(rows: tuple[int, ...]) -> slice:
    rank = dist.get_rank()
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def expected(p: Problem, rows: tuple[int, ...], dtype=torch.float64, sequence_parallel=False, **kwargs: Any) -> Found:
    """What this process should compute: the result of head `full` in `dtype` with the whole weight."""
    rest = {k: v for k, v in kwargs.items() if k not in ("head", "chunks", "workspace")}
    want, part = results(partial(in_one, head="full"), p.to(dtype), p.target, **rest), own_rows(rows)
    for name in {"linear_weight", "linear_bias"} & want.keys():
        want[name] = want[name][part]
    if sequence_parallel:
        by_token = {"input", *STATS} | ({"loss"} if kwargs.get("reduction") == "none" else set())
        for name in by_token & want.keys():
            want[name] = want[name].chunk(len(rows))[dist.get_rank()]
    return want


def on_shards(p: Problem, rows: tuple[int, ...], sequence_parallel: bool = False, **kwargs: Any) -> Found:
    """What this process computes from its rows of the weight."""
    part, rank, size = own_rows(rows), dist.get_rank(), len(rows)
    share = Problem(p.e, p.w[part], None if p.b is None else p.b[part], p.target)
    if sequence_parallel:
        share.e, share.target = p.e.chunk(size)[rank], p.target.chunk(size)[rank]
        if "token_weight" in kwargs:
            kwargs["token_weight"] = kwargs["token_weight"].chunk(size)[rank]
    call = partial(linear_cross_entropy, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
    return results(call, share, p.target, **kwargs)


def results(call: Callable[..., Any], p: Problem, every_target: Tensor, grad=(True,) * 3, **kwargs: Any) -> Found:
    """What `call` returns and its gradients, by name; the upstream gradient is the same however tokens are sharded."""
    given = zip(("input", "linear_weight", "linear_bias"), (p.e, p.w, p.b), grad, strict=True)
    operands = {name: t.detach().clone().requires_grad_(g) for name, t, g in given if t is not None}
    loss, stats = call(**operands, target=p.target, return_stats=True, **kwargs)
    found = {"loss": loss.detach(), **dict(zip(STATS, stats, strict=True))}
    wanted = {name: t for name, t in operands.items() if t.requires_grad}
    if wanted:
        every = upstream_for(loss.detach().new_empty(every_target.shape if loss.dim() else ()))
        upstream = every if every.shape == loss.shape else every.chunk(dist.get_world_size())[dist.get_rank()]
        found |= zip(wanted, torch.autograd.grad(loss, list(wanted.values()), upstream), strict=True)
    return found


def of_the_largest() -> None:
    """Between what ranks with 200 and with 8 rows would take for gradients in the forward: all must decide alike."""
    p = problem(9, 216, 8, dtype=torch.float32)
    limits = [early_from(9, rows, 8, 4, cuda=False) for rows in (8, 200)]
    agrees(p, (200, 8, 8), 3e-6, head="fused", workspace=sum(limits) // 2)


def same_bits() -> None:
    got = on_shards(P, ROWS, **CHUNKED)
    for name in ("loss", "input"):
        every = [torch.empty_like(got[name]) for _ in range(SIZE)]
        dist.all_gather(every, got[name].contiguous())
        assert all(torch.equal(t, got[name]) for t in every), name


def compared_once() -> None:
    """The ranks compare a call when they make it first, and not again."""
    seen, share = [], dist.all_gather_object
    AGREED.clear()
    with patch.object(dist, "all_gather_object", lambda *args, **kwargs: (seen.append(1), share(*args, **kwargs))):
        for _ in range(2):
            on_shards(P, ROWS, **CHUNKED)
        on_shards(P, ROWS, softcap=4.0, **CHUNKED)
    assert len(seen) == 2


def counted() -> None:
    """The least workspace of `chunked` is that of one process, plus the buffer for summing dE."""
    for dtype in (torch.float32, torch.bfloat16):
        p, most = problem(36, 257, 16, dtype=dtype, bias=False), max(ROWS)
        one = Problem(p.e, p.w[:most], None, p.target % most)
        alone = least_of(partial(results, in_one, one, one.target, head="chunked"))
        for dealt in (False, True):
            least = least_of(partial(on_shards, p, ROWS, sequence_parallel=dealt, head="chunked"))
            assert 0 < least - alone <= 2 * 36 * 16 * 4


def sharded() -> None:
    """A DTensor is refused with what to pass instead, by which its gradient is a DTensor, too."""
    w = distribute_tensor(P.w, init_device_mesh("cpu", (SIZE,)), [Shard(0)]).requires_grad_()
    call = partial(linear_cross_entropy, target=P.target, group=dist.group.WORLD, **CHUNKED)
    raises(lambda: call(P.e, w), r"linear_weight is a DTensor; .* its to_local\(\)")
    whole = distribute_tensor(P.e, w.device_mesh, [Replicate()])
    raises(lambda: call(whole, w.to_local()), r"input is a DTensor; .* its to_local\(\)")
    for head in ("full", "chunked", "torch"):
        raises(lambda head=head: in_one(whole, w, P.target, head=head), r"input is a DTensor; pass its full_tensor\(\)")
    (dw,) = torch.autograd.grad(call(P.e, w.to_local()), w)
    want = run("full", Problem(P.e, P.w, None, P.target), torch.ones(()))[2]
    assert_close([dw.full_tensor()], [want], 1e-5)


def within_bounds() -> None:
    """The rows just before and after this shard's dW are left unchanged."""
    add = fused_launch.Pass.add_targets

    def between_guards(self: Any, *args: Any) -> None:
        guarded = torch.nn.functional.pad(self.dw, (0, 0, 1, 1), value=7.0)
        self.dw = guarded[1:-1]
        add(self, *args)
        assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()

    with patch.object(fused_launch.Pass, "add_targets", between_guards):
        agrees(problem(9, sum(FEW), 16, dtype=torch.float32, bias=False), FEW, 3e-6, head="fused")


def compiled() -> None:
    """The compiler is told the shapes that the operator returns, of all ranks' tokens and for the largest shard."""
    p = problem(9, sum(FEW), 16, dtype=torch.float32)
    call = torch.compile(linear_cross_entropy, backend="aot_eager")
    with patch.object(sys.modules[__name__], "linear_cross_entropy", call):
        agrees(p, FEW, 3e-6, head="fused", sequence_parallel=True)


def groups_made_anew(folder: Path) -> None:
    """A group that was destroyed is not kept alive, and what it agreed to does not hold for one of the same name. The
    last one is left."""
    p, old, rank = problem(5, sum(FEW), 16, dtype=torch.float32), None, dist.get_rank()
    heads = {FEW: (CHUNKED, {"head": "fused"}), FEW[::-1]: (CHUNKED,), None: ()}
    for rows, owns in heads.items():
        dist.destroy_process_group()
        gc.collect()
        assert old is None or old() is None
        refused(lambda: linear_cross_entropy(p.e, p.w, p.target, group=None), "call torch.distributed.init_process")
        join(folder / f"anew{rows}", rank, SIZE)
        for own in owns:
            agrees(p, rows, 3e-6, **own)
        old = weakref.ref(dist.group.WORLD)


P = problem(36, 257, 16, dtype=torch.float32)
FROZEN = P.w[-ROWS[-1] :]
STRIDED = FROZEN.t().contiguous().t().requires_grad_()
LAST: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({"input": P.e.double()}, {}, "disagree about input: .*float32.* on rank 0|linear_weight is"),
    "tokens": ({"input": P.e[:9], "target": P.target[:9]}, {}, r"disagree about input: .*\(36, 16\).*\(9, 16\)"),
    "workspace": ({"workspace": "2KiB"}, {"workspace": 1024}, "disagree about workspace: 1024 on rank 0.*2048 on"),
    "bad workspace": ({"workspace": "2 miles"}, {}, r"^rank \d: bad size '2 miles'"),
    "frozen weight": ({"linear_weight": FROZEN}, {}, "disagree about linear_weight: .*requires grad.*constant"),
    "order of a weight in memory": ({"linear_weight": STRIDED}, {}, "disagree about linear_weight"),
    "deal of tokens": ({"sequence_parallel": True}, {}, "disagree about sequence_parallel: False on rank 0"),
    "target, out of range,": ({"target": P.target + 257}, {"sequence_parallel": True}, r"lie in \[0, 257\)"),
}
"""What differs on the last rank: (its arguments, those of all ranks, the message)."""

WIDE = {"input": P.e.double(), "linear_weight": P.w.double(), "linear_bias": None}
EVERY: dict[str, tuple[dict[str, Any], str]] = {
    "class weights": ({"weight": torch.ones(258)}, r"weight must have shape \(257,\), got \(258,\)"),
    "by vocabulary": ({"head": "chunked", "by": "vocabulary"}, 'by="sequence"'),
    "a filter where chunked stands in": ({**WIDE, "filter_eps": 0.1}, "has no filter_eps"),
    "a target out of range": ({"target": P.target.clamp(min=257)}, r"lie in \[0, 257\).*got 257"),
    "workspace": ({"workspace": 1000}, "the least that works is"),
    "no rows": ({"linear_weight": P.w[:0]}, r"\(0, 16\)"),
    "no group": ({"group": None}, "group must be a ProcessGroup, .*got NoneType"),
}
"""What all ranks pass, of the weight its own rows: (arguments, the message)."""


def refuses(last: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """With `change` on every rank, and `last` on the last one too, each raises T1Error, and none waits for others."""
    part = own_rows(ROWS)
    kwargs = {"input": P.e, "linear_weight": P.w, "target": P.target, "linear_bias": P.b[part], "head": "fused"}
    kwargs |= {"group": dist.group.WORLD, "sequence_parallel": False, **change}
    kwargs["linear_weight"] = kwargs["linear_weight"][part].requires_grad_()
    if dist.get_rank() == SIZE - 1:
        kwargs |= last
    raises(lambda: linear_cross_entropy(**kwargs), message)


def raises(call: Callable[[], Any], message: str) -> None:
    AGREED.clear()  # a call that the ranks agreed to before is not compared again
    refused(call, match=message)


def the_same() -> None:
    """On the last rank some options are given as their defaults."""
    AGREED.clear()
    given = {"workspace": "1MiB"}
    if dist.get_rank() == SIZE - 1:
        given = {"label_smoothing": 0.0, "softcap": None, "ignore_index": None, "workspace": 2**20}
    on_shards(P, ROWS, head="chunked", **given)


def backend() -> None:
    with patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        call = partial(linear_cross_entropy, P.e, P.w, P.target, group=dist.group.WORLD)
        raises(call, "nccl for cuda; use gloo for cpu")


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
        huggingface_models.assert_close(expected, grads if case == "DDP" else [grad.full_tensor() for grad in grads])


def cases(size: int, folder: Path) -> Cases:
    if size != SIZE:
        return {f"patch_head, {name}": partial(wrapped, name) for name in WRAPPED}
    p, q = problem(150, 257, 64, dtype=torch.bfloat16), problem(20, sum(FEW), 64, dtype=torch.float16)
    found = values() | {
        "the loss and dE have the same bits everywhere": same_bits,
        "chunked, 16 bits": partial(sixteen_bits, p, ROWS, CHUNKED),
        "calls are compared once": compared_once,
        "chunked, the least workspace": counted,
        "fused, targets elsewhere write nothing": within_bounds,
        "fused, 16 bits": partial(sixteen_bits, q, FEW, {"head": "fused"}),
        "fused, compiled": compiled,
        "fused, a workspace that decides for one rank alone": of_the_largest,
        "options left out are the defaults": the_same,
        "refused: a DTensor": sharded,
        "refused: a backend for CUDA alone": backend,
    }
    found |= {f"another {what} on one rank": partial(refuses, *case) for what, case in LAST.items()}
    found |= {f"refused: {what}": partial(refuses, {}, *case) for what, case in EVERY.items()}
    return found | {"groups made anew": partial(groups_made_anew, folder)}  # it leaves another group


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


ALONE = """
import weakref, torch, torch.distributed as dist
from t1lib.heads.parallel import linear_cross_entropy
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
hidden, weight, target = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8), torch.arange(3)
linear_cross_entropy(hidden, weight, target, group=dist.group.WORLD).backward()
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print(group() is None)
"""


def test_a_new_process_ends_its_group(tmp_path):
    """Else threads of gloo are left, which may abort the process as it ends."""
    assert python("-c", ALONE, cwd=tmp_path) == "True\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_two_cuda_devices():
    records, sizes = Records(), {"tokens": 512, "rows": [5001, 4000], "hidden": 256}
    measure_ranks(records, compare_all, sizes, 2, name="heads", variants=[], device="cuda", limit=240.0)
    assert [row["metric"] for row in records.rows] == ["done"]


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # once, not in each process
    work(Path(sys.argv[1]), cases)
