"""How close a streamed step comes to its floors, simulated (`simulated.py`) with the proportions of an H200."""

import pytest
from simulated import LAYERS, Times, simulate

EAGER = Times()
COMPILED = Times(forward=2.9, recompute=2.6, backward=6.9, head=49.0)
SPLIT = {"split_master": True}


def test_eager_layers_do_not_wait_for_the_link():
    """Neither in the forward, during which the state of embedding and head is transferred, nor in the backward."""
    found = simulate(EAGER)
    assert found["step"] >= EAGER.computing()
    assert found["forward"] <= LAYERS * EAGER.forward + 13  # 13 ms: the first layer's update has to end first
    assert found["step"] <= 1.02 * EAGER.computing()


def test_compiled_layers_wait_for_whole_masters_alone():
    whole, narrow = simulate(COMPILED), simulate(COMPILED, slots=3, layout=SPLIT | {"moments": "bfloat16"})
    assert whole["step"] >= whole["in"] > 1.3 * COMPILED.computing()
    assert whole["step"] <= 1.15 * whole["in"]
    assert narrow["in"] < COMPILED.computing()
    assert narrow["step"] <= 1.04 * COMPILED.computing()


def test_weights_that_an_update_reads_cross_the_link_once_less():
    whole, split = simulate(COMPILED), simulate(COMPILED, slots=3, layout=SPLIT)
    weights = LAYERS * 2 * COMPILED.layer
    assert whole["in"] - split["in"] == pytest.approx(weights / COMPILED.link_in * 1e3, rel=0.3)
    assert split["step"] < 0.9 * whole["step"]


@pytest.mark.parametrize("off", ["overlap_in", "overlap_out", "overlap_update"])
def test_every_overlap_is_worth_something(off):
    assert simulate(EAGER, **{off: False})["step"] > 1.05 * simulate(EAGER)["step"]
