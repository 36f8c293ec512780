"""What a step holds at its peak, by what each of its phases holds alive: on the device in every mode, on the host in
mode `slide`."""

from dataclasses import dataclass

from t1lib.train.ahead import GATHERED, ROWS
from t1lib.train.store import LEAVING
from t1lib.train.travel import PIECE, slots_for
from t1lib.train.vocabulary import PIECE_BYTES
from t1lib.work import Work

BACKWARD = 3.1  # tensors of a layer's inner width: what its backward holds beside its activations (measured)
FORWARD = 4  # tensors of that width: what a layer's forward holds that saves nothing
NORM = 6  # tensors of the hidden states: what the last norm and the output layer hold
GAPS = 0.55, 0.7  # of the largest tensor: what the allocator reserves beside all that is alive; where whole masters
# make weights anew, which then find their place taken (measured)
SPREAD = 1.005  # bytes that it reserves for one that is alive, beside that (measured)
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


def outer_travels(work: Work, choice: Choice) -> bool:
    """Whether the state of embedding and head comes to the device, beside the forward."""
    return choice.outer in ("host", "parked") and work.travelling > 0


def outer_bytes(work: Work, choice: Choice) -> int:
    """Of a parameter of these, what the host has and sends: state, and the weight where that is parked (a whole master
    makes it anew)."""
    return work.state + work.itemsize * (choice.outer == "parked" and not work.masters)


def _beside(work: Work) -> float:
    return BACKWARD * work.micro_tokens * work.inner * work.itemsize


def resident_bytes(work: Work, recomputed: bool) -> int:
    """Peak of allocated bytes on the device in modes gpu and ckpt: of the output layer's phase, the backward's begin,
    its end."""
    weights, gradients = work.params * work.itemsize, work.itemsize * (work.pieces == 1)
    base = weights + work.params * work.state + work.widened + work.slack + weights * (work.pieces > 1)
    hidden, one = work.micro_tokens * work.hidden * work.itemsize, work.micro_tokens * work.saved
    kept = work.layers * (hidden if recomputed else one)
    backward = one * recomputed + _beside(work) + 2 * hidden
    head = kept + NORM * hidden + work.workspace + work.head * work.itemsize
    begin = kept + work.head * gradients + backward
    return int(base + max(head, begin, work.params * gradients + backward))


def device_bytes(work: Work, choice: Choice) -> int:
    """Peak of allocated bytes on the device in mode slide: of the output layer's phase, the backward's, its end with
    the next forward's begin."""
    hidden, others = work.tokens * work.hidden * work.itemsize, work.layers - choice.keep
    first, late = _outer_gradients(work, choice)
    on_host = choice.inputs == "host"
    waiting = (min(LEAVING, others) if on_host else others) * hidden
    kept = choice.keep * (work.tokens * work.saved + hidden)  # with what the layer gives the next one
    again = work.micro_tokens * work.saved + _beside(work)
    graphs = again + work.slack if work.graphed and choice.keep + choice.resident < work.layers else 0
    spare = outer_travels(work, choice) and (work.masters or choice.outer == "parked")
    away = work.outer * work.itemsize * spare  # weights that give up their place after the output layer's phase
    pieces = work.pieces > 1
    norm = (NORM - 2) * hidden * work.micro_tokens / work.tokens
    head = kept + waiting + first * (1 + pieces) + work.workspace + norm
    # A layer's input, the next one's and the first layer's; of one piece the layer holds its own anyway.
    inputs = min(3, others) * hidden * pieces if on_host else waiting
    backward = first - away + max(kept + waiting + _beside(work), inputs + (0 if graphs or not others else again))
    forward = first + late + FORWARD * work.micro_tokens * work.inner * work.itemsize * (choice.outer != "device")
    return int(_always(work, choice) + 2 * hidden + graphs + max(head, backward, first + late, forward))


def _always(work: Work, choice: Choice) -> float:
    """What no phase gives back: weights, resident layers with state and gradients, slots."""
    weights, state = work.layer * work.itemsize, work.layer * work.state
    streamed = min(work.layers - choice.resident, 1) * (choice.slots + choice.grad_slots) * weights
    if work.travelling:  # pieces of it, with weights and gradients; and a gradient, if it is widened
        each = work.travelling + (1 + work.together) * work.itemsize
        streamed += min(PIECE, work.layer) * (slots_for(each) * each + 4 * work.widening)
    there = choice.resident > 0 or (choice.outer == "device" and work.outer > 0)
    outer = work.outer * (work.itemsize + work.state * (choice.outer == "device"))
    if choice.outer == "streamed":  # pieces of the head's weight and gradient; gradients of its input in float32
        outer = 4 * PIECE_BYTES + 2 * work.tokens * work.hidden * (work.itemsize + 4)
    still = work.still * work.itemsize
    return streamed + choice.resident * (2 * weights + state) + outer + still + work.widened * there + work.slack


def _outer_gradients(work: Work, choice: Choice) -> tuple[int, int]:
    """Bytes of embedding's and head's: made by the output layer, and at the backward's end."""
    if choice.outer == "streamed":
        return 0, 0
    return min(work.head, work.outer) * work.itemsize, max(work.outer - work.head, 0) * work.itemsize


def reserved_bytes(work: Work, allocated: float, choice: Choice | None = None) -> float:
    """What the allocator takes from the device for a peak of `allocated` bytes.

    choice    of mode slide (None: another mode)
    """
    weights = max(work.layer, work.largest * (work.outer > 0)) * work.itemsize
    anew = choice is not None and outer_travels(work, choice) and work.masters
    activations = 2 * work.micro_tokens * work.inner * work.itemsize  # of the layer's inner width, two side by side
    gaps = max(GAPS[anew] * weights, GAPS[0] * max(activations, work.logits))
    return SPREAD * allocated + gaps


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
