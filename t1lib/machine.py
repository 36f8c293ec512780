"""A machine's rates, from which times are predicted: those of an H200, or measured in under a minute."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from t1lib.corpus import cache_folder
from t1lib.files import write_json
from t1lib.measure.environment import device_name
from t1lib.measure.floors import measure_link, measure_product
from t1lib.measure.timing import median_ms
from t1lib.train.models import build_model, layer_arguments, split
from t1lib.train.optim import Updater
from t1lib.train.spec import OptimizerSpec


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


def machine_file() -> Path:
    return cache_folder() / "machine.json"


def this_machine() -> Machine:
    """The rates that `calibrate` found for this device, else an H200's."""
    try:
        found = Machine(**json.loads(machine_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return H200
    return found if found.name == device_name() else H200


def calibrate(device: torch.device) -> Machine:
    """Measure this machine and keep its rates for `this_machine`. Raises `T1Error` where they cannot be written."""
    found = measure_machine(device)
    write_json(machine_file(), asdict(found))
    return found


SHORT = 2048  # tokens per row at which attention reaches half its rate over long rows, on an H200 (measured)
GRAPHED = H200.graph_ms / H200.launch_ms  # launch time of a graph, relative to an eager layer's
PRACTICE = {"update": 0.55, "flops": 0.9, "attention": 0.84, "memory": 0.36}
"""Share of the rate of a single large update, product or copy that a training step reaches."""


ROUNDS = 7
PAUSE = 0.3  # seconds between rounds: what slows a shared host down lasts for tenths of a second


def measure_machine(device: torch.device) -> Machine:
    """This machine's rates, measured in a few seconds; on a CPU, "the device" is the CPU as well.

    Each rate is the median of `ROUNDS` rounds, because a burst of other work on the host can double the time of a
    launch (measured: 0.87 ms, in bursts 1.4 to 1.9).
    """
    measures, rounds = _measures(device), []
    for _ in range(ROUNDS):
        rounds.append({name: measure() for name, measure in measures.items()})
        time.sleep(PAUSE)
    link = measure_link(device, nbytes=2**26 if device.type == "cuda" else 2**22)
    found = {name: PRACTICE.get(name, 1.0) * median(one[name] for one in rounds) for name in measures}
    graph = GRAPHED * found["launch_ms"]
    return Machine(name=device_name(), link_in=link.both_in, link_out=link.both_out, graph_ms=graph, **found)


def _measures(device: torch.device) -> dict[str, Callable[[], float]]:
    """What measures each of a machine's rates once, before the factor in `PRACTICE`."""
    cuda = device.type == "cuda"
    dtype, size = (torch.bfloat16, 8192) if cuda else (torch.float32, 512)
    weight = torch.zeros(2**24, dtype=torch.bfloat16)
    gradient, updater = torch.zeros_like(weight), Updater({"w": weight}, OptimizerSpec("adamw", master_weights=True))
    big = torch.empty(2**28 if cuda else 2**22, device=device)
    cpu = torch.device("cpu")
    return {
        "update": lambda: 28e3 * weight.numel() / median_ms(lambda: updater.step({"w": gradient}), cpu, 3),
        "flops": partial(measure_product, device, dtype, size),
        "attention": _attention(device, dtype),
        "memory": lambda: 2e3 * big.nbytes / median_ms(lambda: big.add_(1), device, 3),
        "launch_ms": _launches(device, dtype),
    }


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
    return lambda: 2e3 * heads * tokens * (tokens + SHORT) * width / median_ms(attend, device, 3)
