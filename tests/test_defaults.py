"""Results do not depend on PyTorch's default dtype and device, which those who build models often change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from t1lib.heads import linear_cross_entropy
from t1lib.models import build_model
from t1lib.optimizers import OptimizerSpec
from t1lib.train import make_trainer
from t1lib.train.update import step_tensor


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"z_loss": 0.01, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("head", ["full", "chunked", "fused"])
def test_heads(head, options):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(20, 24), torch.randn(70, 24), torch.randn(70)
    target = torch.randint(70, (20,))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        operands = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        with default(dtype):
            loss = linear_cross_entropy(*operands[:2], target, head=head, linear_bias=operands[2], **options)
            loss.backward()
        found.append([loss.detach(), *(t.grad for t in operands)])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("mode", ["gpu", "slide"])
def test_training_with_masters(mode):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model("tiny", dtype=torch.bfloat16, num_hidden_layers=2)
        spec = OptimizerSpec("adamw", lr=1e-3, master_weights=True)
        with default(dtype):
            trainer = make_trainer(model, mode, device="cpu", head="full", optimizer=spec, max_grad_norm=1.0)
            losses = [trainer.step({"input_ids": torch.arange(16).view(2, 8)}).loss for _ in range(3)]
            states = trainer.state_dict()["optimizer"].values()
            trainer.close()
        found.append((losses, [value for state in states for value in state.values()]))
    (losses, tensors), (others, theirs) = found
    assert losses == others
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(tensors, theirs, strict=True))


def test_updates_are_counted_beyond_256():
    with default(torch.bfloat16):
        assert step_tensor(257) == 257


def test_host_memory_is_the_hosts_whatever_the_default_device():
    found = []
    for device in ("cpu", "meta"):
        model = build_model("tiny", dtype=torch.bfloat16, num_hidden_layers=2)
        ids = torch.arange(16).view(2, 8)
        spec = OptimizerSpec("adamw", lr=1e-3, master_weights=True, split_master=True, moments="bfloat16")
        with torch.device(device):
            trainer = make_trainer(model, "slide", device="cpu", head="full", optimizer=spec)
            losses = [trainer.step({"input_ids": ids}).loss for _ in range(2)]
            trainer.load_state_dict(trainer.state_dict())
            found.append([*losses, trainer.step({"input_ids": ids}).loss])
            trainer.close()
    assert found[0] == found[1]
