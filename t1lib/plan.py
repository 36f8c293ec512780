"""What mode `slide` should keep on the device within a budget: memory from shapes, time from a machine's rates.

Memory is counted from what each phase of a step holds alive. Time is the longest of what must follow one another on
the lanes: computing, the link in both directions, the host's updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from t1lib.errors import T1Error
from t1lib.machine import H200, Machine
from t1lib.measure.memory import in_words
from t1lib.train.ahead import GATHERED, ROWS
from t1lib.train.store import LEAVING
from t1lib.train.travel import PIECE, slots_for
from t1lib.train.vocabulary import PIECE_BYTES
from t1lib.work import Work

TEMPORARY = 0.34  # of a layer's saved activations: what its backward holds beside them at its peak
MOVED = 1.95, 4.1  # bytes that a layer's forward, its backward, move beside products for one that it saves (measured)
AGAIN = 0.88  # of a layer's forward, what has to be computed again (measured)
BESIDE = 0.08  # of the layers' backward: what it takes longer where all their state comes and goes beside it (measured)
CROWDED = 1.2  # times the link's own time: the forward, where the layers' state comes and goes beside it (measured)
GAPS = 0.55  # of the largest tensor: what the allocator reserves beside all that is alive (measured)
SPREAD = 1.005  # bytes that it reserves for one that is alive, beside that (measured)
IN_PIECES = 3.0  # times the time of a whole head: one in pieces of the vocabulary, which makes logits twice (measured)
NEAR = 8  # how much two lanes wait for one another: exponent of a smooth maximum (measured)
HOST_GRADS = 4  # layers whose gradients wait on the host, by default


@dataclass(frozen=True)
class Choice:
    """Options of `SlideTrainer` that trade memory for time."""

    slots: int = 2
    resident: int = 0
    keep: int = 0
    inputs: str = "device"
    outer: str = "host"
    grad_slots: int = 2


def layer_ms(work: Work, machine: Machine, backward: bool = False) -> float:
    """Time of one layer's computing over all tokens of a step, forward or backward."""
    weights, attention = (4, 2.5) if backward else (2, 1)
    products = weights * work.layer / machine.flops + attention * work.attention / machine.attention
    return work.tokens * (products + MOVED[backward] * work.saved / machine.memory) * 1e3


def head_ms(work: Work, machine: Machine) -> float:
    """Time of the output layer's loss and gradients over all tokens of a step."""
    return work.head_cost * 6 * work.tokens * work.head / machine.flops * 1e3


def outer_travels(work: Work, choice: Choice) -> bool:
    """Whether the state of embedding and head comes to the device, beside the forward."""
    return choice.outer in ("host", "parked") and work.travelling > 0


def outer_bytes(work: Work, choice: Choice) -> int:
    """Of a parameter of these, what the host has and sends: state, and the weight where that is parked (a whole master
    makes it anew)."""
    return work.state + work.itemsize * (choice.outer == "parked" and not work.masters)


def device_bytes(work: Work, choice: Choice) -> int:
    """Peak of allocated bytes on the device."""
    weights, state = work.layer * work.itemsize, work.layer * work.state
    streamed = min(work.layers - choice.resident, 1) * (choice.slots + choice.grad_slots) * weights
    outer = work.still * work.itemsize + work.outer * (2 * work.itemsize + work.state * (choice.outer == "device"))
    if choice.outer == "streamed":  # pieces of the head's weight and gradient; gradients of its input in float32
        outer = 4 * PIECE_BYTES + 2 * work.tokens * work.hidden * (work.itemsize + 4)
    there = choice.resident > 0 or (choice.outer == "device" and work.outer > 0)
    if work.travelling:  # pieces of it, with weights and gradients; and a gradient, if it is widened
        each = work.travelling + (1 + work.together) * work.itemsize
        streamed += min(PIECE, work.layer) * (slots_for(each) * each + 4 * work.widening)
    fixed = streamed + choice.resident * (2 * weights + state) + outer + work.widened * there + work.slack
    hidden = work.tokens * work.hidden * work.itemsize
    others = work.layers - choice.keep
    fixed += others * hidden * (choice.inputs == "device") + 2 * hidden
    kept = choice.keep * (work.tokens * work.saved + hidden)  # with what the layer gives the next one
    kept += min(LEAVING, others) * hidden * (choice.inputs == "host")  # these stay until the backward
    one = work.micro_tokens * work.saved
    more = work.head * work.itemsize * (work.pieces > 1 and work.outer > 0 and choice.outer != "streamed")
    head = work.workspace + hidden + more  # a piece's gradient of the head, before it is added to the others'
    spare = work.masters or choice.outer == "parked"
    away = work.outer * work.itemsize * (spare and outer_travels(work, choice))
    again = one * (1 + TEMPORARY) - away  # the layers that are kept come first, and are gone then
    if work.graphed and choice.keep + choice.resident < work.layers:  # graphs keep their memory, and cuBLAS's own
        return int(fixed + kept + head + again + work.slack)
    backward = max(kept + one * TEMPORARY if choice.keep else 0, again if others else 0)
    return int(fixed + max(kept + head, backward))


