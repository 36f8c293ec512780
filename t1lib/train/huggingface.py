"""`StreamTrainer`: `transformers.Trainer` over a model whose layers stream."""

import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from t1lib.errors import choose, require, shown
from t1lib.train import stream as stream_model
from t1lib.train.optimizer import StreamOptimizer

OPTIONS = [name for name in inspect.signature(stream_model).parameters if name not in ("model", "optimizer", "device")]
REFUSED = {  # arguments of TrainingArguments, and why; some versions lack some of them
    "activation_checkpointing": "stream recomputes layers itself (TRL's default is True: gradient_checkpointing=False)",
    "gradient_checkpointing": "stream recomputes layers itself",
    "deepspeed": "one GPU streams its model itself",
    "fsdp": "one GPU streams its model itself",
    "parallelism_config": "one GPU streams its model itself",
    "torch_compile": "streamed layers are not compiled",
    "auto_find_batch_size": "set micro_batch, or gpu_memory, instead",
    "fp16": "bf16=True needs no scaling of the loss",
    "fp16_full_eval": "it converts the model, which streams",
    "bf16_full_eval": "it converts the model, which streams",
}


class StreamTrainer(Trainer):
    """`transformers.Trainer`, with the model's layers on the host: arguments, loop, files and results are Trainer's.

    model    on the CPU
    stream   options of `t1lib.train.stream`, such as {"gpu_memory": "15GiB", "micro_batch": 4}; the device is that of
             `args`, and `accumulate` follows from `gradient_accumulation_steps`

    Every backward sends the weights across the link again. So instead of accumulating, set `micro_batch` and a larger
    `per_device_train_batch_size`: the layers then take memory for `micro_batch` rows only. The output layer sees the
    whole batch, however; `t1lib.heads.patch_head(model)`, before or after, bounds its memory. `gpu_memory` is planned
    for the first batch: if rows differ in length, add `plan_for=(rows, tokens per row)` of the largest.

    Weights in bfloat16 have float32 masters, unless `stream` says otherwise; `bf16=True` is autocast over the weights
    as they are. Training goes on from a checkpoint with the losses of an unbroken run. Only one GPU is used.
    After training the model still streams; `close()` makes it an ordinary one.

    Raises `T1Error` for arguments that would wrap, convert or compile the model, or recompute its layers (`REFUSED`),
    for several processes, and for update_in_backward with `max_grad_norm` (Trainer's default is 1) or accumulation.
    `stream` is called when training or evaluation begins, and raises its own errors then.
    """

    def __init__(
        self, model: nn.Module | None = None, args: TrainingArguments | None = None, *others: Any,
        stream: dict[str, Any] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        args = TrainingArguments("tmp_trainer") if args is None else args
        _check(model, args, stream or {})
        self.stream_options = {"accumulate": args.gradient_accumulation_steps > 1, **(stream or {})}
        args._n_gpu = min(args.n_gpu, 1)  # Trainer would spread a batch over all GPUs that it sees
        if others:
            super().__init__(model, args, *others, **named)
        else:  # by name: TRL's trainers have other arguments second
            super().__init__(model=model, args=args, **named)

    @property
    def streamed(self) -> StreamOptimizer | None:
        """The streamed model's optimizer, without accelerate's wrapper; None while the model does not stream."""
        found = getattr(self.optimizer, "optimizer", self.optimizer)
        return found if isinstance(found, StreamOptimizer) else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **named: Any) -> Any:
        """As Trainer's, but `resume_from_checkpoint=True` goes on from the last complete checkpoint: a save that was
        killed leaves an incomplete one. Raises `T1Error` if there is none."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *others, **named)

    def close(self) -> None:
        """Give the model back as an ordinary one. Further training starts a new optimizer."""
        if self.streamed is not None:
            self.streamed.close()
            self.accelerator.free_memory()
            self.optimizer = self.lr_scheduler = self.callback_handler.optimizer = None

    # -- what Trainer calls --------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False  # not to move model or state; Trainer moves the batches itself

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Do nothing: `stream` does it, by layers."""

    def _wrap_model(self, model: nn.Module, *others: Any, **named: Any) -> nn.Module:
        """Stream the model: Trainer calls this once there is an optimizer, and before an evaluation."""
        if self.streamed is None:
            optimizer = self.optimizer or self.create_optimizer()
            with self.accelerator.autocast():  # as steps run, for `plan_for`
                _, self.optimizer = stream_model(self.model, optimizer, device=self.args.device, **self.stream_options)
            optimizer._opt_called = True  # or a user's schedule for it would warn that it never steps
        return super()._wrap_model(model, *others, **named)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As Trainer's, over an earlier run's checkpoint of the same step: of that, first the file without which it
        counts as unfinished is removed, then what this one might lack."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        for stale in (TRAINER_STATE_NAME, "optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth"):
            for path in folder.glob(stale):
                path.unlink()
        super()._save_checkpoint(model, trial)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.streamed.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        """The norm to report: before clipping, if there is any."""
        return self.streamed.grad_norm() if grad_norm is None else grad_norm


def _check(model: Any, args: TrainingArguments, options: dict[str, Any]) -> None:
    """Raise `T1Error` for what cannot work, before anything is changed."""
    found = f"model of type {type(model).__name__}, args of type {type(args).__name__}"
    fits = isinstance(model, nn.Module | None) and isinstance(args, TrainingArguments)
    require(fits, f"{found}; allowed: a torch.nn.Module, transformers.TrainingArguments")
    require(isinstance(options, dict), f"stream={shown(options)}; allowed: a dict of options, {', '.join(OPTIONS)}")
    for name in options:
        choose("option of stream", name, OPTIONS)
    for name, why in REFUSED.items():
        value = getattr(args, name, None)
        require(not value, f"StreamTrainer with {name}={shown(value)}: {why}. Turn it off")
    require(args.world_size == 1, f"StreamTrainer in {args.world_size} processes; allowed: 1")
    once = {"max_grad_norm": 0, "gradient_accumulation_steps": 1} if options.get("update_in_backward") else {}
    for name, allowed in once.items():  # here, as `stream` notices only after its first updates
        value = getattr(args, name)
        require(value == allowed, f"update_in_backward=True with {name}={shown(value)}; allowed: {allowed}")


def _last_complete(folder: Path) -> str:
    """The checkpoint of the highest step among those whose state, the file that Trainer writes last, can be read."""
    found = {}
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        with suppress(OSError, ValueError):
            json.loads((path / TRAINER_STATE_NAME).read_text())
            found[int(path.name.rpartition("-")[2])] = path
    require(bool(found), f"no complete checkpoint in output_dir={shown(str(folder))}")
    return str(found[max(found)])
