"""Problems for the tests of heads: operands, sets of options, and one way to run a head on them."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from refusals import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy

OPTION_SETS = ("plain", "weight", "smoothing", "weighted smoothing", "softcap", "z_loss", "token_weight", "all")
REDUCTIONS = ("mean", "sum", "none")
SHAPES = ((1, 7, 3), (37, 257, 20), (5, 8200, 3))  # N, V, D; 8200 crosses a chunk of 8192 columns
SOFTCAPS = (1e-30, 0.01, 0.5, 50.0, 1e6, 1e30)
TIGHT = {0.01: 5e-5, 0.5: 3e-5}  # tolerances
CHUNKED = ({}, {"by": "vocabulary", "chunks": 3})
SINGLE = ("weight", "smoothing", "softcap", "z_loss", "token_weight")
OWN = {  # what calls drawn by chance may pass
    "chunked": [{}, {"by": "vocabulary"}, {"chunks": 3}, {"by": "vocabulary", "chunks": 5}],
    "fused": [{}, {}, {"chunks": 2}],
}
HEADS = [("full", {}), *(("chunked", own) for own in CHUNKED)]
"""The heads that run anywhere and take every option."""


@dataclass
class Problem:
    """Operands e (N, D), w (V, D), b (V) or None, targets (N)."""

    e: Tensor
    w: Tensor
    b: Tensor | None
    target: Tensor

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(self.e.to(dtype), self.w.to(dtype), None if self.b is None else self.b.to(dtype), self.target)


def problem(n, v, d, *, dtype=torch.float64, bias=True, ignored=True, seed=0, device="cpu") -> Problem:
    """Logits have a standard deviation of about 3; a fifth of the tokens are ignored (target −100), never the first."""
    g = torch.Generator().manual_seed(seed)
    e = torch.randn(n, d, generator=g, dtype=torch.float64)
    w = torch.randn(v, d, generator=g, dtype=torch.float64) * 3 / d**0.5
    b = torch.randn(v, generator=g, dtype=torch.float64) if bias else None
    target = torch.randint(0, v, (n,), generator=g)
    target[-1] = v - 1  # the last column, in the last chunk
    if ignored:
        target[1::5] = -100
    made = Problem(e, w, b, target).to(dtype)
    return Problem(*(None if t is None else t.to(device) for t in (made.e, made.w, made.b, made.target)))


def options(name: str, p: Problem, seed: int = 1) -> dict:
    """The named set of options, with weights drawn for this problem."""
    g = torch.Generator().manual_seed(seed)
    weight = (torch.rand(len(p.w), generator=g, dtype=torch.float64) + 0.2).to(p.e.dtype).to(p.e.device)
    token_weight = (torch.rand(len(p.e), generator=g, dtype=torch.float64) + 0.2).to(p.e.device)
    every = {"weight": weight, "label_smoothing": 0.3, "softcap": 4.0, "z_loss": 0.05, "token_weight": token_weight}
    several = {"plain": (), "smoothing": ["label_smoothing"], "weighted smoothing": ["weight", "label_smoothing"]}
    several |= {"all": every, "all but smoothing": every.keys() - {"label_smoothing"}}
    return {option: every[option] for option in several.get(name, [name])}


MASKED = {"the first chunk": slice(0, 86), "later chunks": slice(86, 200), "all but one class": slice(1, None)}


def mask(p: Problem, rows: slice) -> None:
    """Mask these classes by a bias of −inf; no token has one of them any more."""
    p.b[rows] = -torch.inf
    allowed = (~p.b.isinf()).nonzero()[:, 0]
    p.target = p.target.where(p.target < 0, allowed[p.target % len(allowed)])


def odd_problem(change=None, given=None, n=9, v=40, d=16, tolerance=3e-6, **kwargs) -> tuple[Problem, dict, float]:
    """A float32 problem, its options, the tolerance. change: of the problem. given: options that follow from it"""
    p = problem(n, v, d, dtype=torch.float32)
    if change is not None:
        change(p)
    return p, {**kwargs, **(given(p) if given else {})}, tolerance


def spoil(p: Problem, value: float) -> None:
    """Let ignored tokens hold this; no result may."""
    p.e[p.target < 0] = value


odd = partial(partial, odd_problem)  # a call of it, for later
ODD = {
    "one token": odd(n=1, v=7, d=3),
    "no shape a multiple": odd(n=17, v=65, d=61),
    "weight and bias frozen": odd(grad=(True, False, False)),
    "input and bias frozen": odd(grad=(False, True, False)),
    "input and weight frozen": odd(grad=(False, False, True)),
    "a filter": odd(filter_eps=1e-3),
    "an ignore_index inside the vocabulary": odd(lambda p: p.target.masked_fill_(p.target < 0, 5), ignore_index=5),
    # the exponentials overflow with the first estimate of their offset, so those rows are recomputed
    "a logit far above": odd(lambda p: p.b[3].add_(1000.0), n=20, tolerance=1e-4),
    "a logit beyond 1e30": odd(lambda p: p.b[3].fill_(1e35)),
    # float32 resolves logits near 1000 to 6e-5
    "all logits large": odd(lambda p: p.b.add_(1e3), tolerance=3e-4),
    "all logits small": odd(lambda p: p.b.sub_(1e3), tolerance=3e-4, label_smoothing=0.2),
    **{f"logits of -inf, {which}": odd(partial(mask, rows=rows), n=5, v=257) for which, rows in MASKED.items()},
    "nan in ignored tokens": odd(partial(spoil, value=math.nan), partial(options, "weighted smoothing")),
    "inf in ignored tokens": odd(partial(spoil, value=math.inf), partial(options, "all")),
    # the kernels read both with stride 1
    "strided targets": odd(lambda p: setattr(p, "target", torch.stack([p.target, 0 * p.target], 1)[:, 0])),
    "a strided weight": odd(None, lambda p: {"weight": torch.rand(40, 2)[:, 0] + 0.2}, label_smoothing=0.3),
    "an infinite class weight": odd(
        None, lambda p: {"weight": torch.full((40,), torch.inf).index_fill(0, p.target.clamp(0), 1.0)}
    ),
    "an infinite token weight": odd(None, lambda p: {"token_weight": torch.ones(9).where(p.target >= 0, torch.inf)}),
    # a tight one saturates: its tanh is within a few roundings of 1
    **{f"softcap {size}": odd(softcap=size, tolerance=TIGHT.get(size, 3e-6)) for size in SOFTCAPS},
}
"""Operands and options that a head may stumble over."""


def upstream_for(loss: Tensor) -> Tensor:
    """An upstream gradient: 1.7, or for per-token losses a column of a matrix, which is not contiguous."""
    if loss.dim() == 0:
        return torch.full_like(loss, 1.7)
    g = torch.Generator().manual_seed(2)
    return torch.randn(*loss.shape, 3, generator=g, dtype=torch.float64).to(loss)[..., 1]


def run(head: str, p: Problem, upstream: Tensor | None = None, grad=(True, True, True), **kwargs) -> list[Tensor]:
    """[loss, de, dw, db]: db only with a bias; a gradient not asked for is left out."""
    operands = [t.detach().requires_grad_(wanted) for t, wanted in zip((p.e, p.w), grad, strict=False)]
    bias = None if p.b is None else p.b.detach().requires_grad_(grad[2])
    loss = linear_cross_entropy(*operands, p.target, head=head, linear_bias=bias, **kwargs)
    if loss.dim():
        loss *= 1.0  # losses may be changed in place
    wanted = [t for t in (*operands, bias) if t is not None and t.requires_grad]
    given = upstream_for(loss) if upstream is None else upstream
    return [loss.detach(), *torch.autograd.grad(loss, wanted, given)]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Assert that each tensor's largest difference is at most `tolerance` times the largest magnitude wanted."""
    for g, w in zip(got, want, strict=True):
        g, w = g.double(), w.double()
        torch.testing.assert_close(g, w, rtol=0.0, atol=tolerance * float(w.abs().max()) + 1e-300)


