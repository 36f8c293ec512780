"""What mode `slide` should keep on the device within a budget: memory is predicted from shapes (`t1lib.footprint`),
time from a machine's rates.

A step takes as long as its busiest lane: computing, the link in either direction, or the host's updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from t1lib.errors import T1Error
from t1lib.footprint import Choice, device_bytes, host_bytes, outer_bytes, outer_travels, reserved_bytes
from t1lib.machine import H200, Machine
from t1lib.measure.memory import in_words
from t1lib.work import Work

MOVED = 1.95, 4.1  # bytes moved outside matrix products per saved byte, in a layer's forward and backward (measured)
AGAIN = 0.88  # share of a layer's forward that is recomputed (measured)
# Launch times relative to `Machine.launch_ms`: forward and backward of a trainer's layer, without and with
# recomputation; and its update on the device (measured).
LAUNCHES = (1.2, 2.0), (2.05, 4.45)
UPDATE_LAUNCHES = 0.85
UPDATE = 2.0  # rate of a fused update on the device, relative to `Machine.memory` (measured)
BESIDE = 0.08  # share by which the layers' backward slows down if all their state travels beside it (measured)
CROWDED = 1.2  # time of a forward beside which the layers' state travels, relative to the link's own time (measured)
IN_PIECES = 3.0  # time of a head in vocabulary pieces, which makes logits twice, relative to a whole head (measured)
NEAR = 8  # exponent of a smooth maximum, by which two lanes of similar length delay each other (measured)


def layer_ms(work: Work, machine: Machine, backward: bool = False) -> float:
    """Time to compute one layer over all tokens of a step, forward or backward."""
    weights, attention = (4, 2.5) if backward else (2, 1)
    products = weights * work.layer / machine.flops + attention * work.attention / machine.attention
    return work.tokens * (products + MOVED[backward] * work.saved / machine.memory) * 1e3


def head_ms(work: Work, machine: Machine) -> float:
    """Time of the output layer's loss and gradients over all tokens of a step."""
    products, moved = 6 * work.head / machine.flops, work.head_moves * work.vocabulary / machine.memory
    return work.tokens * (products + moved) * 1e3


def eager_ms(work: Work, machine: Machine, recomputed: bool, beside: float = 1.0) -> tuple[float, float]:
    """Times of one eager layer's forward and backward: to compute it or to launch it, whichever is longer. `beside` is
    the factor by which computing the backward slows down."""
    one, back = layer_ms(work, machine), layer_ms(work, machine, backward=True)
    forward, backward = (share * machine.launch_ms * work.pieces for share in LAUNCHES[recomputed])
    return max(one, forward), max(beside * (back + AGAIN * one * recomputed), backward)


def device_update_ms(work: Work, machine: Machine, layers: int, outer: int) -> float:
    """Time to update `layers` layers, and `outer` parameters outside of them, on the device at the end of a step."""
    moved = (layers * work.layer + outer) * (2 * (work.state + work.itemsize) + work.itemsize)
    return max(moved / (UPDATE * machine.memory) * 1e3, layers * UPDATE_LAUNCHES * machine.launch_ms)


def computing_ms(work: Work, choice: Choice, machine: Machine, beside: float) -> tuple[float, float]:
    """Times of all layers' forward and backward; computing the backward slows down by the factor `beside`."""
    graphed = max(work.layers - choice.resident - choice.keep, 0) * work.graphed
    replay, one = machine.graph_ms * work.pieces, layer_ms(work, machine)
    again = beside * (AGAIN * one + layer_ms(work, machine, backward=True))
    forward, backward = graphed * max(one, replay), graphed * max(again, replay)
    for count, recomputed in ((choice.keep, False), (work.layers - choice.keep - graphed, True)):
        there, back = eager_ms(work, machine, recomputed, beside)
        forward, backward = forward + count * there, backward + count * back
    return forward, backward


def _longer(one: float, other: float) -> float:
    """Time of two lanes side by side: that of the longer one, and more if the other is nearly as long."""
    return (one**NEAR + max(other, 0.0) ** NEAR) ** (1 / NEAR)


@dataclass(frozen=True)
class Traffic:
    """Bytes over the link, into the device and out of it, during a step's forward and its backward.

    crowded    whether the layers' state travels during the forward; otherwise it travels during the backward, if at all
    """

    forward_in: float
    forward_out: float
    backward_in: float
    backward_out: float
    crowded: bool


