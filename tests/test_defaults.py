"""Results do not depend on PyTorch's default dtype and device, which those who build models often change."""

from contextlib import ExitStack, nullcontext

import pytest
import torch

from t1lib.heads import linear_cross_entropy
from t1lib.models import build_model
from t1lib.optimizers import OptimizerSpec
from t1lib.train import make_trainer

SPLIT = {"master_weights": "split", "moments": "bfloat16"}


def bfloat16() -> ExitStack:
    """Makes it the default dtype until the block ends."""
    block = ExitStack()
    block.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.bfloat16)
    return block


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"z_loss": 0.01, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("head", ["full", "chunked", "fused"])
def test_heads(head, options):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(9, 16), torch.randn(40, 16), torch.randn(40)
    target = torch.randint(40, (9,))
    found = []
    for default in (nullcontext, bfloat16):
        operands = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        with default():
            loss = linear_cross_entropy(*operands[:2], target, head=head, linear_bias=operands[2], **options)
            loss.backward()
        found.append([loss.detach(), *(t.grad for t in operands)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("mode", "default", "more"),
    [("gpu", bfloat16, {}), ("slide", bfloat16, {}), ("slide", lambda: torch.device("meta"), SPLIT)],
)
def test_training_with_masters(mode, default, more):
    found = []
    for surroundings in (nullcontext, default):
        model, batch = build_model("tiny", dtype=torch.bfloat16, num_hidden_layers=2), torch.arange(16).view(2, 8)
        spec = OptimizerSpec("adamw", lr=1e-3, **more)
        with surroundings():
            trainer = make_trainer(model, mode, device="cpu", head="full", optimizer=spec, max_grad_norm=1.0)
            losses = [trainer.step({"input_ids": batch}).loss for _ in range(2)]
            trainer.load_state_dict(trainer.state_dict())
            losses.append(trainer.step({"input_ids": batch}).loss)
            states = trainer.state_dict()["optimizer"].values()
            assert {state["step"].dtype for state in states} == {torch.float32}  # 16 bits count to 256
            trainer.close()
        found.append((losses, [value for state in states for value in state.values()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)
