"""Output layers on given operands: error against a wide reference, time next to the products' floors, workspace."""

import gc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import UnavailableError, choose
from t1lib.heads import linear_cross_entropy
from t1lib.measure.floors import products_ms
from t1lib.measure.head_cases import Case, Shape
from t1lib.measure.head_data import operands
from t1lib.measure.isolate import is_out_of_memory
from t1lib.measure.memory import AllocatorTimeline, storage_bytes
from t1lib.measure.peers import PEERS, loss_function
from t1lib.measure.relative import relative_error
from t1lib.measure.softmax import sparsity
from t1lib.measure.timing import LeadIn, phases_ms, rounds, time_ms
from t1lib.timing import synchronize

REFERENCES = ("float64", "float32")
CHUNK_BYTES = 2**30  # most bytes of logits in a chunk of the reference


class HeadBench:
    """Operands of one shape, and measurements of any case on them in this process.

    data       "flat", "peaked" or "real", as `operands` makes them; `path` is for "real"
    reference  dtype of the reference for errors: float64, or float32 (without TF32) where float64 is too slow
    before     bytes that the device held before anything was measured; by default, what it holds at construction
    """

    def __init__(
        self, *, shape: Shape, dtype: str, device: str, data: str = "flat", path: str | None = None, seed: int = 0,
        reference: str = "float64", before: int | None = None,
    ) -> None:  # fmt: skip
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.wide = getattr(torch, choose("reference", reference, REFERENCES))
        if self.device.type == "cuda":
            self._warm_cublas()
            held = torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
            self.before = held if before is None else before
        else:  # the profiler sees only what is allocated after its start
            self.before = 0
        self.e, self.w, self.y = operands(data, shape, self.dtype, self.device, seed, path)
        (self.tokens, self.hidden), self.vocabulary = self.e.shape, self.w.shape[0]
        self._functions: dict[str, Callable[..., Any]] = {}
        self._plain_reference: dict[str, Tensor] = {}

    def _warm_cublas(self) -> None:
        """Let cuBLAS allocate its workspaces: one for the forward's thread, one for the thread that runs backwards."""
        a = torch.ones(64, 64, device=self.device, dtype=self.dtype, requires_grad=True)
        (a @ a).sum().backward()
        synchronize(self.device)

    # -- a case's call -----------------------------------------------------------------------------------------------

    def _draw(self, *size: int) -> Tensor:
        """Uniform random numbers in [0, 1), float32, the same for every case."""
        return torch.rand(*size, generator=torch.Generator().manual_seed(7)).to(self.device)

    def _arguments(self, case: Case) -> dict[str, Any]:
        """Keyword arguments for the head beyond the case's settings."""
        option = {
            "": lambda: {},
            "bias": lambda: {"linear_bias": (self._draw(self.vocabulary) - 0.5).to(self.dtype).requires_grad_()},
            "class-weight": lambda: {"weight": 0.5 + self._draw(self.vocabulary)},
            "label-smoothing": lambda: {"label_smoothing": 0.1},
            "softcap": lambda: {"softcap": 30.0},
            "z-loss": lambda: {"z_loss": 1e-4},
            "token-weight": lambda: {"token_weight": self._draw(self.tokens)},
            "stats": lambda: {"return_stats": True},
        }[case.option]()
        return option | ({"reduction": "none"} if case.upstream else {})

    def _targets(self, case: Case) -> Tensor:
        return torch.where(self._draw(self.tokens) < case.ignored, -100, self.y) if case.ignored else self.y

    def _call(self, case: Case) -> Callable[[], Tensor]:
        """The case's loss as a function without arguments; its tensors are made here, outside the measurement."""
        own = f"{case.method} {case.settings}"
        if own not in self._functions:  # cached, because making it again would recompile it
            self._functions[own] = loss_function(case.method, **case.settings)
        function, arguments, y = self._functions[own], self._arguments(case), self._targets(case)
        e, w = (self.e, self.w) if case.gradients else (self.e.detach(), self.w.detach())
        w = w.detach() if case.frozen else w
        self._inputs = [self.e, self.w, self.y, y, *(v for v in arguments.values() if isinstance(v, Tensor))]

        def call() -> Tensor:
            loss = function(e, w, y, **arguments)
            return loss[0] if case.option == "stats" else loss

        return call

    def _upstream(self, case: Case) -> Tensor | None:
        return 2 * self._draw(self.tokens) - 1 if case.upstream else None

    def _clear(self) -> None:
        self.e.grad = self.w.grad = None

    # -- errors ------------------------------------------------------------------------------------------------------

    def errors(self, case: Case) -> dict[str, float]:
        """Relative error (Frobenius) of the loss, and of dE and dW if the case computes them."""
        self._clear()
        loss, upstream = self._call(case)(), self._upstream(case)
        found = {"loss": loss.detach()}
        if case.gradients:
            loss.backward(upstream)
            found |= {"dE": self.e.grad} | ({} if case.frozen else {"dW": self.w.grad})
        wanted = self._reference(case)
        result = {name: relative_error(value, wanted[name]) for name, value in found.items()}
        self._clear()
        return result

    def _reference(self, case: Case) -> dict[str, Tensor]:
        """Loss, dE and dW in dtype `wide`, computed in chunks; the result for the plain mean is cached."""
        plain = not (case.option or case.upstream or case.ignored) or case.option == "stats"
        if plain and self._plain_reference:
            return self._plain_reference
        e, w = (t.detach().to(self.wide).requires_grad_() for t in (self.e, self.w))
        arguments = self._arguments(case)
        if "linear_bias" in arguments:
            arguments["linear_bias"] = arguments["linear_bias"].detach().to(self.wide)
        arguments.pop("return_stats", None)
        chunks = min(self.tokens, math.ceil(self.tokens * self.vocabulary * self.wide.itemsize / CHUNK_BYTES))
        loss = linear_cross_entropy(e, w, self._targets(case), head="chunked", chunks=chunks, **arguments)
        upstream = self._upstream(case)
        loss.backward(None if upstream is None else upstream.to(loss.dtype))
        result = {"loss": loss.detach(), "dE": e.grad, "dW": w.grad}
        if plain:
            self._plain_reference = result
        return result

    # -- times -------------------------------------------------------------------------------------------------------

    def prepare(self, case: Case, bound: float, warmup: int = 2) -> tuple[str, dict[str, float], str]:
        """Check whether a case may be timed; returns its status, its errors, and the reason if the status is not "ok".

        wrong: an error exceeds `bound` or is NaN. For the other statuses see `attempt`.
        """
        errors, status, reason = self.attempt(case, lambda: self.errors(case))
        if status == "ok" and not max(errors.values()) <= bound:
            status, reason = "wrong", f"an error of {max(errors.values()):.2g}, beyond {bound:g}"
        if status == "ok":
            _, status, reason = self.attempt(case, lambda: [self.step(case) for _ in range(warmup)])
        return status, errors or {}, reason

    def attempt(self, case: Case, action: Callable[[], Any]) -> tuple[Any, str, str]:
        """(what `action` returns, "ok", ""), or (None, status, reason) if the case cannot be measured here.

        oom: memory ran out; unavailable: the method cannot run here, or a peer raised some other error.
        """
        try:
            return action(), "ok", ""
        except UnavailableError as error:
            status, reason = "unavailable", str(error)
        except Exception as error:
            if not is_out_of_memory(error) and case.method not in PEERS:
                raise
            status = "oom" if is_out_of_memory(error) else "unavailable"
            reason = f"{type(error).__name__}: {error}"
        self._clear()
        if status == "oom":
            self._free()
        return None, status, (reason.strip().splitlines() or [""])[0][:200]

    def forget_reference(self) -> None:
        """Free the reference results before times or memory are measured."""
        self._plain_reference = {}
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, case: Case, lead: LeadIn | None = None) -> dict[str, float]:
        """Times in ms: `loss` alone, without autograd, or those of `t1lib.measure.timing.phases_ms`."""
        self._clear()
        call, upstream = self._call(case), self._upstream(case)
        if not case.gradients:
            with torch.no_grad():
                return {"loss": time_ms(call, self.device, lead)}
        return phases_ms(call, lambda loss: loss.backward(upstream), self.device, lead)

    def samples(self, cases: list[Case], repeats: int, turns: int = 1) -> list[tuple[str, dict[str, float]]]:
        """Samples in ms of the floors (key "floor": logits, dE, dW) and of all cases, in `repeats` rounds.

        turns: samples of the floors and of each `fused` case per round, because the bars bound ratios of these.

        Every sample is queued behind the same lead-in; the floors' three products run back to back, as in a head.
        """
        self._clear()
        lead = LeadIn(self.device)
        found = []
        e, w = self.e.detach(), self.w.detach()
        results = e @ w.T, torch.empty_like(e), torch.empty_like(w)
        often = [None, *(case for case in cases if case.method == "fused")]
        for order in rounds([None, *cases, *often * (turns - 1)], repeats):
            for case in order:
                if case is None:
                    found.append(("floor", products_ms(e, w, results, lead)))
                else:
                    found.append((case.key, self.step(case, lead)))
        self._clear()
        return found

    def sparsity(self) -> dict[str, list | float]:
        """How sparse the softmax of these operands is, by `t1lib.measure.softmax.sparsity`."""
        return sparsity(self.e, self.w, self.y)

    # -- memory ------------------------------------------------------------------------------------------------------

    def workspace(self, case: Case) -> int:
        """Peak bytes beyond the inputs and the gradients that must exist, during a second call.

        Everything else that the process holds counts, including what the first call left behind: the baseline contains
        only cuBLAS's own workspaces, which any matrix product needs.
        """
        self._clear()
        call, upstream = self._call(case), self._upstream(case)

        def run() -> None:
            if case.gradients:
                call().backward(upstream)
            else:
                with torch.no_grad():
                    call()

        must = 0
        if case.gradients:
            wanting = [t for t in self._inputs if t.requires_grad and not (case.frozen and t is self.w)]
            must = sum(t.nbytes for t in wanting)
        run()
        inputs = storage_bytes([*self._inputs, *([] if upstream is None else [upstream])])
        for tensor in self._inputs:
            tensor.grad = None
        with AllocatorTimeline(self.device, inputs) as timeline:
            run()
        self._clear()
        return timeline.peak.allocated - self.before - inputs - must


class WorkspaceBench:
    """Workspaces of one method on one shape after another, in a process that measures nothing else."""

    def __init__(self, *, device: str, dtype: str, seed: int = 0) -> None:
        self._settings: dict[str, Any] = {"device": device, "dtype": dtype, "seed": seed}

    def measure(self, shape: Shape, cases: list[Case]) -> dict[str, int | str]:
        """Key of each case → bytes, or the case's status if it could not be measured."""
        if "before" in self._settings:
            gc.collect()
        bench = HeadBench(shape=shape, **self._settings)
        self._settings["before"] = bench.before  # so what one shape leaves behind counts for the next
        found: dict[str, int | str] = {}
        for case in cases:
            nbytes, status, _ = bench.attempt(case, lambda case=case: bench.workspace(case))
            found[case.key] = nbytes if status == "ok" else status
        return found
