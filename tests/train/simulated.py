"""The lanes of mode `slide`, simulated on a CPU: how long would a step take on a GPU, and where would it wait?

The kit's own schedule runs on a small model with the proportions of a large one. Every span of work becomes a node that
lasts as long as it would there; lanes and marks order the nodes. There is one copy engine per direction. It makes one
copy at a time and stays with a lane as long as that has more, as on an H200 (docs/log.md). The host takes no time
except for its updates, and concurrent work is not slowed down.
"""

import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from races import lanes_made_by
from torch.utils._python_dispatch import TorchDispatchMode

from t1lib.train import OptimizerSpec, build_model, make_trainer, travel

LAYERS = 28
SMALL = {  # the embedding has 6.2 times the parameters of a layer, as in Qwen3-1.7B
    "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4760,
}  # fmt: skip
_here = threading.local()  # the lane whose work the thread issues, and nodes whose end it has waited for


@dataclass(frozen=True)
class Times:
    """For an H200, Qwen3-1.7B and 16 × 1024 tokens: compute in ms, link rates in bytes/s, and how many parameters/s the
    host updates while the link is busy."""

    forward: float = 5.1
    recompute: float = 4.55
    backward: float = 11.0
    head: float = 46.0
    link_in: float = 51.8e9
    link_out: float = 50.6e9
    host: float = 1.44e9
    layer: float = 50.33e6  # parameters
    inputs: float = 67.1e6  # bytes, of one layer
    copy: float = 0.008  # ms on top of the transfer

    def computing(self) -> float:
        return LAYERS * (self.forward + self.recompute + self.backward) + self.head


class Node(NamedTuple):
    lane: str
    engine: str | None
    ms: float
    after: frozenset[int]
    what: tuple[str, str, int]


class Mark(NamedTuple):
    node: int

    def synchronize(self) -> None:
        _here.known = getattr(_here, "known", frozenset()) | {self.node}

    def query(self) -> bool:
        self.synchronize()
        return True


