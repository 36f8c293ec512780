"""Texts: what is read of the library, of files and folders, and what is refused."""

import json

import pytest

from t1lib import texts
from t1lib.errors import T1Error, UnavailableError
from t1lib.texts import LIBRARY, read_texts

LIMIT = "400KB"


def test_the_library_is_read_without_tests_within_its_limit():
    found = read_texts(LIBRARY, LIMIT)
    assert 0 < sum(len(text.encode()) for text in found.values()) <= 400_000
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages"})
    assert list(found) == list(read_texts(LIBRARY, LIMIT))


def test_of_the_library_tests_and_generated_files_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\xfe\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("c = 1\n")
    monkeypatch.setattr(texts.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert read_texts() == {"a.py": "a = 1\n"}
    (tmp_path / "a.py").unlink()
    with pytest.raises(T1Error, match="corpus is empty: the standard library"):
        read_texts()


def test_a_folder_gives_all_text_below_it(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.md").write_text("some text")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x01")
    (tmp_path / "nul.txt").write_text("a\0b")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "blank.txt").write_text(" \n")
    lines = [{"text": "first"}, {"content": "second", "id": 3}]
    (tmp_path / "part.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_texts(tmp_path) == {"deep/a.md": "some text", "part.jsonl#0": "first", "part.jsonl#1": "second"}
    assert read_texts(tmp_path / "deep" / "a.md") == {"a.md": "some text"}
    assert sum(map(len, read_texts(tmp_path, 10).values())) <= 10


def test_a_record_may_hold_other_ends_of_lines(tmp_path):
    found = ["a\u2028b", "c\u2029d\u0085e", "f"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in found]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    assert sorted(read_texts(tmp_path / "a.jsonl").values()) == sorted(found)


def test_the_hash_is_of_names_and_texts_in_any_order():
    one = texts.corpus_hash({"a": "x", "b": "y"})
    assert one == texts.corpus_hash({"b": "y", "a": "x"})
    assert one not in (texts.corpus_hash({"a": "y", "b": "x"}), texts.corpus_hash({"a": "x"}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x00\x01", "not UTF-8 text"),
        ("a.txt", b"\xff\xfe", "not UTF-8 text"),
        ("a.txt", b" \n", "corpus is empty"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b'{"title": "x"}', "record 0: no text; allowed: an object with a string in 'text' or 'content'"),
        ("a.jsonl", b"[1]", "record 0: no text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(T1Error, match=message):
        read_texts(tmp_path / name)


def test_what_is_not_there_or_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(T1Error, match=r"no corpus at .*nowhere; allowed: a file, a folder, or 'stdlib'"):
        read_texts(tmp_path / "nowhere")
    with pytest.raises(T1Error, match="corpus is empty"):
        read_texts(tmp_path)


def test_a_limit_below_every_text_says_what_it_may_be(tmp_path):
    (tmp_path / "a.txt").write_text("ä" * 50)
    (tmp_path / "b.txt").write_text("b" * 200)
    message = r"a\.txt holds no text within limit 99B; allowed: 100, its smallest text, or more$"
    with pytest.raises(T1Error, match=message):
        read_texts(tmp_path / "a.txt", "99B")
    assert read_texts(tmp_path, 100) == {"a.txt": "ä" * 50}
    with pytest.raises(T1Error, match="the standard library's sources holds no text within limit 1; allowed: "):
        read_texts(LIBRARY, 1)


def test_parquet_needs_its_library(tmp_path):
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        with pytest.raises(UnavailableError, match="needs pyarrow"):
            read_texts(tmp_path)
        return
    import pandas as pd

    pd.DataFrame({"text": ["one", "two"]}).to_parquet(tmp_path / "a.parquet")
    assert read_texts(tmp_path) == {"a.parquet#0": "one", "a.parquet#1": "two"}
