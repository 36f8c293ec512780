"""The bytes of state that each layout keeps."""

import torch

from t1lib.optimizers import OptimizerSpec
from t1lib.train.update import join, new_state, split


def test_bytes_per_parameter():
    """State of a 2-byte parameter: 12 bytes in float32, 8 with 16-bit moments, 6 with a split master as well."""
    weight, rule = torch.zeros(1000, dtype=torch.bfloat16), {"betas": (0.9, 0.999)}
    for own, expected in (({}, 12), ({"moments": "bfloat16"}, 8), ({"moments": "bfloat16", "split_master": True}, 6)):
        spec = OptimizerSpec("adamw", **own)
        assert sum(t.nbytes for t in new_state(weight, rule, spec.precision).values()) == expected * 1000
        assert sum(kind.itemsize for kind in spec.kinds(weight).values()) == expected


def test_a_master_survives_being_split():
    torch.manual_seed(0)
    master = torch.cat([torch.randn(999), torch.tensor([0.0, -0.0, torch.inf, 1.0 + 2**-8, 1.0 - 2**-9])])
    weight, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split(master.clone(), weight, low)
    assert torch.equal(join(weight, low), master)
