"""Training of a language model on real text, in any mode and with any head; from the options of the command `train`."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from t1lib.errors import choose, require, shown
from t1lib.files import whole
from t1lib.heads import HEADS, linear_cross_entropy, next_token_targets, parse_bytes
from t1lib.models import MORE, parse_changes, shape_only
from t1lib.optimizers import masters_for
from t1lib.text.corpus import END, LIBRARY, load_corpus, save_tokenizer
from t1lib.train import MODES, PRESETS, OptimizerSpec, Schedule, StepRecord, build_model, make_trainer

STEPS = 1000
TOKENIZER_FILES = ("tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt")  # of a checkpoint folder
TOKENIZER_FILES += ("chat_template.*", "additional_chat_templates/*")
VOCABULARY = 16384  # most for a preset by default: what a few megabytes of text support


class LanguageSession:
    """A trainer and a corpus: step n trains on the corpus's n-th batch. What methods take and return can be pickled, so
    that a session can run in a process of its own (`t1lib.measure.isolate`).

    model                a preset, with `changes` to its shape, or a checkpoint folder with a tokenizer
    data, limit          source of the text and its limit ("" for all of it), as in `t1lib.text.corpus.read_texts`
    vocabulary           size of the tokenizer that is trained on the text for a preset (default: as `VOCABULARY` says)
    optimizer, schedule  fields of `OptimizerSpec` and of `Schedule`
    data_seed            seed of the order of the rows; by default `seed`, which also seeds the weights and the split
    options              further arguments of `make_trainer`
    """

    def __init__(
        self, *, model: str, mode: str, dtype: str, device: str, seq: int, batch: int, optimizer: dict[str, Any],
        schedule: dict[str, Any] | None = None, vocabulary: int | None = None, data: str = LIBRARY, limit: str = "",
        seed: int = 0, data_seed: int | None = None, changes: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        options |= {"optimizer": OptimizerSpec(**optimizer), "schedule": Schedule(**schedule or {}), "device": device}
        own, changes = None if model in PRESETS else Path(model) / "tokenizer.json", changes or {}
        self._tokenizer_file = own
        require(own is None or own.is_file(), f"model {model!r} is neither a preset nor a folder with a tokenizer.json")
        shape = shape_only(model, **changes).config
        positions, vocabulary = shape.max_position_embeddings, vocabulary or min(VOCABULARY, shape.vocab_size)
        require(seq <= positions, f"seq {seq}; the model has {positions} positions{MORE}")
        self._size, self.data_seed = batch, seed if data_seed is None else data_seed
        self.corpus = load_corpus(vocabulary, seq, source=data, limit=limit or None, seed=seed, tokenizer=own)
        self.corpus.batch(0, batch, self.data_seed)  # a bad size raises before a model is built
        if own is None:  # special tokens of its family's tokenizer are others in this one
            special = {"eos_token_id": self.corpus.tokenizer.token_to_id(END), "bos_token_id": None}
            changes = {"vocab_size": self.corpus.vocabulary, "pad_token_id": None} | special | changes
        where = "cpu" if mode in ("slide", "fsdp") else device
        built = build_model(model, dtype=getattr(torch, dtype), device=where, seed=seed, **changes)
        self.trainer = make_trainer(built, mode, **options)
        torch.cuda.empty_cache()  # what building the model left; without CUDA it does nothing
        known, held = self.corpus.vocabulary, self.trainer.parts.embed.num_embeddings
        require(known <= held, f"the tokenizer has {known} tokens, the model's vocabulary {held}")

    def step(self) -> StepRecord:
        return self.trainer.step(self.corpus.batch(self.trainer.steps, self._size, self.data_seed))

    def train(self, steps: int) -> list[StepRecord]:
        return [self.step() for _ in range(steps)]

    def evaluate(self, rows: int) -> float:
        """Mean loss over `rows` held-out rows, or all if there are fewer, evenly spaced."""
        held, taken = self.corpus.held_out, min(rows, len(self.corpus.held_out))
        pieces = (torch.arange(taken) * len(held) // taken).split(self._size)
        return sum(self.trainer.evaluate({"input_ids": held[piece]}) * len(piece) for piece in pieces) / taken

    @torch.no_grad()
    def held_out(self, tokens: int, path: str) -> dict[str, float]:
        """Write the head's inputs on held-out text to `path`: hidden states after the norm (N, D), weight (V, D),
        targets (N), without a row's last position, which has no target. Returns their mean loss and N as `tokens`:
        fewer than asked for if the held-out text is shorter. For modes that keep the model on the device, and models
        without dropout or a softcap (the loss is of the plain logits, in the model's training mode)."""
        parts, rows = self.trainer.parts, self.corpus.held_out
        weight, states, targets = parts.head.weight.detach(), [], []
        for ids in rows[: -(-tokens // (rows.shape[1] - 1))].to(weight.device).split(8):
            states.append(parts.base(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1))
            targets.append(next_token_targets(ids)[:, :-1].flatten())
        e, w, y = torch.cat(states)[:tokens], weight, torch.cat(targets)[:tokens]
        torch.save({"e": e.cpu(), "w": w.cpu(), "y": y.cpu()}, path)
        return {"loss": float(linear_cross_entropy(e, w, y, head="chunked")), "tokens": len(y)}

    def about(self) -> dict[str, int | str]:
        corpus, params = self.corpus, sum(p.numel() for p in self.trainer.model.parameters())
        return {
            "sha256": corpus.sha256, "files": corpus.files, "copies": corpus.copies, "bytes": corpus.bytes,
            "vocabulary": corpus.vocabulary, "train_tokens": corpus.train.numel(), "params": params,
            "held_out_tokens": corpus.held_out.numel(), "hidden": self.trainer.parts.head.weight.shape[1],
        }  # fmt: skip

    def export(self, folder: Path) -> Path:
        """Write weights, configuration and tokenizer (of a checkpoint folder its own files) for `from_pretrained`;
        returns the folder. Raises `T1Error`, and leaves no folder, if it cannot be written."""
        weights: dict[str, Tensor] = {}
        for names in self.trainer.state_parts().values():
            weights |= self.trainer.state_of(names)["model"]
        with whole(folder) as partial:
            self.trainer.model.save_pretrained(partial, state_dict=weights)
            if (own := self._tokenizer_file) is None:
                save_tokenizer(self.corpus.tokenizer, partial)
            else:
                for path in (path for form in TOKENIZER_FILES for path in own.parent.glob(form) if path.is_file()):
                    target = partial / path.relative_to(own.parent)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
        return folder


def decided(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with device, dtype, steps and warmup filled in. Raises `T1Error` for a device that is not here."""
    cards = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    allowed = ["cuda", *cards, "cpu"] if cards else ["cpu"]
    device, steps = options["device"] or allowed[0], options["steps"] or STEPS
    require(device in allowed, f"--device {shown(device)}; allowed here: {', '.join(allowed)}")
    dtype = options["dtype"] or ("float32" if device == "cpu" else "bfloat16")
    warmup = steps // 20 if options["warmup"] is None else options["warmup"]
    return options | {"device": device, "dtype": dtype, "steps": steps, "warmup": warmup}


def session_of(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a session for options that are `decided`. Raises `T1Error` for some that do not fit, before a
    tokenizer is trained."""
    mode, dtype, preset = options["mode"], options["dtype"], options["model"] in PRESETS
    for name, known in (("mode", MODES), ("head", HEADS), ("dtype", ("float32", "bfloat16"))):
        choose(name, options[name], known)
    for own, of in (("gpu_memory", "slide"), ("no_offload", "fsdp")):
        require(not options[own] or mode == of, f"--{own.replace('_', '-')} is of mode {of}, the mode is {mode}")
    for size in filter(None, (options["workspace"], options["gpu_memory"], options["limit"])):
        parse_bytes(size)
    plain = not options["change"] and not options["vocabulary"]
    require(preset or plain, "--change and --vocabulary are of presets: a checkpoint has its own shape and tokenizer")
    spec = {name: options[name] for name in ("lr", "weight_decay", "moments")} | {"name": options["optimizer"]}
    spec |= {"betas": (0.9, 0.95), "master_weights": masters_for(dtype, options["split_master"])}
    schedule = {"name": options["schedule"], "warmup": options["warmup"], "total": options["steps"]}
    same = "model", "vocabulary", "data", "limit", "device", "seq", "batch", "micro_batch", "seed", "head"
    found = {name: options[name] for name in ("mode", "dtype", *same)} | {"optimizer": spec, "schedule": schedule}
    found |= {"changes": parse_changes(options["change"]), "max_grad_norm": options["max_grad_norm"] or None}
    if options["workspace"]:
        found["head_options"] = {"workspace": options["workspace"]}
    if options["gpu_memory"]:
        found |= {"gpu_memory": options["gpu_memory"], "plan_for": (options["batch"], options["seq"])}
    if mode == "fsdp":
        found["offload"] = not options["no_offload"]
    return found
