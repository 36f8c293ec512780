import pytest
import torch

from t1lib.measure.floors import LINK, link_ms, measure_link

CPU = torch.device("cpu")
RATES = {"h2d_gb_s": 100e-9, "d2h_gb_s": 50e-9, "both_in_gb_s": 80e-9, "both_out_gb_s": 40e-9}


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
    assert link_ms(RATES, *copies) == pytest.approx(seconds * 1e3)


def test_measured_rates_are_positive():
    link = measure_link(CPU, nbytes=2**22)
    assert tuple(link) == LINK and min(link.values()) > 0
