"""Texts: what is read from the standard library, files and folders, and what is refused."""

import importlib.util
import json

import pandas
import pytest

from t1lib.errors import T1Error
from t1lib.text import texts
from t1lib.text.texts import LIBRARY, read_texts


def test_of_the_library_tests_and_generated_files_are_left_out(tmp_path, monkeypatch):
    """What is left is within the limit, and the same every time."""
    found = read_texts(LIBRARY, "400KB")
    assert 0 < sum(len(text.encode()) for text in found.values()) <= 400_000
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages"})
    assert list(found) == list(read_texts(LIBRARY, "400KB"))
    (tmp_path / "test").mkdir()
    for name, content in {"a": b"a = 1\n", "b": b"# \xff\xfe\n", "_sysconfigdata__x": b"x", "test/c": b"c"}.items():
        (tmp_path / f"{name}.py").write_bytes(content)
    monkeypatch.setattr(texts.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert read_texts() == {"a.py": "a = 1\n"}
    (tmp_path / "a.py").unlink()
    with pytest.raises(T1Error, match="corpus is empty: the standard library"):
        read_texts()


def test_a_folder_gives_all_text_below_it(tmp_path):
    (tmp_path / "deep").mkdir()
    lines = [{"text": "first\u2028"}, {"content": "second", "id": 3}]  # with another end of a line
    records = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    for name, content in {
        "deep/a.md": b"some text", "picture.png": b"\x89PNG\x00\x01", "nul.txt": b"a\0b", ".hidden": b"no",
        "mark.TXT": b"\xef\xbb\xbfthird", "blank.txt": b" \n", "PART.JSONL": records.encode(),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    found = {"PART.JSONL#0": "first\u2028", "PART.JSONL#1": "second"}
    assert read_texts(tmp_path) == {"deep/a.md": "some text", "mark.TXT": "third", **found}
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


def test_a_source_or_a_limit_that_leaves_nothing_is_refused(tmp_path):
    for source in (tmp_path / "nowhere", "", "x" * 300, "a\0b"):
        with pytest.raises(T1Error, match=r"no corpus at '.*; allowed: a file, a folder, or 'stdlib'"):
            read_texts(source)
    with pytest.raises(T1Error, match="corpus is empty"):
        read_texts(tmp_path)
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
    run = tmp_path / "runs" / "one"
    (run / "model").mkdir(parents=True)
    for path, content in {
        tmp_path / "a.txt": "some text", tmp_path / "run.json": '{"kind": "of another program"}',
        run / texts.RUN: '{"t1lib": "1", "corpus": "", "settings": {}}', run / "metrics.csv": "step,loss",
        run / "model" / "config.json": "{}",
    }.items():  # fmt: skip
        path.write_text(content)
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
