"""Measuring: timers, memory, floors, a process for every variant, records and manifest.

Tools for measuring any training loop:

    PhaseTimer          wall time of a step and of its phases, with one synchronisation at the end
    Trace               spans of work on parallel lanes during one instrumented step
    AllocatorTimeline   every allocation of a step, from the allocator's own history
    HostPeak            exact peak of the process's resident memory
    pinned_bytes        host memory pinned by this process
    measure_link        rates of copies between pinned host memory and the device
    environment         versions and hardware, without host or user names
"""

from t1lib.measure.environment import environment
from t1lib.measure.floors import Link, measure_link
from t1lib.measure.memory import AllocatorTimeline, HostPeak, Peak, pinned_bytes
from t1lib.measure.timing import interleaved_ms
from t1lib.timing import PhaseTimer, Span, Trace

__all__ = [
    "AllocatorTimeline",
    "HostPeak",
    "Link",
    "Peak",
    "PhaseTimer",
    "Span",
    "Trace",
    "environment",
    "interleaved_ms",
    "measure_link",
    "pinned_bytes",
]
