"""A script may end right after a step: the interpreter waits for the updates that still run."""

import subprocess
import sys

SCRIPT = """
import torch
from t1lib.train import OptimizerSpec, build_model, make_trainer
model = build_model("tiny", hidden_size=512, intermediate_size=2048, num_hidden_layers=2)
trainer = make_trainer(model, "slide", optimizer=OptimizerSpec("adamw", master_weights=True))
trainer.step({"input_ids": torch.ones(1, 4, dtype=torch.long)})
"""


def test_a_script_that_ends_after_a_step_ends_well():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
