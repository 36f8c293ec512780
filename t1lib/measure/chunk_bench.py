"""An output layer measured in one process: time interleaved with its floor, exact memory, errors, ignored tokens.

The notebook `chunks` runs this, and `t1m3` a `HeadSession` for each head. One process is enough for its memory claims:
the allocator's own history counts the bytes that a call requests, whatever was cached before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t1lib.errors import UnavailableError
from t1lib.heads import linear_cross_entropy
from t1lib.heads.fused import kernels_run
from t1lib.heads.fused_plan import TILES, device_of
from t1lib.measure.floors import products_ms
from t1lib.measure.isolate import is_out_of_memory
from t1lib.measure.memory import AllocatorTimeline, storage_bytes
from t1lib.measure.progress import progress
from t1lib.measure.records import Records
from t1lib.measure.relative import relative_error
from t1lib.measure.timing import LeadIn, phases_ms, rounds, time_ms

IGNORED = -100


@dataclass(frozen=True)
class Call:
    """How a head is called: its name, the reduction, and options of `linear_cross_entropy` (`chunks`, `by`, …)."""

    head: str
    reduction: str = "mean"
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, e: Tensor, w: Tensor, y: Tensor, **given: Any) -> Tensor:
        """The loss of e (N, D), w (V, D), y (N)."""
        return linear_cross_entropy(e, w, y, head=self.head, reduction=self.reduction, **self.options, **given)


class Result(NamedTuple):
    """What a call returns: loss () or (N), dE (N, D), dW (V, D)."""

    loss: Tensor
    dE: Tensor
    dW: Tensor


class OutputLayer:
    """Random hidden states e (N, D), weight w (V, D), targets y (N), and an upstream gradient (N) for reduction "none".

    `exact` computes with head `chunked` in the dtype `reference` ("float64", or "float32" where that is too slow).
    Every timed sample is queued behind `lead`, by default the layer's own `LeadIn`.
    """

    def __init__(
        self, *, tokens: int, vocabulary: int, hidden: int, dtype: str, device: str, seed: int = 0,
        reference: str = "float64", lead: LeadIn | None = None,
    ) -> None:  # fmt: skip
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.reference = getattr(torch, reference)
        torch.manual_seed(seed)
        self.e = torch.randn(tokens, hidden, device=self.device).to(self.dtype).requires_grad_()
        self.w = (torch.randn(vocabulary, hidden, device=self.device) * 0.02).to(self.dtype).requires_grad_()
        self.y = torch.randint(vocabulary, (tokens,), device=self.device)
        self.upstream = torch.rand(tokens, device=self.device) + 0.5
        self._results: tuple[Tensor, Tensor, Tensor] | None = None
        self.lead = lead or LeadIn(self.device)

    def padding(self, sequences: int) -> Tensor:
        """(N) bool: True for valid tokens. The tokens form `sequences`, whose first and last quarters are ignored.

        The first quarter stands for a prompt, the last for padding.
        """
        place = torch.arange(len(self.e), device=self.device)
        length = -(-len(self.e) // sequences)
        return (place % length >= length // 4) & (place % length < length - length // 4)

    def masked(self, valid: Tensor) -> Tensor:
        """Targets (N), set to `IGNORED` where not `valid`."""
        return self.y.masked_fill(~valid, IGNORED)

    def chunk_tokens(self, call: Call) -> int:
        """Tokens in a chunk of a call that sets `chunks`; the kernels of `fused` round up to whole tiles of rows."""
        tokens = -(-len(self.e) // call.options["chunks"])
        if call.head == "fused" and kernels_run(self.e):
            tile = TILES[device_of(self.device).kind, self.e.element_size()].m
            tokens = -(-tokens // tile) * tile
        return min(tokens, len(self.e))

    def _backward(self, loss: Tensor, upstream: Tensor) -> None:
        loss.backward(upstream.to(loss.dtype) if loss.dim() else None)

    def times(self, call: Call, target: Tensor | None = None, alone: bool = False) -> dict[str, float]:
        """Times in ms, as `t1lib.measure.timing.phases_ms` returns them.

        alone: also time the loss without autograd (`eval`).
        """
        self.e.grad = self.w.grad = None
        y = self.y if target is None else target
        loss = partial(call, self.e, self.w, y)
        times = phases_ms(loss, lambda loss: self._backward(loss, self.upstream), self.device, self.lead)
        if alone:
            with torch.no_grad():
                times["eval"] = time_ms(lambda: call(self.e, self.w, y), self.device, self.lead)
        return times

    def product_times(self) -> dict[str, float]:
        """Times in ms of the three matrix products."""
        e, w = self.e.detach(), self.w.detach()
        if self._results is None:
            self._results = e @ w.T, torch.empty_like(e), torch.empty_like(w)
        return products_ms(e, w, self._results, self.lead)

    def floor_times(self) -> dict[str, float]:
        """The product times, and the time in ms to copy w on the device (`copy`)."""
        times = self.product_times()
        return times | {"copy": time_ms(lambda: self._results[2].copy_(self.w.detach()), self.device, self.lead)}

    def memory(self, call: Call) -> dict[str, int]:
        """Bytes beyond the inputs: `workspace`, the peak minus the two gradients that must exist; `kept`, what stays
        allocated between forward and backward (including the gradients, if the forward computes them)."""
        self.e.grad = self.w.grad = None
        inputs = storage_bytes([self.e, self.w, self.y, self.upstream])
        with AllocatorTimeline(self.device, inputs) as forward:
            loss = call(self.e, self.w, self.y)
        kept = forward.points[-1][1] - forward.baseline
        with AllocatorTimeline(self.device, inputs + kept) as backward:
            self._backward(loss, self.upstream)
        peaks = forward.peak.allocated - forward.baseline, backward.peak.allocated - backward.baseline + kept
        return {"workspace": max(peaks) - self.e.nbytes - self.w.nbytes, "kept": kept}

    def result(self, call: Call, valid: Tensor | None = None, dtype: torch.dtype | None = None, **given: Any) -> Result:
        """Loss and gradients of a call in `dtype`, on the tokens in `valid` alone (as if there were no others).

        given: `target`, which replaces the layer's own targets, or `token_weight`.
        """
        rows = slice(None) if valid is None else valid
        e, w = (t.detach().to(dtype or self.dtype).requires_grad_() for t in (self.e[rows], self.w))
        target = given.pop("target", self.y)[rows]
        loss = call(e, w, target, **given)
        self._backward(loss, self.upstream[rows])
        return Result(loss.detach(), e.grad, w.grad)

    def exact(self, reduction: str, valid: Tensor | None = None) -> Result:
        """Loss and gradients in the reference's dtype."""
        return self.result(Call("chunked", reduction, {"chunks": 16}), valid, self.reference)

    def errors(self, call: Call, exact: Result) -> dict[str, float]:
        """Relative errors of loss, dE and dW."""
        return {f"error_{k}": v for k, v in compare(self.result(call), exact).items()}

    def padding_errors(self, call: Call, valid: Tensor, exact: Result) -> dict[str, float]:
        """Errors of a call that ignores tokens; `exact` is the reference result without these tokens.

        leaks       number of nonzero values among the losses and gradients of ignored tokens
        padded_*    difference between the call with ignored targets and the same head on the valid tokens alone
        weighted_*  the same, with the tokens ignored by a token weight of 0 instead of an ignored target
        error_*     of the call with ignored targets, against `exact`
        """
        alone = self.result(call, valid)
        ways = {"padded": {"target": self.masked(valid)}, "weighted": {"token_weight": valid.float()}}
        found: dict[str, float] = {"leaks": 0.0}
        for way, given in ways.items():
            loss, de, dw = self.result(call, **given)
            outside = [de[~valid]] + ([loss[~valid]] if loss.dim() else [])
            found["leaks"] += sum(int(torch.count_nonzero(part)) for part in outside)
            inside = Result(loss[valid] if loss.dim() else loss, de[valid], dw)
            found |= {f"{way}_{k}": v for k, v in compare(inside, alone).items()}
            if way == "padded":
                found |= {f"error_{k}": v for k, v in compare(inside, exact).items()}
        return found


