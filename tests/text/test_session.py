"""A small language model on real text: it learns, and its hidden states are those that enter the head."""

import argparse
from dataclasses import replace

import pytest
import torch

from t1lib.errors import T1Error
from t1lib.heads import linear_cross_entropy
from t1lib.measure.language import LanguageSession
from t1lib.measure.softmax import operands
from t1lib.text.corpus import byte_pairs
from t1lib.text.texts import read_texts

TEXT = argparse.__file__  # 100 kB
SETTINGS = dict(
    model="tiny", mode="gpu", changes={"num_hidden_layers": 1}, vocabulary=300, seq=16, batch=4, data=TEXT,
    optimizer={"name": "adamw", "lr": 3e-3}, dtype="float32", device="cpu", head="chunked",
)  # fmt: skip


@pytest.fixture(scope="module")
def session():
    return LanguageSession(**SETTINGS)


def test_it_learns_and_says_what_from(session, tmp_path):
    before = session.evaluate(16)
    losses = [record.loss for record in session.train(20)]
    assert len(losses) == 20 and losses[-1] < losses[0]
    about = session.about()
    assert len(about["sha256"]) == 64 and about["vocabulary"] == 300 and about["files"] == 1
    assert session.evaluate(16) < before
    found = session.held_out(50, str(tmp_path / "states.pt"))
    assert found["tokens"] == 50 and 0 < found["loss"] < losses[0]
    e, w, y = operands("real", (50, 300, 64), torch.float32, torch.device("cpu"), path=tmp_path / "states.pt")
    assert e.shape == (50, 64) and w.shape == (300, 64)
    assert float(linear_cross_entropy(e, w, y, head="full")) == pytest.approx(found["loss"], rel=1e-5)


def test_its_loss_on_hidden_states_is_the_models_own(session, monkeypatch, tmp_path):
    session.held_out(10**9, str(tmp_path / "all.pt"))
    e, w, y = torch.load(tmp_path / "all.pt").values()
    rows = session.corpus.held_out
    assert len(e) == len(y) == rows.shape[0] * (rows.shape[1] - 1) and int(y.min()) >= 0
    model = session.trainer.model
    with torch.no_grad():
        wanted = torch.stack([model(input_ids=ids, labels=ids).loss for ids in rows[:4].split(1)]).mean()
        spread = rows[[place * len(rows) // 6 for place in range(6)]]  # two batches, of four rows and of two
        spread_loss = float(torch.stack([model(input_ids=ids, labels=ids).loss for ids in spread.split(1)]).mean())
    count = 4 * (rows.shape[1] - 1)
    torch.testing.assert_close(linear_cross_entropy(e[:count], w, y[:count], head="full"), wanted)
    assert session.evaluate(6) == pytest.approx(spread_loss, rel=1e-5)
    monkeypatch.setattr(session, "corpus", replace(session.corpus, held_out=spread))
    assert session.evaluate(100) == pytest.approx(spread_loss, rel=1e-5)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses():
    def losses(**other):
        return [record.loss for record in LanguageSession(**SETTINGS | other).train(3)]

    assert losses() == losses() == losses(mode="ckpt")
    assert losses(data_seed=1) != losses() != losses(seed=1, data_seed=0)


def test_a_checkpoint_brings_its_tokenizer(tmp_path, session):
    with pytest.raises(T1Error, match=r"neither a preset nor a folder with a tokenizer\.json"):
        LanguageSession(**SETTINGS | {"model": str(tmp_path)})
    session.trainer.model.config.save_pretrained(tmp_path)
    session.trainer.model.save_pretrained(tmp_path)
    byte_pairs(read_texts(TEXT), 290).save(str(tmp_path / "tokenizer.json"))
    settings = {k: v for k, v in SETTINGS.items() if k not in ("changes", "vocabulary")}
    own = LanguageSession(**settings | {"model": str(tmp_path)})
    assert own.about()["vocabulary"] == 290 and own.step().loss > 0
    byte_pairs(read_texts(TEXT), 310).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(T1Error, match="the tokenizer has 310 tokens, the model's vocabulary 300"):
        LanguageSession(**settings | {"model": str(tmp_path)})
