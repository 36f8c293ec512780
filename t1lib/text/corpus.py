"""A corpus for small language models: texts, byte-level BPE, rows of tokens, and batches of them.

    corpus = load_corpus(vocabulary=65536, seq=512)      # the running Python's own standard library: no download
    batch = corpus.train.batch(step, size=16, seed=0)    # {"input_ids": (16, 512)}

`Corpus.sha256` identifies the text, which depends on the Python version. The 11.5 MB of Python 3.12 support about
79,000 tokens, because an identifier counts as one word here, together with the character before it; GPT-2's splitting,
which cuts at every underscore, reaches only 44,000. A pair of tokens is merged only if it occurs at least twice, so
every token occurs in the text.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from t1lib.errors import T1Error, require
from t1lib.files import cache_folder, read_signed, write_signed
from t1lib.text.texts import LIBRARY, corpus_hash, read_texts, sha256

END = "<|endoftext|>"  # after each text; id 0
ENDS = (END, "<|im_end|>", "<|end_of_text|>", "</s>", "<eos>")  # end tokens of tokenizers trained elsewhere
SMALLEST, LARGEST = 257, 2**20  # tokens: the 256 bytes and END; and what the trainer may reserve memory for
# Bounded, because training time grows with the square of a word's length; the library's longest run has 95 characters.
WORDS = r"[^\r\n\w]?\w{1,256}|[^\s\w]{1,256}[\r\n]{0,256}|\s{0,256}[\r\n]{1,256}|\s{1,256}(?!\S)|\s{1,256}"
_RECIPE = "4"  # part of the cache's key; to be raised with every change to the recipe


@dataclass(frozen=True)
class Rows:
    """Token ids int64 (rows, seq)."""

    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, step: int, size: int, seed: int) -> dict[str, Tensor]:
        """The batch of step `step`, counted from 0: `size` rows, in an order drawn from `seed` anew for each epoch.

        It depends on the arguments alone, so that a run can resume at any step. Rows beyond the last whole batch of an
        epoch are left out. Raises `T1Error` for more rows than there are.
        """
        require(1 <= size <= len(self), f"batch {size}; the corpus has {len(self)} rows of {self.ids.shape[1]} tokens")
        epoch, place = divmod(step, len(self) // size)
        return self.take(_order(len(self), seed * 1_000_003 + epoch)[place * size : (place + 1) * size])

    def take(self, rows: Tensor | slice) -> dict[str, Tensor]:
        """A batch of these rows."""
        return {"input_ids": self.ids[rows]}


@lru_cache(maxsize=2)
def _order(rows: int, seed: int) -> Tensor:
    """The order of rows in an epoch; cached, because every step asks for its own batch and for the next one's."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Corpus:
    """`train` and `held_out` rows, from different texts (see `split_texts`); `sha256` covers all texts."""

    train: Rows
    held_out: Rows
    sha256: str
    files: int
    bytes: int
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.get_vocab_size()


def byte_pairs(texts: dict[str, str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens, trained on the texts or taken from `cache_folder()`.

    Raises `T1Error` for a vocabulary that the texts do not support; the message says what they do.
    """
    allowed = f"{SMALLEST} (256 bytes and {END}) to {LARGEST}"
    require(SMALLEST <= vocabulary <= LARGEST, f"vocabulary {vocabulary}; allowed: {allowed}")
    kept = cache_folder() / f"bpe-{vocabulary}-{sha256(_RECIPE, WORDS, corpus_hash(texts))[:32]}.json"
    with suppress(Exception):  # missing, damaged, or of another version of the library, which raises a bare Exception
        return Tokenizer.from_str(read_signed(kept)["tokenizer"])
    tokenizer = _train(texts, vocabulary)
    reached = tokenizer.get_vocab_size()
    if reached < vocabulary:
        size = sum(len(text.encode()) for text in texts.values()) / 1e6
        raise T1Error(
            f"vocabulary {vocabulary} is more than this corpus supports: {size:.3g} MB reach {reached} tokens; "
            f"allowed: {SMALLEST} to {reached}, or take more text"
        )
    # The processes of a run may train the same tokenizer at once. A cache that cannot be written is no error.
    with suppress(T1Error):
        write_signed(kept, {"tokenizer": tokenizer.to_str()}, f".{os.getpid()}")
    return tokenizer


def _train(texts: dict[str, str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((texts[name] for name in sorted(texts)), trainer)
    return tokenizer


def split_texts(texts: dict[str, str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """(training, held-out) texts in an order drawn from `seed`; the latter hold the share `held_out` of the characters.

    To keep texts whole, the share may be off by half (of itself, or of the rest if that is smaller). If whole texts do
    not come that close, the next text is cut in two, at the end of a line if there is one within that tolerance; its
    beginning is for training.
    """
    require(0 < held_out < 1, f"held_out {held_out}; allowed: a share between 0 and 1")
    order = [texts[name] for name in sorted(texts, key=lambda name: sha256(str(seed), name))]
    size = sum(map(len, order))
    missing = max(1, int(held_out * size))
    slack, count = min(missing, size - missing) // 2, 0
    while missing > 0 and len(order[count]) <= missing + slack:
        missing -= len(order[count])
        count += 1
    if missing <= slack:
        return order[count:], order[:count]
    cut = len(order[count]) - missing
    cut = order[count].rfind("\n", cut - slack, cut) + 1 or cut
    return [order[count][:cut], *order[count + 1 :]], [*order[:count], order[count][cut:]]


def load_corpus(
    vocabulary: int | None, seq: int, *, source: str | Path = LIBRARY, limit: int | str | None = None,
    held_out: float = 0.05, seed: int = 0, tokenizer: str | Path | None = None,
) -> Corpus:  # fmt: skip
    """Texts, joined with an end token after each and cut into rows of `seq` tokens; split by `split_texts`.

    source, limit   as in `t1lib.text.texts.read_texts`
    tokenizer       a tokenizer.json; without it a tokenizer of `vocabulary` tokens is trained, on both parts

    Raises `T1Error` for an empty corpus, a vocabulary that it does not support, and a split that leaves a part without
    a row.
    """
    require(seq >= 2, f"seq {seq}; allowed: 2 or more")
    texts = read_texts(source, limit)
    trained = byte_pairs(texts, vocabulary) if tokenizer is None else _read_tokenizer(Path(tokenizer))
    end, parts = [_end_of(trained)], []
    for what, part in zip(("training", "held-out"), split_texts(texts, held_out, seed), strict=True):
        encoded = trained.encode_batch(part, add_special_tokens=False)
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.tensor(one.ids + end) for one in encoded)])
        require(len(ids) >= seq, f"the {what} part has less than one row of {seq} tokens; take more bytes")
        parts.append(Rows(ids[: len(ids) // seq * seq].reshape(-1, seq)))
    size = sum(len(text.encode()) for text in texts.values())
    return Corpus(*parts, corpus_hash(texts), len(texts), size, trained)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise T1Error(f"cannot read tokenizer {path}: {str(error)[:100]}") from None
    _end_of(tokenizer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer, with its end token, in the format that Hugging Face's `AutoTokenizer` reads."""
    end = tokenizer.id_to_token(_end_of(tokenizer))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)


def _end_of(tokenizer: Tokenizer) -> int:
    end = next((tokenizer.token_to_id(end) for end in ENDS if tokenizer.token_to_id(end) is not None), None)
    require(end is not None, f"the tokenizer has no end token; known: {', '.join(ENDS)}")
    return end
