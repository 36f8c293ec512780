"""Peak memory of a step, from what each of its phases keeps alive: on the device in every mode, on the host in mode
`slide`; and the `Choice` of what mode `slide` keeps where.

`resident` and `keep` of a `Choice` may also be arrays of NumPy: `t1lib.plan.choose` asks for all of them at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from t1lib.plan.work import Work

# Buffers of `t1lib.train`, which takes their sizes from here.
PIECE = 5 << 19  # elements of a piece of travelling state: enough to keep the link busy, few compared to a layer
LEAST_SLOTS = 5  # pieces on the device: coming in, being updated, leaving; with spares while weights come in
ROOM = 80  # bytes per element of a piece in all its slots together; with more slots, pieces come in further ahead
ROWS = 2048  # rows of an embedding that are gathered and sent ahead of the others at a time
GATHERED = 2  # buffers of `ROWS` rows, used in turn
LEAVING = 2  # latest layer inputs that stay on the device: a copy to the host may take as long as a layer computes
HOST_GRADS = 4  # layers whose gradients wait on the host, unless all wait for the last one

BACKWARD = 3.1  # tensors of a layer's inner width that its backward holds beside its saved activations (measured)
FORWARD = 4  # tensors of that width that the forward of a layer holds if it saves nothing
NORM = 6  # tensors of the hidden states' size that the last norm and the output layer hold
# What the allocator reserves beyond live tensors, as a share of the largest one (measured). The second value: where
# weights are restored, and find their former place taken.
GAPS = 0.55, 0.62
SPREAD = 1.003  # bytes reserved per live byte, apart from these gaps (measured)
MOST = 1.03  # the same at most, apart from gaps of the largest tensor's size


@dataclass(frozen=True)
class Choice:
    """What streaming keeps where, which trades memory for time."""

    slots: int = 2  # device buffers for layer weights
    resident: int = 0  # this many first layers stay on the device, with their gradients and optimizer state
    keep: int = 0  # this many last layers keep their activations; the others are recomputed in the backward
    inputs: str = "device"  # where the inputs of recomputed layers wait for the backward: "device" or "host"
    # Where the optimizer state of embedding, norm and head is: "device", or "host", from where it travels beside the
    # forward, while their weights leave the device during the layers' backward.
    outer: str = "device"
    grad_slots: int = 2  # device buffers for layer gradients
    host_share: float = 0.0  # share of the streamed layers that the host's CPU updates, see `updated_by_host`


def updated_by_host(layer: int, share: float) -> bool:
    """Whether the CPU updates this layer if it is streamed: every n-th for a share of 1/n, the last of each group."""
    return int((layer + 1) * share + 1e-9) > int(layer * share + 1e-9)


def slots_for(nbytes: int) -> int:
    """How many pieces of travelling state, of `nbytes` bytes per element, have room on the device."""
    return max(LEAST_SLOTS, ROOM // nbytes)


def trained_layers(work: Work, choice: Choice) -> tuple[Any, Any]:
    """How many layers are resident and trained, and streamed and trained."""
    resident = np.maximum(choice.resident - work.frozen, 0)
    return resident, work.layers - work.frozen - resident


def _travels(work: Work, choice: Choice) -> bool:
    """Whether anything of streamed layers comes to the device for an update, in pieces."""
    return work.cuda and choice.host_share < 1 and (work.state > 0 or work.together)


def outer_bytes(work: Work) -> int:
    """Bytes per parameter of embedding and head that the host holds and sends, if their state is there: the state, and
    the weight, unless a whole master can restore it."""
    return work.state + work.itemsize * (not work.masters)


def _beside(work: Work) -> float:
    return BACKWARD * work.micro_tokens * work.inner * work.itemsize


def _again(work: Work) -> float:
    """Bytes that a layer's recomputation and backward hold."""
    return work.micro_tokens * work.saved + _beside(work)


def graphed_layers(work: Work, choice: Choice) -> Any:
    """How many layers run as CUDA graphs: those that are streamed and recomputed, if launches bind."""
    return np.maximum(work.layers - choice.resident - choice.keep, 0) * work.graphed


def resident_bytes(work: Work, recomputed: bool) -> int:
    """Peak allocated bytes on the device in modes gpu and ckpt: the largest of the output layer's phase, the backward's
    beginning and its end."""
    weights, gradients = work.params * work.itemsize, work.itemsize * (work.pieces == 1)
    grads = work.trained * work.itemsize
    base = weights + work.trained * work.state + work.slack + grads * (work.pieces > 1) + work.aside
    hidden, one = work.micro_tokens * work.hidden * work.itemsize, work.micro_tokens * work.saved
    kept = work.layers * (hidden if recomputed else one)
    backward = one * recomputed + _beside(work) + 2 * hidden
    head = kept + NORM * hidden + work.workspace + min(work.head, work.outer) * work.itemsize
    begin = kept + min(work.head, work.outer) * gradients + backward
    return int(base + max(head, begin, work.trained * gradients + backward))


