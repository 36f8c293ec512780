"""Real text for small language models: the running Python's own standard library, byte-level BPE, packed rows.

    corpus = load_corpus(vocabulary=65536, seq=512)
    corpus.train, corpus.held_out        # token ids (rows, seq)

Nothing is downloaded. The text depends on the Python version, which `Corpus.sha256` names. Folders of tests are left
out: many distributions ship without them. The 11.5 MB that stay in Python 3.12 support about 79,000 tokens, because
an identifier is one word here, together with the character before it; GPT-2's splitting, which cuts at every
underscore, ends at 44,000. A pair of tokens must be seen twice to be merged, so every token is in the text.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from t1lib.errors import T1Error, require
from t1lib.heads import parse_bytes

END = "<|endoftext|>"  # between files; id 0
SMALLEST = 257  # the bytes and END
WORDS = r"[^\r\n\w]?\w+|[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_RECIPE = "1"  # part of the cache's key: to be raised with any change of the recipe


@dataclass(frozen=True)
class Corpus:
    """Token ids int64 (rows, seq), `train` and `held_out` of different files; `sha256` is the text's."""

    train: Tensor
    held_out: Tensor
    vocabulary: int
    sha256: str
    files: int
    bytes: int


def cache_folder() -> Path:
    """Where tokenizers are kept, by the hash of what they were trained on: `T1_CACHE`, else ~/.cache/t1kit.

    `XDG_CACHE_HOME` stands in for ~/.cache where it is set.
    """
    named = os.environ.get("T1_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t1kit"


def standard_library(limit: int | str | None = None, root: Path | None = None) -> dict[str, str]:
    """Sources of the running Python's standard library, without tests: name relative to it → text.

    `limit` (bytes, or "2MB") keeps whole files up to it, in an order by the hash of their names, which mixes the
    packages and does not depend on the machine. What cannot be read as UTF-8 is left out, as are generated files that
    hold the build machine's paths. Raises `T1Error` when nothing is left.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    left = None if limit is None else parse_bytes(limit)
    texts: dict[str, str] = {}
    for name, path in sorted(_sources(root), key=lambda entry: _sha256(entry[0])):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        size = len(text.encode())
        if left is not None:
            if size > left:
                continue
            left -= size
        if text.strip():
            texts[name] = text
    within = "" if limit is None else f" within {limit}"
    require(bool(texts), f"the corpus is empty: no sources of the standard library{within}; some Pythons ship none")
    return texts


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED.isdisjoint(relative.parts[:-1]) and not path.name.startswith("_sysconfigdata"):
            yield relative.as_posix(), path


def _sha256(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def corpus_hash(texts: dict[str, str]) -> str:
    """Hash of names and texts, whatever their order."""
    return _sha256(*(part for name in sorted(texts) for part in (name, texts[name])))


def byte_pairs(texts: dict[str, str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens, trained on the texts or taken from `cache_folder()`.

    Raises `T1Error` for a vocabulary that the texts do not support, saying what they reach.
    """
    require(vocabulary >= SMALLEST, f"vocabulary {vocabulary}; allowed: {SMALLEST} (256 bytes and {END}) or more")
    kept = cache_folder() / f"bpe-{vocabulary}-{_sha256(_RECIPE, WORDS, corpus_hash(texts))[:32]}.json"
    try:
        return Tokenizer.from_str(kept.read_text(encoding="utf-8"))
    except Exception:  # not there, or not whole: the library raises a bare Exception
        tokenizer = _train(texts, vocabulary)
    reached = tokenizer.get_vocab_size()
    if reached < vocabulary:
        size = sum(len(text.encode()) for text in texts.values()) / 1e6
        raise T1Error(
            f"vocabulary {vocabulary} is more than this corpus supports: {size:.1f} MB reach {reached} tokens; "
            "take a smaller one, or more bytes"
        )
    _keep(tokenizer, kept)
    return tokenizer


def _train(texts: dict[str, str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((texts[name] for name in sorted(texts)), trainer)
    return tokenizer


def _keep(tokenizer: Tokenizer, path: Path) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(tokenizer.to_str(), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:  # a cache that cannot be written saves nothing, and costs nothing
        with suppress(OSError):
            temporary.unlink()


def split_files(texts: dict[str, str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """Names of (training, held-out) files in an order drawn from `seed`; the latter hold the share `held_out`."""
    require(0 < held_out < 1, f"held_out {held_out}; allowed: a share between 0 and 1")
    order = sorted(texts, key=lambda name: _sha256(str(seed), name))
    wanted = held_out * sum(len(text) for text in texts.values())
    taken, count = 0, 0
    while taken < wanted:
        taken += len(texts[order[count]])
        count += 1
    return order[count:], order[:count]


def load_corpus(
    vocabulary: int, seq: int, *, limit: int | str | None = None, held_out: float = 0.05, seed: int = 0
) -> Corpus:
    """The standard library as rows of `seq` tokens, files joined by `END`, split by file.

    The tokenizer is trained on both parts. Raises `T1Error` for an empty corpus, a vocabulary that it does not
    support, and a split that leaves a part without a row.
    """
    require(seq >= 2, f"seq {seq}; allowed: 2 or more")
    texts = standard_library(limit)
    tokenizer = byte_pairs(texts, vocabulary)
    parts = []
    for what, names in zip(("training", "held-out"), split_files(texts, held_out, seed), strict=True):
        parts.append(_pack(tokenizer, [texts[name] for name in names], seq))
        require(len(parts[-1]) > 0, f"the {what} part has less than one row of {seq} tokens; take more bytes")
    size = sum(len(text.encode()) for text in texts.values())
    return Corpus(*parts, vocabulary=vocabulary, sha256=corpus_hash(texts), files=len(texts), bytes=size)


def _pack(tokenizer: Tokenizer, texts: list[str], seq: int) -> Tensor:
    """Token ids of all texts, `END` after each, cut into whole rows of `seq`."""
    end = [tokenizer.token_to_id(END)]
    ids = [i for encoding in tokenizer.encode_batch(texts) for i in encoding.ids + end]
    return torch.tensor(ids, dtype=torch.int64)[: len(ids) // seq * seq].reshape(-1, seq)