def error_bounds(name: str, own: dict) -> dict[str, float]:
    """Bounds on the 16-bit errors of `chunked` and `fused`, relative to `full`'s. By sequence, dW is rounded once per
    chunk: if the square of the sum grows evenly, 8 chunks give Σ k/8 = 4.5 times the squared error of one rounding, or
    2.12 times the error. The rounding of the logits, common to all, hides this but under a softcap, which is flat."""
    by_sequence = own.get("by", "sequence") == "sequence"
    return {"loss": 1.05, "de": 1.05, "dw": 2.12 if by_sequence and name in ("softcap", "all") else 1.5, "db": 1.5}


def assert_no_worse(got: list[Tensor], usual: list[Tensor], exact: list[Tensor], bounds: dict[str, float]) -> None:
    """Assert that the errors of loss and gradients are within `bounds` times the usual ones."""
    for (what, bound), g, u, x in zip(bounds.items(), got, usual, exact, strict=False):
        assert g.dtype == u.dtype
        error, least = ((t.double() - x).norm() for t in (g, u))
        assert error <= bound * least + 1e-6 * x.norm(), f"{what}: {error / least:.3f} times the usual error"


def assert_compiles(call: Callable[..., Tensor], given: tuple[Tensor, ...], *more: Any, **how: Any) -> None:
    """Assert that losses `call(*given, *more)` and their gradients, for an upstream one of 0.3, stay as they are."""
    found = []
    for f in (call, torch.compile(call, **how)):
        operands = [t.detach().clone().requires_grad_() for t in given]
        loss = f(*operands, *more).sum()
        found.append([loss.detach(), *torch.autograd.grad(loss, operands, torch.full_like(loss, 0.3))])
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    assert_close(*found, 1e-6)


