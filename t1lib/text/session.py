"""Training of a language model on real text, in any mode and with any head."""

from pathlib import Path
from typing import Any

import torch

from t1lib.errors import require
from t1lib.files import whole
from t1lib.memory import grow_segments
from t1lib.models import MORE, shape_only
from t1lib.text.corpus import load_corpus, save_tokenizer
from t1lib.text.texts import LIBRARY
from t1lib.train import PRESETS, OptimizerSpec, Schedule, StepRecord, build_model, make_trainer


class LanguageSession:
    """A trainer and a corpus: step n trains on the corpus's n-th batch. Methods take and return plain values, so that a
    session can run in a process of its own (`t1lib.measure.isolate`).

    model                a preset, with the corpus's vocabulary instead of its own and with `changes` to its shape, or a
                         checkpoint folder with a tokenizer
    data, limit          source of the text and its limit ("" for all of it), as in `t1lib.text.texts.read_texts`
    vocabulary           size of the tokenizer that is trained on the text (a checkpoint brings its own tokenizer)
    optimizer, schedule  fields of `OptimizerSpec` and of `Schedule`
    data_seed            seed of the order of the rows; by default `seed`, which also seeds the weights and the split
    options              further arguments of `make_trainer`

    Raises `T1Error` as `load_corpus`, `build_model` and the trainer do.
    """

    def __init__(
        self, *, model: str, mode: str, dtype: str, device: str, seq: int, batch: int, optimizer: dict[str, Any],
        schedule: dict[str, Any] | None = None, vocabulary: int | None = None, data: str = LIBRARY, limit: str = "",
        seed: int = 0, data_seed: int | None = None, changes: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        spec, plan = OptimizerSpec(**optimizer), Schedule(**schedule or {})
        grow_segments()
        own, changes = None if model in PRESETS else Path(model) / "tokenizer.json", changes or {}
        require(own is None or own.is_file(), f"model {model!r} is neither a preset nor a folder with a tokenizer.json")
        positions = shape_only(model, **changes).config.max_position_embeddings
        require(seq <= positions, f"seq {seq}; the model has {positions} positions{MORE}")
        self._size, self.data_seed = batch, seed if data_seed is None else data_seed
        self.corpus = load_corpus(vocabulary, seq, source=data, limit=limit or None, seed=seed, tokenizer=own)
        self.corpus.batch(0, batch, self.data_seed)  # a bad size raises before a model is built
        if own is None:
            changes = {"vocab_size": self.corpus.vocabulary} | changes
        where = "cpu" if mode in ("slide", "fsdp") else device
        built = build_model(model, dtype=getattr(torch, dtype), device=where, seed=seed, **changes)
        options |= {"optimizer": spec, "schedule": plan, "device": device}
        self.trainer = make_trainer(built, mode, **options)
        if device != "cpu":
            torch.cuda.empty_cache()  # what building the model left
        known, held = self.corpus.vocabulary, self.trainer.parts.embed.num_embeddings
        require(known <= held, f"the tokenizer has {known} tokens, the model's vocabulary {held}")

    def step(self) -> StepRecord:
        """Train on the next batch."""
        return self.trainer.step(self.corpus.batch(self.trainer.steps, self._size, self.data_seed))

    def train(self, steps: int) -> list[StepRecord]:
        """Train for `steps` steps; returns each step's record."""
        return [self.step() for _ in range(steps)]

    def evaluate(self, rows: int) -> float:
        """Mean loss over `rows` held-out rows, evenly spaced among all of them; over all if there are no more."""
        held, taken = self.corpus.held_out, min(rows, len(self.corpus.held_out))
        pieces = (torch.arange(taken) * len(held) // taken).split(self._size)
        return sum(self.trainer.evaluate({"input_ids": held[piece]}) * len(piece) for piece in pieces) / taken

    def about(self) -> dict[str, int | str]:
        """Facts about corpus and model: the text's sha256, files, bytes and tokens, and the sizes of the model."""
        corpus, head = self.corpus, self.trainer.parts.head
        return {
            "sha256": corpus.sha256, "files": corpus.files, "bytes": corpus.bytes,
            "train_tokens": corpus.train.numel(), "held_out_tokens": corpus.held_out.numel(),
            "vocabulary": corpus.vocabulary, "hidden": head.weight.shape[1],
            "params": sum(p.numel() for p in self.trainer.model.parameters()),
        }  # fmt: skip

    def export(self, folder: Path) -> Path:
        """Write weights, configuration and tokenizer as `from_pretrained` reads them. The folder is complete or absent.

        With several processes, all must call it; rank 0 collects and writes. Raises `T1Error` if it cannot be written.
        """
        ranks, weights = self.trainer.ranks, {}
        for part in self.trainer.state_parts():
            found = self.trainer.state_part(part)["model"]
            weights |= found if ranks.rank == 0 else {}

        def write() -> None:
            with whole(folder) as partial:
                self.trainer.model.save_pretrained(partial, state_dict=weights)
                save_tokenizer(self.corpus.tokenizer, partial)

        ranks.first(write)
        return folder