class Lane:
    """Replaces the kit's `Lane`."""

    def __init__(self, graph: "Graph", name: str) -> None:
        self.graph, self.name, self.stream, self.waits = graph, name, None, frozenset()

    @contextmanager
    def active(self) -> Iterator[None]:
        before, _here.lane = getattr(_here, "lane", None), self
        try:
            yield
        finally:
            _here.lane = before

    def mark(self) -> Mark:
        return Mark(self.graph.add(self, 0.0, None, ("", "mark", -1)))

    def after(self, mark: Mark | None) -> None:
        if mark is not None:
            self.waits |= {mark.node}

    def uses(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass
class Graph:
    """What a run has issued; also replaces the trainer's trace. scale: bytes of the large model for each byte here"""

    times: Times
    scale: float = 1.0
    nodes: list[Node] = field(default_factory=list)
    updates: dict[int, int] = field(default_factory=dict)  # layer → node of its last update on the host
    copied: int = 0
    floor: frozenset[int] = frozenset()  # the end of the previous step: the host waits for it

    def __post_init__(self) -> None:
        self._lock, self._names = threading.Lock(), itertools.count()
        self._last: dict[str, int] = {}
        self.compute, self.host = Lane(self, "compute"), Lane(self, "host")

    def lane(self, device: torch.device, own_stream: bool, urgent: bool = False) -> Lane:
        return Lane(self, f"lane {next(self._names)}") if own_stream else self.compute

    def add(self, lane: Lane, ms: float, engine: str | None, what: tuple[str, str, int]) -> int:
        with self._lock:
            before = {self._last[lane.name]} if lane.name in self._last else set()
            self.nodes.append(Node(lane.name, engine, ms, frozenset(lane.waits | before | self.floor), what))
            self._last[lane.name], lane.waits = len(self.nodes) - 1, frozenset()
            return len(self.nodes) - 1

    def begin(self, *what: Any) -> None: ...

    def end(self, *what: Any) -> None: ...

    @contextmanager
    def span(self, lane: str, phase: str, layer: int, stream: None = None) -> Iterator[None]:
        before = self.copied
        yield
        where, t = getattr(_here, "lane", None) or self.compute, self.times
        if lane in ("in", "out"):
            sizes = {"inputs": t.inputs, "weights": 2 * t.layer, "weights again": 2 * t.layer, "gradients": 2 * t.layer}
            size = sizes.get(phase, (self.copied - before) * self.scale)
            rate = t.link_in if lane == "in" else t.link_out
            self.add(where, size / rate * 1e3 + t.copy, lane, (lane, phase, layer))
        else:
            self.add(where, getattr(t, phase, 0.0) if lane == "compute" else 0.02, None, (lane, phase, layer))

    @contextmanager
    def host_span(self, lane: str, phase: str, layer: int) -> Iterator[None]:
        yield
        self.host.waits |= getattr(_here, "known", frozenset())
        ms = self.times.layer / self.times.host * 1e3
        self.updates[layer] = self.add(self.host, ms, None, ("host", phase, layer))


class Sizes(TorchDispatchMode):
    """Counts the bytes copied on this thread."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "copy_" in str(func):
            into = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self._graph.copied += sum(tensor.nbytes for tensor in into)
        return func(*args, **(kwargs or {}))


def played(nodes: list[Node]) -> list[tuple[float, float]]:
    """When each node begins and ends (ms)."""
    followers: list[list[int]] = [[] for _ in nodes]
    missing = [len(node.after) for node in nodes]
    for number, node in enumerate(nodes):
        for other in node.after:
            followers[other].append(number)
    spans, waiting, busy = [(0.0, 0.0)] * len(nodes), {"in": [], "out": []}, set()
    events = [(0.0, 0, number) for number, count in enumerate(missing) if not count]  # 0 ready, 1 ended, 2 engine free

    def begin(number: int, now: float) -> None:
        spans[number] = now, now + nodes[number].ms
        heapq.heappush(events, (now + nodes[number].ms, 1, number))

    while events:
        now, kind, number = heapq.heappop(events)
        lane, engine = nodes[number][:2]
        if kind == 0 and engine in busy:
            waiting[engine].append((now, number))
        elif kind == 0:
            busy |= {engine} - {None}
            begin(number, now)
        elif kind == 1:
            for other in followers[number]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(events, (now, 0, other))
            if engine is not None:
                heapq.heappush(events, (now, 2, number))
        elif waiting[engine]:
            own = [entry for entry in waiting[engine] if nodes[entry[1]].lane == lane]
            following = min(own or waiting[engine])
            waiting[engine].remove(following)
            begin(following[1], now)
        else:
            busy -= {engine}
    return spans


def simulate(times: Times, steps: int = 3, **options: Any) -> dict[str, float]:
    """Times of the last of a few steps, in ms: the step, its phases, and the link's work in each direction."""
    graph = Graph(times)
    model = build_model("qwen3-1.7b", dtype=torch.bfloat16, **SMALL)
    layer = sum(param.numel() for param in model.model.layers[0].parameters())
    graph.scale = times.layer / layer
    spec = OptimizerSpec("adamw", lr=1e-4, master_weights=True, **options.pop("layout", {}))
    lean = {"update": "device", "outer": "host", "inputs": "host", "head": "full"} | options
    batch, ends = {"input_ids": torch.randint(SMALL["vocab_size"], (2, 16))}, []
    with lanes_made_by(graph.lane), patch.object(travel, "PIECE", int(travel.PIECE / graph.scale)):
        trainer = make_trainer(model, "slide", device="cpu", optimizer=spec, **lean)
        trainer.trace, copy_in = graph, trainer.pipeline._copy_in

        def after_update(index: int, *rest: Any) -> None:
            if index in graph.updates:
                trainer.pipeline.inward.after(Mark(graph.updates[index]))
            copy_in(index, *rest)

        trainer.pipeline._copy_in = after_update
        with Sizes(graph):
            for _ in range(steps):
                trainer.step(batch, upcoming=batch)
                trainer.pipeline.worker.drain()
                ends.append(graph._last["compute"])
                graph.floor = frozenset(ends[-1:])
        trainer.close()
    return _told(graph.nodes, *ends[-2:])


def _told(nodes: list[Node], first: int, last: int) -> dict[str, float]:
    spans = played(nodes)
    own = [(node, span) for node, span in zip(nodes[first + 1 : last + 1], spans[first + 1 : last + 1], strict=True)]
    begun = spans[first][1]
    ends = {node.what[1]: end for node, (_, end) in own if node.what[0] == "compute"}
    link = {engine: sum(node.ms for node, _ in own if node.engine == engine) for engine in ("in", "out")}
    return {
        "step": spans[last][1] - begun, "forward": ends["forward"] - begun, "backward": spans[last][1] - ends["head"],
        **link,
    }  # fmt: skip
