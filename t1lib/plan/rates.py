"""A machine's rates, from which times are predicted: those of an H200, or measured in under a minute."""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from t1lib.files import cache_folder, write_json
from t1lib.memory import pinned_zeros
from t1lib.models import build_model, layer_arguments, split
from t1lib.plan.work import SHORT


@dataclass(frozen=True)
class Machine:
    """Rates that a machine reaches in practice.

    link_in, link_out    bytes/s over the link, with copies in both directions at once
    update               bytes/s that the host's optimizer updates move while a step runs
    flops, attention     operations/s of large matrix products, and of causal attention over long rows
    memory               bytes/s of the device's elementwise operations
    launch_ms, graph_ms  host time to launch an eager layer's forward, and a CUDA graph
    """

    name: str = "H200"
    link_in: float = 50e9
    link_out: float = 50e9
    update: float = 40e9
    flops: float = 700e12
    attention: float = 570e12
    memory: float = 1.5e12
    launch_ms: float = 1.0
    graph_ms: float = 0.23


H200 = Machine()
GRAPHED = H200.graph_ms / H200.launch_ms  # launch time of a graph, relative to an eager layer's
PRACTICE = {"update": 0.55, "flops": 0.9, "attention": 0.84, "memory": 0.36}
"""Share of the rate of a single large update, product or copy that a training step reaches."""
ROUNDS = 7
PAUSE = 0.3  # seconds between rounds: what slows a shared host down lasts for tenths of a second
PARAMETERS = 2**24  # of the update that is measured
ADAMW = 28  # bytes that a fused AdamW in float32 moves per parameter: reads four tensors, writes three


def device_name() -> str:
    """Name of the first GPU or, without CUDA, of the CPU."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()


def machine_file() -> Path:
    return cache_folder() / "machine.json"


def this_machine() -> Machine:
    """The rates that `calibrate` found for this device, else an H200's."""
    try:
        found = Machine(**json.loads(machine_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return H200
    return found if found.name == device_name() else H200


def measured_here(machine: Machine) -> bool:
    """Whether these are this device's own rates."""
    return device_name() in (machine.name, f"NVIDIA {machine.name}")


def calibrate(device: torch.device) -> Machine:
    """Measure this machine and keep its rates for `this_machine`. Raises `T1Error` where they cannot be written."""
    found = measure_machine(device)
    write_json(machine_file(), asdict(found))
    return found


def measure_machine(device: torch.device) -> Machine:
    """This machine's rates, measured in a few seconds; on a CPU, "the device" is the CPU as well.

    Each rate is the median of `ROUNDS` rounds, because a burst of other work on the host can double the time of a
    launch (measured: 0.87 ms, in bursts 1.4 to 1.9).
    """
    measures, rounds = _measures(device), []
    for _ in range(ROUNDS):
        rounds.append({name: measure() for name, measure in measures.items()})
        time.sleep(PAUSE)
    found = {name: PRACTICE.get(name, 1.0) * median(one[name] for one in rounds) for name in measures}
    link = found.pop("link")
    graph = GRAPHED * found["launch_ms"]
    return Machine(name=device_name(), link_in=link, link_out=link, graph_ms=graph, **found)


def _measures(device: torch.device) -> dict[str, Callable[[], float]]:
    """What measures each of a machine's rates once, before the factor in `PRACTICE`; "link" is that of either way."""
    cuda = device.type == "cuda"
    dtype, size = (torch.bfloat16, 8192) if cuda else (torch.float32, 512)
    big = torch.empty(2**28 if cuda else 2**22, device=device)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    return {
        "link": _link(device, 2**26 if cuda else 2**22),
        "update": _update(),
        "flops": lambda: 2e3 * size**3 / _median_ms(lambda: torch.mm(matrix, matrix), device),
        "attention": _attention(device, dtype),
        "memory": lambda: 2e3 * big.nbytes / _median_ms(lambda: big.add_(1), device),
        "launch_ms": _launches(device, dtype),
    }


def _median_ms(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Median time of a call in ms until the device is idle again, after one that does not count."""
    samples = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - begun) * 1e3)
    return median(samples[1:])


def _link(device: torch.device, nbytes: int) -> Callable[[], float]:
    """What measures the bytes/s of each direction with copies in both at once; on a CPU, of plain copies."""
    host = [pinned_zeros(nbytes, torch.uint8, device) for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    lanes = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]

    def both() -> None:
        for lane, to, source in zip(lanes, (there[0], host[1]), (host[0], there[1]), strict=True):
            with torch.cuda.stream(lane):  # none: does nothing
                for _ in range(4):
                    to.copy_(source, non_blocking=True)

    return lambda: 4e3 * nbytes / _median_ms(both, device)


def _update() -> Callable[[], float]:
    """What measures the bytes/s of a fused AdamW on the host."""
    weight = torch.zeros(PARAMETERS, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return lambda: ADAMW * 1e3 * PARAMETERS / _median_ms(optimizer.step, torch.device("cpu"))


def _launches(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """What measures the host time in ms to launch the forward of a small layer on a few tokens, without waiting for the
    device."""
    parts = split(build_model("tiny", dtype=dtype, device=device, num_hidden_layers=1))
    hidden = torch.zeros(1, 16, parts.norm.weight.numel(), dtype=dtype, device=device, requires_grad=True)
    hidden, arguments = layer_arguments(parts, hidden)

    def measure() -> float:
        samples = []
        for _ in range(40):
            begun = time.perf_counter()
            parts.layers[0](hidden, **arguments[0])
            samples.append((time.perf_counter() - begun) * 1e3)
        return median(samples[10:])

    return measure


def _attention(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """What measures the operations/s of causal attention over long rows, on one row and corrected by `SHORT`."""
    heads, tokens, width = (16, 8192, 128) if device.type == "cuda" else (4, 256, 16)
    q = torch.randn(1, heads, tokens, width, device=device, dtype=dtype)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
    return lambda: 2e3 * heads * tokens * (tokens + SHORT) * width / _median_ms(attend, device)