def reserved_bytes(work: Work, allocated: float) -> float:
    """What the allocator takes from the device for a peak of `allocated` bytes."""
    largest = max(work.layer, work.largest * (work.outer > 0))
    return SPREAD * allocated + GAPS * largest * work.itemsize


def host_bytes(work: Work, choice: Choice) -> int:
    """What the host holds: streamed layers with their state, gradients that wait, what of the rest is there."""
    each = work.state + work.beside * (1 - work.on_device) + work.itemsize
    waiting = work.layers if work.together else min(HOST_GRADS, work.layers) * (work.on_device < 1)
    streamed = work.layers - choice.resident
    held = int(streamed * work.layer * each) + min(waiting, streamed) * work.layer * work.itemsize
    if choice.outer != "device":
        held += work.outer * (outer_bytes(work, choice) + (0 if outer_travels(work, choice) else 3 * work.itemsize))
    if outer_travels(work, choice):
        held += GATHERED * min(ROWS * work.hidden, work.outer) * outer_bytes(work, choice)
    if choice.inputs == "host":
        held += work.layers * work.tokens * work.hidden * work.itemsize
    return held


def computing_ms(work: Work, choice: Choice, machine: Machine, beside: float) -> tuple[float, float]:
    """Time of the layers' forward and backward; the backward's computing takes `beside` times its own."""
    one, back = layer_ms(work, machine), layer_ms(work, machine, backward=True)
    graphed = max(work.layers - choice.resident - choice.keep, 0) * work.graphed
    eager, recomputed = work.layers - graphed, work.layers - choice.keep
    launch, replay = machine.launch_ms * work.pieces, machine.graph_ms * work.pieces
    backward = (
        eager * max(beside * back, 2 * launch) + (recomputed - graphed) * max(beside * AGAIN * one, launch)
        + graphed * max(beside * (AGAIN * one + back), replay)
    )  # fmt: skip
    return eager * max(one, launch) + graphed * max(one, replay), backward


def _longer(one: float, other: float) -> float:
    """Time of two lanes side by side: the longer one's, and more where the other is nearly as long."""
    return (one**NEAR + max(other, 0.0) ** NEAR) ** (1 / NEAR)


@dataclass(frozen=True)
class Traffic:
    """Bytes over the link, into the device and out of it, beside a step's forward and its backward.

    crowded    whether the layers' state comes and goes beside the forward; beside the backward otherwise, if at all
    """

    forward_in: float
    forward_out: float
    backward_in: float
    backward_out: float
    crowded: bool


def traffic(work: Work, choice: Choice) -> Traffic:
    """What a choice sends. If all gradients are to come before an update, the layers' state follows in the next
    forward, with their gradients in and their weights out."""
    streamed = work.layers - choice.resident
    outer = work.outer * outer_bytes(work, choice) * outer_travels(work, choice)
    weights = streamed * work.layer * work.itemsize
    again = max(streamed - choice.slots, 0) * work.layer * work.itemsize
    there = streamed * work.layer * work.on_device  # numbers that are updated on the device
    state, gradients = there * work.travelling, there * work.itemsize
    inputs = (work.layers - choice.keep) * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")
    own = outer_on_host(work, choice) * work.itemsize
    then, now = (state + gradients, 0.0) if work.together else (0.0, state)
    return Traffic(
        weights + own + outer + then, inputs + outer + then, again + inputs + now, weights + own + now, then > 0
    )


