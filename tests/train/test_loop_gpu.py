"""On a CUDA device: the modes agree within rounding, a graph replays the whole step, slide's memory stays flat."""

import pytest
import torch

from t1lib.errors import T1Error
from t1lib.models import build_model
from t1lib.optimizers import OptimizerSpec, Schedule
from t1lib.train import make_trainer
from t1lib.train.wrap import compile_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
SPECS = [OptimizerSpec("sgd", lr=0.1), OptimizerSpec("adamw", lr=1e-3, master_weights=True)]


def trainer(mode: str, dtype: torch.dtype = torch.bfloat16, compiled: bool = False, **options):
    model = build_model("tiny", dtype=dtype, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    if options.get("loss") == "mean_square":
        model.requires_grad_(False).model.layers.requires_grad_(True)
    if compiled:
        compile_layers(model.model.layers)
    return make_trainer(model, mode, device="cuda", **options)


def batch(tokens: int = 128, seed: int = 3):
    return {"input_ids": torch.randint(512, (2, tokens), generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("optimizer", SPECS, ids=["sgd", "masters"])
@pytest.mark.parametrize("own", [{}, {"compiled": True}, {"micro_batch": 1, "max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("mode", ["ckpt", "slide", "fsdp"])
def test_losses_agree_with_gpu(mode, optimizer, own):
    trainers = {m: trainer(m, optimizer=optimizer, **own) for m in ("gpu", mode)}
    losses = {m: [t.step(batch()).loss for _ in range(12)] for m, t in trainers.items()}
    assert losses["gpu"][-1] < losses["gpu"][0] - 0.1
    # Rounding in another order makes a difference of up to 0.06 here; after 14 steps SGD at this rate is chaotic.
    assert losses[mode] == pytest.approx(losses["gpu"], rel=1.5e-2)
    trainers[mode].close()


@pytest.mark.parametrize("loss", [{}, {"loss": "mean_square"}], ids=["head", "mean square"])
@pytest.mark.parametrize("spec", [OptimizerSpec("sgd", lr=0.1, momentum=0.9), OptimizerSpec("adamw", lr=1e-3)], ids=str)
def test_a_graph_trains_as_its_launches_do(spec, loss):
    """With a learning rate that changes every step, clipping, and batches of two shapes."""
    options = {"optimizer": spec, "max_grad_norm": 1.0, "schedule": Schedule("cosine", warmup=3, total=20), **loss}
    eager, graphed = (trainer(mode, torch.float32, **options) for mode in ("gpu", "gpu-graph"))
    for step in range(16):
        given = batch(128 if step % 2 else 96, step)
        one, other = eager.step(given), graphed.step(given)
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
    assert len(graphed._graphs) == 2
    graphed.load_state_dict(eager.state_dict())
    assert graphed.step(batch(96)).loss == pytest.approx(eager.step(batch(96)).loss, rel=1e-4)


def test_what_a_graph_refuses():
    for options in ({"micro_batch": 1}, {"optimizer": SPECS[1]}):
        with pytest.raises(T1Error, match="in mode 'gpu-graph'; allowed"):
            trainer("gpu-graph", **options)


def test_slide_memory_is_flat_and_small():
    slide = trainer("slide", optimizer="sgd", loss="mean_square")
    for _ in range(2):
        slide.step(batch())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CUDA)
    peaks = []
    for _ in range(5):
        slide.step(batch())
        peaks.append(torch.cuda.max_memory_reserved(CUDA))
    assert len(set(peaks)) == 1
    layer = sum(p.numel() * p.element_size() for p in slide.parts.layers[0].parameters())
    assert sum(t.nbytes for t in slide.device_tensors()) < 6 * layer
    slide.close()
