"""The table of peers: a missing one says so, an installed one computes the same mean loss."""

import sys
import types
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy

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


def test_an_unknown_method_is_named_with_what_there_is():
    with pytest.raises(T1Error, match=r"unknown method 'ligre'.*liger"):
        loss_function("ligre")


class Wheel(types.ModuleType):
    """Stands in for a module of a package that runs only on a GPU; `calls` holds what it was called with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls = calls = []

        class LinearCrossEntropy(torch.nn.Linear):
            def __init__(self, in_features, out_features, bias=False, chunk_size=None, tuned=True, device=None):
                super().__init__(in_features, out_features, bias, device)
                calls.append((chunk_size, tuned))

            def forward(self, input, target):
                return cross_entropy(super().forward(input), target)

        class Function:
            @staticmethod
            def apply(e, w, y):
                return cross_entropy(e @ w.T, y)

        self.LinearCrossEntropy, self.LigerFusedLinearCrossEntropySM90Function = LinearCrossEntropy, Function


class TestWheelsForHopper:
    modules: ClassVar = {
        "quack": "quack.linear_cross_entropy",
        "quack-1024": "quack.linear_cross_entropy",
        "liger-sm90": "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
    }

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch):
        monkeypatch.setattr(peers.torch.cuda, "is_available", lambda: True)

    @pytest.mark.parametrize("name", modules)
    def test_the_loss_and_both_gradients_reach_the_operands(self, monkeypatch, name):
        wheel = Wheel(self.modules[name])
        monkeypatch.setitem(sys.modules, wheel.__name__, wheel)
        e, w, y = operands()
        e, w = e.requires_grad_(), w.requires_grad_()
        found = loss_function(name)(e, w, y)
        wanted = linear_cross_entropy(e, w, y, head="full")
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, (e, w)), torch.autograd.grad(wanted, (e, w)))
        monkeypatch.setitem(sys.modules, wheel.__name__, None)
        assert wheel.__name__ in whether_available(name)
        assert wheel.calls == {"quack": [(4096, False)], "quack-1024": [(1024, False)]}.get(name, [])


def test_trls_head_gives_both_gradients_on_a_cpu_too():
    pytest.importorskip("trl.kernels.chunked_logprob")
    e, w, y = operands()
    e, w = e.requires_grad_(), w.requires_grad_()
    found, wanted = loss_function("trl")(e, w, y), linear_cross_entropy(e, w, y, head="full")
    torch.testing.assert_close(torch.autograd.grad(found, (e, w)), torch.autograd.grad(wanted, (e, w)))


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
        monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
        assert "cannot be imported" in whether_available("cce")
