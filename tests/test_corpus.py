"""The corpus reader: what it reads, what it refuses, and that the same seed gives the same rows."""

import pytest
import torch

from t1lib import corpus
from t1lib.errors import T1Error

LIMIT = "400KB"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_library_is_read_without_tests_within_its_limit():
    texts = corpus.standard_library(LIMIT)
    assert 0 < sum(len(text.encode()) for text in texts.values()) <= 400_000
    folders = {part for name in texts for part in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages"})
    assert list(texts) == list(corpus.standard_library(LIMIT))


def test_files_that_are_no_text_are_left_out(tmp_path):
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\xfe\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("c = 1\n")
    assert corpus.standard_library(root=tmp_path) == {"a.py": "a = 1\n"}


def test_an_empty_corpus_says_so(tmp_path):
    with pytest.raises(T1Error, match="corpus is empty"):
        corpus.standard_library(root=tmp_path)
    with pytest.raises(T1Error, match=r"corpus is empty.*within 1;"):
        corpus.standard_library(limit=1)


def test_a_vocabulary_beyond_the_corpus_says_what_it_reaches():
    texts = {"a.py": "alpha beta alpha beta\n"}
    with pytest.raises(T1Error, match=r"vocabulary 9000 .* reach (\d+) tokens") as found:
        corpus.byte_pairs(texts, 9000)
    reached = int(str(found.value).split("reach ")[1].split()[0])
    assert corpus.byte_pairs(texts, reached).get_vocab_size() == reached
    with pytest.raises(T1Error, match="vocabulary 256; allowed: 257"):
        corpus.byte_pairs(texts, 256)


def test_text_comes_back_from_its_tokens():
    texts = corpus.standard_library(LIMIT)
    tokenizer = corpus.byte_pairs(texts, 512)
    sample = "def f(self, x_1):\n\treturn 'ä€😀'  # 12\r\n"
    pieces = tokenizer.encode(sample).tokens
    assert len(pieces) < len(sample.encode())
    alphabet = {c: b for b, c in _byte_alphabet().items()}
    assert bytes(alphabet[c] for piece in pieces for c in piece).decode() == sample


def _byte_alphabet():
    """GPT-2's printable stand-ins of the 256 bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(rest)}


def test_the_same_seed_gives_the_same_rows_and_another_seed_another_split():
    one, two = (corpus.load_corpus(600, 32, limit=LIMIT) for _ in range(2))  # the second from the cache
    assert torch.equal(one.train, two.train) and torch.equal(one.held_out, two.held_out)
    assert one.sha256 == two.sha256 and one.files == two.files
    other = corpus.load_corpus(600, 32, limit=LIMIT, seed=1)
    assert other.sha256 == one.sha256
    assert other.held_out.shape != one.held_out.shape or not torch.equal(other.held_out, one.held_out)


def test_rows_hold_tokens_of_the_vocabulary_and_the_split_is_by_file():
    found = corpus.load_corpus(600, 32, limit=LIMIT, held_out=0.2)
    assert found.train.dtype == torch.int64 and found.train.shape[1] == found.held_out.shape[1] == 32
    assert int(found.train.min()) >= 0 and int(found.train.max()) < 600
    texts = corpus.standard_library(LIMIT)
    train, held = corpus.split_files(texts, 0.2, 0)
    assert not set(train) & set(held) and set(train) | set(held) == set(texts)
    share = found.held_out.numel() / (found.held_out.numel() + found.train.numel())
    assert 0.1 < share < 0.5


def test_a_damaged_cache_is_made_again(cache):
    first = corpus.load_corpus(600, 32, limit=LIMIT)
    (kept,) = cache.glob("bpe-600-*.json")
    kept.write_text("{")
    assert torch.equal(corpus.load_corpus(600, 32, limit=LIMIT).train, first.train)
    assert kept.stat().st_size > 1000


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "file" / "cache"))
    assert len(corpus.load_corpus(600, 32, limit=LIMIT).train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq": 1}, "seq 1"),
        ({"held_out": 0.0}, "held_out 0.0"),
        ({"held_out": 1.5}, "held_out 1.5"),
        ({"seq": 10**7}, "less than one row"),
        ({"limit": "12 parsecs"}, "bad size"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(T1Error, match=message):
        corpus.load_corpus(**{"vocabulary": 600, "seq": 32, "limit": LIMIT} | arguments)