class HeadSession(OutputLayer):
    """An output layer that one head computes, for a process of its own (`t1lib.measure.isolate`).

    options  of the head: `chunks`, `workspace`, …
    """

    def __init__(
        self, *, head: str, tokens: int, vocabulary: int, hidden: int, dtype: str, device: str, seed: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(tokens=tokens, vocabulary=vocabulary, hidden=hidden, dtype=dtype, device=device, seed=seed)
        self.call = Call(head, options=options)

    def step(self) -> dict[str, float]:
        """Times in ms of the phases."""
        return self.times(self.call)

    def workspace(self) -> int:
        """Peak bytes beyond the inputs and the two gradients."""
        return self.memory(self.call)["workspace"]

    def error(self) -> dict[str, float]:
        """Relative errors of loss, dE and dW against the reference."""
        errors = compare(self.result(self.call), self.exact("mean"))
        self.e.grad = self.w.grad = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return errors

    def floor(self) -> float:
        """Time in ms of the three matrix products: the sum of their medians."""
        samples = [self.product_times() for _ in range(6)][1:]
        return sum(median(sample[name] for sample in samples) for name in samples[0])


def compare(found: Result, exact: Result) -> dict[str, float]:
    """Relative differences of loss, dE and dW: ‖found − exact‖ / ‖exact‖, in float64."""
    return {name: relative_error(a, b) for name, a, b in zip(Result._fields, found, exact, strict=True)}


def admit(records: Records, variant: str, phase: str, measure: Callable[[], dict[str, float]], bound: float) -> bool:
    """Record the errors that `measure` returns; True if the variant may be timed: it ran, no error exceeds `bound`.

    Its status becomes `ok`, `wrong`, `oom` or `unavailable`.
    """
    try:
        errors = measure()
    except UnavailableError:
        records.status(variant, "unavailable", phase)
        return False
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        errors = None
    if errors is None:  # outside the handler, whose exception still references the failed call's tensors
        _out_of_memory(records, variant, phase)
        return False
    for name, value in errors.items():
        records.add(variant, name, value, "", phase)
    sound = all(value <= bound for value in errors.values())  # false for NaN
    records.status(variant, "ok" if sound else "wrong", phase)
    return sound


Runners = dict[tuple[str, str], Callable[[], dict[str, float]]]


def take_turns(records: Records, runners: Runners, repeats: int, warmup: int) -> None:
    """Run the measurements of each (variant, phase) in `rounds`, and record their times after the warm-up.

    A measurement that runs out of memory next to the others gets the status `oom` and is dropped.
    """
    running = dict(runners)
    in_turn = progress(rounds(list(runners), warmup + repeats), "rounds", warmup + repeats)
    for step, turns in enumerate(in_turn, -warmup):
        for variant, phase in turns:
            if (variant, phase) not in running:
                continue
            try:
                times = running[variant, phase]()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                times = None
            if times is None:
                _out_of_memory(records, variant, phase)
                del running[variant, phase]
            elif step >= 0:
                for name, ms in times.items():
                    records.add(variant, f"{name}_ms", ms, "ms", phase, step)


def _out_of_memory(records: Records, variant: str, phase: str) -> None:
    records.status(variant, "oom", phase)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
