"""What a mode keeps where (`Choice`), and what that costs. Memory is the peak of what each phase of a step keeps alive;
time is that of its busiest lanes: computing, the link in either direction, or the host's updates. `resident` and `keep`
may also be NumPy arrays: `t1lib.plan.choose` asks for all of their values at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from t1lib.plan.rates import Machine
from t1lib.plan.work import SLACK, Work

# Buffers of `t1lib.train`, which takes their sizes from here.
PIECE = 5 << 19  # elements of a piece of travelling state: enough to keep the link busy, few compared to a layer
LEAST_SLOTS = 5  # pieces on the device: coming in, being updated, leaving; with spares while weights come in
ROOM = 80  # bytes per element of a piece in all its slots together; with more slots, pieces come in further ahead
ROWS = 2048  # rows of an embedding that are gathered and sent at a time, ahead of the others
GATHERED = 2  # buffers of `ROWS` rows, used in turn
LEAVING = 2  # latest layer inputs that stay on the device: a copy to the host may take as long as a layer computes

# For the prediction of memory.
FORWARD = 4  # tensors of a layer's inner width that the forward of a layer holds if it saves nothing
NORM = 6, 12  # tensors of the hidden states' size that the last norm holds: beside the output layer; in its backward
# Reserved per live byte, and in gaps as a share of the largest tensor: as expected, and at most (see `frontier`).
EXPECTED, MOST = (1.003, 0.62), (1.03, 1.0)

# For the prediction of time.
MOVED = 1.95, 4.1  # bytes moved outside matrix products per saved byte, in a layer's forward and backward (measured)
AGAIN = 0.88  # share of a layer's forward that is recomputed (measured)
# Launch times relative to `Machine.launch_ms`: forward and backward of a layer, without and with recomputation; of a
# CUDA graph; and of a layer's update on the device (measured).
LAUNCHES = (1.2, 2.0), (2.05, 4.45), (0.23, 0.23)
UPDATE_LAUNCHES = 0.85
ATTENTION = 0.814  # rate of causal attention over long rows, relative to `Machine.flops` (measured)
UPDATE = 2.0  # rate of a fused update on the device, relative to `Machine.memory` (measured)
ALONE = 2.5  # rate of updates by a CPU that does nothing else, relative to `Machine.update` (measured)
BESIDE = 0.08  # share by which the layers' backward slows down if all their state travels beside it (measured)
# Time of a forward beside which state travels, over the link's own: without updates by the CPU, and with (measured)
CROWDED = 1.05, 1.2
HELD_UP = 0.1  # how long the host's updates delay a backward, as a share of their time: launches need its cores
NEAR = 8  # exponent of a smooth maximum, by which two lanes of similar length delay each other (measured)


@dataclass(frozen=True)
class Choice:
    """What streaming keeps where, which trades memory for time."""

    slots: int = 2  # device buffers for the weights of layers, and as many for their gradients
    resident: int = 0  # how many layers stay on the device, with gradients and optimizer state: see `which_stay`
    keep: int = 0  # how many of the last layers keep their activations; the others are recomputed in the backward
    inputs: str = "device"  # where the inputs of recomputed layers wait for the backward: "device" or "host"
    # Where the optimizer state of embedding and head is kept: on the "device", or on the "host", from which it travels
    # beside the forward. In the latter case their weights, too, leave the device during the layers' backward.
    outer: str = "device"
    host_share: float = 0.0  # share of the streamed layers that the host's CPU updates, see `updated_by_host`
    # Where gradients of layers that the device updates wait for the last gradient, if they have to: "host" or "device",
    # where they take the memory that the layers' inputs have left.
    grads: str = "host"


def choice_of(mode: str, work: Work) -> Choice:
    """What a mode keeps where; for slide, the default. On fsdp's device: two layers' weights, embedding, norm, head."""
    return {
        "gpu": Choice(resident=work.layers, keep=work.layers), "ckpt": Choice(resident=work.layers),
        "slide": Choice(), "fsdp": Choice(outer="host", host_share=1.0),
    }[mode]  # fmt: skip


def updated_by_host(place: Any, share: float) -> Any:
    """Whether the CPU updates the `place`-th streamed layer: every n-th for a share of 1/n, the last of each group."""
    return np.floor((place + 1) * share + 1e-9) > np.floor(place * share + 1e-9)


def which_stay(trained: Sequence[bool], resident: int) -> np.ndarray:
    """Whether each layer stays on the device, if `resident` of them do: frozen ones first, which have no state. Of
    each kind every n-th for a share of 1/n, the first of each group, so that the link is not idle while they run."""
    trained, stay = np.asarray(trained, bool), np.zeros(len(trained), bool)
    for among in np.flatnonzero(~trained), np.flatnonzero(trained):
        count = min(resident, len(among))
        stay[among] = np.arange(len(among)) * count % max(len(among), 1) < count
        resident -= count
    return stay


def first_streamed(work: Work, choice: Choice) -> Any:
    """The number of the first streamed layer, by `which_stay`."""
    alike = -(-choice.resident // np.maximum(work.layers - choice.resident, 1))
    return alike if work.frozen in (0, work.layers) else np.minimum(choice.resident, alike + work.frozen)


def slots_for(nbytes: int) -> int:
    """How many pieces of travelling state, of `nbytes` bytes per element, have room on the device."""
    return max(LEAST_SLOTS, ROOM // nbytes)


def trained_layers(work: Work, choice: Choice) -> tuple[Any, Any]:
    """How many trained layers are resident, and how many are streamed."""
    resident = np.maximum(choice.resident - work.frozen, 0)
    return resident, work.layers - work.frozen - resident


def waiting_layers(work: Work, choice: Choice) -> Any:
    """How many layers' gradients wait on the device for the last gradient, at most."""
    waits = choice.grads == "device" and work.together and work.streams
    return trained_layers(work, choice)[1] * (1 - choice.host_share) * waits