def traffic(work: Work, choice: Choice) -> Traffic:
    """Link traffic of a choice. If updates wait for the last gradient, the layers' state travels in the next forward,
    with their gradients on the way in and their weights on the way out."""
    streamed = work.layers - choice.resident
    outer = work.outer * outer_bytes(work, choice) * outer_travels(work, choice)
    weights = streamed * work.layer * work.itemsize
    again = max(streamed - choice.slots, 0) * work.layer * work.itemsize
    there = streamed * work.layer * work.on_device  # parameters updated on the device
    state, gradients = there * work.travelling, there * work.itemsize
    inputs = (work.layers - choice.keep) * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")
    own = outer_on_host(work, choice) * work.itemsize
    then, now = (state + gradients, 0.0) if work.together else (0.0, state)
    return Traffic(
        weights + own + outer + then, inputs + outer + then, again + inputs + now, weights + own + now, then > 0
    )


def outer_on_host(work: Work, choice: Choice) -> int:
    """How many parameters of embedding and head the host updates."""
    return work.outer * (choice.outer != "device" and not outer_travels(work, choice))


def update_ms(work: Work, choice: Choice, machine: Machine) -> float:
    """Time of the host's updates, which both read and write their data."""
    layers = (work.layers - choice.resident) * work.layer * (1 - work.on_device)
    moved = (layers + outer_on_host(work, choice)) * (work.state + work.itemsize) + layers * work.beside
    return 2 * moved / machine.update * 1e3


def step_ms(work: Work, choice: Choice, machine: Machine) -> float:
    """Time of a step: the busiest lanes of forward and backward, and the head; at least that of all host updates."""
    sent, one, streamed = traffic(work, choice), layer_ms(work, machine), work.layers - choice.resident
    beside = BESIDE * streamed / work.layers * (work.travelling > 0 and not work.together)
    forward, computing = computing_ms(work, choice, machine, 1 + beside)
    weights = max(sent.forward_in / machine.link_in, sent.forward_out / machine.link_out) * 1e3
    forward = _longer(forward, weights * (CROWDED if sent.crowded else 1.0))
    link = max(sent.backward_in / machine.link_in, sent.backward_out / machine.link_out) * 1e3
    # Streamed layers come first, and run ahead of the link by the gradients that have a slot on the device.
    ahead = (choice.grad_slots - 1) * link / max(streamed, 1)
    backward = _longer(computing, link - ahead + choice.resident / work.layers * computing)
    reads = streamed and work.on_device and not work.masters  # an update reads the weights in their slot
    if reads and choice.slots == 2:  # the next weights wait for that slot
        backward += work.layer * work.itemsize / machine.link_in * 1e3
    forward += max(link - backward - choice.resident * one, 0)  # the next step's first streamed layer waits
    twice = work.head * work.itemsize * (choice.outer == "streamed")
    head = max(head_ms(work, machine) * (IN_PIECES if twice else 1.0), twice / machine.link_in * 1e3)
    update = update_ms(work, choice, machine)
    last = device_update_ms(work, machine, choice.resident, work.outer * (choice.outer == "device"))
    step = forward + head + backward + last
    if work.together:  # all updates, then the last layer, between the backward and the next head
        return max(step, backward + head + update + one * (update > 0))
    return max(step, update)


def choices(work: Work) -> Iterator[Choice]:
    parked = ("parked",) if work.travelling and not work.masters else ()
    outers = ("device", "host", *parked, *(("streamed",) if work.outer and work.head and not work.whole_head else ()))
    gradients = (2, 4, 8) if work.travelling and not work.together else (2,)
    for outer, inputs, slots, places in product(outers, ("device", "host"), (2, 3), gradients):
        for resident in range(work.layers + 1):
            yield Choice(slots, resident, 0, inputs, outer, places)


def choose_plan(work: Work, budget: int, machine: Machine = H200, host: int | None = None) -> Choice:
    """The fastest choice whose reserved memory fits into `budget` bytes; among equally fast ones, the smallest.

    host   bytes that the host should hold at most; if every choice needs more, one that needs the least is taken
           (None: no limit)

    Raises `T1Error` if no choice fits; the message says the least budget that works.
    """

    def reserved(choice: Choice) -> float:
        return reserved_bytes(work, device_bytes(work, choice), choice)

    best: tuple[float, float, float, Choice] | None = None
    found = list(choices(work))
    for choice in found:
        beyond = 0 if host is None else max(host_bytes(work, choice) - host, 0)
        if best is not None and beyond > best[0]:
            continue
        fitting = [k for k in range(work.layers + 1) if reserved(replace(choice, keep=k)) <= budget]
        for keep in {0, max(fitting)} if 0 in fitting else ():
            kept = replace(choice, keep=keep)
            key = beyond, step_ms(work, kept, machine), reserved(kept)
            if best is None or key < best[:3]:
                best = (*key, kept)
    if best is None:
        least = min(found, key=reserved)
        need = -(-int(reserved(least)) // 2**20)
        raise T1Error(
            f"gpu_memory of {in_words(budget)} is too small for one layer at a time; the least that works for "
            f"{work.tokens} tokens a step, {work.micro_tokens} at a time, is {need}MiB "
            f"({in_words(work.workspace)} of it are the output layer's workspace)"
        )
    return best[3]
