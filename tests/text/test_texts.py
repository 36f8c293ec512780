"""Texts: what is read from the standard library, files and folders, and what is refused."""

import importlib.util
import json

import pandas
import pytest

from t1lib.errors import T1Error
from t1lib.text import texts
from t1lib.text.texts import LIBRARY, read_texts

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
    (tmp_path / "mark.TXT").write_bytes(b"\xef\xbb\xbfthird")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "blank.txt").write_text(" \n")
    lines = [{"text": "first\u2028"}, {"content": "second", "id": 3}]  # with another end of a line
    (tmp_path / "PART.JSONL").write_text("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    lines = {"PART.JSONL#0": "first\u2028", "PART.JSONL#1": "second"}
    assert read_texts(tmp_path) == {"deep/a.md": "some text", "mark.TXT": "third", **lines}
    assert read_texts(tmp_path / "deep" / "a.md") == {"a.md": "some text"}
    assert sum(map(len, read_texts(tmp_path, 10).values())) <= 10


def test_the_hash_is_of_names_and_texts_in_any_order():
    one = texts.corpus_hash({"a": "x", "b": "y"})
    assert one == texts.corpus_hash({"b": "y", "a": "x"}) and len(texts.corpus_hash({"a\udcff.txt": "x"})) == 64
    assert one not in (texts.corpus_hash({"a": "y", "b": "x"}), texts.corpus_hash({"a": "x"}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x00\x01", "not UTF-8 text"),
        ("a.txt", b" \n", "corpus is empty"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b'{"title": "x"}', "record 0: no text; allowed: an object with a string in 'text' or 'content'"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl, record 0: the text is not Unicode"),
        ("data-00000-of-00001.arrow", b"\xff", r"001.arrow: \.arrow is not read; allowed: UTF-8 text, or .*\.jsonl or"),
        ("A.JSONL.GZ", b"\xff", r"A\.JSONL\.GZ: \.\w+ is not read; allowed: UTF-8 text, or"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    """As a file, and by its folder, where what is no text is left out, but not what holds texts in another form."""
    (tmp_path / name).write_bytes(content)
    sources = [tmp_path / name] + [tmp_path] * (name != "a.bin")
    for source in sources:
        with pytest.raises(T1Error, match=message):
            read_texts(source)


def test_what_is_not_there_or_leaves_nothing_is_refused(tmp_path):
    for source in (tmp_path / "nowhere", "", "x" * 300, "a\0b"):
        with pytest.raises(T1Error, match=r"no corpus at '.*; allowed: a file, a folder, or 'stdlib'"):
            read_texts(source)
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
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    there = importlib.util.find_spec("pyarrow")
    with pytest.raises(T1Error, match=r"cannot read .*a\.parquet: " if there else "pyarrow"):
        read_texts(tmp_path)
    if there:
        pandas.DataFrame({"text": ["one", "two"]}).to_parquet(tmp_path / "a.parquet")
        assert read_texts(tmp_path) == {"a.parquet#0": "one", "a.parquet#1": "two"}


def test_folders_with_a_run_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "run.json").write_text('{"kind": "of another program"}')
    run = tmp_path / "runs" / "one"
    (run / "model").mkdir(parents=True)
    (run / texts.RUN).write_text('{"t1lib": "1", "corpus": "", "settings": {}}')
    (run / "metrics.csv").write_text("step,loss")
    (run / "model" / "config.json").write_text("{}")
    assert sorted(read_texts(tmp_path)) == ["a.txt", "run.json"]
    with pytest.raises(T1Error, match="one holds a run, whose files change; move them"):
        read_texts(run)


def test_linked_folders_are_read_once_and_without_end(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "own", other):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(f"text of {folder.name}")
    for place, target in {"data": other, "again": other, "self": root, "up": tmp_path, "to-own": root / "own"}.items():
        (root / place).symlink_to(target)
    (root / "loop").symlink_to("loop")
    (other / "back").symlink_to(root)
    assert read_texts(root) == {"own/a.txt": "text of own", "again/a.txt": "text of other"}