def graphed_layers(work: Work, choice: Choice) -> Any:
    """How many layers run as CUDA graphs: those that are streamed and recomputed, if they are `launch_bound`."""
    return (work.layers - choice.keep) * (work.layers - choice.resident) // work.layers * work.graphed


def outer_bytes(work: Work) -> int:
    """Bytes per parameter of embedding and head on the host. A master restores the weight; mode fsdp holds all."""
    return work.state + work.itemsize * ((not work.masters) if work.streams else 2)


def device_bytes(work: Work, choice: Choice) -> Any:
    """Peak allocated bytes on the device: what a step holds throughout, and beside it the most that a phase holds."""
    held = _OnDevice(work, choice)
    return held.throughout() + reduce(np.maximum, (held.head(), held.backward(), held.end(), held.forward()))


class _OnDevice:
    """The bytes that a step holds on the device: `throughout`, and beside those in each of its phases."""

    def __init__(self, work: Work, choice: Choice) -> None:
        self.work, self.choice = work, choice
        self.trained_resident, self.trained_streamed = trained_layers(work, choice)
        self.recomputed, self.graphed = work.layers - choice.keep, graphed_layers(work, choice)  # layers
        self.weights = work.layer * work.itemsize  # of a layer; its gradients take as much
        self.outer = work.outer * work.itemsize  # weights outside the layers; their gradients take as much
        self.hidden = work.live * work.hidden * work.itemsize  # a layer's input
        # Gradients. Those of resident layers are held throughout only to accumulate. Else a step frees them, and all
        # exist only at the end of a backward.
        self.resident_grads = self.trained_resident * self.weights
        self.summed = self.resident_grads * (work.accumulates if work.streams else work.pieces > 1)
        self.waiting_grads = waiting_layers(work, choice) * self.weights  # until the next forward
        made = work.head * work.itemsize * (not work.head_frozen)  # by the output layer
        self.head_grads = min(made, self.outer)
        self.outer_leaves = choice.outer == "host" and work.streams  # the weights, during the layers' backward
        self.outer_in_backward = self.head_grads - self.outer * self.outer_leaves
        # Activations. When streamed, a layer that keeps its own also keeps its output.
        inputs = np.minimum(LEAVING, self.recomputed) if choice.inputs == "host" else self.recomputed
        self.inputs = inputs * self.hidden  # of recomputed layers, when the forward ends
        self.saved = choice.keep * (work.live * work.saved + self.hidden * work.streams) + self.inputs
        # What a layer's backward holds beside its saved activations; and with them, where it is recomputed. What the
        # replays of graphs use counts only as reserved.
        self.again = (work.beside + work.micro_tokens * work.saved * (self.recomputed > 0)) * (self.graphed == 0)
        # When all gradients that wait are there, so are the inputs of the resident layers that come first.
        first = np.minimum(first_streamed(work, choice), self.recomputed) * (choice.inputs == "device")
        self.waiting = self.waiting_grads + first * self.hidden * (choice.grads == "device")

    def throughout(self) -> Any:
        """What no phase frees: weights and state on the device, buffers, and two tensors of the hidden states' size."""
        work, choice = self.work, self.choice
        layers = choice.resident * self.weights + self.trained_resident * work.layer * work.state + work.aside
        outside = self.outer + work.outer * work.state * (choice.outer == "device")
        slots = choice.slots * (choice.resident < work.layers) + choice.slots * (self.trained_streamed > 0)
        # Pieces of state that travels, with weights and gradients.
        each, guests = work.state + (1 + work.together) * work.itemsize, choice.outer == "host"
        layers_travel = (self.trained_streamed > 0) & (choice.host_share < 1) & (work.state > 0 or work.together)
        size = min(PIECE, max(work.layer, min(work.largest, work.outer) * guests))
        pieces = size * slots_for(each) * each * (layers_travel | guests) * work.streams
        # Inputs and output of the layers' graphs, and cuBLAS's workspaces.
        graphs = (3 * work.micro_tokens * work.hidden * work.itemsize + SLACK) * (self.graphed > 0)
        return layers + outside + slots * self.weights + pieces + graphs + SLACK * work.cuda + 2 * self.hidden

    def head(self) -> Any:
        """The output layer's phase or, if that holds more, the backward of the last norm."""
        beside, alone = ((tensors - 2) * self.hidden for tensors in NORM)  # two are held throughout
        return self.summed + self.head_grads + self.saved + np.maximum(self.work.workspace + beside, alone)

    def backward(self) -> Any:
        """The beginning of the layers' backward; or later, when all gradients wait."""
        inputs = self.inputs
        if self.choice.inputs == "host":
            # Of a layer, of the next one and of the first one; without micro-batches, the layer holds its own anyway.
            inputs = np.minimum(3, self.recomputed) * self.hidden * (self.work.pieces > 1)
        grads = self.summed + self.outer_in_backward
        begins = grads + np.maximum(self.saved + self.work.beside, inputs + self.again)
        return np.maximum(begins, grads + self.waiting + self.again)

    def end(self) -> Any:
        """The end of the backward: of a tied weight, the embedding's gradient and, unless made in place, the sum."""
        embedding = (2 - self.work.in_place) * self.work.tied * self.work.itemsize
        outside = np.maximum(self.outer_in_backward + np.maximum(self.again, embedding), self.outer)
        return self.resident_grads + self.waiting_grads + outside

    def forward(self) -> Any:
        """The beginning of the next forward."""
        return self.summed + self.outer + np.maximum(FORWARD * self.work.wide * self.outer_leaves, self.waiting)


