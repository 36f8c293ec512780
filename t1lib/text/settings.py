"""From the options of the command `train` to the arguments of a `LanguageSession`."""

from typing import Any

import torch

from t1lib.errors import choose, is_whole, require, shown
from t1lib.heads import HEADS, parse_bytes
from t1lib.models import PRESETS, parse_changes
from t1lib.train import MODES

STEPS = 1000
VOCABULARY = 16384  # most for a preset by default: what a few megabytes of text support
OF_A_MODE = {"gpu_memory": "slide", "no_offload": "fsdp", "compute_dtype": "fsdp"}


def decided(options: dict[str, Any]) -> dict[str, Any]:
    """The options with what follows where they are not given: by default, a GPU computes, if there is one. Raises
    `T1Error` for a device that is not here."""
    allowed = [*(f"cuda:{number}" for number in range(torch.cuda.device_count())), "cpu"]
    allowed = ["cuda", *allowed] if len(allowed) > 1 else allowed
    device, steps = options["device"] or allowed[0], options["steps"] or STEPS
    require(device in allowed, f"--device {shown(device)}; allowed here: {', '.join(allowed)}")
    dtype = options["dtype"] or ("float32" if device == "cpu" else "bfloat16")
    warmup = steps // 20 if options["warmup"] is None else options["warmup"]
    return options | {"device": device, "dtype": dtype, "steps": steps, "warmup": warmup}


def session_of(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a session for options that are `decided`. Raises `T1Error` before a tokenizer is trained."""
    mode, dtype = options["mode"], options["dtype"]
    choose("mode", mode, MODES)
    choose("head", options["head"], HEADS)
    choose("dtype", dtype, ("float32", "bfloat16"))
    for own, of in OF_A_MODE.items():
        require(not options[own] or mode == of, f"--{own.replace('_', '-')} is of mode {of}, the mode is {mode}")
    for size in filter(None, (options["workspace"], options["gpu_memory"], options["limit"])):
        parse_bytes(size)
    spec = {name: options[name] for name in ("lr", "weight_decay", "moments", "split_master")}
    spec |= {"name": options["optimizer"], "betas": (0.9, 0.95), "master_weights": dtype != "float32"}
    schedule = {"name": options["schedule"], "warmup": options["warmup"], "total": options["steps"]}
    found = {n: options[n] for n in ("data", "limit", "device", "seq", "batch", "micro_batch", "seed", "head")}
    found |= {"mode": mode, "dtype": dtype, "max_grad_norm": options["max_grad_norm"] or None} | model_of(options)
    found |= {"head_options": {"workspace": options["workspace"]}} if options["workspace"] else {}
    if mode == "slide" and options["gpu_memory"]:
        found |= {"gpu_memory": options["gpu_memory"], "plan_for": (options["batch"], options["seq"])}
    if mode == "fsdp":
        found |= {"offload": not options["no_offload"], "compute_dtype": options["compute_dtype"]}
    return found | {"optimizer": spec, "schedule": schedule}


def model_of(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments for a preset, with changes and vocabulary, or for a checkpoint folder."""
    model, change, vocabulary = (options[name] for name in ("model", "change", "vocabulary"))
    if model in PRESETS:
        changes = parse_changes(change)
        size = changes.get("vocab_size", PRESETS[model]["vocab_size"])
        most = min(VOCABULARY, size) if is_whole(size, 1) else VOCABULARY
        return {"model": model, "changes": changes, "vocabulary": vocabulary or most}
    plain = not change and not vocabulary
    require(plain, "--change and --vocabulary are of presets: a checkpoint has its own shape and tokenizer")
    return {"model": model}