def outer_on_host(work: Work, choice: Choice) -> int:
    """Numbers of embedding and head that the host updates."""
    return work.outer * (choice.outer != "device" and not outer_travels(work, choice))


def update_ms(work: Work, choice: Choice, machine: Machine) -> float:
    """Time of the host's updates, which read and write what they move."""
    layers = (work.layers - choice.resident) * work.layer * (1 - work.on_device)
    moved = (layers + outer_on_host(work, choice)) * (work.state + work.itemsize) + layers * work.beside
    return 2 * moved / machine.update * 1e3


def step_ms(work: Work, choice: Choice, machine: Machine) -> float:
    """Time of a step: of each half the busiest lane, and of all the host's updates."""
    sent, one, streamed = traffic(work, choice), layer_ms(work, machine), work.layers - choice.resident
    beside = BESIDE * streamed / work.layers * (work.travelling > 0 and not work.together)
    forward, computing = computing_ms(work, choice, machine, 1 + beside)
    weights = max(sent.forward_in / machine.link_in, sent.forward_out / machine.link_out) * 1e3
    forward = _longer(forward, weights * (CROWDED if sent.crowded else 1.0))
    link = max(sent.backward_in / machine.link_in, sent.backward_out / machine.link_out) * 1e3
    # Streamed layers come first, and are ahead of the link by the gradients that have a place on the device.
    ahead = (choice.grad_slots - 1) * link / max(streamed, 1)
    backward = _longer(computing, link - ahead + choice.resident / work.layers * computing)
    reads = streamed and work.on_device and not work.masters  # an update reads the weights
    if reads and choice.slots == 2:  # for whose slot the next ones wait
        backward += work.layer * work.itemsize / machine.link_in * 1e3
    forward += max(link - backward - choice.resident * one, 0)  # the next one's first streamed layer waits
    twice = work.head * work.itemsize * (choice.outer == "streamed")
    head = max(head_ms(work, machine) * (IN_PIECES if twice else 1.0), twice / machine.link_in * 1e3)
    update = update_ms(work, choice, machine)
    last = choice.resident * work.layer + work.outer * (choice.outer == "device")  # updated at the end
    step = forward + head + backward + last * (2 * (work.state + work.itemsize) + work.itemsize) / machine.memory * 1e3
    if work.together:  # between backward and head, and then the last layer is computed
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
    """The fastest choice that the allocator serves within `budget` bytes; of equally fast ones the smallest.

    host   bytes that the host may hold, if there is a choice that needs no more (None: enough)

    Raises `T1Error` with the least that works.
    """

    def reserved(choice: Choice) -> float:
        return reserved_bytes(work, device_bytes(work, choice))

    best: tuple[float, float, Choice] | None = None
    found = list(choices(work))
    held = [choice for choice in found if host is None or host_bytes(work, choice) <= host]
    for choice in held or found:
        fitting = [k for k in range(work.layers + 1) if reserved(replace(choice, keep=k)) <= budget]
        for keep in {0, max(fitting)} if 0 in fitting else ():
            kept = replace(choice, keep=keep)
            key = step_ms(work, kept, machine), reserved(kept)
            if best is None or key < best[:2]:
                best = (*key, kept)
    if best is None and 0 < len(held) < len(found):
        return choose_plan(work, budget, machine)  # the host then says what it lacks
    if best is None:
        least = min(found, key=reserved)
        need = -(-int(reserved(least)) // 2**20)
        raise T1Error(
            f"gpu_memory of {in_words(budget)} is too small for one layer at a time; the least that works for "
            f"{work.tokens} tokens a step, {work.micro_tokens} at a time, is {need}MiB "
            f"({in_words(work.workspace)} of it are the output layer's workspace)"
        )
    return best[2]