def reserved_bytes(work: Work, allocated: Any, choice: Choice, most: bool = False) -> Any:
    """Bytes that the allocator reserves on the device for a peak of `allocated` bytes: as expected, or at most."""
    spread, gap = MOST if most else EXPECTED
    # Gradients that wait, among micro-batches' tensors or weights that return, break up free memory: up to twice.
    scattered = (waiting_layers(work, choice) > 0) & (work.pieces > 1 or choice.outer == "host")
    gap = gap * (1 + (most & scattered))
    weights = max(work.layer, work.largest * (work.outer > 0)) * work.itemsize
    # The graphs of layers reserve what a recomputation and a backward hold.
    graphs = work.micro_tokens * work.saved + work.beside
    largest = max(weights, 2 * work.wide, work.logits)  # a layer's largest activations come in pairs
    return spread * allocated + gap * largest + graphs * (graphed_layers(work, choice) > 0)


def host_bytes(work: Work, choice: Choice) -> Any:
    """Bytes that the host holds: streamed layers with their state, waiting gradients, and what else is placed there."""
    streamed, trained = work.layers - choice.resident, trained_layers(work, choice)[1]
    waiting = trained - waiting_layers(work, choice) if work.together else trained * choice.host_share
    whole = trained * choice.host_share * (choice.host_share < 1) * work.split * 2
    held = work.layer * (streamed * work.itemsize + trained * work.state + waiting * work.itemsize + whole)
    outer = work.outer + GATHERED * min(ROWS * work.hidden, work.outer) * work.streams
    inputs = work.layers * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")
    return held + inputs + outer * outer_bytes(work) * (choice.outer == "host")


