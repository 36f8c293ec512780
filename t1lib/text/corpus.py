"""A corpus for small language models: texts by name, of Python's own standard library or the user's files and folders;
byte-level BPE; rows of tokens, and batches of them."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from t1lib.errors import T1Error, require, shown
from t1lib.files import cache_folder, read_signed, write_signed
from t1lib.heads import parse_bytes

LIBRARY = "stdlib"
# Folders of the library that are left out: tests, which many distributions lack, packages that were installed, caches.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Datasets and compressed files, which are refused: what lies beside them in a folder is hardly the text that is meant.
_UNREAD = {".arrow", ".jsonl", ".parquet"}
_UNREAD |= {".7z", ".bz2", ".gz", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".xz", ".zip", ".zst"}
_BEGINNING = 2**16  # bytes
END = "<|endoftext|>"  # after each text; id 0
ENDS = (END, "<|im_end|>", "<|end_of_text|>", "</s>", "<eos>")  # end tokens of tokenizers trained elsewhere
SMALLEST, LARGEST = 257, 2**20  # tokens: the 256 bytes and END; and what the trainer may reserve memory for
# Bounded, because training time grows with the square of a word's length; the library's longest run has 95 characters.
WORDS = r"[^\r\n\w]?\w{1,256}|[^\s\w]{1,256}[\r\n]{0,256}|\s{0,256}[\r\n]{1,256}|\s{1,256}(?!\S)|\s{1,256}"
HELD_OUT = 0.05  # share of the rows; one row at least
_RECIPE = "4"  # part of the cache's key; to be raised with every change to the recipe


def sha256(*texts: str) -> str:
    encoded = [text.encode(errors="surrogateescape") + b"\0" for text in texts]  # file names need not be UTF-8
    return hashlib.sha256(b"".join(encoded)).hexdigest()


def corpus_hash(texts: dict[str, str]) -> str:
    """Hash of names and texts, regardless of their order."""
    return sha256(*(part for name in sorted(texts) for part in (name, texts[name])))


def read_texts(source: str | Path = LIBRARY, limit: int | str | None = None) -> tuple[dict[str, str], int]:
    """Name → text of `source`: "stdlib", a file of UTF-8 text, or a folder with everything below it, except for files
    that are not text, and hidden ones. Of equal texts (copies, links) one is taken; how many are left out is returned,
    too. `limit` (bytes, or "2MB") keeps whole texts up to that size in all, in the order of their names' hashes. Raises
    `T1Error` for a source that does not exist, a file that is not text, what cannot be read, a dataset or a compressed
    file (also within a folder), a link to a folder within a folder, and if nothing is left."""
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
    left, kept, sizes, copies = 2**62 if limit is None else parse_bytes(limit), {}, {}, 0  # kept: text → name
    for name, text in sorted(found, key=lambda entry: sha256(entry[0])):
        if text in sizes:
            copies += text in kept
        elif text.strip():
            sizes[text] = len(text.encode())
            if sizes[text] <= left:
                left -= sizes[text]
                kept[text] = name
    require(bool(sizes), f"the corpus is empty: {what} holds no text")
    smallest = min(sizes.values())
    require(bool(kept), f"{what} holds no text within limit {limit}; allowed: {smallest}, its smallest text, or more")
    return {name: text for text, name in kept.items()}, copies


def _below(root: Path, library: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each text below `root`, as `read_texts` says; of the library, only its sources."""
    for place, folders, names in os.walk(root, onerror=_unreadable):
        folder = Path(place)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and not (library and n in _SKIPPED))
        for link in (folder / name for name in folders if not library):
            require(not link.is_symlink(), f"{link} is a link to a folder; put the folder there, or give it alone")
        for path in (folder / name for name in names if not name.startswith(".")):
            source = path.suffix == ".py" and not path.match("_sysconfigdata*")  # it has the build machine's paths
            there = os.path.isfile(path) or not (library or os.path.exists(path))  # a link to nothing, too, but no pipe
            if there and (source or not library) and (text := _text(path)) is not None:
                yield path.relative_to(root).as_posix(), text


def _text(path: Path) -> str | None:
    """The content of a file; None if it is not text, which its beginning may tell."""
    kind = path.suffix.lower()
    require(kind not in _UNREAD, f"{path}: {kind} is not read; allowed: UTF-8 text; unpack it or take it out")
    try:
        with path.open("rb") as file:
            text = "\0" if b"\0" in file.read(_BEGINNING) else path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        _unreadable(error, path)
    return None if "\0" in text else text


