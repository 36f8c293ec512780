"""TrainStream (PyPI: trainstream) as a mode of `TrainSession`: the peer that streams weights, too."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import torch
from torch import Tensor

from t1lib.measure.peers import need
from t1lib.timing import PhaseTimer
from t1lib.train.batch import Piece
from t1lib.train.loop import Trainer
from t1lib.train.resident import make_optimizer
from t1lib.train.wrap import wrap_layers


class TrainStreamTrainer(Trainer):
    """As its README has it: float32 weights under bfloat16's autocast, AdamW on the CPU while the backward goes on, its
    own chunked loss. All layers' weights are on the host, and layers are recomputed: left to itself, it sends all that
    they save across the link instead (29 s per step of 16,384 tokens). It has to see the call of the whole model:
    otherwise layers run with the weights of the step before. Whole batches only, without `micro_batch`."""

    def _place(self) -> None:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):  # it tells where on this machine it builds
            trainstream = need("trainstream")
        self._loss = trainstream.chunked_cross_entropy
        wrap_layers(self.parts.layers, lambda: self.trace, recompute=True)
        self.parts.head.forward = lambda hidden: hidden  # so that the model returns what goes into the loss
        plain = make_optimizer(self.spec, self.model.float().parameters(), fused=False)
        options = {"device": self.device, "offload": True, "param_offload": True, "activation_offload": False}
        options |= {"max_grad_norm": self.max_grad_norm}
        self.model, self.optimizer = trainstream.wrap(self.model, plain, **options)

    def _piece_loss(self, piece: Piece, timer: PhaseTimer) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model(input_ids=piece.ids.to(self.device), use_cache=False).logits
            timer.mark("forward")
            return self._loss(hidden, self.parts.head.weight, piece.targets)

    def _norm(self) -> Tensor:
        return torch.zeros(())  # the gradients are on the host by now; the optimizer clips them

    def _update(self) -> None:
        self.optimizer.step()

    def drain(self) -> None:
        self.optimizer.synchronize()