def step_ms(work: Work, choice: Choice, machine: Machine) -> Any:
    """Time of a step in a mode other than fsdp: forward, head, backward, and updates of what is on the device."""
    phases, (one, _) = _Phases(work, choice, machine), _layer_ms(work, machine)
    forward, backward = phases.forward(), phases.backward()
    waits = np.maximum(phases.copies - backward - first_streamed(work, choice) * one, 0)  # before the next step
    step = forward + _head_ms(work, machine) + backward + waits + phases.end()
    host = phases.streamed * choice.host_share * _host_update_ms(work, machine)
    return step if work.together else np.maximum(step + HELD_UP * host, host)


class _Phases:
    """Times of a step's phases. Copies over the link run beside what the device computes."""

    def __init__(self, work: Work, choice: Choice, machine: Machine) -> None:
        self.work, self.choice, self.machine, self.link = work, choice, machine, 1e3 / machine.link  # ms per byte
        self.trained, self.streamed = trained_layers(work, choice)
        self.moving, self.weights = work.layers - choice.resident, work.layer * work.itemsize
        travels = self.streamed * (1 - choice.host_share) * (work.state > 0) * (not work.together)  # layers' state
        self.computing = _computing_ms(work, choice, machine, 1 + BESIDE * travels / work.layers)
        inputs = (work.layers - choice.keep) * work.tokens * work.hidden * work.itemsize
        self.inputs = inputs * (choice.inputs == "host")
        # In the backward weights and inputs come in, gradients or new weights go out.
        again = np.maximum(self.moving - choice.slots, 0) * self.weights
        leaving = (self.streamed - waiting_layers(work, choice)) * self.weights
        self.copies = self.link * (travels * work.layer * work.state + np.maximum(again + self.inputs, leaving))

    def forward(self) -> Any:
        """Inputs leave, weights come in or are updated, and embedding and head with their state come and go."""
        work, choice, inputs = self.work, self.choice, self.link * self.inputs
        outer = work.outer * outer_bytes(work) * (choice.outer == "host")
        if work.together:
            # A forward in which layers are updated cannot hide the copies for embedding and head (measured).
            return _updating_forward_ms(work, choice, self.machine, self.computing[0], inputs) + self.link * outer
        return _longer(self.computing[0], self.link * (outer + np.maximum(self.moving * self.weights, self.inputs)))

    def backward(self) -> Any:
        """It can run ahead of the link by one layer for each slot beyond the first."""
        ahead = (self.choice.slots - 1) * self.copies / np.maximum(self.moving, 1)
        found = _longer(self.computing[1], self.copies - ahead)
        # An update that reads the weights in their slot holds up the next ones, if there is no third slot.
        held_up = self.choice.host_share < 1 and not self.work.masters and self.choice.slots <= 2
        return found + (self.streamed > 0) * self.weights * self.link * held_up

    def end(self) -> Any:
        """What is on the device is updated."""
        work, launches = self.work, self.trained * UPDATE_LAUNCHES * self.machine.launch_ms
        values = self.trained * work.layer + work.outer * (self.choice.outer == "device")
        updated = values * (3 * work.itemsize + 2 * work.state)
        return np.maximum(updated / (UPDATE * self.machine.memory) * 1e3, launches)


def fsdp_ms(work: Work, machine: Machine) -> float:
    """Time of a step in mode fsdp with offload, in one process: copies, and the host's updates, run beside nothing."""
    computing = sum(_computing_ms(work, Choice(), machine))
    trained = (work.layers - work.frozen) * work.layer + work.outer
    copied = (2 * work.layers * work.layer + work.outer + trained) * work.itemsize * work.pieces
    updated = trained * (3 * work.itemsize + 2 * work.state) / (ALONE * machine.update)
    return computing + _head_ms(work, machine) + (copied / machine.link + updated) * 1e3