def device_bytes(work: Work, choice: Choice) -> Any:
    """Peak allocated bytes on the device in mode slide: the largest of the output layer's phase, the backward, its end,
    and the beginning of the next forward."""
    hidden, others = work.tokens * work.hidden * work.itemsize, work.layers - choice.keep
    first = min(work.head, work.outer) * work.itemsize  # gradients that the output layer makes
    late = max(work.outer - work.head, 0) * work.itemsize  # those that are made at the backward's end
    on_host, pieces = choice.inputs == "host", work.pieces > 1
    waiting = (np.minimum(LEAVING, others) if on_host else others) * hidden
    kept = choice.keep * (work.tokens * work.saved + hidden)  # including each layer's output
    # Inputs and output of the graphs of layers, and cuBLAS's workspaces. What replays use counts as reserved alone.
    graphs = (3 * work.micro_tokens * work.hidden * work.itemsize + work.slack) * (graphed_layers(work, choice) > 0)
    away = work.outer * work.itemsize * (choice.outer == "host")
    head = kept + waiting + first + work.workspace + (NORM - 2) * hidden
    # Inputs of a layer, of the next one and of the first one; without micro-batches, the layer holds its own anyway.
    inputs = np.minimum(3, others) * hidden * pieces if on_host else waiting
    again = _again(work) * (others > 0) * (graphs == 0)
    backward = first - away + np.maximum(kept + waiting + _beside(work), inputs + again)
    forward = first + late + FORWARD * work.micro_tokens * work.inner * work.itemsize * (choice.outer == "host")
    most = np.maximum(np.maximum(head, backward), np.maximum(first + late, forward))
    return _always(work, choice) + 2 * hidden + graphs + most


def _always(work: Work, choice: Choice) -> Any:
    """Bytes that no phase frees: weights, resident layers with their state and gradients, slots."""
    weights, (resident, streamed) = work.layer * work.itemsize, trained_layers(work, choice)
    slots = (choice.slots * (choice.resident < work.layers) + choice.grad_slots * (streamed > 0)) * weights
    if _travels(work, choice):  # pieces of state, with weights and gradients
        each = work.state + (1 + work.together) * work.itemsize
        room = min(PIECE, work.layer) * slots_for(each) * each
        slots = slots + room * ((streamed > 0) | (choice.outer == "host"))
    held = choice.resident * weights + resident * (weights + work.layer * work.state) + work.aside
    outer = (work.outer + work.still) * work.itemsize + work.outer * work.state * (choice.outer == "device")
    return slots + held + outer + work.slack


def reserved_bytes(work: Work, allocated: Any, choice: Choice | None = None) -> Any:
    """Bytes that the allocator reserves on the device for a peak of `allocated` bytes, as expected.

    choice    of mode slide (None: another mode)
    """
    weights, others = _largest(work)
    anew = choice is not None and choice.outer == "host"
    return SPREAD * allocated + max(GAPS[anew] * weights, GAPS[0] * others) + _of_graphs(work, choice)


def most_reserved_bytes(work: Work, allocated: Any, choice: Choice) -> Any:
    """Bytes that the allocator reserves at most: no run of notebook frontier, of 61, exceeded them."""
    return MOST * allocated + max(_largest(work)) + _of_graphs(work, choice)


def _largest(work: Work) -> tuple[int, int]:
    """Bytes of the largest parameter, or of a layer's together; and of activations or logits."""
    activations = 2 * work.micro_tokens * work.inner * work.itemsize  # two tensors of the layer's inner width
    return max(work.layer, work.largest * (work.outer > 0)) * work.itemsize, max(activations, work.logits)


def _of_graphs(work: Work, choice: Choice | None) -> Any:
    return 0 if choice is None else _again(work) * (graphed_layers(work, choice) > 0)


def host_bytes(work: Work, choice: Choice) -> Any:
    """Bytes that the host holds: streamed layers with their state, waiting gradients, and what else is placed there."""
    streamed, trained = work.layers - choice.resident, trained_layers(work, choice)[1]
    waiting = trained if work.together else np.minimum(HOST_GRADS * (choice.host_share > 0), trained)
    held = work.layer * (streamed * work.itemsize + trained * work.state + waiting * work.itemsize)
    if choice.outer == "host":
        held = held + (work.outer + GATHERED * min(ROWS * work.hidden, work.outer)) * outer_bytes(work)
    return held + work.layers * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")
