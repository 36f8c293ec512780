"""Texts, and what is refused as one; rows of tokens; and a small language model on them."""

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers

from t1lib.heads import linear_cross_entropy
from t1lib.measure.heads import operands
from t1lib.text import corpus
from t1lib.text.corpus import LIBRARY, read_texts
from t1lib.text.session import LanguageSession

SOURCE = Path(json.__file__).parent  # a few modules, 40 kB
TEXT = argparse.__file__  # 100 kB
SETTINGS = dict(
    model="tiny", mode="gpu", changes={"num_hidden_layers": 1}, vocabulary=300, seq=16, batch=4, data=TEXT,
    optimizer={"name": "adamw", "lr": 3e-3}, dtype="float32", device="cpu", head="chunked",
)  # fmt: skip
load = partial(corpus.load_corpus, 600, 32, source=SOURCE)


def texts_of(source=LIBRARY, limit=None):
    return read_texts(source, limit)[0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_of_the_library_tests_and_generated_files_are_left_out(tmp_path, monkeypatch):
    """What is left is within the limit, and the same every time."""
    found = texts_of(LIBRARY, "400KB")
    assert 0 < sum(len(text.encode()) for text in found.values()) <= 400_000
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages"})
    assert list(found) == list(texts_of(LIBRARY, "400KB"))
    (tmp_path / "test").mkdir()
    for name, content in {"a": b"a = 1\n", "b": b"# \xff\xfe\n", "_sysconfigdata__x": b"x", "test/c": b"c"}.items():
        (tmp_path / f"{name}.py").write_bytes(content)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert texts_of() == {"a.py": "a = 1\n"}
    (tmp_path / "a.py").unlink()
    refused(texts_of, "corpus is empty: the standard library")


def test_a_folder_gives_all_text_below_it(tmp_path):
    for name, content in {
        "deep/a.md": b"some text", "picture.png": b"\x89PNG\x00\x01", "nul.txt": b"a\0b", ".hidden": b"no",
        "mark.TXT": b"\xef\xbb\xbfthird", "blank.txt": b" \n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path) == {"deep/a.md": "some text", "mark.TXT": "third"}
    assert texts_of(tmp_path / "deep" / "a.md") == {"a.md": "some text"}
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    refused(lambda: texts_of(tmp_path), "deep/loop is a link to a folder; put the folder there")
    (tmp_path / "deep" / "loop").unlink()
    assert sum(map(len, texts_of(tmp_path, 10).values())) <= 10


def test_of_equal_texts_one_is_taken(tmp_path):
    """What is held out of one would be trained on in another."""
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "copy.md").write_text("one text")
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "other.txt").write_text("another")
    texts, copies = read_texts(tmp_path)
    assert sorted(texts.values()) == ["another", "one text"] and copies == 2
    assert read_texts(tmp_path, 7) == ({"other.txt": "another"}, 0)  # of what is beyond the limit none is a copy


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path, monkeypatch):
    """Of a file whose beginning is not text no more is read."""
    file, deep = tmp_path / "a.txt", tmp_path / "deep"
    denied = Mock(side_effect=PermissionError(13, "Permission denied", str(deep)))
    (tmp_path / "model.safetensors").write_bytes(b"a\0" + b"b" * 99)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        refused(lambda: texts_of(tmp_path), "corpus is empty")
        file.write_text("text")
        for source in (tmp_path, file):
            refused(lambda source=source: texts_of(source), f"cannot read {file}: Permission denied")
        patch.setattr(os, "scandir", denied)
        refused(lambda: texts_of(tmp_path), f"cannot read {deep}: Permission denied")
    file.unlink()
    file.symlink_to("nowhere")
    refused(lambda: texts_of(tmp_path), f"cannot read {file}: No such file")