def _unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    raise T1Error(f"cannot read {path or error.filename}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Corpus:
    """Token ids, int64 (rows, seq): rows to train on, and held-out ones. These are the last rows, so that at most one
    text has rows in both. `sha256` is that of the texts, `files` and `bytes` their number and size; `copies` says how
    many equal ones were left out."""

    train: Tensor
    held_out: Tensor
    sha256: str
    files: int
    copies: int
    bytes: int
    tokenizer: Tokenizer
    vocabulary: int

    def batch(self, step: int, size: int, seed: int) -> dict[str, Tensor]:
        """The batch of step `step`, counted from 0: `size` rows, in an order drawn from `seed` anew for each epoch.
        Rows beyond the last whole batch of an epoch are left out. Raises `T1Error` for more rows than there are."""
        rows, seq = self.train.shape
        require(1 <= size <= rows, f"batch {size}; the corpus has {rows} rows of {seq} tokens to train on")
        epoch, place = divmod(step, rows // size)
        return {"input_ids": self.train[_order(rows, seed * 1_000_003 + epoch)[place * size : (place + 1) * size]]}


@lru_cache(maxsize=2)
def _order(rows: int, seed: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


def byte_pairs(texts: dict[str, str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens, trained on the texts or taken from `cache_folder()`. A
    pair of tokens is merged only if it occurs twice: raises `T1Error` for more tokens than the texts support."""
    allowed = f"{SMALLEST} (256 bytes and {END}) to {LARGEST}"
    require(SMALLEST <= vocabulary <= LARGEST, f"vocabulary {vocabulary}; allowed: {allowed}")
    kept = cache_folder() / f"bpe-{vocabulary}-{sha256(_RECIPE, WORDS, corpus_hash(texts))[:32]}.json"
    with suppress(Exception):  # missing, damaged, or of another version of the library, which raises a bare Exception
        return Tokenizer.from_str(read_signed(kept)["tokenizer"])
    tokenizer = _train(texts, vocabulary)
    reached = tokenizer.get_vocab_size()
    allowed = f"its texts reach {reached} tokens; allowed: {SMALLEST} to {reached}, or take more text"
    require(reached >= vocabulary, f"vocabulary {vocabulary} is more than this corpus supports: {allowed}")
    with suppress(T1Error):  # a cache that cannot be written; processes of a run may write the same one at once
        write_signed(kept, {"tokenizer": tokenizer.to_str()}, f".{os.getpid()}")
    return tokenizer


def _train(texts: dict[str, str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    options = {"min_frequency": 2, "special_tokens": [END], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=to_bytes.alphabet(), **options)
    tokenizer.train_from_iterator((texts[name] for name in sorted(texts)), trainer)
    return tokenizer


def load_corpus(
    vocabulary: int | None, seq: int, *, source: str | Path = LIBRARY, limit: int | str | None = None,
    seed: int = 0, tokenizer: str | Path | None = None,
) -> Corpus:  # fmt: skip
    """Texts (as `read_texts` finds them) in an order drawn from `seed`, joined with an end token after each and cut
    into rows of `seq` tokens. `tokenizer` is a tokenizer.json; without it, one of `vocabulary` tokens is trained on all
    texts. Raises `T1Error` as `read_texts` and `byte_pairs` do, for fewer than two rows, and for a file that is
    no tokenizer, or has no end token."""
    require(seq >= 2, f"seq {seq}; allowed: 2 or more")
    texts, copies = read_texts(source, limit)
    if tokenizer is None:
        trained = byte_pairs(texts, vocabulary)
    else:
        try:
            trained = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the library raises a bare Exception
            raise T1Error(f"cannot read tokenizer {tokenizer}: {str(error)[:100]}") from None
        trained.no_truncation()  # a file may have been saved with settings for a batch
        trained.no_padding()
    order, end = sorted(texts, key=lambda name: sha256(str(seed), name)), [trained.token_to_id(_end_of(trained))]
    encoded = trained.encode_batch([texts[name] for name in order], add_special_tokens=False)
    ids = torch.cat([torch.tensor(text.ids + end) for text in encoded])
    require(len(ids) >= 2 * seq, f"the corpus has {len(ids)} tokens, less than two rows of {seq}; take more bytes")
    rows = ids[: len(ids) // seq * seq].reshape(-1, seq)
    first = min(round((1 - HELD_OUT) * len(rows)), len(rows) - 1) or 1
    size = sum(len(text.encode()) for text in texts.values())
    facts = corpus_hash(texts), len(texts), copies, size
    vocabulary = max(trained.get_vocab().values()) + 1  # ids may have gaps
    return Corpus(rows[:first], rows[first:], *facts, trained, vocabulary)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer, with its end token, in the format that Hugging Face's `AutoTokenizer` reads."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_end_of(tokenizer)).save_pretrained(folder)


def _end_of(tokenizer: Tokenizer) -> str:
    found = [end for end in ENDS if tokenizer.token_to_id(end) is not None]
    require(bool(found), f"the tokenizer has no end token; known: {', '.join(ENDS)}")
    return found[0]
