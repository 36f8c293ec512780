"""Peak memory of a step, from what each of its phases keeps alive: on the device in every mode, on the host in mode
`slide`."""

from dataclasses import dataclass

from t1lib.train.ahead import GATHERED, ROWS
from t1lib.train.store import LEAVING
from t1lib.train.travel_old import PIECE, slots_for
from t1lib.train.vocabulary import PIECE_BYTES
from t1lib.work import Work

BACKWARD = 3.1  # tensors of a layer's inner width that its backward holds beside its saved activations (measured)
FORWARD = 4  # tensors of that width that the forward of a layer holds if it saves nothing
NORM = 6  # tensors of the hidden states' size that the last norm and the output layer hold
# What the allocator reserves beyond live tensors, as a share of the largest one (measured). The second value: where
# weights are restored from whole masters, and find their former place taken.
GAPS = 0.55, 0.62
SPREAD = 1.005  # bytes reserved per live byte, apart from these gaps (measured)
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
    """Whether the optimizer state of embedding and head travels to the device, during the forward."""
    return choice.outer in ("host", "parked") and work.travelling > 0


def outer_bytes(work: Work, choice: Choice) -> int:
    """Bytes per parameter of embedding and head that the host holds and sends: optimizer state, and the weight if it is
    parked (unless a whole master can restore it)."""
    return work.state + work.itemsize * (choice.outer == "parked" and not work.masters)


def _beside(work: Work) -> float:
    return BACKWARD * work.micro_tokens * work.inner * work.itemsize


def _again(work: Work) -> float:
    """Bytes that a layer's recomputation and backward hold."""
    return work.micro_tokens * work.saved + _beside(work)


def _graphed(work: Work, choice: Choice) -> bool:
    return work.graphed and choice.keep + choice.resident < work.layers


def resident_bytes(work: Work, recomputed: bool) -> int:
    """Peak allocated bytes on the device in modes gpu and ckpt: the largest of the output layer's phase, the backward's
    beginning and its end."""
    weights, gradients = work.params * work.itemsize, work.itemsize * (work.pieces == 1)
    base = weights + work.params * work.state + work.widened + work.slack + weights * (work.pieces > 1)
    hidden, one = work.micro_tokens * work.hidden * work.itemsize, work.micro_tokens * work.saved
    kept = work.layers * (hidden if recomputed else one)
    backward = one * recomputed + _beside(work) + 2 * hidden
    head = kept + NORM * hidden + work.workspace + work.head * work.itemsize
    begin = kept + work.head * gradients + backward
    return int(base + max(head, begin, work.params * gradients + backward))


def device_bytes(work: Work, choice: Choice) -> int:
    """Peak allocated bytes on the device in mode slide: the largest of the output layer's phase, the backward, its end,
    and the beginning of the next forward."""
    hidden, others = work.tokens * work.hidden * work.itemsize, work.layers - choice.keep
    first, late = _outer_gradients(work, choice)
    on_host = choice.inputs == "host"
    waiting = (min(LEAVING, others) if on_host else others) * hidden
    kept = choice.keep * (work.tokens * work.saved + hidden)  # including each layer's output
    piece = hidden * work.micro_tokens / work.tokens
    # Inputs and output of the graphs of layers, and cuBLAS's workspaces. What replays use counts as reserved alone.
    graphs = (3 * piece + work.slack) * _graphed(work, choice)
    spare = outer_travels(work, choice) and (work.masters or choice.outer == "parked")
    away = work.outer * work.itemsize * spare  # weights freed after the output layer's phase
    pieces = work.pieces > 1
    norm = (NORM - 2) * piece
    head = kept + waiting + first * (1 + pieces) + work.workspace + norm
    # Inputs of a layer, of the next one and of the first one; without micro-batches, the layer holds its own anyway.
    inputs = min(3, others) * hidden * pieces if on_host else waiting
    again = 0 if graphs or not others else _again(work)
    backward = first - away + max(kept + waiting + _beside(work), inputs + again)
    forward = first + late + FORWARD * work.micro_tokens * work.inner * work.itemsize * (choice.outer != "device")
    return int(_always(work, choice) + 2 * hidden + graphs + max(head, backward, first + late, forward))


def _always(work: Work, choice: Choice) -> float:
    """Bytes that no phase frees: weights, resident layers with their state and gradients, slots."""
    weights, state = work.layer * work.itemsize, work.layer * work.state
    streamed = min(work.layers - choice.resident, 1) * (choice.slots + choice.grad_slots) * weights
    if work.travelling:  # pieces of state, with weights and gradients; a widened gradient
        each = work.travelling + (1 + work.together) * work.itemsize
        streamed += min(PIECE, work.layer) * (slots_for(each) * each + 4 * work.widening)
    there = choice.resident > 0 or (choice.outer == "device" and work.outer > 0)
    outer = work.outer * (work.itemsize + work.state * (choice.outer == "device"))
    if choice.outer == "streamed":  # pieces of the head's weight and gradient; gradients of its input in float32
        outer = 4 * PIECE_BYTES + 2 * work.tokens * work.hidden * (work.itemsize + 4)
    still = work.still * work.itemsize
    return streamed + choice.resident * (2 * weights + state) + outer + still + work.widened * there + work.slack


def _outer_gradients(work: Work, choice: Choice) -> tuple[int, int]:
    """Bytes of the gradients of embedding and head: those made by the output layer, and those at the backward's end."""
    if choice.outer == "streamed":
        return 0, 0
    return min(work.head, work.outer) * work.itemsize, max(work.outer - work.head, 0) * work.itemsize


def reserved_bytes(work: Work, allocated: float, choice: Choice | None = None) -> float:
    """Bytes that the allocator reserves on the device for a peak of `allocated` bytes.

    choice    options of mode slide (None: another mode)
    """
    weights = max(work.layer, work.largest * (work.outer > 0)) * work.itemsize
    anew = choice is not None and outer_travels(work, choice) and work.masters
    activations = 2 * work.micro_tokens * work.inner * work.itemsize  # two tensors of the layer's inner width
    gaps = max(GAPS[anew] * weights, GAPS[0] * max(activations, work.logits))
    graphs = _again(work) if choice is not None and _graphed(work, choice) else 0
    return SPREAD * allocated + gaps + graphs


def host_bytes(work: Work, choice: Choice) -> int:
    """Bytes that the host holds: streamed layers with their state, waiting gradients, and what else is placed there."""
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