def test_the_hash_is_of_names_and_texts_in_any_order():
    one = corpus.corpus_hash({"a": "x", "b": "y"})
    assert one == corpus.corpus_hash({"b": "y", "a": "x"}) and len(corpus.corpus_hash({"a\udcff.txt": "x"})) == 64
    assert one not in (corpus.corpus_hash({"a": "y", "b": "x"}), corpus.corpus_hash({"a": "x"}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x00\x01", "not UTF-8 text"),
        ("a.txt", b" \n", "corpus is empty"),
        ("a.jsonl", b'{"text": "a"}', "a.jsonl: .jsonl is not read; allowed: UTF-8 text"),
        ("A.JSONL.GZ", b"\xff", "A.JSONL.GZ: .gz is not read; allowed: UTF-8 text"),
        ("a.tgz", b"\x1f\x8b", "a.tgz: .tgz is not read; allowed: UTF-8 text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    """As a file, and by its folder, where what is no text is left out, but not what holds texts in another form."""
    (tmp_path / name).write_bytes(content)
    sources = [tmp_path / name] + [tmp_path] * (name != "a.bin")
    for source in sources:
        refused(lambda source=source: texts_of(source), message)


def test_a_source_or_a_limit_that_leaves_nothing_is_refused(tmp_path):
    for source in (tmp_path / "nowhere", "", "x" * 300, "a\0b"):
        refused(lambda source=source: texts_of(source), "no corpus at '", "allowed: a file, a folder, or 'stdlib'")
    refused(lambda: texts_of(tmp_path), "corpus is empty")
    (tmp_path / "a.txt").write_text("ä" * 50)
    (tmp_path / "b.txt").write_text("b" * 200)
    message = "a.txt holds no text within limit 99B; allowed: 100, its smallest text, or more"
    refused(lambda: texts_of(tmp_path / "a.txt", "99B"), message)
    assert texts_of(tmp_path, 100) == {"a.txt": "ä" * 50}
    refused(lambda: texts_of(LIBRARY, 1), "the standard library's sources holds no text within limit 1; allowed: ")


def test_a_vocabulary_beyond_the_corpus_says_what_it_reaches():
    texts = {"a.py": "alpha beta alpha beta\n"}
    message = refused(lambda: corpus.byte_pairs(texts, 9000), "vocabulary 9000 ")
    reached = int(message.split("reach ")[1].split()[0])
    assert corpus.byte_pairs(texts, reached).get_vocab_size() == reached
    for wrong in (256, 999_999_999):  # at which the library would abort the process
        refused(lambda wrong=wrong: corpus.byte_pairs(texts, wrong), f"vocabulary {wrong}; allowed: 257")


def test_text_comes_back_from_its_tokens():
    """Long runs of one kind, too, of which no word is longer than 513 characters."""
    runs = [kind * 700 for kind in ("x", "7", " ", "=", "\n", "\r\n", "ä", " \n", "\u3000")]
    long, short = "a".join(runs) + "".join(runs), "def f(self, x_1):\n\treturn 'ä€😀'  # 12\r\n"
    for given, sample in ((texts_of(SOURCE), short), ({"a": long}, long)):
        tokenizer = corpus.byte_pairs(given, 512 if sample == short else 300)
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
    texts = texts_of(SOURCE)
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
        given = {"vocabulary": 600, "seq": 32, "source": SOURCE} | wrong
        refused(partial(corpus.load_corpus, **given), message)
    (tmp_path / "file").write_text("{")
    refused(lambda: corpus.load_corpus(None, 32, source=SOURCE, tokenizer=tmp_path / "file"), "cannot read tokenizer")
    monkeypatch.setenv("T1_CACHE", str(tmp_path / "file" / "cache"))
    assert len(load().train)


def test_a_tokenizer_saved_with_settings_for_a_batch_tokenizes_whole_texts(tmp_path):
    tokenizer, path = corpus.byte_pairs(texts_of(SOURCE), 300), tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    plain = corpus.load_corpus(None, 32, source=SOURCE, tokenizer=path)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_id=0, pad_token=corpus.END)
    tokenizer.save(str(path))
    assert torch.equal(corpus.load_corpus(None, 32, source=SOURCE, tokenizer=path).train, plain.train)


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
    refused(lambda: found.batch(0, rows + 1, 0), f"batch {rows + 1}; the corpus has {rows} rows")


@pytest.fixture(scope="module")
def session():
    return LanguageSession(**SETTINGS)


def test_it_learns_and_its_loss_on_hidden_states_is_the_models_own(session, monkeypatch, tmp_path):
    path, rows, before = tmp_path / "states.pt", session.corpus.held_out, session.evaluate(16)
    losses = [record.loss for record in session.train(20)]
    assert len(losses) == 20 and losses[-1] < losses[0] and session.evaluate(16) < before
    assert session.held_out(50, str(path))["tokens"] == 50 == len(torch.load(path)["y"])
    found, most = session.held_out(10**9, str(path)), rows.shape[0] * (rows.shape[1] - 1)
    e, w, y = operands("real", (most, 300, 64), torch.float32, torch.device("cpu"), path=path)
    assert len(e) == len(y) == found["tokens"] == most and int(y.min()) >= 0
    assert float(linear_cross_entropy(e, w, y, head="full")) == pytest.approx(found["loss"], rel=1e-5)
    model = session.trainer.model
    with torch.no_grad():
        wanted = torch.stack([model(input_ids=ids, labels=ids).loss for ids in rows[:4].split(1)]).mean()
    count = 4 * (rows.shape[1] - 1)
    torch.testing.assert_close(linear_cross_entropy(e[:count], w, y[:count], head="full"), wanted)
    monkeypatch.setattr(session, "corpus", replace(session.corpus, held_out=rows[:4]))
    assert session.evaluate(6) == pytest.approx(float(wanted), rel=1e-5)  # there are four


def test_a_checkpoint_brings_its_tokenizer(tmp_path, session):
    asked = partial(LanguageSession, **SETTINGS | {"model": str(tmp_path)})
    refused(asked, "neither a preset nor a folder with a tokenizer.json")
    session.trainer.model.config.save_pretrained(tmp_path)
    session.trainer.model.save_pretrained(tmp_path)
    corpus.byte_pairs(texts_of(TEXT), 290).save(str(tmp_path / "tokenizer.json"))
    settings = {k: v for k, v in SETTINGS.items() if k not in ("changes", "vocabulary")}
    own = LanguageSession(**settings | {"model": str(tmp_path)})
    about = own.about()
    assert (about["vocabulary"], about["files"], len(about["sha256"])) == (290, 1, 64) and own.step().loss > 0
    corpus.byte_pairs(texts_of(TEXT), 310).save(str(tmp_path / "tokenizer.json"))
    asked = partial(LanguageSession, **settings | {"model": str(tmp_path)})
    refused(asked, "the tokenizer has 310 tokens, the model's vocabulary 300")
    gaps = Tokenizer(models.WordLevel({corpus.END: 0, "a": 1, "b": 300}, "a"))
    gaps.pre_tokenizer = pre_tokenizers.Whitespace()
    gaps.save(str(tmp_path / "tokenizer.json"))
    refused(asked, "the tokenizer has 301 tokens")
