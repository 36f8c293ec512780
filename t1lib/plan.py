"""What mode `slide` should keep on the device within a budget: memory from shapes, time from a machine's rates.

Memory is counted from what each phase of a step holds alive. Time is the longest of what must follow one another on
the lanes: computing, the link in both directions, the host's updates.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig

from t1lib.errors import T1Error
from t1lib.train.graphs import GRAPH_TOKENS
from t1lib.train.models import layer_arguments, split
from t1lib.train.optim import OptimizerSpec, state_bytes
from t1lib.train.placement import spare_modules
from t1lib.train.vocabulary import PIECE_BYTES

SLACK = 64 * 2**20  # cuBLAS's workspaces, small tensors
TEMPORARY = 0.6  # of a layer's saved activations: what its backward holds beside them at its peak
SPREAD = 1.04  # bytes that the allocator reserves for one that is asked for


@dataclass(frozen=True)
class Machine:
    """Rates of a machine: bytes/s over the link, bytes/s that the host's updates move, FLOP/s of the layers in
    practice, and the times in ms that the host needs to launch an eager layer's forward, and a graph."""

    link_in: float = 52e9
    link_out: float = 52e9
    update: float = 150e9
    flops: float = 450e12
    launch_ms: float = 1.3
    graph_ms: float = 0.3


H200 = Machine()


@dataclass(frozen=True)
class Work:
    """A step of a model: counts that memory and time follow from. Bytes unless said otherwise.

    layer, outer     numbers of parameters, of one layer and of all trained ones outside
    still            of those that are used outside of the layers and not trained
    head             of the output layer that the loss takes
    graphed          whether layers that are streamed and computed again run as CUDA graphs
    saved            what a layer's backward needs, a token, beyond its weights
    state            optimizer state of a parameter on the device, and on the host
    """

    layers: int
    layer: int
    outer: int
    hidden: int
    itemsize: int
    saved: int
    state: int
    tokens: int
    micro_tokens: int
    workspace: int
    together: bool
    still: int = 0
    head: int = 0
    graphed: bool = False


@dataclass(frozen=True)
class Choice:
    """Options of `SlideTrainer` that trade memory for time."""

    slots: int = 2
    resident: int = 0
    keep: int = 0
    inputs: str = "device"
    outer: str = "host"


def saved_bytes(config: PreTrainedConfig, dtype: torch.dtype, seq: int) -> int:
    """Bytes a token that a decoder layer saves for its backward, weights not counted, in rows of `seq` tokens.

    Found by running one on a few tokens, twice: what grows with the row is an attention that keeps its matrix.
    """
    few, more = (_saved_by_running(config, dtype, tokens) for tokens in (16, 32))
    return round(few + (more - few) / 16 * (seq - 16))


