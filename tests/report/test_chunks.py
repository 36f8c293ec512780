"""The memory law and the balance point of experiment `chunks`, from hand-made records."""

import numpy as np
import pytest

from t1lib.measure.records import Records
from t1lib.report import chunks

COUNTS = (1, 2, 4, 8, 16)


def frame(fixed=3.0, whole=800.0, single=600.0, tile=1):
    """`fused` follows the law except at one chunk: `single` MiB. GEMMs run at 1e12 op/s, copies at 1e9 bytes/s."""
    records = Records()
    for n in COUNTS:
        mib = single if n == 1 else fixed + whole / n
        records.add("fused", "workspace_mib", mib, "MiB", f"chunks/{n}")
        records.add("fused", "chunk_tokens", max(1000 / n, tile), phase=f"chunks/{n}")
    for name, value in {"tokens": 1000, "vocabulary": 2000, "hidden": 50, "itemsize": 2}.items():
        records.add("all", name, value, phase="shape")
    for product in chunks.PRODUCTS:  # 2 N V D operations each
        records.add("floor", f"{product}_ms", 2 * 1000 * 2000 * 50 / 1e12 * 1e3, "ms", "chunks")
    records.add("floor", "copy_ms", 2 * 2000 * 50 * 2 / 1e9 * 1e3, "ms", "chunks")
    return records.frame()


def test_the_law_is_found_from_two_chunks_on():
    law = chunks.law(frame(), "fused")
    assert law.fixed == pytest.approx(3.0) and law.whole == pytest.approx(800.0)
    assert law.deviation < 1e-9
    assert law.at(np.array([1.0, 8.0])) == pytest.approx([803.0, 103.0])


def test_chunks_that_were_not_made_are_no_points():
    points = chunks.by_count(frame(tile=250), "workspace_mib", "fused")
    assert points.index.tolist() == [4.0, 2.0, 1.0]
    assert points[4.0] == pytest.approx(203.0)  # from the call that asked for 4 chunks
    assert chunks.by_tokens(frame(), "workspace_mib", "fused").index.tolist() == [62.5, 125, 250, 500, 1000]


def test_a_head_without_points_has_no_law():
    assert chunks.law(frame(), "chunked") is None


def test_the_balance_point_follows_from_measured_rates():
    measured = frame()
    assert chunks.rates(measured) == pytest.approx((1e12, 1e9))
    # C, the tokens of a chunk, solves 6 C V D / 1e12 = 4 V D / 1e9.
    assert chunks.balance_tokens(measured) == pytest.approx(4 / 6 * 1000)


def test_counts_are_ordered_as_numbers():
    assert chunks.counts(frame()) == list(COUNTS)
    assert chunks.gradients_mib(frame()) == pytest.approx(3000 * 50 * 2 / 2**20)
