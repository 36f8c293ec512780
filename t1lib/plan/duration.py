"""Time of a step from its busiest lanes: computing, the link in either direction, or the host's updates."""

from typing import Any

import numpy as np

from t1lib.plan import cost
from t1lib.plan.cost import Choice, first_streamed, graphed_layers, outer_bytes, trained_layers, waiting_layers
from t1lib.plan.rates import Machine
from t1lib.plan.work import Work

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
# Time of a forward beside which the layers' state travels, relative to the link's own time: without updates by the CPU,
# and with some, which share the host's memory with it (measured; 10 clipped settings are 3 % off on average)
CROWDED = 1.05, 1.2
HELD_UP = 0.1  # share of the host's updates' time by which a backward beside them is longer: launches need its cores
NEAR = 8  # exponent of a smooth maximum, by which two lanes of similar length delay each other (measured)


def step_ms(work: Work, choice: Choice, machine: Machine) -> Any:
    """Time of a step in a mode other than fsdp: forward, head, backward, and updates of what is on the device."""
    trained, streamed = trained_layers(work, choice)
    moving, weights, link = work.layers - choice.resident, work.layer * work.itemsize, 1e3 / machine.link
    travels = streamed * (1 - choice.host_share) * (work.state > 0) * (not work.together)  # layers' state
    forward, backward = _computing_ms(work, choice, machine, 1 + BESIDE * travels / work.layers)
    # In the backward weights and inputs come in, gradients or new weights go out; in the forward, those of the head.
    inputs = (work.layers - choice.keep) * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")
    outer = work.outer * outer_bytes(work) * (choice.outer == "host")
    again = np.maximum(moving - choice.slots, 0) * weights
    leaving = (streamed - waiting_layers(work, choice)) * weights
    copies = link * (travels * work.layer * work.state + np.maximum(again + inputs, leaving))
    # The backward runs ahead of the link by the gradients that have a slot on the device.
    backward = _longer(backward, copies - (choice.grad_slots - 1) * copies / np.maximum(moving, 1))
    if choice.host_share < 1 and not work.masters and choice.slots == 2:
        backward = backward + (streamed > 0) * weights * link  # an update reads the slot for which the next ones wait
    if work.together:
        # A forward in which layers are updated hides nothing of what embedding and head take (measured).
        forward = _updating_forward_ms(work, choice, machine, forward, link * inputs) + link * outer
    else:
        forward = _longer(forward, link * (outer + np.maximum(moving * weights, inputs)))
    # The first layer that streams in the next step waits for the link.
    waits = np.maximum(copies - backward - first_streamed(work, choice) * _layer_ms(work, machine)[0], 0)
    # What is on the device is updated at the end.
    updated = (trained * work.layer + work.outer * (choice.outer == "device")) * (3 * work.itemsize + 2 * work.state)
    last = np.maximum(updated / (UPDATE * machine.memory) * 1e3, trained * UPDATE_LAUNCHES * machine.launch_ms)
    host = streamed * choice.host_share * _host_update_ms(work, machine)
    step = forward + _head_ms(work, machine) + backward + waits + last
    return step if work.together else np.maximum(step + HELD_UP * host, host)


def fsdp_ms(work: Work, machine: Machine) -> float:
    """Time of a step in mode fsdp with offload, in one process: copies, and the host's updates, run beside nothing."""
    computing = sum(_computing_ms(work, Choice(), machine))
    trained = (work.layers - work.frozen) * work.layer + work.outer
    copied = (2 * work.layers * work.layer + work.outer + work.still + trained) * work.itemsize * work.pieces
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
    """Time in which the CPU updates a layer, whose data it both reads and writes."""
    return 2 * work.layer * (work.state + work.itemsize) / machine.update * 1e3


def _computing_ms(work: Work, choice: Choice, machine: Machine, beside: Any = 1.0) -> tuple[Any, Any]:
    """Times of all layers' forward and backward: to compute, the latter slower by `beside`, or to launch if longer."""
    graphed, (one, back) = graphed_layers(work, choice), _layer_ms(work, machine)
    launch, forward, backward = machine.launch_ms * work.pieces, 0, 0
    counts = choice.keep, work.layers - choice.keep - graphed, graphed
    for count, again, launches in zip(counts, (0, AGAIN, AGAIN), LAUNCHES, strict=True):
        forward = forward + count * np.maximum(one, launches[0] * launch)
        backward = backward + count * np.maximum(beside * (back + again * one), launches[1] * launch)
    return forward, backward


def _updating_forward_ms(work: Work, choice: Choice, machine: Machine, computing: Any, others: Any) -> Any:
    """Time of a forward beside which streamed layers are updated, in their order, each before it runs: state, gradients
    and, without whole masters, weights come in, state and weights go out; or the CPU updates a layer, and its weights
    come in. Either waits for a slot, which earlier layers may hold (or 636 ms were predicted, where 702 were measured).
    others: the link's time for all else"""
    plain, one = work.layer * work.itemsize / machine.link * 1e3, computing / work.layers
    come = (not work.masters) + (choice.grads == "host")  # weights and gradients, beside the state
    crowd = CROWDED[choice.host_share > 0] if choice.host_share < 1 and work.state else 1.0
    travelling = crowd * (work.layer * work.state / machine.link * 1e3 + plain * come)
    # By the number of resident layers: whether each layer streams, and how many do so before it.
    trained = np.arange(work.layers) >= work.frozen
    streams = np.array([~cost.which_stay(trained, resident) for resident in range(work.layers + 1)])
    streams, places = streams[choice.resident], (np.cumsum(streams, axis=1) - 1)[choice.resident]
    # When the link and the host are free, and when each layer has been computed, after the beginning: once the host has
    # gathered and sent the rows of the embedding that the step's tokens look up, with their state.
    rows = min(work.tokens, work.vocabulary) * work.hidden * outer_bytes(work) * (choice.outer == "host")
    ends = (2 * rows / machine.update + rows / machine.link) * 1e3
    link, host, busy, slots = 0.0, 0.0, 0.0, [0.0] * choice.slots  # and when each slot is free
    for layer in range(work.layers):
        streamed, place = streams[..., layer], places[..., layer]
        by_host, turn = cost.updated_by_host(place, choice.host_share) & trained[layer], place % choice.slots
        host = host + streamed * by_host * _host_update_ms(work, machine)
        begins = np.maximum(np.maximum(link, np.choose(turn, slots)), host * by_host)
        takes = np.where(by_host | ~trained[layer], plain, travelling)
        busy, link = busy + streamed * takes, np.where(streamed, begins + takes, link)
        ends = np.where(streamed, np.maximum(ends, link), ends) + one
        slots = [np.where(streamed & (turn == number), ends, freed) for number, freed in enumerate(slots)]
    return np.maximum(ends, _longer(computing, busy + others * crowd))
