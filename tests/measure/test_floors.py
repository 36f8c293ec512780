import pytest
import torch

from t1lib.measure.floors import Link, measure_link

CPU = torch.device("cpu")
LINK = Link(host_to_device=100.0, device_to_host=50.0, both_in=80.0, both_out=40.0)  # bytes/s


@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        ((0, 0, 0), 0.0),
        ((200, 0, 0), 2.0),  # the forward has the link to itself
        ((0, 200, 0), 2.0),  # so does the backward if no gradients leave
        ((0, 0, 100), 2.0),
        ((100, 80, 40), 1.0 + 1.0),  # both directions end together
        ((100, 80, 140), 1.0 + 1.0 + 2.0),  # 100 bytes of gradients are left, alone at 50 bytes/s
        ((100, 180, 40), 1.0 + 1.0 + 1.0),  # 100 bytes of weights are left, alone at 100 bytes/s
    ],
)
def test_least_time_of_a_step(copies, seconds):
    assert LINK.step_ms(*copies) == pytest.approx(seconds * 1e3)


def test_measured_rates_are_positive():
    link = measure_link(CPU, nbytes=2**22)
    assert min(link.host_to_device, link.device_to_host, link.both_in, link.both_out) > 0