def _longer(one: Any, other: Any) -> Any:
    """Time of two lanes side by side: that of the longer one, and more if the other is nearly as long."""
    return (one**NEAR + np.maximum(other, 0.0) ** NEAR) ** (1 / NEAR)


def _layer_ms(work: Work, machine: Machine) -> tuple[float, float]:
    """Times to compute one layer over all tokens of a step, forward and backward."""
    moved = [each * work.saved / machine.memory for each in MOVED]
    one = (2 * work.layer + 1 / ATTENTION * work.attention) / machine.flops + moved[0]
    back = (4 * work.layer + 2.5 / ATTENTION * work.attention) / machine.flops + moved[1]
    return work.tokens * one * 1e3, work.tokens * back * 1e3


def _head_ms(work: Work, machine: Machine) -> float:
    """Time of the output layer's loss and gradients over all tokens of a step."""
    products, moved = 6 * work.head / machine.flops, work.head_moves * work.vocabulary / machine.memory
    return work.tokens * (products + moved) * 1e3


def _host_update_ms(work: Work, machine: Machine) -> float:
    """Time that the CPU takes to update a layer: it reads and writes weights and state."""
    return 2 * work.layer * (work.state + work.itemsize) / machine.update * 1e3


def _computing_ms(work: Work, choice: Choice, machine: Machine, beside: Any = 1.0) -> tuple[Any, Any]:
    """Times of all layers' forward and backward: to compute (a backward times `beside`), or to launch if longer."""
    graphed, (one, back) = graphed_layers(work, choice), _layer_ms(work, machine)
    launch, forward, backward = machine.launch_ms * work.pieces, 0, 0
    counts = choice.keep, work.layers - choice.keep - graphed, graphed
    for count, again, launches in zip(counts, (0, AGAIN, AGAIN), LAUNCHES, strict=True):
        forward = forward + count * np.maximum(one, launches[0] * launch)
        backward = backward + count * np.maximum(beside * (back + again * one), launches[1] * launch)
    return forward, backward


def _updating_forward_ms(work: Work, choice: Choice, machine: Machine, computing: Any, others: Any) -> Any:
    """Time of a forward beside which streamed layers are updated in order, each before it runs. If the device updates a
    layer, its state, gradients and, without whole masters, weights come in, and state and weights go out; if the CPU
    does, its weights come in. Either waits for a slot that earlier layers hold. others: the link's time for all else"""
    plain, one = work.layer * work.itemsize / machine.link * 1e3, computing / work.layers
    come = (not work.masters) + (choice.grads == "host")  # weights and gradients, beside the state
    crowd = CROWDED[choice.host_share > 0] if choice.host_share < 1 and work.state else 1.0
    travelling = crowd * (work.layer * work.state / machine.link * 1e3 + plain * come)
    # By the number of resident layers: whether each layer streams, and how many do so before it.
    trained = np.arange(work.layers) >= work.frozen
    streams = np.array([~which_stay(trained, resident) for resident in range(work.layers + 1)])
    streams, places = streams[choice.resident], (np.cumsum(streams, axis=1) - 1)[choice.resident]
    # In ms from the start: when the link and the host are free, and when each layer ends. The first can begin once the
    # host has gathered and sent the rows of the embedding that the step's tokens look up, with their state.
    rows = min(work.tokens, work.vocabulary) * work.hidden * outer_bytes(work) * (choice.outer == "host")
    ends = (2 * rows / machine.update + rows / machine.link) * 1e3
    link, host, busy, slots = 0.0, 0.0, 0.0, [0.0] * choice.slots  # and when each slot is free
    for layer in range(work.layers):
        streamed, place = streams[..., layer], places[..., layer]
        by_host, turn = updated_by_host(place, choice.host_share) & trained[layer], place % choice.slots
        host = host + streamed * by_host * _host_update_ms(work, machine)
        begins = np.maximum(np.maximum(link, np.choose(turn, slots)), host * by_host)
        takes = np.where(by_host | ~trained[layer], plain, travelling)
        busy, link = busy + streamed * takes, np.where(streamed, begins + takes, link)
        ends = np.where(streamed, np.maximum(ends, link), ends) + one
        slots = [np.where(streamed & (turn == number), ends, freed) for number, freed in enumerate(slots)]
    return np.maximum(ends, _longer(computing, busy + others * crowd))
