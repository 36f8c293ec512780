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
    return Machine(device_name(), link, link, graph_ms=GRAPHED * found["launch_ms"], **found)


def _measures(device: torch.device) -> dict[str, Callable[[], float]]:
    """What measures each of a machine's rates once, before the factor in `PRACTICE`; "link" is that of either way."""
    cuda, cpu = device.type == "cuda", torch.device("cpu")
    dtype, size, nbytes = (torch.bfloat16, 8192, 2**28) if cuda else (torch.float32, 512, 2**22)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    big = torch.zeros(nbytes // 4, device=device)
    both_ways = _copies(device, big)
    heads, tokens, width = (16, 8192, 128) if cuda else (4, 256, 16)
    q = torch.randn(1, heads, tokens, width, device=device, dtype=dtype)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
    weight = torch.zeros(PARAMETERS, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    parts = split(build_model("tiny", dtype=dtype, device=device, num_hidden_layers=1))
    hidden = torch.zeros(1, 16, parts.norm.weight.numel(), dtype=dtype, device=device, requires_grad=True)
    hidden, arguments = layer_arguments(parts, hidden)
    return {
        "link": lambda: nbytes / _median_ms(both_ways, device) * 1e3,
        "update": lambda: ADAMW * PARAMETERS / _median_ms(optimizer.step, cpu) * 1e3,
        "flops": lambda: 2 * size**3 / _median_ms(lambda: torch.mm(matrix, matrix), device) * 1e3,
        "attention": lambda: 2 * heads * tokens * (tokens + SHORT) * width / _median_ms(attend, device) * 1e3,
        "memory": lambda: 2 * nbytes / _median_ms(lambda: big.add_(1), device) * 1e3,
        # On the CPU's clock: the device may still be busy when a launch returns.
        "launch_ms": lambda: _median_ms(lambda: parts.layers[0](hidden, **arguments[0]), cpu, 30),
    }


def _median_ms(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Median time of a call in ms until `device` is idle again, after one that does not count."""
    samples = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - begun) * 1e3)
    return median(samples[1:])


def _copies(device: torch.device, there: torch.Tensor) -> Callable[[], None]:
    """What copies as many bytes as `there` has in each direction of the link, both at once."""
    pairs = [(there, pinned_zeros(len(there), there.dtype, device))]
    pairs.append((pinned_zeros(len(there), there.dtype, device), torch.zeros_like(there)))
    lanes = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in pairs]

    def both() -> None:
        for lane, (to, source) in zip(lanes, pairs, strict=True):
            with torch.cuda.stream(lane):  # None: does nothing
                to.copy_(source, non_blocking=True)

    return both
