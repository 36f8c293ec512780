"""Which cases the cells of the notebook `cce` select for its lists, and the error for a wrong entry."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from t1lib import params
from t1lib.errors import T1Error

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks/cce.ipynb"
GIVEN = dict(
    dtype="float32", reference="float64", shapes=["A 256 4096 64", "B 8 30 4"], methods=["full"],
    compared=["64MiB", "32MiB"], tight=["B 8MiB", "M 4MiB"],
)  # fmt: skip


def selected(**changes):
    """What the cells have made."""
    made = {"p": SimpleNamespace(**GIVEN | changes)}
    for cell in params.read_notebook(NOTEBOOK)["cells"]:
        if cell["id"] in ("imports", "plan", "cases"):
            exec(compile(params.source(cell), cell["id"], "exec"), made)
    return made


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": []}, "shapes"), ({"shapes": ["A 1 2 3", "A 4 5 6"]}, "each name once"),
        ({"shapes": ["M 1 2 3"]}, "not M"), ({"shapes": ["A 1 2 0"]}, "bad shape 'A 1 2 0'"),
        ({"shapes": ["A/1 1 2 3"]}, "bad shape"), ({"methods": ["fulll"]}, "unknown method 'fulll'"),
        ({"tight": ["8MiB"]}, "bad tight workspace '8MiB'"), ({"tight": ["A lots"]}, "bad size 'lots'"),
        ({"tight": ["Z 8MiB"]}, "unknown shape of a tight workspace: 'Z'"),
        ({"compared": []}, "compared is empty"), ({"compared": ["0"]}, "bad workspace '0'"),
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(changes, message):
    with pytest.raises(T1Error, match=message):
        selected(**changes)
