from types import SimpleNamespace

import psutil
import pytest
import torch

from t1lib.measure.memory import AllocatorTimeline, HostPeak, storage_bytes
from t1lib.memory import host_available, pinned_zeros

CPU = torch.device("cpu")
MIB = 2**20


def test_timeline_sees_every_allocation_in_order_and_exactly():
    with AllocatorTimeline(CPU, baseline=1000) as timeline:
        a = torch.empty(4096, dtype=torch.uint8)
        b = torch.empty(512, dtype=torch.float32)
        del a
        c = torch.ones(64, dtype=torch.int64)
        del b
        c = (c + c) * c  # the sum in between counts
        del c
    assert [a for _, a, _ in timeline.points] == [1000, 5096, 7144, 3048, 3560, 1512, 2024, 2536, 2024, 1512, 1000]
    assert {reserved for _, _, reserved in timeline.points} == {None}
    times = [ms for ms, _, _ in timeline.points]
    assert times == sorted(times) and times[0] == 0.0
    assert timeline.peak == 7144


def test_views_and_tied_weights_count_once():
    base = torch.zeros(100)
    layer = torch.nn.Linear(4, 4, bias=False)
    tied = torch.nn.Parameter(layer.weight.data)
    assert storage_bytes([base, base[10:20], base.view(10, 10)]) == 400
    assert storage_bytes([layer.weight, tied, base[3:]]) == 64 + 400
    assert storage_bytes([]) == 0


@pytest.mark.skipif(not HostPeak().exact, reason="the system does not reset the peak of resident memory")
def test_host_peak_sees_a_buffer_that_is_freed_again():
    torch.ones(128 * MIB, dtype=torch.uint8)  # before it: not its peak
    host = HostPeak()
    before = host.read()
    assert before < psutil.Process().memory_info().rss + 8 * MIB
    torch.ones(64 * MIB, dtype=torch.uint8)  # touched, and freed at once
    assert host.read() - before == pytest.approx(64 * MIB, abs=6 * MIB)


def test_memory_that_may_not_be_pinned_is_plain(monkeypatch):
    assert not pinned_zeros(10, torch.bfloat16, CPU).is_pinned()
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.warns(UserWarning, match="refused to pin memory .CUDA error 2"):
        buffer = pinned_zeros(MIB, torch.float32, torch.device("cuda"))
    assert buffer.nbytes == 4 * MIB and not buffer.any()


@pytest.mark.parametrize("folder, names", [("", "max current"), ("memory", "limit_in_bytes usage_in_bytes")])
def test_a_control_groups_limit_counts(folder, names, tmp_path, monkeypatch):
    files = [f"{folder}/memory.{name}".strip("/") for name in names.split()]
    monkeypatch.setattr("t1lib.memory.CONTROL_GROUP", tmp_path)
    whole = host_available()
    for name, value in zip(files, (5 * MIB, 2 * MIB), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert host_available() == 3 * MIB < whole
    (tmp_path / files[0]).write_text("max\n")
    assert host_available() > 3 * MIB
