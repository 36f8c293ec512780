"""A machine's rates, from which times are predicted: those of an H200, or measured in under a minute."""

import platform
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

import torch

from t1lib.errors import T1Error
from t1lib.files import cache_folder, read_signed
from t1lib.memory import pinned_zeros
from t1lib.models import build_model, layer_arguments, split
from t1lib.timing import between_ms, mark_now, synchronize


@dataclass(frozen=True)
class Machine:
    """Rates that a machine reaches in practice."""

    name: str = "H200"
    link: float = 50e9  # bytes/s over the link in each direction, with copies in both at once
    update: float = 20e9  # bytes/s that the host's updates move in a step: a slow host's, as a quicker gains little
    flops: float = 700e12  # operations/s of large matrix products
    memory: float = 1.5e12  # bytes/s of the device's elementwise operations
    launch_ms: float = 1.0  # host time to launch an eager layer's forward


H200 = Machine()
# Share of the rate of a single large copy, update, product or addition that a training step reaches.
PRACTICE = {"link": 1.0, "update": 0.2, "flops": 0.9, "memory": 0.36}
ROUNDS = 7
PAUSE = 1.0  # seconds between rounds, in which what slows a shared host down may pass


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
    """This machine's rates, measured in under a minute; on a CPU, "the device" is the CPU as well. What the device does
    is timed by its own clock, as a slow host would make it seem slower. A rate is the median over the calls of all
    `ROUNDS`, the time of a launch that of the quickest: on a shared host some rounds double it, but hardly a step."""
    cuda, host, streams = device.type == "cuda", torch.device("cpu"), torch.get_device_module(device)
    dtype, size, numel = (torch.bfloat16, 8192, 2**26) if cuda else (torch.float32, 512, 2**20)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    one, two = (torch.zeros(numel, device=device) for _ in range(2))
    source, target = (pinned_zeros(numel, torch.float32, device) for _ in range(2))
    lane, current = streams.Stream(device), streams.current_stream(device)

    def copy_both_ways() -> None:
        lane.wait_stream(current)  # both copies lie between the marks on the current stream
        one.copy_(source, non_blocking=True)
        with streams.stream(lane):
            target.copy_(two, non_blocking=True)
        current.wait_stream(lane)

    weight = torch.zeros(2**26 if cuda else 2**24, requires_grad=True)  # with its state, no cache of a host holds it
    weight.grad = torch.zeros_like(weight)
    parts = split(build_model("tiny", dtype=dtype, device=device, num_hidden_layers=1))
    hidden = torch.zeros(1, 16, parts.norm.weight.numel(), dtype=dtype, device=device, requires_grad=True)
    given, named = layer_arguments(parts, hidden)
    # By rate: a call's bytes or operations, the call, whose clock times it. Behind the products others launch in time.
    measures = {
        "flops": (2 * size**3, lambda: torch.mm(matrix, matrix), device),
        "memory": (2 * one.nbytes, lambda: one.add_(1), device),
        "link": (one.nbytes, copy_both_ways, device),
        "update": (7 * weight.nbytes, torch.optim.AdamW([weight], fused=True).step, host),  # reads four, writes three
        "launch_ms": (1, lambda: parts.layers[0](*given, **named), host),
    }
    took = defaultdict(list)  # by rate, the calls' ms, a list for each round
    for _ in range(ROUNDS):
        marks = {}
        for name, (_amount, call, clock) in measures.items():
            if clock == host:
                synchronize(device)  # its copies would slow the host's updates
            marks[name] = [mark_now(clock)]
            for _ in range(31 if name == "launch_ms" else 4):
                call()
                marks[name].append(mark_now(clock))
        synchronize(device)
        for name, own in marks.items():
            took[name].append([between_ms(*ends) for ends in pairwise(own)][1:])
        time.sleep(PAUSE)
    rates = {name: share * measures[name][0] * 1e3 / median(chain(*took[name])) for name, share in PRACTICE.items()}
    return Machine(device_name(), launch_ms=min(map(median, took["launch_ms"])), **rates)