def spread(draw: random.Random, tensor: Tensor) -> Tensor:
    """The tensor, at times with other strides or in the middle of a storage."""
    kind = draw.choice(["as it is", "as it is", "columns first", "every other column", "an odd offset"])
    if kind == "columns first":
        return tensor.t().contiguous().t()
    if kind == "every other column":
        wide = tensor.new_empty(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]
        return wide.copy_(tensor)
    if kind == "an odd offset":
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    return tensor


def drawn(draw: random.Random, head: str, most: tuple[int, int, int], device: str) -> tuple[Problem, dict, dict]:
    """Operands of at most these sizes (tokens, vocabulary, hidden size); arguments of `run`, and the head's own."""
    n, v, d = (1 + int(size * draw.random() ** 3) for size in most)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    p = problem(n, v + 1, max(d, 8), dtype=dtype, bias=draw.random() < 0.5, seed=draw.randrange(10**6), device=device)
    if draw.random() < 0.3:  # a few frequent targets
        p.target.copy_(torch.where(p.target < 0, p.target, p.target % min(v, 3)))
    p.e, p.w = spread(draw, p.e), spread(draw, p.w)
    given: dict[str, Any] = {"reduction": draw.choice(REDUCTIONS)}
    if head == "chunked" and dtype == torch.float16 and given["reduction"] == "mean":
        given["reduction"] = "sum"  # small gradients of a mean are lost, as its docstring says
    for name in draw.sample(SINGLE, draw.choice([0, 0, 1, 2, 3])):
        given |= options(name, p)
    if "softcap" in given:
        given["softcap"] = draw.choice([4.0, 30.0, 1e5])  # a tighter one saturates
    grads = [draw.random() < 0.8 for _ in range(3)]
    given["grad"] = tuple(grads) if any(grads[:2]) else (True, True, True)
    own = draw.choice(OWN[head]) or {"workspace": draw.choice([None, None, "1MiB", "40MiB"])}
    return p, given, own


def check(seed: int, head: str, most: tuple[int, int, int], device: str) -> None:
    """Losses, gradients and statistics are as exact as 16 bits let `full` be, or float32 lets anything be."""
    p, given, own = drawn(random.Random(seed), head, most, device)
    told = {k: v for k, v in (given | own).items() if not isinstance(v, Tensor)} | {"dtype": p.e.dtype, "seed": seed}
    exact, usual = run("full", p.to(torch.float64), **given), run("full", p, **given)
    try:
        got = run(head, p, **given, **own)
    except T1Error as error:
        assert "the least that works" in str(error), told
        return
    del given["grad"]
    with torch.no_grad():  # the loss alone is computed otherwise
        call = partial(linear_cross_entropy, p.e, p.w, p.target, linear_bias=p.b, return_stats=True, **given)
        (alone, found), (_, wanted) = call(head=head, **own), call(head="full")
    for what, g, u, x in zip(range(5), (alone, *got), (usual[0], *usual), (exact[0], *exact), strict=False):
        assert g.dtype == u.dtype and g.isfinite().all(), (what, told)
        error, least = ((t.double() - x).norm() for t in (g, u))
        # Few values may all be rounded unluckily; a float32 sum of 50,000 terms, one after another, is off by 1.5e-5.
        once = max(torch.finfo(g.dtype).eps, 4e-5) * x.norm()
        assert error <= 2.5 * least + once + 1e-6, (what, float(error / x.norm()), float(least / x.norm()), told)
    for a, b in zip(found[:2], wanted[:2], strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=1e-3 if p.e.dtype == torch.float32 else 0.1), told


def least_of(call: Callable[..., Any]) -> int:
    """The least workspace, as refusals name it of one byte and of one byte less than that."""

    def named(workspace: int) -> int:
        message = refused(lambda: call(workspace=workspace))
        return int(re.search(r"the least that works is ([0-9]+) bytes", message)[1])

    least = named(1)
    assert named(least - 1) == least
    return least


class Recorder(TorchDispatchMode):
    """Notes the matrices of matrix products, operators that make the host wait, and every result's size and dtype."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.products, self.waits, self.made = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            self.products.append([*(a for a in args if isinstance(a, Tensor) and a.dim() == 2), out])
        mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if mask or name in self.WAITING:
            self.waits.append(name)
        results = out if isinstance(out, (tuple, list)) else (out,)
        self.made += [(t.numel(), t.dtype) for t in results if isinstance(t, Tensor)]
        return out
