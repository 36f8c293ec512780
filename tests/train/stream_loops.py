"""Optimizers and loops of the tests of `stream`, as a user of plain PyTorch writes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from stream_models import data
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

RATES = partial(LambdaLR, lr_lambda=lambda step: 0.7**step)
MOST = 0.05  # norm to which gradients are clipped: less than all that occur here


def adamw(model: nn.Module, **changes: Any) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **({"lr": 1e-2, "weight_decay": 0.1} | changes))


def sgd(model: nn.Module, **changes: Any) -> torch.optim.SGD:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | changes))


def grouped(model: nn.Module, make: Callable[..., Any] = torch.optim.AdamW) -> torch.optim.Optimizer:
    """No decay for norms, another rate for the embedding and for each layer, other betas or momentum for one."""
    groups: dict[tuple, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        layer = [int(part) for part in name.split(".") if part.isdigit()]
        rate = 0.003 if "embed" in name else 0.01 * 0.8 ** (layer[0] if layer else 0)
        groups.setdefault((rate, 0.0 if "norm" in name else 0.1, layer == [1]), []).append(param)
    own = {"betas": (0.8, 0.95)} if make is torch.optim.AdamW else {"momentum": 0.8}
    each = [{"params": p, "lr": r, "weight_decay": d} | (own if o else {}) for (r, d, o), p in groups.items()]
    return make(each, **({} if make is torch.optim.AdamW else {"momentum": 0.9}))


def model_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def own_clip(model: nn.Module, optimizer: Any, most: float = MOST) -> Tensor:
    """By the optimizer, where it can; else the same by PyTorch's function."""
    own = getattr(optimizer, "clip_grad_norm_", partial(clip_grad_norm_, list(model.parameters())))
    norm = own(most)
    assert norm > most, "nothing was clipped"
    return norm


def torch_clip(model: nn.Module, optimizer: Any) -> Tensor:
    return own_clip(model, None)


CLIPS = {None: None, "optimizer": own_clip, "torch": torch_clip}


def train(
    model: nn.Module, optimizer: Any, batches: list[dict[str, Tensor]] | None = None, *,
    loss: Callable[..., Tensor] = model_loss, before: Callable[..., object] | None = None,
    clip: Callable[..., Tensor | None] | None = None, schedule: Callable[..., Any] | None = None, accumulate: int = 1,
    zero: bool | Callable[[nn.Module], object] = True, after: Callable[[nn.Module], float] | None = None,
) -> list[float]:  # fmt: skip
    """The loop of a user of plain PyTorch; returns losses, norms and what `after` gives, as they come."""
    events: list[float] = []
    batches = data() if batches is None else batches
    rates = schedule(optimizer) if schedule else None
    for start in range(0, len(batches), accumulate):
        for batch in batches[start : start + accumulate]:
            if before:
                before(model, optimizer, batch)
            value = loss(model, batch)
            (value / accumulate).backward()
            events.append(value.item())
        norm = clip(model, optimizer) if clip else None
        events += [] if norm is None else [norm.item()]
        optimizer.step()
        if rates:
            rates.step()
        if callable(zero):
            zero(model)
        else:
            optimizer.zero_grad(set_to_none=zero)
        if after:
            events.append(after(model))
    return events


def two_forwards(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A pair of rows against the other pair."""
    first, second = ({key: value[at : at + 2] for key, value in batch.items()} for at in (0, 2))
    return model_loss(model, first) + nn.functional.softplus(model_loss(model, second))


def evaluated(model: nn.Module) -> float:
    """Loss of another batch, without gradients, in evaluation mode, where dropout draws no numbers."""
    model.eval()
    with torch.no_grad():
        device = str(next(model.parameters()).device)
        found = sum(model_loss(model, batch).item() for batch in data(2, rows=3, device=device))
    model.train()
    return found
