"""A machine's rates, from which times are predicted: those of an H200, or measured in under a minute."""

import platform
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import torch

from t1lib.errors import T1Error
from t1lib.files import cache_folder, read_signed
from t1lib.memory import pinned_zeros
from t1lib.models import build_model, layer_arguments, split
from t1lib.timing import synchronize


@dataclass(frozen=True)
class Machine:
    """Rates that a machine reaches in practice."""

    name: str = "H200"
    link: float = 50e9  # bytes/s over the link in each direction, with copies in both at once
    # Bytes/s that the host's optimizer updates move while a step runs. That of slow hosts (measured: 16 to 40 GB/s): a
    # step gains little if updates are quicker than planned, but waits for them if they are slower.
    update: float = 20e9
    flops: float = 700e12  # operations/s of large matrix products
    memory: float = 1.5e12  # bytes/s of the device's elementwise operations
    launch_ms: float = 1.0  # host time to launch an eager layer's forward


H200 = Machine()
# Share of the rate of a single large copy, update, product or addition that a training step reaches.
PRACTICE = {"link": 1.0, "update": 0.2, "flops": 0.9, "memory": 0.36}
ROUNDS = 7
PAUSE = 0.3  # seconds between rounds: what slows a shared host down lasts for tenths of a second


def device_name() -> str:
    """Name of the first GPU or, without CUDA, of the CPU."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()


def machine_file() -> Path:
    return cache_folder() / "machine.json"


def this_machine() -> Machine:
    """The rates that `python -m t1lib plan --calibrate` found for this device, else an H200's."""
    try:
        found = Machine(**read_signed(machine_file()))
    except (T1Error, TypeError):
        return H200
    return found if found.name == device_name() else H200


def measure_machine(device: torch.device) -> Machine:
    """This machine's rates, measured in under a minute; on a CPU, "the device" is the CPU as well. Each is the median
    over `ROUNDS` rounds, except for a launch: the least of the rounds' medians, because on a shared host it takes up to
    twice as long in some rounds, but hardly ever in a step, which goes on launching."""
    cuda = device.type == "cuda"
    dtype, size, numel = (torch.bfloat16, 8192, 2**26) if cuda else (torch.float32, 512, 2**20)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    one, two = (torch.zeros(numel, device=device) for _ in range(2))
    source, target = (pinned_zeros(numel, torch.float32, device) for _ in range(2))
    lane = torch.cuda.Stream(device) if cuda else None

    def copy_both_ways() -> None:
        one.copy_(source, non_blocking=True)
        with torch.cuda.stream(lane):  # None: does nothing
            target.copy_(two, non_blocking=True)

    weight = torch.zeros(2**26 if cuda else 2**24, requires_grad=True)  # with its state, no cache of a host holds it
    weight.grad = torch.zeros_like(weight)
    parts = split(build_model("tiny", dtype=dtype, device=device, num_hidden_layers=1))
    hidden = torch.zeros(1, 16, parts.norm.weight.numel(), dtype=dtype, device=device, requires_grad=True)
    given, named = layer_arguments(parts, hidden)
    measures = {  # for each rate the bytes or operations of a call, and the call
        "link": (one.nbytes, copy_both_ways),
        "update": (7 * weight.nbytes, torch.optim.AdamW([weight], fused=True).step),  # reads four tensors, writes three
        "flops": (2 * size**3, lambda: torch.mm(matrix, matrix)),
        "memory": (2 * one.nbytes, lambda: one.add_(1)),
        "launch_ms": (1, lambda: parts.layers[0](*given, **named)),
    }
    seconds = defaultdict(list)  # by rate, a list for each round
    for _ in range(ROUNDS):
        for name, (_amount, call) in measures.items():
            seconds[name].append([])
            for repeat in range(31 if name == "launch_ms" else 4):
                begun = time.perf_counter()
                call()
                if name != "launch_ms":  # that time is the host's
                    synchronize(device)
                if repeat > 0:
                    seconds[name][-1].append(time.perf_counter() - begun)
            synchronize(device)
        time.sleep(PAUSE)
    took = {name: median(chain(*rounds)) for name, rounds in seconds.items()}
    rates = {name: share * measures[name][0] / took[name] for name, share in PRACTICE.items()}
    return Machine(device_name(), launch_ms=min(map(median, seconds["launch_ms"])) * 1e3, **rates)
