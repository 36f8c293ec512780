"""The table of peers: a missing one says so, an installed one computes the same mean loss."""

import sys
import types
from typing import ClassVar

import pytest
import torch

from t1lib.errors import T1Error, UnavailableError
from t1lib.heads import linear_cross_entropy
from t1lib.measure import peers
from t1lib.measure.peers import PEERS, loss_function, whether_available


def operands():
    torch.manual_seed(0)
    return torch.randn(12, 8), torch.randn(40, 8), torch.randint(40, (12,))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_the_mean_loss_or_says_why_not(name):
    why_not = whether_available(name)
    if why_not:
        assert "\n" not in why_not
        with pytest.raises(UnavailableError):
            loss_function(name)
    elif not torch.cuda.is_available():
        e, w, y = operands()
        torch.testing.assert_close(loss_function(name)(e, w, y), linear_cross_entropy(e, w, y, head="full"))


def test_a_head_of_the_kit_takes_its_settings():
    e, w, y = operands()
    found = loss_function("chunked", chunks=3)(e, w, y)
    torch.testing.assert_close(found, linear_cross_entropy(e, w, y, head="full"))
    assert whether_available("full") == ""


def test_an_unknown_method_is_named_with_what_there_is():
    with pytest.raises(T1Error, match=r"unknown method 'ligre'.*liger"):
        loss_function("ligre")


class Package(types.ModuleType):
    """Stands in for cut_cross_entropy; its loss returns the options that it was given."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__("cut_cross_entropy")
        self.LinearCrossEntropyImpl = types.SimpleNamespace(__members__=dict.fromkeys(names))
        self.linear_cross_entropy = lambda e, w, y, **given: given


class TestCutCrossEntropy:
    members: ClassVar = {("CCE",): {"impl": "cce", "filter_eps": None}, ("CCE", "CCE_EXACT"): {"impl": "cce_exact"}}

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch):
        monkeypatch.setattr(peers.torch.cuda, "is_available", lambda: True)

    @pytest.mark.parametrize("names", members, ids=len)
    def test_exact_is_what_its_version_calls_so(self, monkeypatch, names):
        monkeypatch.setitem(sys.modules, "cut_cross_entropy", Package(names))
        assert loss_function("cce-exact")(1, 2, 3) == self.members[names]
        assert loss_function("cce")(1, 2, 3) == {"impl": "cce"}

    def test_a_package_that_does_not_import_is_unavailable(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
        assert "cannot be imported" in whether_available("cce")
