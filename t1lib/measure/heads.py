"""Measures output layers on one set of operands: errors against a wide reference, times in turns with those of the
three matrix products, and workspace. Notebooks describe what they measure as `Case`s of a `HeadBench`."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t1lib.errors import UnavailableError, choose
from t1lib.heads.fused import kernels_run
from t1lib.heads.fused_plan import TILES, device_of, up
from t1lib.measure.peers import PEERS, loss_function
from t1lib.measure.probes import AllocatorTimeline, lead_in, phases_ms, progress, rounds, storage_bytes
from t1lib.measure.records import Records
from t1lib.memory import is_out_of_memory

IGNORED = -100
CHUNK_BYTES = 2**30  # most bytes of logits in a chunk of the reference
PEAKED_STD = 6.0  # of the logits; for a trained model it is 5 to 8

Key = tuple[str, ...]  # variant, phase, and whatever else tells two measurements of them apart
Runner = Callable[[bool], dict[str, float]]  # measures once, behind the lead-in or not: name → ms


@dataclass(frozen=True)
class Case:
    """One way to call one method, a head of the kit or one of `PEERS`.

    settings   arguments for the head only, leaving the exact result as it is: `workspace`, `chunks`, `filter_eps`, …
    options    arguments of `linear_cross_entropy` that change the exact result: the reference gets them, too; a value
               "tokens" or "vocabulary" stands for a tensor of as many random numbers
    gradients  compute the loss and its gradients; False: the loss alone, without autograd
    frozen     the weight requires no gradient
    ignored    share of tokens to ignore, at random positions; or a mask of them, (N) bool"""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True
    frozen: bool = False
    ignored: float | Tensor = 0.0

    prefix = property(lambda self: "" if self.gradients else "loss_")  # of its metrics' names


class Call(NamedTuple):
    """A case's phases as functions, to be called in this order, and its operands, made before the measurement."""

    phases: dict[str, Callable[[], None]]  # `loss`; or `forward` and `backward`, if it computes gradients
    losses: list[Tensor]  # the first phase appends its loss here
    inputs: list[Tensor]
    wanted: dict[str, Tensor]  # dE, dW → operand whose gradient that is


