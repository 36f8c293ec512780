"""Protocols in the cells of notebooks: frontier, cce, the model that convergence trains, padding in chunks."""

from functools import partial
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from t1lib import params
from t1lib.errors import T1Error
from t1lib.measure.heads import Case, HeadBench
from t1lib.measure.isolate import VariantFailed, VariantOutOfMemory
from t1lib.measure.records import Records
from t1lib.plan.rates import H200

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PARAMETERS = dict(models=["tiny"], modes=["gpu", "slide"], heads=["chunked", "fused"], lengths=[64, 128, 256], seed=0)
PARAMETERS |= dict(dtype="float32", workspace="4MiB", host="8GiB", longest=60.0, within=60.0, steps=2, warmup=1)
PARAMETERS |= dict(narrow=[], host_share=0.0, planned="tiny 64 1GiB", budgets=["1GiB"], measure=True)


class Worker:
    """Stands in for a session's process; head chunked runs out of memory on rows of more than 100 tokens."""

    started = 0
    error = None  # that mode gpu with head fused raises on rows of 128 tokens

    def __init__(self, factory, settings) -> None:
        Worker.started += 1
        self.mode, self.closed = settings["mode"], False

    def call(self, method, **kwargs):
        assert not self.closed
        if method == "set_point":
            self.seq, self.head = kwargs["seq"], kwargs["head"]
        elif self.head == "chunked" and self.seq > 100:
            raise VariantOutOfMemory("chunked")
        elif method == "step":
            if Worker.error and (self.mode, self.head, self.seq) == ("gpu", "fused", 128):
                raise Worker.error
            return {"loss": 1.0, "wall_ms": float(self.seq)}
        elif method == "memory":
            return {"allocated_gib": 0.1, "reserved_gib": 0.2, "host_gib": 1.0, "pinned_gib": 0.0}
        return []

    def close(self) -> None:
        self.closed = True


def run_cells(notebook: str, *names: str, device: str = "cpu", **made) -> dict:
    """The variables that these cells leave, with those that were made before."""
    made.setdefault("run", SimpleNamespace(device=torch.device(device)))
    for cell in params.code_cells(NOTEBOOKS / f"{notebook}.ipynb"):
        if cell["id"] in names:
            exec(compile(cell["source"], cell["id"], "exec"), made)
    return made


def measured(vram: int = 2**30, device: str = "cpu", **parameters) -> tuple[list[dict], dict[str, dict[int, str]]]:
    """Rows, and statuses by variant and length, that frontier measures with `Worker` in place of processes."""
    made = dict(p=SimpleNamespace(**PARAMETERS | parameters), records=Records(), machine=H200, capacity=vram)
    Worker.started = 0
    made = run_cells("frontier", "imports", "points", device=device, **made) | {"Isolated": Worker}
    rows, states = run_cells("frontier", "protocol", **made)["records"].rows, {}
    for row in rows:
        if row["metric"] == "status":
            states.setdefault(row["variant"], {})[int(row["phase"].removeprefix("seq/"))] = row["value"]
    return rows, states


def test_each_point_is_predicted_and_after_the_first_that_does_not_fit_longer_ones_are_skipped():
    rows, states = measured()
    for mode in ("gpu", "slide"):
        assert states.pop(f"tiny/{mode}/fused") == {64: "ok", 128: "ok", 256: "ok"}
        assert states.pop(f"tiny/{mode}/chunked") == {64: "ok", 128: "oom", 256: "skipped"}
    assert not states
    assert Worker.started == 4  # a new process takes the place of the one without memory
    ran = [r for r in rows if (r["variant"], r["phase"]) == ("tiny/slide/fused", "seq/128")]
    assert [r["value"] for r in ran if r["metric"] == "wall_ms"] == [128.0, 128.0]
    metrics = {"allocated_gib", "reserved_gib", "host_gib", "predicted_ms", "predicted_allocated_gib"}
    assert metrics <= {r["metric"] for r in ran}
    without = {r["metric"] for r in rows if (r["variant"], r["phase"]) == ("tiny/gpu/chunked", "seq/128")}
    assert "predicted_ms" in without and "wall_ms" not in without


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"vram": 2**10}, "on the device"), ({"host": "1MiB"}, "on the host"), ({"longest": 1e-6}, "0 s"),
        ({"within": 0.0}, "no time left"),
        ({"workspace": "1MiB", "heads": ["fused"], "device": "cuda"}, "64: skipped, "),
    ],
)  # fmt: skip
def test_what_is_predicted_to_be_too_much_or_cannot_be_predicted_is_skipped(capsys, limit, why):
    _, states = measured(**limit)
    assert {state for own in states.values() for state in own.values()} == {"skipped"}
    assert Worker.started == 0 and why in capsys.readouterr().out


