"""A small language model on real text: trained by the kit's own trainer, then asked for its hidden states."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from t1lib.corpus import load_corpus
from t1lib.errors import require
from t1lib.heads import linear_cross_entropy, next_token_targets
from t1lib.measure.head_data import save_operands
from t1lib.train import OptimizerSpec, build_model, make_trainer


class LanguageSession:
    """A decoder in training on the corpus, in mode `gpu`, with AdamW.

    model          a preset; `layers` and `vocabulary` replace the preset's
    seq, batch     tokens a row, rows a step; rows are drawn in an order of `seed`, epoch after epoch
    limit          bytes of text, or "" for all (`t1lib.corpus`)
    head           output layer; `head_options` go with it
    16-bit weights have float32 masters. Raises `T1Error` as `load_corpus`, `build_model` and the trainer do.
    """

    def __init__(
        self, *, model: str, layers: int, vocabulary: int, seq: int, batch: int, limit: str, lr: float, dtype: str,
        device: str, head: str, seed: int = 0, head_options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.corpus = load_corpus(vocabulary, seq, limit=limit or None, seed=seed)
        rows = len(self.corpus.train)
        require(rows >= batch, f"batch {batch}; the corpus has {rows} rows of {seq} tokens")
        changes = {"num_hidden_layers": layers, "vocab_size": vocabulary}
        built = build_model(model, dtype=getattr(torch, dtype), device=device, seed=seed, **changes)
        spec = OptimizerSpec("adamw", lr=lr, betas=(0.9, 0.95), master_weights=dtype != "float32")
        self.trainer = make_trainer(
            built, "gpu", device=device, optimizer=spec, head=head, head_options=head_options or {}
        )
        self.device = torch.device(device)
        self._batches = self._draw(batch, seed)

    def _draw(self, batch: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.corpus.train), generator=generator)
            yield from (self.corpus.train[rows] for rows in order.split(batch) if len(rows) == batch)

    def about(self) -> dict[str, int | str]:
        """Facts of corpus and model: the text's sha256, files, bytes, tokens, and the sizes of the model."""
        corpus, head = self.corpus, self.trainer.parts.head
        return {
            "sha256": corpus.sha256, "files": corpus.files, "bytes": corpus.bytes,
            "train_tokens": corpus.train.numel(), "held_out_tokens": corpus.held_out.numel(),
            "vocabulary": corpus.vocabulary, "hidden": head.weight.shape[1],
            "params": sum(p.numel() for p in self.trainer.model.parameters()),
        }  # fmt: skip

    def train(self, steps: int) -> list[float]:
        """Train; returns each step's loss."""
        return [self.trainer.step({"input_ids": next(self._batches)}).loss for _ in range(steps)]

    @torch.no_grad()
    def hidden_states(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """What enters the head on held-out text: hidden states after the norm (N, D), weight (V, D), targets (N).

        N is `tokens`, or fewer where the held-out text is shorter; a row's last position has no target and is left out.
        """
        parts, seq = self.trainer.parts, self.corpus.held_out.shape[1]
        states, targets = [], []
        for ids in self.corpus.held_out[: -(-tokens // (seq - 1))].split(8):
            embedded = parts.embed(ids.to(self.device))
            states.append(parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1))
            targets.append(next_token_targets(ids)[:, :-1].flatten())
        return torch.cat(states)[:tokens], parts.head.weight.detach(), torch.cat(targets)[:tokens].to(self.device)

    def held_out(self, tokens: int, path: str) -> dict[str, float]:
        """Write `hidden_states` to `path` (`t1lib.measure.head_data`), and return their mean loss and count."""
        e, w, y = self.hidden_states(tokens)
        save_operands(path, e, w, y)
        return {"loss": float(linear_cross_entropy(e, w, y, head="chunked")), "tokens": len(y)}
