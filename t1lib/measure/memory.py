"""Memory: the allocator's own history, exact peaks on the device and on the host, pinned bytes."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from t1lib.memory import _registered

# How the size of an event in the allocator's history changes the bytes allocated, and reserved.
CHANGES = {"alloc": (1, 0), "free_completed": (-1, 0), "segment_alloc": (0, 1), "segment_map": (0, 1)}
CHANGES |= {"segment_free": (0, -1), "segment_unmap": (0, -1)}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under `tensors` (views and tied weights count once)."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class AllocatorTimeline:
    """Every allocation and release within a `with` block, from the allocator's history: exact, without polling.

    points  [(ms since entry, bytes allocated, bytes reserved or, on a CPU, None)]

    On CUDA it counts the bytes requested, without the allocator's rounding (up to a few per cent less than
    `max_memory_allocated`). On a CPU it reads the profiler's memory events of this thread, and `baseline` states how
    many bytes were live at entry. Recording slows down small operations: take times from another pass.
    """

    def __init__(self, device: torch.device | str, baseline: int = 0) -> None:
        self.device, self.baseline = torch.device(device), baseline
        self.points: list[tuple[float, int, int | None]] = []

    def __enter__(self) -> "AllocatorTimeline":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.baseline = torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
            self._held = torch.cuda.memory_reserved(self.device)
            torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all of its own: it would note each start and stop
            cpu = torch.profiler.ProfilerActivity.CPU
            self._profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
            self._profile.__enter__()
        self._start_us = time.time_ns() / 1e3
        return self

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            trace = torch.cuda.memory._snapshot()["device_traces"][self.device.index or 0]
            torch.cuda.memory._record_memory_history(enabled=None)
            events, reserved = [(e["time_us"], e["action"], e["size"]) for e in trace], self._held
        else:
            self._profile.__exit__(*exc)
            found = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            found.sort(key=lambda e: e.start_ns())
            events, reserved = [(e.start_ns() / 1e3, "alloc", e.nbytes()) for e in found], None
        allocated = self.baseline
        self.points = [(0.0, allocated, reserved)]
        for time_us, action, size in events:
            if action in CHANGES:
                live, held = CHANGES[action]
                allocated += live * size
                reserved = None if reserved is None else reserved + held * size
                self.points.append(((time_us - self._start_us) / 1e3, allocated, reserved))

    @property
    def peak(self) -> int:
        """Most bytes allocated."""
        return max(allocated for _, allocated, _ in self.points)


class HostPeak:
    """Exact peak of this process's resident memory since this object was made, by Linux's own mark."""

    def __init__(self) -> None:
        self.exact = False
        with suppress(OSError):
            self.exact = Path("/proc/self/clear_refs").write_text("5") > 0

    def read(self) -> float:
        """The peak in bytes; NaN where it is not `exact`, as elsewhere than on Linux."""
        if not self.exact:
            return float("nan")
        return float(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def pinned_bytes() -> int:
    """Bytes of host memory pinned by this process: the kit's own buffers and PyTorch's pinned allocator."""
    stats = torch.cuda.memory.host_memory_stats() if torch.cuda.is_available() else {}
    return sum(_registered.values()) + stats.get("allocated_bytes.current", 0)
