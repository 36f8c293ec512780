"""Texts by name: the running Python's own standard library, or the user's files and folders."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from t1lib.errors import T1Error, require, shown
from t1lib.heads import parse_bytes

LIBRARY = "stdlib"
RUN, METRICS = "run.json", "metrics.csv"  # in the folder of a training run (`t1lib.text.run`)
FIELDS = ("text", "content")  # fields of a dataset's record; the first that is present is the text
# Of the library, left out: tests, which many distributions lack. Of its files, those with the build machine's paths.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_UNREAD = {".arrow", ".bz2", ".gz", ".xz", ".zst"}  # datasets, but not read; files beside them are hardly the text
_READ = "UTF-8 text, or a dataset's .jsonl or .parquet shards"


def sha256(*texts: str) -> str:
    encoded = [text.encode(errors="surrogateescape") + b"\0" for text in texts]  # file names need not be UTF-8
    return hashlib.sha256(b"".join(encoded)).hexdigest()


def corpus_hash(texts: dict[str, str]) -> str:
    """Hash of names and texts, regardless of their order."""
    return sha256(*(part for name in sorted(texts) for part in (name, texts[name])))


def read_texts(source: str | Path = LIBRARY, limit: int | str | None = None) -> dict[str, str]:
    """Name → text of `source`: "stdlib", a file of UTF-8 text or a shard (`.jsonl`, or `.parquet` if pyarrow is there)
    with one text per record, in the field "text" or "content"; or a folder with everything below it, except for files
    that are not text, hidden files, and folders with a training run. `limit` (bytes, or "2MB") keeps whole texts up to
    that size, in the order of their names' hashes. Raises `T1Error` for a source that does not exist, a file that is
    not text, a shard that is broken, compressed or of another kind (even as one file of a folder), a link to a folder
    in a folder, a folder that itself holds a run, and if nothing is left."""
    library, path, what = source == LIBRARY, Path(source), f"text in {source}"
    if library:
        path, what = Path(sysconfig.get_paths()["stdlib"]), "the standard library's sources"
    there = str(source) != "" and os.path.exists(path)
    require(there, f"no corpus at {shown(str(source))}; allowed: a file, a folder, or {LIBRARY!r}")
    if path.is_file():
        what, found = str(path), _records(path, path.name)
        require(found is not None, f"{path} is not UTF-8 text, nor a .jsonl or .parquet shard of a dataset")
    else:
        require(not _holds_run(path), f"{path} holds a run, whose files change; move them, or its texts, elsewhere")
        found = _below(path, library)
    left, kept, sizes = 2**62 if limit is None else parse_bytes(limit), {}, []
    for name, text in sorted(found, key=lambda entry: sha256(entry[0])):
        if text.strip():
            sizes.append(len(text.encode()))
            if sizes[-1] <= left:
                left -= sizes[-1]
                kept[name] = text
    require(bool(sizes), f"the corpus is empty: {what} holds no text")
    require(bool(kept), f"{what} holds no text within limit {limit}; allowed: {min(sizes)}, its smallest text, or more")
    return kept


def _below(root: Path, library: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each text below `root`, as `read_texts` says; of the library, only in its sources."""
    for place, folders, names in os.walk(root):
        folder = Path(place)
        if _holds_run(folder):
            folders.clear()
            continue
        folders[:] = sorted(n for n in folders if not n.startswith(".") and not (library and n in _SKIPPED))
        for link in (folder / name for name in folders if not library):
            require(not link.is_symlink(), f"{link} is a link to a folder; put the folder there, or give it alone")
        for path in (folder / name for name in names if not name.startswith(".")):
            source = path.suffix == ".py" and not path.match("_sysconfigdata*")
            if path.is_file() and (source or not library):
                yield from _records(path, path.relative_to(root).as_posix()) or ()


def _holds_run(folder: Path) -> bool:
    return (folder / RUN).is_file() and (folder / METRICS).is_file()


def _records(path: Path, name: str) -> list[tuple[str, str]] | None:
    """(name, text) of each text in a file; None if the file is not text."""
    kind = path.suffix.lower()
    require(kind not in _UNREAD, f"{path}: {kind} is not read; allowed: {_READ}; unpack it or take it out")
    if kind not in (".jsonl", ".parquet"):
        text = _text(path)
        return None if text is None else [(name, text)]
    rows = _parquet(path) if kind == ".parquet" else _json_lines(path)
    return [(f"{name}#{number}", _field(row, f"{path}, record {number}")) for number, row in enumerate(rows)]


def _text(path: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8-sig")
        return None if "\0" in text else text
    return None


def _json_lines(path: Path) -> Iterator[Any]:
    text = _text(path)
    require(text is not None, f"{path} is not UTF-8 text")
    for number, line in enumerate(text.split("\n"), 1):  # other line endings may occur inside a record
        try:
            yield from [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise T1Error(f"{path}, line {number}: not JSON ({error})") from None


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet

        return parquet.ParquetFile(path).read().to_pylist()
    except Exception as error:  # pyarrow is missing, or raises errors of its own
        raise T1Error(f"cannot read {path}: {' '.join(str(error).split())[:150]}") from None


def _field(row: Any, where: str) -> str:
    held = row if isinstance(row, dict) else {}
    text = next((held[field] for field in FIELDS if isinstance(held.get(field), str)), None)
    require(text is not None, f"{where}: no text; allowed: an object with a string in {' or '.join(map(repr, FIELDS))}")
    require(not re.search("[\ud800-\udfff]", text), f"{where}: the text is not Unicode: it has half a surrogate pair")
    return text
