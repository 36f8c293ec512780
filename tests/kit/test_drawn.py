"""What the notebooks draw where a variant was out of memory."""

import shutil

import pytest

from t1lib import paths
from t1lib.files import write_signed
from t1lib.kit.redraw import run_cells
from t1lib.kit.run import Run
from t1lib.measure import manifest
from t1lib.measure.records import Records

SLOW = pytest.mark.slow
VARIANTS = [  # of an experiment, and the column of table1 that names them
    pytest.param("cce", "head", ("full", "torch", "chunked", "fused-32MiB"), marks=SLOW),
    pytest.param("chunks", "head", ("full", "chunked", "chunked-vocabulary", "fused"), marks=SLOW),
    pytest.param("t1m1", "mode", ("gpu", "ckpt", "slide"), marks=SLOW),
    ("t1m3", "head", ("full", "chunked", "chunked-vocabulary", "fused", "torch")),
]


def out_of_memory(folder, variants):
    """The run as it would be if the variants had run out of memory before their first step."""
    frame, records = Records.load(folder / "samples.csv").frame(), Records()
    records.extend(frame[~frame["variant"].isin(variants)].to_dict("records"))
    for phase in sorted(set(frame[frame["metric"] == "status"]["phase"])):
        for variant in variants:
            records.status(variant, "oom", phase)
    records.save(folder / "samples.csv")
    content = manifest.read(folder)
    content["files"]["samples.csv"] = manifest._entry(folder / "samples.csv")
    write_signed(folder / manifest.NAME, content)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # of empty legends, of means of nothing
@pytest.mark.parametrize(("experiment", "column", "variants"), VARIANTS)
def test_a_variant_out_of_memory_is_a_row_and_no_traceback(
    smoke_run, tmp_path, monkeypatch, experiment, column, variants
):
    root = tmp_path / "kit"
    monkeypatch.setenv("T1_ROOT", str(root))
    make = Run.table
    for gone in (variants[:1], variants):
        made = smoke_run(experiment)
        for name in ("docs", "notebooks", "params", f"outputs/smoke/{experiment}"):
            shutil.copytree(made / name, root / name, dirs_exist_ok=True)
        out_of_memory(paths.outputs("smoke", experiment), gone)
        tables = {}
        monkeypatch.setattr(Run, "table", lambda run, name, *rest, tables=tables, **more: tables.setdefault(
            name, make(run, name, *rest, **more)))  # fmt: skip
        run_cells("smoke", experiment, tmp_path / "drawn")
        first = tables["table1"].set_index(column)
        assert {name for name, state in first["status"].items() if state == "oom"} == set(gone)
