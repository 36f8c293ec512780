"""The table of peers: a missing one says so, an installed one computes the same mean loss."""

import pytest
import torch

from t1lib.errors import T1Error, UnavailableError
from t1lib.heads import linear_cross_entropy
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


def test_trls_head_gives_both_gradients_on_a_cpu_too():
    pytest.importorskip("trl.kernels.chunked_logprob")
    e, w, y = operands()
    e, w = e.requires_grad_(), w.requires_grad_()
    found, wanted = loss_function("trl")(e, w, y), linear_cross_entropy(e, w, y, head="full")
    torch.testing.assert_close(torch.autograd.grad(found, (e, w)), torch.autograd.grad(wanted, (e, w)))
