"""A small language model on real text: it learns, and its hidden states are those that enter the head."""

import pytest
import torch

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy
from t1lib.measure.head_cases import Shape
from t1lib.measure.head_data import operands
from t1lib.train.language import LanguageSession

SETTINGS = dict(
    model="tiny", layers=1, vocabulary=300, seq=16, batch=4, limit="300KB", lr=3e-3, dtype="float32", device="cpu",
    head="chunked",
)  # fmt: skip


@pytest.fixture(scope="module")
def session():
    return LanguageSession(**SETTINGS)


def test_it_learns_and_says_what_from(session, tmp_path):
    losses = session.train(20)
    assert len(losses) == 20 and losses[-1] < losses[0]
    about = session.about()
    assert len(about["sha256"]) == 64 and about["vocabulary"] == 300 and about["bytes"] <= 300_000
    found = session.held_out(50, str(tmp_path / "states.pt"))
    assert found["tokens"] == 50 and 0 < found["loss"] < losses[0]
    e, w, y = operands("real", Shape("M", 50, 300, 64), torch.float32, torch.device("cpu"), path=tmp_path / "states.pt")
    assert e.shape == (50, 64) and w.shape == (300, 64)
    assert float(linear_cross_entropy(e, w, y, head="full").detach()) == pytest.approx(found["loss"], rel=1e-5)


def test_its_loss_on_hidden_states_is_the_models_own(session):
    e, w, y = session.hidden_states(10**9)
    rows = session.corpus.held_out
    assert len(e) == len(y) == rows.shape[0] * (rows.shape[1] - 1) and int(y.min()) >= 0
    model = session.trainer.model
    with torch.no_grad():
        wanted = torch.stack([model(input_ids=ids, labels=ids).loss for ids in rows[:4].split(1)]).mean()
    count = 4 * (rows.shape[1] - 1)
    torch.testing.assert_close(linear_cross_entropy(e[:count], w, y[:count], head="full"), wanted)


def test_the_same_seed_gives_the_same_losses():
    one, two = (LanguageSession(**SETTINGS).train(3) for _ in range(2))
    assert one == two


def test_a_batch_larger_than_the_corpus_is_refused():
    with pytest.raises(T1Error, match="batch 100000; the corpus has"):
        LanguageSession(**SETTINGS | {"batch": 100_000})
