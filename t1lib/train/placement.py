"""What mode `slide` decides before anything moves: what lies where, what the host must hold, what a budget allows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t1lib.errors import is_whole, require
from t1lib.heads import parse_bytes
from t1lib.measure.memory import host_available
from t1lib.models import Parts
from t1lib.optimizers import OptimizerSpec, has_no_state, state_bytes
from t1lib.plan.choose import choose_plan
from t1lib.plan.cost import device_bytes
from t1lib.plan.duration import step_ms
from t1lib.plan.rates import this_machine
from t1lib.plan.work import with_head, work_of

PLANNED_WORKSPACE = "512MiB"  # of head `fused` under a budget of device memory, unless it is given one


def refuse_dropout(model: PreTrainedModel) -> None:
    """Raise `T1Error` for a model with dropout: layers are computed twice, and the two results would differ."""
    for name, value in model.config.to_dict().items():
        require(
            not (name.endswith(("dropout", "pdrop")) and value),
            f"the model's {name} is {value}: slide computes layers twice and allows only 0",
        )


def spare_modules(parts: Parts, train: str, loss: str, embedding: str) -> set[nn.Module]:
    """Those of embedding and head that are frozen and never used on the device (arguments as of `SlideTrainer`)."""
    spare: set[nn.Module] = set()
    if train == "layers" and loss == "mean_square":
        spare.add(parts.head)
    if train == "layers" and embedding == "host" and (loss == "mean_square" or not parts.tied):
        spare.add(parts.embed)
    return spare


def trained_outside(model: PreTrainedModel, layers: nn.ModuleList) -> dict[str, nn.Parameter]:
    """Trained parameters outside these layers, by name."""
    theirs = {id(p) for p in layers.parameters()}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in theirs}


def host_bytes(layers: Sequence[nn.Module], specs: Sequence[OptimizerSpec], waiting: int) -> int:
    """Bytes that the host will need for `layers` beyond the model as built: optimizer state, by each layer's own spec;
    gradients of the `waiting` layers that may be pending at once; and one layer's weights, as they move layer by layer.
    """
    each = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    state = sum(state_bytes(p, spec) for trained, spec in zip(each, specs, strict=True) for p in trained)
    grads = sum(p.nbytes for trained in each for p in trained) * min(waiting, len(layers)) // max(len(layers), 1)
    return state + grads + sum(p.nbytes for layer in layers[:1] for p in layer.parameters())


def not_in_pieces(model: PreTrainedModel, head: str, head_options: dict[str, Any] | None) -> str:
    """Which features of the head cannot be computed in pieces of the vocabulary, comma-separated; "" if none."""
    found = [name for name in ("z_loss", "label_smoothing", "filter_eps") if (head_options or {}).get(name)]
    found += ["head 'torch'"] * (head == "torch") + ["a bias"] * (model.get_output_embeddings().bias is not None)
    return ", ".join(found)


def place_of(update: str, spec: OptimizerSpec, together: bool, cuda: bool, whole: bool) -> str:
    """Where layers are updated, with "auto" resolved. whole: all their parameters train, and updates may overlap"""
    if update != "auto":
        return update
    return best_place(spec, together, cuda) if whole else "host"


def best_place(spec: OptimizerSpec, together: bool, cuda: bool) -> str:
    """Where fully trained layers are updated soonest, "host" or "device". together: updates wait for the last gradient.

    To update state, the host reads and writes it in its memory; for a GPU it crosses the link in and out."""
    if has_no_state(spec):
        return "host" if together else "device"
    machine = this_machine()
    return "device" if cuda and 2 * min(machine.link_in, machine.link_out) > machine.update else "host"


def choose_by_budget(
    model: PreTrainedModel, spec: OptimizerSpec, gpu_memory: str | int, plan_for: tuple[int, int] | None, *,
    head: str, head_options: dict[str, Any], loss: str, graph_tokens: int, **of_work: Any,
) -> tuple[Any, dict[str, float]]:  # fmt: skip
    """The `Choice` that fits the budget, and its predicted device memory ("bytes") and step time ("ms").

    of_work: further arguments of `work_of`
    """
    require(plan_for is not None, "gpu_memory needs plan_for=(rows, tokens a row), the batch to plan for")
    pair = isinstance(plan_for, tuple | list) and len(plan_for) == 2 and all(is_whole(n, 1) for n in plan_for)
    require(pair, f"plan_for={plan_for!r}; allowed: (rows, tokens a row), each 1 or more")
    rows, seq = plan_for
    workspace = parse_bytes(head_options.get("workspace") or PLANNED_WORKSPACE)
    of_work |= {"workspace": workspace, "loss_head": loss == "cross_entropy"}
    work = work_of(model, spec, rows=rows, seq=seq, **of_work)
    work = replace(with_head(work, head), graphed=work.micro_tokens <= graph_tokens)
    machine = this_machine()
    held = sum(p.nbytes for p in model.parameters() if not p.is_cuda)  # is on the host already
    choice = choose_plan(work, parse_bytes(gpu_memory), machine, host_available() * 9 // 10 + held)
    return choice, {"bytes": int(device_bytes(work, choice)), "ms": float(step_ms(work, choice, machine))}
