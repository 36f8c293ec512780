"""The output layer in pieces of the vocabulary: loss and gradients are those of the whole layer."""

import pytest
import torch

from t1lib.heads import linear_cross_entropy
from t1lib.measure.timing import NoTrace
from t1lib.train.batch import Piece, pieces_of
from t1lib.train.streams import Lane
from t1lib.train.vocabulary import StreamedHead

CPU = torch.device("cpu")


class Lanes:
    device = CPU
    compute = inward = outward = Lane(CPU, own_stream=False)


def operands(scale: float = 1.0, dtype=torch.float64, tokens=(4, 9), vocabulary=37, hidden=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*tokens, hidden, generator=generator).to(dtype) * scale
    w = torch.randn(vocabulary, hidden, generator=generator).to(dtype)
    y = torch.randint(vocabulary, tokens, generator=generator)
    y[0, :5] = -100
    return x, w, y


def whole(x, w, pieces, **options):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    targets = torch.cat([piece.targets for piece in pieces])
    loss = linear_cross_entropy(x, w, targets, head="full", **options)
    loss.backward()
    return loss.detach(), x.grad, w.grad


def both(streamed, hidden, pieces):
    found = streamed.forward(hidden, pieces)
    return found.losses, *streamed.gradients(found)


@pytest.mark.parametrize("rows", [1, 5, 12, 36, 37, 100])
@pytest.mark.parametrize("head", ["full", "chunked"])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_loss_and_gradients_are_those_of_the_whole(rows, head, micro_batch):
    x, w, y = operands()
    pieces = pieces_of(torch.zeros_like(y), y, micro_batch)
    loss, d_e, d_w = whole(x, w, pieces)
    grad = torch.full_like(w, torch.nan)
    streamed = StreamedHead(w, grad, Lanes(), {"head": head}, NoTrace, rows)
    hidden = list(x.split(micro_batch or len(x)))
    losses, made, norms = both(streamed, hidden, pieces)
    assert float(sum(losses)) == pytest.approx(float(loss), rel=1e-12)
    assert torch.allclose(torch.cat(made), d_e, rtol=1e-9, atol=1e-14)
    assert torch.allclose(grad, d_w, rtol=1e-9, atol=1e-14)
    assert float(torch.stack(norms).norm()) == pytest.approx(float(d_w.norm()), rel=1e-6)
    with torch.no_grad():
        alone = streamed.forward(hidden, pieces)
    assert [float(v) for v in alone.losses] == [float(v) for v in losses] and not any(alone.parts.values())


def test_a_target_of_probability_near_1_keeps_its_digits():
    """Where p − 1 is tiny, a gradient computed from two large terms would lose its digits."""
    x, w, y = operands(dtype=torch.float32)
    w[y[1, 0]] = 30 * x[1, 0] / x[1, 0].norm()
    pieces = [Piece(torch.zeros_like(y), y)]
    _, d_e, d_w = whole(x.double(), w.double(), pieces)
    grad = torch.empty_like(w)
    _, made, _ = both(StreamedHead(w, grad, Lanes(), {"head": "chunked"}, NoTrace, 7), [x], pieces)
    assert 0 < d_e[1, 0].norm() < 1e-6 * d_e[2, 0].norm()
    assert (made[0][1, 0].double() - d_e[1, 0]).norm() < 1e-3 * d_e[1, 0].norm()
    assert (grad.double() - d_w).norm() < 1e-6 * d_w.norm()


def test_a_frozen_weight_gets_no_gradient_and_softcap_is_exact():
    """The cap is so low that the extra row of zeros takes a share of the softmax."""
    x, w, y = operands(3.0)
    pieces = [Piece(torch.zeros_like(y), y)]
    loss, d_e, _ = whole(x, w, pieces, softcap=2.0)
    streamed = StreamedHead(w, None, Lanes(), {"head": "chunked", "softcap": 2.0}, NoTrace, 10)
    losses, made, norms = both(streamed, [x], pieces)
    assert norms == [] and not w.requires_grad
    assert float(losses[0]) == pytest.approx(float(loss), rel=1e-12)
    assert torch.allclose(made[0], d_e, rtol=1e-9, atol=1e-14)


def test_no_token_that_counts():
    x, w, y = operands()
    y[:] = -100
    grad = torch.ones_like(w)
    streamed = StreamedHead(w, grad, Lanes(), {"head": "chunked"}, NoTrace, 10)
    losses, made, _ = both(streamed, [x], [Piece(torch.zeros_like(y), y)])
    assert torch.isnan(losses[0])
    assert not grad.any() and not made[0].any()