@pytest.mark.parametrize(("error", "state"), [(VariantFailed("no kernel"), "failed"), (T1Error("no host"), "skipped")])
def test_what_fails_is_a_row_and_the_others_go_on(capsys, monkeypatch, error, state):
    monkeypatch.setattr(Worker, "error", error)
    _, states = measured(heads=["fused"])
    assert states["tiny/gpu/fused"] == {64: "ok", 128: state, 256: "skipped"}
    assert states["tiny/slide/fused"] == {64: "ok", 128: "ok", 256: "ok"}
    assert f"tiny/gpu/fused 128: {state}, {error}" in capsys.readouterr().out


def test_the_point_to_try_runs_whatever_lengths_are_measured():
    """An error in a cell of which nothing is recorded would end a run that has measured all."""
    p = SimpleNamespace(**PARAMETERS | {"lengths": [64]})
    run_cells("frontier", "imports", "points", "try", p=p, records=Records(), machine=H200)


GIVEN = dict(
    dtype="float32", reference="float64", shapes=["A 256 4096 64", "B 8 30 4"], methods=["full"],
    compared=["64MiB", "32MiB"], tight=["B 8MiB", "M 4MiB"], steps=9, lr_warmup=2,
)  # fmt: skip


def selected(**changes) -> dict:
    return run_cells("cce", "imports", "plan", "cases", p=SimpleNamespace(**GIVEN | changes))


def test_each_case_is_measured_once_beside_what_it_changes_and_bars_bound_measured_ones():
    made = selected()
    a, b, m = ([prefix + variant for variant, prefix in made["cases"][shape]] for shape in "ABM")
    always = ["loss_full", "full", "fused-64MiB", "fused-32MiB"]
    assert b == [*always, "fused-8MiB", "fused-300MiB"] and m == [*always, "fused-4MiB", "fused-filter-64MiB"]
    assert a[:4] == always and a[-1] == "fused-filter-64MiB" and len(set(a)) == len(a)
    assert {"loss_fused-16MiB", "fused-none-160MiB"} < set(a)
    assert a.index("fused-512MiB") < a.index("fused-half-512MiB") < a.index("fused-softcap-512MiB")
    bars = [bar for bar in made["bars"] if bar["shape"] == "A"]
    assert len(bars) == 4 + 2 + 2 + len(made["OPTIONS"]) and len(made["OPTIONS"]) == 7
    assert all(bar["case"].items() <= made["cases"]["A"].items() for bar in bars)
    assert selected(shapes=["X 1 2 3"], tight=[])["bars"] == []


def test_a_ratio_just_beyond_its_bar_does_not_look_met():
    bar = {"shape": "A", "over": "three", "variant": "fused-1GiB", "workspace": "1GiB", "mib": 1.0, "ms": 1.0}
    found = [bar | {"limit": 1.06, "ratio": ratio} for ratio in (1.0634, 1.06, float("nan"))]
    run = SimpleNamespace(frame=Records().frame, table=lambda name, rows, text_columns: made.extend(rows))
    made, given = [], dict(TITLES={"three": ""}, OVER={"three": ""}, label=str, held_to=lambda frame: found)
    run_cells("cce", "imports", "table2", p=SimpleNamespace(**GIVEN), **given, run=run)
    assert [(row["ratio"], row["met"]) for row in made] == [("1.063", "no"), ("1.060", "yes"), ("–", "no")]


