"""On a CUDA device: the modes agree within rounding, slide's memory stays flat, and no step waits midway."""

import pytest
import torch

from t1lib.measure.floors import measure_link
from t1lib.measure.memory import AllocatorTimeline, pinned_bytes, pinned_zeros, read_peak, reset_peak
from t1lib.measure.timing import PhaseTimer
from t1lib.train import OptimizerSpec, build_model, make_trainer
from t1lib.train.optim import Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def trainer(mode: str, dtype: torch.dtype = torch.bfloat16, **options):
    model = build_model("tiny", dtype=dtype, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    return make_trainer(model, mode, device="cuda", **options)


def batch(tokens: int = 128):
    return {"input_ids": torch.randint(512, (2, tokens), generator=torch.Generator().manual_seed(3))}


@pytest.mark.parametrize(
    "optimizer", [OptimizerSpec("sgd", lr=0.1), OptimizerSpec("adamw", lr=1e-3, master_weights=True)]
)
@pytest.mark.parametrize("own", [{}, {"compile_layers": True}, {"micro_batch": 1, "max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("mode", ["ckpt", "slide", "fsdp"])
def test_losses_agree_with_gpu(mode, optimizer, own):
    trainers = {m: trainer(m, optimizer=optimizer, **own) for m in ("gpu", mode)}
    losses = {m: [t.step(batch()).loss for _ in range(20)] for m, t in trainers.items()}
    assert losses["gpu"][-1] < losses["gpu"][0] - 0.1
    # losses fall from 6.3 to 5.2; on the way, rounding in another order makes a difference of up to 0.06
    assert losses[mode] == pytest.approx(losses["gpu"], rel=1.5e-2)


@pytest.mark.parametrize("shared", [{}, {"micro_batch": 1, "max_grad_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    "options",
    [
        {"slots": 2, "grad_slots": 1, "host_grads": 1}, {"slots": 3}, {"overlap_update": False}, {"keep": 3},
        {"inputs": "host"}, {"outer": "host"}, {"outer": "streamed"}, {"graph_tokens": 0},
        {"update": "device"}, {"update": "both", "slots": 3, "grad_slots": 1},
        {"update": "device", "outer": "host"}, {"update": "both", "outer": "host", "inputs": "host", "graph_tokens": 0},
        {"resident": 3, "keep": 2, "inputs": "host", "outer": "host"},
    ],
    ids=str,
)  # fmt: skip
def test_schedule_is_without_races(options, shared):
    """A missed wait would show as a loss that differs from run to run, or from the schedule without any overlap."""
    off = {"overlap_in": False, "overlap_out": False, "overlap_update": False}
    options = {"update": "host"} | options  # in both schedules: CPU and GPU updates differ in the last bits
    off |= {k: v for k, v in options.items() if k in ("outer", "resident", "update")}
    spec = OptimizerSpec("adamw", lr=1e-3)

    def losses(**kwargs):
        slide = trainer("slide", torch.float32, optimizer=spec, **shared, **kwargs)
        return [slide.step(batch()).loss for _ in range(30)]

    assert losses(**options) == losses(**options) == losses(**off)


@pytest.mark.parametrize(
    "options", [{"slots": 2}, {"slots": 3, "outer": "host"}, {"slots": 3, "outer": "parked"}], ids=str
)
@pytest.mark.parametrize("own", [{}, {"split_master": True}, {"split_master": True, "moments": "bfloat16"}], ids=str)
def test_state_that_travels_is_without_races(own, options):
    off = {"overlap_in": False, "overlap_out": False, "overlap_update": False, "outer": options.get("outer", "device")}
    spec = OptimizerSpec("adamw", lr=1e-3, master_weights=True, **own)

    def losses(**kwargs):
        slide = trainer("slide", optimizer=spec, update="device", **kwargs)
        return [slide.step(batch()).loss for _ in range(30)]

    assert losses(**options) == losses(**options) == losses(**off)


@pytest.mark.parametrize("own", [{}, {"split_master": True}], ids=str)
@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_one_pass_updates_as_the_host(own, scale):
    spec = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1, master_weights=True, **own)
    torch.manual_seed(0)
    start = torch.randn(123, 4567).bfloat16()
    here, there = (Updater({"w": start.to(device, copy=True)}, spec) for device in ("cpu", "cuda"))
    for _ in range(10):
        grad = torch.randn_like(start)
        here.step({"w": grad.clone()}, 0.9, scale)
        there.step({"w": grad.cuda()}, 0.9, scale.cuda() if isinstance(scale, torch.Tensor) else scale)
    for key, wanted in here.state_of("w").items():
        assert (there.state_of("w")[key] - wanted).norm() <= 1e-6 * wanted.norm(), key


def test_narrow_moments_follow_the_wide_ones():
    specs = [OptimizerSpec("adamw", lr=1e-2, master_weights=True, moments=m) for m in ("float32", "bfloat16")]
    torch.manual_seed(0)
    start = torch.randn(500, 700, device="cuda").bfloat16()
    wide, narrow = (Updater({"w": start.clone()}, spec) for spec in specs)
    for step in range(300):
        grad = torch.randn_like(start) * (10 if step < 20 else 0.1)
        for updater in (wide, narrow):
            updater.step({"w": grad.clone()})
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = wide.state["w"][key], narrow.state["w"][key].float()
        assert (a - b).norm() <= 0.1 * a.norm() and (a - b).mean().abs() <= 1e-3 * a.abs().mean()


def test_outer_state_that_travels_trains_as_that_which_stays():
    spec = OptimizerSpec("adamw", lr=1e-3, master_weights=True)
    stays, travels = (trainer("slide", optimizer=spec, update="device", outer=o) for o in ("device", "host"))
    losses = [[t.step(batch(100 + n), upcoming=batch(101 + n)).loss for n in range(20)] for t in (stays, travels)]
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert travels.evaluate(batch()) == pytest.approx(stays.evaluate(batch()), rel=2e-3)


@pytest.mark.parametrize("options", [{"slots": 2, "grad_slots": 1}, {"slots": 3, "graph_tokens": 0}], ids=str)
def test_updates_on_the_device_are_without_races(options):
    off = {"overlap_in": False, "overlap_out": False, "update": "device"}

    def losses(**kwargs):
        slide = trainer("slide", torch.float32, optimizer=OptimizerSpec("sgd", lr=0.1), **kwargs)
        return [slide.step(batch()).loss for _ in range(30)]

    assert losses(**options) == losses(**options) == losses(**off)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"max_grad_norm": 1.0, "outer": "host", "micro_batch": 1, "inputs": "host"},
        {"outer": "streamed", "graph_tokens": 0}, {"update": "device", "outer": "host"},
        {"update": "both", "max_grad_norm": 1.0, "outer": "host"},
    ],
    ids=["plain", "all", "streamed", "there", "both"],
)  # fmt: skip
def test_no_host_synchronisation_among_the_layers(options, monkeypatch):
    """From the first layer to the step's closing synchronization, the host does not wait for the device.

    (Before the first layer, transformers itself reads the position ids once. After the last one, the norm is read once
    if gradients are clipped and something that stays on the device is updated.)
    """
    adamw = OptimizerSpec("adamw", lr=1e-3, master_weights=True)
    slide = trainer("slide", optimizer=adamw if "update" in options else OptimizerSpec("sgd", lr=0.1), **options)
    for _ in range(2):  # the second one captures graphs
        slide.step(batch(), upcoming=batch())
    bind, stop = slide.pipeline.bind, PhaseTimer.stop

    def bind_strictly(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        bind(*args, **kwargs)

    def stop_allowing(self):
        torch.cuda.set_sync_debug_mode("default")
        return stop(self)

    monkeypatch.setattr(slide.pipeline, "bind", bind_strictly)
    monkeypatch.setattr(PhaseTimer, "stop", stop_allowing)
    try:
        slide.step(batch(), upcoming=batch())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("update", ["host", "device"])
def test_a_lost_step_changes_nothing(update):
    slide = trainer("slide", optimizer=OptimizerSpec("adamw", master_weights=True), nonfinite="skip", update=update)
    slide.step(batch())
    before, weight = slide.state_dict(), slide.parts.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.inf
    assert slide.step(batch()).skipped
    with torch.no_grad():
        weight.copy_(kept)
    after = slide.state_dict()
    for name, state in before["optimizer"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["optimizer"][name][key])), (name, key)


def test_graphs_are_replayed_and_change_nothing():
    spec = OptimizerSpec("adamw", lr=1e-3)
    graphed, eager = (trainer("slide", torch.float32, optimizer=spec, graph_tokens=n) for n in (1024, 0))
    data = [batch(), batch(100)] * 4
    assert [graphed.step(b).loss for b in data] == [eager.step(b).loss for b in data]
    held = [graph for graph in graphed._graphs._graphs.values() if graph is not None]
    assert len(held) == 2 * 4  # for each of two shapes: forward and backward in two slots


def test_slide_memory_is_flat_and_small():
    slide = trainer("slide", optimizer="sgd", loss="mean_square", train="layers")
    for _ in range(2):
        slide.step(batch())
    torch.cuda.empty_cache()
    reset_peak(CUDA)
    peaks = []
    for _ in range(5):
        slide.step(batch())
        peaks.append(read_peak(CUDA).reserved)
    assert len(set(peaks)) == 1
    layer = sum(p.numel() * p.element_size() for p in slide.parts.layers[0].parameters())
    assert sum(t.nbytes for t in slide.device_tensors()) < 6 * layer


def test_timeline_ends_at_the_allocators_own_peak():
    reset_peak(CUDA)
    with AllocatorTimeline(CUDA) as timeline:
        a = torch.zeros(1 << 22, device="cuda")
        b = a + 1
        del a
        c = b * 2
        del b, c
    assert timeline.peak.allocated == torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert timeline.peak.reserved == read_peak(CUDA).reserved
    assert timeline.points[-1][1] == timeline.baseline


def test_pinned_memory_is_exact_and_released():
    before = pinned_bytes()
    buffer = pinned_zeros(1_000_003, torch.bfloat16, CUDA)
    assert buffer.is_pinned() and pinned_bytes() - before == buffer.nbytes
    view = buffer[:7]
    del buffer
    assert view.is_pinned()
    del view
    assert pinned_bytes() == before


def test_link_rates_are_plausible():
    link = measure_link(CUDA, nbytes=2**26)
    assert 1e9 < link.host_to_device < 1e12 and 1e9 < link.both_out < 1e12
