"""Marks and waits order the lanes of mode `slide` so that none touches memory while another one writes it."""

from itertools import pairwise

import pytest
from races import Races, Watching, watched
from test_parity import OPTIMIZERS, model
from test_steps import ragged

from t1lib.train import OptimizerSpec, ahead, make_trainer, vocabulary
from t1lib.train.outer_travel import TravellingOuter

ADAMW = OPTIMIZERS["adamw"]
CLIPPED = {"max_grad_norm": 0.5, "micro_batch": 2}


def watch(races: Races, trainer) -> None:
    """Watch the buffers that live from step to step."""
    pipeline, outer, head = trainer.pipeline, trainer._outer, trainer._head
    races.watch("weights' slot", pipeline.weights.flat, on_host=False)
    races.watch("gradients' slot", pipeline.grads.flat, on_host=False)
    races.watch("travelling", pipeline.travel.device_tensors(), on_host=False)
    races.watch("norms over ranks", [pipeline._norms], on_host=False)
    races.watch("host's layer", pipeline.host_flat.values(), on_host=True)
    races.watch("host's gradients", pipeline._host_grads.buffers, on_host=True)
    races.watch("host's norms", [pipeline._host_norms], on_host=True)
    for index, updater in pipeline.updaters.items():
        state = [t for s in updater.state.values() for key, t in s.items() if key != "step"]
        races.watch(f"state of layer {index}", state, on_host=True)
    if isinstance(outer, TravellingOuter):
        state = [t for s in outer.updater.state.values() for key, t in s.items() if key != "step"]
        races.watch("outer state", [*state, *outer._parked.values()], on_host=True)
        races.watch("gathered rows", (b for g in outer._rows.gathered for b in g.buffers.values()), on_host=True)
        races.watch("device's outer weight", (p.data for p in outer.params.values()), on_host=False)
    elif outer is not None:
        races.watch("host's outer weight", outer.weights.values(), on_host=True)
        races.watch("host's outer gradient", outer.grads.values(), on_host=True)
        races.watch("numbers", [outer._numbers], on_host=True)
        races.watch("device's outer weight", outer._there.values(), on_host=False)
    if head is not None:
        races.watch("head's slot", head.device_tensors(), on_host=False)


def races_in(options: dict, steps: int = 3) -> Races:
    races = Races()
    with watched(races):
        trainer = make_trainer(model("qwen3"), "slide", **{"optimizer": ADAMW, "head": "chunked"} | options)
        watch(races, trainer)
        with Watching(races):
            for batch, following in pairwise([*ragged(steps), None]):
                trainer.step(batch, upcoming=following)
                store = trainer._activations._store
                races.watch("host's input", store._buffers.values() if store else (), on_host=True)
            trainer.evaluate(ragged(1)[0])
            trainer.state_dict()
        trainer.close()
    return races


@pytest.mark.parametrize("shared", [{}, CLIPPED], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 3, "grad_slots": 1, "host_grads": 1},
        {"overlap_in": False, "overlap_out": False, "overlap_update": False, "slots": 1},
        {"resident": 1, "keep": 2, "inputs": "host"},
        {"outer": "host"},
        {"outer": "streamed"},
        {"optimizer": OptimizerSpec("sgd", lr=0.1)},
        {"optimizer": OptimizerSpec("sgd", lr=0.1), "update": "device", "slots": 3},
        {"update": "device"},
        {"update": "device", "slots": 3},
        {"update": "device", "resident": 4},
        {"update": "device", "outer": "host", "inputs": "host"},
        {"update": "device", "outer": "parked"},
        {"update": "both", "grad_slots": 1},
        {"update": "both", "overlap_update": False, "outer": "host"},
    ],
    ids=str,
)
def test_nothing_is_touched_at_once(options, shared, monkeypatch):
    monkeypatch.setattr(vocabulary, "PIECE_BYTES", 20 * 32 * 4)  # five pieces
    monkeypatch.setattr(ahead, "ROWS", 2)  # a step looks up more rows than can be gathered ahead
    races = races_in(options | shared)
    assert races.accesses > 200
    assert not races.found, "\n".join(sorted(set(races.found)))
