"""The corpus reader: what it reads, what it refuses, and that the same seed gives the same rows."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from t1lib.errors import T1Error
from t1lib.text import corpus
from t1lib.text.texts import read_texts

SOURCE = Path(json.__file__).parent  # a few modules, 40 kB


load = partial(corpus.load_corpus, 600, 32, source=SOURCE)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_vocabulary_beyond_the_corpus_says_what_it_reaches():
    texts = {"a.py": "alpha beta alpha beta\n"}
    with pytest.raises(T1Error, match=r"vocabulary 9000 .* reach (\d+) tokens") as found:
        corpus.byte_pairs(texts, 9000)
    reached = int(str(found.value).split("reach ")[1].split()[0])
    assert corpus.byte_pairs(texts, reached).get_vocab_size() == reached
    for wrong in (256, 999_999_999):  # at which the library would abort the process
        with pytest.raises(T1Error, match=f"vocabulary {wrong}; allowed: 257"):
            corpus.byte_pairs(texts, wrong)


def test_text_comes_back_from_its_tokens():
    """Long runs of one kind, too, of which no word is longer than 513 characters."""
    runs = [kind * 700 for kind in ("x", "7", " ", "=", "\n", "\r\n", "ä", " \n", "\u3000")]
    long, short = "a".join(runs) + "".join(runs), "def f(self, x_1):\n\treturn 'ä€😀'  # 12\r\n"
    for texts, sample in ((read_texts(SOURCE), short), ({"a": long}, long)):
        tokenizer = corpus.byte_pairs(texts, 512 if sample == short else 300)
        ids = tokenizer.encode(sample).ids
        assert len(ids) < len(sample.encode())
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample
    words = tokenizer.pre_tokenizer.pre_tokenize_str(long)
    assert max(end - begin for _, (begin, end) in words) <= 513  # 256 characters, then up to 256 of line breaks


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.9999])
def test_rows_are_the_texts_in_order_and_the_last_are_held_out(share, monkeypatch):
    monkeypatch.setattr(corpus, "HELD_OUT", share)
    found = load()
    ids = torch.cat([found.train, found.held_out])
    assert ids.dtype == torch.int64 and ids.shape[1] == 32 and int(ids.min()) >= 0 and int(ids.max()) < 600
    texts = read_texts(SOURCE)
    decoded = found.tokenizer.decode(ids.flatten().tolist(), skip_special_tokens=False).split(corpus.END)
    assert all(text in texts.values() for text in decoded[:-1]) and len(decoded) == len(texts)
    assert len(found.held_out) == min(max(round(share * len(ids)), 1), len(ids) - 1)


def test_a_damaged_cache_is_made_again(cache, monkeypatch):
    first = load()
    (kept,) = cache.glob("bpe-600-*.json")
    whole, content = kept.read_bytes(), first.tokenizer.to_str()
    trained, train = [], corpus._train
    monkeypatch.setattr(corpus, "_train", lambda *arguments: trained.append(1) or train(*arguments))
    assert load().tokenizer.to_str() == content and not trained
    token = next(t for t in first.tokenizer.get_vocab() if len(t) > 6)
    flipped = whole.replace(token.encode(), token[:-1].encode() + bytes([token.encode()[-1] ^ 1]), 1)
    for damage in (b"{", b"", whole[:-100], flipped):
        kept.write_bytes(damage)
        assert load().tokenizer.to_str() == content
        assert trained.pop() and kept.read_bytes() == whole


def test_bad_arguments_are_named_and_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    for wrong, message in (({"seq": 1}, "seq 1"), ({"seq": 10**7}, "two rows"), ({"limit": "12 parsecs"}, "bad size")):
        with pytest.raises(T1Error, match=message):
            corpus.load_corpus(**{"vocabulary": 600, "seq": 32, "source": SOURCE} | wrong)
    (tmp_path / "file").write_text("{")
    with pytest.raises(T1Error, match="cannot read tokenizer"):
        corpus.load_corpus(None, 32, source=SOURCE, tokenizer=tmp_path / "file")
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "file" / "cache"))
    assert len(load().train)


def test_rows_and_batches_depend_on_step_and_seed_alone_and_an_epoch_takes_each_row_once():
    found, again, other = load(), load(), load(seed=1)  # the second from the cache
    assert torch.equal(found.train, again.train) and torch.equal(found.held_out, again.held_out)
    assert (found.sha256, found.files) == (again.sha256, again.files) and other.sha256 == found.sha256
    assert not torch.equal(other.held_out, found.held_out)
    rows = len(found.train)

    def batch(step, seed=5):
        return found.batch(step, rows // 3, seed)["input_ids"]

    epoch = [batch(step) for step in range(3)]
    assert torch.equal(batch(1), epoch[1])
    assert len(torch.unique(torch.cat(epoch), dim=0)) == len(torch.unique(found.train, dim=0)) or rows % 3
    assert not torch.equal(batch(3), epoch[0])
    assert not torch.equal(batch(0, seed=6), epoch[0])
    with pytest.raises(T1Error, match=rf"batch {rows + 1}; the corpus has {rows} rows"):
        found.batch(0, rows + 1, 0)