class HeadBench:
    """Hidden states e (N, D), weight w (V, D) and targets y (N), made as `operands` says, and measurements of any case
    on them. reference: dtype of the reference for errors, float64, or float32 (without TF32) where that is too slow"""

    lead = cached_property(lambda self: lead_in(self.device))  # made when a time is first measured

    def __init__(
        self, *, tokens: int, vocabulary: int, hidden: int, dtype: str, device: str | torch.device,
        data: str = "flat", path: str | None = None, seed: int = 0, reference: str = "float64",
    ) -> None:  # fmt: skip
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.wide = getattr(torch, choose("reference", reference, ("float64", "float32")))
        self.e, self.w, self.y = operands(data, (tokens, vocabulary, hidden), self.dtype, self.device, seed, path)
        sizes = {"tokens": len(self.e), "vocabulary": len(self.w)}
        uniform = {name: torch.rand(size, generator=torch.Generator().manual_seed(7)) for name, size in sizes.items()}
        self.drawn = {name: (0.5 + values).to(self.device) for name, values in uniform.items()}
        self._function = cache(loss_function)  # making one again would compile it again
        self._exact: tuple[Any, dict[str, Tensor]] | None = None  # last `options` and `ignored`, their exact result

    def call(self, case: Case, dtype: torch.dtype | None = None) -> Call:
        """The phases and operands of a case, in `dtype` (default: the bench's own)."""
        dtype = dtype or self.dtype
        e = self.e.detach().to(dtype).requires_grad_(case.gradients)
        w = self.w.detach().to(dtype).requires_grad_(case.gradients and not case.frozen)
        tokens, ignored = self.drawn["tokens"], case.ignored
        y = self.y.masked_fill(ignored if isinstance(ignored, Tensor) else tokens - 0.5 < ignored, IGNORED)
        arguments = {name: self.drawn.get(value, value) for name, value in case.options.items()}
        if "linear_bias" in arguments:
            bias = arguments["linear_bias"].detach().to(self.dtype).to(dtype)
            arguments["linear_bias"] = bias.requires_grad_(case.gradients)
        function, per_token = self._function(case.method, **case.settings), case.options.get("reduction") == "none"
        losses: list[Tensor] = []

        def forward() -> None:
            with torch.set_grad_enabled(case.gradients):
                found = function(e, w, y, **arguments)
            losses.append(found[0] if case.options.get("return_stats") else found)

        def backward() -> None:
            losses[0].backward(tokens.to(losses[0].dtype) if per_token else None)

        phases = {"forward": forward, "backward": backward} if case.gradients else {"loss": forward}
        inputs = [self.e, self.w, self.y, *self.drawn.values(), e, w, y, *arguments.values()]
        return Call(phases, losses, [t for t in inputs if isinstance(t, Tensor)], {"dE": e, "dW": w})

    def result(self, case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """`loss`, () or (N), and `dE` (N, D) and `dW` (V, D) if the case computes them."""
        call = self.call(case, dtype)
        for phase in call.phases.values():
            phase()
        gradients = {name: t.grad for name, t in call.wanted.items() if t.grad is not None}
        return {"loss": call.losses[0].detach()} | gradients

    def reference(self, case: Case) -> dict[str, Tensor]:
        """The exact result of a case, in the reference's dtype; kept until another one, times or memory are needed."""
        changes = None if isinstance(case.ignored, Tensor) else (case.options, case.ignored)
        if self._exact is None or changes is None or self._exact[0] != changes:
            self._exact = None  # before another takes memory
            chunks = math.ceil(len(self.e) * len(self.w) * self.wide.itemsize / CHUNK_BYTES)
            exact = Case("chunked", {"chunks": min(len(self.e), chunks)}, case.options, ignored=case.ignored)
            self._exact = changes, self.result(exact, self.wide)
        return self._exact[1]

    def forget(self) -> None:
        """Free the reference, which would take memory from what is measured next."""
        if self._exact is not None:
            self._exact = None
            free_cached()

    def errors(self, case: Case) -> dict[str, float]:
        """Relative errors against the reference: `error_loss` and, if the case has them, `error_dE` and `error_dW`."""
        return differences("error", self.result(case), self.reference(case))

    def times(self, case: Case, lead: bool = True) -> dict[str, float]:
        """Times in ms. Without gradients: `loss`. With: `forward`, `backward`, `both` (their sum), and `host`, the time
        that the host takes to issue both. lead: measure behind the lead-in"""
        self.forget()
        times, host = phases_ms(self.call(case).phases, self.device, self.lead if lead else None)
        return times | {"both": sum(times.values()), "host": host} if case.gradients else times

    def products(self, lead: bool = True) -> dict[str, float]:
        """Times in ms of the floor, the three matrix products back to back, as in a head: `logits`, `dE`, `dW`."""
        return phases_ms(self._products, self.device, self.lead if lead else None)[0]

    @cached_property
    def _products(self) -> dict[str, Callable[[], Tensor]]:
        e, w, z = self.e, self.w, torch.empty(len(self.e), len(self.w), dtype=self.dtype, device=self.device)
        products = {"logits": (e, w.T, z), "dE": (z, w, torch.empty_like(e)), "dW": (z.T, e, torch.empty_like(w))}
        return {name: partial(torch.mm, a, b, out=out) for name, (a, b, out) in products.items()}

    def memory(self, case: Case) -> dict[str, int]:
        """Bytes of a second call: `workspace`, its peak beyond the inputs and the gradients that must exist; `kept`,
        what stays allocated between forward and backward; `beside`, what the process held before besides inputs."""
        self.forget()
        self.result(case)
        call = self.call(case)
        inputs, (first, *rest) = storage_bytes(call.inputs), call.phases.values()
        with AllocatorTimeline(self.device, inputs) as forward:
            first()
        kept, peak = forward.points[-1][1] - forward.baseline, forward.peak - forward.baseline
        for phase in rest:
            with AllocatorTimeline(self.device, inputs + kept) as backward:
                phase()
            peak = max(peak, backward.peak - backward.baseline + kept)
        must = sum(t.nbytes for t in call.inputs if t.requires_grad)
        return {"workspace": peak - must, "kept": kept, "beside": forward.baseline - inputs}

    def chunk_tokens(self, case: Case) -> int:
        """Tokens in a chunk of a case that sets `chunks`; the kernels of `fused` round up to whole tiles of rows."""
        tokens = -(-len(self.e) // case.settings["chunks"])
        if case.method == "fused" and kernels_run(self.e):
            tokens = up(tokens, TILES[device_of(self.device).kind, self.e.element_size()].m)
        return min(tokens, len(self.e))

    def attempt(self, variant: str, action: Callable[[], Any]) -> tuple[Any, str, str]:
        """Call the function `attempt`. A subclass for several processes overrides this: they have to agree."""
        return attempt(action, variant in PEERS)

    def admit(
        self, records: Records, variant: str, phase: str, case: Case, bound: float,
        measure: Callable[[], dict[str, float]] | None = None,
    ) -> bool:  # fmt: skip
        """Record a case's errors (or what `measure` returns in their place), and the variant's status; True if it may
        be timed: it ran, and no error exceeds `bound` or is NaN."""
        found, status, why = self.attempt(variant, measure or partial(self.errors, case))
        records.put(variant, phase, {f"{case.prefix}{name}": value for name, value in (found or {}).items()})
        if found is not None and not all(value <= bound for value in found.values()):
            status, why = "wrong", f"its errors are {', '.join(f'{v:.2g}' for v in found.values())}, beyond {bound:g}"
        records.status(variant, status, phase, why)
        return found is not None and status != "wrong"

    def take_turns(
        self, records: Records, runners: dict[Key, Runner], repeats: int, warmup: int, often: Iterable[Key] = ()
    ) -> None:
        """Run the measurements of each key in `rounds`, and record their times (`<name>_ms`). A key that cannot be
        measured, such as for lack of memory beside the others, gets a status and is dropped.

        warmup  rounds before these, without the lead-in, not recorded
        often   keys that get further turns in every round, one for each time that they are listed"""
        running, count = dict(runners), Counter[Key]()
        turns = [(key, False) for keys in rounds(list(runners), warmup) for key in keys]
        turns += [(key, True) for keys in rounds([*runners, *often], repeats) for key in keys]
        for key, queued in progress(turns, "turns"):
            if key not in running:
                continue
            variant, phase, *_ = key
            times, status, why = self.attempt(variant, partial(running[key], queued))
            if times is None:
                records.status(variant, status, phase, why)
                del running[key]
            elif queued:
                records.put(variant, phase, {f"{name}_ms": ms for name, ms in times.items()}, count[key])
                count[key] += 1


class Workspaces:
    """Measures the workspaces of one method, shape after shape, in a process that does nothing else. setting: the
    arguments of `HeadBench` that all shapes share"""

    def __init__(self, **setting: Any) -> None:
        self.setting, self.before = setting, 0  # on a CPU the profiler sees only what is new
        device, dtype = torch.device(setting["device"]), getattr(torch, setting["dtype"])
        if device.type == "cuda":
            a = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            (a @ a).sum().backward()  # cuBLAS makes a workspace for this thread, and one for autograd's
            del a
            torch.cuda.synchronize(device)
            self.before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]

    def measure(self, cases: list[Case], **sizes: int) -> list[int | str]:
        """Workspace of each case in bytes, or its status. Except cuBLAS's own workspaces, everything counts that the
        process holds beyond inputs and gradients, even what an earlier call or shape left behind."""
        gc.collect()
        bench = HeadBench(**self.setting, **sizes)
        found = [attempt(partial(bench.memory, case), case.method in PEERS) for case in cases]
        return [held["workspace"] + held["beside"] - self.before if held else status for held, status, _ in found]


def attempt(action: Callable[[], Any], foreign: bool = False) -> tuple[Any, str, str]:
    """(what `action` returns, "ok", ""), or (None, status, reason) if it cannot be measured here: `oom`, or
    `unavailable` for something optional that is missing or, if the code is `foreign`, for any other error."""
    try:
        return action(), "ok", ""
    except Exception as error:
        status = "oom" if is_out_of_memory(error) else "unavailable"
        if status != "oom" and not (foreign or isinstance(error, UnavailableError)):
            raise
        why = f"{type(error).__name__}: {error}".removeprefix("UnavailableError: ").splitlines()[0][:200]
    if status == "oom":  # outside the handler, whose exception still references the failed call's tensors
        free_cached()
    return None, status, why


def free_cached() -> None:
    """Give back device memory that nothing uses."""
    gc.collect()
    torch.cuda.empty_cache()


def differences(prefix: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Relative differences of results, ‖found − wanted‖ / ‖wanted‖ (Frobenius) in float64, 0 if nothing differs.
    Their keys are `<prefix>_<name>`."""
    relative = {}
    for name, value in found.items():
        above = below = 0.0
        blocks = (torch.atleast_1d(t).split(8192) for t in (value, wanted[name]))  # to avoid a float64 copy of all
        for a, b in zip(*blocks, strict=True):
            a, b = a.double(), b.double()
            above, below = above + (a - b).square().sum(), below + b.square().sum()
        relative[f"{prefix}_{name}"] = float((above / below).sqrt()) if above != 0 else 0.0
    return relative


def operands(
    data: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Hidden states (N, D), weight (V, D) and targets (N); sizes: N, V, D (of real data, its own). data:

    flat    both normal, logits of standard deviation 0.02·√D: all probabilities near 1/V, as before training
    peaked  logits of standard deviation 6, each hidden state moved towards its target's row until that logit is
            about as large as the log-sum-exp of the others: a loss of 2 to 3 nats, many probabilities near 0 or 1
    real    what `LanguageSession.held_out` (`t1lib.text.session`) has written to `path`"""
    choose("data", data, ("flat", "peaked", "real"))
    if data == "real":
        saved = torch.load(Path(path or ""), map_location=device, weights_only=True)
        return saved["e"].to(dtype), saved["w"].to(dtype), saved["y"]
    torch.manual_seed(seed)
    tokens, vocabulary, hidden = sizes
    y = torch.randint(vocabulary, (tokens,), device=device)
    e = torch.randn(tokens, hidden, device=device)
    w = torch.randn(vocabulary, hidden, device=device)
    if data == "flat":
        w = w * 0.02
    else:  # rows of length 1: adding a multiple of its target's row to a hidden state raises mainly that target's logit
        w = w / w.norm(dim=1, keepdim=True)
        e = PEAKED_STD * e
        e = e + torch.logsumexp(e[:64] @ w.T, dim=1).mean() * w[y]
    return e.to(dtype), w.to(dtype), y
