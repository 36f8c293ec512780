"""Time of a step from its busiest lanes: computing, the link in either direction, or the host's updates."""

from typing import Any

import numpy as np

from t1lib.plan.cost import Choice, graphed_layers, outer_bytes, trained_layers, updated_by_host, widened_state
from t1lib.plan.rates import Machine
from t1lib.plan.work import Work

MOVED = 1.95, 4.1  # bytes moved outside matrix products per saved byte, in a layer's forward and backward (measured)
AGAIN = 0.88  # share of a layer's forward that is recomputed (measured)
# Launch times relative to `Machine.launch_ms`: forward and backward of a layer, without and with recomputation; and its
# update on the device (measured).
LAUNCHES = (1.2, 2.0), (2.05, 4.45)
UPDATE_LAUNCHES = 0.85
UPDATE = 2.0  # rate of a fused update on the device, relative to `Machine.memory` (measured)
BESIDE = 0.08  # share by which the layers' backward slows down if all their state travels beside it (measured)
CROWDED = 1.15  # time of a forward beside which the layers' state travels, relative to the link's own time (measured)
HELD_UP = (
    0.05  # share of the time of the host's updates by which a step is longer, as launches need its cores (measured)
)
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
    return np.maximum(one, forward), np.maximum(beside * (back + AGAIN * one * recomputed), backward)


def device_update_ms(work: Work, machine: Machine, layers: Any, outer: int) -> Any:
    """Time to update `layers` layers, and `outer` parameters outside of them, on the device at the end of a step."""
    moved = (layers * work.layer + outer) * (2 * (work.state + work.itemsize) + work.itemsize)
    return np.maximum(moved / (UPDATE * machine.memory) * 1e3, layers * UPDATE_LAUNCHES * machine.launch_ms)


def computing_ms(work: Work, choice: Choice, machine: Machine, beside: Any) -> tuple[Any, Any]:
    """Times of all layers' forward and backward; computing the backward slows down by the factor `beside`."""
    graphed = graphed_layers(work, choice)
    replay, one = machine.graph_ms * work.pieces, layer_ms(work, machine)
    again = beside * (AGAIN * one + layer_ms(work, machine, backward=True))
    forward, backward = graphed * max(one, replay), graphed * np.maximum(again, replay)
    for count, recomputed in ((choice.keep, False), (work.layers - choice.keep - graphed, True)):
        there, back = eager_ms(work, machine, recomputed, beside)
        forward, backward = forward + count * there, backward + count * back
    return forward, backward


def _longer(one: Any, other: Any) -> Any:
    """Time of two lanes side by side: that of the longer one, and more if the other is nearly as long."""
    return (one**NEAR + np.maximum(other, 0.0) ** NEAR) ** (1 / NEAR)


def host_update_ms(work: Work, choice: Choice, machine: Machine) -> float:
    """Time in which the CPU updates a layer, whose data it both reads and writes."""
    return 2 * work.layer * (work.state + widened_state(work, choice) + work.itemsize) / machine.update * 1e3


def step_ms(work: Work, choice: Choice, machine: Machine) -> Any:
    """Time of a step in mode slide: of the forward, the head, the backward, and updates of what is on the device."""
    trained, streamed = trained_layers(work, choice)
    travels = streamed * (1 - choice.host_share) * (work.state > 0)
    beside = 1 + BESIDE * travels / work.layers * (not work.together)
    forward, backward = computing_ms(work, choice, machine, beside)
    link = _backward_link_ms(work, choice, machine)
    moving = work.layers - choice.resident
    # Streamed layers come first, and run ahead of the link by the gradients that have a slot on the device.
    ahead = (choice.grad_slots - 1) * link / np.maximum(moving, 1)
    backward = _longer(backward, link - ahead + choice.resident / work.layers * backward)
    if choice.host_share < 1 and not work.masters and choice.slots == 2:
        # An update reads the weights in their slot, for which the next ones wait.
        backward = backward + (streamed > 0) * work.layer * work.itemsize / machine.link_in * 1e3
    last = device_update_ms(work, machine, trained, work.outer * (choice.outer == "device"))
    first = np.maximum(link - backward - choice.resident * layer_ms(work, machine), 0)  # the next streamed layer waits
    host = streamed * choice.host_share * host_update_ms(work, choice, machine)
    rest = first + head_ms(work, machine) + backward + last + HELD_UP * host
    if work.together:
        return _next_forward_ms(work, choice, machine, forward) + rest
    return np.maximum(_longer(forward, _link_ms(machine, *_forward_bytes(work, choice))) + rest, host)


def _link_ms(machine: Machine, inward: Any, outward: Any) -> Any:
    """Time in which so many bytes come in and go out at once."""
    return np.maximum(inward / machine.link_in, outward / machine.link_out) * 1e3


def _inputs(work: Work, choice: Choice) -> Any:
    """Bytes of layer inputs that leave in the forward and come back in the backward."""
    return (work.layers - choice.keep) * work.tokens * work.hidden * work.itemsize * (choice.inputs == "host")


def _forward_bytes(work: Work, choice: Choice) -> tuple[Any, Any]:
    """Bytes that come in and go out during the forward, but for the layers' updates."""
    outer = work.outer * outer_bytes(work) * (choice.outer == "host")
    return (work.layers - choice.resident) * work.layer * work.itemsize + outer, _inputs(work, choice) + outer


def _backward_link_ms(work: Work, choice: Choice, machine: Machine) -> Any:
    """Time of the link during the backward: weights and inputs come in, gradients or new weights go out; and the state
    travels, unless updates wait for the last gradient."""
    streamed = trained_layers(work, choice)[1]
    again = np.maximum(work.layers - choice.resident - choice.slots, 0) * work.layer * work.itemsize
    state = streamed * (1 - choice.host_share) * work.layer * work.state * (not work.together)
    out = streamed * work.layer * work.itemsize
    return _link_ms(machine, again + _inputs(work, choice) + state, out + state)


def _next_forward_ms(work: Work, choice: Choice, machine: Machine, computing: Any) -> Any:
    """Time of a forward beside which the streamed layers are updated, each before it runs, all in the order of layers:
    state, gradients and, without whole masters, weights come in, state and weights go out, and the new weights are used
    where they are; or the CPU updates a layer, and its weights come in."""
    weights, one = work.layer * work.itemsize, computing / work.layers
    state = work.layer * work.state + weights  # with gradients on the way in, with new weights on the way out
    crowd = CROWDED if choice.host_share < 1 and work.state else 1.0
    travelling, plain = (
        crowd * _link_ms(machine, state + weights * (not work.masters), state),
        weights / machine.link_in * 1e3,
    )
    done = link = host = np.zeros_like(one)
    for layer in range(work.layers):
        streams, trained = layer >= choice.resident, layer >= work.frozen
        by_host = trained and updated_by_host(layer, choice.host_share)
        link = link + streams * (travelling if trained and not by_host else plain)
        host = host + streams * by_host * host_update_ms(work, choice, machine)
        ready = np.maximum(link, (host + plain) * by_host)
        done = np.where(streams, np.maximum(done, ready), done) + one
    outer = work.outer * outer_bytes(work) * (choice.outer == "host")
    link = link + _link_ms(machine, outer, outer + _inputs(work, choice)) * crowd
    return np.maximum(done, _longer(computing, link))
