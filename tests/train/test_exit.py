"""How updates that run beside steps end: the interpreter waits for them on exit; a failed one makes a step raise."""

import os
import subprocess
import sys

import pytest
import torch

from t1lib.models import build_model
from t1lib.plan.cost import Choice
from t1lib.train import make_trainer
from t1lib.train.schedule import Schedule

SCRIPT = """
import torch
from t1lib.train import OptimizerSpec, build_model, make_trainer
model = build_model("tiny", hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
trainer = make_trainer(model, "slide", optimizer=OptimizerSpec("adamw", master_weights=True))
trainer.step({"input_ids": torch.ones(1, 4, dtype=torch.long)})
"""


def test_a_script_that_ends_after_a_step_ends_well():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command, code, processes", [("list chunks", 0, 2), ("list chunks", 0, 1), ("-x", 2, 2)])
def test_ranks_end_without_shutting_the_interpreter_down(command, code, processes):
    """A thread of gloo's may still use it, and would abort the process: two runs of twenty ended so."""
    script = f"import atexit, runpy, sys; atexit.register(print, 'shut down'); sys.argv[1:] = {command.split()}"
    script = f"{script}; runpy.run_module('t1lib', run_name='__main__')"
    environment = os.environ | {"WORLD_SIZE": str(processes)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (run.returncode, "shut down" in run.stdout) == (code, processes == 1)


def test_an_update_that_fails_is_the_error_of_a_step(monkeypatch):
    monkeypatch.setattr(Schedule, "_update_on_host", lambda *_: 1 / 0)
    model = build_model("tiny", dtype=torch.float32, num_hidden_layers=4)
    trainer = make_trainer(model, "slide", choice=Choice(host_share=1.0))
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    with pytest.raises(ZeroDivisionError):
        for _ in range(2):
            trainer.step(batch)
    for again in (trainer.step, trainer.evaluate):  # neither hangs
        with pytest.raises(ZeroDivisionError):
            again(batch)
