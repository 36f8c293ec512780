"""What the notebooks `convergence` and `cce` measure of a language model that is trained on real text."""

from typing import Any

import torch

from t1lib.heads import linear_cross_entropy, next_token_targets
from t1lib.text import session


def from_params(p: Any, device: str) -> dict[str, Any]:
    """Arguments of `LanguageSession`, except mode and head, from parameters that both notebooks share: run `fused-gpu`
    of `convergence` trains the same model as the one whose hidden states `cce` takes."""
    spec = {"name": "adamw", "lr": p.lr, "betas": (0.9, 0.95), "master_weights": p.dtype != "float32"}
    schedule = {"name": "cosine", "warmup": p.lr_warmup, "total": p.steps}
    size = {"model": p.model, "changes": {"num_hidden_layers": p.layers}, "vocabulary": p.vocabulary, "dtype": p.dtype}
    data = {"limit": p.text, "seq": p.seq, "batch": p.batch, "seed": p.seed}
    return size | data | {"optimizer": spec, "schedule": schedule, "max_grad_norm": p.max_grad_norm, "device": device}


class LanguageSession(session.LanguageSession):
    """A session whose hidden states can be taken, for modes that keep the model on the device (`gpu`, `ckpt`)."""

    @torch.no_grad()
    def held_out(self, tokens: int, path: str) -> dict[str, float]:
        """Write the head's inputs on held-out text to `path`, for `operands`: hidden states after the norm
        (N, D), weight (V, D), targets (N), without a row's last position, which has no target. Returns their mean loss
        and N as `tokens`: fewer than asked for if the held-out text is shorter."""
        parts, rows = self.trainer.parts, self.corpus.held_out
        weight, states, targets = parts.head.weight.detach(), [], []
        for ids in rows[: -(-tokens // (rows.shape[1] - 1))].to(weight.device).split(8):
            embedded = parts.embed(ids)
            states.append(parts.base(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1))
            targets.append(next_token_targets(ids)[:, :-1].flatten())
        e, w, y = torch.cat(states)[:tokens], weight, torch.cat(targets)[:tokens]
        torch.save({"e": e.cpu(), "w": w.cpu(), "y": y.cpu()}, path)
        return {"loss": float(linear_cross_entropy(e, w, y, head="chunked")), "tokens": len(y)}