def _saved_by_running(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> float:
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 1, 8
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small, dtype=dtype)
    parts = split(model.to_empty(device="cpu"))  # whatever the weights are
    layer = parts.layers[0]
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.untyped_storage().data_ptr()
        if start not in weights:
            found[start] = tensor  # held, so that no other gets its address
        return tensor

    hidden = torch.zeros(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    hidden, arguments = layer_arguments(parts, hidden)
    with saved_tensors_hooks(pack, lambda t: t):
        out = type(layer).forward(layer, hidden, **arguments[0])
    del out
    return sum(t.untyped_storage().nbytes() for t in found.values()) / tokens


def work_of(
    model: nn.Module, spec: OptimizerSpec, *, rows: int, seq: int, micro_batch: int | None = None,
    workspace: int = 2**29, together: bool = False, train: str = "all", loss: str = "cross_entropy",
    embedding: str = "host", graph_tokens: int = GRAPH_TOKENS,
) -> Work:  # fmt: skip
    """Counts of a step of `rows` × `seq` tokens, `micro_batch` rows at a time; the rest as `SlideTrainer` has it."""
    parts, dtype = split(model), next(model.parameters()).dtype
    in_layers = {id(p) for p in parts.layers.parameters()}
    outside = {p for p in model.parameters() if id(p) not in in_layers}
    trained = {p for p in outside if train == "all" or (train == "marked" and p.requires_grad)}
    spare = spare_modules(parts, train, loss, embedding)
    held = {p for module in model.modules() if module not in spare for p in module.parameters(recurse=False)}
    with_head = loss == "cross_entropy"
    micro_tokens = min(micro_batch or rows, rows) * seq
    return Work(
        layers=len(parts.layers), layer=_count(parts.layers[0].parameters()), outer=_count(trained),
        still=_count((outside - trained) & held), head=_count(parts.head.parameters()) * with_head,
        hidden=model.config.hidden_size, itemsize=dtype.itemsize, saved=saved_bytes(model.config, dtype, seq),
        state=state_bytes(torch.empty(1, dtype=dtype), spec), tokens=rows * seq,
        micro_tokens=micro_tokens, workspace=workspace * with_head, together=together,
        graphed=micro_tokens <= graph_tokens,
    )  # fmt: skip


def _count(params: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def device_bytes(work: Work, choice: Choice) -> int:
    """Peak of allocated bytes on the device."""
    weights, state = work.layer * work.itemsize, work.layer * work.state
    streamed = min(work.layers - choice.resident, 1) * (choice.slots + 2) * weights
    outer = work.still * work.itemsize + work.outer * (2 * work.itemsize + work.state * (choice.outer == "device"))
    if choice.outer == "streamed":  # pieces of the head's weight and gradient; gradients of its input in float32
        outer = 4 * PIECE_BYTES + 2 * work.tokens * work.hidden * (work.itemsize + 4)
    fixed = streamed + choice.resident * (2 * weights + state) + outer + SLACK
    hidden = work.tokens * work.hidden * work.itemsize
    others = work.layers - choice.keep
    kept = choice.keep * work.tokens * work.saved + others * hidden * (choice.inputs == "device") + 2 * hidden
    one = work.micro_tokens * work.saved
    head = work.workspace + hidden
    backward = one * (TEMPORARY if choice.keep == work.layers else 1 + TEMPORARY)
    graphed = work.graphed and choice.keep + choice.resident < work.layers  # graphs keep their memory
    return int(fixed + kept + (head + backward if graphed else max(head, backward)))


def step_ms(work: Work, choice: Choice, machine: Machine) -> float:
    """Time of a step: of each half the busiest lane, and of all the host's updates."""
    streamed = work.layers - choice.resident
    weights = streamed * work.layer * work.itemsize
    again = max(streamed - choice.slots, 0) * work.layer * work.itemsize
    outer = work.outer * work.itemsize * (choice.outer != "device")
    twice = work.head * work.itemsize * (choice.outer == "streamed")
    inputs = (work.layers - choice.keep) * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")
    product = 2 * work.tokens * work.layer / machine.flops * 1e3
    pieces = -(-work.tokens // work.micro_tokens)
    graphed = max(streamed - choice.keep, 0) * work.graphed
    eager, recomputed = work.layers - graphed, work.layers - choice.keep
    launch, replay = machine.launch_ms * pieces, machine.graph_ms * pieces
    forward = max(
        eager * max(product, launch) + graphed * max(product, replay), (weights + outer) / machine.link_in * 1e3,
        inputs / machine.link_out * 1e3,
    )  # fmt: skip
    backward = max(
        eager * 2 * max(product, launch) + (recomputed - graphed) * max(product, launch)
        + graphed * max(3 * product, replay),
        (again + inputs) / machine.link_in * 1e3, (weights + outer) / machine.link_out * 1e3,
    )  # fmt: skip
    products = 8 if twice else 6  # in pieces, the logits are made twice
    head = max(products * work.tokens * work.head / machine.flops, twice / machine.link_in) * 1e3
    each = 2 * (work.state + work.itemsize)  # read and written
    update = (streamed * work.layer + work.outer * (choice.outer != "device")) * each / machine.update * 1e3
    computing = forward + head + backward
    return max(computing, backward + head + update) if work.together else max(computing, update)


def choices(work: Work) -> Iterator[Choice]:
    for outer in ("device", "host", "streamed") if work.outer and work.head else ("device", "host"):
        for inputs in ("device", "host"):
            for slots in (2, 3):
                for resident in range(work.layers + 1):
                    yield Choice(slots, resident, 0, inputs, outer)


def choose_plan(work: Work, budget: int, machine: Machine = H200) -> Choice:
    """The fastest choice that the allocator serves within `budget` bytes; of equally fast ones the smallest.

    Raises `T1Error` with the least that works.
    """

    def reserved(choice: Choice) -> float:
        return device_bytes(work, choice) * SPREAD

    best: tuple[float, float, Choice] | None = None
    for choice in choices(work):
        fitting = [k for k in range(work.layers + 1) if reserved(replace(choice, keep=k)) <= budget]
        for keep in {0, max(fitting)} if 0 in fitting else ():
            found = replace(choice, keep=keep)
            key = step_ms(work, found, machine), reserved(found)
            if best is None or key < best[:2]:
                best = (*key, found)
    if best is None:
        least = min(choices(work), key=reserved)
        need = -(-int(reserved(least)) // 2**20)
        raise T1Error(
            f"gpu_memory of {budget} bytes is too small for one layer at a time; the least that works for "
            f"{work.tokens} tokens a step, {work.micro_tokens} at a time, is {need}MiB"
        )
    return best[2]


def measure_machine(device: torch.device) -> Machine:
    """The rates of this machine, measured in a few seconds; those of a GPU's link and products only where one is."""
    from t1lib.measure.floors import measure_link
    from t1lib.measure.timing import median_ms
    from t1lib.train.optim import Updater

    link = measure_link(device, nbytes=2**26 if device.type == "cuda" else 2**22)
    weight = torch.zeros(2**24, dtype=torch.bfloat16)
    updater = Updater({"w": weight}, OptimizerSpec("adamw", master_weights=True))
    update = median_ms(partial(updater.step, {"w": torch.zeros_like(weight)}), torch.device("cpu"), 5)
    size = 8192 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    product = median_ms(lambda: torch.mm(a, a), device, 5)
    return Machine(
        link_in=link.both_in, link_out=link.both_out, update=28 * weight.numel() / update * 1e3,
        flops=0.65 * 2 * size**3 / product * 1e3,
    )  # fmt: skip
