"""Training of a language model on real text, in any mode and with any head; and its hidden states afterwards."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import require
from t1lib.files import whole
from t1lib.heads import linear_cross_entropy, next_token_targets
from t1lib.measure.head_data import save_operands
from t1lib.measure.session import TrainSession
from t1lib.models import MORE, PRESETS, shape_only
from t1lib.text.corpus import load_corpus, save_tokenizer
from t1lib.text.texts import LIBRARY
from t1lib.train.loop import StepRecord


def from_params(p: Any, device: str) -> dict[str, Any]:
    """Arguments of `LanguageSession`, except mode and head, from parameters that the notebooks `convergence` and `cce`
    share: run `fused-gpu` of `convergence` trains the same model as the one whose hidden states `cce` takes."""
    spec = {"name": "adamw", "lr": p.lr, "betas": (0.9, 0.95), "master_weights": p.dtype != "float32"}
    schedule = {"name": "cosine", "warmup": p.lr_warmup, "total": p.steps}
    size = {"model": p.model, "changes": {"num_hidden_layers": p.layers}, "vocabulary": p.vocabulary, "dtype": p.dtype}
    data = {"limit": p.text, "seq": p.seq, "batch": p.batch, "seed": p.seed}
    return size | data | {"optimizer": spec, "schedule": schedule, "max_grad_norm": p.max_grad_norm, "device": device}


class LanguageSession(TrainSession):
    """A `TrainSession` on a corpus: step n trains on the corpus's n-th batch.

    model          a preset, with the corpus's vocabulary instead of its own, or a checkpoint directory with a tokenizer
    data, limit    source of the text, and its limit in bytes ("" for all), as in `t1lib.text.texts.read_texts`
    vocabulary     size of the tokenizer that is trained on the text (a checkpoint brings its own tokenizer)
    packed         as in `t1lib.text.corpus.load_corpus`
    data_seed      seed of the order of the rows; by default `seed`, which also seeds the weights and the split
    options        further arguments of `TrainSession`

    Raises `T1Error` as `load_corpus`, `build_model` and the trainer do.
    """

    def __init__(
        self, *, model: str, seq: int, batch: int, vocabulary: int | None = None, data: str = LIBRARY, limit: str = "",
        packed: bool = True, seed: int = 0, data_seed: int | None = None, changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        own = None if model in PRESETS else Path(model) / "tokenizer.json"
        require(own is None or own.is_file(), f"model {model!r} is neither a preset nor a folder with a tokenizer.json")
        positions = shape_only(model, **(changes or {})).config.max_position_embeddings
        require(seq <= positions, f"seq {seq}; the model has {positions} positions{MORE}")
        self.data_seed, self._size = seed if data_seed is None else data_seed, batch
        self.corpus = load_corpus(
            vocabulary, seq, source=data, limit=limit or None, seed=seed, packed=packed, tokenizer=own
        )
        self.corpus.train.batch(0, batch, self.data_seed)  # a bad size raises before a model is built
        if own is None:
            changes = {"vocab_size": self.corpus.vocabulary, **(changes or {})}
        super().__init__(model=model, seq=seq, batch=batch, seed=seed, changes=changes, **options)
        held = self.trainer.parts.embed.num_embeddings
        known = self.corpus.vocabulary
        require(known <= held, f"the tokenizer has {known} tokens, the model's vocabulary {held}")

    def batch_of(self, step: int) -> dict[str, Tensor]:
        return self.corpus.train.batch(step, self._size, self.data_seed)

    def about(self) -> dict[str, int | str]:
        """Facts about corpus and model: the text's sha256, files, bytes and tokens, and the sizes of the model."""
        corpus, head = self.corpus, self.trainer.parts.head
        return {
            "sha256": corpus.sha256, "files": corpus.files, "bytes": corpus.bytes,
            "train_tokens": corpus.train.ids.numel(), "held_out_tokens": corpus.held_out.ids.numel(),
            "vocabulary": corpus.vocabulary, "hidden": head.weight.shape[1],
            "params": sum(p.numel() for p in self.trainer.model.parameters()),
        }  # fmt: skip

    def train(self, steps: int) -> list[StepRecord]:
        """Train for `steps` steps; returns each step's record."""
        return [self.step() for _ in range(steps)]

    def evaluate(self, rows: int) -> float:
        """Mean loss over `rows` held-out rows, evenly spaced among all of them; over all if there are no more."""
        total, count = 0.0, 0
        held, taken = self.corpus.held_out, min(rows, len(self.corpus.held_out))
        for start in range(0, taken, self._size):
            places = torch.arange(start, min(start + self._size, taken))
            batch = held.take(places * len(held) // taken)
            tokens = int((next_token_targets(batch["labels"]) != -100).sum())
            total, count = total + self.trainer.evaluate(batch) * tokens if tokens else total, count + tokens
        return total / max(count, 1)

    @torch.no_grad()
    def hidden_states(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """The head's inputs on held-out text: hidden states after the norm (N, D), weight (V, D), targets (N).

        N is `tokens`, or fewer if the held-out text is shorter; a row's last position has no target and is left out.
        Only for models that are entirely on the device (modes `gpu`, `ckpt`).
        """
        parts, rows = self.trainer.parts, self.corpus.held_out.ids
        states, targets = [], []
        for ids in rows[: -(-tokens // (rows.shape[1] - 1))].split(8):
            embedded = parts.embed(ids.to(self.device))
            states.append(parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1))
            targets.append(next_token_targets(ids)[:, :-1].flatten())
        return torch.cat(states)[:tokens], parts.head.weight.detach(), torch.cat(targets)[:tokens].to(self.device)

    def export(self, folder: Path) -> Path:
        """Write weights, configuration and tokenizer as `from_pretrained` reads them. The folder is complete or absent.

        With several processes, all must call it; rank 0 collects and writes. Raises `T1Error` if it cannot be written.
        """
        ranks, weights = self.trainer.ranks, {}
        for part in self.trainer.state_parts():
            found = self.trainer.state_part(part)["model"]
            weights |= found if ranks.rank == 0 else {}
        ranks.first(lambda: self._write_model(folder, weights))
        return folder

    def _write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        with whole(folder) as partial:
            self.trainer.model.save_pretrained(partial, state_dict=weights)
            save_tokenizer(self.corpus.tokenizer, partial)

    def held_out(self, tokens: int, path: str) -> dict[str, float]:
        """Write `hidden_states` to `path` (`t1lib.measure.head_data`); return their mean loss and number of tokens."""
        e, w, y = self.hidden_states(tokens)
        save_operands(path, e, w, y)
        return {"loss": float(linear_cross_entropy(e, w, y, head="chunked")), "tokens": len(y)}