def test_in_bfloat16_fp8_is_measured_beside_the_same_without_it():
    made = selected(dtype="bfloat16", measure=False)
    assert made["fp8"] == ["fused-fp8-64MiB", "fused-fp8-32MiB", "fused-fp8-1GiB"] and not selected()["fp8"]
    for cases in made["cases"].values():
        for name in made["fp8"]:
            exact = cases[name.replace("-fp8", ""), ""]
            assert cases[name, ""] == Case("fused", exact.settings | {"tail": "fp8"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": []}, "shapes"), ({"shapes": ["A 1 2 3", "A 4 5 6"]}, "each name once"),
        ({"shapes": ["M 1 2 3"]}, "not M"), ({"shapes": ["A/1 1 2 3"]}, "bad shape 'A/1 1 2 3'"),
        ({"methods": ["fulll"]}, "unknown method 'fulll'"),
        ({"tight": ["8MiB"]}, "bad tight workspace '8MiB'"), ({"tight": ["A lots"]}, "bad size 'lots'"),
        ({"tight": ["Z 8MiB"]}, "unknown shape of a tight workspace: 'Z'"),
        ({"compared": []}, "compared is empty"), ({"compared": ["0"]}, "bad workspace '0'"),
        ({"lr_warmup": 9}, "lr_warmup=9; allowed: fewer than steps=9"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(changes, message):
    refused(partial(selected, **changes), message)


@pytest.mark.parametrize("profile", sorted(path.name for path in (NOTEBOOKS.parent / "params").iterdir()))
def test_cce_takes_the_model_that_convergence_trains(profile, monkeypatch):
    monkeypatch.setenv("T1_ROOT", str(NOTEBOOKS.parent))
    made = {}
    for name, cell in (("convergence", "variants"), ("cce", "train")):
        p = SimpleNamespace(**params.resolve(name, profile) | {"measure": False})
        made |= run_cells(name, "imports", cell, p=p)
    assert made["trained"] == made["variants"]["fused-gpu"]
    assert ("fp8-gpu" in made["variants"]) == (made["p"].dtype == "bfloat16") and "fp8-gpu" not in made["exact"]


SIZES = dict(tokens=48, vocabulary=300, hidden=16)
FULL, ALONE = Case("full"), Case("full", gradients=False)


def test_workspaces_come_from_a_process_of_each_method_and_a_shape_that_does_not_fit_leaves_the_others():
    records, p = Records(), SimpleNamespace(**GIVEN, processes=1, seed=0, measure=True)
    methods = {("full", "loss_"): ALONE, ("full", ""): FULL, ("cce", ""): Case("cce")}
    made = dict(cases={"large": {("full", ""): FULL}, "A": methods, "M": {}}, small=SIZES, records=records, p=p)
    made["sizes"] = {"large": SIZES | {"tokens": 2**55}, "A": SIZES}
    run_cells("cce", "imports", "workspaces", **made)
    found = {(row["variant"], row["phase"], row["metric"]): row["value"] for row in records.rows}
    assert found["full", "workspace/large", "status"] == "oom"
    whole, loss = (found["full", "workspace/A", f"{prefix}workspace_mib"] for prefix in ("", "loss_"))
    assert whole > loss > SIZES["tokens"] * SIZES["vocabulary"] * 4 / 2**20
    assert torch.cuda.is_available() or found["cce", "workspace/A", "status"] == "unavailable"
    assert not active_children()


def test_sparsity_counts_what_it_says():
    # Two tokens, 512 columns: one is sure of column 3, the other nearly even but for its target, column 400.
    w = torch.zeros(512, 2)
    w[3, 0] = 50.0
    e, y = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([3, 400])
    sparsity = run_cells("cce", "imports", "sparsity", p=SimpleNamespace(**GIVEN, measure=False))["sparsity"]
    by_rank, facts = sparsity(e, w, y, eps=0.01)
    assert min(by_rank) == 1 and max(by_rank) == 512 and by_rank[1] == pytest.approx((1 + 1 / 512) / 2)
    assert facts["mass_below"] == pytest.approx(0.5, abs=1e-3)
    assert facts["entries_below"] == pytest.approx(1023 / 1024)
    assert facts["tiles"] == 0.5 and facts["tiles_sorted"] == 0.5  # only the tile with column 400 has an entry


def test_padding_leaks_into_no_gradient_and_a_head_that_multiplies_it_in_is_found(monkeypatch):
    records, heads = Records(), {"full": FULL, "chunked": Case("chunked"), "fused": Case("fused")}
    reduced = {(n, r): Case(n, options={"reduction": r}) for n in heads for r in ("mean", "sum", "none")}
    given = SimpleNamespace(**SIZES, sequences=2, workspace="1MiB", error_bound=1e-5, measure=False)
    made = run_cells("chunks", "imports", p=given, records=records)
    made |= {"heads": heads, "reduced": reduced, "layer": HeadBench(**SIZES, dtype="float32", device="cpu")}
    given.measure = True
    assert run_cells("chunks", "padding", **made)["right"] == dict.fromkeys(heads, True)
    found = {row["metric"]: row["value"] for row in records.rows if row["metric"] != "status"}
    assert {name.partition("_")[0] for name in found} == {"leaks", "padded", "weighted", "error"}
    assert max(row["value"] for row in records.rows if row["metric"] == "leaks") == 0
    monkeypatch.setattr("t1lib.measure.heads.IGNORED", 0)  # as if an ignored token had target 0
    made |= {"records": Records(), "reduced": {("full", "sum"): reduced["full", "sum"]}}
    assert not run_cells("chunks", "padding", **made)["right"]["full"]
    found = {row["metric"]: row["value"] for row in made["records"].rows}
    assert found["leaks"] >= 24 and found["padded_dW"] > 0.1 and found["weighted_dW"] < 1e-5


@pytest.mark.parametrize(
    ("notebook", "cell", "changed", "told"),
    [
        ("t1m3", "imports", {"fused_workspace": "300"}, "bad size '300'; allowed: 1048576 to 2**60 bytes"),  # no unit
        ("chunks", "imports", {"workspace": "300"}, "bad size '300'"),
        ("parallel", "expect", {"workspace": "0"}, "bad size '0'"),
        ("parallel", "imports", {"ranks": [1, 5], "vocabulary": 4}, "ranks=[1, 5]; allowed: at most vocabulary=4"),
        ("frontier", "imports", {"workspace": "0"}, "bad size '0'"),
        ("t1m1", "imports", {"workspace": "0"}, "bad size '0'"),
        ("t1m1", "imports", {"clipped_budget": "much"}, "bad size 'much'"),
        ("t1m1", "imports", {"budgets": ["3MiB", "4"]}, "bad size '4'"),
        ("t1m1", "imports", {"capacity": ["tiny"]}, "bad capacity 'tiny'; allowed: model, budget, layout"),
        ("t1m1", "imports", {"capacity": ["tiny 4MiB splitt"]}, "Did you mean 'split'?"),
        ("t1m1", "imports", {"capacity": ["tinny 4MiB split"]}, "Did you mean 'tiny'?"),
        ("t1m1", "imports", {"parity_batch": 3}, "parity_batch is 3; allowed: an even number"),
        ("t1m1", "imports", {"token_counts": [32, 100]}, "token_counts has 100; allowed: at most token_seq=64, or"),
        ("frontier", "imports", {"lengths": [256, 64]}, "lengths=[256, 64]; allowed: ascending"),
        ("frontier", "imports", {"budgets": []}, "no budget is given"),
        ("convergence", "imports", {"lr_warmup": 30}, "lr_warmup=30; allowed: fewer than steps=30"),
    ],
)
def test_a_bad_parameter_is_refused_before_anything_is_measured(notebook, cell, changed, told):
    p = SimpleNamespace(**(run_cells(notebook, "parameters") | {"measure": False} | changed))
    refused(partial(run_cells, notebook, *{"imports", cell}, p=p), told)


def test_t1m3_gives_a_head_no_time_whose_last_error_is_nan():
    p = SimpleNamespace(chunks=2, fused_workspace="1MiB", dtype="float16", error_bound=0.02, warmup=0, seed=0)
    p.head_iters, p.measure, records = 1, False, Records()
    made = run_cells("t1m3", "imports", "head", p=p, records=records, **SIZES)
    answers = {"errors": {"error_loss": 0.0, "error_dE": 0.0, "error_dW": float("nan")}}
    answers |= {"memory": {"workspace": 0}, "times": {"both": 1.0}, "products": {"dW": 1.0}}
    list(made["measure_head"]("fused", lambda method, **case: answers[method]))
    assert [row["value"] for row in records.rows if row["metric"] == "status"] == ["wrong"]
    assert not [row for row in records.rows if row["unit"] == "ms"]


def test_ranks_whose_loss_is_nan_are_not_as_near_as_the_steps_before():
    records = Records()
    for ranks, last in ((1, 3.0), (2, float("nan"))):
        for step, loss in enumerate((4.0, last)):
            records.put("fsdp", f"losses/{ranks}", {"loss": loss}, step)
    p = SimpleNamespace(heads=["fused"], limit=60.0, ranks=[1], step_ranks=[1, 2], vocabulary=8)
    found = run_cells("parallel", "imports", "reading-steps", p=p)["largest_difference"](records.frame())
    assert found[1] == 0 and found.isna()[2]
