"""Texts by name: the running Python's own standard library, or the user's files and folders."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from t1lib.errors import require, shown
from t1lib.heads import parse_bytes

LIBRARY = "stdlib"
# Of the library, left out: tests, which many distributions lack. Of its files, those with the build machine's paths.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Datasets, and compressed files; what lies beside them is hardly the text.
_UNREAD = {".7z", ".arrow", ".bz2", ".gz", ".jsonl", ".parquet", ".tar", ".xz", ".zip", ".zst"}


def sha256(*texts: str) -> str:
    encoded = [text.encode(errors="surrogateescape") + b"\0" for text in texts]  # file names need not be UTF-8
    return hashlib.sha256(b"".join(encoded)).hexdigest()


def corpus_hash(texts: dict[str, str]) -> str:
    """Hash of names and texts, regardless of their order."""
    return sha256(*(part for name in sorted(texts) for part in (name, texts[name])))


def read_texts(source: str | Path = LIBRARY, limit: int | str | None = None) -> dict[str, str]:
    """Name → text of `source`: "stdlib", a file of UTF-8 text, or a folder with everything below it, except for files
    that are not text, and hidden ones. `limit` (bytes, or "2MB") keeps whole texts up to that size, in the order of
    their names' hashes. Raises `T1Error` for a source that does not exist, a file that is not text, a dataset's or a
    compressed file (even as one file of a folder), a link to a folder in a folder, and if nothing is left."""
    library, path, what = source == LIBRARY, Path(source), f"text in {source}"
    if library:
        path, what = Path(sysconfig.get_paths()["stdlib"]), "the standard library's sources"
    there = str(source) != "" and os.path.exists(path)
    require(there, f"no corpus at {shown(str(source))}; allowed: a file, a folder, or {LIBRARY!r}")
    if path.is_file():
        what, text = str(path), _text(path)
        require(text is not None, f"{path} is not UTF-8 text")
        found = [(path.name, text)]
    else:
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
        folders[:] = sorted(n for n in folders if not n.startswith(".") and not (library and n in _SKIPPED))
        for link in (folder / name for name in folders if not library):
            require(not link.is_symlink(), f"{link} is a link to a folder; put the folder there, or give it alone")
        for path in (folder / name for name in names if not name.startswith(".")):
            source = path.suffix == ".py" and not path.match("_sysconfigdata*")
            text = _text(path) if path.is_file() and (source or not library) else None
            if text is not None:
                yield path.relative_to(root).as_posix(), text


def _text(path: Path) -> str | None:
    """The content of a file; None if it is not text."""
    kind = path.suffix.lower()
    require(kind not in _UNREAD, f"{path}: {kind} is not read; allowed: UTF-8 text; unpack it or take it out")
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8-sig")
        return None if "\0" in text else text
    return None
