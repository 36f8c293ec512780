"""The table of peers: a missing one says so, an installed one computes the same mean loss and gradients."""

import pytest
import torch

from t1lib.errors import T1Error, UnavailableError
from t1lib.heads import linear_cross_entropy
from t1lib.measure.peers import PEERS, loss_function, whether_available


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_the_mean_loss_and_its_gradients_or_says_why_not(name):
    why_not = whether_available(name)
    if why_not:
        assert "\n" not in why_not
        with pytest.raises(UnavailableError):
            loss_function(name)
    elif not torch.cuda.is_available():
        torch.manual_seed(0)
        e, w, y = torch.randn(12, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True), torch.arange(12)
        found, wanted = loss_function(name)(e, w, y), linear_cross_entropy(e, w, y, head="full")
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, (e, w)), torch.autograd.grad(wanted, (e, w)))


def test_an_unknown_method_is_named_with_what_there_is():
    with pytest.raises(T1Error, match=r"unknown method 'ligre'.*liger"):
        loss_function("ligre")
