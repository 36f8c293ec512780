"""The corpus reader: what it reads, what it refuses, and that the same seed gives the same rows."""

import pytest
import torch

from t1lib.errors import T1Error
from t1lib.text import corpus
from t1lib.text.texts import LIBRARY, read_texts

LIMIT = "400KB"


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
    with pytest.raises(T1Error, match="vocabulary 256; allowed: 257"):
        corpus.byte_pairs(texts, 256)


def test_text_comes_back_from_its_tokens():
    texts = read_texts(LIBRARY, LIMIT)
    tokenizer = corpus.byte_pairs(texts, 512)
    sample = "def f(self, x_1):\n\treturn 'ä€😀'  # 12\r\n"
    pieces = tokenizer.encode(sample).tokens
    assert len(pieces) < len(sample.encode())
    alphabet = {c: b for b, c in _byte_alphabet().items()}
    assert bytes(alphabet[c] for piece in pieces for c in piece).decode() == sample


def _byte_alphabet():
    """The printable characters with which GPT-2 represents the 256 bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(rest)}


def test_the_same_seed_gives_the_same_rows_and_another_seed_another_split():
    one, two = (corpus.load_corpus(600, 32, limit=LIMIT) for _ in range(2))  # the second from the cache
    assert torch.equal(one.train.ids, two.train.ids) and torch.equal(one.held_out.ids, two.held_out.ids)
    assert one.sha256 == two.sha256 and one.files == two.files
    other = corpus.load_corpus(600, 32, limit=LIMIT, seed=1)
    assert other.sha256 == one.sha256
    assert not torch.equal(other.held_out.ids[0], one.held_out.ids[0])


def test_rows_hold_tokens_of_the_vocabulary_and_the_split_is_by_file():
    found = corpus.load_corpus(600, 32, limit=LIMIT, held_out=0.2)
    ids = found.train.ids
    assert ids.dtype == torch.int64 and ids.shape[1] == found.held_out.ids.shape[1] == 32
    assert int(ids.min()) >= 0 and int(ids.max()) < 600 and found.train.text.all()
    texts = read_texts(LIBRARY, LIMIT)
    train, held = corpus.split_texts(texts, 0.2, 0)
    assert not set(train) & set(held) and sorted(train + held) == sorted(texts.values())
    share = len(found.held_out) / (len(found.held_out) + len(found.train))
    assert 0.1 < share < 0.5


def test_a_damaged_cache_is_made_again(cache):
    first = corpus.load_corpus(600, 32, limit=LIMIT)
    (kept,) = cache.glob("bpe-600-*.json")
    kept.write_text("{")
    assert torch.equal(corpus.load_corpus(600, 32, limit=LIMIT).train.ids, first.train.ids)
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


def test_texts_apart_are_padded_at_the_end_and_padding_has_no_label(tmp_path):
    for name, text in {"a": "one two", "b": "three four five six seven eight nine ten", "c": "x", "d": "y y"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = corpus.load_corpus(257, 8, source=tmp_path, packed=False, held_out=0.01)
    batch = found.train.take(slice(None))
    ids, labels = batch["input_ids"], batch["labels"]
    assert bool((found.train.text[:, 0]).all()) and not bool(found.train.text.all())
    assert torch.equal(labels == -100, ~found.train.text)
    assert torch.equal(ids[found.train.text], labels[found.train.text])
    for row, text in zip(ids, found.train.text, strict=True):
        assert text.tolist() == sorted(text.tolist(), reverse=True)  # text, then padding
        assert text.all() or (row[text.sum() - 1 :] == 0).all()  # the padding is end tokens


def test_batches_depend_on_step_and_seed_alone_and_an_epoch_takes_each_row_once():
    rows = corpus.load_corpus(600, 32, limit=LIMIT).train
    size = len(rows) // 3
    epoch = [rows.batch(step, size, seed=5)["input_ids"] for step in range(3)]
    assert torch.equal(rows.batch(1, size, seed=5)["input_ids"], epoch[1])
    assert len(torch.unique(torch.cat(epoch), dim=0)) == len(torch.unique(rows.ids, dim=0)) or len(rows) % 3
    assert not torch.equal(rows.batch(3, size, seed=5)["input_ids"], epoch[0])
    assert not torch.equal(rows.batch(0, size, seed=6)["input_ids"], epoch[0])
    with pytest.raises(T1Error, match=rf"batch {len(rows) + 1}; the corpus has {len(rows)} rows"):
        rows.batch(0, len(rows) + 1, 0)


def test_a_tokenizer_of_the_users_own(tmp_path):
    texts = read_texts(LIBRARY, LIMIT)
    corpus.byte_pairs(texts, 700).save(str(tmp_path / "tokenizer.json"))
    own = corpus.load_corpus(None, 32, limit=LIMIT, tokenizer=tmp_path / "tokenizer.json")
    assert own.vocabulary == 700
    assert torch.equal(own.train.ids, corpus.load_corpus(700, 32, limit=LIMIT).train.ids)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(T1Error, match="cannot read tokenizer"):
        corpus.load_corpus(None, 32, limit=LIMIT, tokenizer=tmp_path / "broken.json")


def test_a_single_text_is_cut_in_two(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {i}\n" for i in range(200)))
    train, held = corpus.split_texts(read_texts(tmp_path / "one.txt"), 0.1, 0)
    assert held[0].startswith("line ") and train[0].endswith("\n")
    assert (train[0] + held[0]).count("\n") == 200 and 15 <= held[0].count("\n") <= 25


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
@pytest.mark.parametrize(
    "sizes", [[100_000], [85_000, 800], [85_000, 4_000], [30_000] * 4, [1_000] * 100, [10, 20, 50_000, 5]]
)
def test_the_held_out_share_is_near_what_is_asked_for(sizes, share):
    texts = {str(i): "Title\n" + chr(97 + i) * size for i, size in enumerate(sizes)}  # no line ends near a cut
    for seed in range(4):
        train, held = corpus.split_texts(texts, share, seed)
        assert (train, held) == corpus.split_texts(texts, share, seed)
        total, kept = sum(map(len, texts.values())), sum(map(len, held))
        assert abs(kept - share * total) <= min(share, 1 - share) * total / 2 + 1
        pieces = [text for text in train + held if text not in texts.values()]
        whole = [text for text in train + held if text in texts.values()]
        assert sorted(whole + (["".join(pieces)] if pieces else [])) == sorted(texts.values())
        assert len(pieces) in (0, 2)


def test_texts_stay_whole_where_their_sizes_allow_it_and_else_are_cut_at_the_end_of_a_line():
    assert sorted(map(len, corpus.split_texts({"a": "x" * 93, "b": "y" * 7}, 0.05, 0)[1])) in ([5], [7])
    assert [len(corpus.split_texts({str(i): "x" * 10 for i in range(10)}, 0.3, seed)[1]) for seed in (0, 1)] == [3, 3]
    text = "".join(f"line {i}\n" for i in range(1000))
    train, held = corpus.split_texts({"a": text, "b": text.upper()}, 0.05, 0)
    assert train[0].endswith("\n") and held[0].lower().startswith("line ")


def test_long_runs_of_one_kind_come_back_from_their_tokens():
    runs = [kind * 700 for kind in ("x", "7", " ", "=", "\n", "\r\n", "ä", " \n", "\u3000")]
    text = "a".join(runs) + "".join(runs)
    tokenizer = corpus.byte_pairs({"a": text}, 300)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert max(end - begin for _, (begin, end) in words) <= 513  # 256 characters, then up to 256 of line breaks


def test_a_rest_without_anything_to_predict_is_no_row(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"{i:016d}")  # 17 tokens, the end token included
    found = corpus.load_corpus(257, 16, source=tmp_path, packed=False, held_out=0.2)
    assert len(found.train) + len(found.held_out) == 20 and found.train.text.all() and found.held_out.text.all()
